"""What a diff changes, told from its text, and which are refused before anything starts."""

from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import SPEC as OPENAI
from overlap_bench.engines.overlap import SPEC as OVERLAP
from overlap_bench.engines.vllm import SPEC as VLLM
from overlap_bench.harness.plan.patch import patch_of, read_patch
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.store import trust

POOL = "vllm/v1/core/block_pool.py"
# A line of context that is empty, as editors leave it, and lines that begin as a file's name does.
HUNK = "@@ -1,3 +1,3 @@\n one\n\n--- a/vllm/not/a/file.py\n+++ b/vllm/nor/this.py\n"
RENAMED = "similarity index 100%\nrename from vllm/envs.py\nrename to vllm/vars.py\n"
EMPTY = "new file mode 100644\nindex 0000000..e69de29\n"
# Of a commit: git takes no line of it for a file's.
MESSAGE = "diff --git a/vllm/a.py b/vllm/a.py\n\n--- a/vllm/b.py\n+++ b/vllm/b.py\n\n@@ -1,9 +1,9 @@\n"
ONE_LINE = "@@ -1 +1 @@\n--- a/vllm/not/a/file.py\n+++ b/vllm/nor/this.py\n"


def diff(before: str, after: str) -> str:
    return f"--- {before}\n+++ {after}\n{HUNK}"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "change.diff"


