"""The trees of refs: whole, as the user's own checkout of them would be, and taken from a repository in which
nothing changes, whatever kind of one it is and whatever a hook has exported."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.common import git as git_
from overlap_bench.harness.common.processes import room
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.run import worktrees
from overlap_bench.harness.run.hosts import environment
from tests.support.processes import ends
from tests.support.repositories import commit, files, fingerprint, git

BASE = {"engine.py": "base\n", "src/part.py": "a part\n", "only-base": "", "far/away/file": "far\n"}
HEAD = {"engine.py": "head\n", "new name": "new\n"}


def arm(ref: Ref) -> Arm:
    return Arm(name="before", engine="paced", options=api.EngineOptions(), toggles={}, ref=ref)


@contextmanager
def tree(repository: Path, name: str = "base") -> Iterator[Path]:
    """What an arm of that ref runs from."""
    with worktrees.checked_out([arm(worktrees.resolve(name, repository))]) as places:
        yield places["before"]


def taken(repository: Path, name: str = "base") -> dict[str, tuple[bool, bytes]]:
    with tree(repository, name) as place:
        return files(place)


def refused(repository: Path, name: str = "base") -> str:
    with pytest.raises(api.BadSetting) as caught, tree(repository, name):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left in the temporary folder, but for the file by which Python tries whether it can write
    there: a process that is killed just then leaves it."""
    rooms = tmp_path / "rooms"
    rooms.mkdir()
    monkeypatch.setenv("TMPDIR", str(rooms))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert [each for each in rooms.iterdir() if each.is_dir()] == []


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A repository with the branches base and head; head is checked out."""
    where = tmp_path / "two"
    commit(where, BASE, "base")
    git(where, "rm", "--quiet", "only-base")
    commit(where, HEAD, "head")
    return where


# -- kinds of repositories --------------------------------------------------------------------------------


def _plain(two: Path, where: Path) -> Path:
    return two


def _bare(two: Path, where: Path) -> Path:
    git(where, "clone", "--quiet", "--bare", str(two), "bare")
    return where / "bare"


def _linked(two: Path, where: Path) -> Path:
    git(two, "worktree", "add", "--quiet", "--detach", str(where / "linked"), "head")
    return where / "linked"


def _with_alternates(two: Path, where: Path) -> Path:
    git(where, "clone", "--quiet", "--shared", str(two), "first")
    git(where / "first", "branch", "base", "origin/base")
    git(where, "clone", "--quiet", "--shared", "first", "second")
    git(where / "second", "branch", "base", "origin/base")
    git(where / "second", "branch", "head", "main")
    (where / "second/.git/objects/info/alternates").write_text("../../../first/.git/objects\n")
    return where / "second"


def _with_an_odd_name(two: Path, where: Path) -> Path:
    odd = where / os.fsdecode(b'# "od:d" \\ caf\xe9\nname ')
    shutil.copytree(two, odd, symlinks=True)
    return odd


def _separate(two: Path, where: Path) -> Path:
    git(two, "init", "--quiet", "--separate-git-dir", str(two / "hidden"))
    (two / ".git").write_text("gitdir: hidden\n")
    return two / "src"


def _sparse(two: Path, where: Path) -> Path:
    git(two, "sparse-checkout", "set", "--no-cone", "src")
    assert not (two / "engine.py").exists()
    return two


def _with_a_sparse_index(two: Path, where: Path) -> Path:
    git(two, "sparse-checkout", "set", "--cone", "--sparse-index", "src")
    assert not (two / "far").exists()
    return two


def _split(two: Path, where: Path) -> Path:
    git(two, "update-index", "--split-index")
    return two


def _sha256(two: Path, where: Path) -> Path:
    git(where, "init", "--quiet", "--object-format=sha256", "sha256")
    commit(where / "sha256", BASE, "base")
    (where / "sha256" / "only-base").unlink()
    commit(where / "sha256", HEAD, "head")
    return where / "sha256"


def _shallow(two: Path, where: Path) -> Path:
    git(where, "clone", "--quiet", "--depth", "1", "--no-single-branch", two.as_uri(), "shallow")
    git(where / "shallow", "branch", "base", "origin/base")
    git(where / "shallow", "branch", "head", "main")
    return where / "shallow"


def _submodule(two: Path, where: Path) -> Path:
    commit(where / "around", {"file": ""}, "around")
    git(where / "around", "submodule", "--quiet", "add", str(two), "inside")
    git(where / "around/inside", "branch", "base", "origin/base")
    git(where / "around/inside", "branch", "head", "main")
    return where / "around/inside"


KINDS = (
    _plain, _bare, _linked, _with_alternates, _with_an_odd_name, _separate,
    _sparse, _with_a_sparse_index, _split, _sha256, _shallow, _submodule,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_tree_is_whole_and_its_repository_stays_as_it_was(
    two: Path, tmp_path: Path, kind: Callable[[Path, Path], Path]
) -> None:
    where = tmp_path / "kind"
    where.mkdir()
    repository = kind(two, where)
    before = fingerprint(where), fingerprint(two)
    ref = worktrees.resolve("head", repository)
    assert worktrees.uncommitted(ref) == []
    assert not worktrees.ignored(Path(ref.repository), Path("src/part.py"))
    assert taken(repository) == {name: (False, text.encode()) for name, text in BASE.items()}
    assert (fingerprint(where), fingerprint(two)) == before


def test_a_project_may_ask_git_for_its_version(two: Path) -> None:
    git(two, "tag", "v1.2", "base")
    with tree(two, "head") as place:
        assert git(place, "describe", "--tags").startswith("v1.2-1-g")
        assert git(place, "status", "--porcelain") == ""


def test_a_replaced_commit_is_replaced_and_a_grafted_one_grafted(two: Path) -> None:
    git(two, "replace", "base", "head")
    assert taken(two)["engine.py"] == (False, b"head\n")
    git(two, "replace", "--delete", "base")
    git(two, "tag", "v1", "base")
    head = git(two, "rev-parse", "head")
    (two / ".git/info/grafts").write_text(head)  # it has no parent
    with tree(two, "head") as place:
        assert git(place, "describe", "--tags", "--always") == f"{head[:7]}\n"


def test_what_a_partial_clone_lacks_is_told_and_not_fetched(two: Path, tmp_path: Path) -> None:
    git(two, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--no-local", "--filter=blob:none", two.as_uri(), "partial")
    git(tmp_path / "partial", "branch", "base", "origin/base")
    before = fingerprint(tmp_path / "partial")
    said = refused(tmp_path / "partial")
    assert "can't check out base of" in said
    assert "unable to read sha1 file of engine.py" in said
    assert "this clone is partial, fetch it first: git fetch --refetch --no-filter" in said
    assert fingerprint(tmp_path / "partial") == before
    git(tmp_path / "partial", "fetch", "--quiet", "--refetch", "--no-filter")
    assert len(taken(tmp_path / "partial")) == len(BASE)


# -- as the user's own checkout -----------------------------------------------------------------------------


def test_a_tree_is_what_the_users_own_checkout_is(two: Path, tmp_path: Path) -> None:
    """By settings of the repository, of a file that is included for it alone, and its own attributes."""
    where = tmp_path / "conditional"
    where.write_text('[filter "loud"]\n\tsmudge = tr a-z A-Z\n\tclean = tr A-Z a-z\n')
    odd = {
        ".gitattributes": "*.bat eol=crlf\nid ident\nutf16 working-tree-encoding=UTF-16LE\n",
        "a.bat": "a\nb\n",
        "id": "$Id$\n",
        "utf16": "a\n".encode("utf-16-le"),
        "quiet": "quiet\n",
        "run.sh": "#!/bin/sh\n",
    }
    (two / "run.sh").touch(0o755)
    (two / "link").symlink_to("nowhere")
    commit(two, odd, "odd")
    git(two, "config", "core.autocrlf", "true")
    git(two, "config", "core.symlinks", "false")
    git(two, "config", f"includeIf.gitdir:{two}/.path", str(where))
    (two / ".git/info/attributes").write_text("quiet filter=loud\n")
    git(two, "rm", "--quiet", "--cached", "-r", ".")
    git(two, "reset", "--quiet", "--hard")
    expected = files(two)
    assert expected["quiet"] == (False, b"QUIET\r\n")
    assert expected["link"] == (False, b"nowhere")
    assert expected["a.bat"] == (False, b"a\r\nb\r\n")
    assert taken(two, "odd") == expected
    assert worktrees.uncommitted(worktrees.resolve("odd", two)) == []


@pytest.mark.parametrize("required", ["true", "false"])
def test_a_filter_that_fails_is_told(two: Path, required: str) -> None:
    git(two, "config", "filter.broken.smudge", "false")
    git(two, "config", "filter.broken.required", required)
    (two / ".git/info/attributes").write_text("engine.py filter=broken\n")
    said = refused(two)
    assert f"can't check out base of {two}: engine.py: smudge filter broken failed; " in said
    assert said.endswith("external filter 'false' failed")


def test_a_filter_without_a_smudge_is_none(two: Path) -> None:
    git(two, "config", "filter.strip.clean", "cat")
    (two / ".git/info/attributes").write_text("engine.py filter=strip\n")
    assert taken(two)["engine.py"] == (False, b"base\n")


def test_changes_are_told_of_though_filters_and_monitors_would_write(two: Path, tmp_path: Path) -> None:
    """As Git LFS does, which keeps what it cleans. A file that was touched is looked into."""
    spoor = "sh -c 'date >> \"$(git rev-parse --absolute-git-dir)/spoor\"; cat'"
    git(two, "config", "filter.lfs.clean", spoor)
    git(two, "config", "core.fsmonitor", "true")
    (two / ".git/info/attributes").write_text("* filter=lfs\n")
    ref = worktrees.resolve("HEAD", two)
    for name in ("engine.py", "src/part.py"):
        os.utime(two / name, ns=(1, 1))
    before = fingerprint(two)
    assert worktrees.uncommitted(ref) == []
    (two / "src/part.py").write_text("changed")  # as long as it was, perhaps within the same second
    (two / "new name").unlink()
    assert worktrees.uncommitted(ref) == ["new name", "src/part.py"]
    assert worktrees.uncommitted(worktrees.resolve("base", two)) == []
    assert fingerprint(two / ".git") == {
        path.removeprefix(".git/").replace(".git", "."): found
        for path, found in before.items()
        if path.split("/")[0] == ".git"
    }


# -- variables ----------------------------------------------------------------------------------------------


def test_what_a_hook_exports_leads_nowhere(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path / "other", {"engine.py": "another\n"}, "base")
    trap = tmp_path / "other/.git"
    before = fingerprint(two), fingerprint(tmp_path / "other")
    for name in git(two, "rev-parse", "--local-env-vars").split():
        monkeypatch.setenv(name, str(trap))
    monkeypatch.setenv("GIT_INDEX_FILE", str(two / ".git/index"))
    monkeypatch.setenv("GIT_LITERAL_PATHSPECS", "1")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    assert taken(two)["engine.py"] == (False, b"base\n")
    assert worktrees.uncommitted(worktrees.resolve("head", two)) == []
    assert not {"GIT_DIR", "GIT_INDEX_FILE", "GIT_CONFIG_PARAMETERS"} & environment({}).keys()
    monkeypatch.undo()
    assert (fingerprint(two), fingerprint(tmp_path / "other")) == before


def test_settings_in_the_environment_hold(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an image of a container has them."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert "dubious ownership" in refused(two)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "safe.directory")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "*")
    assert taken(two)["engine.py"] == (False, b"base\n")
    (two / ".git" / "info" / "exclude").write_text("built.so\n")
    built, source = Path("built.so"), Path("engine.py")
    assert worktrees.ignored_of(two, [built, source]) == {built}  # by settings of its own beside those
    monkeypatch.delenv("GIT_CONFIG_COUNT")
    with pytest.raises(api.BadSetting, match=r"git can't say what it ignores in .*: detected dubious"):
        worktrees.ignored_of(two, [built])


def test_in_a_bare_repository_nothing_was_built_that_git_would_ignore(tmp_path: Path) -> None:
    git(tmp_path, "init", "--bare", "--quiet")
    assert worktrees.ignored_of(tmp_path, [Path("built.so")]) == set()


def test_settings_that_are_included_by_a_relative_path_are_taken_as_they_are(two: Path) -> None:
    (two / "shared.gitconfig").write_text("[user]\n\tname = Somebody\n")
    git(two, "config", "include.path", "../shared.gitconfig")
    assert taken(two)["engine.py"] == (False, b"base\n")


# -- refusals of git ----------------------------------------------------------------------------------------


def test_what_git_refuses_is_told_as_git_said_it(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        said = refused(two)
        assert f"git refuses the repository around {two}: detected dubious ownership" in said
        assert f"git config --global --add safe.directory {two}" in said
        assert "there is none" not in said
    with monkeypatch.context() as there:
        there.setenv("PATH", str(tmp_path))
        git_._leading.cache_clear()
        assert "need git, and none is on the PATH" in refused(two)
    git_._leading.cache_clear()
    assert "No such file or directory" in refused(tmp_path / "nowhere")
    with monkeypatch.context() as there:
        there.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert "refs need a git repository around" in refused(tmp_path)
    (two / ".git/config").write_text("[core\n")
    assert "git refuses the repository" in refused(two)
    assert "bad config line 1" in refused(two)
    (two / ".git/config").write_text("")
    (two / ".git/objects").rename(two / ".git/moved")
    (two / ".git/objects/info").mkdir(parents=True)
    (two / ".git/objects/info/alternates").write_text("../../../nowhere/.git/objects\n")
    assert "unable to normalize alternate object path" in refused(two)
    (tmp_path / "away").mkdir()
    (tmp_path / "away/.git").write_text("gitdir: /nowhere\n")
    assert refused(tmp_path / "away").endswith("not a git repository: /nowhere")


def test_a_commit_that_is_gone_is_told(two: Path) -> None:
    """As in another clone, where a stored run is measured again."""
    for lost in ("1" * 40, "--index-output=lost"):
        ref = Ref(repository=str(two), name="base", commit=lost)
        said = rf"can't check out base of {two}: "
        with pytest.raises(api.BadSetting, match=said), worktrees.checked_out([arm(ref)]):
            pass


def test_a_commit_that_is_being_pushed_is_not_there_yet(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the hook pre-receive ends, it is in a folder of its own, which may yet be thrown away."""
    monkeypatch.setenv("GIT_QUARANTINE_PATH", str(two / ".git/objects/incoming"))
    assert refused(two, "1" * 40).endswith("not in the repository yet: gate it in the hook post-receive")


