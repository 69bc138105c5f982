"""An experiment as a person reads it: what there is, what one will do, and what it found.

What it found is made of the object of `--format json` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from harness import divergences
from harness.design import Design
from harness.experiment_file import Adjusted, Experiment, scaling
from harness.pages import Page, Table, csv_text
from harness.settings import spelled
from harness.spelling import difference, interval, number, percent, with_unit

CLAIMS_NOTE = (
    "change = after/before − 1: for times, negative is faster. Interval: 95%, t over blocks of fresh boots. "
    "The first line is what the experiment decides, the others are descriptive. What a source measured on "
    "its hardware and what is measured here never become one number."
)
CELLS_NOTE = (
    "Levels are means over blocks, geometric where a change is in percent. [ ]: 95% interval over blocks; ±: "
    "half its width."
)
LEVELS = {"value", "percentiles", "share"}
CSV_COLUMNS = ("table", "row", "column", "shown", "value", "low", "high", "unit")

# ---------------------------------------------------------------------------------------------------------
# What there is


def listing(found: Sequence[Experiment]) -> Table:
    """One row per experiment."""
    rows = ((each.name, each.question, "; ".join(one.name for one in each.sources)) for each in found)
    note = "bench experiment show NAME tells what is run and what was reported; ... run NAME runs it"
    return Table("Experiments", ("experiment", "question", "source"), tuple(rows), note, numbers=())


def plan(experiment: Experiment, designs: Mapping[str, Mapping[str, Design]], kind: str) -> list[Table]:
    """What one says, and what it will do on a device of that kind."""
    facts = [("question", experiment.question)]
    for source in experiment.sources:
        where = ", ".join(filter(None, (source.hardware, source.link)))
        facts.append(("source", f"{source.name} ({where})" if where else source.name))
        facts += [("  reported", line) for line in source.reported]
    facts += [("claim", claim.says) for claim in experiment.claims]
    if kind == "emulated":
        facts += [("scaled", line) for line in scaling(experiment, Adjusted())]
    facts += [("note", line) for line in experiment.notes]
    facts += [("afterwards", line) for line in experiment.follow_up]
    found = [Table(experiment.title, ("", experiment.name), tuple(facts), numbers=())]
    for boots, of_workload in designs.items():
        design = next(iter(of_workload.values()))
        arms = tuple((arm.name, spelled(arm.toggles), arm.options.model) for arm in design.arms)
        note = "\n".join(
            [
                f"{design.blocks} blocks of {design.rounds} rounds on each workload, in turn within a boot; "
                f"primary metric {design.primary}, margin {100 * design.margin:.3g}%.",
                *(f"{name}: {_asked(each)}" for name, each in of_workload.items()),
            ]
        )
        found.append(Table(f"Boots: {boots}", ("arm", "settings", "model"), arms, note, numbers=()))
    return found


def _asked(design: Design) -> str:
    """What of a workload is not the default."""
    import msgspec

    from harness.workload import DEFAULT

    asked = msgspec.structs.asdict(design.workload)
    stops = len(asked.pop("stop"))
    plain = {name: value for name, value in asked.items() if value != getattr(DEFAULT, name)}
    return spelled({**plain, **({"idle_stops": stops} if stops else {})}) or "the default"


# ---------------------------------------------------------------------------------------------------------
# What it found


def parts(result: Mapping[str, Any]) -> Iterator[Table]:
    """The tables in the order in which they are read, the claims first."""
    yield claims(result)
    for each in result["tables"]:
        rows = tuple(tuple(map(text, row)) for row in each["rows"])
        shown = {cell["shown"] for row in each["rows"] for cell in row if isinstance(cell, Mapping)}
        note = " ".join(filter(None, [each["note"], CELLS_NOTE if shown & LEVELS else ""]))
        columns = tuple(each["columns"])
        texts = [all(isinstance(row[number], str) for row in each["rows"]) for number in range(len(columns))]
        right = tuple(name for name, only in zip(columns, texts, strict=True) if not only)
        yield Table(each["title"], columns, rows, note, numbers=right)


def claims(result: Mapping[str, Any]) -> Table:
    """What the sources say beside what was measured."""
    here = f"measured here ({result['device']})"
    rows = tuple((each["says"], _where(each), text(each["measured"]), _so(each)) for each in result["claims"])
    columns = ("the source says", "of", here, "so")
    return Table("The source says, measured here", columns, rows, CLAIMS_NOTE, numbers=())


def _so(claim: Mapping[str, Any]) -> str:
    """How a reported number compares with what was measured, and what could have been seen at all."""
    found = [claim["finding"]] if claim["finding"] else []
    if claim["detectable"] is not None:
        found.append(f"a true change of {100 * claim['detectable']:.2g}% would be seen in 4 of 5 such runs")
    return "; ".join(found)


def _where(claim: Mapping[str, Any]) -> str:
    arms = f"{claim['before']} → {claim['after']}" if claim["before"] else claim["after"]
    return f"{claim['metric']}, {claim['workload']}, {arms}"


def text(cell: str | Mapping[str, Any]) -> str:
    """A cell as it is printed, with its interval where it has one."""
    if isinstance(cell, str):
        return cell
    if cell["shown"] == "none":
        return "–"
    found: Mapping[str, Any] = dict.fromkeys(("value", "low", "high", "unit")) | dict(cell)
    value, low, high, unit = found["value"], found["low"], found["high"], found["unit"]
    match cell["shown"]:
        case "value":
            half = "" if low is None else f" ±{number(float(f'{(high - low) / 2:.2g}'))}"
            return f"{number(value)}{half} {unit}".strip()
        case "share":
            half = "" if low is None else f" ±{100 * (high - low) / 2:.2g}"
            return f"{100 * value:.3g}{half}%"
        case "change":
            return f"{percent(value)} {interval({'ci_low': low, 'ci_high': high, 'change': value})}"
        case "delta":
            row = {"change": None, "delta": value, "unit": unit, "ci_low": low, "ci_high": high}
            return f"{difference(row)} {interval(row)}"
        case _:
            return with_unit_of(value, unit)


def with_unit_of(values: Sequence[float], unit: str) -> str:
    """ "12.51/13.29/13.87 ms"."""
    *first, last = values
    return "/".join([*map(number, first), with_unit(last, unit)])


def facts(result: Mapping[str, Any]) -> Iterator[str]:
    """What stands under the conclusion."""
    outputs = result["outputs"]
    if outputs["compared"]:
        yield f"Outputs: {outputs['identical']} of {outputs['compared']} identical."
        yield from filter(None, [divergences.conclusion(outputs)])
    yield from result["extents"]
    yield from result["scaling"]


def page(result: Mapping[str, Any]) -> Page:
    return Page(
        result["conclusion"],
        tuple(facts(result)),
        tuple(parts(result)),
        result["warnings"],
        result["notes"],
        result["follow_up"],
    )


def to_csv(result: Mapping[str, Any]) -> str:
    """One line per cell with a number, unrounded; percentiles one by one."""
    start = (result["experiment"], result["run"], result["device"])
    lines = [
        (*start, "claims", claim["says"], _where(claim), *_numbers(claim["measured"]))
        for claim in result["claims"]
    ]
    for table in result["tables"]:
        for row in table["rows"]:
            label = ", ".join(takewhile(lambda cell: isinstance(cell, str), row))
            for column, cell in zip(table["columns"], row, strict=True):
                if not isinstance(cell, str):
                    for one in _one_by_one(cell):
                        lines.append((*start, table["title"], label, column, *_numbers(one)))
    return csv_text(("experiment", "run", "device", *CSV_COLUMNS), lines)


def _one_by_one(cell: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if cell["shown"] != "percentiles":
        yield cell
        return
    for value in cell["value"]:
        yield {**cell, "value": value}


def _numbers(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell.get(name) for name in ("shown", "value", "low", "high", "unit"))
