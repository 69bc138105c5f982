"""What `bench doctor` finds of a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness import doctor


def test_every_check_finds_something_and_says_what_to_do_where_it_is_not_fine() -> None:
    found = doctor.examine()
    assert len({each.what for each in found}) == len(found)
    assert all(each.found for each in found)
    assert all(each.fine == (not each.remedy) for each in found)


@pytest.mark.parametrize("told_not_to", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_bytecode_that_each_boot_makes_anew_is_told_of(
    told_not_to: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    if compiled:
        monkeypatch.setattr(sys, "pycache_prefix", None)
        cached = package.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        cached.parent.mkdir()
        cached.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")  # which is what find_spec looks at first
    monkeypatch.setattr(sys, "dont_write_bytecode", told_not_to)
    assert doctor.bytecode().fine == (compiled or not told_not_to)
