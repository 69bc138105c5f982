"""sample: when a step's sampling is launched, under overlap.

Before (`at-once`, as released), right behind its forward pass. After (`delayed`), once the step before it
has been processed: while the host processes, the device computes, and sampling is launched behind it.

Claim: SGLang 32637, "allowing sampling overhead to overlap with model execution"; its numbers are
pictures, of that and of another change together. Both sides are SGLang's own, by
SGLANG_ENABLE_DELAY_SAMPLE.

What can go wrong: where the host takes longer than the forward pass, the device waits for its sampling.
Here sampling's kernels take no time of their own, so a clock shows what the host does, and not that.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import Change


def shown(scheduler: Any, result: Any) -> str:
    return "at-once" if result.delay_sample_func is None else "delayed"


CHANGE = Change(
    toggle=Toggle(
        name="sample",
        module=__name__,
        choices=("at-once", "delayed"),
        changes="whether a step's sampling is launched behind its forward pass, or once the step before is "
        "processed",
        source="SGLang 32637 (SGLANG_ENABLE_DELAY_SAMPLE)",
        requires={"*": {"schedule": ("overlap",)}},
        optional=True,
    ),
    variables={
        "at-once": {"SGLANG_ENABLE_DELAY_SAMPLE": "0"},
        "delayed": {"SGLANG_ENABLE_DELAY_SAMPLE": "1"},
    },
    shown=shown,
)
