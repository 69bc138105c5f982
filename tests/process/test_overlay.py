"""What a build made, laid over the trees of refs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.run import hosts, overlay
from tests.support.made_blocks import manifest
from tests.support.repositories import commit, files, fingerprint


@pytest.mark.parametrize("inside", ["", "src/"])
def test_what_an_installation_built_and_git_ignores_is_laid_over_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """What a later version has besides is none of it."""
    repository, tree, site = (tmp_path / name for name in ("repository", "tree", "site"))
    own = {
        f"{inside}served/__init__.py": "",
        f"{inside}served/core.py": "1",
        ".gitignore": "*.so\n_version.py\n",
    }
    where = Ref(repository=str(repository), name="own", commit=commit(repository, own, "own"))
    for folder, content in ((tree, own), (site, {"served/__init__.py": "", "served/core.py": "2"})):
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    for name in ("_C.so", "_version.py", "later.py", "flash/_C.so", "__pycache__/core.so"):
        (site / "served" / name).parent.mkdir(exist_ok=True)
        (site / "served" / name).write_text(name)
    before = fingerprint(repository), fingerprint(site)
    spec = SimpleNamespace(packages=("served", "ours.engines"), build="ours.engines.served:build")
    monkeypatch.setattr(overlay, "spec_of", lambda arm: spec)
    arm = Arm(
        name="good", engine="e", options=api.EngineOptions(), toggles={}, python=sys.executable, ref=where,
        env={"PYTHONPATH": str(site)},
    )  # fmt: skip
    overlay.lay_installed(arm, tree)
    laid = set(files(tree)) - {*own}
    assert laid == {f"{inside}served/{name}" for name in ("_C.so", "_version.py", "flash/_C.so")}
    assert (tree / inside / "served" / "core.py").read_text() == "1"
    assert (fingerprint(repository), fingerprint(site)) == before


def test_the_tree_of_a_further_arm_gets_the_same_files(tmp_path: Path) -> None:
    """`bench bisect` lays them over good and bad, and later over each commit between."""
    first = commit(tmp_path, {"served.py": "1"}, "first")
    for name in ("b.so", "a.so"):
        (tmp_path / name).write_text(name)
    good, bad, other = (
        Arm(
            name=name, engine="overlap", options=api.EngineOptions(), toggles={},
            ref=Ref(repository=str(tmp_path), name="first", commit=first),
        )
        for name in ("good", "bad", "other")
    )  # fmt: skip
    design = msgspec.structs.replace(manifest().design, arms=(good, bad), overlay=("b.so", "*.so"))
    with overlay.checked_out(design) as both, overlay.checked_out(design, [other]) as further:
        assert [each.file for each in both.overlaid] == ["b.so", "a.so"]
        assert further.overlaid == both.overlaid
        assert (further.places["other"] / "a.so").read_text() == "a.so"


def test_an_engine_whose_own_package_is_in_the_tree_drives_none(tmp_path: Path) -> None:
    for name in ("served", "overlap_bench/engines"):
        (tmp_path / name).mkdir(parents=True)
    own = SimpleNamespace(
        packages=("overlap_bench.engines", "served"), build="overlap_bench.engines.own:build"
    )
    assert hosts.driven(own, tmp_path) == [tmp_path / "served"]  # type: ignore[arg-type]
    assert hosts.driven(SimpleNamespace(packages=(), build="a:b"), tmp_path) == []  # type: ignore[arg-type]
