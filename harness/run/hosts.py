"""The processes that engines run in: what each starts with, what it is called, and what must hold before an
engine counts as booted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import psutil

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.common import git, processes
from overlap_bench.harness.common.processes import Child
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.store.manifest import Overlaid

HOST = "overlap_bench.engines.host"
ENVIRONMENT = {
    # One compute thread per process: two OpenMP threads are slowed 10-40x by another busy process.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # `python -m` would look for each module in the current folder first, whoever's that is.
    "PYTHONSAFEPATH": "1",
}
EXPLAIN_MS = 1000  # how long an engine may take to say why one of its processes is gone
IMPORT_S = 60  # for an interpreter to import the host; a program that is no Python may hang
SIDE_BY_SIDE = 2  # boots at once: more take turns on the cores, and a capture that waits is no faster
CORES_PER_BOOT = 4  # where there are more than eight cores, more boot at once
GIB = 1 << 30
ROLES = {"device": "device process", "output": "output process", "server": "server"}


class RunFailed(api.EngineError):
    """A process of the run failed or died; the message is one line that names it.

    `details` is what is known besides (a traceback, the process's output), for --debug.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def host_role(arm: str) -> str:
    """What an arm's host is called."""
    return f"engine host of {arm}"


def engines_of(refs: Iterable[Ref | None]) -> dict[str, api.EngineSpec]:
    """Every engine by name, one that only the refs' repository has included. Its spec, by which a run is
    planned, is then its checkout's."""
    path = [each for ref in refs if ref is not None for each in search_path(Path(ref.repository))]
    sys.path += path
    try:
        return api.find_engines()
    finally:
        for each in path:
            sys.path.remove(each)


def search_path(worktree: Path) -> list[str]:
    """Where a worktree's packages are: in its root, and in src/ where it has that."""
    return [str(each) for each in (worktree / "src", worktree) if each.is_dir()]


@dataclass(frozen=True, slots=True)
class Trees:
    """By the arm's name, the tree of its ref; and the files that all of them got besides."""

    places: Mapping[str, Path]
    overlaid: list[Overlaid]


def spec_of(arm: Arm) -> api.EngineSpec:
    """The spec of the arm's engine, which is installed: the design was checked."""
    spec: api.EngineSpec = api.pick(arm.engine, engines_of([arm.ref]), "engine")
    return spec


def side_by_side(cores: int) -> int:
    """How many engines boot at once."""
    return max(SIDE_BY_SIDE, cores // CORES_PER_BOOT)


def private_bytes(children: Iterable[Child]) -> int:
    """Memory that would be free without these processes. One that is gone has none; that it died is told by
    whoever waits for it next."""
    total = 0
    for child in children:
        with suppress(psutil.NoSuchProcess):  # a zombie is one too
            total += psutil.Process(child.pid).memory_full_info().uss
    return total


def check_memory(booted: int, arms: int, taken: int, free: int) -> None:
    """Raises BadSetting where the arms that are still to boot will not fit beside those that have: a block's
    arms are all alive at once, all but one parked. `taken`: bytes of the booted; `free`: bytes."""
    wanted = taken / booted * (arms - booted)
    if wanted > free:
        raise api.BadSetting(
            f"{arms} arms at once need about {taken / booted * arms / GIB:.1f} GiB, and with {booted} of "
            f"them booted, {free / GIB:.1f} GiB are free: compare fewer, limit the KV cache by "
            "num_blocks=N, or take a smaller model"
        )


def check_description(ready: api.Ready) -> None:
    """Raises RunFailed where an engine leaves out what its Description has to say at least."""
    said = ready.description
    for what, there, needed in (
        ("device", said.device, api.DEVICE_KEYS),
        ("model", said.model, api.MODEL_KEYS),
    ):
        if missing := [name for name in needed if name not in there]:
            raise RunFailed(
                f"the engine of {ready.name} describes its {what} without {' and '.join(missing)}"
            )


def check_none_stopped(children: Sequence[Child], silent_s: float) -> None:
    """Raises RunFailed where one of them, or of what they started, is stopped: after so long a silence nobody
    is about to let it go on."""
    if stopped := processes.stopped(children):
        raise RunFailed(f"{stopped} is stopped, as by SIGSTOP, and nothing was heard for {silent_s:g} s")


def check_interpreter(arm: Arm) -> None:
    """Raises BadSetting where the arm's own interpreter is none, or lacks what every host needs."""
    if arm.python is None:
        return
    try:
        done = subprocess.run(
            [arm.python, "-c", f"import {HOST}; print('ready')"],
            env=environment(arm.env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=IMPORT_S,
        )
    except OSError as error:
        raise api.BadSetting(f"can't start {arm.name} with {arm.python}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise api.BadSetting(f"can't start {arm.name} with {arm.python}: it does not answer") from None
    if done.stdout.strip() != "ready":
        why = (done.stderr.strip().splitlines() or ["it is not a Python that can run an engine"])[-1].strip()
        if why.endswith("'overlap_bench'"):
            why += "; install overlap-bench there too"
        raise api.BadSetting(f"can't start {arm.name} with {arm.python}: {why}")


def bytecode_is_kept() -> bool:
    """Whether what Python compiles is kept, or was compiled when torch was installed. A boot is a fresh
    process: without it each one would compile all that it imports, for longer than all else takes."""
    torch = find_spec("torch")
    assert torch is not None  # this package needs it
    assert torch.origin is not None
    kept = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    return kept or Path(cache_from_source(torch.origin)).exists()


def bytecode_in(folder: Path) -> dict[str, str]:
    """What has the processes of a run keep their bytecode in a folder of the run, where nothing else does."""
    if bytecode_is_kept():
        return {}
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def driven(spec: api.EngineSpec, tree: Path) -> list[Path]:
    """The packages in a tree that an engine is about, while its own code is elsewhere: vLLM's, of an adapter
    of ours."""
    names = [each for each in spec.packages if not f"{spec.build}.".startswith(f"{each}.")]
    return [root / name for name in names for root in map(Path, search_path(tree)) if (root / name).is_dir()]


def environment(
    extra: Mapping[str, str], worktree: Path | None = None, plain: bool = False
) -> dict[str, str]:
    """What a process of the run starts with. On its path a worktree comes in front of everything, also of the
    current folder, which may hold the same packages at another commit. The checkout that this runs from comes
    last: a foreign interpreter finds overlap_bench there, and a project finds its own packages first. An
    installed one is left to the interpreter, and so is one from a zip in which links are files. What leads
    git elsewhere stays out: code may ask git for its version. `plain`: without ENVIRONMENT. Raises BadSetting
    where a project has a package overlap_bench."""
    values = {**git.environment(), **({} if plain else ENVIRONMENT), **extra}
    path = [*filter(None, [values.get("PYTHONPATH")])]
    if worktree is not None:
        path = [*search_path(worktree), *path]
        values["PYTHONSAFEPATH"] = "1"
    package = Path(overlap_bench.__file__).resolve().parent
    if (package.parent / "pyproject.toml").exists() and (package / "engines").is_dir():
        path.append(str(package.parent))
    if path:
        values["PYTHONPATH"] = os.pathsep.join(path)
        _check_first(values["PYTHONPATH"].split(os.pathsep), worktree)
    return values


def _check_first(path: Sequence[str], worktree: Path | None) -> None:
    """Raises BadSetting where what a path holds first under the name overlap_bench is not overlap-bench's."""
    for folder in path:
        package = Path(folder, "overlap_bench")
        file = next(
            (each for each in (package / "__init__.py", package.with_suffix(".py")) if each.exists()), None
        )
        if file is None:
            continue
        if (package / "engines" / "host.py").exists():
            return
        if worktree is not None and file.is_relative_to(worktree):
            what, more = f"{file.relative_to(worktree)} of the ref", ""
        else:
            what, more = str(file), f", or leave {folder or os.getcwd()} out of PYTHONPATH"
        raise api.BadSetting(
            f"{what} takes the place of overlap-bench's own package: give it another name{more}"
        )
