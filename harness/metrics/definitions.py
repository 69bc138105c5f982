"""Every metric there is, and how it is made: ROWS, in the order of the tables. To add one, add a row;
whatever computes, judges, prints or explains metrics reads them here.

A row takes what was recorded of one boot (boot.Boot), or, where it is made of several arms, their steps in
rounds (steps.Steps) or in turns (slices.Turns). Arrays are their business: a command line reads this file
without numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from overlap_bench.engines.api import PHASES

if TYPE_CHECKING:
    import pandas as pd

# Classes of the files beside this one, which read ROWS, and so can't be named here.
Boot = Any  # boot.py
Requests = Any  # requests.py
Steps = Any  # steps.py
Turns = Any  # slices.py

NS_PER_MS = 1e6
NS_PER_US = 1e3
NS_PER_S = 1e9
TOLD = "told."  # prefix of columns of `rounds` that each hold a metric ready-made
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Metric:
    """`better`: "lower", "higher", or "" where neither is. What can be zero is compared by difference. What
    is `shown` is printed where nobody asked for it. One of the last three makes it."""

    name: str
    unit: str
    better: str = "lower"
    can_be_zero: bool = False
    shown: bool = False
    of_boot: Callable[[Boot], float] | None = None
    of_rounds: Callable[[Steps], float] | None = None
    of_turns: Callable[[Turns], float] | None = None

    @property
    def is_time(self) -> bool:
        return self.unit in ("ms", "us", "s")


def _statistic(name: str, which: str, boot: Boot) -> float:
    found: float = boot.summaries[name][which]
    return found


@dataclass(frozen=True, slots=True)
class Times:
    """A time with a distribution, in ms: one metric for each of STATISTICS. `samples` are ms, NaN where one
    end did not happen: one of each request, from what to what `what` says, or several where it is ""."""

    name: str
    what: str
    samples: Callable[[Requests], pd.Series]
    can_be_zero: bool = False
    shown: tuple[str, ...] = ()  # of STATISTICS

    def metrics(self) -> Iterator[Metric]:
        for each in STATISTICS:
            yield Metric(
                f"{self.name}_{each}",
                "ms",
                can_be_zero=self.can_be_zero,
                shown=each in self.shown,
                of_boot=partial(_statistic, self.name, each),
            )


def between(start: str, end: str) -> Callable[[Requests], pd.Series]:
    """From one stamp of a request to another."""
    return lambda requests: requests.between(start, end)


def tpot(requests: Requests) -> pd.Series:
    """The time of a token behind the first, where there are more and not all came in one chunk; both ends at
    the client. vLLM: (latency - TTFT) / (n - 1), where its latency ends with the last chunk that holds a
    token. roseinfer's, from the engine's stamps, is the mean of the request's own itl_token."""
    more = requests.frame["completion_tokens"] - 1
    each = requests.between("first_chunk", "last_chunk", more.where(more > 0))
    return each.where(each > 0)


def goodput(boot: Boot) -> float:
    """Requests per second that stayed within every objective, over the same time as throughput.

    `vllm bench serve --goodput`: TTFT, TPOT and latency, each at most its number of ms. NaN is no more than
    that: a request of one token has no TPOT and meets any. Requests that failed are not good. NaN without
    objectives.
    """
    good = boot.times["ttft_ms"].notna()
    for name, most_ms in boot.objectives.items():
        good &= ~(boot.times[f"{name}_ms"] > most_ms)
    return int(good.sum()) / boot.seconds if boot.objectives else nan


# Of several arms in turns; the change between two arms is that of their pairs.
SLICED = "decode_step_ms"
SLICED_SAME_DEVICE, SLICED_SAME_HOST = "decode_step_ms_same_device", "decode_step_ms_same_host"
IN_TURNS = (SLICED, SLICED_SAME_DEVICE, SLICED_SAME_HOST)
SLICED_MEAN = "decode_step_ms_untrimmed"
OF_PAIRS = (*IN_TURNS, SLICED_MEAN)  # what can decide in turns
DRAINED = "decode_step_ms_drained"
# No metrics: the share of pairs beside which nothing else used the cores, and how many pairs there are.
UNDISTURBED, PAIRS = "turns_undisturbed", "turn_pairs"
# Of several arms at one batch mix.
SAME_DEVICE, SAME_HOST = "round_step_ms_same_device", "round_step_ms_same_host"
MATCHED = ("round_step_ms", SAME_DEVICE, SAME_HOST)
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


def in_rounds(phase: str) -> Metric:
    name = phase_metric(phase)
    return Metric(name, "us", can_be_zero=True, of_boot=lambda boot: boot.phases.get(name, nan))


def in_turns(phase: str) -> Metric:
    return Metric(phase_in_turns(phase), "us", of_turns=lambda turns: turns.phase_us(phase))


