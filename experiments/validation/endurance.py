"""Many requests end to end under chaos, in settings that differ from seed to seed: all finish, all are right.

    python -m experiments.validation.endurance [--seeds 5] [--requests 2000]

Each seed is one engine on a chaotic device, with too few blocks and the prefix cache on. Its requests come at
once and are mixed: greedy ones must get generate()'s tokens (near-ties are counted), sampled ones those of
the engine's sampler over transformers' logits; some end at an EOS or a stop string, and some are cancelled,
and must get a beginning. Expected tokens are computed once per distinct prompt, in batches.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engines import api
from engines.devices import open_device
from engines.devices.base import Device
from engines.overlap import SPEC
from engines.overlap.presets import load_tokenizer
from engines.overlap.sampler import sample
from experiments.common import command_line
from experiments.common.in_process_engine import column, near_ties, reference_model, serve
from experiments.common.record import write_result

MODELS = ("tiny-gpt2", "tiny-llama")
MOST_TOKENS = 32
PROMPTS = 48
PROMPT_LENGTHS = (1, 7, 16, 33, 60)
CANCELLED = 0.05  # of the requests
OPTIONS = {
    "max_batch_size": 64,
    "prefill_max_tokens": 1024,
    "block_size": 4,
    "num_blocks": 1 + 130,
    "max_context": 96,
    "chunk_tokens": 16,
    "prefix_cache": True,
    "sampling": True,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """A request to ask, and all that it can get: its tokens, the text that each of them adds, and what more
    is sent where it ends with that token: half a character, which no further token completes."""

    request: api.Request
    tokens: list[int]
    pieces: list[str]
    rests: list[str]


def expect(model: str) -> list[Expected]:
    """Prompts that begin alike in groups; every third is sampled."""
    rng = random.Random(1)
    beginning = [rng.randrange(1, 4096) for _ in range(24)]
    requests = []
    for number in range(PROMPTS):
        length = rng.choice(PROMPT_LENGTHS)
        own = [rng.randrange(1, 4096) for _ in range(length)]
        prompt = (beginning + own)[:length] if number % 2 else own
        how = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if number % 3 == 0 else {}
        prompt = [*prompt[:-1], number + 1]  # different ones, also where they begin alike
        requests.append(api.Request(number, prompt, MOST_TOKENS, seed=number, **how))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model, 4096)
    found = []
    for length in PROMPT_LENGTHS:
        same = [request for request in requests if len(request.prompt) == length]
        for request, tokens in zip(same, _all_tokens(model, same), strict=True):
            found.append(Expected(request, tokens, *text_of(tokenizer, tokens)))
    return found


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> tuple[list[str], list[str]]:
    """Pieces and rests of an Expected."""
    stream = DecodeStream(skip_special_tokens=True)
    pieces, rests, undecoded = [], [], list[int]()
    for token in tokens:
        piece = stream.step(tokenizer, token)
        undecoded = [*undecoded, token] if piece is None else []
        pieces.append(piece or "")
        rests.append(tokenizer.decode(undecoded) if undecoded else "")
    return pieces, rests


def _all_tokens(model: str, requests: list[api.Request]) -> list[list[int]]:
    """By transformers, in one batch: prompts of one length need no padding."""
    if not requests:
        return []
    ids = torch.tensor([request.prompt for request in requests])
    arguments = {
        "temperatures": torch.tensor([request.temperature for request in requests]),
        "seeds": torch.tensor([request.seed for request in requests]),
        "top_ks": torch.tensor([request.top_k for request in requests]),
        "top_ps": torch.tensor([request.top_p for request in requests]),
    }
    rows = []
    chosen = torch.zeros(len(requests), dtype=torch.int64)
    with torch.inference_mode():
        out = reference_model(model)(ids, use_cache=True)
        for place in range(MOST_TOKENS):
            positions = torch.full((len(requests),), ids.shape[1] + place)
            sample(out.logits[:, -1], chosen, positions=positions, **arguments)
            rows.append(chosen.tolist())
            out = reference_model(model)(chosen[:, None], past_key_values=out.past_key_values, use_cache=True)
    return [list(tokens) for tokens in zip(*rows, strict=True)]


def ask(
    expected: Sequence[Expected], count: int, rng: random.Random
) -> tuple[list[api.Request], list[Expected]]:
    """`count` requests, and for each what it was made from. Some have a stop string out of their own text."""
    requests, sources = [], []
    for number in range(count):
        source = rng.choice(expected)
        most = rng.randint(1, MOST_TOKENS)
        text = "".join(source.pieces[:most])
        at = rng.randrange(len(text)) if text and rng.random() < 0.25 else None
        changes: dict[str, Any] = {"id": number, "max_new_tokens": most, "stop_on_eos": rng.random() < 0.3}
        if at is not None:
            changes["stop"] = [text[at : at + rng.randint(1, 4)]]
        requests.append(msgspec.structs.replace(source.request, **changes))
        sources.append(source)
    return requests, sources


def ending(request: api.Request, source: Expected, eos: int) -> tuple[str, int, str]:
    """How it ends, with how many tokens, and its text."""
    text = ""
    tokens = zip(source.tokens, source.pieces, source.rests, strict=True)
    for count, (token, piece, rest) in enumerate(tokens, start=1):
        text += piece
        at_eos = request.stop_on_eos and token == eos
        ends = at_eos or count == request.max_new_tokens
        if ends:
            text += rest
        found = [text.find(stop) for stop in request.stop if stop in text]
        if found:
            return "stop", count, text[: min(found)]
        if ends:
            return "eos" if at_eos else "length", count, text
    raise AssertionError("no end")


def run(device: Device, model: str, expected: list[Expected], seed: int, count: int) -> Counter[str]:
    """One engine, one setting; what was counted. AssertionError for a request that is wrong."""
    rng = random.Random(seed)
    settings = rng.choice(SPEC.every_setting())
    print(f"seed {seed}: {model} {' '.join(f'{k}={v}' for k, v in settings.items())}", file=sys.stderr)
    requests, sources = ask(expected, count, rng)
    eos = Counter(token for each in expected for token in each.tokens).most_common(1)[0][0]
    given_up: set[int] = set()

    def cancel(engine: api.Engine, events: list[api.Event]) -> None:
        if events and rng.random() < CANCELLED and len(given_up) < CANCELLED * count:
            request = min(count - 1, events[-1].id + rng.randrange(30))  # one that runs or soon will
            given_up.add(request)
            engine.cancel(request)

    options: dict[str, Any] = {
        **OPTIONS,
        "model": model,
        "chaos": seed,
        "stream_interval": rng.choice((1, 3, 8)),
    }
    tokens, events, record = serve(
        device, settings, requests, eos=frozenset({eos}), meanwhile=cancel, **options
    )
    texts, ends = dict.fromkeys(tokens, ""), {}
    for event in events:
        match event:
            case api.Chunk(id, _, text):
                texts[id] += text
            case api.Finish(id):
                ends[id] = event
            case api.Error(id, message):
                raise AssertionError(f"request {id}: {message}")
    counts = Counter[str](preempted=sum(column(record, "preempted")), steps=len(column(record, "step")))
    counts["cached tokens"] = record.counters["prefix_cached_tokens"]
    counts["dropped tokens"] = sum(column(record, "dropped")) + record.counters.get("stop_dropped_tokens", 0)
    for request, source in zip(requests, sources, strict=True):
        reason, length, text = ending(request, source, eos)
        end, got = ends[request.id], tokens[request.id]
        counts[end.reason] += 1
        counts["tokens"] += len(got)
        assert len(got) == end.completion_tokens
        if end.reason == "cancelled":
            assert request.id in given_up
            right = got == source.tokens[: len(got)] and len(got) <= length
        else:
            right = (end.reason, got, texts[request.id]) == (reason, source.tokens[:length], text)
        if not right:
            assert request.temperature == 0, f"request {request.id} is wrong: {got} not {source.tokens}"
            plain = api.Request(request.id, request.prompt, len(got))
            counts["near-ties"] += near_ties(model, [plain], {request.id: got})
    return counts


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--device", default="emulated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    expected = {model: expect(model) for model in MODELS}
    columns = ("tokens", "steps", "preempted", "cached tokens", "dropped tokens", "near-ties")
    reasons = ("length", "eos", "stop", "cancelled")
    rows = []
    for seed in range(arguments.seeds):
        model = MODELS[seed % len(MODELS)]
        device = open_device(arguments.device, chaos=seed)
        began = perf_counter()
        counts = run(device, model, expected[model], seed, arguments.requests)
        device.close()
        ended = ", ".join(f"{counts[reason]} {reason}" for reason in reasons)
        rows.append(
            [
                str(seed),
                model,
                f"{arguments.requests - counts['near-ties']} of {arguments.requests}",
                ended,
                *(str(counts[column]) for column in columns),
                f"{perf_counter() - began:.0f} s",
            ]
        )
        print(rows[-1], file=sys.stderr)
    write_result(
        __file__,
        title=f"Requests end to end under chaos, {arguments.device} device: right ones of all",
        header=["seed", "model", "right", "ended by", *columns, "wall"],
        rows=rows,
        data={"options": OPTIONS},
    )


if __name__ == "__main__":
    main()
