"""What a gate says of a run, as a person reads it, before the comparison that it judged.

Input is a `Result` with its part `gate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from pathlib import Path

from msgspec.structs import astuple

from overlap_bench.harness.analysis import gate
from overlap_bench.harness.analysis.result import GateResult, History, Judged, Moved, Result
from overlap_bench.harness.analysis.verdict_warnings import FEASIBLE_S
from overlap_bench.harness.analysis.words import in_step, interval, outputs_that_differ, per_step
from overlap_bench.harness.common.formatting import blocks_of, duration, number, percent, share
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.report import sections, tables
from overlap_bench.harness.report.page import PER_STEP, Page, Table, csv_text, markdown_page, tabulated
from overlap_bench.harness.stats.change_points import LEVEL, SHORTEST
from overlap_bench.harness.store.files import append_step_summary, prepare, write_json, write_text

NEAR = 0.25  # of the limit: a change that is no farther from it is at it


def conclusion(result: Result) -> str:
    found, comparison = gate_of(result), result.comparisons[0]
    by_verdict = {
        each: [name for name, row in found.metrics.items() if row.verdict == each]
        for each in ("fail", "undecided", "pass")
    }
    limit = share(found.max_regression)
    where = f"over {blocks_of(comparison.blocks)} on the {result.device} device"
    reasons = {
        "fail": f"{', '.join(by_verdict['fail'])} regressed by more than {limit} {where}",
        "undecided": "; ".join(_undecided(found, where)),
        "pass": f"no metric regressed by more than {limit} {where}",
    }
    outputs = outputs_that_differ(comparison.outputs).rstrip(".")
    metrics = next(each for each in by_verdict if by_verdict[each])
    parts = dict.fromkeys((outputs, *found.faults, *found.doubts, reasons[metrics]))
    reason = "; ".join(filter(None, parts))
    other = " by another limit or metric than it was measured for" if found.unplanned else ""
    return f"Gate: {found.verdict.upper()}{other}. {comparison.variant}: {reason}."


def _undecided(found: GateResult, where: str) -> Iterator[str]:
    """What is open about the metrics that are undecided: where each lies, which limits these blocks would
    have decided, and whether more of them would decide this one."""
    limit = found.max_regression
    rows = {name: row for name, row in found.metrics.items() if row.verdict == "undecided"}
    bounded = {name: row for name, row in rows.items() if not row.remark}
    for name, row in bounded.items():
        change = percent(row.change) + in_step(name, row.before, row.after)
        lies = "at" if _is_at(row, limit) else "which may be above or below"
        yield (
            f"{name} changed by {change} {where}, {lies} the limit of {share(limit)}: "
            f"regression {percent(row.best)} at best, {percent(row.worst)} at worst"
        )
    if bounded:
        yield from [] if found.doubts else [_limits(found)]
        yield _more_blocks([*bounded.values()], found.seconds_per_block)
    for name, row in rows.items():
        if row.remark == gate.OFFERED:
            yield f"{name} {gate.OFFERED}, {where}: no number of trials would tell"
        elif row.remark:
            yield f"{name} can't be judged {where} ({row.remark}): that takes more trials, 6 as a rule"


def _is_at(row: Judged, limit: float) -> bool:
    """Whether the change is so close to the limit that this is why it is undecided, not the noise alone."""
    assert row.best is not None
    assert row.worst is not None
    return row.more_blocks is None or abs((row.best + row.worst) / 2 - limit) <= NEAR * limit


def _limits(found: GateResult) -> str:
    """Rounded so that they would have decided it."""
    passes = None if found.passes_from is None else ceil(1e4 * found.passes_from)
    fails = None if found.fails_to is None else floor(1e4 * found.fails_to)
    passed = f"a limit of {passes / 100:g}%" if passes and passes < 1e4 else "no limit"
    failed = f"one of {fails / 100:g}%" if fails else "none"
    return f"{passed} would have passed, {failed} failed"


def _more_blocks(rows: Sequence[Judged], seconds: float | None) -> str:
    needed = [row.more_blocks for row in rows]
    most = max(each or 0 for each in needed)
    if None in needed:
        return "more trials would hardly tell"
    if seconds is not None and most * seconds > FEASIBLE_S:
        return f"more trials would hardly tell: {most} take {duration(most * seconds)}"
    took = "" if seconds is None else f", about {duration(most * seconds)},"
    return f"a fresh gate with --trials {most}{took} would tell in 4 of 5 cases"


def late(result: Result) -> Iterator[str]:
    """What is judged here without having been declared before the first block."""
    if said := "; ".join(gate_of(result).unplanned):
        yield f"{said[:1].upper()}{said[1:]}."


def regression_table(result: Result) -> Table:
    """What was gated: the change, the bounds of the regression, and what could be ruled out."""
    found = gate_of(result)
    steps = any(map(definitions.of_a_step, found.metrics))
    columns: dict[str, Callable[[tuple[str, Judged]], str]] = {
        "metric": lambda row: row[0],
        "base": lambda row: number(row[1].before),
        "head": lambda row: number(row[1].after),
        "change": lambda row: percent(row[1].change),
        **({PER_STEP: lambda row: per_step(row[0], row[1].before, row[1].after)} if steps else {}),
        "at best": lambda row: percent(row[1].best) or "–",
        "at worst": lambda row: percent(row[1].worst) or "–",
        "can rule out": lambda row: "–" if (size := row[1].excludable) is None else share(size),
        "gate": lambda row: row[1].verdict + (f" ({row[1].remark})" if row[1].remark else ""),
    }
    note = (
        f"At best and at worst: bounds of the regression, {100 * found.confidence:.4g}% each; positive is "
        f"worse. Pass: at worst within {share(found.max_regression)}; fail: at best beyond it, corrected "
        "by Holm. Can rule out: the smallest regression that this machine and so many trials exclude in 4 of "
        "5 runs without a change."
    )
    return tabulated("Gate", found.metrics.items(), columns, note, numbers=tuple(columns)[1:-1])


def history_table(found: History) -> Table:
    """Where the level moved, though each gate may have passed."""
    columns: dict[str, Callable[[Moved], str]] = {
        "metric": lambda row: row.metric,
        "change": lambda row: percent(row.change),
        "interval": interval,
        "level": lambda row: "worse" if row.worse else "better",
        "after": lambda row: row.last[:10],
        "from": lambda row: f"{row.first[:10]} ({row.when[:10]})",
        "gates since": lambda row: str(row.gates),
        "machines": lambda row: "others" if row.other_machines else "",
    }
    against = f"{found.gates} gate{'s' if found.gates != 1 else ''} against {found.base[:10]}"
    if found.gates < SHORTEST:
        note = f"{against}: fewer than {SHORTEST} say nothing."
    else:
        scatters = ", ".join(
            f"{name} {share(each)}" for name, each in found.scatter.items() if each is not None
        )
        note = (
            f"{'No change point in ' * (not found.moved)}{against}. SD within a level: {scatters}. Fewer "
            f"than {LEVEL:.1%} of random orders of these gates split as clearly; the interval (95%) assumes "
            "that the place is right. Machines, others: none measured both before and after it."
        )
    return tabulated("Change points", found.moved, columns, note, numbers=("change", "gates since"))


def to_markdown(result: Result) -> str:
    """The summary of a gate, with the whole comparison folded away below."""
    gated, comparison = page(result), result.comparisons[0]
    of_code = filter(None, (tables.changed_code(comparison), tables.overlaid(comparison)))
    summary = markdown_page(replace(gated, lines=(*gated.lines, *of_code)))
    whole = "\n".join(map(markdown_page, sections.pages(result)))
    folded = ["<details><summary>The whole comparison</summary>", "", whole, "</details>", ""]
    return "\n".join([summary, *folded])


def to_csv(result: Result) -> str:
    """One line per gated metric, unrounded: `best` and `worst` are bounds of the regression, at `confidence`
    each, and `gate` the verdict of all."""
    found, comparison = gate_of(result), result.comparisons[0]
    about = {"run": result.run, "device": result.device, "variant": comparison.variant}
    all_in_all = {
        "max_regression": found.max_regression,
        "confidence": found.confidence,
        "gate": found.verdict,
        "faults": "; ".join(found.faults),
        "doubts": "; ".join(found.doubts),
        "unplanned": "; ".join(found.unplanned),
    }
    lines = [
        [*about.values(), name, comparison.metrics[name].unit, *astuple(row), *all_in_all.values()]
        for name, row in found.metrics.items()
    ]
    return csv_text((*about, "metric", "unit", *Judged.__struct_encode_fields__, *all_in_all), lines)


def page(result: Result, whole: bool = True) -> Page:
    """What the gate says; that of its comparison comes behind it."""
    judged = regression_table(result)
    shown = [judged if whole else replace(judged, note="")]
    if result.history is not None:
        shown.append(history_table(result.history))
    return Page(conclusion(result), tuple(late(result)), tuple(shown), ())


def gate_of(result: Result) -> GateResult:
    assert result.gate is not None
    return result.gate


SUMMARY = "gate.md"
BENCHMARKS = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}


def write(folder: Path, result: Result, environment: Mapping[str, str] = os.environ) -> None:
    """In `folder`: gate.md, and what github-action-benchmark reads, one file for metrics that are better
    smaller and one for the others; on GitHub also the summary of the step. Raises BadSetting where there can
    be no such folder, and WriteFailed."""
    prepare(folder)
    text = to_markdown(result)
    write_text(folder / SUMMARY, text)
    for better, name in BENCHMARKS.items():
        rows = gate.benchmark(result.comparisons[0], gate_of(result), better)
        if rows:
            write_json(folder / name, rows)
        else:  # an earlier gate's would be taken for this one's
            (folder / name).unlink(missing_ok=True)
    append_step_summary(text, environment)
