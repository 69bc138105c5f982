"""Greedy tokens against transformers where two devices work together, in every pair of choices.

    python -m experiments.validation.several_devices    a quarter of an hour

Two ranks of one model, and two replicas that step together, each in a few settings that hold every pair of
choices which can stand together there: once with tiny-gpt2 and a device that is as fast as it can, once with
tiny-llama and chaos, where each device holds its streams back in its own way and blocks are few. 10 requests
of mixed lengths, of which replicas get every other one. A first divergence counts as a near-tie where the
reference's two logits lie within 1e-4; any other difference ends the run with an error. Rows that are
recorded already are not measured again.
"""

from __future__ import annotations

import sys
from collections import Counter
from time import perf_counter
from typing import Any

import torch

from engines.devices import open_device
from engines.overlap import SPEC
from experiments.common import command_line
from experiments.common.in_process_engine import column, near_ties, serve, some_requests
from experiments.common.pairwise import pairs, pairwise_cover
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier

TOGETHER = {"2 ranks": ("ranks", "share"), "2 replicas": ("replicas", "sync-ranks")}
RUNS: tuple[tuple[str, int | None], ...] = (("tiny-gpt2", None), ("tiny-llama", 7))
TIGHT = {"prefix_cache": True, "block_size": 4, "num_blocks": 1 + 24}
REQUESTS = 10


def settings_of(together: str) -> list[dict[str, str]]:
    """Every one that can stand there."""
    number, choice = TOGETHER[together]
    choices = SPEC.toggle(choice).choices
    return [
        SPEC.check({**settings, number: "2", choice: each})
        for settings in SPEC.every_setting()
        for each in choices
        if choice != "sync-ranks" or settings.get("launch", "inline") == "inline"
    ]


def serve_all(together: str, model: str, chaos: int | None) -> dict[str, Any]:
    """The same requests in each setting of a cover; what was counted. AssertionError for a wrong token."""
    every = settings_of(together)
    cover = pairwise_cover(every)
    requests = some_requests(REQUESTS)
    options: dict[str, Any] = {"max_batch_size": 6, "max_context": 96, "chunk_tokens": 7, "chaos": chaos}
    if chaos is not None:
        options |= TIGHT
    began, found = perf_counter(), Counter[str]()
    device = open_device("emulated", chaos=chaos, cores="shared")
    try:
        for number, settings in enumerate(cover, 1):
            print(f"{together} {model} {number}/{len(cover)} {settings}", file=sys.stderr)
            tokens, _, record = serve(device, settings, requests, model=model, **options)
            found["near_ties"] += near_ties(model, requests, tokens)
            found["steps"] += record.steps.rows if record.steps else 0
            found["preempted"] += sum(column(record, "preempted"))
            found["padding"] += record.counters.get("padding_steps", 0)
    finally:
        device.close()
    return {
        "together": together,
        "model": model,
        "chaos": chaos,
        "settings": len(cover),
        "pairs": len(set[Any]().union(*(pairs(each) for each in cover))),
        "requests": REQUESTS * len(cover),
        **{name: found[name] for name in ("near_ties", "steps", "preempted", "padding")},
        "seconds": perf_counter() - began,
    }


def row(run: dict[str, Any]) -> list[str]:
    return [
        run["together"],
        run["model"],
        "off" if run["chaos"] is None else f"seed {run['chaos']}",
        f"{run['settings']} ({run['pairs']:,})",
        f"{run['requests'] - run['near_ties']} of {run['requests']}",
        *(f"{run[name]:,}" for name in ("near_ties", "steps", "padding", "preempted")),
    ]


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    torch.set_num_threads(1)  # of the reference: more would fight with the devices' processes
    runs = earlier(__file__)
    there = {(each["together"], each["model"]) for each in runs}
    for together in TOGETHER:
        for model, chaos in RUNS:
            if (together, model) in there:
                continue
            runs.append(serve_all(together, model, chaos))
            write_result(
                __file__,
                title="Requests whose tokens equal transformers', where two devices work together",
                header=[
                    *("devices", "model", "chaos", "settings (pairs of choices)", "identical", "near-ties"),
                    *("steps of the first", "of them padding", "preempted"),
                ],
                rows=[row(each) for each in runs],
                data=runs,
            )


if __name__ == "__main__":
    main()
