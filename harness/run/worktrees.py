"""Two commits of one repository side by side: each arm runs the code of a tree of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.common import git
from overlap_bench.harness.common.processes import room
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.run.borrowed import around, ask, changed, take


def resolve(name: str, where: Path) -> Ref:
    """The commit that `name` is in the repository around `where`. Raises BadSetting."""
    source = around(where)
    found = ask(source, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    if "is ambiguous" in found.stderr:
        raise api.BadSetting(
            f"ref '{name}' in {source.folder} is ambiguous: give all of its name, as refs/heads/{name}"
        )
    if found.returncode or found.stdout.startswith("^"):  # ^HEAD: all but that
        known = ask(source, "for-each-ref", "--format=%(refname:short)").stdout.split()
        try:
            api.pick(name, dict.fromkeys(known), f"ref in {source.folder}")
        except api.BadSetting as error:
            raise api.BadSetting(f"{error}{source.lacking}") from None
        said = git.words(found)
        raise api.BadSetting(f"ref '{name}' in {source.folder} is not a commit: {said}{source.lacking}")
    return Ref(repository=str(source.folder), name=name, commit=found.stdout.strip())


def uncommitted(ref: Ref) -> list[str]:
    """The tracked files that differ from the commit, where the repository's own folder has it checked out: a
    ref is measured as it was committed, without these changes."""
    source = around(Path(ref.repository))
    if source.folder == source.directory or ask(source, "rev-parse", "HEAD").stdout.strip() != ref.commit:
        return []
    with room() as folder:
        return sorted(changed(source, folder))


def between(good: Ref, bad: Ref) -> list[tuple[str, str]]:
    """Each commit after `good` up to `bad`, the last, with its subject; what a merge brought is its own, by
    first parents. Raises BadSetting where no line leads from one to the other."""
    source = around(Path(good.repository))
    if good.commit == bad.commit:
        raise api.BadSetting(f"{good.name} and {bad.name} are the same commit, {good.commit[:10]}")
    if ask(source, "merge-base", "--is-ancestor", good.commit, bad.commit).returncode:
        if not ask(source, "merge-base", "--is-ancestor", bad.commit, good.commit).returncode:
            raise api.BadSetting(
                f"{good.name} is later than {bad.name}: give the earlier one as --good; a change for the "
                "better is found as well"
            )
        base = ask(source, "merge-base", good.commit, bad.commit).stdout.strip()
        try_ = f": --good {base[:10]} is where they parted" if base else ""
        raise api.BadSetting(f"{bad.name} does not descend from {good.name}{try_}{source.lacking}")
    span = f"{good.commit}..{bad.commit}"
    listed = ask(source, "rev-list", "--first-parent", "--reverse", "--format=%H %s", span)
    lines = (line for line in listed.stdout.split("\n") if line and not line.startswith("commit "))
    return [(commit, subject) for commit, _, subject in (line.partition(" ") for line in lines)]


@contextmanager
def checked_out(arms: Sequence[Arm]) -> Iterator[Mapping[str, Path]]:
    """A tree for each arm that has a ref, by the arm's name: the folder that its code runs from. They are
    gone when this is left, however it is left.

    Raises BadSetting where one can't be made.
    """
    wanted = {arm.name: arm.ref for arm in arms if arm.ref is not None}
    if not wanted:
        yield {}
        return
    with room() as folder:
        # By number: the name of a stored run's arm could lead out of the folder.
        places = {name: folder / str(number) for number, name in enumerate(wanted)}
        for name, ref in wanted.items():
            take(around(Path(ref.repository)), ref.commit, places[name], ref.name)
        yield places


def ignored(repository: Path, path: Path) -> bool:
    """Whether git ignores a file, as it should one that a build made. The index is not asked: git dates anew
    what it reads of one that is sparse or split."""
    return git.run("check-ignore", "--no-index", "--quiet", "--", str(path), where=repository).returncode == 0


def ignored_of(repository: Path, files: Sequence[Path]) -> set[Path]:
    """The files among these, by their paths in the repository, that git ignores. It says nothing of a name
    that it would quote."""
    if not files:
        return set()
    names = [str(each) for each in files]
    plain = (("core.quotePath", "false"),)
    found = git.run("check-ignore", "--no-index", "--", *names, where=repository, configured=plain)
    if found.returncode > 1 and "work tree" in found.stderr:  # a bare repository has none, and no build in it
        return set()
    if found.returncode > 1:  # 1: none of them
        raise api.BadSetting(f"git can't say what it ignores in {repository}: {git.words(found)}")
    return {Path(each) for each in found.stdout.split("\n") if each}
