"""async_scheduling: whether a step is scheduled while the device works on the one before it.

Before (`off`), the core schedules step N+1 once it has N's tokens. After (`on`), `AsyncScheduler` counts on
tokens that are not there yet, and two steps are in flight: the host's part of a step hides behind the device.

Claim: vLLM 19970 and 23569, 5 to 10% over what it gave before results came through a thread; the default
since 28012. vLLM's own flag, in force where its configuration says so (../base.py).
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle

TOGGLE = Toggle(
    name="async_scheduling",
    module=__name__,
    choices=("off", "on"),
    changes="whether the next step is scheduled while the device works on the one before it",
    source="vLLM --async-scheduling; pull requests 19970, 23569, 28012",
)
