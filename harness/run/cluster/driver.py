"""Runs whose blocks are measured by the nodes of a Ray cluster, and kept here as they come.

A block is a Ray task. It takes the resource `bench_node`, of which a node that may measure has one, and the
node's CPUs and cards with it: so a node has one block at a time, with all arms of it, and nothing else of
Ray's. A node with eight cards that is to measure on each may have eight; a block then takes an eighth.

As many tasks are asked for as there are places, each at a node that has one free, where it begins at once:
where Ray chooses the node, by what it last heard of each, every block leaves a node idle for 0.1 s. And no
more are asked for: so a task knows which nodes have had their first boots, a rule that stops early leaves
little undone, and a node that joins late is used from then on. Of several runs that are measured at once, as
a sweep's are, the lowest block is the next: all of them progress.

Ray notices what dies, and brings here the tables, and the values that the node made of them. Its own
`max_retries` are off, since they repeat a task without a word: what failed is said and counted here, and a
block that fails twice in the same way ends the run with that.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common.processes import ENDING, undisturbed
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.run.cluster import node
from overlap_bench.harness.run.cluster.node import Measured
from overlap_bench.harness.run.cluster.places import LOOK_S, RESOURCE, Lookout, Places
from overlap_bench.harness.run.hosts import RunFailed
from overlap_bench.harness.run.messages import BlockBegun, BlockDone, NodeDone, Observer, Said
from overlap_bench.harness.store.manifest import Manifest, Repeat, sign_anew, write_manifest
from overlap_bench.harness.store.tables import (
    TABLES,
    Block,
    Unkept,
    finished_blocks,
    stored_table,
    write_packed,
)

if TYPE_CHECKING:
    import pandas as pd

GRACE_S = 10.0  # for tasks that are told to stop to end what they started, before Ray kills them
MOST_WAYS = 4  # in which a block may fail, one after the other
LOCAL = "local"
DEATHS = {"NodeDiedError": "its node died", "WorkerCrashedError": "its worker died"}
NODE = re.compile(r"node ID: (\w{6})")  # in what Ray says of a dead node

Task = Callable[[list[bytes], int, frozenset[str]], Measured]
Blocks = Generator[tuple[list[Manifest], list[Block]]]


def on_this_node(asked: list[bytes], number: int, warm: frozenset[str]) -> Measured:
    """The task. `warm`: nodes by Ray's ids, as a machine that went away and joins again is a new one under
    its old name."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (name,) = (each["NodeName"] for each in ray.nodes() if each["NodeID"] == here)
    return replace(node.measure(asked, number, str(name), here in warm), id=here)


def measure(
    runs: Mapping[Path, Manifest],
    observe: Observer,
    address: str,
    nodes_at_once: int | None = None,
    task: Task = on_this_node,
) -> Blocks:
    """As studies.measure.trials, on the nodes of a cluster that is joined for these runs alone."""
    with joined(address, nodes_at_once, task) as source:
        yield from source(runs, observe)


