"""How git is started: led nowhere by what a hook exported, running nothing that a repository names but its
filters, and writing nothing into the repository that it reads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from overlap_bench.engines import api

GIT = (
    "git",
    # A commit is measured, which a hook could change.
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.fsmonitor=false"),  # a program, or a daemon with a socket in .git
    *("-c", "submodule.recurse=false"),
    *("-c", "diff.autoRefreshIndex=false"),  # `git diff` takes this lock in spite of GIT_OPTIONAL_LOCKS
)
VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",  # or `git status` writes the index
    "GIT_NO_LAZY_FETCH": "1",  # into a partial clone
    "GIT_ALLOW_PROTOCOL": "",  # nor by a git that does not know the line above
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "0",
    "LANGUAGE": "C",  # of messages, which are told, and looked at
}
# How many settings the environment holds. It stays: git never exports it, and by it a container's image says
# safe.directory.
COUNT = "GIT_CONFIG_COUNT"
PATIENCE_S = 300  # of one git command; a checkout of a large repository takes minutes


def environment() -> dict[str, str]:
    """This process's, without what leads git to another repository or index: a hook gets such variables."""
    found = {name: value for name, value in os.environ.items() if name not in _leading()}
    if not found.get(COUNT, "0").isdecimal():
        del found[COUNT]
    return found


def run(
    *arguments: str, where: Path, configured: Sequence[tuple[str, str]] = (), patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """What git answers in the folder `where`, with these settings on top of those it finds. Raises BadSetting
    where it does not answer. A Ctrl-C does not reach it."""
    try:
        done = subprocess.run(
            [*GIT, *arguments],
            cwd=where,
            env={**environment(), **VARIABLES, **_as_variables(configured)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise api.BadSetting(f"git {arguments[0]} took more than {patience_s:g} s in {where}") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == "git":
            raise api.BadSetting("refs and patches need git, and none is on the PATH: install it") from None
        raise api.BadSetting(f"can't run git in {where}: {error.strerror}") from error
    # Names of refs and files are bytes, a carriage return in them included.
    return subprocess.CompletedProcess(
        done.args, done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)
    )


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Why git refused, as it said it, in one line: what it ended with, and what went wrong before."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    fatal = [number for number, line in enumerate(lines) if line.startswith("fatal: ")]
    if fatal:
        last = " ".join(lines[fatal[0] :]).removeprefix("fatal: ")
        before = (line.removeprefix("error: ") for line in lines[: fatal[0]] if line.startswith("error: "))
        return "; ".join([last, *dict.fromkeys(before)])
    more = f" (and {len(lines) - 1} lines more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else f"it ended with {done.returncode} and said nothing"


def _as_variables(settings: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    if not settings:
        return {}
    there = int(environment().get(COUNT, "0"))  # which stay: a container may say there that a folder is safe
    found = {COUNT: str(there + len(settings))}
    for number, (name, value) in enumerate(settings, there):
        found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return found


@cache
def _leading() -> frozenset[str]:
    """The variables that are about one repository, as git lists them, without COUNT."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        listed = subprocess.run(
            ["git", "rev-parse", "--local-env-vars"], env=own, capture_output=True, text=True
        )
    except OSError:  # nobody can be led
        return frozenset()
    return frozenset(listed.stdout.split()) - {COUNT}
