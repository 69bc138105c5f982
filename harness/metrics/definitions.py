"""Every metric there is: its unit, which way is better, whether it can be zero."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_bench.engines.api import PHASES

NS_PER_MS = 1e6
NS_PER_US = 1e3
NS_PER_S = 1e9
TOLD = "told."  # prefix of columns of `rounds` that each hold a metric ready-made
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Metric:
    """`better`: "lower", "higher", or "" where neither is. What can be zero is compared by difference."""

    name: str
    unit: str
    better: str
    can_be_zero: bool

    @property
    def is_time(self) -> bool:
        return self.unit in ("ms", "us", "s")


# Times with a distribution, ms; each gets one metric per STATISTICS. True: can be zero.
DISTRIBUTIONS = {
    "submit_lag_ms": True,
    "client_lag_ms": True,
    "add_request_ms": True,
    "tokenize_ms": True,
    "queue_wait_ms": True,
    "prefill_first_ms": False,
    "ttft_ms": False,
    "ttft_scheduled_ms": False,
    "tpot_ms": False,
    "itl_chunk_ms": False,
    "itl_token_ms": False,
    "latency_ms": False,
}
# Of several arms at one batch mix; `steps_matched` says what each holds.
SAME_DEVICE, SAME_HOST = "round_step_ms_host", "round_step_ms_device"
MATCHED = ("round_step_ms", SAME_DEVICE, SAME_HOST)


# Of several arms in turns, and its parts as in MATCHED; `metrics.slices` says what each holds.
SLICED = "decode_step_ms"
SLICED_SAME_DEVICE, SLICED_SAME_HOST = "decode_step_ms_host", "decode_step_ms_device"
IN_TURNS = (SLICED, SLICED_SAME_DEVICE, SLICED_SAME_HOST)
SLICED_MEAN = "decode_step_ms_untrimmed"  # with every rare stall in it
OF_PAIRS = (*IN_TURNS, SLICED_MEAN)  # what can decide in turns
DRAINED = "decode_step_ms_drained"  # a step more in a turn, to its very end
UNDISTURBED = "turns_undisturbed"  # no metric: the share of pairs beside which nothing else used the cores
# What takes device times for the device's own, by the whole step that says it without them.
SPLIT = {
    SAME_DEVICE: MATCHED[0],
    SAME_HOST: MATCHED[0],
    SLICED_SAME_DEVICE: SLICED,
    SLICED_SAME_HOST: SLICED,
    "exposed_host_us": "step_ms",
    "device_busy": "step_ms",
}


def of_a_step(name: str) -> bool:
    """Whether a metric is the time of a step, which is read in microseconds too."""
    return "step_ms" in name


def phase_metric(phase: str) -> str:
    """The name of a phase's metric: "wait.copy_done" is phase_wait_copy_done_us."""
    return f"phase_{phase.replace('.', '_')}_us"


def phase_in_turns(phase: str) -> str:
    """The name of the same by turns: of several arms, its change is that of their pairs."""
    return f"decode_{phase_metric(phase)}"


PHASES_IN_ROUNDS = tuple(map(phase_metric, PHASES))
PHASES_IN_TURNS = tuple(map(phase_in_turns, PHASES))
# Metrics whose value depends on the other arms of the run.
BETWEEN_ARMS = (*MATCHED, *IN_TURNS, SLICED_MEAN, DRAINED, *PHASES_IN_TURNS)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(
            Metric(f"{name}_{statistic}", "ms", "lower", can_be_zero)
            for name, can_be_zero in DISTRIBUTIONS.items()
            for statistic in STATISTICS
        ),
        Metric("throughput_tok_s", "tok/s", "higher", False),
        Metric("throughput_total_tok_s", "tok/s", "higher", False),
        Metric("throughput_req_s", "req/s", "higher", False),
        Metric("goodput_req_s", "req/s", "higher", False),
        Metric("peak_concurrency", "requests", "", False),
        Metric("failed_requests", "requests", "lower", True),
        Metric("step_ms", "ms", "lower", False),
        *(Metric(name, "ms", "lower", False) for name in (*IN_TURNS, SLICED_MEAN, DRAINED)),
        *(Metric(name, "ms", "lower", False) for name in MATCHED),
        Metric("exposed_host_us", "us", "lower", True),
        Metric("device_busy", "", "higher", False),
        *(Metric(name, "us", "lower", True) for name in PHASES_IN_ROUNDS),
        *(Metric(name, "us", "lower", False) for name in PHASES_IN_TURNS),
    )
}
