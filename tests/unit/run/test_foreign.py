"""Which files an arm may not have run, where it was to run the code of a ref."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Ref
from overlap_bench.harness.run import foreign, overlay
from overlap_bench.harness.run.foreign import loaded_from_elsewhere
from overlap_bench.harness.run.hosts import Trees
from overlap_bench.harness.run.watch import Seen
from overlap_bench.harness.store.manifest import Overlaid
from tests.support.made_blocks import manifest


def made(root: Path, *files: str) -> Path:
    for each in files:
        path = root / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{root.name}/{each}") if not each.endswith("/") else path.mkdir()
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return made(
        tmp_path / "tree",
        "pkg/__init__.py",
        "src/inner/__init__.py",
        "space/one/__init__.py",
        "mod.py",
        "types.py",
    )


@pytest.mark.parametrize(
    ("module", "file", "is_foreign"),
    [
        ("pkg", "tree/pkg/__init__.py", False),
        ("helper", "checkout/helper.py", True),  # in the tree's place, or not committed
        ("", "checkout/build/_C.so", True),
        ("lib", "checkout/lib/__init__.py", True),
        ("torch", "checkout/.venv/lib/python3.11/site-packages/torch/__init__.py", False),
        ("_virtualenv", "checkout/.venv/bin/thing.py", False),
        ("pkg.more", "site/pkg/more.py", True),
        ("inner", "site/inner/__init__.py", True),
        ("mod", "site/mod.py", True),
        ("space.one.deep", "site/space/one/deep.py", True),
        ("space.two", "site/space/two/__init__.py", False),  # another project's part of a namespace
        ("empty.x", "site/empty/x.py", True),  # a submodule that was not checked out
        ("types", "usr/lib/types.py", False),
        ("numpy", "site/numpy/__init__.py", False),
    ],
)
def test_files(tmp_path: Path, tree: Path, module: str, file: str, is_foreign: bool) -> None:
    (tree / "empty").mkdir()
    path = tmp_path / file
    seen = Seen(prefixes={str(tmp_path / "checkout" / ".venv")})
    if file.endswith(".so"):
        seen.compiled.add(str(path))
    else:
        seen.modules[str(path)] = module
    assert loaded_from_elsewhere(seen, tree, tmp_path / "checkout") == [path] * is_foreign


def test_this_harness_is_no_part_of_a_project_that_it_lies_in(tree: Path) -> None:
    seen = Seen(modules={str(foreign.OURS / "engines" / "host.py"): "overlap_bench.engines.host"})
    assert not loaded_from_elsewhere(seen, tree, foreign.OURS.parent)
    made(tree, "engines/__init__.py")
    assert loaded_from_elsewhere(seen, tree, foreign.OURS)


def gate(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A check of a gate whose before arm has a ref, and ran one file."""
    checkout = tmp_path / "checkout"
    design = manifest().design
    ref = Ref(repository=str(checkout), name="main", commit="abc")
    before = msgspec.structs.replace(design.arms[0], ref=ref)
    design = msgspec.structs.replace(design, arms=(before, design.arms[1]))
    monkeypatch.setattr(foreign, "ignored", lambda repository, path: path.name == "_version.py")
    foreign.check(design, Trees({"before": tree}, more.pop("overlaid", [])), more)


def test_python_from_elsewhere_is_refused_and_what_a_build_made_has_to_be_named(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*files: str) -> Seen:
        return Seen(modules={str(tmp_path / "checkout" / each): each for each in files})

    gate(tmp_path, tree, monkeypatch, before=ran(), after=ran("helper.py"))
    with pytest.raises(
        api.BadSetting, match=r"before was to run the code of main, and ran .*checkout/helper\.py\."
    ):
        gate(tmp_path, tree, monkeypatch, before=ran("helper.py", "_version.py"), after=ran())
    for made_by_build in ("_version.py", "_C.so"):
        with pytest.raises(
            api.BadSetting, match=f"main does not have: .*{made_by_build}.*--overlay '{made_by_build}'"
        ):
            gate(tmp_path, tree, monkeypatch, before=ran(made_by_build), after=ran())


def test_the_other_arm_runs_the_same_file_as_was_laid_over(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "checkout", "src/inner/_C.so")
    made(tmp_path / "site", "inner/_C.so")
    own, other = tmp_path / "checkout/src/inner/_C.so", tmp_path / "site/inner/_C.so"
    laid = [Overlaid(file="src/inner/_C.so", sha256=overlay.digest(own))]
    gate(tmp_path, tree, monkeypatch, overlaid=laid, before=Seen(), after=Seen(compiled={str(own)}))
    with pytest.raises(api.BadSetting, match=r"after ran .*site/inner/_C\.so, which is not the file of your"):
        gate(tmp_path, tree, monkeypatch, overlaid=laid, before=Seen(), after=Seen(compiled={str(other)}))


def test_an_overlay_is_laid_over_every_tree(tmp_path: Path, tree: Path) -> None:
    checkout = made(
        tmp_path / "checkout",
        *(
            "pkg/_C.so",
            "pkg/_version.py",
            "pkg/__init__.py",
            "mod.py",
            "half.py",
            "gen/a.py",
            "gen/deep/b.json",
        ),
        *(".venv/pyvenv.cfg", ".venv/lib/pkg/_C.so", "x/site-packages/_C.so"),
    )
    other = made(tmp_path / "other", "pkg/__init__.py", "mod.py", "half.py")
    ref = Ref(repository=str(checkout), name="main", commit="abc")
    arms = tuple(msgspec.structs.replace(arm, ref=ref) for arm in manifest().design.arms)

    def laid(*patterns: str) -> list[str]:
        design = msgspec.structs.replace(manifest().design, arms=arms, overlay=patterns)
        return sorted(each.file for each in overlay.lay(design, {"before": tree, "after": other}))

    assert laid("_C.so", "pkg/*", "gen/") == ["gen/a.py", "gen/deep/b.json", "pkg/_C.so", "pkg/_version.py"]
    for each in (tree, other):
        assert (each / "pkg/_C.so").read_text() == "checkout/pkg/_C.so"
        assert (each / "pkg/__init__.py").read_text() == f"{each.name}/pkg/__init__.py"
    for pattern, why in (
        ("nothing.so", "names no file of your checkout that the refs lack"),
        ("mod.py", "names no file of your checkout that the refs lack"),
        ("half.py", "which the ref of after has and the other has not"),
        ("../x", "must lead to files in the repository"),
        ("/etc/*", "must lead to files in the repository"),
    ):
        with pytest.raises(api.BadSetting, match=why):
            laid(pattern)
