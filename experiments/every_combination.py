"""Greedy fp32 tokens against transformers' generate() in every setting that means something.

    python -m experiments.every_combination [--device emulated|cuda]

Every combination of toggle choices, once: a seeded shuffle deals each to one of four rows, tiny-gpt2 or
tiny-llama, chaos off or on. All of them in all four rows would take half an hour; the tests run every pair of
choices in all four. 8 requests of mixed lengths, max batch 5. A first divergence counts as a near-tie where
the reference's two logits lie within 1e-4; any other ends the run with an error.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from time import perf_counter

import torch

from engines.devices import open_device
from engines.overlap import SPEC
from experiments.record import write_result
from tests.serving import near_ties, serve, some_requests

MODELS = ("tiny-gpt2", "tiny-llama")
CHAOS = (None, 7)
SEED = 1


def deal(settings: list[dict[str, str]]) -> dict[tuple[int | None, str], list[dict[str, str]]]:
    """Each setting to one pair of chaos and model; in their own order, a pair would always get the same
    choices of the last toggles."""
    shuffled = random.Random(SEED).sample(settings, len(settings))
    pairs = [(chaos, model) for chaos in CHAOS for model in MODELS]
    return {pair: shuffled[number :: len(pairs)] for number, pair in enumerate(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="emulated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of the reference: more would fight with the device's process
    dealt, requests, rows = deal(SPEC.every_setting()), some_requests(8), []
    for chaos in CHAOS:
        device = open_device(arguments.device, chaos=chaos)
        for model in MODELS:
            began, found, settings = perf_counter(), Counter[str](), dealt[chaos, model]
            for number, each in enumerate(settings):
                tokens, _, record = serve(
                    device, each, requests, model=model, max_batch_size=5, max_context=64, chaos=chaos
                )
                found["near-ties"] += near_ties(model, requests, tokens)
                found["requests"] += len(requests)
                found["tokens"] += sum(map(len, tokens.values()))
                found["steps"] += record.steps.rows if record.steps else 0
                print(f"\r{model} chaos={chaos} {number + 1}/{len(settings)}", end="", file=sys.stderr)
            print(f"  {perf_counter() - began:.0f} s", file=sys.stderr)
            identical = found["requests"] - found["near-ties"]
            rows.append(
                [
                    model,
                    "off" if chaos is None else f"seed {chaos}",
                    str(len(settings)),
                    f"{identical} of {found['requests']}",
                    str(found["near-ties"]),
                    str(found["tokens"]),
                    str(found["steps"]),
                ]
            )
        device.close()
    write_result(
        "every_combination",
        title=f"Requests whose tokens equal generate()'s, over every setting, {arguments.device} device",
        header=["model", "chaos", "settings", "identical", "near-ties", "tokens", "steps"],
        rows=rows,
        data={"settings": list(dealt.values())},  # by row
    )


if __name__ == "__main__":
    main()
