"""How long `bench run` takes to end when one of its processes dies, and what it leaves behind.

    python -m experiments.validation.deaths [--times 5]

One arm of the overlap engine with its output process, so that a run has every kind of process: the load
generator, the engine host, the device process and the output process. Each is killed with -9 in the second
block, once while it boots and then in a round; Ctrl-C comes to the harness in the same way. Measured from the
signal until `bench` has ended. When the harness itself is killed, until the last process below it is gone.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from experiments.common import command_line
from experiments.common.bench_command import Bench, last_line, start, wait_until_serving
from experiments.common.record import write_result
from harness.store import tables

LIMIT_S = 10
VICTIMS = {
    "load generator, kill -9": "harness.run.load_generator",
    "engine host, kill -9": "engines.host",
    "device process, kill -9": "engines.devices.emulated.process",
    "output process, kill -9": "engines.overlap.output_process",
    "Ctrl-C": "",
    "harness, kill -9": "",
}
RUN = (
    *("run", "--engine", "overlap", "--device", "emulated", "--set", "output=process"),
    *("--blocks", "2", "--rounds", "1", "--arrival", "closed", "--concurrency", "8"),
    *("--num-requests", "96", "--max-new-tokens", "128"),
)


@dataclass(frozen=True, slots=True)
class Death:
    seconds: float
    code: int
    told: bool  # the last line names the process and how to go on
    left: int  # processes that outlived it
    kept: bool  # the block that was finished


def die(who: str, serving: bool, folder: Path, rng: random.Random) -> Death:
    bench = start({**os.environ, "PYTHONPATH": str(command_line.ROOT)}, folder, *RUN)
    bench.wait_for("block 1 of 2 done")
    if serving:
        wait_until_serving(bench.find(VICTIMS["device process, kill -9"]))
        time.sleep(rng.random())
    victim = bench.find(VICTIMS[who]) if VICTIMS[who] else psutil.Process(bench.popen.pid)
    bench.look()
    sent = time.perf_counter()
    victim.send_signal(signal.SIGINT if who == "Ctrl-C" else signal.SIGKILL)
    code, _, stderr = bench.end()
    if who == "harness, kill -9":
        all_gone(bench)
    seconds = time.perf_counter() - sent
    said = last_line(stderr)
    named = "interrupted" if who == "Ctrl-C" else f"(pid {victim.pid})"
    (run,) = (folder / "results").iterdir()
    return Death(
        seconds,
        code,
        named in said and "--resume" in said,
        len(bench.left()),
        0 in tables.finished_blocks(run),
    )


def all_gone(bench: Bench) -> None:
    while bench.left():
        time.sleep(0.005)


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--times", type=int, default=5, help="deaths of each kind")
    times = parser.parse_args().times
    rng = random.Random(1)
    found: dict[str, list[Death]] = {who: [] for who in VICTIMS}
    for number in range(times):
        for who in VICTIMS:
            with tempfile.TemporaryDirectory() as folder:
                found[who].append(die(who, number > 0, Path(folder), rng))
            print(f"{number + 1} of {times}, {who}: {found[who][-1]}", flush=True)
    write_result(
        __file__,
        title=f"From a death in mid-run to the end of `bench run`: at most {LIMIT_S} s",
        header=[
            "signal to",
            "times",
            "s, median",
            "s, most",
            "exit code",
            "told in the last line",
            "left",
            "kept",
        ],
        rows=[
            [
                who,
                str(len(deaths)),
                f"{median(each.seconds for each in deaths):.2f}",
                f"{max(each.seconds for each in deaths):.2f}",
                ", ".join(sorted({str(each.code) for each in deaths})),
                "—" if who == "harness, kill -9" else f"{sum(each.told for each in deaths)} of {times}",
                str(sum(each.left for each in deaths)),
                f"{sum(each.kept for each in deaths)} of {times}",
            ]
            for who, deaths in found.items()
        ],
        data={who: [asdict(each) for each in deaths] for who, deaths in found.items()},
    )


if __name__ == "__main__":
    main()
