"""ipc: how a step's tokens are packed for SGLang's detokenizer, which is another process.

Before (`pickle`, as released), SGLang pickles the message, an object with some forty lists, each as long
as the batch. After (`msgpack`), msgspec writes it as MessagePack; what it has no type for, such as time
stamps of requests, is pickled within it.

Claim: SGLang 28688 made it a flag and 29435 wanted it for all (closed); 29465 says what is still pickled.
None has a number. Both sides are SGLang's own, by SGLANG_USE_PICKLE_IPC.

What can go wrong: what is pickled within is pickled apart, so a message may take longer, not shorter.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import Change


def shown(scheduler: Any, result: Any) -> str:
    from sglang.srt.managers import io_struct

    return "pickle" if io_struct._USE_PICKLE_IPC else "msgpack"


CHANGE = Change(
    toggle=Toggle(
        name="ipc",
        module=__name__,
        choices=("pickle", "msgpack"),
        changes="whether messages to the detokenizer, and requests from the tokenizer, are pickled, or "
        "written as MessagePack",
        source="SGLang 28688, 29435, 29465 (SGLANG_USE_PICKLE_IPC)",
        optional=True,
        phases=("output",),
    ),
    variables={
        "pickle": {"SGLANG_USE_PICKLE_IPC": "1"},
        "msgpack": {"SGLANG_USE_PICKLE_IPC": "0"},
    },
    shown=shown,
)
