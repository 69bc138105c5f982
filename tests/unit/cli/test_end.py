"""How the process of a command ends."""

import gc
import sys

import pytest

from overlap_bench.harness.__main__ import main


def test_a_command_ends_without_a_last_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    own = gc.get_freeze_count()  # Python 3.12 begins with some of its own
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    try:
        with pytest.raises(SystemExit):
            main()
        assert gc.get_freeze_count() > own
    finally:
        gc.unfreeze()
