"""Good requests for an hour and a half, and hostile clients beside them: does `bench serve` stay what it was?

    python -m experiments.validation.mixed_load [--minutes 90]

One server, one go. Good requests come at random times, three a second, streamed and whole, as ids and as
text, some with a stop string. Their tokens are known beforehand from transformers, and none of them is a
near-tie. The hostile clients are those of experiments/fuzzing/clients.py, as many again, from a process of
their own. One minute in ten the good requests are alone: their time to first token then is compared with the
rest. Each minute is kept in results/mixed_load/minutes.jsonl as soon as it is over. Exits with 1 where
something that must hold did not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import psutil
import torch

from engines import api
from engines.overlap.presets import load_tokenizer
from experiments.common import command_line
from experiments.common.bench_command import PATIENCE_S, Bench
from experiments.common.in_process_engine import generated, reference_model
from experiments.common.record import write_result
from experiments.fuzzing.clients import PATH, Tally, Word, attacking
from experiments.fuzzing.servers import connected, dumped, request, running
from experiments.validation.disconnects import meters
from experiments.validation.endurance import Expected, ending, text_of
from harness.metrics.divergences import NEAR_TIE

MODEL = "tiny-gpt2"
OPTIONS = ("--variant", "all", "--device", "emulated", "--set", f"model={MODEL}", "--set", "max_context=256")
PER_S = 3.0
PROMPTS, PROMPT_LENGTHS, MOST_TOKENS, LEAST_TOKENS = 48, (1, 7, 16, 33, 60), 32, 8
MINUTE_S = 60.0
STRETCH, ALONE = 10, 1  # minutes; which of them is without hostile clients
SETTLED_S = 5.0  # into a minute: what the one before it began is over
WARM = 5  # minutes after which memory is to stay what it is
MOST_GROWTH, MOST_TIMES = 0.05, 2.0
# Processes of the server by a word of their command line.
ROLES = {
    "engines.host": "engine host",
    "engines.devices": "device process",
    "tokenizing_process": "tokenizing",
}
JUDGED = ("all", "server", "engine host", "device process")  # a tokenizing process may be another by now
STATE = command_line.ROOT / "results" / "mixed_load" / "minutes.jsonl"


@dataclass(frozen=True, slots=True)
class Good:
    """What is asked again and again: as its ids, or as the text that stands for them."""

    source: Expected
    prompt: str | list[int]


class Held(msgspec.Struct, frozen=True):
    """By a process of the server."""

    rss: int  # bytes
    threads: int
    files: int


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen in one minute, and what the server held at its end."""

    number: int
    hostile: bool
    right: int
    wrong: list[str]
    ttft_ms: list[float]
    clients: Tally  # the hostile ones
    requests: dict[str, int]  # by how they ended, as the server counts them
    dropped: int  # connections
    blocks: int  # of the KV cache, in use
    held: dict[str, Held]  # by role; "all" is their sum
    cores: float  # busy for the server


# -- good requests ---------------------------------------------------------------------------------------


def good_requests() -> list[Good]:
    """Mixed lengths; every fourth is a text."""
    random = Random(1)
    tokenizer = load_tokenizer(MODEL, 4096)
    prompts: list[str | list[int]] = []
    for number in range(PROMPTS):
        length = random.choice(PROMPT_LENGTHS)
        ids = [random.randrange(1, 4096) for _ in range(length)]
        prompts.append(f"Question {number}: how far is it? " * (1 + number % 3) if number % 4 == 0 else ids)
    asked = [
        api.Request(
            number, prompt if isinstance(prompt, list) else tokenizer.encode(prompt).ids, MOST_TOKENS, False
        )
        for number, prompt in enumerate(prompts)
    ]
    tokens = generated(MODEL, asked)
    return [
        Good(Expected(each, tokens[each.id], *text_of(tokenizer, tokens[each.id])), prompts[each.id])
        for each in asked
        if _is_clear(each, tokens[each.id])
    ]


