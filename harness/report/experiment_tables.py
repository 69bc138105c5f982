"""An experiment as a person reads it: what there is, what one will do, and what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from overlap_bench.harness.analysis.experiment_result import (
    Cell,
    Change,
    ClaimResult,
    ExperimentResult,
    Level,
    Measured,
    NotMeasured,
    Percentiles,
    Share,
)
from overlap_bench.harness.analysis.result import MetricRow
from overlap_bench.harness.analysis.warnings import texts
from overlap_bench.harness.analysis.words import difference, interval, outputs_that_differ
from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.experiment_file import Experiment, Plan
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.report.page import Page, Table, csv_text
from overlap_bench.harness.report.tables import weak_check
from overlap_bench.harness.workload.workload import DEFAULT

CLAIMS_NOTE = (
    "change = after/before − 1: for times, negative is faster. Interval: 95%, t over trials of fresh boots. "
    "The first line is what the experiment decides, the others are descriptive. What a source measured on "
    "its hardware and what is measured here never become one number."
)
CELLS_NOTE = (
    "Levels are means over trials, geometric where a change is in percent. [ ]: 95% interval over trials; ±: "
    "half its width."
)
CSV_COLUMNS = ("table", "row", "column", "shown", "value", "low", "high", "unit")


def listing(found: Sequence[Experiment]) -> Table:
    rows = ((each.name, each.question, "; ".join(one.name for one in each.sources)) for each in found)
    note = "bench experiment show NAME tells what is run and what was reported; ... run NAME runs it"
    return Table("Experiments", ("experiment", "question", "source"), tuple(rows), note, numbers=())


def plan(planned: Plan) -> Iterator[Table]:
    experiment = planned.experiment
    facts = [("question", experiment.question)]
    for source in experiment.sources:
        where = ", ".join(filter(None, (source.hardware, source.link)))
        facts.append(("source", f"{source.name} ({where})" if where else source.name))
        facts += [("  reported", line) for line in source.reported]
    facts += [("claim", claim.says) for claim in experiment.claims]
    facts += [("scaled", line) for line in planned.scaling()]
    facts += [("note", line) for line in experiment.notes]
    facts += [("afterwards", line) for line in experiment.follow_up]
    yield Table(experiment.title, ("", experiment.name), tuple(facts), numbers=())
    for boots, of_workload in planned.designs().items():
        design = next(iter(of_workload.values()))
        arms = tuple((arm.name, spelled(arm.toggles), arm.options.model) for arm in design.arms)
        segments = f" and {design.segments} interleaved rounds" if design.segments else ""
        lines = [
            f"{design.blocks} trials of {design.rounds} rounds{segments} on each workload, in turn within a "
            "boot; "
            f"primary metric {design.primary}, margin {100 * design.margin:.3g}%.",
            *(f"{name}: {_changed(each)}" for name, each in of_workload.items()),
        ]
        yield Table(f"Boots: {boots}", ("arm", "settings", "model"), arms, "\n".join(lines), numbers=())


def _changed(design: Design) -> str:
    """What of a workload is not the default."""
    values = msgspec.structs.asdict(design.workload)
    stops = len(values.pop("stop"))
    plain = {name: value for name, value in values.items() if value != getattr(DEFAULT, name)}
    return spelled({**plain, **({"idle_stops": stops} if stops else {})}) or "the default"


def page(result: ExperimentResult) -> Page:
    return Page(
        result.conclusion,
        tuple(facts(result)),
        (claims(result), *tables(result)),
        texts(result.warnings),
        result.notes,
        result.follow_up,
    )


def facts(result: ExperimentResult) -> Iterator[str]:
    outputs = result.outputs
    if outputs.compared:
        equal = f"Outputs: {outputs.identical} of {outputs.compared} identical."
        yield " ".join([equal, *weak_check(outputs)])
        yield from filter(None, [outputs_that_differ(outputs)])
    yield from result.extents
    yield from result.scaling


def claims(result: ExperimentResult) -> Table:
    columns = ("the source says", "of", f"measured here ({result.device})", "so")
    rows = tuple((each.says, _where(each), text(each.measured), _so(each)) for each in result.claims)
    return Table("The source says, measured here", columns, rows, CLAIMS_NOTE, numbers=())


def _where(claim: ClaimResult) -> str:
    arms = f"{claim.before} → {claim.after}" if claim.before else claim.after
    return f"{claim.metric}, {claim.workload}, {arms}"


def _so(claim: ClaimResult) -> str:
    """How a reported number compares with what was measured, and what could have been seen at all."""
    found = [claim.finding] if claim.finding else []
    if claim.detectable is not None:
        found.append(f"a true change of {100 * claim.detectable:.2g}% would be seen in 4 of 5 such runs")
    return "; ".join(found)


def tables(result: ExperimentResult) -> Iterator[Table]:
    for each in result.tables:
        levels = any(isinstance(cell, Level | Percentiles | Share) for row in each.rows for cell in row)
        note = " ".join(filter(None, [each.note, CELLS_NOTE if levels else ""]))
        right = tuple(
            name
            for place, name in enumerate(each.columns)
            if not all(isinstance(row[place], str) for row in each.rows)
        )
        rows = tuple(tuple(map(text, row)) for row in each.rows)
        yield Table(each.title, tuple(each.columns), rows, note, numbers=right)


def text(cell: Cell) -> str:
    """A cell as it is printed, with its interval where it has one."""
    match cell:
        case str():
            return cell
        case NotMeasured():
            return "–"
        case Percentiles():
            return f"{'/'.join(map(number, cell.value))} {cell.unit}".strip()
        case Share():
            return f"{100 * cell.value:.3g} ±{100 * (cell.high - cell.low) / 2:.2g}%"
        case Level():
            half = number(float(f"{(cell.high - cell.low) / 2:.2g}"))
            return f"{number(cell.value)} ±{half} {cell.unit}".strip()
        case Measured():
            change = cell.value if isinstance(cell, Change) else None
            row = MetricRow(unit=cell.unit, better="", change=change, delta=cell.value, ci_low=cell.low,
                            ci_high=cell.high)  # fmt: skip
            return f"{difference(row)} {interval(row)}"


def to_csv(result: ExperimentResult) -> str:
    """One line per cell with a number, unrounded; percentiles one by one."""
    start = (result.experiment, result.run, result.device)
    lines = [
        (*start, "claims", each.says, _where(each), *numbers)
        for each in result.claims
        for numbers in _numbers(each.measured)
    ]
    for table in result.tables:
        for row in table.rows:
            label = ", ".join(map(text, takewhile(lambda cell: isinstance(cell, str), row)))
            for column, cell in zip(table.columns, row, strict=True):
                lines += [(*start, table.title, label, column, *numbers) for numbers in _numbers(cell)]
    return csv_text(("experiment", "run", "device", *CSV_COLUMNS), lines)


def _numbers(cell: Cell) -> Iterator[tuple[object, ...]]:
    if isinstance(cell, str):
        return
    plain = msgspec.to_builtins(cell)
    for value in cell.value if isinstance(cell, Percentiles) else [plain.get("value")]:
        yield (plain["shown"], value, *(plain.get(name) for name in ("low", "high", "unit")))
