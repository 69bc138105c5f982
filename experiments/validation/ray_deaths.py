"""What a run on a Ray cluster loses when something dies: a node, a worker, the driver, the head.

    python -m experiments.validation.ray_deaths [--times 10]    a quarter of an hour; needs Ray

A real cluster on this machine: a head that measures nothing, and two nodes. A run of examples/own_engine has
its first block done; at a random moment after that one process, or all of a node, is killed with -9. A run
that ended is gone on with. Then every block must be there once, in the order drawn for it, and those that
were finished before the death must be the same files. A cluster that lost its head places nothing more, but
brings what is under way: the last blocks of a run may come before it counts as gone. Deaths that are recorded
already are not died again.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.bench_command import finished, last_line, start
from experiments.common.command_line import ROOT
from experiments.common.ray_nodes import Nodes
from experiments.common.record import FOLDER, write_result
from harness.store import tables
from harness.store.manifest import read_manifest

EXAMPLE = ROOT / "examples" / "own_engine"
NODES = ("one", "two")
BLOCKS, ROUNDS, REQUESTS = 4, 1, 24
WITHIN_S = 2.0  # after the first block
RUN = (
    *("run", "--engine", "paced", "--before", "output=inline", "--after", "output=deferred"),
    *("--blocks", str(BLOCKS), "--rounds", str(ROUNDS), "--num-requests", str(REQUESTS)),
    *("--segments", "0", "--max-new-tokens", "16"),
)
VICTIMS = ("a node", "a worker", "the driver", "the head")


@dataclass(frozen=True, slots=True)
class Death:
    """`seconds`: from the kill to the end of the run. Blocks: `kept` when it was killed, `lost` and `doubled`
    in the end, `repeated` by the manifest. `left`: processes that outlived the run. `said`: its last line,
    where it ended with that."""

    seconds: float
    code: int
    kept: int
    lost: int
    doubled: int
    repeated: int
    left: int
    said: str


def die(who: str, cluster: Nodes, environment: dict[str, str], folder: Path, rng: random.Random) -> Death:
    bench = start(environment, folder, *RUN, "--ray", cluster.address)
    bench.wait_for(f"block 1 of {BLOCKS} done")
    time.sleep(WITHIN_S * rng.random())
    (run,) = (folder / "results").iterdir()
    before = finished(run)
    killed = time.monotonic()
    match who:
        case "a node":
            cluster.kill(rng.choice(NODES))
        case "a worker":
            rng.choice(cluster.workers()).kill()
        case "the driver":
            bench.popen.kill()
        case "the head":
            cluster.kill_head()
    code, _, stderr = bench.end()
    left = cluster.left()
    seconds = time.monotonic() - killed
    if code != 0:
        with alive(who, cluster, environment) as there:
            again = start(environment, folder, "run", "--resume", str(run), "--ray", there.address)
            resumed, _, told = again.end()
            assert resumed == 0, told
    after = finished(run)
    lost = [each for each, found in before.items() if after.get(each) != found]
    return Death(
        seconds=seconds,
        code=code,
        kept=len(before),
        lost=len(lost) + BLOCKS - len(after),
        doubled=sum(not is_whole(run, number) for number in after),
        repeated=len(read_manifest(run).repeats),
        left=len(left),
        said=last_line(stderr).replace(run.name, "RUN") if code > 0 else "",
    )


def is_whole(run: Path, number: int) -> bool:
    """Whether a block has each of its rounds and requests once, in the order drawn for it, from one node."""
    plan, block = read_manifest(run), tables.read_block(run, number)
    rounds, requests = block["rounds"], block["requests"]
    names = [arm.name for arm in plan.design.arms]
    places = {names[arm]: place for place, arm in enumerate(plan.drawn[number])}
    return (
        len(rounds) == len(names) * ROUNDS
        and len(requests) == len(names) * ROUNDS * REQUESTS
        and not requests.duplicated(["arm", "round", "request"]).any()
        and rounds["node"].nunique() == 1
        and bool((rounds["position"] == rounds["arm"].map(places)).all())
    )


@contextmanager
def alive(who: str, cluster: Nodes, environment: dict[str, str]) -> Iterator[Nodes]:
    """The cluster, or another one in place of one whose head is dead."""
    if who != "the head":
        yield cluster
        return
    with started(environment) as another:
        yield another


@contextmanager
def started(environment: dict[str, str]) -> Iterator[Nodes]:
    made = Nodes(environment)
    try:
        made.add(*NODES)
        yield made
    finally:
        made.stop()


def installed(where: Path) -> dict[str, str]:
    """An environment in which the example is an installed distribution. Ray's sockets have short names."""
    information = where / "paced_example-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-example\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[bench.engines]\npaced = paced_engine:SPEC\n")
    path = os.pathsep.join(map(str, (ROOT, EXAMPLE, where)))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(where)}


def recorded() -> dict[str, list[dict[str, Any]]]:
    path = FOLDER / "ray_deaths.json"
    kept: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["data"] if path.exists() else {}
    return {who: kept.get(who, []) for who in VICTIMS}


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--times", type=int, default=10, help="deaths of each kind")
    times = parser.parse_args().times
    found = recorded()
    with tempfile.TemporaryDirectory(dir="/tmp") as site:
        environment = installed(Path(site))
        for who, deaths in found.items():
            while len(deaths) < times:
                with started(environment) as cluster:
                    for number in range(len(deaths), times):
                        cluster.has(*NODES)
                        with tempfile.TemporaryDirectory() as folder:
                            death = die(who, cluster, environment, Path(folder), random.Random(number))
                        deaths.append(asdict(death))
                        print(f"{number + 1} of {times}, {who}: {death}", flush=True)
                        write(found)
                        if who == "the head":
                            break


def write(found: dict[str, list[dict[str, Any]]]) -> None:
    write_result(
        __file__,
        title="A death on a Ray cluster, at a random moment of a run",
        header=[
            "kill -9 of",
            "times",
            "exit code",
            "s to the run's end, median",
            "most",
            "blocks kept",
            "lost",
            "doubled",
            "measured once more",
            "processes left",
        ],
        rows=[
            [
                who,
                str(len(deaths)),
                ", ".join(sorted({str(each["code"]) for each in deaths})),
                f"{median(each['seconds'] for each in deaths):.1f}",
                f"{max(each['seconds'] for each in deaths):.1f}",
                *(str(sum(each[what] for each in deaths)) for what in ("kept", "lost", "doubled")),
                *(str(sum(each[what] for each in deaths)) for what in ("repeated", "left")),
            ]
            for who, deaths in found.items()
            if deaths
        ],
        data=found,
    )


if __name__ == "__main__":
    main()
