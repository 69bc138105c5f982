"""Equal arms, measured again and again: how often `bench aa` calls them different.

    python -m experiments.validation.real_aa [RUNS] [--minutes M] [--folder F] [--bursts] [-- ARGUMENT ...]

RUNS are 20 in all by default, each with another seed; a call goes on with what is missing in folder F
(results/reference by default) until its minutes are over. ARGUMENTs are those of `bench aa`. Without any, it
is this project's engine in 8 trials, about 135 s a run. With --bursts, one process beside each run computes
and rests for 0.1 to 2 s each (sliced_aa). An engine of others at a pace:

    python -m experiments.validation.real_aa 20 --minutes 25 --folder aa -- \\
        --variant sglang-overlap --pace 10ms --set schedule=normal --set python=PYTHON

Of 20 runs, a method that holds 5% calls one different on average, and more than three in 1.6% of cases.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

from experiments.common.command_line import parser
from experiments.common.record import FOLDER, write_result
from experiments.common.repeated_runs import CELLS, bench, cells, earlier, kept
from experiments.validation.sliced_aa import bursts

OURS = ["--variant", "overlap", "--set", "schedule=overlap", "--trials", "8", "--primary", "tpot_ms_p50"]


def main() -> None:
    said = sys.argv[1:]
    at = said.index("--") if "--" in said else len(said)
    own, theirs = said[:at], said[at + 1 :]
    asked = parser(__file__, __doc__)
    asked.add_argument("runs", metavar="RUNS", nargs="?", type=int, default=20, help="in all (20)")
    asked.add_argument("--minutes", type=float, default=60, help="begin no run after so many (60)")
    asked.add_argument("--folder", metavar="FOLDER", type=Path, default=FOLDER, help="where runs are kept")
    asked.add_argument("--bursts", action="store_true", help="beside a process that computes in bursts")
    given = asked.parse_args(own)
    arguments = theirs or OURS
    runs = earlier(__file__, given.folder)
    if any(run.get("arguments", OURS) != arguments for run in runs):
        asked.error(f"{given.folder} keeps runs with other arguments: name another --folder")
    if len(runs) >= given.runs:
        asked.error(f"{given.folder} keeps {len(runs)} runs already: ask for more, or name another --folder")
    beside = " beside bursts" if given.bursts else ""
    began = monotonic()
    for seed in range(len(runs), given.runs):
        if monotonic() - began > given.minutes * 60:
            break
        with bursts(seed) if given.bursts else nullcontext():
            run = bench("aa", *arguments, "--seed", str(seed))
        runs.append({**kept(run), "arguments": arguments})
        different = [run["verdict"] not in ("same", "undecided") for run in runs]
        write_result(
            __file__,
            title=f"`bench aa {shlex.join(arguments)}`{beside}: "
            f"{sum(different)} of {len(runs)} called different",
            header=["seed", *CELLS, "called different"],
            rows=[
                [str(seed), *cells(run), "yes" if each else "no"]
                for seed, (run, each) in enumerate(zip(runs, different, strict=True))
            ],
            data=runs,
            folder=given.folder,
        )


if __name__ == "__main__":
    main()
