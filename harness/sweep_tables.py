"""What a sweep found, as a person reads it. Input is the object of `--format json` (sweep_run.result)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import divergences, spelling, tables
from harness.pages import Page, Table, csv_text
from harness.settings import spelled

LEVELS = ("tpot_ms_p50", "throughput_tok_s", "latency_ms_p50")
NOTE = (
    "Each point is a run of its own, and its verdict is at 5% by itself: of twenty points without a change, "
    "one is called one. Points were measured one after the other: only what is in one row was interleaved. "
    "Intervals: {confidence}%, t over blocks{own}."
)
OWN = ", each at the level of the look at which its point stopped"


def conclusion(result: Mapping[str, Any]) -> str:
    """One sentence: how many points there are, and how often each verdict."""
    comparisons = result["comparisons"]
    axes = ", ".join(axis["name"] for axis in result["axes"])
    points = f"Sweep over {axes}: {len(comparisons)} point{'s' if len(comparisons) != 1 else ''}"
    devices = kinds_of_device(result)
    where = f"on the {' and '.join(devices)} device{'s' if len(devices) > 1 else ''}"
    verdicts = Counter(
        (each["primary"], each["metrics"][each["primary"]]["verdict"])
        for each in comparisons
        if each["after"] is not None
    )
    said = [f"{name} {word or 'without a verdict'} in {count}" for (name, word), count in verdicts.items()]
    outputs = {spelled(each["at"]): each["outputs"] for each in comparisons}
    differ = [point for point, each in outputs.items() if divergences.unexplained(each)]
    found = f"{points} {where}: {', '.join(said)}." if said else f"{points} {where}."
    return found + (f" OUTPUTS DIFFER at {'; '.join(differ)}." if differ else "")


def kinds_of_device(result: Mapping[str, Any]) -> list[str]:
    return sorted({each["device"] for each in result["comparisons"]})


def page(result: Mapping[str, Any]) -> Page:
    return Page(conclusion(result), (tables.stopped(result),), tuple(parts(result)), warnings(result))


def parts(result: Mapping[str, Any]) -> Iterator[Table]:
    """The changes, where there are any, then the levels."""
    if any(each["after"] is not None for each in result["comparisons"]):
        yield changes_table(result)
    yield levels_table(result)


def _of_points(result: Mapping[str, Any]) -> list[str]:
    """The columns that say which point a row is of: its axes, and the device where it is not the same one."""
    axes = [axis["name"] for axis in result["axes"]]
    return axes if len(kinds_of_device(result)) == 1 else list(dict.fromkeys([*axes, "device"]))


def _point(each: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """A comparison's cells in these columns."""
    return (each["at"].get(name, each["device"]) for name in names)


def changes_table(result: Mapping[str, Any]) -> Table:
    """Per point the primary before and after, its change, and the verdict. Where points may stop early, each
    interval says its confidence."""
    names = _of_points(result)
    primaries = dict.fromkeys(each["primary"] for each in result["comparisons"])
    mixed = len({each["confidence"] for each in result["comparisons"]}) > 1
    rows = []
    for each in result["comparisons"]:
        row = each["metrics"][each["primary"]]
        rows.append(
            (
                *_point(each, names),
                spelling.number(row["before"]),
                spelling.number(row["after"]),
                spelling.difference(row),
                spelling.interval(row) + (f" at {spelling.confidence(each)}%" if mixed else ""),
                spelling.verdict(row, primary=True),
            )
        )
    title = f"Change of {', '.join(primaries)}, margin ±{100 * result['comparisons'][0]['margin']:.3g}%"
    note = NOTE.format(confidence=spelling.confidences(result["comparisons"]), own=OWN if mixed else "")
    return Table(title, (*names, "before", "after", "change", "interval", "verdict"), tuple(rows), note)


def levels_table(result: Mapping[str, Any]) -> Table:
    """Per point what was asked, the requests of a round, and what was reached: the mean batch, TPOT,
    throughput and latency, before → after."""
    names = _of_points(result)
    rows = []
    for each in result["comparisons"]:
        measured = [each["mechanism"].get("mean_batch"), *(each["metrics"].get(name) for name in LEVELS)]
        asked = (*_point(each, names), str(each["requests"]))
        rows.append((*asked, *map(_sides, measured), str(each["blocks"])))
    columns = (*names, "requests", "batch", *LEVELS, "blocks")
    note = "requests: asked in each round; batch: mean over decode steps"
    return Table("Levels, before → after", columns, tuple(rows), note, numbers=())


def _sides(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["after"] is None:
        return spelling.number(row["before"])
    return f"{spelling.number(row['before'])} → {spelling.number(row['after'])}"


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Those that every point has, once. Of the others, whose numbers differ from point to point, each kind
    once with its points; one that only a single point has is told in full."""
    found = {spelled(each["at"]): each["warnings"] for each in result["comparisons"]}
    common = [line for line in next(iter(found.values())) if all(line in lines for lines in found.values())]
    devices = kinds_of_device(result)
    if len(devices) > 1:
        common.insert(0, f"points of several devices ({', '.join(devices)}): never compare their times")
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, lines in found.items():
        for line in lines:
            if line not in common:
                kinds.setdefault(line.partition(":")[0], {}).setdefault(name, []).append(line)
    for kind, points in kinds.items():
        if len(points) == 1:
            common += [f"{name}: {line}" for name, lines in points.items() for line in lines]
        else:
            common.append(
                f"{kind}: at {len(points)} points, {', '.join(points)}; --format json has the numbers"
            )
    return common


def to_csv(result: Mapping[str, Any]) -> str:
    """One line per point and metric, every one that was measured, unrounded; `confidence`, a fraction, is of
    the interval."""
    names = [axis["name"] for axis in result["axes"]]
    lines = []
    for each in result["comparisons"]:
        about = [*(each["at"][axis] for axis in names), each["run"], each["device"], each["confidence"]]
        for name, row in each["metrics"].items():
            lines.append([*about, name, *(row[column] for column in spelling.ROW)])
    return csv_text((*names, "run", "device", "confidence", "metric", *spelling.ROW), lines)
