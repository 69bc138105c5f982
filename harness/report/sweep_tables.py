"""What a sweep found, as a person reads it. Input is a `SweepResult`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from functools import partial

from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.result import Counter, MetricRow, PointResult, SweepResult
from overlap_bench.harness.analysis.warnings import ranked, texts
from overlap_bench.harness.common import formatting
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.report.page import Page, Table, csv_of, tabulated
from overlap_bench.harness.report.tables import stopped

LEVELS = ("tpot_ms_p50", "throughput_tok_s", "latency_ms_p50")
NOTE = (
    "Each point is a run of its own, with its verdict at 5%: of twenty points without a change, one is "
    "called a change on average. Only the arms of one row were interleaved. "
    "Intervals: {confidence}%, t over trials{own}."
)
OWN = ", each at the level of the look at which its point stopped"


def conclusion(result: SweepResult) -> str:
    comparisons = result.comparisons
    axes = ", ".join(axis.name for axis in result.axes)
    points = f"Sweep over {axes}: {len(comparisons)} point{'s' if len(comparisons) != 1 else ''}"
    devices = kinds_of_device(result)
    where = f"on the {' and '.join(devices)} device{'s' if len(devices) > 1 else ''}"
    verdicts = Tally(
        (each.primary, each.metrics[each.primary].verdict) for each in comparisons if each.after is not None
    )
    said = [f"{name} {word or 'without a verdict'} in {count}" for (name, word), count in verdicts.items()]
    outputs = {spelled(each.at): each.outputs for each in comparisons}
    differ = [point for point, each in outputs.items() if each.unexplained]
    found = f"{points} {where}: {', '.join(said)}." if said else f"{points} {where}."
    return found + (f" OUTPUTS DIFFER at {'; '.join(differ)}." if differ else "")


def kinds_of_device(result: SweepResult) -> list[str]:
    return sorted({each.device for each in result.comparisons})


def page(result: SweepResult) -> Page:
    """The changes, where there are any, then the levels."""
    tables = [levels_table(result)]
    if any(each.after is not None for each in result.comparisons):
        tables.insert(0, changes_table(result))
    return Page(conclusion(result), (stopped(result),), tuple(tables), warnings_of(result))


def _of_points(result: SweepResult) -> dict[str, Callable[[PointResult], str]]:
    """The columns that say which point a row is of: its axes, and the device where it is not the same one."""
    names = [axis.name for axis in result.axes]
    if len(kinds_of_device(result)) > 1:
        names.append("device")
    return {name: partial(_place, name) for name in names}


def _place(name: str, each: PointResult) -> str:
    return each.at.get(name, each.device)


def changes_table(result: SweepResult) -> Table:
    """Per point the primary before and after, its change, and the verdict. Where points may stop early, each
    interval says its confidence."""
    primaries = dict.fromkeys(each.primary for each in result.comparisons)
    mixed = len({each.confidence for each in result.comparisons}) > 1

    def interval(each: PointResult) -> str:
        own = f" at {words.confidence(each.confidence)}%" if mixed else ""
        return words.interval(each.metrics[each.primary]) + own

    of: dict[str, Callable[[PointResult], str]] = {}
    if len(primaries) > 1:
        of["metric"] = lambda each: each.primary
    columns = (
        _of_points(result)
        | of
        | {
            "before": lambda each: formatting.number(each.metrics[each.primary].before),
            "after": lambda each: formatting.number(each.metrics[each.primary].after),
            "change": lambda each: words.difference(each.metrics[each.primary]),
            "interval": interval,
            "verdict": lambda each: words.verdict(each.metrics[each.primary], primary=True),
        }
    )
    title = f"Change of {', '.join(primaries)}, margin ±{100 * result.comparisons[0].margin:.3g}%"
    note = NOTE.format(confidence=words.confidences(result.comparisons), own=OWN if mixed else "")
    return tabulated(title, result.comparisons, columns, note)


def levels_table(result: SweepResult) -> Table:
    """Per point what was asked, the requests of a round, and what was reached: the mean batch, TPOT,
    throughput and latency, before → after."""
    columns = _of_points(result) | {
        "requests": lambda each: str(each.requests),
        "batch": lambda each: _sides(each.mechanism.get("mean_batch")),
        **{name: partial(_level, name) for name in LEVELS},
        "trials": lambda each: str(each.blocks),
    }
    note = "requests: asked in each round; batch: mean over decode steps"
    return tabulated("Levels, before → after", result.comparisons, columns, note, numbers=())


def _level(name: str, each: PointResult) -> str:
    return _sides(each.metrics.get(name))


def _sides(row: MetricRow | Counter | None) -> str:
    if row is None:
        return "–"
    if row.after is None:
        return formatting.number(row.before)
    return f"{formatting.number(row.before)} → {formatting.number(row.after)}"


def warnings_of(result: SweepResult) -> list[str]:
    """Warnings of a sweep: once where every point has the same; in full where it does something to a verdict,
    or a single point has it; and else one of each kind, with its points."""
    found = {spelled(each.at): each.warnings for each in result.comparisons}
    shared = [each for each in next(iter(found.values())) if all(each in every for every in found.values())]
    common = texts(shared)
    devices = kinds_of_device(result)
    if len(devices) > 1:
        common.insert(0, f"points of several devices ({', '.join(devices)}): never compare their times")
    kinds: dict[str, dict[str, list[str]]] = {}
    leading: list[str] = []
    for name, warnings in found.items():
        for each in ranked(warnings):
            if each.leads and not each.settles and each not in shared:
                leading.append(f"{name}: {each.text}")
            elif each not in shared:
                kinds.setdefault(each.kind.replace("_", " "), {}).setdefault(name, []).append(each.text)
    for kind, points in kinds.items():
        if len(points) == 1:
            common += [f"{name}: {line}" for name, lines in points.items() for line in lines]
        else:
            common.append(
                f"{kind}: at {len(points)} points, {', '.join(points)}; --format json has the numbers"
            )
    return [*leading, *common]


def to_csv(result: SweepResult) -> str:
    """One line per point and metric, every one that was measured, unrounded; `confidence`, a fraction, is of
    the interval."""
    names = [axis.name for axis in result.axes]
    rows = (
        ((*(each.at[axis] for axis in names), each.run, each.device, each.confidence, name), row)
        for each in result.comparisons
        for name, row in each.metrics.items()
    )
    return csv_of((*names, "run", "device", "confidence", "metric"), MetricRow, rows)
