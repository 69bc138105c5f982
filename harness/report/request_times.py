"""Where a request's time goes, from the moment it was due until its end: what TTFT is made of."""

from __future__ import annotations

from collections.abc import Callable

from overlap_bench.harness.analysis.result import Comparison, MetricRow
from overlap_bench.harness.analysis.words import difference, interval
from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.report.page import Table, tabulated

# In their order. An engine that doesn't say when it queued a request has one wait in the place of two.
STAGES = {
    "tokenize_ms_mean": "tokenizing",
    "to_queue_ms_mean": "on its way to the scheduler",
    "in_queue_ms_mean": "waiting in the scheduler's queue",
    "queue_wait_ms_mean": "waiting for a place in a batch",
    "prefill_first_ms_mean": "prefill, to the first token",
}
WHOLE = {
    "submit_lag_ms_mean": "due, but not sent yet",
    **STAGES,
    "ttft_ms_mean": "TTFT, from the send to the first token's arrival",
    "latency_ms_mean": "latency, from the send to the end",
}
NOTE = (
    "In ms, means over requests and trials, of rounds; described, not judged. TTFT holds the engine's stages "
    "and the way there and back; a late send comes before it."
)


def request_times(comparison: Comparison) -> Table | None:
    """A row for each stage that took any time; None where the engine stamps none."""
    found = {name: row for name, row in comparison.metrics.items() if row.before or row.after}
    if "in_queue_ms_mean" in found:
        found.pop("queue_wait_ms_mean", None)
    if not found.keys() & STAGES.keys():
        return None
    rows = [(said, found[name]) for name, said in WHOLE.items() if name in found]
    columns: dict[str, Callable[[tuple[str, MetricRow]], str]] = {
        "": lambda row: row[0],
        "before": lambda row: number(row[1].before),
    }
    if comparison.after is not None:
        columns |= {
            "after": lambda row: number(row[1].after),
            "change": lambda row: difference(row[1]),
            "interval": lambda row: interval(row[1]),
        }
    return tabulated("Where a request's time goes", rows, columns, NOTE)
