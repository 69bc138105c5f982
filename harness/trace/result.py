"""What one trace says, or two as before and after: the object of `bench trace --format json`.

A row that one of two traces lacks is 0 there in counts and in totals, and None in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.trace import gaps
from overlap_bench.harness.trace.analysis import Part
from overlap_bench.harness.trace.events import Trace
from overlap_bench.harness.trace.gaps import Gap

SCHEMA_VERSION = 2
LENGTH_MARGIN = 0.02  # by which two traces may differ in length before totals mislead
ADDITIVE = ("count", "total_ms", "MiB")  # 0 where there is none
TRACED = "these are times of a traced run: they show where time goes, not how much of it there is untraced"
TWO_TRACES = (
    "one trace on each side: a change here has no interval and no verdict, and differs from trace to trace; "
    "bench run decides"
)
OF_A_PROFILE = (
    "recorded this closely, each arm is slowed, and not alike: this shows where the time of each goes, not "
    "which is faster; bench run decides"
)

Analysed = tuple[Trace, Sequence[Part]]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was read; `rows`: how many, by table."""

    file: str
    format: str
    span_ms: float
    devices: int
    rows: dict[str, int]
    steps: int | None  # that its ranges mark
    gaps: list[Gap]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """`change` is after/before − 1, a fraction; None where there is one trace, or nothing before."""

    unit: str
    before: float | None
    after: float | None
    change: float | None


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    key: list[str]
    values: dict[str, Value]  # by measure


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    keys: list[str]
    ranked_by: str | None
    note: str
    rows: list[RowResult]


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    before: Source
    after: Source | None
    parts: dict[str, PartResult]
    warnings: list[str]

    @property
    def compared(self) -> bool:
        """Whether it says what changed from one trace to the other."""
        return self.after is not None


class ProfileResult(TraceResult, frozen=True, kw_only=True):
    """The traces of a profile, beside each other: what takes most comes first, and no `change` is known."""

    @property
    def compared(self) -> bool:
        return False


class Brief(msgspec.Struct, frozen=True):
    """One of which a summary is enough."""

    whole: TraceResult


def result(before: Analysed, after: Analysed | None, of_profile: bool = False) -> TraceResult:
    """All that the traces say; `of_profile`: a ProfileResult."""
    compared = after is not None and not of_profile
    others = {part.name: part for part in after[1]} if after else {}
    warnings = list(before[0].warnings)
    if after is not None:
        warnings = [f"before: {line}" for line in warnings] + [f"after: {line}" for line in after[0].warnings]
    if after is not None and compared:
        warnings += [TWO_TRACES, *_other_length(before[0], after[0])]
    sources = [_source(each[0]) for each in (before, after) if each is not None]
    if compared:
        warnings += _other_work(*sources)
    per = [each.steps or 1 for each in sources] if all(each.steps for each in sources) else [1, 1]
    kind = ProfileResult if of_profile else TraceResult
    return kind(
        schema_version=SCHEMA_VERSION,
        before=sources[0],
        after=sources[1] if after is not None else None,
        parts={part.name: _part(part, others.get(part.name), per, compared) for part in before[1]},
        warnings=[*warnings, OF_A_PROFILE if of_profile else TRACED],
    )


def _other_length(before: Trace, after: Trace) -> Iterator[str]:
    """Counts and totals of traces that are not equally long say little."""
    spans = [last - first for first, last in (before.span(), after.span())]
    if max(spans) > min(spans) * (1 + LENGTH_MARGIN):
        lengths = " and ".join(f"{number(span / 1e6)} ms" for span in spans)
        yield f"the traces are of different length, {lengths}: compare shares and percentiles, not totals"


def _other_work(before: Source, after: Source) -> Iterator[str]:
    if before.steps and after.steps and before.steps != after.steps:
        yield (
            f"the traces hold unequal work, {before.steps} steps before and {after.steps} after: the summary "
            "is per step; totals and counts are not"
        )
    elif not (before.steps and after.steps):
        counts = [each.rows["work"] for each in (before, after)]
        if max(counts) > min(counts) * (1 + LENGTH_MARGIN):
            yield (
                f"the traces hold unequal work, {counts[0]:,} pieces before and {counts[1]:,} after, and no "
                "steps are marked in both (ProfilerStep#N, or a range step N): totals are of unequal work"
            )


def _source(trace: Trace) -> Source:
    first, last = trace.span()
    return Source(
        file=trace.file,
        format=trace.format,
        span_ms=(last - first) / 1e6,
        devices=len(trace.devices),
        rows=trace.rows(),
        steps=gaps.steps(trace),
        gaps=gaps.gaps(trace),
    )


def _part(before: Part, after: Part | None, per: Sequence[float], compared: bool) -> PartResult:
    sides = [{row.key: row.values for row in part.rows} for part in (before, after) if part is not None]
    rows = [
        RowResult(key=list(key), values=_values(before.measures, [side.get(key) for side in sides], compared))
        for key in dict.fromkeys(key for side in sides for key in side)
    ]
    if before.ranked_by:
        rows.sort(key=lambda row: _weight(row.values[before.ranked_by], compared, per), reverse=True)
    return PartResult(
        title=before.title,
        keys=list(before.keys),
        ranked_by=before.ranked_by or None,
        note=before.note,
        rows=rows,
    )


def _values(
    measures: Sequence[tuple[str, str]], sides: Sequence[tuple[float | None, ...] | None], compared: bool
) -> dict[str, Value]:
    found = {}
    for place, (name, unit) in enumerate(measures):
        missing = 0 if name in ADDITIVE else None
        cells = [missing if side is None else side[place] for side in sides]
        before, after = (cells[0], cells[1]) if len(cells) > 1 else (cells[0], None)
        change = after / before - 1 if compared and before and after is not None else None
        found[name] = Value(unit=unit, before=before, after=after, change=change)
    return found


def _weight(value: Value, compared: bool, per: Sequence[float]) -> tuple[float, float]:
    """What is ordered by: the change per step between two traces that are compared, else the size."""
    before, after = (value.before or 0.0) / per[0], (value.after or 0.0) / per[-1]
    return (abs(after - before) if compared else 0.0), max(before, after)
