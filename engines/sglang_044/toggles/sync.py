"""sync: what SGLang's scheduler waits for before it processes step N-1, while step N is being launched.

Before (`launch-and-copy`, as released): `resolve_batch_result` waits for the copy of N-1's ids, then for
`launch_done`, which by then is the event of step N. After (`copy-done`, pull request 4790): for the copy
alone. `copy-then-launch` (10601) has both waits, and processes N-1 in between.

What can go wrong: the scheduler processes N-1 while the forward thread still launches N, and both want the
interpreter. Where planning waits for N-1 (attention=flashinfer), the device stands still meanwhile.

Each choice is SGLang's own method, and what differs of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace
from typing import Any

from overlap_bench.engines.api import Toggle

TOGGLE = Toggle(
    name="sync",
    module=__name__,
    choices=("launch-and-copy", "copy-then-launch", "copy-done"),
    changes="the waits around processing step N-1: copy_done(N-1) and launch_done(N) before it; "
    "copy_done(N-1) before and launch_done(N) after it; or copy_done(N-1) alone",
    source="SGLang 4790, 10601",
    requires={"*": {"schedule": ("overlap",)}},
)

Resolve = Callable[[Any, int], Any]  # TpModelWorkerClient.resolve_batch_result, of a client and a batch's id
LAUNCHED = Event()
LAUNCHED.set()


def launch_and_copy(released: Resolve, client: Any, bid: int) -> Any:
    """Wait as released: the before."""
    return released(client, bid)


def copy_alone(released: Resolve, client: Any, bid: int) -> Any:
    """Wait by the same method, to which everything is launched already: the after."""
    return released(SimpleNamespace(output_queue=client.output_queue, launch_done=LAUNCHED), bid)


def wait_for_launch(client: Any) -> None:
    """Wait for the step that is being launched, once the one before it is processed."""
    client.launch_done.wait()


@dataclass(frozen=True)
class Sync:
    """`resolve` gives the ids of a step, after its waits; `processed` comes once it is processed."""

    resolve: Callable[[Resolve, Any, int], Any]
    processed: Callable[[Any], None] | None = None


POLICIES = {
    "launch-and-copy": Sync(launch_and_copy),
    "copy-then-launch": Sync(copy_alone, wait_for_launch),
    "copy-done": Sync(copy_alone),
}
