"""The overlap engine, put together from its parts and its toggles."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.output import OutputProcessor
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.device_plan import DevicePlan
from overlap_bench.engines.overlap.forward import Forward
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.loop import Loop
from overlap_bench.engines.overlap.plant import Plant
from overlap_bench.engines.overlap.ranks import OtherRanks, count_ranks
from overlap_bench.engines.overlap.recorder import Tracer, make_recorder
from overlap_bench.engines.overlap.refusal import why_refused
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.scheduler import Scheduler
from overlap_bench.engines.overlap.toggles import (
    accept,
    chunk,
    d2h,
    gc,
    gil,
    h2d,
    launch,
    output,
    prefill,
    schedule,
    sync,
    tables,
)
from overlap_bench.engines.overlap.tokenizing import Tokenized, Tokenizing
from overlap_bench.engines.presets import load_tokenizer, tokenizer_file
from overlap_bench.engines.tracing import name_thread

WORK_ROW_BYTES = 4 * 8  # of Device.work


class OverlapEngine(api.Engine):
    """Serves requests on one device, with the given toggles (full settings, as EngineSpec.check gives them).

    The device may be handed in already open; it then outlives the engine.
    """

    def __init__(
        self, options: api.EngineOptions, toggles: dict[str, str], device: Device | None = None
    ) -> None:
        self.options = options
        self.toggles = SPEC.check(toggles)
        self._plan = DevicePlan(options, self.toggles)
        self.counters: Counter[str] = Counter()
        self._own_device = device is None
        self._opened = device
        self._started: Loop | None = None
        self._tokenizing: Tokenizing | None = None
        self._cancelled: set[int] = set()  # while their texts were being tokenized
        self._ranks: OtherRanks | None = None  # where the model spans several devices
        self._tracer: Tracer | None = None  # in a round that is profiled
        self._delayed = False  # in a round with delays

    @property
    def _loop(self) -> Loop:
        """What `start` put together."""
        assert self._started is not None
        return self._started

    @property
    def _device(self) -> Device:
        """What `start` opened, or was handed in."""
        assert self._opened is not None
        return self._opened

    def start(self, events: api.EventSink) -> api.Description:
        options, toggles, plan = self.options, self.toggles, self._plan
        if options.scoring and options.sampling:
            raise api.BadSetting(
                "scoring and sampling exclude each other: a step is of one family of programs"
            )
        if options.scoring and plan.gives > 1:
            raise api.BadSetting(
                "scoring goes with steps=1 and spec=off: a step is told one target for each request"
            )
        self._events = events
        ranks = count_ranks(toggles)
        if ranks > 1:
            self._start_ranks(ranks)
        try:
            return self._start(events, ranks)
        except api.EngineError as error:
            raise self._blamed(error) from error

    def _start_ranks(self, ranks: int) -> None:
        options, cores = self._of_others()
        self._ranks = OtherRanks(options, self.toggles, ranks, cores, self._plan.step_bytes, self.counters)

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

    def _start(self, events: api.EventSink, ranks: int) -> api.Description:
        options, toggles, plan = self.options, self.toggles, self._plan
        device = self._opened or open_device(
            options.device,
            staging=options.staging,
            pace=options.pace,
            chaos=options.chaos,
            blocking_sync=options.blocking_sync,
            place=(0, ranks),
        )
        self._opened = device

        limits = plan.limits
        place = (0, ranks, self._ranks.store) if self._ranks is not None else None
        facts = device.load(plan.module(place))
        self._vocabulary: int = facts["vocabulary"]
        self.tokenizer = load_tokenizer(options.model, self._vocabulary)
        if options.tokenize_workers:
            self._tokenizing = Tokenizing(self.tokenizer, options.tokenize_workers)
            self.wake_fd = self._tokenizing.wake_fd
        plan.prepare(device)
        if self._ranks is not None:
            self._ranks.wait_until_up()

        plant = Plant(options.plant_at, options.plant_ns, device, device.stream("forward"), self.counters)
        plant.prepare()
        recorder = make_recorder(options.recorder)
        device_to_host = d2h.choose(toggles["d2h"], device, device.buffer("sampled_ids"), self.counters)
        host_to_device = h2d.choose(
            toggles["h2d"],
            device,
            device.stream("forward"),
            plan.metadata(device),
            self.counters,
            self._check_launching,
        )
        forward = Forward(device, host_to_device, device_to_host, recorder, options.chaos, plant)
        self._forward = forward
        self._started = Loop(
            scheduler=Scheduler(
                BlockPool(plan.num_blocks, options.block_size),
                limits,
                tables.choose(
                    toggles["tables"], limits.max_batch_size + 1, limits.block_buckets[-1], self.counters
                ),
                options.prefix_cache,
                options.sampling,
                options.scoring,
                gives=plan.gives,
                counted=plan.drafts > 0,
                compose=chunk.COMPOSE[toggles["chunk"]],
                goes_on=accept.POLICIES[toggles.get("accept", "host")],
            ),
            h2d=host_to_device,
            d2h=device_to_host,
            launch=launch.choose(toggles["launch"], forward, self.counters),
            wait_and_process=sync.POLICIES[toggles.get("sync", "copy-done")],
            before_launch=prefill.POLICIES[toggles.get("prefill", "overlap")],
            output=output.choose(
                toggles["output"],
                lambda tell: OutputProcessor(self.tokenizer, options.stream_interval, events, tell),
                events.address,
                options.model,
                facts["vocabulary"],
                options.stream_interval,
                self.counters,
            ),
            recorder=recorder,
            counters=self.counters,
            eos=frozenset(facts["eos"]),
            plant=plant,
            ranks=self._ranks,
        )
        return self._describe(device, facts)

    def _check_launching(self) -> None:
        self._loop.launch.check()

    def _describe(self, device: Device, facts: dict[str, Any]) -> api.Description:
        pids = {"engine": os.getpid(), "device": device.pid, "output": self._loop.output.pid}
        if self._ranks is not None:
            pids |= self._ranks.pids
        return api.Description(
            engine=SPEC.name,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            device={"kind": device.kind, "name": device.name} | device.details,
            model={
                "name": self.options.model,
                "dtype": self.options.dtype,
                "vocabulary": facts["vocabulary"],
                "parameters": facts["parameters"],
                "kv_bytes_per_token": facts["kv_bytes_per_token"],
                "largest_logit": facts["largest_logit"],
                "context": min(self.options.max_context, facts["context"]),
                "tokenizer": str(tokenizer_file(self.options.model)),
                **({"eos": facts["eos"][0]} if facts["eos"] else {}),
            },
            toggles=self.toggles,
            # On a card the batch decides which kernel sums up a logit, and in which order.
            deterministic=self.options.dtype == "float32" and device.kind != "cuda",
            pids={role: pid for role, pid in pids.items() if pid is not None},
        )

    def submit(self, request: api.Request) -> None:
        """Tokenize where the client did not, refuse what can never run, queue the rest."""
        accepted = perf_counter_ns()
        self._loop.end_stopped()  # the client may know of an end before we do, and reuse its id
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._tokenizing is not None:
                self._tokenizing.submit(request, prompt, accepted)
                return
            try:
                prompt = self.tokenizer.encode(prompt).ids
            except Exception as error:  # the library raises nothing narrower
                self._events.send([api.Error(request.id, f"the prompt can't be tokenized: {error}")])
                return
        self._queue(Active(request, prompt, accepted, perf_counter_ns()))

    def _take(self, tokenized: Tokenized) -> None:
        """A request comes back from the tokenize workers."""
        if tokenized.error:
            self._events.send([api.Error(tokenized.request.id, tokenized.error)])
        else:
            self._queue(
                Active(tokenized.request, tokenized.prompt, tokenized.accepted_ns, tokenized.tokenized_ns)
            )
        if tokenized.request.id in self._cancelled:
            self._cancelled.remove(tokenized.request.id)
            self.cancel(tokenized.request.id)

    def _queue(self, active: Active) -> None:
        pool, chunks = self._loop.scheduler.pool, self._plan.chunk_tokens > 0
        reason = why_refused(active, self.options, self._vocabulary, pool, chunks)
        if reason is not None:
            self._events.send([api.Error(active.request.id, reason)])
        else:
            self._loop.scheduler.add(active)

    def cancel(self, request: int) -> None:
        """Its blocks are free at once, or when the step in flight that reads them is done."""
        if self._tokenizing is not None and request in self._tokenizing.requests:
            self._cancelled.add(request)
        else:
            self._loop.end(request, "cancelled")

    def run(self, pump: Callable[[float | None], bool]) -> None:
        name_thread("scheduler")
        if self._tokenizing is not None:
            pump = self._tokenizing.feeding(pump, self._take)
        toggles = self.toggles
        with (
            gil.SERVING[toggles.get("gil", "default")](),
            gc.SERVING[toggles["gc"]](),
            gc.counted(self.counters),
        ):
            try:
                schedule.LOOPS[toggles["schedule"]](self._loop, pump)
            except api.EngineError as error:
                raise self._blamed(error) from error

    def begin_round(self) -> None:
        self._forget()
        self._tracer, self._delayed = None, False
        if self._tokenizing is not None:
            self._tokenizing.begin_round()
        self._loop.recorder.begin_round(self._loop.next_step)

    def begin_profile(self, steps: int) -> None:
        self._forget()
        loop = self._loop
        self._tracer = loop.recorder if isinstance(loop.recorder, Tracer) else Tracer()
        loop.recorder = self._forward.recorder = self._tracer
        loop.output.keep_ranges()
        self._tracer.begin_profile(loop.next_step, steps)

    def _forget(self) -> None:
        """What the device and the counters hold of earlier rounds."""
        self._loop.settle()
        self._drain_devices()
        self._device.begin_round()
        if self._ranks is not None:
            self._ranks.begin_round()
        self.counters.clear()
        self.counters.update(dict.fromkeys(gc.TOGGLE.counters, 0))  # zero is a finding too

    def drain(self) -> None:
        self._loop.drain()
        self._drain_devices()

    def delay(self, phase: str, ns: int) -> int:
        loop, tokenizing = self._loop, self._tokenizing
        if not self._delayed:
            self._delayed = True
            loop.output.keep_ranges()
        spent = loop.recorder.delay.put(phase if phase in api.PHASES else "", ns)
        spent += loop.output.delay(ns if phase == "output-process" else 0)
        if tokenizing is not None:
            spent += tokenizing.delay(ns if phase == "tokenize" else 0)
        return spent

    def _drain_devices(self) -> None:
        self._device.drain()
        if self._ranks is not None:
            self._ranks.drain()

    def collect(self) -> api.RoundRecord:
        self._loop.settle()
        work = self._loop.plant.count_delays(self._device.work())
        memory = self._device.memory()
        return api.RoundRecord(
            steps=self._loop.recorder.table(),
            device_work=api.DeviceWork(len(work), work.tobytes()),
            other_ranks=[] if self._ranks is None else [_of_rank(rows) for rows in self._ranks.work()],
            counters=dict(self.counters) | {"steps_lost": self._loop.recorder.lost} | self._device.counters,
            memory={"device_peak": memory.device_peak, "pinned_peak": memory.pinned_peak},
            profile=self._profile(),
            beside=self._beside() if self._delayed else [],
        )

    def _beside(self) -> list[api.HostRanges]:
        """What other threads and processes did in a round with delays."""
        tokenizing = [] if self._tokenizing is None else [self._tokenizing.take_ranges()]
        output = [
            msgspec.structs.replace(each, names=["output-process"] * len(each.names))
            for each in self._loop.output.take_ranges()
        ]
        return [*output, *tokenizing]

    def _profile(self) -> api.Profile | None:
        """What was kept of a profiled round."""
        if self._tracer is None:
            return None
        return api.Profile(
            opened_ns=self._tracer.window.opened_ns,
            closed_ns=self._tracer.window.closed_ns,
            hosts=[self._tracer.end_profile(), *self._loop.output.take_ranges()],
            streams={"program": "forward", "h2d": "forward", "d2h": self._loop.d2h.stream.name},
        )

    def stop(self) -> None:
        if self._tokenizing is not None:
            self._tokenizing.stop()
            self._tokenizing = self.wake_fd = None
        if self._started is not None:
            self._started.launch.stop()
            self._started.d2h.stop()  # behind the last launch, and before the device that it waits for
            self._started.output.stop()
            self._started = None
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None
        if self._opened is not None and self._own_device:
            self._opened.close()
            self._opened = None


def _of_rank(rows: bytes) -> api.DeviceWork:
    return api.DeviceWork(len(rows) // WORK_ROW_BYTES, rows)


def build(options: api.EngineOptions, toggles: dict[str, str]) -> OverlapEngine:
    """What the host calls (api.EngineSpec.build)."""
    return OverlapEngine(options, toggles)
