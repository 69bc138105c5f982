"""accept: whether the next step waits until the host knows how many drafts were kept.

Before (`host`): while a step is under way, none is scheduled behind it: where its requests' next tokens go
depends on how many of the last ones stand. The device stands still meanwhile. After (`device`): the next step
is scheduled as if all of them did, so that there are blocks for the best case; the device knows the true
count, and works out positions and places from it.

Claims: SGLang 9588, vLLM 29957 and 32951 (+5 to 10%).

What can go wrong: the count comes back with the ids, so reading it before copy_done gives another step's
(vLLM 36013); it rides behind the ids, so that their guard, d2h's wait_copy_done, holds for it too. The host
knows a request's length only afterwards (scheduler._correct): its last steps may be for nothing, and are
counted as dropped rows. A request goes on while it may have got as little as one token of each step
(scheduler._wanting).
"""

from __future__ import annotations

from collections.abc import Callable

from overlap_bench.engines.api import Toggle

TOGGLE = Toggle(
    name="accept",
    module=__name__,
    choices=("host", "device"),
    changes="under speculation, whether the next step waits until the host knows how many drafts were kept, "
    "or goes on with what the device knows",
    source="SGLang 9588, vLLM 29957, 32951, 36013",
    requires={"*": {"spec": ("ngram",), "schedule": ("overlap",)}},
    counters=("draft_tokens", "accepted_drafts", "dropped_rows"),
)


def wait_for_the_host(steps_in_flight: int) -> bool:
    """Before: only where none is."""
    return not steps_in_flight


def go_on(steps_in_flight: int) -> bool:
    """After: always."""
    return True


# Whether those that decode are scheduled while so many steps are under way that the host knows no count of.
POLICIES: dict[str, Callable[[int], bool]] = {"host": wait_for_the_host, "device": go_on}
