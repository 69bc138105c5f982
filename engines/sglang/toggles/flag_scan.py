"""flag_scan: how a step finds out what its requests want back besides tokens.

Before (`installed`), SGLang goes through the batch four times: for hidden states, for experts, for an
indexer's choice, for sampling masks. After (`one-pass`), as our rewriting of what SGLang 36369 describes:
once for all four.

Claim: SGLang 36369 (closed), 2.1% of the scheduler's thread at 1,500 requests; 36226 lists the same, and
its author had no GPU. 36369 has two cuts more: field_names is one; the other (1.4%) lies amid a function
that we leave alone, and `--after patch=36369.diff` has all three.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import INSTALLED, Change

STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"


def wanted(requests: list[Any], skipped: Any) -> dict[str, bool]:
    """The after: what any of them wants back."""
    hidden = experts = indexer = mask = False
    for each in requests:
        if each is skipped:
            continue
        hidden = hidden or each.return_hidden_states
        experts = experts or each.return_routed_experts
        indexer = indexer or each.return_indexer_topk
        mask = mask or each.return_sampling_mask
    return {
        "return_hidden_states": hidden,
        "return_routed_experts": experts,
        "return_indexer_topk": indexer,
        "return_sampling_mask": mask,
    }


def put_one_pass() -> None:
    from sglang.srt.managers.scheduler_components import output_streamer as own
    from sglang.srt.runtime_context import get_parallel, get_serving

    installed = own.SchedulerOutputStreamer._stream_output_generation

    def one_pass(
        streamer: Any,
        reqs: list[Any],
        return_logprob: bool,
        skip_req: Any = None,
        is_idle_batch: bool = False,
    ) -> None:
        if streamer.has_additional_customized_info or streamer.rust_server is not None:
            installed(streamer, reqs, return_logprob, skip_req, is_idle_batch)
            return
        serving = get_serving()
        message = own._GenerationStreamAccumulator(
            **wanted(reqs, skip_req),
            return_logprob=return_logprob,
            spec_algorithm=streamer.spec_algorithm,
            disaggregation_mode=streamer.disaggregation_mode,
            default_stream_interval=serving.stream_interval,
            default_force_stream_interval=own.DEFAULT_FORCE_STREAM_INTERVAL,
            get_cached_tokens_details=streamer.get_cached_tokens_details,
            is_request_level_customized_info_key=streamer.is_request_level_customized_info_key,
            current_weight_version=serving.weight_version,
            rust_server_mode=False,
        )
        for each in reqs:
            # Under overlap one that has ended comes a second time.
            if each is not skip_req and not (each.finished() and each.finished_output):
                message.accept(req=each)
                streamer._maybe_log_time_stats(req=each)
        payload = message.to_payload(dp_rank=get_parallel().dp_rank, is_idle_batch=is_idle_batch)
        if payload is not None:
            streamer.send_to_detokenizer.send_output(payload)

    own.SchedulerOutputStreamer._stream_output_generation = one_pass


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