@contextmanager
def joined(
    address: str, nodes_at_once: int | None = None, task: Task = on_this_node
) -> Iterator[Callable[[Mapping[Path, Manifest], Observer], Blocks]]:
    """What measures blocks on the nodes of the cluster at `address`: "auto", one that this machine is part
    of; "local", this machine alone. What several calls ask for is measured at once, from each call on,
    whichever is waited for. Blocks are kept as they come, and given in their order; nobody joins a cluster
    for a run that lacks none. `task`: what a node does for a block."""
    with ExitStack() as stack:
        yield _Cluster(stack, address, nodes_at_once, task).begin


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, joined to a cluster. Raises BadSetting where there is none, or no Ray."""
    try:
        import ray
    except ImportError:
        raise api.BadSetting("--ray needs Ray: pip install 'overlap-bench[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here reports nothing to anybody
    start = {"resources": {RESOURCE: 1}, "include_dashboard": False} if address == LOCAL else {}
    # Ray takes SIGTERM for itself, and would end this process without a last word.
    handlers = {each: signal.getsignal(each) for each in ENDING}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **start)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise api.BadSetting(f"can't join a Ray cluster at {address}: {said}") from error
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    # Ray prints to stdout, where the result goes, that a node died: which is told here too.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            yield ray
        finally:
            with undisturbed():
                ray.shutdown()


class Died(RunFailed):
    """What measured a block is gone, and could not say why."""


def of_death(error: Exception) -> str:
    """What Ray says of it, in words that are the same where the same thing happened."""
    said = DEATHS.get(type(error).__name__) or str(error).splitlines()[0]
    which = NODE.search(str(error))
    return f"{said} ({which.group(1)})" if which else said


@dataclass(slots=True, eq=False)
class _Job:
    """Runs that share their boots: which of their blocks are missing, and what came of them."""

    folders: list[Path]
    manifests: list[Manifest]
    observe: Observer
    kept: list[set[int]]  # of each run; killed between two writes, some have a block that others lack
    missing: list[int]  # not under way, the next one first
    values: list[dict[int, Values]]  # of each run, by block: of those measured now and not given yet
    under_way: set[int] = field(default_factory=set)
    warm: set[str] = field(default_factory=set)  # by Ray's id, nodes that have had its first boots
    failed: dict[int, set[str]] = field(default_factory=dict)  # by block, in which ways
    error: BaseException | None = None  # that ends it

    @property
    def next(self) -> int | None:
        """The very first is the discarded one: all that is sized by it has to be the same on each node."""
        if not self.manifests[0].descriptions:
            return None if -1 in self.under_way else -1
        return self.missing[0] if self.missing else None

    def take(self) -> int:
        assert self.next is not None
        block = self.next
        if block == -1:
            self.observe(BlockBegun(-1, len(self.missing)))
        else:
            self.missing.pop(0)
        self.under_way.add(block)
        return block

    def keep(self, block: int, measured: Measured) -> None:
        """Note where a block comes from, and what was found out by the first one."""
        if block == -1:
            found = [msgspec.json.decode(each, type=Manifest) for each in measured.manifests]
            self.manifests = [*map(sign_anew, self.manifests, found)]
        self.warm.add(measured.id)
        if measured.node not in (known := self.manifests[0].nodes):
            self._record(nodes={**known, measured.node: measured.machine})
        for line in measured.said:
            self.observe(Said(line))

    def write(self, block: int, measured: Measured) -> None:
        """Write a block. If the run has it already, the one that it has stays, and counts."""
        for folder, there, tables, known, values in zip(
            self.folders, self.kept, measured.tables, self.values, measured.values, strict=True
        ):
            if block not in there:
                write_packed(folder, block, tables)
                known[block] = values

    def again(self, block: int, error: BaseException) -> None:
        """Have a block measured once more. Raises what failed, if that is nothing that another node, or
        another time, could help; and if it failed before in that way, with other numbers in its words. An
        engine that can't even be booted for the first time is not tried again."""
        if isinstance(error, ImportError):
            raise api.BadSetting(f"a node lacks this project, or a package of it: {error}") from error
        if isinstance(error, api.BadSetting) or not isinstance(error, api.EngineError):
            raise error
        ways = self.failed.setdefault(block, set())
        way = re.sub(r"\d+", "", node.without_node(str(error)))
        if way in ways or len(ways) == MOST_WAYS or (block == -1 and not isinstance(error, Died)):
            raise error
        ways.add(way)
        if block == -1:
            self.observe(Said(f"the first boots are done once more: {error}"))
            return
        self._record(repeats=[*self.manifests[0].repeats, Repeat(block=block, reason=str(error))])
        self.missing.insert(0, block)
        self.observe(Said(f"trial {block + 1} is measured once more: {error}"))

    def _record(self, **changes: object) -> None:
        """Note in every manifest what holds for all these runs, whose boots are the same."""
        self.manifests = [msgspec.structs.replace(each, **changes) for each in self.manifests]
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            write_manifest(folder, manifest)


def job_of(runs: Mapping[Path, Manifest], observe: Observer) -> _Job:
    """What is still to be measured of runs, by what their folders hold."""
    folders, manifests = list(runs), list(runs.values())
    kept = [set(finished_blocks(folder)) for folder in folders]
    numbers = range(manifests[0].design.blocks)
    missing = [number for number in numbers if not all(number in there for there in kept)]
    return _Job(folders, manifests, observe, kept, missing, values=[{} for _ in folders])


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A task: whose block, which, the node that it was asked for at, and Ray's reference."""

    job: _Job
    block: int
    node: str
    reference: Any


