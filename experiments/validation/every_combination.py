"""fp32 tokens against transformers in every setting that means something.

    python -m experiments.validation.every_combination [--device emulated|cuda]

Every combination of toggle choices, once: a seeded shuffle deals each to one of four rows, tiny-gpt2 or
tiny-llama, chaos off or on. All of them in all four rows would take half an hour; the tests run every pair of
choices in all four. 10 requests of mixed lengths, max batch 6: greedy ones against generate(), sampled ones
against the sampler on transformers' logits. Where chaos is on, there is a prefix cache, prompts begin alike,
and blocks run out. A first divergence of a greedy request counts as a near-tie where the reference's two
logits lie within 1e-4; any other difference ends the run with an error.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from time import perf_counter
from typing import Any

import msgspec
import torch

from engines import api
from engines.devices import open_device
from engines.overlap import SPEC
from experiments.common import command_line
from experiments.common.in_process_engine import column, near_ties, sampled, serve, some_requests
from experiments.common.record import write_result

MODELS = ("tiny-gpt2", "tiny-llama")
CHAOS = (None, 7)
TIGHT = {"prefix_cache": True, "block_size": 4, "num_blocks": 1 + 24}
SEED = 1


def deal(settings: list[dict[str, str]]) -> dict[tuple[int | None, str], list[dict[str, str]]]:
    """Each setting to one pair of chaos and model; in their own order, a pair would always get the same
    choices of the last toggles."""
    shuffled = random.Random(SEED).sample(settings, len(settings))
    pairs = [(chaos, model) for chaos in CHAOS for model in MODELS]
    return {pair: shuffled[number :: len(pairs)] for number, pair in enumerate(pairs)}


def mixed_requests(alike: bool) -> list[api.Request]:
    """Every other one sampled, every fourth by top-k and top-p; `alike`: all but one in three begin alike."""
    requests = []
    for each in some_requests(10):
        prompt = [*range(7, 7 + 12), *each.prompt] if alike and each.id % 3 else each.prompt
        changes: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 24}
        if each.id % 2:
            changes |= {"temperature": 0.9, "seed": each.id // 4}
        if each.id % 4 == 3:
            changes |= {"top_k": 40, "top_p": 0.9}
        requests.append(msgspec.structs.replace(each, **changes))
    return requests


def check(script: str, description: str | None, pace: str = "") -> None:
    """All of it, and that script's result."""
    parser = command_line.parser(script, description)
    parser.add_argument("--device", default="emulated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of the reference: more would fight with the device's process
    dealt, rows = deal(SPEC.every_setting()), []
    for chaos in CHAOS:
        device = open_device(arguments.device, chaos=chaos, pace=pace)
        requests = mixed_requests(alike=chaos is not None)
        greedy = [each for each in requests if each.temperature == 0]
        drawn = [each for each in requests if each.temperature > 0]
        options: dict[str, Any] = {
            "sampling": True,
            "max_batch_size": 6,
            "max_context": 96,
            "chunk_tokens": 7,
            "chaos": chaos,
        }
        if chaos is not None:
            options |= TIGHT
        for model in MODELS:
            began, found, settings = perf_counter(), Counter[str](), dealt[chaos, model]
            expected = sampled(model, drawn)
            for number, each in enumerate(settings):
                tokens, _, record = serve(device, each, requests, model=model, **options)
                assert all(tokens[request] == expected[request] for request in expected), each
                found["near-ties"] += near_ties(model, greedy, tokens)
                found["requests"] += len(requests)
                found["tokens"] += sum(map(len, tokens.values()))
                found["steps"] += record.steps.rows if record.steps else 0
                found["preempted"] += sum(column(record, "preempted"))
                found["cached"] += record.counters.get("prefix_cached_tokens", 0)
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
                    str(found["preempted"]),
                    str(found["cached"]),
                ]
            )
        kind = device.kind
        device.close()
    write_result(
        script,
        title=f"Requests whose tokens equal transformers', over every setting, {kind} device",
        header=[
            "model",
            "chaos",
            "settings",
            "identical",
            "near-ties",
            "tokens",
            "steps",
            "preempted",
            "cached tokens",
        ],
        rows=rows,
        data={} if pace else {"settings": list(dealt.values())},  # by row; the same for every pace
    )


if __name__ == "__main__":
    check(__file__, __doc__)
