"""A diff in a copy of a package: what is installed stays as it is, and one that does not fit says where."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Patch
from overlap_bench.harness.plan.patch import read_patch
from overlap_bench.harness.run import patched as run_patched
from overlap_bench.harness.run.patched import Patches, patched
from tests.support.made_blocks import manifest
from tests.support.repositories import commit, git

SOURCE = "".join(f"line{number} = {number}\n" for number in range(20))
DIFF = """diff --git a/tests/test_pool.py b/tests/test_pool.py
--- a/tests/test_pool.py
+++ b/tests/test_pool.py
@@ -1 +1 @@
-not installed
+here
diff --git a/engine/core/pool.py b/engine/core/pool.py
--- a/engine/core/pool.py
+++ b/engine/core/pool.py
@@ -9,3 +9,3 @@
 line8 = 8
-line9 = 9
+line9 = "changed"
 line10 = 10
diff --git a/engine/core/new.py b/engine/core/new.py
new file mode 100644
--- /dev/null
+++ b/engine/core/new.py
@@ -0,0 +1 @@
+here = True
diff --git a/engine/old.py b/engine/old.py
deleted file mode 100644
--- a/engine/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone = True
"""
REMOVED = DIFF[DIFF.index("diff --git a/engine/old.py") :]
INSTALLED = ("engine/__init__.py", "engine/old.py", "engine/core/__init__.py", "engine/core/pool.py")
Commits = Sequence[Mapping[str, str | None]]  # each by its files; None: it removes this one
EDITED = {"engine/core/pool.py": SOURCE.replace("line9 = 9", "line9 = 99")}
MOVED = {"engine/core/pool.py": None, "engine/core/pond.py": EDITED["engine/core/pool.py"]}
OUT = {"engine/core/pool.py": None, "elsewhere/pool.py": EDITED["engine/core/pool.py"]}
SERIES = ("format-patch", "--stdout", "base..")
LOG = ("log", "-p", "--reverse", "base..")
WHOLE = ("diff", "base..")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "engine"
    (package / "core" / "__pycache__").mkdir(parents=True)
    (package / ".git").mkdir()  # of who works on the package itself
    for name, text in {
        "__init__.py": "", "old.py": "gone = True\n", "data.json": "{}", "core/__init__.py": "",
        "core/pool.py": SOURCE, "core/__pycache__/pool.cpython-311.pyc": "stale",
        "core/__pycache__/other.cpython-311.pyc": "kept",
    }.items():  # fmt: skip
        (package / name).write_text(text)
    return package


def written(checkout: Path, commits: Commits, asked: Sequence[str]) -> str:
    """What git writes of these commits on what is installed."""
    base = {each: (checkout.parent / "site" / each).read_bytes() for each in INSTALLED}
    commit(checkout, {**base, "elsewhere/tool.py": SOURCE, "README.md": "read\n"}, "base")
    for number, files in enumerate(commits):
        for each in (name for name, content in files.items() if content is None):
            (checkout / each).unlink()
        commit(checkout, {name: each for name, each in files.items() if each is not None}, f"number-{number}")
    return git(checkout, *asked)


def made(tmp_path: Path, text: str = DIFF) -> Patch:
    (tmp_path / "change.diff").write_text(text)
    return read_patch(str(tmp_path / "change.diff"), ["engine"])


def arm_of(tmp_path: Path, **more: Any) -> Arm:
    plain = manifest().design.arms[0]
    return replace(plain, name="after", patch=made(tmp_path), **more)


def first(patches: Patches, arm: Arm) -> list[str]:
    """Where the arm looks first."""
    assert arm.patch is not None
    return patches.find_first(arm, arm.patch).env["PYTHONPATH"].split(os.pathsep)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_the_copy_is_changed_and_what_is_installed_is_not(tmp_path: Path, installed: Path) -> None:
    before = contents(installed)
    copy = patched(made(tmp_path), {"engine": installed}, tmp_path / "copy") / "engine"
    assert contents(installed) == before
    assert 'line9 = "changed"' in (copy / "core" / "pool.py").read_text()
    assert (copy / "core" / "new.py").read_text() == "here = True\n"
    assert not (copy / "old.py").exists()
    assert not (copy / ".git").exists()
    assert (copy / "data.json").is_symlink()
    assert not (copy / "core").is_symlink()  # or what is compiled in it would be written to the installed one
    assert sorted(each.name for each in (copy / "core" / "__pycache__").iterdir()) == [
        "other.cpython-311.pyc"
    ]
    code = "import engine.core.pool as pool, engine.core.new as new; print(pool.line9, new.here)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{copy.parent}{os.pathsep}{installed.parent}", "PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.stdout == "changed True\n", done.stderr
    assert contents(installed) == before


def test_a_module_by_itself_is_changed_in_a_copy_too(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    module = tmp_path / "site" / "engine.py"
    module.write_text("STEP = 1\n")
    text = "--- a/engine.py\n+++ b/engine.py\n@@ -1 +1 @@\n-STEP = 1\n+STEP = 2\n"
    copy = patched(made(tmp_path, text), {"engine": module}, tmp_path / "copy")
    assert (copy / "engine.py").read_text() == "STEP = 2\n"
    assert module.read_text() == "STEP = 1\n"
    with pytest.raises(api.BadSetting, match=r"does not apply to .*engine.py: engine.py:1;"):
        patched(made(tmp_path, text.replace("STEP = 1", "STEP = 3")), {"engine": module}, tmp_path / "other")


def test_a_diff_within_another_repository_is_applied_too(tmp_path: Path, installed: Path) -> None:
    """git passes over files outside of the folder that it is started in, and says nothing."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    copy = patched(made(tmp_path), {"engine": installed}, tmp_path / "copy")
    assert "changed" in (copy / "engine" / "core" / "pool.py").read_text()


