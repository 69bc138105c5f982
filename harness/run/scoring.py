"""Asks a booted engine outside of any measurement, for answers or for scores of given tokens; untimed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run.session import Booted, Session

AHEAD = 4  # times a full batch: requests in flight, so that the engine's batches are full


def to_score(arm: Arm) -> Arm:
    """The arm as it is booted to score given tokens, behind prompts as long as the context."""
    options = msgspec.structs.replace(
        arm.options,
        scoring=True,
        sampling=False,
        prefill_max_tokens=max(arm.options.prefill_max_tokens, arm.options.max_context),
    )
    return msgspec.structs.replace(arm, options=options)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    finish: api.Finish


class Client:
    """Requests to one engine. `say` gets a line now and then."""

    def __init__(self, session: Session, booted: Booted, say: Callable[[str], object]) -> None:
        self.description = booted.description
        self._session, self._booted, self._say = session, booted, say
        self._most = AHEAD * booted.arm.options.max_batch_size
        self._next_id = 0

    def ask(self, requests: Sequence[api.Request]) -> list[Answer]:
        """The answer to each, in their order; ids are given here. Raises EngineError for a request that the
        engine refuses, and what Session.events raises."""
        first, self._next_id = self._next_id, self._next_id + len(requests)
        waiting = deque(
            msgspec.structs.replace(request, id=first + place) for place, request in enumerate(requests)
        )
        chunks: dict[int, list[api.Chunk]] = {}
        answers: dict[int, Answer] = {}
        in_flight = 0
        while len(answers) < len(requests):
            while waiting and in_flight < self._most:
                self._session.submit(self._booted, waiting.popleft())
                in_flight += 1
            for event in self._session.events():
                match event:
                    case api.Chunk():
                        chunks.setdefault(event.id, []).append(event)
                    case api.Finish():
                        answers[event.id] = _joined(chunks.pop(event.id, []), event)
                        in_flight -= 1
                        self._progress(len(answers), len(requests))
                    case api.Error():
                        raise api.EngineError(f"{self._booted.arm.name} refused a request: {event.message}")
        return [answers[first + place] for place in range(len(requests))]

    def _progress(self, done: int, of: int) -> None:
        if done == of or done % max(1, of // 10) == 0:
            self._say(f"{self._booted.arm.name}: {done} of {of} answered")


def _joined(chunks: Sequence[api.Chunk], finish: api.Finish) -> Answer:
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish=finish,
    )
