"""Two commits of one repository side by side: each arm runs the code of a git worktree of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engines import api
from harness.design import Arm, Ref
from harness.interruption import undisturbed
from harness.rooms import room

PATIENCE_S = 300  # of one git command; a checkout of a large repository takes minutes


def resolve(name: str, where: Path) -> Ref:
    """The commit that `name` is in the repository around `where`. Raises BadSetting."""
    top = _git(where, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise api.BadSetting(f"refs need a git repository around {where}, and there is none")
    repository = Path(top.stdout.strip())
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found.returncode:
        known = _git(repository, "for-each-ref", "--format=%(refname:short)").stdout.split()
        shallow = (repository / ".git" / "shallow").exists()
        hint = "; this clone is shallow, fetch it first" if shallow else ""
        try:
            api.pick(name, dict.fromkeys(known), f"ref in {repository}")
        except api.BadSetting as error:
            raise api.BadSetting(f"{error}{hint}") from None
        raise api.BadSetting(f"ref '{name}' in {repository} is not a commit{hint}")
    return Ref(repository=str(repository), name=name, commit=found.stdout.strip())


def uncommitted(ref: Ref) -> list[str]:
    """The tracked files that differ from the commit, where the repository's own folder has it checked out: a
    ref is measured as it was committed, without these changes."""
    repository = Path(ref.repository)
    if _git(repository, "rev-parse", "HEAD").stdout.strip() != ref.commit:
        return []
    return [
        line[3:]
        for line in _git(repository, "status", "--porcelain", "--untracked-files=no").stdout.splitlines()
    ]


@contextmanager
def checked_out(arms: Sequence[Arm]) -> Iterator[Mapping[str, Path]]:
    """A worktree for each arm that has a ref, by the arm's name; gone when this is left, however it is left.

    Raises BadSetting where one can't be made.
    """
    wanted = {arm.name: arm.ref for arm in arms if arm.ref is not None}
    if not wanted:
        yield {}
        return
    repositories = {Path(ref.repository) for ref in wanted.values()}
    with room() as folder:
        for repository in repositories:  # of what a killed run left, whose folder is gone by now
            _git(repository, "worktree", "prune")
        try:
            for name, ref in wanted.items():
                made = _git(
                    Path(ref.repository),
                    "worktree",
                    "add",
                    "--detach",
                    "--quiet",
                    str(folder / name),
                    ref.commit,
                )
                if made.returncode:
                    why = (made.stderr.strip().splitlines() or ["git printed nothing"])[-1]
                    raise api.BadSetting(f"can't make a worktree of {ref.name} in {ref.repository}: {why}")
            yield {name: folder / name for name in wanted}
        finally:
            with undisturbed():
                for name, ref in wanted.items():
                    _git(Path(ref.repository), "worktree", "remove", "--force", "--force", str(folder / name))
                for repository in repositories:
                    _git(repository, "worktree", "prune")


def search_path(worktree: Path) -> list[str]:
    """Where a worktree's packages are: in its root, and in src/ where it has that."""
    return [str(each) for each in (worktree / "src", worktree) if each.is_dir()]


def _git(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git there. Variables that a git hook exported must not lead it to another repository, and a Ctrl-C
    must not reach it."""
    own = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=where,
            env=own,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise api.BadSetting(f"git {arguments[0]} took more than {PATIENCE_S} s in {where}") from None
    except OSError as error:
        raise api.BadSetting(f"can't run git in {where}: {error.strerror}") from error
