"""generate() in static batches: what is there when one begins runs together until its last request ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from overlap_bench.engines.requests import Taken
from overlap_bench.engines.transformers.base import USED, TransformersEngine

# A batch begins when it is full, or this long after its first request came: those of a burst arrive within a
# few milliseconds, and without it the first of them would run alone and let all the others wait.
GATHER_NS = 5_000_000


class EveryStep(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """generate() asks after each step which rows end there: the one place where the tokens of several rows
    can be had as they come, and rows can end separately. They are copied to the host here, which generate()
    would wait for next anyway."""

    def __init__(self, ended: Callable[[list[int]], list[bool]]) -> None:
        self._ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor(self._ended(input_ids[:, -1].tolist()), device=input_ids.device)


class StaticEngine(TransformersEngine):
    """A batch has at most max_batch_size requests, at most prefill_max_batch_size too as it is prefilled
    whole, and at most prefill_max_tokens prompt tokens, padding included."""

    used = (*USED, "prefill_max_batch_size")

    def prepare(self) -> None:
        self._most_rows = min(self.options.max_batch_size, self.options.prefill_max_batch_size)
        self._positions: int = self.model.config.get_text_config().max_position_embeddings
        self._waiting: deque[Taken] = deque()
        self._running: dict[int, Taken] = {}  # by request id
        self._go_on = True

    def queue(self, active: Taken) -> None:
        self._waiting.append(active)

    def give_up(self, request: int) -> Taken | None:
        """A row of the batch stays in it, and its tokens are not looked at any more."""
        found = self._running.pop(request, None)
        if found is None:
            found = next((each for each in self._waiting if each.request.id == request), None)
            if found is not None:
                self._waiting.remove(found)
        return found

    def begin_round(self) -> None:
        super().begin_round()
        self.counters.update(batches=0, steps=0, idle_rows=0)

    def run(self, pump: Callable[[float | None], bool]) -> None:
        self._pump = pump
        while self._go_on:
            self._go_on = pump(0 if self._waiting else None)
            self._gather()
            batch = self._form_batch()
            if batch and self._go_on:
                self._generate(batch)

    def _gather(self) -> None:
        while self._go_on and 0 < len(self._waiting) < self._most_rows:
            left = self._waiting[0].accepted_ns + GATHER_NS - perf_counter_ns()
            if left <= 0:
                return
            self._go_on = self._pump(left / 1e9)

    def _form_batch(self) -> list[Taken]:
        """The next ones that fit together. A row that ended is still computed, so the longest prompt plus the
        most new tokens must fit into the model's positions."""
        batch: list[Taken] = []
        longest = most = 0
        while self._waiting and len(batch) < self._most_rows:
            active = self._waiting[0]
            longest = max(longest, len(active.prompt))
            most = max(most, active.request.max_new_tokens)
            tokens = longest * (len(batch) + 1)
            if batch and (tokens > self.options.prefill_max_tokens or longest + most > self._positions):
                break
            batch.append(self._waiting.popleft())
        return batch

    def _generate(self, batch: Sequence[Taken]) -> None:
        longest = max(len(active.prompt) for active in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, active in enumerate(batch):  # padded on the left: generate() goes on at the right end
            ids[row, longest - len(active.prompt) :] = torch.tensor(active.prompt)
            mask[row, longest - len(active.prompt) :] = 1
        admitted = perf_counter_ns()
        for active in batch:
            self._running[active.request.id] = active
            self.admit(active, admitted)
        self.counters["batches"] += 1
        with torch.inference_mode():
            self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=max(active.request.max_new_tokens for active in batch),
                stopping_criteria=StoppingCriteriaList([EveryStep(partial(self._step, batch))]),
            )

    def _step(self, batch: Sequence[Taken], tokens: Sequence[int]) -> list[bool]:
        """Send each row's token; returns which rows have ended: all of them if told to stop."""
        now = perf_counter_ns()
        produced = []
        for active, token in zip(batch, tokens, strict=True):
            if self._runs(active):
                produced.append(self.produce(active, token, now))
                if produced[-1].finish is not None:
                    del self._running[active.request.id]
            else:
                self.counters["idle_rows"] += 1
        self.counters["steps"] += 1
        self.output.process(produced)
        self._go_on = self._pump(0)
        return [not (self._go_on and self._runs(active)) for active in batch]

    def _runs(self, active: Taken) -> bool:
        return self._running.get(active.request.id) is active
