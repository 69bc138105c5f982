"""Warnings about what was measured: the machine, the client, the requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pandas as pd

from overlap_bench.harness.analysis.warnings import Kind, Severity
from overlap_bench.harness.common import core_speed
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.requests import spans_ns
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.workload.arrivals import ARRIVALS

BlockSeries = Mapping[str, Mapping[str, Sequence[float]]]  # metric → arm → one value per block

STEAL = 0.01  # share of all CPU time that another virtual machine took
OTHERS = 0.05  # share of all CPU time used by processes that are not the run's
SUBMIT_LAG_MS = 1.0
LATE_READ = 0.5  # of the gap between two chunks
SQUEEZED, SOME = 0.5, 0.02  # of the time that a request's tokens took to make; of all requests
CLOCK_MOVED_US = 100
SKIPPED = {
    "short": "conversations under 4 tokens",
    "long": "conversations too long for vLLM's limits or the context",
    "failed": "requests that failed when the trace was recorded",
}
# What engines/openai/engine.py counts; each served request is counted by one of COUNTED.
COUNTED = "counter.requests_counted_by_"
AT_ONCE, BURSTS = "counter.replies_at_once", "counter.replies_in_bursts"
GATHERED, BURST = 0.5, 4  # share of all replies; chunks at once, on average
# Of the requests; each has its tokens besides, and all of those at once may be too much for the memory.
OF_REQUESTS = (
    "arm", "request", "sent_ns", "tokenized_ns", "admitted_ns", "finished_ns", "reason", "completion_tokens",
    "error",
)  # fmt: skip
FALLING_BEHIND = 0.5  # of the median latency: growth of the queue wait from first to last quarter
MORE = "try fewer requests at once, or more cores"
WIDER = "that widens the intervals"


@dataclass(frozen=True)
class Measured:
    """What was measured, as warnings look at it; `values`: what each trial came to."""

    manifest: Manifest
    blocks: Sequence[Block]
    values: BlockSeries

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self._joined("requests", OF_REQUESTS)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        return self._joined("rounds")

    @property
    def cores(self) -> str:
        cores = self.manifest.measured_on.cores
        return f"{cores} core{'s' if cores != 1 else ''}"

    @property
    def device_kinds(self) -> set[str]:
        return {each.device["kind"] for each in self.manifest.descriptions.values()}

    @property
    def of_rounds(self) -> Severity:
        """How much what is wrong with rounds alone does to the verdict: nothing to one of turns."""
        turns = self.manifest.design.primary in definitions.OF_PAIRS
        return Severity.DESCRIBES if turns else Severity.QUALIFIES

    def most(self, column: str) -> float:
        """The largest value of a column of the rounds, 0 where there is none."""
        known = column in self.rounds and self.rounds[column].notna().any()
        return float(np.nanmax(self.rounds[column])) if known else 0.0

    def sum(self, column: str, arm: str = "") -> int:
        """The sum over all rounds, or over those of an arm."""
        rounds = self.rounds[self.rounds["arm"] == arm] if arm else self.rounds
        return int(rounds[column].sum()) if column in rounds else 0

    def gathered(self) -> Iterator[tuple[str, int, int, int]]:
        """Each arm, with its replies that came all at once, those in bursts, and all that were counted: a
        proxy may stand before one arm alone."""
        for arm in self.manifest.design.arms:
            counted = sum(self.sum(name, arm.name) for name in self.rounds if name.startswith(COUNTED))
            yield arm.name, self.sum(AT_ONCE, arm.name), self.sum(BURSTS, arm.name), counted

    def _joined(self, table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table of all blocks; of all its columns, unless only some are wanted."""
        wanted = slice(None) if columns is None else list(columns)
        return pd.concat([block.tables[table].loc[:, wanted] for block in self.blocks], ignore_index=True)


class OfRun(Kind, frozen=True):
    """A warning about what was measured, whatever the change is."""

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        """Each that applies to a run."""
        yield from ()


