"""A signal that comes when a process is there, and nobody has been told of it."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signalled_at_each_start(
    monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> list[subprocess.Popen[bytes]]:
    """From now on; the processes that start."""
    began: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def signalled(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        began.append(real(*arguments, **named))
        signal.raise_signal(by)
        return began[-1]

    monkeypatch.setattr(subprocess, "Popen", signalled)
    return began