@dataclass(slots=True)
class _Cluster:
    stack: ExitStack
    address: str
    most: int | None  # blocks under way at once; None: as many as there are places
    task: Task
    ray: Any = None  # once it is joined
    remote: Any = None  # the task, as Ray has it
    lookout: Lookout | None = None
    jobs: list[_Job] = field(default_factory=list)
    tasks: dict[Future[Measured], _UnderWay] = field(default_factory=dict)
    done: SimpleQueue[Future[Measured]] = field(default_factory=SimpleQueue)
    nowhere: bool = False  # told that there is no node

    def begin(self, runs: Mapping[Path, Manifest], observe: Observer) -> Blocks:
        """Measure what is missing of these runs from now on; their blocks, in their order."""
        job = job_of(runs, observe)
        if job.missing:
            self._join()
            self.jobs.append(job)
        return self._blocks_of(job)

    def _join(self) -> None:
        if self.ray is None:
            self.ray = self.stack.enter_context(_connected(self.address))
            self.remote = self.ray.remote(self.task)
            self.lookout = Lookout(self.ray)
            self.stack.callback(self.lookout.close)
            self.stack.callback(self._end_all)

    def _blocks_of(self, job: _Job) -> Blocks:
        readers = [reader(folder) for folder in job.folders]
        try:
            for number in range(job.manifests[0].design.blocks):
                self._wait_for(job, number)
                yield (
                    job.manifests,
                    [
                        Block(number, Unkept(partial(read, number)), known.pop(number, None))
                        for read, known in zip(readers, job.values, strict=True)
                    ],
                )
        finally:
            self._end(job)

    def _wait_for(self, job: _Job, block: int) -> None:
        """Until a block is kept. What comes meanwhile of other runs is kept too, and what fails there is
        theirs to raise."""
        while job.error is None and (block in job.missing or block in job.under_way):
            self._ask()
            try:
                self._take(self.done.get(timeout=LOOK_S))
            except Empty:
                continue
        if job.error is not None:
            raise job.error

    def _ask(self) -> None:
        assert self.lookout is not None
        there = self.lookout.places()
        self._check_there(there)
        most = there.count if self.most is None else min(self.most, there.count)
        while len(self.tasks) < most and (job := self._next()) is not None:
            self._start(job, job.take(), there)

    def _next(self) -> _Job | None:
        asking = [(block, place) for place, job in enumerate(self.jobs) if (block := job.next) is not None]
        return self.jobs[min(asking)[1]] if asking else None

    def _check_there(self, there: Places) -> None:
        if there.count:
            self.nowhere = False
            return
        remedy = f"""start a node with ray start --resources '{{"{RESOURCE}": 1}}' --address=..."""
        if not self.tasks and not any(job.warm or job.failed for job in self.jobs):
            raise api.BadSetting(f"no node of the cluster has the resource {RESOURCE}: {remedy}")
        if not self.nowhere:
            self.jobs[0].observe(Said(f"no node is left: waiting for one; {remedy}"))
        self.nowhere = True

    def _start(self, job: _Job, block: int, there: Places) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = there.free(each.node for each in self.tasks.values())
        task = self.remote.options(
            num_cpus=there.cpus,
            num_gpus=there.gpus,
            resources={RESOURCE: 1},
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),  # gone by then: another one
        )
        reference = task.remote([*map(msgspec.json.encode, job.manifests)], block, frozenset(job.warm))
        future: Future[Measured] = reference.future()
        self.tasks[future] = _UnderWay(job, block, node, reference)
        future.add_done_callback(self.done.put)

    def _take(self, future: Future[Measured]) -> None:
        """What came of a task. Of runs that are over nobody wants to know."""
        task = self.tasks.pop(future)
        task.job.under_way.discard(task.block)
        if task.job not in self.jobs:
            return
        try:
            self._keep_or_repeat(task, future)
        except Exception as error:
            task.job.error = error
            self._end(task.job)

    def _keep_or_repeat(self, task: _UnderWay, future: Future[Measured]) -> None:
        assert self.lookout is not None
        try:
            measured = future.result()
        except self.ray.exceptions.RayTaskError as error:
            task.job.again(task.block, error.cause)
        except self.ray.exceptions.RayError as error:
            if isinstance(error, self.ray.exceptions.NodeDiedError):
                self.lookout.forget(task.node)
            task.job.again(task.block, Died(of_death(error), str(error)))
        else:
            self._keep(task.job, task.block, measured)

    def _keep(self, job: _Job, block: int, measured: Measured) -> None:
        job.keep(block, measured)
        if block == -1:
            job.observe(BlockDone(-1, measured.seconds))
            return
        try:
            self._ask()  # the node is free: it shall not wait for what is written here
        finally:  # where the cluster is gone, what it measured is not
            job.write(block, measured)
        left = sum(len(each.missing) + len(each.under_way) for each in self.jobs)
        job.observe(NodeDone(block, measured.node, measured.seconds, measured.stolen, left, len(self.tasks)))

    def _end(self, job: _Job) -> None:
        """Ask for nothing more of it. What is under way is told to stop, and holds its node until it has."""
        if job in self.jobs:
            self.jobs.remove(job)
            with undisturbed():
                for task in self.tasks.values():
                    if task.job is job:
                        self.ray.cancel(task.reference)

    def _end_all(self) -> None:
        with undisturbed():
            for job in [*self.jobs]:
                self._end(job)
            late = wait(self.tasks, GRACE_S).not_done
            for future in late:
                self.ray.cancel(self.tasks[future].reference, force=True)
            wait(late, GRACE_S)
            self.tasks.clear()


def reader(folder: Path) -> Callable[[int, str], pd.DataFrame]:
    """What reads the tables of a run's blocks, and keeps those of one block: whoever looks at one looks at
    it again, and a thousand blocks do not fit into memory."""

    @lru_cache(maxsize=len(TABLES))
    def read(number: int, name: str) -> pd.DataFrame:
        return stored_table(folder, number, name)

    return read
