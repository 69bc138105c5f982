"""A server that an experiment asks: a process of its own, up for as long as the block lasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[str]:
    """Its address, which it prints when it is up. It must end well when it is told to."""
    command = [sys.executable, "-m", module, *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
    assert server.returncode == 0, f"{module} ended with {server.returncode}"
