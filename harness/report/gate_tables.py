"""What a gate says of a run, as a person reads it, before the comparison that it judged.

Input is a `Result` with its part `gate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import astuple

from harness.analysis import gate
from harness.analysis.result import GateResult, History, Judged, Moved, Result
from harness.analysis.words import interval, outputs_that_differ
from harness.common.formatting import blocks_of, number, percent
from harness.report import tables
from harness.report.page import Page, Table, csv_text, markdown_page, markdown_table, tabulated
from harness.stats.change_points import LEVEL, SHORTEST
from harness.store.files import append_step_summary, prepare, write_json, write_text


def conclusion(result: Result) -> str:
    """One sentence: what the gate says, of how much, and why."""
    found, comparison = gate_of(result), result.comparisons[0]
    by_verdict = {
        each: [name for name, row in found.metrics.items() if row.verdict == each]
        for each in ("fail", "undecided", "pass")
    }
    limit = _share(found.max_regression)
    where = f"over {blocks_of(comparison.blocks)} on the {result.device} device"
    reasons = {
        "fail": f"{', '.join(by_verdict['fail'])} regressed by more than {limit} {where}",
        "undecided": "; ".join(_undecided(found.metrics, limit, where)),
        "pass": f"no metric regressed by more than {limit} {where}",
    }
    outputs = outputs_that_differ(comparison.outputs).rstrip(".")
    metrics = next(each for each in by_verdict if by_verdict[each])
    parts = dict.fromkeys((outputs, *found.faults, *found.doubts, reasons[metrics]))
    reason = "; ".join(filter(None, parts))
    return f"Gate: {found.verdict.upper()}. {comparison.variant}: {reason}."


def _undecided(rows: Mapping[str, Judged], limit: str, where: str) -> Iterator[str]:
    """What is open about the metrics that are undecided: more blocks tell nothing of the offered load."""
    undecided = {name: row.remark for name, row in rows.items() if row.verdict == "undecided"}
    names = [name for name, remark in undecided.items() if remark != gate.OFFERED]
    if names:
        bounds = [_share(worst) for name in names if (worst := rows[name].worst) is not None]
        excluded = f"more than {', '.join(bounds)}" if bounds else "nothing"
        yield (
            f"{', '.join(names)} may have regressed by more than {limit}, or not, {where} (ruled out: "
            f"{excluded}); more blocks or a quieter machine would tell"
        )
    for name in undecided:
        if name not in names:
            yield f"{name} {gate.OFFERED}, {where}: no number of blocks would tell"


def regression_table(result: Result) -> Table:
    """What was gated: the change, the bounds of the regression, and what could be ruled out."""
    found = gate_of(result)
    columns: dict[str, Callable[[tuple[str, Judged]], str]] = {
        "metric": lambda row: row[0],
        "base": lambda row: number(row[1].before),
        "head": lambda row: number(row[1].after),
        "change": lambda row: percent(row[1].change),
        "at best": lambda row: percent(row[1].best) or "–",
        "at worst": lambda row: percent(row[1].worst) or "–",
        "can rule out": lambda row: "–" if (size := row[1].excludable) is None else _share(size),
        "gate": lambda row: row[1].verdict + (f" ({row[1].remark})" if row[1].remark else ""),
    }
    note = (
        f"At best and at worst: bounds of the regression, {100 * found.confidence:.4g}% each; positive is "
        f"worse. Pass: at worst within {_share(found.max_regression)}; fail: at best beyond it, corrected "
        "by Holm. Can rule out: the smallest regression that this machine and so many blocks exclude in 4 of "
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
        note = f"{against}: of fewer than {SHORTEST} nothing can be said."
    else:
        scatters = ", ".join(
            f"{name} {_share(each)}" for name, each in found.scatter.items() if each is not None
        )
        note = (
            f"{'No change point in ' * (not found.moved)}{against}. SD within a level: {scatters}. A change "
            f"point's split is matched in fewer than {LEVEL:.1%} of all orders; its interval is of 95%, if "
            "the place is right. Others: none of the machines that measured before it measured after it."
        )
    return tabulated("Change points", found.moved, columns, note, numbers=("change", "gates since"))


def parts(result: Result) -> Iterator[Table]:
    """What a gate adds to the comparison that it judged."""
    yield regression_table(result)
    if result.history is not None:
        yield history_table(result.history)


def _share(size: float) -> str:
    return f"{100 * size:.3g}%"


def to_markdown(result: Result) -> str:
    """The summary of a gate, with the whole comparison folded away below."""
    lines = [f"**{conclusion(result)}**", ""]
    for table in parts(result):
        lines += markdown_table(table)
    whole = "\n".join(map(markdown_page, tables.pages(result)))
    lines += ["<details><summary>The whole comparison</summary>", "", whole, "</details>", ""]
    return "\n".join(lines)


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
    }
    lines = [
        [*about.values(), name, comparison.metrics[name].unit, *astuple(row), *all_in_all.values()]
        for name, row in found.metrics.items()
    ]
    return csv_text((*about, "metric", "unit", *Judged.__struct_fields__, *all_in_all), lines)


def pages(result: Result) -> Iterator[Page]:
    """What the gate says, then the comparison."""
    yield Page(conclusion(result), (), tuple(parts(result)), ())
    yield from tables.pages(result)


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