@pytest.mark.parametrize(
    ("commits", "asked"),
    [
        ((EDITED, MOVED), SERIES),
        ((EDITED, MOVED), LOG),
        ((EDITED, {"engine/core/pool.py": None}), SERIES),
        (({"engine/new.py": SOURCE}, {"engine/new.py": None, "engine/newer.py": SOURCE}), SERIES),
        (({**MOVED, "engine/old.py": "gone = False\n"},), (*WHOLE, "--no-prefix")),
        (({"engine/sub/__init__.py": "", "engine/table.bin": "\0"},),
         (*WHOLE, "--binary", "--src-prefix=i/", "--dst-prefix=w/")),
        (({"engine/E=1,block=[128,128].json": "{}\n", "engine/ä.py": "here = True\n"},), WHOLE),
    ],
)  # fmt: skip
def test_what_git_writes_of_commits_makes_what_they_make(
    tmp_path: Path, installed: Path, commits: Commits, asked: Sequence[str]
) -> None:
    checkout = tmp_path / "checkout"
    patch = made(tmp_path, written(checkout, commits, asked))
    copy = contents(patched(patch, {"engine": installed}, tmp_path / "copy") / "engine")
    expected = contents(checkout / "engine")
    assert {name: copy.get(name) for name in expected} == expected
    assert not (copy.keys() - expected.keys()) & {each.removeprefix("engine/") for each in patch.files}


def test_commits_that_are_there_already_are_told_as_one(tmp_path: Path, installed: Path) -> None:
    checkout = tmp_path / "checkout"
    patch = made(tmp_path, written(checkout, (EDITED, MOVED), SERIES))
    with pytest.raises(api.BadSetting, match="already; to measure it"):
        patched(patch, {"engine": checkout / "engine"}, tmp_path / "copy")


def test_a_file_beside_the_source_folder_does_not_matter(tmp_path: Path, installed: Path) -> None:
    text = written(tmp_path / "checkout", ({**EDITED, "README.md": "read it\n"},), WHOLE)
    patch = made(tmp_path, text.replace("/engine/", "/python/engine/"))
    copy = patched(patch, {"engine": installed}, tmp_path / "copy")
    assert "line9 = 99" in (copy / "engine" / "core" / "pool.py").read_text()


@pytest.mark.parametrize(
    ("commits", "asked", "why"),
    [
        (({**OUT, "engine/old.py": "gone = False\n"},), WHOLE, "over engine/core/pool.py, .*--no-renames"),
        ((EDITED, OUT), SERIES, "over engine/core/pool.py"),
        ((EDITED, OUT), (*LOG, "--format="), "over engine/core/pool.py"),
        ((EDITED,), (*WHOLE, "--relative=engine", "--src-prefix=engine/", "--dst-prefix=mine/"),
         "in place of diff -ru"),
        (({"elsewhere/tool.py": None, "engine/tool.py": SOURCE},), WHOLE, "elsewhere/tool.py: No such file"),
    ],
)  # fmt: skip
def test_what_git_passes_over_is_refused(
    tmp_path: Path, installed: Path, commits: Commits, asked: Sequence[str], why: str
) -> None:
    """It says nothing of it, and ends with 0: where it applies a diff, and where it takes one back."""
    patch = made(tmp_path, written(tmp_path / "checkout", commits, asked))
    with pytest.raises(api.BadSetting, match=f"does not apply to .*{why}"):
        patched(patch, {"engine": installed}, tmp_path / "copy")


