"""A run whose blocks are measured by the nodes of a Ray cluster, and kept here as they come.

A block is a Ray task. It takes the resource `bench_node`, of which a node that may measure has one, and the
node's CPUs and cards with it: so a node has one block at a time, with all arms of it, and nothing else of
Ray's. A node with eight cards that is to measure on each may have eight; a block then takes an eighth.

Ray places the tasks, notices what dies, and brings the tables here. As many tasks are asked for as there are
places, and no more: so a task knows which nodes have had their first boots, a rule that stops early leaves
little undone, and a node that joins late is used from then on. Ray's own `max_retries` are off, since they
repeat a task without a word: what failed is said and counted here, and a block that fails twice in the same
way ends the run with that.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from engines import api
from harness.common.signals import ENDING, undisturbed
from harness.run.blocks import stored_block
from harness.run.cluster import node
from harness.run.cluster.node import Measured
from harness.run.events import BlockBegun, BlockDone, NodeDone, Observer, Said
from harness.run.hosts import RunFailed
from harness.store.block import Block
from harness.store.manifest import Manifest, Repeat, write_manifest
from harness.store.tables import finished_blocks, write_packed

RESOURCE = "bench_node"
LOOK_S = 5.0  # between two looks for nodes that joined, while no block comes
GRACE_S = 10.0  # for tasks that are told to stop to end what they started, before Ray kills them
MOST_WAYS = 4  # in which a block may fail, one after the other
LOCAL = "local"
DEATHS = {"NodeDiedError": "its node died", "WorkerCrashedError": "its worker died"}
NODE = re.compile(r"node ID: (\w{6})")  # in what Ray says of a dead node

Task = Callable[[list[bytes], int, frozenset[str]], Measured]


def on_this_node(asked: list[bytes], number: int, warm: frozenset[str]) -> Measured:
    """The task."""
    return node.measure(asked, number, name_here(), warm)


def name_here() -> str:
    """What Ray calls the node that this process, a worker, runs on."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (name,) = (each["NodeName"] for each in ray.nodes() if each["NodeID"] == here)
    return str(name)


def measure(
    runs: Mapping[Path, Manifest],
    observe: Observer,
    address: str,
    nodes_at_once: int | None = None,
    task: Task = on_this_node,
) -> Generator[tuple[list[Manifest], list[Block]]]:
    """As run.blocks.measure, on the nodes of the cluster at `address`: "auto", one that this machine is part
    of; "local", this machine alone. Blocks are kept as they come, and given in their order. `task`: what a
    node does for a block."""
    folders, manifests = list(runs), list(runs.values())
    numbers = range(manifests[0].design.blocks)
    kept = [set(finished_blocks(folder)) for folder in folders]
    missing = [number for number in numbers if not all(number in there for there in kept)]
    under_way: _Blocks | None = None
    with ExitStack() as stack:
        if missing:
            ray = stack.enter_context(_connected(address))
            under_way = _Blocks(ray, task, folders, manifests, kept, missing, observe, nodes_at_once)
            stack.enter_context(closing(under_way))
        for number in numbers:
            if under_way is not None:
                under_way.wait_for(number)
                manifests = under_way.manifests
            yield manifests, [stored_block(folder, number) for folder in folders]


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, joined to a cluster. Raises BadSetting where there is none, or no Ray."""
    try:
        import ray
    except ImportError:
        raise api.BadSetting("--ray needs Ray: pip install -e '.[ray]'") from None
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
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            yield ray
        finally:
            with undisturbed():
                ray.shutdown()


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks can be measured now: how many at once, and what of a node each takes."""

    count: int
    cpus: float
    gpus: float


def places(nodes: list[dict[str, Any]]) -> Places:
    """Of the nodes that Ray lists. What a block takes fits on the smallest of them."""
    marked = [
        each["Resources"] for each in nodes if each["Alive"] and each["Resources"].get(RESOURCE, 0) >= 1
    ]
    if not marked:
        return Places(0, 0, 0)
    cpus, gpus = (min(each.get(what, 0) / each[RESOURCE] for each in marked) for what in ("CPU", "GPU"))
    return Places(sum(int(each[RESOURCE]) for each in marked), _whole(cpus), _whole(gpus))


def _whole(count: float) -> float:
    """Ray has parts of one, and whole ones."""
    return count if count < 1 else int(count)


class Died(RunFailed):
    """What measured a block is gone, and could not say why."""


def of_death(error: Exception) -> str:
    """What Ray says of it, in words that are the same where the same thing happened."""
    said = DEATHS.get(type(error).__name__) or str(error).splitlines()[0]
    which = NODE.search(str(error))
    return f"{said} ({which.group(1)})" if which else said


