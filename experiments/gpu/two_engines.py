"""What a second live engine on the same device costs the first: parked beside it, and taking turns with it.

    python -m experiments.gpu.two_engines [MODEL[:DTYPE]] [--device DEVICE] [--boots N]

A block has both engines in it, so each one's steps are measured with the other's process, context and memory
on the device. In each boot one engine decodes the same batch alone, then with a second one up that waits for
requests, then in turns with it, and alone again once the second one is gone. A change is that of the mean
decode step from the two rounds alone, which lie on both sides of it; intervals are over boots.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from overlap_bench.engines import api
from overlap_bench.harness.metrics.slices import decode_slices, of_turns
from overlap_bench.harness.metrics.steps import decode_intervals
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run import records, trial
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.stats import paired

BATCH = 16
# Everything on, the device never waits: what is seen is the device's.
SETTINGS = ("schedule=overlap", "launch=inline", "h2d=packed", "d2h=event", "graph=on")
PLACES = ("parked beside it", "in turns with it")


def both_arms(device: str, asked: str) -> Design:
    model, _, dtype = asked.partition(":")
    request = Request(
        variant="overlap",
        both=SETTINGS,
        against_itself=True,
        options={"device": device, "model": model, "dtype": dtype or "float32"},
        workload={"concurrency": BATCH, "arrival": "closed", "num_requests": BATCH},
    )
    return make_design(request, api.find_engines(), load_variants(), lambda: device)


def quiet(_: object) -> None:
    """Progress that nobody watches."""


def one_boot(session: Session, design: Design, number: int) -> dict[str, float]:
    """The mean decode step, ms: alone (the geometric mean of both rounds), and in PLACES."""
    first, second = design.arms
    booted = session.boot([first])[first.name]
    context = trial.least_context([booted.description])
    workload = trial.of_segment(design.workload, BATCH)
    asked, _ = trial.planned(workload, number, booted, context)

    def round_of(each: Booted) -> float:
        session.begin(each)
        session.load(each, asked, None, 0, quiet)
        steps = records.steps_frame(session.collect(each)).assign(round=0)
        return float(decode_intervals(steps)["interval_ns"].mean()) / 1e6

    round_of(booted)  # warms up
    alone = round_of(booted)
    other = session.boot([second])[second.name]
    round_of(other)
    beside = round_of(booted)
    for each in (booted, other):
        session.begin(each)
    session.take_turns([booted, other], asked, design.turn_steps, quiet)
    record, turns = session.collect_turns(booted)
    session.collect(other)
    slices = of_turns(records.steps_frame(record), records.turns_frame(turns), design.turn_lead)
    in_turns = float(decode_slices(slices.assign(round=0))["interval_ns"].mean()) / 1e6
    session.shut([other])
    again = round_of(booted)
    session.shut([booted])
    return {"alone": float(np.sqrt(alone * again)), **dict(zip(PLACES, (beside, in_turns), strict=True))}


def row(place: str, found: list[dict[str, float]]) -> list[str]:
    shown = paired.effect([each["alone"] for each in found], [each[place] for each in found])
    interval = "" if shown.low is None else f"[{shown.low:+.2%}, {shown.high:+.2%}]"
    return [place, f"{shown.before:.4f}", f"{shown.after:.4f}", f"{shown.change:+.2%}", interval]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("model", nargs="?", default="gpt2:bfloat16", metavar="MODEL[:DTYPE]")
    parser.add_argument("--boots", type=int, default=8)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    design = both_arms(given.device, given.model)
    found = []
    with Session() as session:
        for number in range(given.boots):
            found.append(one_boot(session, design, number))
            print(found[-1], file=sys.stderr)
    write_result(
        __file__,
        title=f"A decode step of {given.model}, batch {BATCH}, beside a second live engine ({given.device} "
        f"device, {given.boots} boots)",
        header=["the second engine", "alone, ms", "beside it, ms", "change", "95% interval"],
        rows=[row(place, found) for place in PLACES],
        data=found,
        folder=given.out,
    )


if __name__ == "__main__":
    main()
