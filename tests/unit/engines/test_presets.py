"""What is said of a model that can't be had."""

from __future__ import annotations

from overlap_bench.engines.api import first_line


def test_of_a_librarys_error_no_more_is_told_than_anybody_reads() -> None:
    assert first_line(OSError("can't load it.\nTry this.\nOr that.")) == "can't load it"
    assert len(first_line(OSError("a" * 5000))) == 1000
