"""`bench sensitivity` of an engine whose answers are known: how often its intervals hold them.

    python -m experiments.validation.known_slopes [RUNS]    20 by default

The engine is examples/own_engine, its output deferred, with two phases more. A delay in `schedule` comes
before a step's device time: slope 1, no slack. One in `append` is paid twice, and counted once: slope 2, no
slack. One in `output` lies beside the step's device time of 2,000 us: its slack is what the phase itself, by
the same run's records of turns without delays, leaves of that, and its slope beyond is 1.

Each step begins when it is due: the device and delays of the step before, OWN_US for the engine's own code,
and a time drawn anew, NOISE_US on average and as standard deviation, as steps of a real host differ. Without
that the engine's code takes 0.2 to 0.5% of a delay longer, as it finds colder caches after it; intervals of
slopes were narrower than that, and 28% of all missed. A run is three trials and takes about 15 s.
Later calls add to the runs of earlier ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from overlap_bench.harness.common.machine import code

EXAMPLE = command_line.ROOT / "examples" / "own_engine" / "paced_engine.py"
STEP_US, OWN_US, NOISE_US = 2000, 100, 100
PHASES = ("schedule", "append", "output")
SLOPES = dict(zip(PHASES, (1.0, 2.0, 1.0), strict=True))
CHANGED = {
    'phases=("output",)': f"phases={PHASES}",
    "import os\n": "import os\nimport random\n",
    "WRITE_US = 200\n": "WRITE_US = 200\ndue = [0]\n",
    "        launched = now()\n": """\
        facts["schedule.start"] = spin(due[0], 0)
        self.delays.spend("schedule")
        launched = facts["schedule.end"] = now()
""",
    '        facts["append.end"] = self.append()\n': """\
        appended = self.append()
        self.delays.spend("append")
        facts["append.end"] = now()
""",
    "        self.record.extend(facts.values())\n": f"""\
        own = int(1000 * ({OWN_US} + random.expovariate(1 / {NOISE_US})))
        due[0] = done + own + 2 * (facts["append.end"] - appended)
        self.record.extend(facts.values())
""",
}
RUN = (
    *("sensitivity", "--engine", "paced", "--set", "output=deferred", "--no-pretok", "--trials", "3"),
    *("--arrival", "closed", "--concurrency", "4", "--max-new-tokens", "128", "--format", "json"),
)


def install(folder: Path) -> None:
    """The engine, for whoever has the folder on the path."""
    text = EXAMPLE.read_text()
    for old, new in CHANGED.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / EXAMPLE.name).write_text(text)
    information = folder / "paced_engine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-engine\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[bench.engines]\npaced = paced_engine:SPEC\n")


def measured(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        path = os.pathsep.join([str(command_line.ROOT), folder, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "overlap_bench", *RUN, "--seed", str(seed), "--out", folder]
        began = perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
        )
        if done.returncode:
            raise SystemExit(f"bench sensitivity ended with {done.returncode}")
    found = json.loads(done.stdout)
    return {
        "seconds": perf_counter() - began,
        "commit": code().commit[:7],
        **{name: found[name] for name in ("step_us", "trials", "phases", "left_out")},
    }


def intervals(run: dict[str, Any]) -> Iterator[tuple[str, str, float, float, float, float]]:
    """Phase, what it is of, the truth, what was found, and the interval's ends."""
    for each in sorted(run["phases"], key=lambda each: PHASES.index(each["phase"])):
        name = each["phase"]
        slack = STEP_US - each["us"] if name == "output" else 0.0
        yield name, "slope", SLOPES[name], each["slope"], each["slope_low"], each["slope_high"]
        if each["slack_us"] is None:  # beyond slack_low
            yield name, "slack, us", slack, each["slack_low"], each["slack_low"], float("inf")
        else:
            yield name, "slack, us", slack, each["slack_us"], each["slack_low"], each["slack_high"]


def main() -> None:
    runs: list[dict[str, Any]] = earlier(__file__)
    for _ in range(command_line.wanted(__file__, __doc__, "RUNS", 20)):
        runs.append(measured(len(runs)))
        rows, every = [], [each for run in runs for each in intervals(run)]
        for name in PHASES:
            for what in ("slope", "slack, us"):
                mine = [each[2:] for each in every if each[:2] == (name, what)]
                off = sorted(found - truth for truth, found, _, _ in mine)
                wide = sorted((high - low) / 2 for _, _, low, high in mine)
                digits = ".3f" if what == "slope" else ",.0f"
                truths = sorted({f"{truth:{digits}}" for truth, *_ in mine}, key=len)
                rows.append(
                    [
                        *(name, what, truths[0] if len(truths) == 1 else f"{truths[0]} to {truths[-1]}"),
                        f"{sum(low <= truth <= high for truth, _, low, high in mine)} of {len(mine)}",
                        *(f"{each:{digits}}" for each in (off[0], off[len(off) // 2], off[-1])),
                        f"±{wide[len(wide) // 2]:{digits}}",
                    ]
                )
        held = sum(low <= truth <= high for *_, truth, _, low, high in every)
        write_result(
            __file__,
            title=f"{len(runs)} sensitivities whose answers are known: {held} of {len(every)} intervals "
            f"({held / len(every):.0%}) hold the truth",
            header=["phase", "of", "truth", "held", "off, least", "median", "most", "interval, median"],
            rows=rows,
            data=runs,
        )


if __name__ == "__main__":
    main()
