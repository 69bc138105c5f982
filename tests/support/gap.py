"""A signal that comes when a process is there, and nobody has been told of it."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signalled_at_each_start(
    monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Inside; the processes that start. The signal is taken as in a fresh process: a test before this one, in
    the same worker, may have left a handler, as Ray does."""
    began: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def signalled(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        began.append(real(*arguments, **named))
        signal.raise_signal(by)
        return began[-1]

    fresh = signal.default_int_handler if by == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(by, fresh)
    monkeypatch.setattr(subprocess, "Popen", signalled)
    try:
        yield began
    finally:
        signal.signal(by, before)
