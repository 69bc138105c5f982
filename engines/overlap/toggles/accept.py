"""accept: whether the next step waits until the host knows how many drafts were kept.

Before (`host`): a request whose step is under way is not scheduled again: where its next tokens go depends on
how many of the last ones stand. The device stands still meanwhile. After (`device`): it is scheduled as if
all of them did, so that there are blocks for the best case; the device knows the true count, and works out
positions and places from it.

Claims: SGLang 9588, vLLM 29957 and 32951 (+5 to 10%).

What can go wrong: the count comes back with the ids, so reading it before copy_done gives another step's
(vLLM 36013). The host knows a request's length only afterwards: its last steps may be for nothing, and are
counted as dropped rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.api import Toggle

if TYPE_CHECKING:
    from engines.overlap.request import Active

TOGGLE = Toggle(
    name="accept",
    choices=("host", "device"),
    changes="under speculation, whether a request waits until the host knows how many drafts were kept, or "
    "goes on with what the device knows",
    source="SGLang 9588, vLLM 29957, 32951, 36013",
    requires={"*": {"spec": ("ngram",), "schedule": ("overlap",)}},
    counters=("draft_tokens", "accepted_drafts", "dropped_rows"),
)


def known_to_the_host(request: Active) -> bool:
    """Before."""
    return not request.in_flight


def known_to_the_device(request: Active) -> bool:
    """After. A step under way gives one token at least, so one that needs no more is left alone."""
    return request.known + request.in_flight < request.limit


GOES_ON: dict[str, Callable[[Active], bool]] = {"host": known_to_the_host, "device": known_to_the_device}
