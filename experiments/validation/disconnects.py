"""A thousand clients that hang up, next to others that stay: is a block lost, is another stream touched?

    python -m experiments.validation.disconnects

`bench serve` with too few blocks for what is asked of it, so that requests wait and are preempted. Some
clients stay: each asks the same again and again, greedily or drawn with a seed, and must get the tokens that
it got when it was alone. The others hang up at a random place: before the first token, in mid-stream, at
times on an answer that is not streamed, with a farewell or by a reset. Afterwards every block must be free.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.request
from collections import Counter
from time import perf_counter
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.server import serving
from experiments.fuzzing.clients import PATH, hangs_up
from experiments.fuzzing.servers import connected, dumped, request

ARMS = {"all optimizations": ["--variant", "all"], "output in a process": ["--variant", "offload-output"]}
BLOCKS = 60  # of 16 tokens
OPTIONS = ["max_batch_size=16", f"num_blocks={BLOCKS + 1}", "max_context=256"]
STAYING = 6  # streams that are compared
AT_ONCE = 12  # clients that will hang up
STAYING_TOKENS = 100


def staying(number: int) -> dict[str, Any]:
    """Half of them greedy, half drawn."""
    how = {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": number}
    prompt = [number * 50 + place for place in range(1, 8 + 5 * number)]
    return {
        "prompt": prompt,
        "max_tokens": STAYING_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **how,
    }


async def ids(url: str, body: dict[str, Any]) -> list[int]:
    """The token ids of a stream, read to its end."""
    found: list[int] = []
    async with connected(url, request(PATH, dumped({**body, "stream": True}))) as (reader, _):
        async for line in reader:
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    found += choice["token_ids"]
    return found


def meters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def measure(url: str, count: int) -> tuple[Counter[str], int, int, dict[str, float]]:
    """How clients left, staying streams in all, those of them that were right, and the meters at the end."""
    rng = random.Random(1)
    alone = [await ids(url, staying(number)) for number in range(STAYING)]
    left = Counter[str]()
    remaining = iter(range(count))
    compared = right = 0

    async def leaver() -> None:
        for _ in remaining:
            left[await hangs_up(url, rng)] += 1

    leavers = [asyncio.create_task(leaver()) for _ in range(AT_ONCE)]

    async def stayer(number: int) -> None:
        nonlocal compared, right
        while not all(task.done() for task in leavers):
            got = await ids(url, staying(number))
            compared += 1
            right += got == alone[number]

    await asyncio.gather(*leavers, *(stayer(number) for number in range(STAYING)))
    found = meters(url)
    while found["bench_requests_in_flight"] or found["bench_engine_requests_running"]:
        await asyncio.sleep(0.1)
        found = meters(url)
    return left, compared, right, found


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=1000)
    given = parser.parse_args()
    rows, data = [], {}
    for name, flags in ARMS.items():
        settings = [part for option in OPTIONS for part in ("--set", option)]
        with serving("harness", "serve", "--device", given.device, *flags, *settings) as url:
            began = perf_counter()
            left, compared, right, found = asyncio.run(measure(url, given.clients))
            took = perf_counter() - began
        cancelled = found['bench_requests_total{endpoint="completions",outcome="cancelled"}']
        rows.append(
            [
                name,
                ", ".join(f"{left[how]} {how}" for how in sorted(left)),
                f"{cancelled:.0f}",
                f"{found['bench_engine_kv_blocks_used']:.0f} of {BLOCKS}",
                f"{right} of {compared}",
                f"{took:.0f} s",
            ]
        )
        data[name] = {"left": dict(left), "meters": found}
        print(rows[-1], file=sys.stderr)
    write_result(
        __file__,
        title=f"{given.clients} clients that hang up, {STAYING} streams at a time that stay",
        header=[
            "engine",
            "clients left",
            "cancelled",
            "blocks lost",
            "staying streams with the same tokens",
            "wall",
        ],
        rows=rows,
        data={"options": OPTIONS, "at_once": AT_ONCE, "arms": data},
    )


if __name__ == "__main__":
    main()
