"""fp32 tokens against transformers in every setting that means something.

    python -m experiments.validation.every_combination [--device DEVICE] [--parts N]    all not there yet

Every combination of toggle choices, once: a seeded shuffle deals each to one of four rows, tiny-gpt2 or
tiny-llama, chaos off or on. All of them in all four rows would take hours; the tests run every pair of
choices in all four. 10 requests of mixed lengths, max batch 6: greedy ones against generate(), sampled ones
against the sampler on transformers' logits. Where chaos is on, there is a prefix cache, prompts begin alike,
and blocks run out. A first divergence of a greedy request counts as a near-tie where the reference's two
logits lie within 1e-4; any other difference ends the run with an error. A row is done in parts, each kept as
it comes; of other settings than today's nothing is kept.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from time import perf_counter
from typing import Any

import msgspec
import torch

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from overlap_bench.engines import api
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC
from tests.support.in_process_engine import column, near_ties, sampled, serve, some_requests

MODELS = ("tiny-gpt2", "tiny-llama")
CHAOS = (None, 7)
TIGHT = {"prefix_cache": True, "block_size": 4, "num_blocks": 1 + 24}
SEED = 1
PARTS = 8  # of a row
COUNTED = ("count", "requests", "near_ties", "tokens", "steps", "preempted", "cached")


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
        changes: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 6 + each.id}
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
    parser.add_argument("--parts", type=int, default=len(CHAOS) * len(MODELS) * PARTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of the reference: more would fight with the device's process
    every = SPEC.every_setting()
    dealt, digest = deal(every), hashlib.sha256(msgspec.json.encode(every)).hexdigest()[:16]
    done = [part for part in earlier(script) if part["settings"] == digest]
    there = {(part["model"], part["chaos"], part["part"]) for part in done}
    places = [(chaos, model, part) for chaos in CHAOS for model in MODELS for part in range(PARTS)]
    missing = [place for place in places if (place[1], place[0], place[2]) not in there]
    for chaos in CHAOS:
        mine = [place for place in missing[: arguments.parts] if place[0] == chaos]
        if not mine:
            continue
        device = open_device(arguments.device, chaos=chaos, pace=pace)
        for _, model, part in mine:
            counts = serve_all(device, chaos, model, dealt[chaos, model][part::PARTS])
            done.append({"settings": digest, "model": model, "chaos": chaos, "part": part, **counts})
            write(script, done, len(every), device.kind)
        device.close()


def serve_all(device: Device, chaos: int | None, model: str, settings: list[dict[str, str]]) -> Counter[str]:
    """The same requests in each of these settings; what was counted. AssertionError for a wrong token."""
    requests = mixed_requests(alike=chaos is not None)
    greedy = [each for each in requests if each.temperature == 0]
    expected = sampled(model, [each for each in requests if each.temperature > 0])
    options: dict[str, Any] = {
        "sampling": True,
        "max_batch_size": 6,
        "max_context": 96,
        "chunk_tokens": 7,
        "chaos": chaos,
    }
    if chaos is not None:
        options |= TIGHT
    began, found = perf_counter(), Counter[str]()
    for number, each in enumerate(settings, 1):
        tokens, _, record = serve(device, each, requests, model=model, **options)
        assert all(tokens[request] == expected[request] for request in expected), each
        found["near_ties"] += near_ties(model, greedy, tokens)
        found["requests"] += len(requests)
        found["tokens"] += sum(map(len, tokens.values()))
        found["steps"] += record.steps.rows if record.steps else 0
        found["preempted"] += sum(column(record, "preempted"))
        found["cached"] += record.counters.get("prefix_cached_tokens", 0)
        print(f"\r{model} chaos={chaos} {number}/{len(settings)}", end="", file=sys.stderr)
    print(f"  {perf_counter() - began:.0f} s", file=sys.stderr)
    found["count"] = len(settings)
    return found


def write(script: str, done: list[dict[str, Any]], settings: int, kind: str) -> None:
    rows = []
    for chaos in CHAOS:
        for model in MODELS:
            mine = [part for part in done if (part["chaos"], part["model"]) == (chaos, model)]
            if not mine:
                continue
            found = {name: sum(part[name] for part in mine) for name in COUNTED}
            identical = found["requests"] - found["near_ties"]
            rows.append(
                [
                    model,
                    "off" if chaos is None else f"seed {chaos}",
                    str(found["count"]),
                    f"{identical:,} of {found['requests']:,}",
                    *(f"{found[name]:,}" for name in COUNTED[2:]),
                ]
            )
    write_result(
        script,
        title="Requests whose tokens equal transformers', over "
        f"{sum(part['count'] for part in done):,} of {settings:,} settings, {kind} device",
        header=[
            *("model", "chaos", "settings", "identical", "near-ties", "tokens", "steps", "preempted"),
            "cached tokens",
        ],
        rows=rows,
        data=done,
    )


if __name__ == "__main__":
    check(__file__, __doc__)
