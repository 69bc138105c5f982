"""What a run on a Ray cluster costs the machine that drives it, and how busy it keeps the nodes.

    python -m experiments.validation.ray_driver    five minutes; needs Ray

A real cluster of four nodes on this machine, and the driver as `bench run --ray` has it, from the tasks to
the summary. What a node does for a block is to sleep, and to send the first block of a stored run, with its
values: one that has the records of every step, or one of requests and rounds alone, as a server's. So the
driver has the whole of its work, and the nodes leave it the cores.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import msgspec
import psutil

from experiments.common import command_line
from experiments.common.command_line import ROOT
from experiments.common.record import write_result
from harness.common.machine import fingerprint
from harness.metrics.block import Values
from harness.plan.design import Design
from harness.run.cluster import driver
from harness.run.cluster.node import Measured, values_of
from harness.run.cluster.places import RESOURCE
from harness.run.events import BlockDone, Event, NodeDone, Observer
from harness.store.block import Block
from harness.store.manifest import Manifest, read_manifest
from harness.store.tables import packed, read_block
from harness.studies import measure

RUNS = ROOT / "results" / "reference" / "runs"
WITH_STEPS, WITHOUT = "overlap", "pinned-h2d"
NODES = 4
# The stored run, how many blocks, and the seconds that each takes.
CASES = ((WITHOUT, 1000, 0.5), (WITHOUT, 100, 2.0), (WITH_STEPS, 100, 2.0))
MIB = 1 << 20


@cache
def sent(run: str, node: str) -> tuple[dict[str, bytes], Values]:
    """The first block of the stored run, as if that node had measured it, and its values."""
    tables = read_block(RUNS / run, 0)
    tables["rounds"]["node"] = node
    return packed(tables), values_of(read_manifest(RUNS / run), Block(0, tables))


def sleep(run: str, seconds: float, asked: list[bytes], number: int, warm: frozenset[str]) -> Measured:
    """The task."""
    node, began = driver.name_here(), time.monotonic()
    manifest = msgspec.json.decode(asked[0], type=Manifest)
    if number == -1:
        manifest = msgspec.structs.replace(manifest, descriptions=read_manifest(RUNS / run).descriptions)
    blocks = [sent(run, node)] if number >= 0 else []
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return Measured(
        node=node,
        machine=fingerprint(),
        manifests=[msgspec.json.encode(manifest)],
        tables=[tables for tables, _ in blocks],
        values=[values for _, values in blocks],
        seconds=time.monotonic() - began,
        stolen=0.0,
        said=[],
    )


@dataclass(slots=True)
class Watch:
    """The driver's own time and memory, as its blocks come."""

    began: float = 0.0
    ended: float = 0.0
    busy: float = 0.0  # seconds that nodes spent in blocks
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case BlockDone():  # the discarded one
                self.began = time.monotonic()
                self.cpu.append(time.process_time())
            case NodeDone(seconds=seconds):
                self.ended = time.monotonic()
                self.busy += seconds
                self.cpu.append(time.process_time())
                self.memory.append(psutil.Process().memory_info().rss)

    @contextmanager
    def display(self, folder: Path, design: Design) -> Iterator[Observer]:
        yield self


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run cost. Of a block: the driver's CPU time, and what the node sent."""

    cost_s: float
    bytes: int
    busy: float
    seconds: float
    memory_after_tenth: int
    memory: int


def measured(run: str, blocks: int, seconds: float, address: str) -> Cost:
    """One run whose blocks are those of the stored `run`."""
    stored = read_manifest(RUNS / run).design
    design = msgspec.structs.replace(stored, blocks=blocks, until=None, max_minutes=None)
    watch = Watch()
    with tempfile.TemporaryDirectory() as results:
        # Ray takes a function, and no partial of one.
        def task(asked: list[bytes], number: int, warm: frozenset[str]) -> Measured:
            return sleep(run, seconds, asked, number, warm)

        source = partial(driver.measure, address=address, task=task)
        measure.measure(design, Path(results), watch.display, source=source)
    tables, values = sent(run, "node-0")
    return Cost(
        cost_s=(watch.cpu[-1] - watch.cpu[0]) / blocks,
        bytes=sum(map(len, tables.values())) + len(pickle.dumps(values)),
        busy=watch.busy / (NODES * (watch.ended - watch.began)),
        seconds=watch.ended - watch.began,
        memory_after_tenth=watch.memory[blocks // 10 - 1],
        memory=watch.memory[-1],
    )


def row(run: str, blocks: int, seconds: float, cost: Cost) -> list[str]:
    kind = "every step recorded" if run == WITH_STEPS else "requests and rounds"
    return [
        f"{blocks:,} blocks of {seconds:g} s, {kind}, {cost.bytes / 1024:.0f} KiB",
        f"{1e3 * cost.cost_s:.1f} ms",
        f"{cost.busy:.1%}",
        f"{cost.seconds:.1f} s",
        f"{cost.memory_after_tenth / MIB:.0f} MiB",
        f"{cost.memory / MIB:.0f} MiB",
    ]


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, node_name="head", include_dashboard=False)
        for number in range(NODES):
            cluster.add_node(num_cpus=1, resources={RESOURCE: 1}, node_name=f"node-{number}")
        costs = [measured(*case, cluster.address) for case in CASES]
    finally:
        cluster.shutdown()
    write_result(
        __file__,
        title=f"The driver of a run on {NODES} Ray nodes of this machine, whose blocks only sleep",
        header=[
            "",
            "driver's CPU time a block",
            "nodes busy",
            "in all",
            "memory after a tenth",
            "at the end",
        ],
        rows=[row(*case, cost) for case, cost in zip(CASES, costs, strict=True)],
        data={"nodes": NODES, "without steps": asdict(costs[0]), "with steps": asdict(costs[-1])},
    )


if __name__ == "__main__":
    from experiments.validation import ray_driver  # Ray's workers look for the task by its module's name

    ray_driver.main()
