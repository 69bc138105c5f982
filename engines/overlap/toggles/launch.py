"""launch: which thread launches a step.

Before (`thread`): a forward thread, joined to the scheduler's thread by two queues. After (`inline`): the
scheduler's own thread, which is free again as soon as the commands are issued.

Claim: SGLang 1687 introduced the thread with overlap scheduling; 11210 removed it again, leaving one thread,
streams and copy_done.

What can go wrong: two threads share one interpreter lock, so a scheduler that computes keeps the forward
thread from launching for up to a switch interval (5 ms by default).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.overlap.toggles import gil
from overlap_bench.engines.tracing import name_thread

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.forward import Forward
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="launch",
    module=__name__,
    choices=("thread", "inline"),
    changes="whether a forward thread launches a step, or the scheduler's own thread does",
    source="SGLang 1687, 11210",
    requires={"thread": {"schedule": ("overlap",)}},
    counters=("wait_launch_done_ns",),
)


class Launch:
    """All but `submit` is nothing, unless a choice has something to do."""

    def submit(self, step: Step) -> None:
        """Launch a step, now or soon."""

    def wait_until_issued(self, step: Step) -> None:
        """Block until the step is launched and the copy of its ids is issued behind it, so that copy_done can
        be waited for; launch_done comes before that copy. To be called once per step, in the order of
        submit. Raises what launching it raised."""

    def check(self) -> None:
        """Raise what ended the launching thread, if anything did."""

    def stop(self) -> None: ...


class Inline(Launch):
    """After."""

    def __init__(self, forward: Forward, counters: dict[str, int]) -> None:
        self.forward = forward

    def submit(self, step: Step) -> None:
        self.forward.run(step)


class ForwardThread(Launch):
    """Before."""

    def __init__(self, forward: Forward, counters: dict[str, int]) -> None:
        self.forward, self.counters = forward, counters
        self._input: queue.Queue[Step | None] = queue.Queue()
        self._output: queue.Queue[Step | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="forward", daemon=True)
        self._thread.start()

    def submit(self, step: Step) -> None:
        step.handed_over_ns = perf_counter_ns()
        self._input.put(step)

    def wait_until_issued(self, step: Step) -> None:
        done = self._output.get()
        self.check()
        assert done is step  # steps come back in the order in which they went in

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._input.put(None)
        self._thread.join()

    def _loop(self) -> None:
        try:
            name_thread("forward")
            self.forward.device.adopt_thread()
        except BaseException as failure:  # raised again at the first step, which someone waits for
            self._failure = failure
        while (step := self._input.get()) is not None:
            try:
                self.check()
                self.forward.run(step)
            except BaseException as failure:  # raised again where this step is waited for
                self._failure = failure
                step.launch_done.set()
                self._output.put(None)
                return
            gil.count_launch_lag(self.counters, step)
            self._output.put(step)


CHOICES: dict[str, Callable[[Forward, dict[str, int]], Launch]] = {
    "thread": ForwardThread,
    "inline": Inline,
}
