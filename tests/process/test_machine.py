"""Which code a run says it was made by."""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from overlap_bench.harness.common import machine
from tests.support.repositories import commit, fingerprint


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of its own that holds this module and a file beside it."""
    files: dict[str, str | bytes] = dict.fromkeys(("harness/other.py", "experiments/one.py"), "first\n")
    files["harness/common/machine.py"] = Path(machine.__file__).read_bytes()
    files[".gitignore"] = "__pycache__/\n"  # which importing the module makes
    commit(tmp_path, files, "first")
    return tmp_path


def of(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "checked_out", checkout / "harness" / "common" / "machine.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_that_differs_from_its_commit_says_so(checkout: Path) -> None:
    found = of(checkout)
    clean = found.code()
    assert len(clean.commit) == 40
    assert not clean.dirty
    (checkout / "harness" / "other.py").write_text("second\n")
    changed = found.code()
    assert changed.commit == clean.commit
    assert changed.dirty
    seen = {clean.changes, changed.changes}
    for text in ("first\n", "second\n"):  # in a file that git does not know yet
        (checkout / "harness" / "new.py").write_text(text)
        seen.add(found.code().changes)
    assert len(seen) == 4


def test_an_installation_inside_of_somebodys_repository_has_no_commit(checkout: Path) -> None:
    site = checkout / "venv" / "site-packages"
    (site / "harness" / "common").mkdir(parents=True)
    shutil.copy(machine.__file__, site / "harness" / "common" / "machine.py")
    assert of(site).code().commit == ""


def test_what_an_experiment_is_made_by_counts_for_its_result_alone(checkout: Path) -> None:
    found = of(checkout)
    (checkout / "experiments" / "one.py").write_text("second\n")
    assert not found.code().dirty
    assert found.code(besides=("experiments",)).dirty


def test_looking_at_the_code_writes_nothing(checkout: Path) -> None:
    """As `git diff` does where a file was touched: it refreshes the index."""
    found = of(checkout)
    os.utime(checkout / "harness" / "other.py", ns=(1, 1))
    before = fingerprint(checkout / ".git")
    assert not found.code().dirty
    assert fingerprint(checkout / ".git") == before