def test_a_name_of_two_refs_is_refused(two: Path) -> None:
    git(two, "tag", "base", "head")
    assert refused(two).endswith("is ambiguous: give all of its name, as refs/heads/base")
    assert taken(two, "refs/heads/base")["engine.py"] == (False, b"base\n")


# -- submodules ---------------------------------------------------------------------------------------------


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A project with a submodule in a submodule, each with another commit at base and at head, which is
    checked out."""
    for name in ("inner", "middle", "project"):
        for branch in ("base", "head"):
            commit(tmp_path / name, {f"{name}.py": f"{branch}\n"}, branch)
    for outer, inner in (("middle", "inner"), ("project", "middle")):
        where = tmp_path / outer
        git(where, "submodule", "--quiet", "add", str(tmp_path / inner), f"libraries/{inner}")
        git(where, "submodule", "--quiet", "update", "--init", "--recursive")
        for branch in ("base", "head"):
            git(where / "libraries" / inner, "checkout", "--quiet", "--detach", f"origin/{branch}")
            git(where / "libraries" / inner, "submodule", "--quiet", "update", "--init", "--recursive")
            commit(where, {f"{outer}.py": f"{branch}\n"}, branch)
    return tmp_path / "project"


INNER = "libraries/middle/libraries/inner/inner.py"


@pytest.mark.parametrize("place", ["checked out", "only kept", "in a linked worktree", "old form"])
def test_submodules_are_those_of_the_ref(nested: Path, tmp_path: Path, place: str) -> None:
    middle = nested / "libraries/middle"
    where = nested
    if place == "only kept":
        git(nested, "submodule", "--quiet", "deinit", "--force", "--all")
    elif place == "in a linked worktree":
        where = tmp_path / "linked"
        git(nested, "worktree", "add", "--quiet", "--detach", str(where), "head")
    elif place == "old form":  # with the repository itself in the checkout
        kept = nested / ".git/modules/libraries/middle"
        for place_of, own in ((kept / "modules/libraries/inner", middle / "libraries/inner"), (kept, middle)):
            git(place_of, "config", "--file", "config", "--unset", "core.worktree")
            (own / ".git").unlink()
            place_of.rename(own / ".git")
    before = fingerprint(nested)
    for branch in ("base", "head"):
        found = taken(where, branch)
        assert found["libraries/middle/middle.py"] == (False, f"{branch}\n".encode())
        assert found[INNER] == (False, f"{branch}\n".encode())
    assert fingerprint(nested) == before


def test_changes_in_submodules_are_told_of(nested: Path) -> None:
    ref = worktrees.resolve("HEAD", nested)
    assert worktrees.uncommitted(ref) == []
    before = fingerprint(nested / ".git")
    (nested / INNER).write_text("changed\n")
    assert worktrees.uncommitted(ref) == [INNER]
    assert fingerprint(nested / ".git") == before


def test_a_submodule_that_is_not_here_is_refused_by_name(nested: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(nested), "clone")
    clone = tmp_path / "clone"
    git(clone, "branch", "base", "origin/base")
    commit_of = git(nested, "rev-parse", "base:libraries/middle").strip()
    said = refused(clone)
    assert f"base has the submodule libraries/middle at {commit_of[:10]}, which is not in {clone}" in said
    assert "git submodule update --init --recursive" in said
    # Neither is its folder's content, however it came there.
    (clone / "libraries/middle/middle.py").write_text("a copy\n")
    assert refused(clone) == said
    (clone / "libraries/middle/middle.py").unlink()
    git(clone, "submodule", "--quiet", "update", "--init")
    said = refused(clone)
    assert "a submodule of base" in said
    assert "has the submodule libraries/inner at " in said
    git(clone, "submodule", "--quiet", "update", "--init", "--recursive")
    assert taken(clone)[INNER] == (False, b"base\n")


def test_a_submodule_is_found_by_its_name_and_without_one(nested: Path) -> None:
    git(nested, "mv", "libraries/middle", "moved")
    commit(nested, {}, "moved")
    git(nested, "rm", "--quiet", "--cached", ".gitmodules")
    (nested / ".gitmodules").unlink()
    commit(nested, {}, "nameless")
    assert taken(nested)[INNER] == (False, b"base\n")  # which is there under another path now
    assert "moved/middle.py" in taken(nested, "nameless")


@pytest.mark.parametrize("name", ["../../../evil", "{}/evil"])
def test_a_submodules_name_leads_out_of_no_folder(nested: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(nested / ".git/modules/libraries/middle", tmp_path / "evil")
    named = f'"{name.format(tmp_path)}"'
    text = (nested / ".gitmodules").read_text().replace('"libraries/middle"', named)
    commit(nested, {".gitmodules": text}, "evil")
    git(nested, "submodule", "--quiet", "deinit", "--force", "--all")
    shutil.rmtree(nested / ".git/modules")
    assert "has the submodule libraries/middle at" in refused(nested, "evil")


# -- Git LFS ------------------------------------------------------------------------------------------------

WEIGHTS = b"weights" * 1000
OID = hashlib.sha256(WEIGHTS).hexdigest()
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize {len(WEIGHTS)}\n"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A repository with a file in Git LFS, as a clone without it has it, one that only looks like it, and one
    that was committed as it is."""
    where = tmp_path / "large"
    attributes = "*.bin filter=lfs diff=lfs merge=lfs -text\n"
    here = {".gitattributes": attributes, "a.bin": POINTER, "pointer.txt": POINTER, "whole.bin": "whole"}
    commit(where, here, "base")
    (where / "a.bin").chmod(0o755)
    commit(where, {}, "base")
    # What is configured where Git LFS is installed; here it is not.
    git(where, "config", "filter.lfs.smudge", "git-lfs-that-is-not-here")
    git(where, "config", "filter.lfs.process", "git-lfs-that-is-not-here")
    git(where, "config", "filter.lfs.required", "true")
    return where


