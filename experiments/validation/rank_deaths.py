"""How a run ends when one of two ranks, or of two replicas, dies or is stopped, and what it leaves behind.

    python -m experiments.validation.rank_deaths [--times 10]    half an hour

The overlap engine in one arm, on two emulated devices. Its first block is done; at a random moment of the
second one gets SIGKILL or SIGSTOP: in turn the process that drives a device, and the device's own. Then
`bench` must end by itself, with exit code 4 and a last line that names who it was and how to go on; nothing
may be left of it, the finished block must be the same files, and `--resume` must finish the run, which the
first two of a kind show. Measured from the signal until `bench` has ended. Deaths that are recorded already
are not died again.
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
from typing import Any

import psutil

from experiments.common import command_line
from experiments.common.bench_command import Bench, finished, last_line, start, wait_until_serving
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier

DEVICE = "engines.devices.emulated.process"
DRIVERS = {
    ("2 ranks", 0): "engines.host",
    ("2 ranks", 1): "engines.overlap.rank_process",
    ("2 replicas", 0): "engines.host",
    ("2 replicas", 1): "engines.overlap.replica_process",
}
SETTINGS = {"2 ranks": "ranks=2", "2 replicas": "replicas=2"}
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
BLOCKS, RESUMED = 2, 2  # blocks of a run; deaths of a kind after which it is gone on with
RUN = (
    *("run", "--engine", "overlap", "--device", "emulated", "--before", "schedule=overlap"),
    *("--before", "launch=inline"),
    *("--blocks", str(BLOCKS), "--rounds", "1", "--arrival", "closed", "--concurrency", "8"),
    *("--num-requests", "48", "--max-new-tokens", "96"),
)


@dataclass(frozen=True, slots=True)
class Death:
    together: str
    rank: int
    sent: str
    to: str  # "driver" or "device"
    seconds: float
    code: int
    said: str  # the last line
    named: bool  # that line has the victim's pid, and how to go on
    left: int  # processes that outlived the run
    kept: bool  # the finished block is the same files
    resumed: bool | None  # the run could be finished; None: not tried


def die(together: str, rank: int, sent: str, number: int, folder: Path) -> Death:
    rng = random.Random(f"{together} {rank} {sent} {number}")
    environment = {**os.environ, "PYTHONPATH": str(command_line.ROOT)}
    bench = start(environment, folder, *RUN, "--set", SETTINGS[together])
    bench.wait_for(f"block 1 of {BLOCKS} done")
    driver = bench.find(DRIVERS[together, rank])
    device = device_of(bench, driver)
    wait_until_serving(device)
    time.sleep(rng.random())
    (run,) = (folder / "results").iterdir()
    before = finished(run)
    to = "device" if number % 2 else "driver"
    victim = device if to == "device" else driver
    bench.look()
    at = time.monotonic()
    victim.send_signal(SIGNALS[sent])
    code, _, stderr = bench.end()
    seconds, left = time.monotonic() - at, bench.left()
    after = finished(run)
    said = last_line(stderr)
    resumed = None
    if number < RESUMED:
        again = start(environment, folder, "run", "--resume", str(run))
        resumed = again.end()[0] == 0 and len(finished(run)) == BLOCKS
    return Death(
        together=together,
        rank=rank,
        sent=sent,
        to=to,
        seconds=seconds,
        code=code,
        said=said.replace(run.name, "RUN"),
        named=f"(pid {victim.pid})" in said and "--resume" in said,
        left=len(left),
        kept=0 in before and before == after,
        resumed=resumed,
    )


def device_of(bench: Bench, driver: psutil.Process) -> psutil.Process:
    """The device process that a driver has started; waits for it."""
    while True:
        bench.find(DEVICE)
        for each in driver.children():
            if DEVICE in " ".join(each.cmdline()):
                return each
        time.sleep(0.02)


def row(deaths: list[dict[str, Any]]) -> list[str]:
    def count(what: str) -> str:
        found = [each[what] for each in deaths if each[what] is not None]
        return f"{sum(found)} of {len(found)}"

    one = deaths[0]
    return [
        f"{one['sent']}, {one['together']}, number {one['rank']}",
        str(len(deaths)),
        ", ".join(sorted({str(each["code"]) for each in deaths})),
        f"{median(each['seconds'] for each in deaths):.1f}",
        f"{max(each['seconds'] for each in deaths):.1f}",
        count("named"),
        str(sum(each["left"] for each in deaths)),
        count("kept"),
        count("resumed"),
    ]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--times", type=int, default=10, help="of each")
    times = parser.parse_args().times
    deaths = earlier(__file__)
    kinds = [(together, rank, sent) for together, rank in DRIVERS for sent in SIGNALS]
    for together, rank, sent in kinds:
        for number in range(sum(kind(each) == (together, rank, sent) for each in deaths), times):
            with tempfile.TemporaryDirectory() as folder:
                deaths.append(asdict(die(together, rank, sent, number, Path(folder))))
            print(f"{number + 1} of {times}: {deaths[-1]}", flush=True)
            write_result(
                __file__,
                title="One of two ranks or replicas is killed or stopped in mid-round",
                header=[
                    "signal to",
                    *("times", "exit code", "s to the run's end, median", "most"),
                    *(
                        "named in the last line",
                        "processes left",
                        "finished block kept",
                        "finished by --resume",
                    ),
                ],
                rows=[
                    row(each)
                    for each in ([one for one in deaths if kind(one) == which] for which in kinds)
                    if each
                ],
                data=deaths,
            )


def kind(death: dict[str, Any]) -> tuple[str, int, str]:
    return death["together"], death["rank"], death["sent"]


if __name__ == "__main__":
    main()
