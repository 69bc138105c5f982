"""Our engine, transformers and vLLM's CPU build: one model folder, one set of prompts, the same cores.

    python -m experiments.validation.engines [--vllm PYTHON] [--blocks 5]

A GPT-2 of 4 layers x 256 with heads of 64 (vLLM has no smaller ones on a CPU than 32) and a vocabulary of
4096, fp32, saved once and loaded from there by all. Each block boots the engines one after the other, each
fresh, in an order drawn for the block, and serves each the same requests: prompts of 16 tokens, 64 new ones,
1, 8 and 32 at a time in closed loop, after a warm-up. Each engine may use both cores and has one thread to
compute with. PYTHON is an interpreter that has vLLM; without it vLLM is left out, which the table then says.
How one is set up: engines/vllm/__init__.py. A block takes about two minutes.

vLLM at batch 1 on two cores: in some boots all 64 tokens of a request come at once, at its end; TPOT is near
0 then, and the latency alone tells. The main thread of its core waits for its worker in a sched_yield loop,
which takes the interpreter's lock back before the output thread gets it; with a sleep of 50 us in that loop
(vllm/distributed/utils.py) every chunk comes when it is due.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from engines import api
from engines.overlap.models.published import save
from engines.overlap.presets import PRESETS, Preset
from experiments.common import command_line
from experiments.common.record import write_result
from harness.metrics.boot import of_boot
from harness.plan.design import Arm
from harness.plan.orders import round_seed
from harness.run.blocks import least_context, planned
from harness.run.records import device_frame, requests_frame, steps_frame
from harness.run.session import Booted, Session
from harness.workload.workload import Workload

BATCHES = (1, 8, 32)
ROUNDS = 3  # requests per place of the closed loop
MODEL = Preset(
    summary="GPT-2, 4 layers x 256, heads of 64",
    model_type="gpt2",
    config=PRESETS["tiny-gpt2"].config | {"n_layer": 4, "n_embd": 256, "n_head": 4},
)
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "ours": ("overlap", {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}),
    "transformers, static": ("transformers", {"batching": "static"}),
    "transformers, continuous": ("transformers", {"batching": "continuous"}),
    "vllm, eager": ("vllm", {"enforce_eager": "on"}),
    "vllm, compiled": ("vllm", {"enforce_eager": "off"}),
}


def make_arm(side: str, model: Path, vllm: str | None) -> Arm:
    engine, toggles = SIDES[side]
    device = "emulated" if engine == "overlap" else "auto"
    return Arm(
        name=side.replace(", ", "-"),
        engine=engine,
        options=api.EngineOptions(model=str(model), device=device, max_batch_size=max(BATCHES)),
        toggles=api.find_engines()[engine].check(toggles),
        python=vllm if engine == "vllm" else None,
    )


def serve(session: Session, booted: Booted, batch: int, seed: int) -> tuple[dict[str, float], list[str]]:
    """The metrics of one round, and its outputs' digests in the order of the requests."""
    workload = Workload(
        num_requests=ROUNDS * batch,
        max_new_tokens=64,
        input_tokens=16,
        arrival="closed",
        concurrency=batch,
        prompts="english",
        unique_prompts=True,
    )
    plan, _ = planned(workload, seed, booted, least_context([booted.description]))
    session.begin(booted)
    done = session.load(booted, plan, workload.concurrency, workload.interval_ns, lambda _: None)
    record = session.collect(booted)
    requests, steps, work = (
        frame.assign(round=0) for frame in (requests_frame(done), steps_frame(record), device_frame(record))
    )
    if (requests["error"] != "").any():
        raise SystemExit(f"{booted.arm.name}: {requests['error'].max()}")
    rounds = pd.DataFrame([{"round": 0, "started_ns": done.started_ns, "ended_ns": done.ended_ns}])
    digests = requests.sort_values("request")["digest"].tolist()
    return of_boot(requests, steps, rounds, work), digests


def measure_side(session: Session, arm: Arm, block: int) -> dict[str, Any]:
    """One boot: by batch TPOT, throughput and digests; what the engine says of itself."""
    (booted,) = session.boot([arm]).values()
    found: dict[str, Any] = {"versions": booted.description.versions, "device": booted.description.device}
    for index, batch in enumerate(BATCHES):
        serve(session, booted, batch, round_seed(0, block, -1 - index))
        values, digests = serve(session, booted, batch, round_seed(0, block, index))
        found[str(batch)] = {
            "tpot_ms": values["tpot_ms_p50"],
            "latency_ms": values["latency_ms_p50"],
            "throughput_tok_s": values["throughput_tok_s"],
            "digests": digests,
        }
    session.shut([booted])
    return found


def row(side: str, boots: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    cells = [side]
    for batch in map(str, BATCHES):
        tpot, latency, throughput = (
            median(boot[batch][name] for boot in boots)
            for name in ("tpot_ms", "latency_ms", "throughput_tok_s")
        )
        cells += [f"{tpot:.2f}", f"{latency:.0f}", f"{throughput:,.0f}"]
    pairs = [
        pair
        for boot, other in zip(boots, ours, strict=True)
        for batch in map(str, BATCHES)
        for pair in zip(boot[batch]["digests"], other[batch]["digests"], strict=True)
    ]
    return [*cells, f"{sum(one == two for one, two in pairs)} of {len(pairs)}"]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--blocks", type=int, default=5)
    arguments = parser.parse_args()
    sides = [side for side in SIDES if arguments.vllm or SIDES[side][0] != "vllm"]
    if len(sides) < len(SIDES):
        print("no --vllm PYTHON: vLLM is left out", file=sys.stderr)
    boots: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with TemporaryDirectory() as folder, Session() as session:
        save(MODEL, Path(folder))
        for block in range(arguments.blocks):
            for side in random.Random(block).sample(sides, len(sides)):
                boots[side].append(measure_side(session, make_arm(side, Path(folder), arguments.vllm), block))
                said = {batch: boots[side][-1][str(batch)]["tpot_ms"] for batch in BATCHES}
                print(f"block {block} {side}: {json.dumps(said)}", file=sys.stderr)
    left_out = "" if arguments.vllm else "; vLLM left out, for no interpreter that has it was given"
    write_result(
        __file__,
        title="Medians of TPOT and of latency in ms, and tokens per second, at batch 1, 8 and 32: one model "
        f"folder (GPT-2 4 x 256, fp32), prompts and cores, {arguments.blocks} interleaved boots{left_out}",
        header=[
            "engine",
            *(f"{what}, {batch}" for batch in BATCHES for what in ("TPOT", "latency", "tok/s")),
            "outputs as ours",
        ],
        rows=[row(side, boots[side], boots["ours"]) for side in sides],
        data={"blocks": arguments.blocks, "boots": boots},
    )


if __name__ == "__main__":
    main()
