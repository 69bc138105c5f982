"""What `bench explain` found, as a person reads it. Input is an `Explained`."""

from __future__ import annotations

from collections.abc import Callable

from overlap_bench.harness.analysis.explain import SHOWN_CAUSES, Explained, Part, RankTimes
from overlap_bench.harness.analysis.foretold import Estimate, Foretold
from overlap_bench.harness.analysis.tail import Tail
from overlap_bench.harness.analysis.words import confidence, interval
from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.report import sections
from overlap_bench.harness.report.page import Page, Table, csv_of, tabulated
from overlap_bench.harness.report.tables import changed_settings, prediction_line

DEVICE = "device and more"  # what the device's line is called where it holds more
STEP_NOTE = (
    "Means over {unit}s, from the device's end of a step to its end of the next; {of}. A host phase counts "
    "only while the device stands still. Interval: {confidence}%, t over {unit}s. "
    "harness/metrics/attribution.py defines each line."
)
OF = {
    "turns": "of turns, so of the same steps in both arms; plain means, which add up, and in which a few "
    "slow steps weigh more than in decode_step_ms, a mean of logarithms, which is the number to quote",
    "rounds": "of decode steps that follow a decode step, at the before arm's batch mix",
}
RANKS_NOTE = (
    "Means over trials of decode steps in rounds, each arm at its own batches. Waiting: from the rank's own "
    "start of a step's program until the last rank's start, before which no all-reduce ends; it is part of "
    "the device's time and busy share, and of a pace. harness/metrics/ranks.py."
)
TAIL_NOTE = (
    "Late: mean of the samples at the percentile and above; typical: mean of those between the quartiles. "
    "Right: what the scheduler's thread did more of than in a typical one, the most first (--format json has "
    "all). From rounds, pooled over trials: described, not judged. harness/analysis/tail.py."
)

FORETOLD_NOTE = (
    "Expected: the change of the phase (decode steps in rounds, at the sensitivity's batch) times its slope "
    "in {found.sensitivity}, where a step took {found.step_us:,.0f} us; a hidden phase counts nothing. "
    "Intervals over trials; that of the expected change includes the slopes'. harness/analysis/foretold.py."
)


def step_line(found: Explained) -> str:
    """The change of the step, in which of the run's measurements, and the part that changed most."""
    whole, device = found.step_us["interval"], found.step_us["device"]
    why = f", as {found.why_rounds}" if found.why_rounds else ""
    start = f"In {found.measured_in}{why}: a decode step takes {number(whole.before)} us"
    if found.after is None:
        return f"{start}, {_share(device.share_before)} of it in {_named(found, 'device')}."
    change = f"{start} before and {number(whole.after)} after ({_change(whole)})"
    if found.blocks == 1:
        return f"{change}; one trial can't tell which part changed."
    if found.largest is None:
        return f"{change}; no single part's change can be told from chance."
    name, largest = _named(found, found.largest), _change(found.step_us[found.largest])
    return f"{change}; of the parts' changes whose interval excludes 0, the largest is in {name}: {largest}."


def _named(found: Explained, part: str) -> str:
    return DEVICE if part == "device" and found.device_holds else part


def page(found: Explained) -> Page:
    tables = [step_table(found), *([rank_table(found)] if found.ranks else []), tail_table(found)]
    if found.foretold is not None:
        tables.append(foretold_table(found.foretold))
    if found.prediction is not None:
        tables.append(Table("Prediction", (), (), prediction_line(found.prediction)))
    changed = changed_settings(found.before, found.after)
    lines = (*sections.below_verdict(found.warnings), step_line(found), changed)
    if found.device_holds:
        lines += (f"The line `{DEVICE}` is the device's time and that of {found.device_holds}.",)
    others = [each.text for each in sections.following(found.warnings)]
    return Page(found.headline, lines, tuple(tables), others)


