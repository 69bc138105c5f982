"""A comparison in words: its one sentence, a change with its interval, a verdict, outputs that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from overlap_bench.harness.analysis.result import Comparison, MetricRow, Moved, NodeRow, Outputs
from overlap_bench.harness.common.formatting import blocks_of, number, percent, signed
from overlap_bench.harness.metrics import definitions


class Ranged(Protocol):
    """What has an interval: a fraction, or where there is no `change`, in a unit."""

    @property
    def change(self) -> float | None: ...
    @property
    def ci_low(self) -> float | None: ...
    @property
    def ci_high(self) -> float | None: ...


def conclusion(device: str, comparison: Comparison) -> str:
    """One sentence: the primary's change, its interval, the verdict, and whether outputs agree."""
    name = comparison.primary
    row = comparison.decided
    where = f"over {blocks_of(comparison.blocks)} on the {device} device"
    if row is None:
        return f"{comparison.variant}: {name} was not measured {where}."
    if comparison.after is None:
        return f"{comparison.variant}: {name} is {number(row.before)} {row.unit} {where}."
    change = f"{comparison.variant}: {name} changed by {difference(row)}"
    change += in_step(name, row.before, row.after)
    changed = comparison.changed_code
    if changed is not None and not changed.counts:
        decided = f"{change} {interval(row)}".rstrip() + f" {where}: no verdict: {changed.never_ran}."
    elif row.ci_low is None:
        alone = f": {row.verdict}." if row.verdict else "; one block gives no verdict."
        decided = f"{change} {where}{alone}"
    else:
        decided = f"{change} {interval(row)} {where}: {_decision(row, comparison.margin)}."
    return f"{decided} {outputs_that_differ(comparison.outputs)}".rstrip()


def _decision(row: MetricRow, margin: float) -> str:
    if row.verdict == "same":
        addition = f"; a change of {percent(row.change)} was detected" if row.excludes_zero else ""
        return f"same, within ±{100 * margin:.3g}%{addition}"
    if row.verdict != "undecided":
        return row.verdict or "no verdict"
    if row.excludes_zero and row.p_adjusted is not None:
        return f"undecided, p {row.p_adjusted:.3f} among all comparisons of the run"
    assert row.ci_low is not None
    assert row.ci_high is not None
    if row.excludes_zero or (-margin < row.ci_low and row.ci_high < margin):
        return "undecided, as other measurements of this run contradict it"
    return f"undecided, the interval holds 0 and reaches beyond ±{100 * margin:.3g}%"


def difference(row: MetricRow | NodeRow) -> str:
    """The change in percent, or in the unit where the metric can be zero; "–" where one side is missing."""
    if row.change is not None:
        return percent(row.change)
    if row.delta is None:
        return "–"
    return f"{signed(row.delta)} {row.unit}".strip()


def per_step(name: str, before: float | None, after: float | None) -> str:
    """The change of a step's time in microseconds, "−101 us"; "" for other metrics."""
    if before is None or after is None or not definitions.of_a_step(name):
        return ""
    return f"{signed(1e3 * (after - before))} us"


def in_step(name: str, before: float | None, after: float | None) -> str:
    """The same in a sentence, behind the change: " (−101 us of 3.425 ms)"."""
    moved = per_step(name, before, after)
    return f" ({moved} of {number(before)} ms)" if moved else ""


def interval(row: Ranged) -> str:
    if row.ci_low is None or row.ci_high is None:
        return ""
    if row.change is not None:
        return f"[{percent(row.ci_low)}, {percent(row.ci_high)}]"
    return f"[{signed(row.ci_low)}, {signed(row.ci_high)}]"


def floor(row: MetricRow) -> str:
    """What equal arms show, "±1.2%"."""
    if row.floor is None:
        return ""
    return f"±{(percent if row.change is not None else signed)(row.floor)[1:]}"


def verdict(row: MetricRow, primary: bool) -> str:
    """The verdict, or what the row is in its place."""
    if row.verdict is not None:
        return row.verdict
    if row.ci_low is None:
        return ""
    return "no verdict" if primary else "descriptive"


def moved(found: Moved) -> str:
    """A change point: "step_ms is +1.3% [+0.9%, +1.7%] since 9f2c1ab043 (2026-11-12)"."""
    change = f"{percent(found.change)} {interval(found)}"
    return f"{found.metric} is {change} since {found.first[:10]} ({found.when[:10]})"


def confidence(level: float) -> str:
    """Of an interval, in percent: "95"."""
    return f"{100 * level:.4g}"


def confidences(comparisons: Sequence[Comparison]) -> str:
    """The same of several, "97.45 to 99.75" where runs that may stop early stopped at different looks."""
    levels = [each.confidence for each in comparisons]
    return " to ".join(dict.fromkeys(map(confidence, (min(levels), max(levels)))))


def counts(outputs: Outputs) -> str:
    """In words: "931 of 960", and behind it how many of the others are near-ties, where they were judged."""
    ties = "" if outputs.near_ties is None else f", {outputs.near_ties} near-ties"
    return f"{outputs.identical} of {outputs.compared}{ties}"


def outputs_that_differ(outputs: Outputs) -> str:
    """One sentence about those that differ; "" where none does."""
    compared = outputs.compared
    differ, ties = compared - outputs.identical, outputs.near_ties
    if not differ:
        return ""
    if ties == differ:
        return f"Outputs differ in {differ} of {compared} requests, each at a near-tie."
    judged = "" if ties is None else f", {ties or 'none'} of them at a near-tie"
    return f"OUTPUTS DIFFER in {differ} of {compared} requests{judged}."
