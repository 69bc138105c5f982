"""The tree of a commit from a repository that is only read: a private repository, in a folder of its own,
borrows the objects. `git worktree` would write into the user's, and prune what is the user's own.

A tree is whole, also where the user's checkout is sparse. It is checked out with the user's configuration and
attributes, so it holds what a checkout of the user's would: submodules and files of Git LFS too, from what
the clone has. What it lacks is refused by name and never fetched: that would write into the user's clone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.common import git

# Of a configuration, what is about the place of a repository, or leads to what is not here.
OF_THE_PLACE = (
    *("core.bare", "core.worktree", "core.repositoryformatversion"),
    *("extensions.", "remote.", "submodule."),
    *("include.", "includeif."),  # may be relative to a file; what they bring is listed beside them
)
# Pointers are checked out as they are, and replaced here: Git LFS would fetch what is missing, and it may not
# be installed where its objects are.
NO_LFS = (("filter.lfs.smudge", ""), ("filter.lfs.process", ""), ("filter.lfs.required", "false"))
POINTER = re.compile(rb"version https?://[^\n]+\noid sha256:([0-9a-f]{64})\nsize ([0-9]+)\n")
POINTER_BYTES = 1024  # a pointer is smaller
FOLDER, SUBMODULE = "040000", "160000"  # modes in an index
NAMED = 3  # of the files that are missing


@dataclass(frozen=True, slots=True)
class Source:
    """A repository of the user's."""

    folder: Path  # its checkout; its git directory where it has none
    directory: Path  # its git directory; a linked worktree has its own
    common: Path  # what its linked worktrees share
    format: str  # of its objects: "sha1", "sha256"
    shallow: bool
    partial: bool  # a clone with a filter
    configured: tuple[tuple[str, str], ...]

    @property
    def lacking(self) -> str:
        """What to try where an object is missing here; "" where none should be."""
        if "GIT_QUARANTINE_PATH" in os.environ:
            return "; what is being pushed is not in the repository yet: gate it in the hook post-receive"
        if self.shallow:
            return (
                "; this clone is shallow, fetch it first: git fetch --unshallow, or fetch-depth: 0 of "
                "actions/checkout"
            )
        if self.partial:
            return "; this clone is partial, fetch it first: git fetch --refetch --no-filter"
        return ""


def around(where: Path) -> Source:
    """The repository around a folder. Raises BadSetting with what git says where there is none, or where git
    refuses it."""
    found = git.run("rev-parse", "--is-inside-work-tree", "--absolute-git-dir", where=where)
    if found.returncode:
        said = git.words(found)
        if said.startswith("not a git repository (or any"):
            raise api.BadSetting(
                f"refs need a git repository around {where}, and there is none: git says: {said}"
            )
        raise api.BadSetting(f"git refuses the repository around {where}: {said}")
    inside, directory = found.stdout.removesuffix("\n").split("\n", 1)
    if inside == "true":
        top = _answer("rev-parse", "--show-toplevel", where=where).removesuffix("\n")
        return _source(Path(top), Path(directory))
    return _source(Path(directory), Path(directory))


