"""Where the processes of a run find their modules."""

import os
from pathlib import Path

import pytest

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.common import git
from overlap_bench.harness.run.hosts import environment
from tests.support.places import ROOT


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be asked which of its variables to leave out."""
    monkeypatch.setattr(git, "environment", lambda: dict(os.environ))


def path_of(**variables: str) -> list[str]:
    return environment(variables)["PYTHONPATH"].split(os.pathsep)


def test_a_project_comes_before_the_checkout_that_bench_runs_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    assert path_of() == ["theirs", str(ROOT)]
    assert path_of(PYTHONPATH="an/arms") == ["an/arms", str(ROOT)]
    (tmp_path / "src").mkdir()
    of_a_ref = environment({}, tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert of_a_ref == [str(tmp_path / "src"), str(tmp_path), "theirs", str(ROOT)]
    monkeypatch.delenv("PYTHONPATH")
    assert path_of() == [str(ROOT)]
    unpacked = tmp_path / "unpacked" / "overlap_bench"
    unpacked.mkdir(parents=True)
    for name in ("engines", "../pyproject.toml"):
        (unpacked / name).touch()
    monkeypatch.setattr(overlap_bench, "__file__", str(unpacked / "__init__.py"))
    assert "PYTHONPATH" not in environment({})


@pytest.mark.parametrize("name", ["overlap_bench.py", "overlap_bench/__init__.py"])
def test_a_project_with_a_package_called_overlap_bench_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(
        api.BadSetting, match=f"{name} takes the place of overlap-bench's own package: give it"
    ):
        environment({"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{tmp_path}"})
    with pytest.raises(api.BadSetting, match=rf"^{name} of the ref takes .* give it another name$"):
        environment({}, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.BadSetting, match=f"or leave {tmp_path} out of PYTHONPATH"):
        environment({"PYTHONPATH": os.pathsep})  # an empty place is the current folder
    environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})  # what is found first counts
