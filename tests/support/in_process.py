"""`bench` in the test's own process: seconds less than in one of its own."""

from __future__ import annotations

import sys

import pytest

from harness.cli import app


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a `bench` run in this process."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    code = caught.value.code
    assert isinstance(code, int)
    return code
