"""Serves requests by an engine in this process, and says what transformers makes of the same."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap.engine import OverlapEngine
from overlap_bench.engines.overlap.sampler import sample
from overlap_bench.engines.presets.checkpoints import load_model
from overlap_bench.harness.metrics.divergences import NEAR_TIE
from tests.support.bench_command import PATIENCE_S


@dataclass
class Collected(api.EventSink):
    """Keeps events. An engine with an output process needs a real address; see `serve`."""

    address: str = ""
    events: list[api.Event] = field(default_factory=list)
    ended: int = 0

    def send(self, events: Sequence[api.Event]) -> None:
        self.events.extend(events)
        self.ended += sum(isinstance(event, api.Finish | api.Error) for event in events)


def serve(
    device: Device,
    toggles: dict[str, str],
    requests: list[api.Request],
    *,
    eos: frozenset[int] | None = None,
    meanwhile: Callable[[api.Engine, list[api.Event]], None] = lambda engine, events: None,
    ends: int | None = None,
    **options: object,
) -> tuple[dict[int, list[int]], list[api.Event], api.RoundRecord]:
    """Token ids by request, all events, and the record, of an engine that serves all requests at once.
    `meanwhile` is called between two steps; it is over after as many `ends` as there are requests, if no
    other number is given."""
    engine = OverlapEngine(api.EngineOptions(**options), toggles, device=device)  # type: ignore[arg-type]
    sink = _Pulled() if toggles.get("output") == "process" else Collected()
    try:
        engine.start(sink)
        if eos is not None:
            engine._loop.eos = eos
        engine.begin_round()
        for request in requests:
            engine.submit(request)

        def pump(timeout: float | None) -> bool:
            if isinstance(sink, _Pulled):
                sink.pull(wait=timeout is None)
            meanwhile(engine, sink.events)
            return sink.ended < (ends or len(requests))

        engine.run(pump)
        record = engine.collect()
    finally:
        engine.stop()
        if isinstance(sink, _Pulled):
            sink.close()
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    for event in sink.events:
        if isinstance(event, api.Chunk):
            tokens[event.id] += event.token_ids
    return tokens, sink.events, record


def column(record: api.RoundRecord, name: str) -> list[int]:
    """One column of a round's step records."""
    assert record.steps is not None
    cells = np.frombuffer(record.steps.data, dtype=np.int64).reshape(record.steps.rows, -1)
    values: list[int] = cells[:, record.steps.columns.index(name)].tolist()
    return values


class _Pulled(Collected):
    """Receives what an output process sends, over ZeroMQ as the harness does."""

    def __init__(self) -> None:
        import msgspec
        import zmq

        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._decode = msgspec.msgpack.Decoder(list[api.Event]).decode

    def pull(self, wait: bool) -> None:
        import zmq

        if wait and not self._socket.poll(PATIENCE_S * 1000):
            raise TimeoutError("the output process said nothing")
        while True:
            try:
                self.send(self._decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return

    def close(self) -> None:
        self._context.destroy(linger=0)


def some_requests(count: int, seed: int = 1) -> list[api.Request]:
    """Mixed prompt and output lengths, that cross block borders and batch buckets."""
    rng = random.Random(seed)
    return [
        api.Request(
            number,
            [rng.randrange(1, 4096) for _ in range(rng.choice([1, 3, 15, 16, 17, 40]))],
            rng.choice([1, 2, 9, 24]),
        )
        for number in range(count)
    ]


@cache
def reference_model(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model(name, dtype, torch.device("cpu"), seed=0)


def generated(
    model: str, requests: list[api.Request], dtype: torch.dtype = torch.float32
) -> dict[int, list[int]]:
    """What transformers' generate() gives for each request alone, greedily and without a stop."""
    return {
        each.id: list(_generate(model, tuple(each.prompt), each.max_new_tokens, dtype)) for each in requests
    }


@cache
def _generate(model: str, prompt: tuple[int, ...], count: int, dtype: torch.dtype) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference_model(model, dtype).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return tuple(out[0, len(prompt) :].tolist())


def sampled(model: str, requests: list[api.Request]) -> dict[int, list[int]]:
    """What each request alone gets from transformers' logits and the engine's sampler."""
    return {
        each.id: list(
            _sample(
                model,
                tuple(each.prompt),
                each.max_new_tokens,
                each.temperature,
                each.seed,
                each.top_k,
                each.top_p,
            )
        )
        for each in requests
    }


@cache
def _sample(
    model: str,
    prompt: tuple[int, ...],
    count: int,
    temperature: float,
    seed: int,
    top_k: int,
    top_p: float,
) -> tuple[int, ...]:
    tokens = list(prompt)
    out = torch.zeros(1, dtype=torch.int64)
    for _ in range(count):
        with torch.inference_mode():
            logits = reference_model(model)(torch.tensor([tokens])).logits[:, -1]
        sample(
            logits,
            out,
            temperatures=torch.tensor([temperature]),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([len(tokens)]),
            top_ks=torch.tensor([top_k]),
            top_ps=torch.tensor([top_p]),
        )
        tokens.append(int(out))
    return tuple(tokens[len(prompt) :])


def near_ties(
    model: str,
    requests: list[api.Request],
    tokens: dict[int, list[int]],
    dtype: torch.dtype = torch.float32,
) -> int:
    """How many requests part from generate() at a near-tie, by teacher-forcing the reference. Any other
    difference is an AssertionError that says where."""
    count = 0
    for request, expected in zip(requests, generated(model, requests, dtype).values(), strict=True):
        got = tokens[request.id]
        if got == expected:
            continue
        assert not isinstance(request.prompt, str)
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        assert at is not None, f"request {request.id}: {len(got)} tokens, not {len(expected)}"
        with torch.inference_mode():
            ids = torch.tensor([request.prompt + expected[:at]])
            logits = reference_model(model, dtype)(ids).logits[0, -1]
        gap = (logits[expected[at]] - logits[got[at]]).item()
        assert gap < NEAR_TIE[str(dtype).removeprefix("torch.")], (
            f"request {request.id}, token {at}: {got[at]}, not {expected[at]}, gap {gap:.2g}"
        )
        count += 1
    return count
