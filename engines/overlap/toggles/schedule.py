"""schedule: whether a step is scheduled and launched before the tokens of the one before it are on the host.

Before (`serial`): a step is scheduled, launched, waited for and processed, then the next one. After
(`overlap`): step N+1 is scheduled and launched before step N's tokens are on the host; the device finds them
in its future map. What N brings is processed while N+1 runs.

Claim: SGLang's zero-overhead scheduler.

What can go wrong: step N+1 is scheduled without knowing N's tokens. A length finish is predicted and costs
nothing; an EOS is seen one step late, and costs one dropped row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.loop import Loop, Pump

TOGGLE = Toggle(
    name="schedule",
    module=__name__,
    choices=("serial", "overlap"),
    changes="whether step N+1 is scheduled and launched before step N's tokens are on the host",
    source="SGLang's zero-overhead scheduler",
    counters=("dropped_rows",),
)
OVERLAPPING = ("overlap",)  # choices that launch a step before the one before it is processed


def serial(loop: Loop, pump: Pump) -> None:
    """Before: schedule N, launch N, wait for N, process N."""
    while loop.receive(pump, wait=loop.idle):
        step = loop.schedule()
        if step is None:
            continue
        loop.launch.submit(step)
        loop.catch_up(step)
        loop.process(step, loop.wait_copy_done(step))
        if loop.scheduler.idle:  # no launch follows that could hide the last output
            loop.catch_up(step)


def overlap(loop: Loop, pump: Pump) -> None:
    """After: schedule N+1, launch N+1, wait for N, process N. Of two prefills in a row,
    prefill=consecutive-sync processes N before it launches N+1."""
    while loop.receive(pump, wait=loop.idle):
        current = loop.schedule()
        if current is None and loop.in_flight is not None:  # accept=host, or blocks ran out
            loop.settle()  # what it gave must be known first; in the same pass, for a turn counts passes
            current = loop.schedule()
        previous = loop.before_launch(loop, loop.in_flight, current)
        if current is not None:
            loop.launch.submit(current)
        if previous is not None:  # prefill=consecutive-sync may have processed it already
            loop.wait_and_process(loop, previous, current)
        loop.in_flight = current


LOOPS = {"serial": serial, "overlap": overlap}