@pytest.mark.parametrize(
    ("text", "strip", "files", "left_out"),
    [
        (diff(f"a/{POOL}", f"b/{POOL}"), 1, (POOL,), ()),
        (diff(POOL, POOL), 0, (POOL,), ()),
        (diff(f"vllm/{POOL}\t2026-01-01", f"head/{POOL}\t2026-01-02"), 1, (POOL,), ()),
        (diff(f"base/lib/{POOL}", f"head/lib/{POOL}"), 2, (POOL,), ()),
        (diff("/dev/null", "b/vllm/v1/new.py"), 1, ("vllm/v1/new.py",), ()),
        (diff("a/vllm/v1/old.py", "/dev/null"), 1, ("vllm/v1/old.py",), ()),
        (diff(f"a/{POOL}", f"b/{POOL}") * 2, 1, (POOL,), ()),
        (diff("a/tests/test_pool.py", "b/tests/test_pool.py") + diff(f"a/{POOL}", f"b/{POOL}"), 1, (POOL,),
         ("tests/test_pool.py",)),
        (diff("a/src/vllm.py", "b/src/vllm.py") + diff("a/setup.py", "b/setup.py"), 2, ("vllm.py",), ()),
        (f"--- a/{POOL}\n+++ b/{POOL}\n{ONE_LINE}", 1, (POOL,), ()),
        (diff(f"base/lib/{POOL}", f"head/lib/{POOL}") + diff("base/README.md", "head/README.md"), 2, (POOL,),
         ()),
        (f"diff --git a/vllm/envs.py b/vllm/vars.py\n{RENAMED}", 1, ("vllm/envs.py", "vllm/vars.py"), ()),
        (f"diff --git vllm/envs.py vllm/vars.py\n{RENAMED}{diff(POOL, POOL)}", 0,
         ("vllm/envs.py", "vllm/vars.py", POOL), ()),
        (f"diff --git vllm/a b.py vllm/a b.py\n{EMPTY}", 0, ("vllm/a b.py",), ()),
        (f"diff --git i/vllm/a b.py w/vllm/a b.py\r\n{EMPTY}", 1, ("vllm/a b.py",), ()),
        (f'diff --git "a/vllm/\\303\\244.py" "b/vllm/\\303\\244.py"\n{EMPTY}', 1, ("vllm/ä.py",), ()),
        (diff('"a/vllm/\\303\\244\\".py"', '"b/vllm/\\303\\244\\".py"'), 1, ('vllm/ä".py',), ()),
        (diff(f"{POOL}.orig", POOL), 0, (POOL,), ()),
        (diff("vllm/envs.py", "vllm.new/envs.py"), 0, ("vllm/envs.py",), ("vllm.new/envs.py",)),
        (f"{MESSAGE}{diff(f'a/{POOL}', f'b/{POOL}')}", 1, (POOL,), ()),
        (f"From 1 Mon\nSubject: a\n\n---\n a | 2 +-\n\n{diff(f'a/{POOL}', f'b/{POOL}')}", 1, (POOL,), ()),
    ],
)  # fmt: skip
def test_a_diff_names_the_files_of_the_package_that_it_changes(
    written: Path, text: str, strip: int, files: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    written.write_text(text)
    found = read_patch(str(written), ["vllm"])
    assert (found.strip, found.files, found.left_out, found.text) == (strip, files, left_out, text)


def test_what_is_no_diff_or_of_another_package_is_refused(written: Path) -> None:
    with pytest.raises(api.BadSetting, match="can't be read: No such file"):
        read_patch(str(written), ["vllm"])
    for content, why in (
        (b"", "is no unified diff"),
        (b"\xff\xfe", "it is no text"),
        (b"def schedule(): ...\n", "is no unified diff"),
        (diff("a/csrc/x.cu", "b/csrc/x.cu").encode(), "changes no file of vllm, but b/csrc/x.cu"),
        (diff("a/bin/vllm", "b/bin/vllm").encode(), "changes no file of vllm, but b/bin/vllm"),
        (diff("a/v1/core/block_pool.py", "b/v1/core/block_pool.py").encode(), "must lead from the folder"),
        (f"diff --cc {POOL}\nindex 1,2..3\n--- a/{POOL}\n+++ b/{POOL}\n@@@ -1 -1 +1 @@@\n".encode(),
         "is a combined diff, as git shows of a merge"),
        (f"Only in b/vllm: new.py\n{diff(f'a/{POOL}', f'b/{POOL}')}".encode(), "use diff -ruN, or git diff"),
    ):  # fmt: skip
        written.write_bytes(content)
        with pytest.raises(api.BadSetting, match=why):
            read_patch(str(written), ["vllm"])


def test_what_windows_writes_before_a_text_is_none_of_the_diff(written: Path) -> None:
    text = f"diff --git a/{POOL} b/{POOL}\ndeleted file mode 100644\nindex e69de29..0000000\n"
    written.write_text(text, encoding="utf-8-sig")
    assert read_patch(str(written), ["vllm"]).text == text


def test_the_packages_are_the_engines_or_those_of_its_command(written: Path) -> None:
    written.write_text(diff(f"a/{POOL}", f"b/{POOL}"))
    assert patch_of(str(written), VLLM, None, {}).files == (POOL,)
    for command in ("vllm serve --port {port}", "env A=1 /venv/bin/python -m vllm.entrypoints.api {port}"):
        assert patch_of(str(written), OPENAI, None, {"cmd": command}).files == (POOL,)
    written.write_text(diff("a/my_server/main.py", "b/my_server/main.py"))
    assert patch_of(str(written), OPENAI, None, {"cmd": "A=1 my-server {port}"}).files == (
        "my_server/main.py",
    )
    for spec, toggles, why in (
        (OVERLAP, {}, "is overlap-bench's own"),
        (OPENAI, {"cmd": "python -m overlap_bench.harness.mock {port}"}, "is overlap-bench's own"),
        (OPENAI, {"url": "http://127.0.0.1:1"}, "runs already"),
    ):
        with pytest.raises(api.BadSetting, match=why):
            patch_of(str(written), spec, None, toggles)


def test_an_arm_has_its_patch_and_a_run_of_it_is_trusted_by_name(written: Path) -> None:
    written.write_text(diff(f"a/{POOL}", f"b/{POOL}"))
    asked = Request(engine="vllm", options={"pace": "10ms"}, after=(f"patch={written}",))
    design = make_design(asked, {"vllm": VLLM}, {}, lambda: "emulated")
    before, after = design.arms
    assert before.patch is None
    assert after.patch.files == (POOL,)
    assert any(POOL in line for line in trust.named([design]))


def test_what_a_build_makes_of_a_diff_is_told_apart_from_tests(written: Path) -> None:
    built = ["csrc/cache.cu", "csrc/moe/template.jinja", "setup.py", "pyproject.toml", "rust/Cargo.toml",
             "requirements/common.txt"]  # fmt: skip
    others = ("tests/test_cache.py", "csrc/README.md", "docs/words.txt")
    written.write_text("".join(diff(f"a/{each}", f"b/{each}") for each in (POOL, *built, *others)))
    assert read_patch(str(written), ["vllm"]).not_built == built
