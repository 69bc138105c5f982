"""What `bench sensitivity` foretells of variants that shorten or lengthen a host phase, beside what they did.

    python -m experiments.validation.foretold [NAME ...]    those that are not there yet, without any

Each is a sensitivity of the before arm, in the phases that the variant changes, then the variant, by turns;
`bench explain RUN --sensitivity FOLDER` has both. It takes about three minutes. Other variants are named
with why nothing is foretold of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.command_line import to_measure
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from overlap_bench.engines import api
from overlap_bench.harness.analysis.foretold import changed
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants

CASES = {
    "pinned-h2d": ("pinned-h2d",),
    "packed-h2d": ("packed-h2d",),
    "pin-per-call": ("pin-per-call",),
    "dirty-rows": ("dirty-rows",),
    "shared-ring": ("shared-ring",),
    "pinned-h2d, overlap, 10 ms": (
        *("pinned-h2d", "--set", "schedule=overlap", "--set", "d2h=event", "--pace", "10ms"),
    ),
}


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "overlap_bench", *arguments, "--format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"bench {' '.join(arguments)} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def why_not(variant: str) -> tuple[list[str], str]:
    """The phases that a variant changes, or why nothing is foretold of it."""
    design = make_design(Request(variant=variant), api.find_engines(), load_variants(), lambda: "emulated")
    before, after = design.arms
    names, why = changed(before, after, [])
    return list(names), why


def measured(case: str) -> dict[str, Any]:
    variant, *settings = CASES[case]
    phases = [argument for name in why_not(variant)[0] for argument in ("--phase", name)]
    with tempfile.TemporaryDirectory() as folder:
        asked = ("--variant", variant, *settings, "--out", folder)
        sensitivity = bench("sensitivity", *asked, *phases)
        run = bench("run", *asked)
        folders = (str(Path(folder) / found["run"]) for found in (run, sensitivity))
        explained = bench("explain", next(folders), "--sensitivity", next(folders))
    return {"case": case, "foretold": explained["foretold"], "sensitivity": sensitivity}


def estimate(of: dict[str, float]) -> str:
    return f"{of['us']:+,.0f} [{of['low']:+,.0f}, {of['high']:+,.0f}]".replace("-", "−")


def row(each: dict[str, Any]) -> list[str]:
    found = each["foretold"]
    ends = [found[name] for name in ("foretold", "measured", "aside")]
    overlaps = [
        "yes" if ends[0]["low"] <= end["high"] and end["low"] <= ends[0]["high"] else "no" for end in ends
    ]
    changes = (f"{of['phase']} {of['change']['us']:+,.0f} × {of['slope']:.2f}" for of in found["phases"])
    return [
        *(each["case"], f"{found['step_us']:,.0f}", ", ".join(changes).replace("-", "−")),
        *map(estimate, ends),
        *overlaps[1:],
    ]


def main() -> None:
    found = {each["case"]: each for each in earlier(__file__)}
    others = [
        (name, why_not(name)[1]) for name, variant in load_variants().items() if variant.engine == "overlap"
    ]
    for case in to_measure(__file__, __doc__, CASES, found):
        found[case] = measured(case)
        every = [found[name] for name in CASES if name in found]
        overlap = sum(row(each)[-1] == "yes" for each in every)
        write_result(
            __file__,
            title="What a shorter phase should give, and gave: intervals of the step beside its device time "
            f"overlap in {overlap} of {len(every)}",
            header=[
                *("variant", "step, us", "phase × slope, us", "foretold, us", "step measured, us"),
                *("beside its device time, us", "overlap: step", "beside"),
            ],
            rows=[row(each) for each in every],
            data=every,
            sections={
                "Not of this kind": [["variant", "why"], *([name, why] for name, why in others if why)],
            },
        )


if __name__ == "__main__":
    main()
