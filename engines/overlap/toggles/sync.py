"""sync: what the scheduler's thread waits for before it processes step N-1, while step N is being launched.

Before (`launch-and-copy`): for the copy of N-1's ids, and for the forward thread to have launched N. After
(`copy-done`): for the copy alone. Within one step copy_done implies launch_done, but the launch that is
waited for here is the next step's, so dropping that wait is a change of policy: N-1 is processed while N is
still being launched, and two threads share one interpreter lock. `copy-then-launch` keeps both waits and
processes in between.

Claims: SGLang pull request 4790 drops the wait, "total token throughput +1%" on an A800, closed unmerged.
5788 made launch_done a member of the batch and claims no gain. 10601 swaps the order (P99 TTFT 3413 -> 2188
ms on an H20), closed unmerged.

What can go wrong: the scheduler runs ahead of the launch, so nothing that the forward thread still reads may
be rewritten: the batch it gets is immutable, and pinned memory is behind its guard (h2d).

With `launch=inline` the scheduler's thread launches, so there is no launch_done to wait for: the loop runs
`copy_done_only`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.loop import Loop
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="sync",
    module=__name__,
    choices=("launch-and-copy", "copy-then-launch", "copy-done"),
    changes="the waits around processing step N-1: launch_done(N) and copy_done(N-1) before it; "
    "copy_done(N-1) before and launch_done(N) after it; or copy_done(N-1) alone",
    source="SGLang 4790, 5788, 10601",
    requires={"*": {"schedule": ("overlap",), "launch": ("thread",)}},
    counters=("wait_launch_done_ns", "wait_copy_done_ns"),
)

# In the names of the choices "launch" is the wait for launch_done(N); each ends by processing N-1.


def launch_and_copy(loop: Loop, previous: Step, current: Step | None) -> None:
    """Before."""
    ids = loop.wait_copy_done(previous)
    if current is not None:
        loop.wait_launch_done(current)
    loop.process(previous, ids)


def copy_then_launch(loop: Loop, previous: Step, current: Step | None) -> None:
    """Both waits, the processing between them."""
    ids = loop.wait_copy_done(previous)
    loop.process(previous, ids)
    if current is not None:
        loop.wait_launch_done(current)


def copy_done_only(loop: Loop, previous: Step, current: Step | None) -> None:
    """After."""
    ids = loop.wait_copy_done(previous)
    loop.process(previous, ids)


POLICIES: dict[str, Callable[[Loop, Step, Step | None], None]] = {
    "launch-and-copy": launch_and_copy,
    "copy-then-launch": copy_then_launch,
    "copy-done": copy_done_only,
}
