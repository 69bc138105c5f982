"""A comparison in words: its one sentence, a change with its interval, a verdict, outputs that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from overlap_bench.harness.analysis.decision import Verdict
from overlap_bench.harness.analysis.result import Comparison, MetricRow, Moved, NodeRow, Outputs
from overlap_bench.harness.common.formatting import blocks_of, number, percent, signed, with_unit
from overlap_bench.harness.metrics import definitions

SUBJECTS = {  # of a sentence; any other metric is called by its name
    definitions.SLICED: "The decode step",
    definitions.MATCHED[0]: "The decode step in rounds",
    **{f"{name}_ms_p{q}": f"{name.upper()} p{q}" for name in ("ttft", "tpot") for q in (50, 90, 95, 99)},
    "throughput_tok_s": "Throughput",
}


class Ranged(Protocol):
    """What has an interval: a fraction, or where there is no `change`, in a unit."""

    @property
    def change(self) -> float | None: ...
    @property
    def ci_low(self) -> float | None: ...
    @property
    def ci_high(self) -> float | None: ...


def conclusion(device: str, comparison: Comparison) -> str:
    """For a person, the verdict first: "pinned-h2d: faster. The decode step is 3.0% shorter [1.8%, 4.1%]:
    3.425 → 3.324 ms (6 blocks, emulated device)." Behind it, whether outputs differ."""
    name, row, variant = comparison.primary, comparison.decided, comparison.variant
    subject, where = SUBJECTS.get(name, name), f"({blocks_of(comparison.blocks)}, {device} device)"
    if row is None:
        return f"{variant}: {subject} was not measured {where}."
    if comparison.after is None:
        return f"{variant}: {subject} is {with_unit(row.before, row.unit)} {where}."
    found = f"{variant}: {comparison.verdict or Verdict(None)}. {_found(name, subject, row)} {where}."
    return f"{found} {outputs_that_differ(comparison.outputs)}".rstrip()


def _found(name: str, subject: str, row: MetricRow) -> str:
    """The change in words: "The decode step is 3.0% shorter [1.8%, 4.1%]: 3.425 → 3.324 ms"."""
    moved = row.delta if row.change is None else row.change
    if moved is None:
        return f"{subject} was measured in one arm alone"
    less, more = ("shorter", "longer") if definitions.of_a_step(name) else ("lower", "higher")
    size = difference(row)[1:]  # without its sign, which the word has
    sides = f"{number(row.before)} → {with_unit(row.after, row.unit)}"
    return f"{subject} is {size} {less if moved < 0 else more} {_unsigned(row)}".rstrip() + f": {sides}"


def _unsigned(row: MetricRow) -> str:
    """The interval without signs where both ends have the same, the smaller one first."""
    if not row.excludes_zero or row.ci_low is None or row.ci_high is None:
        return interval(row)
    shown = percent if row.change is not None else signed
    low, high = sorted((abs(row.ci_low), abs(row.ci_high)))
    return f"[{shown(low)[1:]}, {shown(high)[1:]}]"


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
    """The level of an interval, in percent: "95"."""
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
