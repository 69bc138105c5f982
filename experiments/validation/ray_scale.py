"""How 1,000 blocks on up to 1,000 nodes would go: how long, how busy nodes and driver are, what is moved.

    python -m experiments.validation.ray_scale    a minute; after experiments.validation.ray_driver

By simulation. Measured are the times of blocks (of stored runs, drawn again and again), and what a block
costs the driver and weighs (of ray_driver). Assumed is how often a node dies. The driver does one thing at a
time, as it does: it takes a block that came, sends the node the next one, writes, then takes another.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass

import numpy as np

from experiments.common import command_line
from experiments.common.command_line import ROOT
from experiments.common.record import FOLDER, write_result
from harness.analysis.values import block_seconds
from harness.store.block import Block
from harness.store.tables import finished_blocks, read_block

BLOCKS = 1000
NODES = (1, 10, 100, 300, 1000)
RUNS = ("overlap", "pinned-h2d", "async-output")  # whose blocks' times are drawn
DEATHS_PER_HOUR = (0.0, 0.1)  # of a node: none, and one that lasts ten hours
REJOINS_S = 300.0  # a node that died is replaced
TIMES = 20  # simulations of each
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Went:
    """One simulated run. `busy`: of nodes, with blocks that were kept; `load`: of the driver."""

    seconds: float
    busy: float
    load: float
    again: int


def run(random: np.random.Generator, nodes: int, seconds: list[float], cost: float, deaths: float) -> Went:
    """Blocks on nodes, until the last one is written. `cost`: the driver's seconds for a block."""
    left, done, again, useful = BLOCKS, 0, 0, 0.0
    free = 0.0  # when the driver is
    events: list[tuple[float, int, float]] = []  # when, which node, and how long its block took; 0: it died

    def send(node: int, at: float) -> None:
        took = float(random.choice(seconds))
        dies = float(random.exponential(3600 / deaths)) if deaths else float("inf")
        heapq.heappush(events, (at + min(took, dies), node, took if took < dies else 0.0))

    for node in range(min(nodes, left)):
        send(node, 0.0)
        left -= 1
    while done < BLOCKS:
        at, node, took = heapq.heappop(events)
        if not took:
            again += 1
            send(node, at + REJOINS_S)  # another node is as good as the one that takes its place
            continue
        begins = max(at, free)
        if left:
            send(node, begins)
            left -= 1
        free = begins + cost
        useful += took
        done += 1
    return Went(free, useful / (nodes * free), BLOCKS * cost / free, again)


def times() -> list[float]:
    """Seconds of the blocks of stored runs."""
    found = []
    for name in RUNS:
        folder = ROOT / "results" / "reference" / "runs" / name
        blocks = [Block(number, read_block(folder, number)) for number in finished_blocks(folder)]
        mean = block_seconds(blocks)
        assert mean is not None
        spans = [
            float(each.tables["rounds"]["ended_ns"].max() - each.tables["rounds"]["started_ns"].min()) / 1e9
            for each in blocks
        ]
        found += [
            each * mean / float(np.mean(spans)) for each in spans
        ]  # with the boots, which nothing records
    return found


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    measured = json.loads((FOLDER / "ray_driver.json").read_text())["data"]["with steps"]
    cost, size = measured["cost_s"], measured["bytes"]
    random = np.random.default_rng(2026)
    seconds = times()
    rows = []
    for deaths in DEATHS_PER_HOUR:
        for nodes in NODES:
            found = [run(random, nodes, seconds, cost, deaths) for _ in range(TIMES)]
            rows.append(
                [
                    f"{nodes:,}",
                    "never" if not deaths else f"every {1 / deaths:g} h",
                    f"{np.mean([each.seconds for each in found]) / 60:.1f} min",
                    f"{np.mean([each.busy for each in found]):.0%}",
                    f"{np.mean([each.load for each in found]):.1%}",
                    f"{np.mean([each.again for each in found]):.1f}",
                    f"{BLOCKS * size / np.mean([each.seconds for each in found]) / MIB:.2f} MiB/s",
                ]
            )
    write_result(
        __file__,
        title=f"{BLOCKS:,} blocks of {np.mean(seconds):.1f} s on average, simulated: {1e3 * cost:.1f} ms of "
        f"the driver's time and {size / 1024:.0f} KiB each",
        header=["nodes", "a node dies", "in all", "nodes busy", "driver busy", "measured again", "moved"],
        rows=rows,
        data={"seconds": seconds, "cost_s": cost, "bytes": size},
    )


if __name__ == "__main__":
    main()
