"""The overlap engine, as the host sees it."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC, TOGGLES
from overlap_bench.engines.overlap.assembly import assemble
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.device_plan import configure
from overlap_bench.engines.overlap.ranks import OtherRanks, count_ranks
from overlap_bench.engines.overlap.refusal import why_refused
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.rounds import Rounds
from overlap_bench.engines.overlap.toggles import gc, schedule
from overlap_bench.engines.overlap.tokenizing import Tokenized, Tokenizing, tokenize
from overlap_bench.engines.presets import tokenizer_file
from overlap_bench.engines.tracing import name_thread


class OverlapEngine(Rounds):
    """Serves requests on one device, with the given toggles (full settings, as EngineSpec.check gives them).

    The device may be handed in already open; it then outlives the engine.
    """

    def __init__(
        self, options: api.EngineOptions, toggles: dict[str, str], device: Device | None = None
    ) -> None:
        self.options = options
        self.toggles = SPEC.check(toggles)
        self.counters: Counter[str] = Counter()
        self._own_device = device is None
        self._opened = device
        self._started = False

    # -- up and down ---------------------------------------------------------------------------------------

    def start(self, events: api.EventSink) -> api.Description:
        options, config = self.options, configure(self.options, self.toggles)
        if options.scoring and options.sampling:
            raise api.BadSetting(
                "scoring and sampling exclude each other: a step is of one family of programs"
            )
        if options.scoring and config.gives > 1:
            raise api.BadSetting(
                "scoring goes with steps=1 and spec=off: a step is told one target for each request"
            )
        self._events = events
        ranks = count_ranks(self.toggles)
        if ranks > 1:
            theirs, cores = self._of_others()
            self._ranks = OtherRanks(theirs, self.toggles, ranks, cores, config.step_bytes, self.counters)
        try:
            return self._start(events, config, ranks)
        except api.EngineError as error:
            raise self._blamed(error) from error

    def _of_others(self) -> tuple[api.EngineOptions, str]:
        """The options of further ranks, and the cores of their devices."""
        if self._opened is None:
            return self.options, "split"
        # Handed in: theirs must be of its kind.
        kind = "cuda" if self._opened.kind == "cuda" else "emulated"
        return msgspec.structs.replace(self.options, device=kind), "shared"

    def _blamed(self, error: api.EngineError) -> api.EngineError:
        """What to say of an error: of several ranks, another one may be at fault."""
        return error if self._ranks is None else self._ranks.blame(error)

    def _start(self, events: api.EventSink, config: ModelConfig, ranks: int) -> api.Description:
        options = self.options
        self._opened = self._device = self._opened or open_device(
            options.device,
            staging=options.staging,
            pace=options.pace,
            chaos=options.chaos,
            blocking_sync=options.blocking_sync,
            place=(0, ranks),
        )
        self._loop, self._forward, facts, self.tokenizer = assemble(
            options, self.toggles, config, self._device, self._ranks, events, self.counters
        )
        self._started, self._vocabulary = True, facts["vocabulary"]
        if options.tokenize_workers:
            self._tokenizing = Tokenizing(self.tokenizer, options.tokenize_workers)
            self.wake_fd = self._tokenizing.wake_fd
        return self._describe(facts)

    def _describe(self, facts: dict[str, Any]) -> api.Description:
        options, device = self.options, self._device
        pids = {"engine": os.getpid(), "device": device.pid, "output": self._loop.output.pid}
        if self._ranks is not None:
            pids |= self._ranks.pids
        return api.Description(
            engine=SPEC.name,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            device={"kind": device.kind, "name": device.name} | device.details,
            model={
                "name": options.model,
                "dtype": options.dtype,
                "vocabulary": facts["vocabulary"],
                "parameters": facts["parameters"],
                "kv_bytes_per_token": facts["kv_bytes_per_token"],
                "largest_logit": facts["largest_logit"],
                "context": min(options.max_context, facts["context"]),
                "tokenizer": str(tokenizer_file(options.model)),
                **({"eos": facts["eos"][0]} if facts["eos"] else {}),
            },
            toggles=self.toggles,
            # On a card the batch decides which kernel sums up a logit, and in which order.
            deterministic=options.dtype == "float32" and device.kind != "cuda",
            pids={role: pid for role, pid in pids.items() if pid is not None},
        )

    def stop(self) -> None:
        if self._tokenizing is not None:
            self._tokenizing.stop()
            self._tokenizing = self.wake_fd = None
        if self._started:
            self._started = False
            self._loop.launch.stop()
            self._loop.d2h.stop()  # behind the last launch, and before the device that it waits for
            self._loop.output.stop()
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None
        if self._opened is not None and self._own_device:
            self._opened.close()
            self._opened = None

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, request: api.Request) -> None:
        """Tokenize where the client did not, refuse what can never run, queue the rest."""
        accepted = perf_counter_ns()
        self._loop.end_stopped()  # the client may know of an end before we do, and reuse its id
        if isinstance(request.prompt, str) and self._tokenizing is not None:
            self._tokenizing.submit(request, accepted)
        else:
            self._queue(tokenize(lambda text: self.tokenizer.encode(text).ids, request, accepted))

    def _queue(self, found: Tokenized) -> None:
        scheduler, options = self._loop.scheduler, self.options
        active = Active(found.request, found.prompt, found.accepted_ns, found.tokenized_ns)
        chunks = scheduler.config.chunk_tokens > 0
        reason = found.error or why_refused(active, options, self._vocabulary, scheduler.pool, chunks)
        if reason:
            self._events.send([api.Error(found.request.id, reason)])
        else:
            scheduler.add(active)

    def begin_turns(self) -> None:
        if self._tokenizing is not None:
            self._tokenizing.in_turns = True

    def end_turns(self) -> None:
        if self._tokenizing is not None:
            self._tokenizing.in_turns = False

    def run(self, pump: Callable[[float | None], bool]) -> None:
        name_thread("scheduler")
        if self._tokenizing is not None:
            pump = self._tokenizing.feeding(pump, self._queue)
        with ExitStack() as serving:
            for name, choice in self.toggles.items():
                if around := getattr(TOGGLES.get(name), "SERVING", None):
                    serving.enter_context(around[choice](self._loop))
            serving.enter_context(gc.counted(self.counters))
            try:
                schedule.LOOPS[self.toggles["schedule"]](self._loop, pump)
            except api.EngineError as error:
                raise self._blamed(error) from error


def build(options: api.EngineOptions, toggles: dict[str, str]) -> OverlapEngine:
    """What the host calls (api.EngineSpec.build)."""
    return OverlapEngine(options, toggles)
