"""The processes that engines run in: what each starts with, what it is called, and what must hold before an
engine counts as booted. And the link to them: starting one, and waiting for a word while watching that every
process lives. Whoever died, hangs or failed is named in the error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import psutil
import zmq

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.common import git, processes
from overlap_bench.harness.common.processes import Child, postponed, undisturbed
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.run import messages
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
GONE_MS = 3000  # how long a killed host may take to be gone, which on a card frees gigabytes
BUILT = (
    "; a ref's tree has nothing that a build makes: name such files of your checkout by --overlay, or "
    "install each ref into an interpreter of its own"
)


class RunFailed(api.EngineError):
    """A process of the run failed or died; the message is one line that names it.

    `details` is what is known besides (a traceback, the process's output), for --debug.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def host_role(arm: str) -> str:
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


class Link:
    """Processes and sockets of one run. Use as a context manager: everything it started is gone when it is
    left, however it is left. `worktrees`: by the arm's name, the folder whose code it runs in place of what
    is installed."""

    def __init__(self, worktrees: Mapping[str, Path]) -> None:
        self._worktrees = worktrees
        self._alive: list[Child] = []
        self._failed: set[str] = set()  # roles of hosts that said so, and are stopping their engines
        self._generator: Child | None = None
        self._loaded: tuple[str, Child] | None = None  # the arm of the latest round, and its host
        self._turning: set[str] = set()  # arms that take turns, and have not said that they wait too long
        self._parked: set[int] = set()  # servers that stand still between their turns

    def __enter__(self) -> Self:
        self._left = ExitStack()
        self._room = self._left.enter_context(processes.for_sockets())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from_hosts = self._bound("hosts")
        self._from_load = self._bound("load")
        self._poller = zmq.Poller()
        self._poller.register(self._from_hosts, zmq.POLLIN)
        self._poller.register(self._from_load, zmq.POLLIN)
        self._to_load = self._socket(zmq.PUSH)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what lives and remove the sockets; an engine that told of its failure has seconds to stop."""
        with undisturbed():
            processes.wait([child for child in self._alive if child.role in self._failed], processes.GRACE_S)
            processes.end(self._alive)
            self._alive = []
            self._context.destroy(linger=0)
            self._left.close()

    def _start(self, role: str, command: Sequence[str], environment: Mapping[str, str], stem: str) -> Child:
        with postponed():
            child = processes.start(role, command, environment, self._room / f"{stem}.log")
            self._watch(child)
        return child

    def _watch(self, child: Child) -> None:
        self._alive.append(child)
        self._poller.register(child.pidfd, zmq.POLLIN)

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._room / name}"

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """pyzmq tells the context of a socket a moment after it is there. Were a signal raised between the
        two, `close` would wait for that socket without end."""
        with postponed():
            return self._context.socket(kind)

    def _bound(self, name: str) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.PULL)
        socket.rcvhwm = 0
        socket.bind(self._endpoint(name))
        return socket

    def _heard(self) -> api.FromHost:
        """The next message of a host. Raises RunFailed for one that is not as engines/api says: what an
        engine made is looked at here, not in its own process."""
        message = self._from_hosts.recv()
        try:
            heard: api.FromHost = msgspec.msgpack.decode(message, type=api.FromHost)
        except msgspec.ValidationError as error:
            said = msgspec.msgpack.decode(message)
            raise RunFailed(f"the engine of {said['name']} broke engines/api: {error}") from None
        return heard

    def _wait(self, wanted: zmq.Socket[bytes], seconds: float | None = None, silence: str = "") -> None:
        """Block until `wanted` has a message. A death, or an engine that says Failed, raises; so does silence
        for `seconds`, with the message `silence`, which has a place for them; where that is "", silence is an
        error only if one of the processes is stopped, as by SIGSTOP: it would go on for ever."""
        while True:
            ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1e3)))
            if wanted in ready:
                return
            if not ready and seconds is not None:
                check_none_stopped(self._alive, seconds)
                if silence:
                    raise RunFailed(silence.format(f"{seconds:g} s"))
            if self._from_hosts in ready:  # nothing is expected of a host now, so this is a failure
                message = self._heard()
                if isinstance(message, api.Failed):
                    raise self._failure(message)
                if isinstance(message, api.Waiting):
                    self._raise_if_kept(message)
            self._raise_if_dead()

    def _raise_if_kept(self, message: api.Waiting) -> None:
        """All arms but the one that has the baton come to wait for it at last, some a little later."""
        again = message.name not in self._turning
        self._turning.discard(message.name)
        if not self._turning:
            raise RunFailed(
                f"every engine has waited for its turn for {message.seconds:g} s: none of them has the turn"
            )
        if len(self._turning) == 1 and (again or not self._from_hosts.poll(EXPLAIN_MS)):
            raise RunFailed(
                f"the engine of {next(iter(self._turning))} hangs: it has not ended its turn in "
                f"{message.seconds:g} s"
            )

    def _raise_load_failure(self, message: messages.LoadFailed) -> NoReturn:
        """Raise what the load generator says of the engine, with the last line that its host printed. The
        engine's own failure or death, which may show a moment later, goes first; that the load generator ends
        after its last word is no death to report."""
        others = [child for child in self._alive if child is not self._generator]
        self._await_news(others, EXPLAIN_MS)
        self._raise_if_explained(0)
        self._raise_if_dead(others)
        self._raise_if_stopped(message.message)
        if self._loaded is None:
            raise RunFailed(f"the load generator gave up: {message.message}", message.traceback)
        arm, host = self._loaded
        said = host.last_words()
        printed = f"; its host last printed: {said}" if said else ""
        raise RunFailed(
            f"the load generator gave up on {arm}: {message.message}{printed}",
            f"{message.traceback}\n{host.output()}",
        )

    def _raise_if_dead(self, among: Sequence[Child] | None = None) -> None:
        """Name the process that died. A host that was killed takes what its engine started along, so it is
        named first; else that is named before its host, which may have ended because of it. Where no signal
        killed what was started here, an engine may still say what it knows."""
        watched = self._alive if among is None else among
        dead = [child for child in watched if child.ended()]
        if not dead:
            return
        hosts = [child for child in watched if child.popen is not None and child is not self._generator]
        adopted = any(child.popen is None for child in dead)
        if adopted and not any(child.killed for child in dead) and not any(host in dead for host in hosts):
            # The kernel ends what a killed host started before it tells of the host itself.
            self._await_news(hosts, GONE_MS)
            dead = [child for child in watched if child.ended()]
        by_signal = [child for child in dead if child.killed]
        child = (by_signal or [each for each in dead if each.popen is None] or dead)[0]
        if child is self._generator and not by_signal and self._from_load.poll(EXPLAIN_MS):
            word = msgspec.msgpack.decode(self._from_load.recv(), type=messages.FromLoad)
            if isinstance(word, messages.LoadFailed):
                self._raise_load_failure(word)
        if not by_signal:
            self._raise_if_explained()
            self._raise_if_stopped(child.obituary())
        obituary, said = child.obituary(), child.last_words()
        if "ModuleNotFoundError" in said:
            raise api.BadSetting(f"the interpreter of the {child.role} lacks a package: {said}")
        raise RunFailed(f"{obituary}: {said}" if said else obituary, child.output())

    def _raise_if_stopped(self, seen: str) -> None:
        """Name a process that somebody stopped where its engine says nothing: whoever ended of waiting for
        it, or gave it up, is not at fault."""
        if stopped := processes.stopped(self._alive, self._parked):
            raise RunFailed(f"{stopped} is stopped, as by SIGSTOP; seen by this: {seen}")

    def _await_news(self, children: Sequence[Child], patience_ms: int) -> None:
        """Until a host says something or one of these processes has ended."""
        news = zmq.Poller()
        for each in (self._from_hosts, *(child.pidfd for child in children)):
            news.register(each, zmq.POLLIN)
        news.poll(patience_ms)

    def _raise_if_explained(self, patience_ms: int = EXPLAIN_MS) -> None:
        """A host that fails says why and ends; which of the two is seen first is chance."""
        until = monotonic() + patience_ms / 1e3
        while self._from_hosts.poll(max(0, round(1e3 * (until - monotonic())))):
            message = self._heard()  # another word of it may lie before
            if isinstance(message, api.Failed):
                raise self._failure(message)

    def _failure(self, message: api.Failed) -> Exception:
        self._failed.add(host_role(message.name))
        if message.usage:
            lacks = "can't run the engine of" in message.message and message.name in self._worktrees
            return api.BadSetting(message.message + BUILT * lacks)
        gone = [child for child in self._alive if child.pid in message.died]
        who = gone[0].obituary() if gone else f"the engine of {message.name} failed"
        return RunFailed(f"{who}: {message.message}", message.traceback)