ROWS: tuple[Metric | Times, ...] = (
    # The first arm's step, and the trimmed mean (of logarithms) of the ratios of the arm's pairs with it.
    Metric(SLICED, "ms", shown=True, of_turns=lambda turns: turns.step * turns.ratio),
    # The first arm's step, and what the arm's own exposed host time (interval - device) adds to it.
    Metric(SLICED_SAME_DEVICE, "ms", shown=True, of_turns=lambda turns: turns.step * (1 + turns.host)),
    # The rest of the change: as shares of the first arm's step, both add up to it.
    Metric(
        SLICED_SAME_HOST,
        "ms",
        shown=True,
        of_turns=lambda turns: turns.step * (turns.ratio - turns.host),
    ),
    # Plain means in place of trimmed ones: a rare long step is in it.
    Metric(SLICED_MEAN, "ms", shown=True, of_turns=lambda turns: turns.mean),
    # A step more in a turn, to its very end.
    Metric(DRAINED, "ms", of_turns=lambda turns: turns.drained),
    Times("ttft_ms", "first chunk - sent", between("sent", "first_chunk"), shown=("p50",)),  # vLLM
    # With what a late client would hide (coordinated omission).
    Times("ttft_scheduled_ms", "first chunk - scheduled", between("scheduled", "first_chunk")),
    Times(
        "tpot_ms",
        "(last chunk - first chunk) / (completion tokens - 1), of more than one token",
        tpot,
        shown=("p50", "p99"),
    ),
    # Gaps between the tokens of a request in the engine: roseinfer.
    Times("itl_token_ms", "", lambda requests: requests.gaps("token_ns"), shown=("p50", "p99")),
    # Gaps between its chunks, whatever they hold: vLLM.
    Times("itl_chunk_ms", "", lambda requests: requests.gaps("chunk_ns"), shown=("p50", "p99")),
    Times("latency_ms", "finished - sent", between("sent", "finished"), shown=("p50",)),  # roseinfer
    # Served, per second of the rounds, each from its first due time to its last end: vLLM's, over the wall
    # duration of the benchmark. roseinfer divides by last finish - first submit, which differs by the lag of
    # the first request. In open loop below capacity this is the offered load.
    Metric(
        "throughput_tok_s",
        "tok/s",
        "higher",
        shown=True,
        of_boot=lambda boot: boot.total("completion_tokens") / boot.seconds,
    ),
    Metric(
        "throughput_total_tok_s",
        "tok/s",
        "higher",
        of_boot=lambda boot: (boot.total("completion_tokens") + boot.total("prompt_tokens")) / boot.seconds,
    ),
    Metric(
        "throughput_req_s",
        "req/s",
        "higher",
        of_boot=lambda boot: (len(boot.served) or nan) / boot.seconds,
    ),
    Metric("goodput_req_s", "req/s", "higher", shown=True, of_boot=goodput),
    # Most requests in flight at the client at one time, from send to end; failed ones are in flight too.
    Metric("peak_concurrency", "requests", "", of_boot=lambda boot: boot.in_flight.max()),
    # In flight, mean over the same time as throughput: SGLang's "Concurrency", of requests that were served.
    Metric(
        "mean_concurrency",
        "requests",
        "",
        of_boot=lambda boot: (
            boot.times["latency_ms"].mean(skipna=False) / 1e3 * len(boot.served) / boot.seconds
        ),
    ),
    Metric(
        "failed_requests",
        "requests",
        can_be_zero=True,
        of_boot=lambda boot: float(len(boot.requests) - len(boot.served)),
    ),
    Times(  # roseinfer
        "submit_lag_ms",
        "max(0, sent - scheduled)",
        lambda requests: requests.between("scheduled", "sent").clip(lower=0),
        can_be_zero=True,
        shown=("p99",),
    ),
    # From the arrival of a chunk's last byte (the kernel's stamp) to its reading.
    Times("client_lag_ms", "", lambda requests: requests.lags, can_be_zero=True, shown=("p99",)),
    Times("add_request_ms", "submitted - sent", between("sent", "submitted"), can_be_zero=True),  # roseinfer
    Times("tokenize_ms", "tokenized - accepted", between("accepted", "tokenized"), can_be_zero=True),
    Times(  # roseinfer's "post-tok"
        "queue_wait_ms",
        "admitted - tokenized",
        between("tokenized", "admitted"),
        can_be_zero=True,
        shown=("p50",),
    ),
    # The two parts of queue_wait: the way from the tokenizer to the scheduler, be it another thread's,
    # another process's or that of a loop with a step in front of it; and the wait in its queue, as vLLM's
    # request_queue_time_seconds has it.
    Times("to_queue_ms", "queued - tokenized", between("tokenized", "queued"), can_be_zero=True),
    Times("in_queue_ms", "admitted - queued", between("queued", "admitted"), can_be_zero=True),
    Times("prefill_first_ms", "first token in the engine - admitted", between("admitted", "first_token")),
    # Device time and exposed host time of a decode step, both at the first arm's batch mix (steps_matched).
    Metric(MATCHED[0], "ms", shown=True, of_rounds=lambda steps: steps.device + steps.host),
    Metric(SAME_DEVICE, "ms", shown=True, of_rounds=lambda steps: steps.device_of_first + steps.host),
    Metric(SAME_HOST, "ms", shown=True, of_rounds=lambda steps: steps.device + steps.host_of_first),
    Metric("step_ms", "ms", of_boot=lambda boot: boot.intervals["interval_ns"].median() / NS_PER_MS),
    Metric("exposed_host_us", "us", can_be_zero=True, of_boot=lambda boot: boot.exposed_host_us),
    Metric("device_busy", "share", "higher", of_boot=lambda boot: boot.busy),
    *map(in_rounds, PHASES),
    *map(in_turns, PHASES),
)
TIMES = {row.name: row for row in ROWS if isinstance(row, Times)}
METRICS = {each.name: each for row in ROWS for each in (row.metrics() if isinstance(row, Times) else (row,))}
# Metrics whose value depends on the other arms of the run.
BETWEEN_ARMS = tuple(name for name, each in METRICS.items() if each.of_boot is None)
