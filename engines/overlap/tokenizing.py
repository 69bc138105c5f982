"""Tokenizing off the scheduler's thread: texts go to worker threads, token ids come back to the loop.

A long text no longer holds up a step, but a step now holds up the text: what is finished while one runs is
picked up after it. Where texts are short, that costs more than it saves: the stamps show both.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter_ns

from tokenizers import Tokenizer

from overlap_bench.engines.api import HostRanges, Request
from overlap_bench.engines.delay import spin
from overlap_bench.engines.tracing import RangeLog


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A request whose text was looked at: its ids, or why there are none."""

    request: Request
    prompt: list[int]
    error: str
    accepted_ns: int
    tokenized_ns: int


def tokenize(encode: Callable[[str], list[int]], request: Request, accepted_ns: int) -> Tokenized:
    """A request whose client did so already keeps its ids."""
    prompt, error = list[int](), ""
    try:
        prompt = encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    except Exception as problem:  # the library raises nothing narrower
        error = f"the prompt can't be tokenized: {problem}"
    return Tokenized(request, prompt, error, accepted_ns, perf_counter_ns())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, the GIL released meanwhile. `Tokenizer.encode` would hold it, and stall the
    scheduler for as long as the text takes; a batch of one releases it."""
    ids: list[int] = tokenizer.encode_batch([text])[0].ids
    return ids


class Tokenizing:
    """`workers` threads. `submit` and `feeding` are called on the scheduler's thread.

    A loop that waits for messages is woken by `wake_fd`, an eventfd: what is finished never waits for the
    next request. It is written and the result put into the queue under one lock, so that neither is ever seen
    without the other: else a wake-up would be lost, or the descriptor stay readable for nothing.
    """

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(workers, "tokenize")
        self._finished: deque[Tokenized] = deque()
        self._lock = Lock()
        self._stopped = False
        self.in_turns = False  # all requests come before the first turn, which begins once they have ids
        self._texts: list[Future[None]] = []  # that came since
        self._ranges = RangeLog("tokenizer", ("tokenize",))
        self._delay_ns = 0
        self._delayed: list[Future[int]] = []

    def submit(self, request: Request, accepted_ns: int) -> None:
        """Queue a text for the workers; does not block."""
        work = self._pool.submit(self._work, request, accepted_ns)
        if self.in_turns:
            self._texts.append(work)

    def feeding(
        self, pump: Callable[[float | None], bool], take: Callable[[Tokenized], None]
    ) -> Callable[[float | None], bool]:
        """A pump that also hands everything that is finished to `take`."""

        def pump_and_take(timeout: float | None) -> bool:
            go_on = pump(timeout)
            # Else the engine may seem to have nothing left to do, or tokenizes during the other one's turn.
            while self._texts:
                self._texts.pop().result()
            if self._delay_ns:
                self._delayed.append(self._pool.submit(self._spend, self._delay_ns))
            if self._finished:
                with self._lock:
                    finished, self._finished = self._finished, deque()
                    os.eventfd_read(self.wake_fd)
                for each in finished:
                    take(each)
            return go_on

        return pump_and_take

    def _work(self, request: Request, accepted_ns: int) -> None:
        began = self._ranges.begin(0, request.id)
        tokenized = tokenize(partial(encode, self._tokenizer), request, accepted_ns)
        self._ranges.end(0, request.id, began)
        with self._lock:
            if not self._stopped:
                self._finished.append(tokenized)
                os.eventfd_write(self.wake_fd, 1)

    def begin_round(self) -> None:
        """From now on note what the workers do."""
        self._ranges.keep()

    def take_ranges(self) -> HostRanges:
        """What the workers did since then."""
        return self._ranges.take("tokenizer", "scheduler")

    def delay(self, ns: int) -> int:
        """From now on each step brings the workers a text that takes so long, as more Python would: they hold
        the interpreter. What that took since the last call, ns, once all of it is done."""
        self._delay_ns = ns
        delayed, self._delayed = self._delayed, []
        return sum(each.result() for each in delayed)

    def _spend(self, ns: int) -> int:
        began = self._ranges.begin(0, 0)
        took = spin(ns)
        self._ranges.end(0, 0, began)
        return took

    def stop(self) -> None:
        """Does not wait for the workers: the text that one is at may be long."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
            os.close(self.wake_fd)
