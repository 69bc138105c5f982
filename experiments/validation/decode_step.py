"""A decode step of the overlap engine beside transformers' own: is our engine a fair baseline?

    python -m experiments.validation.decode_step [--blocks 5]

Each block runs, one after the other and each in fresh processes: the engine (overlap, inline, packed, graph)
on the emulated device, whose process has one thread on the last core; generate() with one thread on that
same core; generate_batch(), which is continuous batching, with a persistent manager and one thread to compute
with, on whatever cores it likes; generate() with a thread on every core. Batch 1, 8 and 32; prompts of 16
tokens; the same weights. A step is (time to 72 tokens - time to 8 tokens) / 64, so that prefill and start-up
cancel.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from statistics import median
from time import perf_counter

from experiments.common import command_line
from experiments.common.record import write_result

BATCHES = (1, 8, 32)
SHORT, LONG = 8, 72
REPEATS = 5
SIDES = ("engine", "generate, 1 thread", "generate_batch, 1 thread", "generate, all cores")


def prompts(batch: int) -> list[list[int]]:
    return [[(row * 131 + place * 17) % 4095 + 1 for place in range(16)] for row in range(batch)]


def time_engine(batch: int) -> float:
    """Milliseconds per decode step."""
    from engines import api
    from engines.overlap import SPEC
    from engines.overlap.engine import OverlapEngine
    from experiments.common.in_process_engine import Collected

    toggles = SPEC.check({"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"})
    engine, sink = (
        OverlapEngine(api.EngineOptions(device="emulated", stream_interval=8), toggles),
        Collected(),
    )
    engine.start(sink)

    def serve(count: int) -> float:
        sink.events.clear()
        sink.ended = 0
        began = perf_counter()
        for row, prompt in enumerate(prompts(batch)):
            engine.submit(api.Request(row, prompt, count))
        engine.run(lambda _: sink.ended < batch)
        return perf_counter() - began

    serve(SHORT)
    step = median((serve(LONG) - serve(SHORT)) / (LONG - SHORT) for _ in range(REPEATS))
    engine.stop()
    return step * 1e3


def time_generate(batch: int, threads: int) -> float:
    """Milliseconds per decode step."""
    import torch

    from engines.overlap.models.published import load_model

    cores = os.sched_getaffinity(0)
    if threads == 1:
        os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(threads)
    model = load_model("tiny-gpt2", torch.float32, torch.device("cpu"), seed=0)
    ids = torch.tensor(prompts(batch))

    def generate(count: int) -> float:
        began = perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return perf_counter() - began

    with torch.inference_mode():
        generate(SHORT)
        return median((generate(LONG) - generate(SHORT)) / (LONG - SHORT) for _ in range(REPEATS)) * 1e3


def time_generate_batch(batch: int) -> float:
    """Milliseconds per decode step. The KV cache is as large as the engine's; pages of 16 to 256 tokens
    give the same within 5%."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from engines.overlap.models.published import load_model

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = load_model("tiny-gpt2", torch.float32, torch.device("cpu"), seed=0)
    ids = prompts(batch)
    caching = ContinuousBatchingConfig(page_size=32, num_blocks=8 * batch, max_batch_tokens=16 * batch)

    def generate(count: int) -> float:
        began = perf_counter()
        done = model.generate_batch(
            ids,
            GenerationConfig(max_new_tokens=count, eos_token_id=-1, do_sample=False, pad_token_id=0),
            caching,
            persistent_manager=True,
            max_new_tokens=count,
        )
        took = perf_counter() - began
        assert [len(each.generated_tokens) for each in done.values()] == [count] * batch
        return took

    generate(LONG)
    step = median((generate(LONG) - generate(SHORT)) / (LONG - SHORT) for _ in range(REPEATS))
    model.destroy_cached_continuous_batching_manager()
    return step * 1e3


def measure(side: str) -> dict[int, float]:
    """One side in this process, which should be fresh."""
    if side == "engine":
        return {batch: time_engine(batch) for batch in BATCHES}
    if side == "generate_batch, 1 thread":
        return {batch: time_generate_batch(batch) for batch in BATCHES}
    threads = 1 if side == "generate, 1 thread" else len(os.sched_getaffinity(0))
    return {batch: time_generate(batch, threads) for batch in BATCHES}


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side)))
        return
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for block in range(arguments.blocks):
        for side in SIDES if block % 2 == 0 else SIDES[::-1]:
            command = [sys.executable, "-m", "experiments.validation.decode_step", "--side", side]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            steps[side].append(json.loads(out.splitlines()[-1]))
            print(f"block {block} {side}: {steps[side][-1]}", file=sys.stderr)
    rows = [
        [str(batch)] + [f"{median(each[str(batch)] for each in steps[side]):.2f}" for side in SIDES]
        for batch in BATCHES
    ]
    write_result(
        __file__,
        title="Decode step in ms, tiny-gpt2, fp32, median over blocks of fresh processes",
        header=["batch", *SIDES],
        rows=rows,
        data={"blocks": arguments.blocks, "ms_per_step": steps},
    )


if __name__ == "__main__":
    main()