@dataclass(slots=True)
class _Blocks:
    """The blocks that are missing, those under way, and what came of them."""

    ray: Any
    task: Task
    folders: list[Path]
    manifests: list[Manifest]
    kept: list[set[int]]  # of each run; killed between two writes, some have a block that others lack
    missing: list[int]  # not under way, the next one first
    observe: Observer
    most: int | None  # blocks under way at once; None: as many as there are places
    tasks: dict[Future[Measured], tuple[int, Any]] = field(default_factory=dict)  # block, and Ray's reference
    done: SimpleQueue[Future[Measured]] = field(default_factory=SimpleQueue)
    warm: set[str] = field(default_factory=set)  # nodes that have had their first boots
    failed: dict[int, set[str]] = field(default_factory=dict)  # by block, in which ways
    nowhere: bool = False  # told that there is no node

    def wait_for(self, block: int) -> None:
        """Until a block is kept."""
        while block in self.missing or any(block == number for number, _ in self.tasks.values()):
            self._ask()
            try:
                future = self.done.get(timeout=LOOK_S)
            except Empty:
                continue
            self._take(future)

    def _ask(self) -> None:
        """Have Ray measure as many blocks as there are places. The very first is the discarded one: all that
        is sized by it has to be the same on each node."""
        there = places(self.ray.nodes())
        self._check_there(there)
        described = bool(self.manifests[0].descriptions)
        if not described and not self.tasks:
            self.observe(BlockBegun(-1, len(self.missing)))
            self._start(-1, there)
        most = there.count if self.most is None else min(self.most, there.count)
        while described and self.missing and len(self.tasks) < most:
            self._start(self.missing.pop(0), there)

    def _check_there(self, there: Places) -> None:
        if there.count:
            self.nowhere = False
            return
        remedy = f"""start a node with ray start --resources '{{"{RESOURCE}": 1}}' --address=..."""
        if not self.warm and not self.tasks:
            raise api.BadSetting(f"no node of the cluster has the resource {RESOURCE}: {remedy}")
        if not self.nowhere:
            self.observe(Said(f"no node is left: waiting for one; {remedy}"))
        self.nowhere = True

    def _start(self, block: int, there: Places) -> None:
        task = self.ray.remote(self.task).options(
            num_cpus=there.cpus, num_gpus=there.gpus, resources={RESOURCE: 1}, max_retries=0
        )
        reference = task.remote([*map(msgspec.json.encode, self.manifests)], block, frozenset(self.warm))
        future: Future[Measured] = reference.future()
        self.tasks[future] = block, reference
        future.add_done_callback(self.done.put)

    def _take(self, future: Future[Measured]) -> None:
        block, _ = self.tasks.pop(future)
        try:
            measured = future.result()
        except self.ray.exceptions.RayTaskError as error:
            self._again(block, error.cause)
        except self.ray.exceptions.RayError as error:
            self._again(block, Died(of_death(error), str(error)))
        else:
            self.warm.add(measured.node)
            self._keep(block, measured)

    def _keep(self, block: int, measured: Measured) -> None:
        if block == -1:
            self.manifests = [msgspec.json.decode(each, type=Manifest) for each in measured.manifests]
        if measured.node not in (known := self.manifests[0].nodes):
            self._record(nodes={**known, measured.node: measured.machine})
        for line in measured.said:
            self.observe(Said(line))
        if block == -1:
            self.observe(BlockDone(-1, measured.seconds))
            return
        self._ask()  # the node is free: it shall not wait for what is written here
        for folder, there, tables in zip(self.folders, self.kept, measured.tables, strict=True):
            if block not in there:
                write_packed(folder, block, tables)
        left = len(self.missing) + len(self.tasks)
        self.observe(NodeDone(block, measured.node, measured.seconds, measured.stolen, left, len(self.tasks)))

    def _again(self, block: int, error: BaseException) -> None:
        """Have a block measured once more. Raises what failed, if that is nothing that another node, or
        another time, could help; and if it failed before in that way, with other numbers in its words. An
        engine that can't even be booted for the first time is not tried again."""
        if isinstance(error, ImportError):
            raise api.BadSetting(f"a node lacks this project, or a package of it: {error}") from error
        if isinstance(error, api.BadSetting) or not isinstance(error, api.EngineError):
            raise error
        ways = self.failed.setdefault(block, set())
        way = re.sub(r"\d+", "", str(error))
        if way in ways or len(ways) == MOST_WAYS or (block == -1 and not isinstance(error, Died)):
            raise error
        ways.add(way)
        if block == -1:
            self.observe(Said(f"the first boots are done once more: {error}"))
            return
        self._record(repeats=[*self.manifests[0].repeats, Repeat(block=block, reason=str(error))])
        self.missing.insert(0, block)
        self.observe(Said(f"block {block + 1} is measured once more: {error}"))

    def _record(self, **changes: object) -> None:
        """Note in every manifest what holds for all these runs, whose boots are the same."""
        self.manifests = [msgspec.structs.replace(each, **changes) for each in self.manifests]
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            write_manifest(folder, manifest)

    def close(self) -> None:
        """End what is under way, wherever it is."""
        with undisturbed():
            for _, reference in self.tasks.values():
                self.ray.cancel(reference)
            late = wait(self.tasks, GRACE_S).not_done
            for future in late:
                self.ray.cancel(self.tasks[future][1], force=True)
            wait(late, GRACE_S)
            self.tasks.clear()
