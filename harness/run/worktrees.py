"""Two commits of one repository side by side: each arm runs the code of a git worktree of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engines import api
from harness.common.signals import undisturbed
from harness.common.temporary import room
from harness.plan.design import Arm, Ref

# What a repository can run while bench looks at a commit or checks it out. Its hooks and its file system
# monitor are off and its submodules left alone, in one's own repositories too: a gate measures a commit,
# which a hook could change. Its filters stay on, and so does fetching what a partial clone lacks: without
# them a file of Git LFS would be its pointer, and something else would be measured than the commit. Those
# are programs as well, which the repository's configuration names. So a repository that a stored run names
# must be allowed like an interpreter (store/trust.py).
GIT = (
    "git",
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "submodule.recurse=false"),
)
PATIENCE_S = 300  # of one git command; a checkout of a large repository takes minutes


def resolve(name: str, where: Path) -> Ref:
    """The commit that `name` is in the repository around `where`. Raises BadSetting."""
    top = _git(where, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise api.BadSetting(f"refs need a git repository around {where}, and there is none")
    repository = Path(top.stdout.strip())
    asked = ("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    found = _git(repository, "rev-parse", *asked)
    if found.returncode or found.stdout.startswith("^"):  # ^HEAD: all but that
        known = _git(repository, "for-each-ref", "--format=%(refname:short)").stdout.split()
        # Asked of git: in a worktree and in a submodule, .git is no folder.
        shallow = _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
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
        # By number: the name of a stored run's arm could lead out of the folder.
        places = {name: folder / str(number) for number, name in enumerate(wanted)}
        try:
            for name, ref in wanted.items():
                made = _git(
                    Path(ref.repository),
                    "worktree",
                    "add",
                    "--detach",
                    "--quiet",
                    "--",
                    str(places[name]),
                    ref.commit,
                )
                if made.returncode:
                    why = (made.stderr.strip().splitlines() or ["git printed nothing"])[-1]
                    raise api.BadSetting(f"can't make a worktree of {ref.name} in {ref.repository}: {why}")
            yield places
        finally:
            with undisturbed():
                for name, ref in wanted.items():
                    _git(Path(ref.repository), "worktree", "remove", "--force", "--force", str(places[name]))
                for repository in repositories:
                    _git(repository, "worktree", "prune")


def ignored(repository: Path, path: Path) -> bool:
    """Whether git ignores a file, as it should one that a build made."""
    return _git(repository, "check-ignore", "--quiet", "--", str(path)).returncode == 0


def search_path(worktree: Path) -> list[str]:
    """Where a worktree's packages are: in its root, and in src/ where it has that."""
    return [str(each) for each in (worktree / "src", worktree) if each.is_dir()]


def _git(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git there. Variables that a git hook exported must not lead it to another repository, and a Ctrl-C
    must not reach it."""
    own = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        return subprocess.run(
            [*GIT, *arguments],
            cwd=where,
            env=own,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # names of refs and files are bytes
            timeout=PATIENCE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise api.BadSetting(f"git {arguments[0]} took more than {PATIENCE_S} s in {where}") from None
    except OSError as error:
        raise api.BadSetting(f"can't run git in {where}: {error.strerror}") from error
