"""Greedy fp32 tokens against transformers' generate() in every setting that means something.

    python -m experiments.every_combination [--device emulated|cuda]

Every combination of toggle choices x tiny-gpt2 and tiny-llama x chaos off and on. 12 requests of mixed
lengths, max batch 6. A first divergence counts as a near-tie where the reference's two logits lie within
1e-4; any other ends the run with an error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from time import perf_counter

from engines.devices import open_device
from engines.overlap import SPEC
from experiments.record import write_result
from tests.serving import near_ties, serve, some_requests

MODELS = ("tiny-gpt2", "tiny-llama")
CHAOS = (None, 7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="emulated")
    arguments = parser.parse_args()
    settings, requests, rows = SPEC.every_setting(), some_requests(12), []
    for chaos in CHAOS:
        device = open_device(arguments.device, chaos=chaos)
        for model in MODELS:
            began, found = perf_counter(), Counter[str]()
            for number, each in enumerate(settings):
                tokens, _, record = serve(device, each, requests, model=model, max_batch_size=6, chaos=chaos)
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
        data={"settings": settings},
    )


if __name__ == "__main__":
    main()