def step_table(found: Explained) -> Table:
    """Every part that either arm has, and the interval that they add up to."""
    rows = [
        (_named(found, name), row)
        for name, row in found.step_us.items()
        if name in ("interval", "unattributed") or row.before or row.after
    ]
    columns: dict[str, Callable[[tuple[str, Part]], str]] = {
        "us of a step": lambda row: row[0],
        "before": lambda row: _us(row[1].before),
        "share": lambda row: _share(row[1].share_before),
    }
    numbers: tuple[str, ...] = ("before",)
    if found.after is not None:
        columns |= {
            "after": lambda row: _us(row[1].after),
            "of it": lambda row: _share(row[1].share_after),
            "change": lambda row: _delta(row[1]),
            "interval": lambda row: interval(row[1]),
        }
        numbers = ("before", "share", "after", "of it", "change")
    note = STEP_NOTE.format(
        confidence=confidence(found.confidence), of=OF[found.measured_in], unit=found.unit
    )
    return tabulated("Where a decode step goes", rows, columns, note, numbers)


def rank_table(found: Explained) -> Table:
    columns: dict[str, Callable[[RankTimes], str]] = {
        "arm": lambda each: each.arm,
        "rank": lambda each: str(each.rank),
        "exposed host, us": lambda each: _us(each.exposed_host_us),
        "device busy": lambda each: _share(each.device_busy),
        "waiting for the slowest rank, us": lambda each: _us(each.waiting_us),
    }
    numbers = tuple(columns)[2:]
    return tabulated("The ranks, one by one", found.ranks, columns, RANKS_NOTE, numbers)


def tail_table(found: Explained) -> Table:
    def causes(each: Tail) -> str:
        largest = each.causes[:SHOWN_CAUSES]
        return "; ".join(f"{name} {more:+.2f}" for name, more in largest if more > 0)

    columns: dict[str, Callable[[Tail], str]] = {
        "arm": lambda each: each.arm,
        "ms": lambda each: (
            f"{each.metric.removesuffix('_ms')} p{each.level}" + ("" if each.enough else " (few)")
        ),
        "typical": lambda each: number(each.typical),
        "late": lambda each: number(each.late),
        "what the scheduler's thread did more of, ms": causes,
    }
    title = "What made the late ones late"
    return tabulated(title, found.tail, columns, TAIL_NOTE, numbers=("typical", "late"))


def foretold_table(found: Foretold) -> Table:
    """The phases that changed, what a step feels of them, and beside it what the step did."""
    title = "What the sensitivity expects of the step"
    if found.foretold is None:
        return Table(title, (), (), f"{found.sensitivity} expects nothing here: {found.why_not}.")
    rows = [
        *((each.phase, each.change, f"{each.slope:.2f}", _signed(each.felt_us)) for each in found.phases),
        ("a step, expected", found.foretold, "", ""),
        ("a step, measured", found.measured, "", ""),
        ("a step, measured, without the change of its device time", found.aside, "", ""),
    ]
    columns: dict[str, Callable[[tuple[str, Estimate | None, str, str]], str]] = {
        "us of a step": lambda row: row[0],
        "change": lambda row: "" if row[1] is None else _signed(row[1].us),
        "interval": lambda row: "" if row[1] is None else f"[{_signed(row[1].low)}, {_signed(row[1].high)}]",
        "slope": lambda row: row[2],
        "a step feels": lambda row: row[3],
    }
    return tabulated(
        title, rows, columns, FORETOLD_NOTE.format(found=found), ("change", "slope", "a step feels")
    )


def _signed(us: float) -> str:
    return f"{us:+,.1f}".replace("-", "−")


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _delta(row: Part) -> str:
    return "–" if row.delta is None else _signed(row.delta)


def _change(row: Part) -> str:
    return f"{_delta(row)} us {interval(row)}".rstrip()


def to_csv(found: Explained) -> str:
    rows = (((found.run, found.device, found.variant, name), row) for name, row in found.step_us.items())
    return csv_of(("run", "device", "variant", "part"), Part, rows)
