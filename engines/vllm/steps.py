"""What vLLM's scheduler says of each step: `schedule` makes it, `update_from_output` appends its tokens.
Nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from overlap_bench.engines import api, steps
from overlap_bench.engines.steps import DECODE, MIXED, PREFILL
from overlap_bench.engines.tracing import Ranges, open_ranges


def finish_begun(core: Any, step: Callable[[], object], states: Any) -> None:
    """Have vLLM's `core` finish the steps that are in flight, where it schedules ahead. While it is paused it
    schedules none, and `step` waits for what there is. `states`: vLLM's PauseState."""
    if not core.batch_queue:
        return
    core.scheduler.set_pause_state(states.PAUSED_ALL)
    try:
        while core.batch_queue:
            step()
    finally:
        core.scheduler.set_pause_state(states.UNPAUSED)


def nvtx_ranges() -> Ranges | None:
    """NVTX ranges of a step's phases; None without a tool that listens, or without nvtx, which vLLM does not
    bring."""
    return open_ranges("engine", api.PHASES) if find_spec("nvtx") is not None else None


def kind_of(output: Any) -> int:
    """The kind of the step that a SchedulerOutput is. A request that comes back after a preemption is
    computed anew, as a prompt is, and may be in several parts."""
    cached, drafts = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
    tokens = output.num_scheduled_tokens
    # Nearly all steps have a token of each, and its drafts: then there is no part to look for.
    parts = output.total_num_scheduled_tokens > len(tokens) + sum(map(len, drafts.values()))
    prefills = len(output.scheduled_new_reqs) + sum(
        not given
        or name in cached.resumed_req_ids
        or (parts and tokens[name] > 1 + len(drafts.get(name, ())))
        for name, given in zip(cached.req_ids, cached.num_output_tokens, strict=True)
    )
    if not prefills:
        return DECODE
    return PREFILL if prefills == len(tokens) else MIXED


class Steps(steps.Steps):
    """The steps of a round of vLLM's."""

    def made(self, output: Any, began_ns: int, ended_ns: int) -> None:
        """A step was scheduled: `output` is vLLM's SchedulerOutput."""
        batch = len(output.num_scheduled_tokens)
        if not batch:  # nothing to run: what has finished is told to the workers
            self._made.append({})
            return
        self.add(kind_of(output), batch, output.total_num_scheduled_tokens, began_ns, ended_ns)

    def verified(self, drafts: Mapping[str, Sequence[int]], output: Any) -> None:
        """A step had these drafts, by request, and gave each a token and those that are right: `output` is
        vLLM's ModelRunnerOutput. A prompt's part gives none."""
        given = (output.sampled_token_ids[output.req_id_to_index[name]] for name in drafts)
        self.counters["draft_tokens"] += sum(map(len, drafts.values()))
        self.counters["accepted_drafts"] += sum(max(0, len(tokens) - 1) for tokens in given)
