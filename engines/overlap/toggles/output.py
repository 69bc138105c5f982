"""output: where and when output is processed (detokenize, build, serialize, send; see output.py).

Before (`inline`): on the step, as soon as its tokens are on the host. Under serial scheduling the device
stands still meanwhile. `deferred`: on the same thread, but only after the next step is launched, in its
shadow. `process`: in another process; the step only hands its tokens over.

Claim: vLLM RFC 6913 proposed the process (Llama3-70B on 4 H100, expected TPOT reductions of 0.6 / 2.1 / 20%
at batch 1 / 32 / 1024, from a table that contradicts itself); 7049 landed the deferral (+11% throughput for
8B on one H100). A reader of the RFC saw ~15% of the step on small models on CPU.

What can go wrong: what is processed late is sent late, so TTFT pays what TPOT gains; a process costs a
message per step and needs a core of its own.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from engines.api import EngineError, Toggle

if TYPE_CHECKING:
    from engines.overlap.output import OutputProcessor, Produced

TOGGLE = Toggle(
    name="output",
    choices=("inline", "deferred", "process"),
    changes="whether output is processed on the step, in the shadow of the next step, or in another process",
    source="vLLM 6913, 7049",
    requires={"deferred": {"schedule": ("serial",)}},  # overlap processes in the next step's shadow anyway
    counters=("output_on_step_ns", "output_messages"),
)


PIPE_BYTES = 1 << 20  # what the step may be ahead of the output process; then it waits


class Output(Protocol):
    @property
    def pid(self) -> int | None:
        """The output process, where there is one."""

    def hand_over(self, produced: list[Produced]) -> None:
        """The tokens of a step that was just appended."""

    def catch_up(self) -> None:
        """The next step is launched, or nothing is left to launch."""

    def stop(self) -> None: ...


class Inline:
    """Before."""

    pid: int | None = None

    def __init__(self, processor: OutputProcessor, counters: dict[str, int]) -> None:
        self.processor, self.counters = processor, counters

    def hand_over(self, produced: list[Produced]) -> None:
        began = perf_counter_ns()
        self.processor.process(produced)
        self.counters["output_on_step_ns"] += perf_counter_ns() - began

    def catch_up(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Deferred:
    """After, as it landed: one step late. What it takes is hidden behind the device, so none of it counts as
    output on the step."""

    pid: int | None = None

    def __init__(self, processor: OutputProcessor) -> None:
        self.processor = processor
        self._held: list[Produced] = []

    def hand_over(self, produced: list[Produced]) -> None:
        self._held = produced

    def catch_up(self) -> None:
        held, self._held = self._held, []
        self.processor.process(held)

    def stop(self) -> None:
        pass


class InProcess:
    """After, as it was proposed."""

    def __init__(
        self, events: str, model: str, vocabulary: int, interval: int, counters: dict[str, int]
    ) -> None:
        import msgspec

        from engines.overlap.output_process import LENGTH, OutputConfig

        self.counters = counters
        config = OutputConfig(events=events, model=model, vocabulary=vocabulary, stream_interval=interval)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engines.overlap.output_process", msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid: int | None = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        if self._process.stdout.readline() != b"ready\n":
            raise EngineError("the output process did not start")
        fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._write = self._process.stdin.write
        self._length = LENGTH.pack
        self._encode = msgspec.msgpack.Encoder().encode

    def hand_over(self, produced: list[Produced]) -> None:
        """One write to a pipe, and no thread of a messaging library to wake: a step pays for either."""
        began = perf_counter_ns()
        body = self._encode(produced)
        self._write(self._length(len(body)) + body)
        self.counters["output_on_step_ns"] += perf_counter_ns() - began
        self.counters["output_messages"] += 1

    def catch_up(self) -> None:
        pass

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
    make_processor: Callable[[], OutputProcessor],
    events: str,
    model: str,
    vocabulary: int,
    interval: int,
    counters: dict[str, int],
) -> Output:
    if choice == "process":
        return InProcess(events, model, vocabulary, interval, counters)
    if choice == "deferred":
        return Deferred(make_processor())
    return Inline(make_processor(), counters)
