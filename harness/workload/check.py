"""What can't be asked: every option of a workload, and how they go together."""

from __future__ import annotations

import math

from overlap_bench.engines.api import BadSetting, pick
from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload import prompts as source
from overlap_bench.harness.workload.arrivals import ARRIVALS, SCHEDULES, TIMING_OPTIONS, parse_ramp, using
from overlap_bench.harness.workload.lengths import stream
from overlap_bench.harness.workload.plan import different
from overlap_bench.harness.workload.workload import DEFAULT, Workload

AT_LEAST_1 = ("num_requests", "concurrency", "prompt_repeats")
MOST_REQUESTS = 1_000_000
DAY_MS = 24 * 3600e3
ABOVE_0 = ("interval_ms", "rate", "burstiness", "trace_scale")
# What a trace says itself, or has not got.
NOT_WITH_TRACE = ("prompts", "prompt_repeats", "unique_prompts", "input_tokens", "max_new_tokens")


def check(workload: Workload) -> None:
    """Raises BadSetting, one line, where this is no workload."""
    for name in AT_LEAST_1:
        count = getattr(workload, name)
        if count is not None and not 1 <= count <= MOST_REQUESTS:
            bound = "at least 1" if count < 1 else f"at most {MOST_REQUESTS:,}"
            raise BadSetting(f"{name} must be {bound}, not {count}")
    for name in ABOVE_0:
        value = getattr(workload, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BadSetting(f"{name} must be above 0, not {value:g}")
    for name in ("input_tokens", "max_new_tokens"):
        value = getattr(workload, name)
        if value is not None and lengths.parse(value, name).most >= 1 << 31:
            raise BadSetting(f"{name} must fit into 32 bits, not be {value}")
    _check_timing(workload)
    _check_length(workload)
    _check_sampling(workload)
    if "" in workload.stop:
        raise BadSetting("a stop string is empty: it would end every request at once")
    for name, texts in (("prompt", [workload.prompt or ""]), ("stop", workload.stop)):
        if not all(map(_is_text, texts)):
            raise BadSetting(f"{name} is not UTF-8 text")
    if workload.arrival == "trace":
        _check_trace(workload)
    else:
        _check_prompts(workload)


def _check_sampling(workload: Workload) -> None:
    if not (math.isfinite(workload.temperature) and workload.temperature >= 0):
        raise BadSetting(f"temperature must be 0 (greedy) or above, not {workload.temperature:g}")
    if workload.top_k < 0:
        raise BadSetting(f"top_k must be 0 (all) or above, not {workload.top_k}")
    if workload.top_k >= 1 << 31:
        raise BadSetting(f"top_k must fit into 32 bits, not be {workload.top_k}; 0 samples from all")
    if not 0 < workload.top_p <= 1:
        raise BadSetting(f"top_p must be above 0 and at most 1 (all), not {workload.top_p:g}")
    if workload.temperature == 0 and (workload.top_k, workload.top_p) != (0, 1):
        raise BadSetting("top_k and top_p apply only with a temperature above 0")


def _check_timing(workload: Workload) -> None:
    """An option that the arrival does not look at would silently change nothing, so it is refused."""
    pick(workload.arrival_schedule, {schedule: schedule for schedule in SCHEDULES}, "arrival_schedule")
    arrival = pick(workload.arrival, ARRIVALS, "arrival")
    for name in TIMING_OPTIONS:
        if name not in arrival.options and getattr(workload, name) != getattr(DEFAULT, name):
            raise BadSetting(f"{name} applies only with arrival={using(name)}, not {workload.arrival}")
    for name in arrival.needs:
        if getattr(workload, name) is None:
            raise BadSetting(f"arrival={workload.arrival} needs a {name} (--{name})")
    if workload.ramp_up is not None:
        _, requests = parse_ramp(workload.ramp_up)
        if requests is not None and requests > workload.num_requests:
            raise BadSetting(
                f"ramp_up={workload.ramp_up} is longer than num_requests={workload.num_requests}"
            )


def _check_length(workload: Workload) -> None:
    """Refuses a round whose last request is not due within a day: a slip of the unit, most likely. A ramp
    starts slower than its rate, so it is bounded by that."""
    slowest = workload.rate
    if slowest is not None and workload.ramp_up is not None:
        slowest = min(slowest, parse_ramp(workload.ramp_up)[0])
    timed = "interval_ms" in ARRIVALS[workload.arrival].options
    gap_ms = 1e3 / slowest if slowest is not None else workload.interval_ms if timed else 0.0
    if gap_ms * workload.num_requests > DAY_MS:
        every = f"one every {gap_ms / 1e3:g} s"
        raise BadSetting(f"{workload.num_requests} requests, {every}, are not all due within a day")


def _check_prompts(workload: Workload) -> None:
    if workload.prompts is not None and workload.prompt not in (None, DEFAULT.prompt):
        raise BadSetting("prompt and prompts exclude each other: give one of them")
    if workload.prompt_repeats is not None and workload.prompt_repeats > workload.num_requests:
        raise BadSetting(
            f"prompt_repeats={workload.prompt_repeats} is more than num_requests={workload.num_requests}"
        )
    if workload.max_new_tokens is None and not (
        source.are_conversations(workload.prompts) and workload.input_tokens is None
    ):
        raise BadSetting("max_new_tokens is needed: only a trace, or whole conversations, go without")
    different(workload, len(source.texts(workload.prompt, workload.prompts, stream(0, "prompts"))))


def _check_trace(workload: Workload) -> None:
    from overlap_bench.harness.workload import traces

    assert workload.trace is not None
    for name in NOT_WITH_TRACE:
        if getattr(workload, name) not in (None, False):
            raise BadSetting(f"{name} does not apply to a trace, which says how long each request is")
    if workload.prompt not in (None, DEFAULT.prompt):
        raise BadSetting("prompt does not apply to a trace, whose prompts are random tokens")
    if not workload.pretok:
        raise BadSetting("a trace has no text, only numbers of tokens: it needs pretok")
    entries = traces.read(workload.trace, workload.num_requests).entries
    if entries[-1].at_ms - entries[0].at_ms > DAY_MS and workload.rate is None:
        raise BadSetting(f"the {len(entries)} requests of the trace are not all due within a day")
    if workload.rate is not None and entries[0].at_ms == entries[-1].at_ms:
        raise BadSetting(f"rate does not apply here: all {len(entries)} of the trace come at once")


def _is_text(text: str) -> bool:
    """A command line may hold any bytes; Python passes on as surrogates what is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
