"""flag_scan: how a step finds out what its requests want back besides tokens.

Before (`installed`), SGLang goes through the batch four times: for hidden states, for experts, for an
indexer's choice, for sampling masks. After (`one-pass`), as our rewriting of what SGLang 36369 describes:
once for all four. The function is SGLang's own on both sides; what it goes through is ours.

Claim: SGLang 36369 (closed), 2.1% of the scheduler's thread at 1,500 requests; 36226 lists the same, and
its author had no GPU. 36369 has two cuts more: field_names is one; the other (1.4%) lies amid a function
that we leave alone, and `--after patch=36369.diff` has all three.

What can go wrong: SGLang's function still asks four times, now of one object, which takes about a
microsecond a step that the pull request would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import INSTALLED, Change

STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
FLAGS = ("return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask")


class OnePass:
    """The after: stands in for the list of requests, which is the before. Whoever goes through it meets one
    request that wants what any of them wants, as often as there are flags; then the requests."""

    def __init__(self, requests: Sequence[Any], skipped: Any) -> None:
        self._requests = requests
        self._wanted = (wanted(requests, skipped),)
        self._asked = 0

    def __iter__(self) -> Iterator[Any]:
        self._asked += 1
        return iter(self._wanted if self._asked <= len(FLAGS) else self._requests)


def wanted(requests: Sequence[Any], skipped: Any) -> SimpleNamespace:
    hidden = experts = indexer = mask = False
    for each in requests:
        if each is not skipped:
            hidden = hidden or each.return_hidden_states
            experts = experts or each.return_routed_experts
            indexer = indexer or each.return_indexer_topk
            mask = mask or each.return_sampling_mask
    return SimpleNamespace(**dict(zip(FLAGS, (hidden, experts, indexer, mask), strict=True)))


def put_one_pass() -> None:
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    installed = SchedulerOutputStreamer._stream_output_generation

    def one_pass(
        streamer: Any, reqs: Sequence[Any], return_logprob: bool, skip_req: Any = None, **more: Any
    ) -> None:
        installed(streamer, OnePass(reqs, skip_req), return_logprob, skip_req, **more)

    SchedulerOutputStreamer._stream_output_generation = one_pass


def shown(scheduler: Any, result: Any) -> str:
    streams = type(scheduler.output_streamer)._stream_output_generation
    return "one-pass" if streams.__module__ == __name__ else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="flag_scan",
        module=__name__,
        choices=(INSTALLED, "one-pass"),
        changes="whether a step goes through its requests four times for what they want back, or once",
        source="SGLang 36369, the first of its three cuts; 36226",
        rewritten="one-pass",
        optional=True,
        phases=("output",),
    ),
    put={"one-pass": put_one_pass},
    like={f"{STREAMER}:SchedulerOutputStreamer._stream_output_generation": "07cd63acf07765cd"},
    shown=shown,
)