def ask(source: Source, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What git answers about a repository."""
    return git.run(*_given(source.directory, source.directory), *arguments, where=source.directory)


def take(source: Source, commit: str, place: Path, what: str) -> None:
    """Check a commit out in `place`, a new folder. `what` it is called where something is missing. Raises
    BadSetting."""
    borrow(source, commit, place)
    filters = [
        (f"{name.rpartition('.')[0]}.required", "true")
        for name, value in source.configured
        if name.startswith("filter.") and name.endswith((".smudge", ".process")) and value
    ]  # one that fails would leave its file as it is stored, and git would go on
    own = _given(place / ".git", place)
    asked = (*own, "read-tree", "-m", "-u", "--no-sparse-checkout", "--", commit)
    done = git.run(*asked, where=place, configured=(*source.configured, *filters, *NO_LFS))
    if done.returncode:
        raise api.BadSetting(f"can't check out {what} of {source.folder}: {git.words(done)}{source.lacking}")
    _replace_pointers(source, commit, place, what)
    entries = _entries(_answer(*own, "ls-files", "--stage", "-z", where=place))
    for path, its_commit in sorted((path, each) for path, mode, each in entries if mode == SUBMODULE):
        for inner in _of_submodule(source, path, place):
            if not ask(inner, "cat-file", "-e", f"{its_commit}^{{commit}}").returncode:
                take(inner, its_commit, place / path, f"{path} at {its_commit[:10]}, a submodule of {what},")
                break
        else:
            raise api.BadSetting(
                f"{what} has the submodule {path} at {its_commit[:10]}, which is not in {source.folder}: "
                f"fetch it first, with {what} checked out: git submodule update --init --recursive"
            )


def borrow(source: Source, commit: str, place: Path) -> Path:
    """Make a repository in `place` with the objects, refs and attributes of another, and this HEAD; its git
    directory."""
    made = place / ".git"
    for folder in ("refs", "info", "objects/info"):
        (made / folder).mkdir(parents=True)
    version = "" if source.format == "sha1" else "\trepositoryFormatVersion = 1\n"
    extension = f"[extensions]\n\tobjectFormat = {source.format}\n" if version else ""
    (made / "config").write_text(f"[core]\n\tbare = false\n{version}{extension}")
    (made / "HEAD").write_text(f"{commit}\n")
    objects = str(source.common / "objects")
    for each, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        objects = objects.replace(each, escaped)
    _write(made / "objects" / "info" / "alternates", f'"{objects}"\n')
    # What a project asks git about itself has the same answer, and an object that is replaced is so here.
    _write(made / "packed-refs", ask(source, "for-each-ref", "--format=%(objectname) %(refname)").stdout)
    for name in ("shallow", "info/attributes", "info/grafts"):
        if (source.common / name).is_file():
            shutil.copyfile(source.common / name, made / name)
    return made


def changed(source: Source, folder: Path) -> set[str]:
    """The tracked files that differ from what a checkout's HEAD says, those of its submodules included.

    Looked at from a private repository in `folder`: a file's filter may write into the one that asks it. And
    an index that is sparse stays so, since git makes trees of one that it fills, and dates those anew that
    the user's repository has.
    """
    head = ask(source, "rev-parse", "--verify", "HEAD^{commit}")
    if head.returncode:  # nothing is committed yet
        return set()
    own = borrow(source, head.stdout.strip(), folder)
    shared = (path.name for path in source.directory.glob("sharedindex.*"))
    for name in ("index", "info/sparse-checkout", *shared):
        if (source.directory / name).is_file():
            # With its time: what changed within the second in which an index was written is looked into.
            shutil.copy2(source.directory / name, own / name)
    sparse = ["--sparse"] if "index.sparse" in dict(source.configured) else []

    def listed(*asked: str) -> str:
        given = _given(own, source.folder)
        return _answer(*given, *asked, "-z", where=source.folder, configured=source.configured)

    committed, staged = _entries(listed("ls-tree", "-r", "HEAD")), _entries(listed("ls-files", "-s", *sparse))
    unread = tuple(path for path, mode, _ in staged if mode == FOLDER)  # folders, in a sparse index
    found = {path for path, *_ in committed ^ staged if not path.startswith(unread)}
    found |= set(filter(None, listed("ls-files", "--modified", *sparse).split("\0")))
    for number, (path, mode, _) in enumerate(staged):
        if mode == SUBMODULE and (source.folder / path / ".git").exists():
            inner = changed(around(source.folder / path), folder / f"submodule-{number}")
            found |= {f"{path}/{name}" for name in inner}
    return found


def _entries(listed: str) -> set[tuple[str, str, str]]:
    """Path, mode and object of each entry of an index, or of a tree."""
    lines = (line.partition("\t") for line in listed.split("\0") if line)
    return {(path, entry[:6], max(entry.split(), key=len)) for entry, _, path in lines}


def _replace_pointers(source: Source, commit: str, place: Path, what: str) -> None:
    """Put the content of files of Git LFS, which the clone has fetched, where its pointers are. Raises
    BadSetting for those that it has not."""
    asked = (*_given(place / ".git", place), "ls-files", "-z", "--", ":(top,attr:filter=lfs)")
    listed = _answer(*asked, where=place, configured=source.configured)
    storage = source.common / dict(source.configured).get("lfs.storage", "lfs") / "objects"
    missing = []
    for name in filter(None, listed.split("\0")):
        path = place / name
        if path.is_symlink() or path.stat().st_size >= POINTER_BYTES:
            continue
        text = path.read_bytes()
        if not text.startswith(b"version http"):
            continue
        found = POINTER.fullmatch(text)
        oid, size = (found[1].decode(), int(found[2])) if found else ("", 0)
        content = storage / oid[:2] / oid[2:4] / oid
        if found and content.is_file() and content.stat().st_size == size:
            shutil.copyfile(content, path)
        else:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise api.BadSetting(
            f"{what} keeps {', '.join(missing[:NAMED])}{more} in Git LFS, and the content is not in "
            f"{storage}: fetch it first, in {source.folder}: git lfs fetch origin {commit}"
        )


def _of_submodule(source: Source, path: str, place: Path) -> Iterator[Source]:
    """The repositories here that may hold a submodule: its checkout's, and those that git keeps for it."""
    found = []
    own = source.folder / path / ".git"
    if own.exists():
        said = git.run("rev-parse", "--resolve-git-dir", str(own), where=source.folder)
        found += [Path(said.stdout.removesuffix("\n"))] if said.returncode == 0 else []
    listed = git.run("config", "--file", ".gitmodules", "--null", "--list", where=place).stdout
    for line in listed.split("\0"):
        key, _, value = line.partition("\n")
        name = key.removeprefix("submodule.").removesuffix(".path")
        if (key, value) == (f"submodule.{name}.path", path) and ".." not in name.split("/"):
            found += [Path(f"{each}/modules/{name}") for each in (source.directory, source.common)]
    for directory in dict.fromkeys(found):
        if directory.is_dir():
            yield _source(source.folder / path, directory)


def _source(folder: Path, directory: Path) -> Source:
    """A repository by its git directory."""
    given = _given(directory, directory)  # its configuration may name a checkout that is not there
    asked = ("rev-parse", "--show-object-format", "--is-shallow-repository", "--git-common-dir")
    format, shallow, common = _answer(*given, *asked, where=directory).removesuffix("\n").split("\n", 2)
    listed = _answer(*given, "config", "--null", "--list", where=directory).split("\0")
    settings = (line.partition("\n") for line in listed if line and not line.startswith(OF_THE_PLACE))
    return Source(
        folder=folder,
        directory=directory,
        common=directory / common,
        format=format,
        shallow=shallow == "true",
        partial=any(re.match(r"remote\..*\.promisor\n|extensions\.partialclone\n", line) for line in listed),
        # A name without a value is one that is true.
        configured=tuple((name, value if equals else "true") for name, equals, value in settings),
    )


def _given(directory: Path, checkout: Path) -> Sequence[str]:
    """What has git take this repository, or none: looking for one, it may find another around the place."""
    return ("--git-dir", str(directory), "--work-tree", str(checkout))


def _answer(*arguments: str, where: Path, configured: Sequence[tuple[str, str]] = ()) -> str:
    done = git.run(*arguments, where=where, configured=configured)
    if done.returncode:
        raise api.BadSetting(f"git refuses {where}: {git.words(done)}")
    return done.stdout


def _write(path: Path, text: str) -> None:
    path.write_bytes(os.fsencode(text))