class Steal(OfRun, frozen=True):
    share: float
    says = (
        "noise: other virtual machines took up to {share:.1%} of the CPU time (steal); "
        f"{WIDER}; try another hour, more trials, or a machine of your own"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if (share := run.most("steal_share")) > STEAL:
            yield cls(share)


class OtherProcesses(OfRun, frozen=True):
    share: float
    load: float
    says = (
        "noise: other processes used up to {share:.1%} of the CPU time (load average up to "
        f"{{load:.1f}}); {WIDER}; stop them and measure again"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if (share := run.most("others_share")) > OTHERS:
            yield cls(share, run.most("load_1m"))


class CoreSpeed(OfRun, frozen=True):
    fast_us: float
    slow_us: float
    says = (
        "noise: one fixed loop took {fast_us:.0f} to {slow_us:.0f} us between rounds, as other work "
        f"shares the physical core (steal does not show it), or its frequency changes; {WIDER}; try bench "
        "doctor, then a quieter machine or a fixed frequency"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if "loop_us" in run.rounds and run.rounds["loop_us"].notna().any():
            fast, slow = core_speed.spread(run.rounds["loop_us"].dropna().tolist())
            if slow >= core_speed.STEADY * fast:
                yield cls(fast, slow)


class NotSteady(OfRun, frozen=True):
    arm: str
    growth_ms: float
    slower: str
    says = (
        "not steady: from the first quarter of a round to the last, requests of {arm} waited "
        "{growth_ms:.3g} ms longer in the queue; they arrive faster than it serves them, so TTFT and "
        "latency grow with the length of the round; try {slower}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        arrival = ARRIVALS[run.manifest.design.workload.arrival]
        if not arrival.open_loop:
            return
        slower = "a longer --interval-ms" if "interval_ms" in arrival.options else "a lower --rate"
        requests = run.requests[(run.requests["admitted_ns"] >= 0) & (run.requests["tokenized_ns"] >= 0)]
        for arm, own in requests.groupby("arm", sort=False):
            waited = (own["admitted_ns"] - own["tokenized_ns"]) / 1e6
            latency = (own["finished_ns"] - own["sent_ns"]) / 1e6
            quarter = own["request"].rank(pct=True)
            growth = float(waited[quarter > 0.75].median() - waited[quarter <= 0.25].median())
            if len(own) >= 8 and growth > FALLING_BEHIND * float(latency.median()):
                yield cls(str(arm), growth, slower, weight=run.of_rounds)


class LateSends(OfRun, frozen=True):
    ms: float
    says = (
        "late sends (submit lag): in some trial, p99 of how late the client sent its requests is {ms:.2f} "
        f"ms; TTFT counts from the send, so it leaves that delay out; {MORE}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        lag = max(map(max, run.values.get("submit_lag_ms_p99", {}).values()), default=0.0)
        if lag > SUBMIT_LAG_MS:
            yield cls(lag)


class LateReads(OfRun, frozen=True):
    """Bytes lay unread for so long that it distorted a time: arrival stamps are the kernel's, but bytes that
    are still unread when the next chunk comes are read together with it, and get its stamp."""

    ms: float
    cores: str
    says = (
        "late reads (client lag): in some trial, p99 of how long a chunk lay unread is {ms:.2f} ms, as "
        "the client got too little of {cores}; chunks that are read together get one arrival time, so TTFT "
        f"and ITL may be off by as much; {MORE}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        gaps = run.values.get("itl_chunk_ms_p50", {})
        late = [
            max(lags)
            for arm, lags in run.values.get("client_lag_ms_p99", {}).items()
            if max(lags) > LATE_READ * min(gaps.get(arm, [np.inf]))
        ]
        if late:
            yield cls(max(late), run.cores, weight=run.of_rounds)


class Squeezed(OfRun, frozen=True):
    few: int
    several: int
    cores: str
    says = (
        "bunched chunks: in {few} of {several} requests the chunks arrived in less than half of the time "
        "that the engine took to make their tokens; the client got too little of {cores}, or the engine "
        f"sent late, so TPOT and ITL are too small; {MORE}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        several = squeezed = 0
        for requests in (each for block in run.blocks if len(each := block.tables["requests"])):
            made, came = (spans_ns(requests[name]) for name in ("token_ns", "chunk_ns"))
            several += int(np.count_nonzero((made > 0) & (came > 0)))
            squeezed += int(np.count_nonzero((made > 0) & (came > 0) & (came < SQUEEZED * made)))
        if squeezed > SOME * several:
            yield cls(squeezed, several, run.cores, weight=run.of_rounds)


class ClockMoved(OfRun, frozen=True):
    ms: float
    says = (
        "time of day: it was changed on this machine by {ms:.3g} ms in a round; the arrival times of that "
        "round are wrong; wait until NTP has settled, and measure again"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if (moved := run.most("counter.clock_moved_us")) > CLOCK_MOVED_US:
            yield cls(moved / 1e3, weight=run.of_rounds)


class RecordsLost(OfRun, frozen=True):
    """A round outgrew its records; each arm then lacks a different part of it."""

    steps: int
    rows: int

    def sentence(self) -> str:
        counts = {"steps": self.steps, "records of device work": self.rows}
        lost = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        return (
            f"records lost: up to {lost} in a round; step times, phases, device_busy, exposed_host_us and "
            "the mechanism cover only the rest, which differs by arm; try a lower "
            "--num-requests or --max-new-tokens"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        lost = [int(run.most(f"counter.{what}_lost")) for what in ("steps", "work_rows")]
        if any(lost):
            yield cls(*lost, weight=run.of_rounds)


class AllAtOnce(OfRun, frozen=True):
    replies: int
    of_all: int
    arm: str = "the run"
    usual = Severity.QUALIFIES
    says = (
        "not streamed: {replies} of {of_all} replies of {arm} came all at once, as through a proxy that "
        "buffers, or from a server that does not stream; TTFT is then the latency, and TPOT and ITL "
        "mean nothing; ask the server itself, or turn the buffering off (nginx: proxy_buffering off)"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        for arm, at_once, _, replies in run.gathered():
            if at_once > GATHERED * replies:
                yield cls(at_once, replies, arm)


class InBursts(OfRun, frozen=True):
    replies: int
    of_all: int
    arm: str = "the run"
    usual = Severity.QUALIFIES
    says = (
        f"bursts: {{replies}} of {{of_all}} replies of {{arm}} came in bursts of {BURST} chunks or more, as "
        "through a proxy that buffers, or from speculative decoding; ITL is the time between "
        "bursts, and TTFT may include the wait for the first to fill; ask the server itself, or turn the "
        "buffering off"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        for arm, at_once, in_bursts, replies in run.gathered():
            if at_once <= GATHERED * replies < at_once + in_bursts:
                yield cls(at_once + in_bursts, replies, arm)


class CountedByChunks(OfRun, frozen=True):
    requests: int
    usual = Severity.QUALIFIES
    says = (
        "token count missing: for {requests} requests the server gave no count, or one too low for what "
        "came, so each chunk counts as one token; TPOT, ITL and throughput are wrong where a chunk holds "
        "more; --set tokenizer=FILE counts the tokens"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if requests := run.sum(f"{COUNTED}chunks"):
            yield cls(requests)


class NotAllStreamed(OfRun, frozen=True):
    requests: int
    tokens: int
    usual = Severity.QUALIFIES

    def sentence(self) -> str:
        return (
            f"hidden tokens: in {self.requests} requests the server counted {self.tokens:,} tokens "
            f"({self.tokens / self.requests:.3g} each) that it did not send, such as hidden reasoning; TTFT "
            "includes the time that they took, while TPOT and throughput leave them out; turn reasoning off "
            "in the server, or let it send that too"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if tokens := run.sum("counter.tokens_not_streamed"):
            yield cls(run.sum("counter.requests_not_all_streamed"), tokens)


class EndedEarly(OfRun, frozen=True):
    """Replies that ended by themselves, though all tokens were asked for: a server may not know how."""

    arm: str
    replies: int
    all_replies: int
    usual = Severity.QUALIFIES
    says = (
        "ended early: {replies} of {all_replies} replies of {arm} are shorter than asked; its server does "
        "not know ignore_eos, so latency and throughput are of other lengths; give --stop-on-eos, and "
        "compare TPOT"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        workload = run.manifest.design.workload
        asked = workload.max_new_tokens  # of lengths that are drawn, the records do not say which was whose
        if (
            run.manifest.imported is not None
            or workload.stop_on_eos
            or workload.stop
            or type(asked) is not int
        ):
            return
        served = run.requests[run.requests["error"] == ""]
        early = (served["reason"] != "length") & (served["completion_tokens"] < asked)
        for arm, replies in served[early].groupby("arm"):
            yield cls(str(arm), len(replies), int((served["arm"] == arm).sum()))


class DoubtfulCount(OfRun, frozen=True):
    requests: int
    usual = Severity.QUALIFIES
    says = (
        "token count too high: in {requests} requests the server counts more tokens than so short a text is "
        "likely to hold; if it hides some, such as reasoning, TPOT is too small and throughput too large; "
        "--set tokenizer=FILE counts the text that came"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if requests := run.sum("counter.requests_of_doubtful_count"):
            yield cls(requests)


class Failed(OfRun, frozen=True):
    failed: int
    requests: int
    first: str
    usual = Severity.QUALIFIES
    says = (
        "{failed} of {requests} requests failed; they are left out, so all times are of the "
        "others; fix the cause and measure again. The first error: {first}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        failed = run.requests[run.requests["error"] != ""]
        if len(failed):
            yield cls(len(failed), len(run.requests), failed["error"].iloc[0])


class Skipped(OfRun, frozen=True):
    """The workload's data holds what was not sent. The smallest context of all arms decides, so all skip the
    same, and one of them is counted."""

    short: int = 0
    long: int = 0
    failed: int = 0

    def sentence(self) -> str:
        told = ", ".join(f"{count} {what}" for why, what in SKIPPED.items() if (count := getattr(self, why)))
        return (
            f"skipped, over all rounds: {told}; all arms were asked the same rest, so they compare with "
            "each other, but not with a run of the whole file; say so where you quote the result"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        rounds = run.rounds[run.rounds["arm"] == run.manifest.design.arms[0].name]
        names = [f"skipped.{why}" for why in SKIPPED]
        counts = [int(rounds[name].sum()) if name in rounds else 0 for name in names]
        if any(counts):
            yield cls(*counts)