def test_nothing_is_written_through_a_link(tmp_path: Path, installed: Path) -> None:
    """A link of a folder, or of a file that git names otherwise than the diff seems to."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pool.py").write_text(SOURCE)
    (installed / "linked").symlink_to(tmp_path / "other")
    before = contents(tmp_path)
    dated = "engine/core/pool.py 2026-01-01 10:00:00.000000000 +0000"
    hunk = DIFF[DIFF.index("@@ -9,3") : DIFF.index("diff --git a/engine/core/new.py")]
    for number, text in enumerate((
        DIFF.replace("core/pool.py", "linked/pool.py"),
        f"--- {dated}\n+++ {dated}\n{hunk}",
    )):  # fmt: skip
        patch = made(tmp_path, text)
        with pytest.raises(api.BadSetting, match="does not apply"):
            patched(patch, {"engine": installed}, tmp_path / f"copy-{number}")
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before


def test_what_does_not_apply_is_refused_with_its_place(tmp_path: Path, installed: Path) -> None:
    for number, (text, why) in enumerate((
        (DIFF.replace("line10 = 10", "line10 = 11"), r"does not apply to .*: engine/core/pool.py:9;"),
        (DIFF.replace("core/pool.py", "core/pond.py"), r"engine/core/pond.py: No such file"),
        (DIFF.replace("@@ -9,3 +9,3 @@", "@@ -9,4 +9,4 @@"), "corrupt patch at .*15;"),
        (f"{REMOVED}From {'0' * 40}\n{DIFF.replace('-9,3', '-9,4')}", "corrupt patch at .*22;"),
    )):  # fmt: skip
        with pytest.raises(api.BadSetting, match=why) as refused:
            patched(made(tmp_path, text), {"engine": installed}, tmp_path / f"copy-{number}")
        assert "patch does not apply" not in str(refused.value)  # which its places say already


def test_a_change_that_is_there_already_says_how_to_measure_it(tmp_path: Path, installed: Path) -> None:
    (installed / "core" / "pool.py").write_text(SOURCE.replace("line9 = 9", 'line9 = "changed"'))
    (installed / "core" / "new.py").write_text("here = True\n")
    (installed / "old.py").unlink()
    with pytest.raises(api.BadSetting, match="already; to measure it"):
        patched(made(tmp_path), {"engine": installed}, tmp_path / "copy")


def test_an_arm_finds_its_copy_first_and_only_once_it_is_made(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter([installed, tmp_path / "patched-0" / "engine", tmp_path / "patched-0" / "engine"])
    monkeypatch.setattr(run_patched, "located", lambda arm, names: {"engine": next(places)})
    arm = arm_of(tmp_path, env={"PYTHONPATH": "/mine"})
    patches = Patches(tmp_path)
    copy, *others = first(patches, arm)
    assert others == ["/mine"]
    assert "changed" in Path(copy, "engine", "core", "pool.py").read_text()
    assert first(patches, arm) == [copy, "/mine"]
    with pytest.raises(api.BadSetting, match="/no/such/python"):
        first(patches, replace(arm, name="other", python="/no/such/python"))
    monkeypatch.setattr(run_patched, "located", lambda arm, names: {})
    with pytest.raises(api.BadSetting, match="has no engine, which patch="):
        first(Patches(tmp_path), arm)


def test_an_arm_with_a_diff_finds_all_else_where_the_other_arm_does(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the path that this process was given."""
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    assert first(Patches(tmp_path), arm_of(tmp_path))[1:] == [str(installed.parent)]


def test_an_arm_that_would_run_another_copy_is_refused(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server does in the folder of its own package: it finds what is there first."""
    monkeypatch.chdir(installed.parent)
    arm = arm_of(tmp_path)
    arm = replace(arm, toggles={**arm.toggles, "cmd": f"{sys.executable} -m engine --port {{port}}"})
    with pytest.raises(api.BadSetting, match=r"after would run engine without patch=.* finds .*site/engine"):
        first(Patches(tmp_path), arm)


def test_files_of_a_diff_that_have_no_text_are_made_too(tmp_path: Path, installed: Path) -> None:
    name = "engine/sub/__init__.py"
    empty = f"diff --git a/{name} b/{name}\nnew file mode 100644\nindex 0000000..e69de29\n"
    copy = patched(made(tmp_path, empty + DIFF), {"engine": installed}, tmp_path / "copy")
    assert (copy / "engine" / "sub" / "__init__.py").read_bytes() == b""


def test_a_diff_of_a_file_of_windows_keeps_the_ends_of_its_lines(tmp_path: Path, installed: Path) -> None:
    (installed / "core" / "pool.py").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    hunk = DIFF[DIFF.index("@@ -9,3") : DIFF.index("diff --git a/engine/core/new.py")]
    head, *lines = hunk.splitlines()
    ended = "\n".join([head, *(f"{line}\r" for line in lines), ""])
    (tmp_path / "change.diff").write_bytes(DIFF.replace(hunk, ended).encode())
    found = read_patch(str(tmp_path / "change.diff"), ["engine"])
    copy = patched(found, {"engine": installed}, tmp_path / "copy")
    assert b'line9 = "changed"\r\n' in (copy / "engine" / "core" / "pool.py").read_bytes()