def _is_clear(asked: api.Request, tokens: list[int]) -> bool:
    """Whether no token is so close to another that a batch might change it."""
    ids = torch.tensor([[*asked.prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = reference_model(MODEL)(ids).logits[0, -len(tokens) :]
    best = logits.topk(2).values
    return bool((best[:, 0] - best[:, 1]).min() > 10 * NEAR_TIE["float32"])


async def ask(url: str, good: Good, random: Random) -> tuple[str, float | None]:
    """What is wrong with the answer, if anything; and the ms to its first token, if it was streamed."""
    asked = msgspec.structs.replace(
        good.source.request, max_new_tokens=random.randint(LEAST_TOKENS, MOST_TOKENS)
    )
    body: dict[str, Any] = {
        "prompt": good.prompt,
        "max_tokens": asked.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": random.random() < 0.75,
    }
    text = "".join(good.source.pieces[: asked.max_new_tokens])
    if text and random.random() < 0.25:
        at = random.randrange(len(text))
        asked = msgspec.structs.replace(asked, stop=[text[at : at + 3]])
        body["stop"] = asked.stop
    reason, count, said = ending(asked, good.source, eos=-1)
    expected = (reason, good.source.tokens[:count], said)
    try:
        async with asyncio.timeout(PATIENCE_S):
            got, ttft_ms = await _answer(url, body)
    except (OSError, EOFError, TimeoutError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}", None
    return "" if got == expected else f"{got} instead of {expected}", ttft_ms


async def _answer(url: str, body: dict[str, Any]) -> tuple[tuple[str, list[int], str], float | None]:
    """Reason, tokens and text; the time from before the connection is made to the first token."""
    began = perf_counter()
    ttft_ms = None
    choices = []
    async with connected(url, request(PATH, dumped(body))) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"{head[:50]!r} {(await reader.read(500))!r}")
        if not body["stream"]:
            choices = json.loads(await reader.read())["choices"]
        else:
            async for line in reader:
                if line.startswith(b"data: {"):
                    ttft_ms = (perf_counter() - began) * 1e3 if ttft_ms is None else ttft_ms
                    choices += json.loads(line.removeprefix(b"data: "))["choices"]
    ids = [token for choice in choices for token in choice["token_ids"]]
    text = "".join(choice["text"] for choice in choices)
    return (choices[-1]["finish_reason"], ids, text), ttft_ms


# -- minutes ---------------------------------------------------------------------------------------------


def held(server: psutil.Process) -> dict[str, Held]:
    found: dict[str, list[Held]] = {"all": []}
    for each in (server, *server.children(recursive=True)):
        try:
            with each.oneshot():
                words = " ".join(each.cmdline())
                one = Held(each.memory_info().rss, each.num_threads(), each.num_fds())
        except psutil.NoSuchProcess:  # a tokenizing process that was replaced just now
            continue
        role = next((role for word, role in ROLES.items() if word in words), "server")
        for name in ("all", role):
            found.setdefault(name, []).append(one)
    return {
        role: Held(*(sum(getattr(each, name) for each in among) for name in Held.__struct_fields__))
        for role, among in found.items()
    }


def busy_s(server: psutil.Process) -> float:
    """CPU seconds of its processes so far."""
    seconds = 0.0
    for each in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


async def minute(
    number: int, url: str, server: psutil.Process, goods: Sequence[Good], tell: Callable[[Word], Tally]
) -> Minute:
    random = Random(number)
    hostile = number % STRETCH != ALONE
    await asyncio.to_thread(tell, Word.GO if hostile else Word.REST)
    before, busy_before = await asyncio.to_thread(meters, url), busy_s(server)
    began = perf_counter()
    found: list[tuple[float, str, float | None]] = []

    async def one(sent_s: float, good: Good, of_its_own: Random) -> None:
        found.append((sent_s, *await ask(url, good, of_its_own)))

    async with asyncio.TaskGroup() as group:
        due = random.expovariate(PER_S)
        while due < MINUTE_S:
            await asyncio.sleep(began + due - perf_counter())
            group.create_task(one(due, random.choice(goods), Random(random.random())))
            due += random.expovariate(PER_S)
        await asyncio.sleep(began + MINUTE_S - perf_counter())
    lasted = perf_counter() - began
    busy = busy_s(server) - busy_before
    clients = await asyncio.to_thread(tell, Word.GO if hostile else Word.REST)
    after = await asyncio.to_thread(meters, url)
    return Minute(
        number=number,
        hostile=hostile,
        right=sum(not wrong for _, wrong, _ in found),
        wrong=[wrong[:500] for _, wrong, _ in found if wrong],
        ttft_ms=[round(ms, 2) for sent_s, _, ms in found if ms is not None and sent_s > SETTLED_S],
        clients=clients,
        requests=_grown(before, after, "bench_requests_total{"),
        dropped=sum(_grown(before, after, "bench_connections_dropped_total{").values()),
        blocks=int(after["bench_engine_kv_blocks_used"]),
        held=held(server),
        cores=round(busy / lasted, 3),
    )


def _grown(before: dict[str, float], after: dict[str, float], prefix: str) -> dict[str, int]:
    """A counter's growth, by its last label."""
    grown: dict[str, int] = {}
    for name, value in after.items():
        if name.startswith(prefix) and value > before.get(name, 0):
            label = name.split('"')[-2]
            grown[label] = grown.get(label, 0) + int(value - before.get(name, 0))
    return grown


async def measure(url: str, bench: Bench, minutes: int, goods: Sequence[Good], state: Path) -> list[Minute]:
    server = psutil.Process(bench.popen.pid)
    found = []
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.open("wb") as kept, attacking(url, seed=1) as tell:
        for number in range(minutes):
            found.append(await minute(number, url, server, goods, tell))
            kept.write(msgspec.json.encode(found[-1]) + b"\n")
            kept.flush()
            print(" | ".join(row(str(number), found[-1:])), file=sys.stderr)
            for wrong in (*found[-1].wrong, *found[-1].clients.faults):
                print(f"    {wrong}", file=sys.stderr)
            bench.look()
            assert bench.popen.poll() is None, bench.stderr.read_text()
        await asyncio.to_thread(tell, Word.END)
    return found


async def left(url: str) -> dict[str, float]:
    """What is still in use once nobody asks."""
    names = ("bench_requests_in_flight", "bench_requests_preparing", "bench_engine_kv_blocks_used")
    for _ in range(600):
        found = await asyncio.to_thread(meters, url)
        if not any(found[name] for name in names):
            break
        await asyncio.sleep(0.1)
    return {name: found[name] for name in names if found[name]}


# -- what came of it -------------------------------------------------------------------------------------


def p99(minutes: Sequence[Minute], hostile: bool) -> float:
    values = [ms for each in minutes if each.hostile == hostile for ms in each.ttft_ms]
    return float(np.percentile(values, 99)) if values else float("nan")


def growth(minutes: Sequence[Minute], role: str) -> float:
    """The most over the least, once it is warm, minus 1."""
    values = [each.held[role].rss for each in minutes[min(WARM, len(minutes) - 1) :]]
    return max(values) / min(values) - 1


def row(name: str, minutes: Sequence[Minute]) -> list[str]:
    last = minutes[-1]
    right, wrong = sum(each.right for each in minutes), sum(len(each.wrong) for each in minutes)
    clients = sum(sum(each.clients.ended.values()) for each in minutes)
    ended = [sum(each.requests.get(how, 0) for each in minutes) for how in ("refused", "cancelled")]
    return [
        name,
        f"{right:,} of {right + wrong:,}",
        f"{clients:,}",
        ", ".join(f"{count:,}" for count in (*ended, sum(each.dropped for each in minutes))),
        f"{p99(minutes, True):.1f} ms",
        f"{p99(minutes, False):.1f} ms",
        f"{last.held['all'].rss >> 20} MiB",
        f"{last.held['device process'].rss >> 20} MiB",
        f"{last.held['all'].threads}",
        f"{last.held['all'].files}",
        f"{last.blocks}",
        f"{np.mean([each.cores for each in minutes]):.2f}",
    ]


def judge(minutes: Sequence[Minute], in_use: dict[str, float], stderr: str) -> dict[str, bool]:
    return {
        "every good request's tokens are right": not any(each.wrong for each in minutes),
        f"memory stays within {MOST_GROWTH:.0%}": all(
            growth(minutes, role) <= MOST_GROWTH for role in JUDGED
        ),
        f"p99 TTFT is within {MOST_TIMES:g} times of alone": p99(minutes, True)
        <= MOST_TIMES * p99(minutes, False),
        "no hostile client sees a fault": not any(each.clients.faults for each in minutes),
        "nothing is in use at the end": not in_use,
        "the server says nothing of a fault": not any(
            word in stderr for word in ("Traceback", "Exception", "Error")
        ),
    }


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--minutes", type=int, default=90)
    given = parser.parse_args()
    torch.set_num_threads(1)
    goods = good_requests()
    with running(OPTIONS) as (bench, url):

        async def all_of_it() -> tuple[list[Minute], dict[str, float]]:
            return await measure(url, bench, given.minutes, goods, STATE), await left(url)

        minutes, in_use = asyncio.run(all_of_it())
        stderr = bench.stderr.read_text()
    holds = judge(minutes, in_use, stderr) | {
        "the server ends well": bench.popen.returncode == 0 and not bench.left()
    }
    stretches = [minutes[at : at + STRETCH] for at in range(0, len(minutes), STRETCH)]
    total = row("all", minutes)
    total[4] += f", {p99(minutes, True) / p99(minutes, False):.2f} times of alone"
    total[6] += f", {growth(minutes, 'all'):+.1%}"
    total[7] += f", {growth(minutes, 'device process'):+.1%}"
    missed = [what for what, held in holds.items() if not held]
    write_result(
        __file__,
        title=f"`bench serve`, {given.minutes} minutes of good requests and hostile clients: "
        + (f"not so: {'; '.join(missed)}" if missed else "all that must hold did"),
        header=[
            "minutes",
            "good requests right",
            "hostile clients",
            "refused, cancelled, dropped",
            "p99 TTFT beside them",
            "alone",
            "memory",
            "of its device",
            "threads",
            "files",
            "KV blocks in use",
            "cores busy",
        ],
        rows=[*(row(f"{each[0].number}–{each[-1].number}", each) for each in stretches), total],
        data={
            "options": OPTIONS,
            "good requests": len(goods),
            "holds": holds,
            "in use at the end": in_use,
            "growth": {role: round(growth(minutes, role), 4) for role in JUDGED},
            "clients": _summed([each.clients.ended for each in minutes]),
            "requests": _summed([each.requests for each in minutes]),
            "minutes": {
                "hostile": [int(each.hostile) for each in minutes],
                "p50 TTFT, ms": [round(float(np.median(each.ttft_ms)), 2) for each in minutes],
                "p99 TTFT, ms": [round(float(np.percentile(each.ttft_ms, 99)), 2) for each in minutes],
                **{
                    f"memory of {role}, MiB": [round(each.held[role].rss / (1 << 20), 1) for each in minutes]
                    for role in JUDGED
                },
                "threads": [each.held["all"].threads for each in minutes],
                "files": [each.held["all"].files for each in minutes],
                "blocks": [each.blocks for each in minutes],
                "refused": [each.requests.get("refused", 0) for each in minutes],
            },
        },
    )
    if missed:
        sys.exit(1)


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each.get(name, 0) for each in counts) for name in sorted(set().union(*counts))}


if __name__ == "__main__":
    main()
