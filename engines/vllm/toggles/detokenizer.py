"""detokenizer: what makes text of a request's tokens, one by one.

Before (`slow`), vLLM's detokenizer in Python, which it still has for tokenizers that are no "fast" ones: it
decodes the last few tokens twice and compares. After (`fast`), the tokenizers library's DecodeStream.

Claim: vLLM 15137, noticeable at higher rates by its author's benchmark (6,000 requests to llama-1b). Both
sides are vLLM's own; this decides which one it takes, and sees which one a request got: a tokenizer that is
no "fast" one has the slow one either way.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change

KINDS = {"SlowIncrementalDetokenizer": "slow", "FastIncrementalDetokenizer": "fast"}
_made: set[str] = set()  # kinds of this process's requests


def never(tokenizer: object) -> bool:
    """The before: takes no tokenizer for a fast one."""
    return False


def put_slow() -> None:
    from vllm.v1.engine import detokenizer

    detokenizer.uses_fast_detokenizer = never
    put_fast()


def put_fast() -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    make = IncrementalDetokenizer.from_new_request

    def seen(*given: Any, **named: Any) -> Any:
        made = make(*given, **named)
        kind = type(made).__name__
        _made.add(KINDS.get(kind, kind))
        return made

    IncrementalDetokenizer.from_new_request = staticmethod(seen)


def shown(scheduler: None) -> str:
    return " and ".join(sorted(_made)) or "none"


CHANGE = Change(
    toggle=Toggle(
        name="detokenizer",
        module=__name__,
        choices=("slow", "fast"),
        changes="whether tokens become text in Python, or in the tokenizers library",
        source="vLLM 15137",
        optional=True,
    ),
    needs=(
        ("vllm.v1.engine.detokenizer", "uses_fast_detokenizer", ("tokenizer",)),
        ("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", ("from_new_request",)),
        ("vllm.v1.engine.detokenizer", "SlowIncrementalDetokenizer", ()),
        ("vllm.v1.engine.detokenizer", "FastIncrementalDetokenizer", ()),
    ),
    put={"slow": put_slow, "fast": put_fast},
    shown=shown,
    in_core=False,
)
