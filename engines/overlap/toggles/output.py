"""output: where and when output is processed (detokenize, stop strings, serialize, send; see output.py).

Before (`inline`): on the step, as soon as its tokens are on the host. Under serial scheduling the device
stands still meanwhile. `deferred`: on the same thread, but only after the next step is launched, in its
shadow. `process`: in another process; the step only hands its tokens over.

Claim: vLLM RFC 6913 proposed the process (Llama3-70B on 4 H100, expected TPOT reductions of 0.6 / 2.1 / 20%
at batch 1 / 32 / 1024, from a table that contradicts itself); 7049 landed the deferral (+11% throughput for
8B on one H100). A reader of the RFC saw ~15% of the step on small models on CPU.

What can go wrong: what is processed late is sent late, so TTFT pays what TPOT gains; a process costs a
message per step and needs a core of its own. A stop string that is found late costs extra steps: one
where output is deferred, more where the process has to report it. Their tokens are dropped, and counted.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import msgspec

from overlap_bench.engines.api import EngineError, Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.api import HostRanges
    from overlap_bench.engines.output import Opening, OutputProcessor, Produced, Stopped
    from overlap_bench.engines.overlap.output_process import FromOutput, ToOutput

    MakeProcessor = Callable[[Callable[[list[Stopped]], None]], OutputProcessor]

TOGGLE = Toggle(
    name="output",
    module=__name__,
    choices=("inline", "deferred", "process"),
    changes="whether output is processed on the step, in the shadow of the next step, or in another process",
    source="vLLM 6913, 7049",
    requires={"deferred": {"schedule": ("serial",)}},  # overlap processes in the next step's shadow anyway
    counters=("output_on_step_ns", "output_messages", "stop_dropped_tokens"),
)


OUTPUT_PROCESS = "overlap_bench.engines.overlap.output_process"
PIPE_BYTES = 1 << 20  # how far the engine may run ahead of the output process before its writes block


class Output:
    """All but `open`, `hand_over` and `close` is nothing, unless a choice has something to do."""

    deferred = False  # whether what is handed over is processed only in catch_up
    pid: int | None = None  # the output process, where there is one

    def open(self, opening: Opening) -> None:
        """A request with stop strings is about to get its first token."""

    def hand_over(self, step: int, produced: list[Produced]) -> None:
        """The tokens of a step that was just appended."""

    def catch_up(self) -> None:
        """The next step is launched, or nothing is left to launch."""

    def stopped(self) -> Sequence[Stopped]:
        """What stop strings have ended since the last call; does not block."""
        raise NotImplementedError

    def flush(self) -> None:
        """Return once all that was handed over is sent."""

    def close(self, request: int) -> None:
        """A request was ended at a stop string; nothing more is handed over for it."""

    def keep_ranges(self) -> None:
        """From now on note what another process does, if there is one."""

    def take_ranges(self) -> list[HostRanges]:
        """What another process did since then, if there is one."""
        return []

    def delay(self, ns: int) -> int:
        """Another process, if there is one, computes for so much longer at each step from now on. What that
        took since the last call, ns."""
        return 0

    def stop(self) -> None:
        """Nothing more is handed over."""


class Inline(Output):
    """Before."""

    def __init__(self, make_processor: MakeProcessor, counters: dict[str, int]) -> None:
        self._stopped: list[Stopped] = []
        self.processor = make_processor(self._stopped.extend)
        self.counters = counters

    def open(self, opening: Opening) -> None:
        self.processor.open(opening)

    def hand_over(self, step: int, produced: list[Produced]) -> None:
        began = perf_counter_ns()
        self.processor.process(produced)
        self.counters["output_on_step_ns"] += perf_counter_ns() - began

    def stopped(self) -> Sequence[Stopped]:
        return _taken(self._stopped)

    def close(self, request: int) -> None:
        self.processor.close(request)


class Deferred(Inline):
    """After, as it landed: one step late. What it takes is hidden behind the device, so none of it counts as
    output on the step."""

    deferred = True

    def __init__(self, make_processor: MakeProcessor, counters: dict[str, int]) -> None:
        super().__init__(make_processor, counters)
        self._held: list[Produced] = []

    def hand_over(self, step: int, produced: list[Produced]) -> None:
        self._held = produced

    def catch_up(self) -> None:
        held, self._held = self._held, []
        self.processor.process(held)

    def flush(self) -> None:
        self.catch_up()


def _taken(stopped: list[Stopped]) -> Sequence[Stopped]:
    if not stopped:
        return ()
    taken = stopped.copy()
    stopped.clear()
    return taken


class InProcess(Output):
    """After, as it was proposed."""

    def __init__(
        self, events: str, model: str, vocabulary: int, interval: int, counters: dict[str, int]
    ) -> None:
        from overlap_bench.engines.overlap import output_process as other

        self.counters = counters
        config = other.OutputConfig(
            events=events, model=model, vocabulary=vocabulary, stream_interval=interval
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", OUTPUT_PROCESS, msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        if self._process.stdout.readline() != b"ready\n":
            raise EngineError(f"the output process (pid {self.pid}) did not start")
        fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._write = self._process.stdin.write
        self._told = self._process.stdout.fileno()
        self._other = other
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(other.FromOutput).decode
        self._stopped: list[Stopped] = []
        self._listening = False  # until a request has stop strings, there is nothing to hear
        self._delay_ns = 0
        self._unread = b""

    def open(self, opening: Opening) -> None:
        self._listening = True
        self._send(self._other.ToOutput(opened=[opening]))

    def hand_over(self, step: int, produced: list[Produced]) -> None:
        """One write to a pipe, and no messaging library, whose thread the step would pay for waking."""
        began = perf_counter_ns()
        self._send(self._other.ToOutput(step=step, produced=produced))
        self.counters["output_on_step_ns"] += perf_counter_ns() - began
        self.counters["output_messages"] += 1

    def flush(self) -> None:
        self._ask(self._other.ToOutput(flush=True))

    def stopped(self) -> Sequence[Stopped]:
        """One read of a pipe that is most often empty."""
        if not self._listening:
            return ()
        self._hear()
        return _taken(self._stopped)

    def close(self, request: int) -> None:
        self._send(self._other.ToOutput(closed=[request]))

    def keep_ranges(self) -> None:
        self._send(self._other.ToOutput(ranges=self._other.KEEP))

    def take_ranges(self) -> list[HostRanges]:
        ranges = self._ask(self._other.ToOutput(ranges=self._other.TELL)).ranges
        return [] if ranges is None else [ranges]

    def delay(self, ns: int) -> int:
        if not ns and not self._delay_ns:
            return 0
        self._delay_ns = ns
        return self._ask(self._other.ToOutput(delay_ns=ns)).delayed_ns

    def _ask(self, handed: ToOutput) -> FromOutput:
        """The answer to it."""
        self._send(handed)
        while True:
            select.select([self._told], [], [])
            if answers := self._hear():
                return answers[0]

    def _hear(self) -> list[FromOutput]:
        """Read what the process has reported, and return what answers; does not block."""
        try:
            data = os.read(self._told, PIPE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EngineError("the output process died")
        self._unread += data
        answers: list[FromOutput] = []
        length = self._other.LENGTH
        while len(self._unread) >= length.size:
            end = length.size + length.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            told = self._decode(self._unread[length.size : end])
            self._unread = self._unread[end:]
            if told.stopped:
                self._stopped += told.stopped
            else:
                answers.append(told)
        return answers

    def _send(self, handed: ToOutput) -> None:
        body = self._encode(handed)
        self._write(self._other.LENGTH.pack(len(body)) + body)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of the stream is the end of the process
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def choose(
    choice: str,
    make_processor: MakeProcessor,
    events: str,
    model: str,
    vocabulary: int,
    interval: int,
    counters: dict[str, int],
) -> Output:
    if choice == "process":
        return InProcess(events, model, vocabulary, interval, counters)
    return {"inline": Inline, "deferred": Deferred}[choice](make_processor, counters)