@pytest.mark.parametrize("storage", ["", "kept", "/elsewhere"])
def test_files_of_git_lfs_have_their_content(large: Path, tmp_path: Path, storage: str) -> None:
    folder = large / ".git" / (storage or "lfs")
    if storage.startswith("/"):
        folder = tmp_path / storage[1:]
    if storage:
        git(large, "config", "lfs.storage", str(folder) if storage.startswith("/") else storage)
    content = folder / "objects" / OID[:2] / OID[2:4] / OID
    content.parent.mkdir(parents=True)
    content.write_bytes(WEIGHTS)
    before = fingerprint(large)
    with tree(large) as place:
        found = files(place)
        (place / "a.bin").write_bytes(b"written by an arm")
    assert found["a.bin"] == (True, WEIGHTS)
    assert found["pointer.txt"] == (False, POINTER.encode())
    assert found["whole.bin"] == (False, b"whole")
    assert fingerprint(large) == before
    content.write_bytes(WEIGHTS[:-1])
    assert "base keeps a.bin in Git LFS" in refused(large)


def test_files_of_git_lfs_that_are_not_here_are_refused_by_name(large: Path) -> None:
    git(large, "config", "--remove-section", "filter.lfs")
    head = commit(large, {"b.bin": POINTER.replace("size", "ext-0-x sha256:0\nsize")}, "head")
    said = refused(large, "head")
    assert f"head keeps a.bin, b.bin in Git LFS, and the content is not in {large}/.git/lfs/objects" in said
    assert f"in {large}: git lfs fetch origin {head}" in said


# -- ends ---------------------------------------------------------------------------------------------------

TAKING = """
import sys
from pathlib import Path
from overlap_bench.harness.run import worktrees
from tests.process.test_borrowed import arm
ref = worktrees.resolve("base", Path(sys.argv[1]))
while True:
    print(flush=True)
    with worktrees.checked_out([arm(ref)]):
        worktrees.uncommitted(worktrees.resolve("head", Path(sys.argv[1])))
"""


def test_kill_9_leaves_the_repository_as_it_was_and_the_next_run_removes_the_rest(
    two: Path, tmp_path: Path
) -> None:
    before = fingerprint(two)
    for lines in (1, 2, 3):  # at any place, which is chance
        process = subprocess.Popen([sys.executable, "-c", TAKING, two], stdout=subprocess.PIPE)
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        children = psutil.Process(process.pid).children(recursive=True)  # git goes on for a while
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        assert all(ends(each.pid) for each in children)
    assert fingerprint(two) == before
    with room():
        pass
    for each in (tmp_path / "rooms").glob("bench-*"):  # killed just before or after its lock had its name
        (each / "lock.new").unlink(missing_ok=True)
        each.rmdir()
