"""What `bench explain` found, as a person reads it. Input is an `Explained`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.analysis.explain import SHOWN_CAUSES, Explained, Part
from harness.analysis.result import MetricRow
from harness.analysis.words import confidence, interval
from harness.common.formatting import blocks_of, number
from harness.report.page import Page, Table, csv_text
from harness.report.tables import changed_settings, prediction_line, texts

CSV_COLUMNS = Part.__struct_fields__
STEP_NOTE = (
    "Means over blocks, decode steps that follow a decode step, at the before arm's batch mix; from the "
    "device's end of a step to its end of the next. A host phase counts only while the device stands still. "
    "Interval: {confidence}%, t over blocks. harness/metrics/attribution.py defines each line."
)
TAIL_NOTE = (
    "Late: the mean of the samples at the percentile and above; typical: of those between the quartiles. "
    "What made them late: what the scheduler's thread did more of than in a typical one, the largest "
    "first; the whole list is in --format json. Pooled over blocks, so described and not judged. "
    "harness/analysis/tail.py."
)


def conclusion(found: Explained) -> str:
    """One sentence: the change of the step, and the part with most of it."""
    whole, parts = found.step_us["interval"], _parts(found)
    blocks = blocks_of(found.blocks)
    start = f"{found.variant}: a decode step takes {number(whole.before)} us"
    if found.after is None:
        device = parts["device"].share_before
        return f"{start} over {blocks} on the {found.device} device, {_share(device)} of it the device's."
    name = max(parts, key=lambda part: abs(parts[part].delta or 0))
    return (
        f"{start} before and {number(whole.after)} after ({_delta(whole)} us) over {blocks} on the "
        f"{found.device} device; the largest change is in {name}, {_delta(parts[name])} us."
    )


def page(found: Explained) -> Page:
    return Page(
        conclusion(found),
        (changed_settings(found.before, found.after),),
        tuple(tables(found)),
        texts(found.warnings),
    )


def tables(found: Explained) -> Iterator[Table]:
    """In the order in which they are read."""
    yield step_table(found)
    yield tail_table(found)
    if found.prediction is not None:
        yield Table("Prediction", (), (), prediction_line(found.prediction))


def step_table(found: Explained) -> Table:
    """Every part that either arm has, and the interval that they add up to."""
    alone = found.after is None
    note = STEP_NOTE.format(confidence=confidence(found))
    rows = {
        name: row
        for name, row in found.step_us.items()
        if name in ("interval", "unattributed") or row.before or row.after
    }
    if alone:
        cells = tuple((name, _us(row.before), _share(row.share_before)) for name, row in rows.items())
        return Table("Where a decode step goes", ("us of a step", "before", "share"), cells, note)
    return Table(
        "Where a decode step goes",
        ("us of a step", "before", "share", "after", "of it", "change", "interval"),
        tuple(
            (
                name,
                _us(row.before),
                _share(row.share_before),
                _us(row.after),
                _share(row.share_after),
                _delta(row),
                interval(MetricRow(unit="us", better="", ci_low=row.ci_low, ci_high=row.ci_high)),
            )
            for name, row in rows.items()
        ),
        note,
        numbers=("before", "share", "after", "of it", "change"),
    )


def tail_table(found: Explained) -> Table:
    """One row per arm, metric and level."""
    rows = tuple(
        (
            each.arm,
            f"{each.metric.removesuffix('_ms')} p{each.level}" + ("" if each.enough else " (few)"),
            number(each.typical),
            number(each.late),
            "; ".join(f"{name} {more:+.2f}" for name, more in each.causes[:SHOWN_CAUSES] if more > 0),
        )
        for each in found.tail
    )
    return Table(
        "What made the late ones late",
        ("arm", "ms", "typical", "late", "what the scheduler's thread did more of, ms"),
        rows,
        TAIL_NOTE,
        numbers=("typical", "late"),
    )


def _parts(found: Explained) -> dict[str, Part]:
    return {name: row for name, row in found.step_us.items() if name != "interval"}


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _delta(row: Part) -> str:
    return "–" if row.delta is None else f"{row.delta:+,.1f}".replace("-", "−")


def to_csv(found: Explained) -> str:
    """One line per part of the step, unrounded."""
    about = (found.run, found.device, found.variant)
    lines = [(*about, name, *msgspec.structs.astuple(row)) for name, row in found.step_us.items()]
    return csv_text(("run", "device", "variant", "part", *CSV_COLUMNS), lines)
