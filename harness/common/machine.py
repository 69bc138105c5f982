"""Which machine and which code this is: what two halves of a run must have in common. And git, which says so.

Git is started so that it is led nowhere by what a hook exported, runs nothing that a repository names but its
filters, and writes nothing into the repository that it reads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from overlap_bench.engines import api
from overlap_bench.engines.machine import cpu_model, known

PACKAGES = (
    "overlap-bench", "torch", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "scipy", "pyzmq",
    "msgspec",
)  # fmt: skip
UNNAMED = "NVIDIA, name not readable"
MEASURED_BY = ("engines", "harness", "overlap_bench", "pyproject.toml")  # what a run is made by
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
GIT_PATIENCE_S = 300  # of one git command; a checkout of a large repository takes minutes


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's fingerprint. Without a host name: a container gets a new one at every start."""

    cpu: str
    cores: int  # usable by this process
    kernel: str
    memory_gib: int
    gpus: list[str]


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The commit that runs, and a digest of what was changed on top of it, files that git does not know yet
    included ("" where nothing was)."""

    commit: str
    changes: str

    @property
    def dirty(self) -> bool:
        return bool(self.changes)


def fingerprint() -> Machine:
    """What this machine is."""
    return Machine(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        memory_gib=round(known(_memory_bytes, 0) / 2**30),
        gpus=gpu_names(),
    )


def gpu_names() -> list[str]:
    """Every NVIDIA card by name, without importing torch; empty where there is no driver."""
    return known(_cards, [])


def _cards() -> list[str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [known(pynvml.nvmlDeviceGetName, UNNAMED, handle) for handle in handles]
    finally:
        known(pynvml.nvmlShutdown, None)
    # An older binding gives bytes.
    return [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in names]


def _memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def guess_device() -> str:
    """What device "auto" will probably mean, without importing torch; the engine decides."""
    return "cuda" if gpu_names() else "emulated"


def code(besides: Sequence[str] = ()) -> Code:
    """The commit of this checkout; empty where it was installed without git, also into a folder of somebody's
    repository. `besides`: folders whose changes count too."""
    known = _asked("ls-files", "--", "harness")
    commit = _asked("rev-parse", "HEAD").strip() if known else ""
    if not commit:
        return Code(commit="", changes="")
    where = ("--", *MEASURED_BY, *besides)
    difference = _asked("diff", "--no-ext-diff", "HEAD", *where)
    for path in _asked("ls-files", "--others", "--exclude-standard", *where).splitlines():
        difference += f"{path}\n{_asked('hash-object', '--no-filters', '--', path)}"
    changes = hashlib.blake2b(os.fsencode(difference), digest_size=6).hexdigest() if difference else ""
    return Code(commit=commit, changes=changes)


def versions() -> dict[str, str]:
    """The versions of Python and of every package a number here may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if told := known(version, None, package):
            found[package] = told
    return found


def _asked(*arguments: str) -> str:
    where = Path(__file__).resolve().parent.parent.parent
    try:
        done = run_git(*arguments, where=where, patience_s=10)
    except api.BadSetting:
        return ""
    return done.stdout if done.returncode == 0 else ""


def git_environment() -> dict[str, str]:
    """This process's, without what leads git to another repository or index: a hook gets such variables."""
    found = {name: value for name, value in os.environ.items() if name not in _leading()}
    if not found.get(COUNT, "0").isdecimal():
        del found[COUNT]
    return found


def run_git(
    *arguments: str,
    where: Path,
    configured: Sequence[tuple[str, str]] = (),
    patience_s: float = GIT_PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """What git answers in the folder `where`, with these settings on top of those it finds. Raises BadSetting
    where it does not answer. A Ctrl-C does not reach it."""
    try:
        done = subprocess.run(
            [*GIT, *arguments],
            cwd=where,
            env={**git_environment(), **VARIABLES, **_as_variables(configured)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise api.BadSetting(f"git {arguments[0]} took more than {patience_s:g} s in {where}") from None
    except FileNotFoundError as error:
        if error.filename == "git":
            raise api.BadSetting("refs and patches need git, and none is on the PATH: install it") from None
        raise api.BadSetting(f"can't run git in {where}: {error.strerror}") from error
    except OSError as error:
        raise api.BadSetting(f"can't run git in {where}: {error.strerror}") from error
    # Names of refs and files are bytes, a carriage return in them included.
    return subprocess.CompletedProcess(
        done.args, done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)
    )


def git_words(done: subprocess.CompletedProcess[str]) -> str:
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
    found = {COUNT: str(len(settings))}
    for number, (name, value) in enumerate(settings):
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
