"""schedule: whether a step is scheduled and launched before the tokens of the one before it are on the host.

The before and the after are two loops, next to each other in engines/overlap/loop.py.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle

TOGGLE = Toggle(
    name="schedule",
    module=__name__,
    choices=("serial", "overlap"),
    changes="whether step N+1 is scheduled and launched before step N's tokens are on the host",
    source="SGLang's zero-overhead scheduler",
    counters=("dropped_rows",),
)
