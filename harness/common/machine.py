"""Which machine and which code this is: what two halves of a run must have in common."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from overlap_bench.engines import api
from overlap_bench.engines.machine import cpu_model, known
from overlap_bench.harness.common import git

PACKAGES = (
    "overlap-bench", "torch", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "scipy", "pyzmq",
    "msgspec",
)  # fmt: skip
UNNAMED = "NVIDIA, name not readable"
MEASURED_BY = ("engines", "harness", "overlap_bench", "pyproject.toml")  # what a run is made by


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
    return Machine(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        memory_gib=round(known(lambda: psutil.virtual_memory().total, 0) / 2**30),
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
        return [known(pynvml.nvmlDeviceGetName, UNNAMED, handle) for handle in handles]
    finally:
        known(pynvml.nvmlShutdown, None)


def guess_device() -> str:
    """What device "auto" will probably mean, without importing torch; the engine decides."""
    return "cuda" if gpu_names() else "emulated"


def code(besides: Sequence[str] = ()) -> Code:
    """The commit of this checkout; empty where it was installed without git, also into a folder of somebody's
    repository. `besides`: folders whose changes count too."""
    known = _git("ls-files", "--", "harness")
    commit = _git("rev-parse", "HEAD").strip() if known else ""
    if not commit:
        return Code(commit="", changes="")
    where = ("--", *MEASURED_BY, *besides)
    difference = _git("diff", "--no-ext-diff", "HEAD", *where)
    for path in _git("ls-files", "--others", "--exclude-standard", *where).splitlines():
        difference += f"{path}\n{_git('hash-object', '--no-filters', '--', path)}"
    changes = hashlib.blake2b(os.fsencode(difference), digest_size=6).hexdigest() if difference else ""
    return Code(commit=commit, changes=changes)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if told := known(version, None, package):
            found[package] = told
    return found


def _git(*arguments: str) -> str:
    where = Path(__file__).resolve().parent.parent.parent
    try:
        done = git.run(*arguments, where=where, patience_s=10)
    except api.BadSetting:
        return ""
    return done.stdout if done.returncode == 0 else ""
