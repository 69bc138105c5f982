"""The live side of a run: the load generator and the booted engines, and what they are told and asked. One
Session per run; everything it started is gone when it is left, however it is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import psutil
import zmq

from overlap_bench.engines import api
from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import with_below
from overlap_bench.harness.common import processes
from overlap_bench.harness.common.processes import Child, postponed
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.run import messages, records
from overlap_bench.harness.run.hosts import (
    EXPLAIN_MS,
    HOST,
    ROLES,
    SIDE_BY_SIDE,
    Link,
    RunFailed,
    Trees,
    bytecode_in,
    check_description,
    check_interpreter,
    check_memory,
    check_none_stopped,
    driven,
    environment,
    host_role,
    private_bytes,
    side_by_side,
    spec_of,
)
from overlap_bench.harness.run.messages import Booting, Said
from overlap_bench.harness.workload.plan import Planned

STALL_S = 60.0  # requests in flight and no event for so long: the engine is taken for dead
ANSWER_S = 60.0  # who should answer at once, and says nothing for so long, hangs; a start may take any time
TELL_S = 5.0  # between two words on what boots
LOAD_GENERATOR = "overlap_bench.harness.run.load_generator"

if TYPE_CHECKING:
    from overlap_bench.harness.run.patched import Patches
    from overlap_bench.harness.run.watch import Watch

T = TypeVar("T")
OnProgress = Callable[[messages.Progress], object]
OnBooting = Callable[[Booting | Said], object]


@dataclass(frozen=True, slots=True)
class Booted:
    """A running engine. `children` is its host first, then every other process it named."""

    arm: Arm
    children: tuple[Child, ...]
    inbox: zmq.Socket[bytes]
    address: str
    description: api.Description
    baton: Path  # its FIFO

    @property
    def pids(self) -> dict[str, int]:
        return {"engine": self.children[0].pid, **self.description.pids}


class Session(Link):
    """The live side of a run.

    `worktrees`: by the arm's name, the folder whose code it runs in place of what is installed. Without a
    `generator` no load is put on the engines: what they say comes here (`submit`, `events`), and is not
    timed.
    """

    def __init__(self, worktrees: Mapping[str, Path] | None = None, generator: bool = True) -> None:
        super().__init__(worktrees or {})
        self._with_generator = generator
        self._boots = 0
        self.asked_s = 0.0  # that the engines took to say whether they can run; only the first boot asks
        self._on_cpu: set[str] = set()  # arms that have said that they share no card's memory
        self._began_ns = 0
        self._patches: Patches | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._bytecode = bytecode_in(self._room / "bytecode")
        try:
            if self._with_generator:
                self._start_load()
            else:
                self._events = self._bound("events")
                self._poller.register(self._events, zmq.POLLIN)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def pids(self) -> dict[str, int]:
        load = {} if self._generator is None else {"load_generator": self._generator.pid}
        return {"harness": os.getpid(), **load}

    # -- boots ---------------------------------------------------------------------------------------------

    def watch(self, design: Design) -> Watch:
        """What looks at one boot of these arms, and at no other."""
        from overlap_bench.harness.run.watch import Watch

        arms = tuple(map(self._patched, design.arms))
        return Watch(msgspec.structs.replace(design, arms=arms), self._worktrees, self._room)

    def boot(
        self,
        arms: Sequence[Arm],
        on_booting: OnBooting = lambda event: None,
        watch: Watch | None = None,
    ) -> dict[str, Booted]:
        """Start one engine per arm, in order, some side by side; by name, all ready. Raises BadSetting or
        RunFailed."""
        arms = [self._patched(arm) for arm in arms]
        first = self._boots == 0
        # The memory of the first two tells whether the others fit, so only later boots start more at once.
        at_once = SIDE_BY_SIDE if first else side_by_side(len(os.sched_getaffinity(0)))
        if first:
            for arm in arms:
                check_interpreter(arm)
            began = monotonic()
            self._on_cpu |= {name for name, kind in _asked(arms, on_booting).items() if kind == "cpu"}
            self.asked_s = monotonic() - began
        if any(spec_of(arm).starts_alone and arm.name not in self._on_cpu for arm in arms):
            at_once = 1
        booted: dict[str, Booted] = {}
        while len(booted) < len(arms):
            booted |= self._boot(arms[len(booted) : len(booted) + at_once], on_booting, watch)
            if first:
                children = (child for each in booted.values() for child in each.children)
                taken, memory = known(private_bytes, None, children), known(psutil.virtual_memory, None)
                if taken is not None and memory is not None:
                    check_memory(len(booted), len(arms), taken, memory.available)
        self._on_cpu |= {name for name, each in booted.items() if each.description.device["kind"] == "cpu"}
        return booted

    def _patched(self, arm: Arm) -> Arm:
        """The arm as it is started: one that has a patch finds its own copy of the packages first."""
        if arm.patch is None:
            return arm

        from overlap_bench.harness.run.patched import Patches

        self._patches = self._patches or Patches(self._room)
        return self._patches.find_first(arm, arm.patch)

    def _boot(self, arms: Sequence[Arm], on_booting: OnBooting, watch: Watch | None) -> dict[str, Booted]:
        descriptions: dict[str, api.Description] = {}
        began = monotonic()
        try:
            hosts = {arm.name: self._start_host(arm, watch) for arm in arms}
            while len(descriptions) < len(arms):
                missing = [arm.name for arm in arms if arm.name not in descriptions]
                log = hosts[missing[0]][0].log
                assert log is not None
                while not self._poller.poll(round(min(TELL_S, ANSWER_S) * 1e3)):
                    took = monotonic() - began
                    on_booting(Booting(tuple(missing), took, log))
                    if took >= ANSWER_S:
                        check_none_stopped(self._alive, took)
                ready = self._host_says(api.Ready, ANSWER_S)
                check_description(ready)
                self._check_origin(ready, arms)
                descriptions[ready.name] = ready.description
        except KeyboardInterrupt as error:  # how long a start may take is not known here: perhaps one hangs
            missing = [arm.name for arm in arms if arm.name not in descriptions]
            error.add_note(f"{' and '.join(missing)} had not started yet")
            raise
        return {arm.name: self._joined(arm, *hosts[arm.name], descriptions[arm.name]) for arm in arms}

    def shut(self, booted: Sequence[Booted]) -> list[str]:
        """Ask engines to stop; what does not is killed. The arms of those that were killed. Raises RunFailed
        where one fails while it stops."""
        for each in booted:
            each.inbox.send(msgspec.msgpack.encode(api.Stop()))
        children = [child for each in booted for child in each.children]
        with postponed():  # a Ctrl-C now ends the run, once nothing is left half ended
            for child in children:
                self._poller.unregister(child.pidfd)
            late = processes.end(children, processes.GRACE_S)
            for child in children:
                self._alive.remove(child)
            for each in booted:
                each.inbox.close(linger=0)
        # Left unread, such a failure would be blamed on the next boot, or on nothing after the last; what a
        # host said before it ended may still be on its way.
        failed = any((child.code or 0) > 0 for child in children)
        self._raise_if_explained(EXPLAIN_MS if failed else 0)
        return [each.arm.name for each in booted if any(child in late for child in each.children)]

    def _start_host(self, arm: Arm, watch: Watch | None) -> tuple[Child, str, Path]:
        self._boots += 1
        stem = f"host-{self._boots}"
        address, baton = self._endpoint(stem), self._room / f"baton-{self._boots}"
        os.mkfifo(baton)
        config = api.HostConfig(
            name=arm.name,
            build=spec_of(arm).build,
            options=arm.options,
            toggles=arm.toggles,
            inbox=address,
            replies=self._endpoint("hosts"),
            events=self._endpoint("events"),
            baton=str(baton),
        )
        role = host_role(arm.name)
        worktree = self._worktrees.get(arm.name)
        # A server is started as its command says: its threads and where it imports from are its own affair.
        plain = "cmd" in arm.toggles
        alone = ["-P"] if plain else []  # what PYTHONSAFEPATH says, to the host and not to its server
        command = [arm.python or sys.executable, *alone, "-m", HOST]
        command.append(msgspec.json.encode(config).decode())
        extra = arm.env if plain else self._bytecode | arm.env
        values = environment(extra, worktree, plain)
        if watch is not None:
            values = watch.environment(arm.name, values)
        return self._start(role, command, values, stem), address, baton

    def _check_origin(self, ready: api.Ready, arms: Sequence[Arm]) -> None:
        """An engine found outside its worktree is the same code in both arms: a lie of a result. Not where it
        is our adapter of a package that the tree has: what ran of that is watched (run/foreign.py)."""
        worktree = self._worktrees.get(ready.name)
        if worktree is None or not ready.origin or Path(ready.origin).is_relative_to(worktree):
            return
        if any(driven(spec_of(arm), worktree) for arm in arms if arm.name == ready.name):
            return
        raise api.BadSetting(
            f"{ready.name} was to run the code of its ref, and its interpreter found the engine in "
            f"{ready.origin}: install each ref into an interpreter of its own, and give these with "
            "--before python=... --after python=..."
        )

    def _joined(
        self, arm: Arm, host: Child, address: str, baton: Path, description: api.Description
    ) -> Booted:
        inbox = self._socket(zmq.PUSH)
        inbox.connect(address)
        children = [host]
        for role, pid in description.pids.items():
            if pid == host.pid:
                continue
            child = processes.adopt(f"{ROLES.get(role, role)} of {arm.name}", pid)
            if child is None:
                self._raise_if_explained()
                raise RunFailed(f"the {ROLES.get(role, role)} of {arm.name} (pid {pid}) died at once")
            self._watch(child)
            children.append(child)
        return Booted(arm, tuple(children), inbox, address, description, baton)

    def _start_load(self) -> None:
        config = messages.LoadConfig(
            events=self._endpoint("events"), inbox=self._endpoint("orders"), replies=self._endpoint("load")
        )
        command = [sys.executable, "-m", LOAD_GENERATOR, msgspec.json.encode(config).decode()]
        self._generator = self._start("load generator", command, environment({}), "generator")
        self._load_says(messages.LoadReady)
        self._to_load.connect(config.inbox)

    # -- rounds --------------------------------------------------------------------------------------------

    def begin(self, booted: Booted) -> None:
        """Make the engine forget what it recorded."""
        self._began_ns = perf_counter_ns()
        self._ask(booted, api.BeginRound(), api.Begun)

    def begin_profile(self, booted: Booted, steps: int) -> None:
        """The same, for a round that is profiled, with a window of so many steps."""
        self._began_ns = perf_counter_ns()
        self._ask(booted, api.BeginProfile(steps), api.Begun)

    def load(
        self, booted: Booted, plan: list[Planned], concurrency: int | None, interval_ns: int,
        on_progress: OnProgress,
    ) -> messages.RoundDone:  # fmt: skip
        """Send one round's requests and wait for their end; meanwhile this process sleeps."""
        self._loaded = booted.arm.name, booted.children[0]
        self._order([booted], plan, concurrency, interval_ns)
        return self._load_says(messages.RoundDone, on_progress)

    def _order(
        self, booted: Sequence[Booted], plan: list[Planned], concurrency: int | None, interval_ns: int
    ) -> None:
        order = messages.RunRound(
            targets=[each.address for each in booted],
            plan=plan,
            concurrency=concurrency,
            interval_ns=interval_ns,
        )
        self._to_load.send(msgspec.msgpack.encode(order))

    def take_turns(
        self,
        booted: Sequence[Booted],
        plan: Sequence[Planned],
        steps: int,
        on_progress: OnProgress,
        delays: Sequence[tuple[str, int]] = (),
    ) -> messages.RoundDone:
        """Have these engines, begun, each serve `plan` (all of it due at once), `steps` steps at a time, in
        turn and in this order; meanwhile this process sleeps. `delays`: as of api.BeginTurns. Raises
        RunFailed for one that keeps its turn."""
        self._loaded, self._turning = None, {each.arm.name for each in booted}
        self._parked = {pid for each in booted for role, pid in each.pids.items() if role == "server"}
        started = [*self.pids.values(), *(pid for each in booted for pid in each.pids.values())]
        run = list(known(with_below, started, started))
        for each, following in zip(booted, [*booted[1:], booted[0]], strict=True):
            order = api.BeginTurns(steps, len(plan), str(following.baton), len(booted), run, list(delays))
            self._ask(each, order, api.Begun)
        copies = [
            msgspec.structs.replace(each, id=place * len(plan) + number)
            for place in range(len(booted))
            for number, each in enumerate(plan)
        ]
        self._order(booted, copies, None, 0)
        for _ in booted:
            self._host_says(api.Parked, ANSWER_S, "an engine hangs: it did not get its requests for {}")
        baton = os.open(booted[0].baton, os.O_WRONLY)
        os.write(baton, bytes(1))
        os.close(baton)
        done = self._load_says(messages.RoundDone, on_progress)
        for each in booted:
            each.inbox.send(msgspec.msgpack.encode(api.EndTurns()))
        self._parked.clear()
        return done

    def collect(self, booted: Booted) -> api.RoundRecord:
        """What the engine recorded since `begin`. Raises RunFailed for records that can't be."""
        return self.collect_turns(booted)[0]

    def collect_turns(self, booted: Booted) -> tuple[api.RoundRecord, api.TurnTable]:
        """The same, with the turns that it has had; none where it had none."""
        collected = self._ask(booted, api.Collect(), api.Collected)
        record = collected.record
        if wrong := records.broken(record, self._began_ns, perf_counter_ns()):
            raise RunFailed(f"the engine of {booted.arm.name} made impossible records: {wrong}")
        return record, collected.turns or api.TurnTable(0, b"")

    # -- without a load generator --------------------------------------------------------------------------

    def submit(self, booted: Booted, request: api.Request) -> None:
        """Send a request, whose events come to `events`."""
        booted.inbox.send(msgspec.msgpack.encode(api.Submit(request)))

    def events(self) -> list[api.Event]:
        """What an engine says next; with requests in flight. Raises RunFailed where it says nothing."""
        self._wait(self._events, STALL_S, "no engine said anything for {}, with requests in flight")
        return msgspec.msgpack.decode(self._events.recv(), type=list[api.Event])

    def _ask(self, booted: Booted, command: msgspec.Struct, kind: type[T]) -> T:
        """Tell an engine to do what takes it no time, and wait for its answer."""
        booted.inbox.send(msgspec.msgpack.encode(command))
        what = f"the engine of {booted.arm.name} hangs: it did not answer {type(command).__name__} for {{}}"
        return self._host_says(kind, ANSWER_S, what)

    def _host_says(self, kind: type[T], seconds: float | None = None, silence: str = "") -> T:
        while True:
            self._wait(self._from_hosts, seconds, silence)
            message = self._heard()
            if isinstance(message, api.Failed):
                raise self._failure(message)
            if isinstance(message, kind):
                return message

    def _load_says(self, kind: type[T], on_progress: OnProgress | None = None) -> T:
        while True:
            assert self._generator is not None
            who = f"the {self._generator.role} (pid {self._generator.pid})"
            self._wait(self._from_load, ANSWER_S, f"{who} hangs: it has said nothing for {{}}")
            message = msgspec.msgpack.decode(self._from_load.recv(), type=messages.FromLoad)
            if isinstance(message, messages.LoadFailed):
                self._raise_load_failure(message)
            if isinstance(message, messages.Progress) and on_progress is not None:
                on_progress(message)
            if isinstance(message, kind):
                return message


@contextmanager
def checked_out(design: Design) -> Iterator[Trees]:
    """What overlay.checked_out makes of the arms; nothing where they run what is installed, as most do."""
    if not design.overlay and all(arm.ref is None for arm in design.arms):
        yield Trees({}, [])
        return

    from overlap_bench.harness.run import overlay

    with overlay.checked_out(design) as trees:
        yield trees


def _asked(arms: Sequence[Arm], say: OnBooting) -> dict[str, str]:
    """The kind of device of each arm whose engine has something to say before it boots (run/preflight.py)."""
    if not any(spec_of(arm).preflight for arm in arms):
        return {}

    from overlap_bench.harness.run import preflight

    return preflight.ask(arms, say)
