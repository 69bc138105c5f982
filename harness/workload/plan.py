"""The requests of one round, in the order in which they are sent."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from harness.workload.arrivals import ARRIVALS
from harness.workload.conversations import is_conversations
from harness.workload.requests import Prompt, ask
from harness.workload.streams import stream
from harness.workload.workload import Workload


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One request of a round, and when it is due: `offset_ns` after the round's start, or UNTIMED (-1)."""

    id: int
    offset_ns: int
    prompt: Prompt
    max_new_tokens: int
    stop_on_eos: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of its samples
    stop: list[str] = []


def plan(workload: Workload, seed: int, tokenizer_path: str, context: int) -> list[Planned]:
    """The requests of one round, in the order in which they are sent; the same for the same arguments.

    `workload` is a checked one. Requests take the prompts in turn, from the start again when there are too
    few. `tokenizer_path` names a tokenizer.json and may be empty where nothing needs one (text as it is).
    Prompt and output together must fit `context` tokens; without a tokenizer that is left to the engine.
    Arrivals, lengths and prompts each have random numbers of their own. Raises BadSetting.
    """
    asked = ask(workload, seed, tokenizer_path, context).requests
    offsets = ARRIVALS[workload.arrival].offsets(workload, stream(seed, "arrivals"))
    return [
        Planned(
            id=index,
            offset_ns=offset,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_on_eos=workload.stop_on_eos,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=request_seed(seed, index),
            stop=workload.stop,
        )
        for index, (offset, (prompt, max_new_tokens)) in enumerate(zip(offsets, asked, strict=True))
    ]


def skipped(workload: Workload, seed: int, tokenizer_path: str, context: int) -> dict[str, int]:
    """What `plan` passes over, by reason: conversations too "short" or too "long", requests of a trace that
    "failed". Nothing is ever skipped of other prompts."""
    if workload.trace is None and not is_conversations(workload.prompts):
        return {}
    return dict(ask(workload, seed, tokenizer_path, context).skipped)


def request_seed(seed: int, request: int) -> int:
    """The seed of a request's samples, from the round's: 63 bits."""
    digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
