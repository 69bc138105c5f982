"""What a gate says of a run, as a person reads it, before the comparison that it judged.

Input is the object of `--format json` with its part `gate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness import divergences, gate, tables
from harness.pages import Table, csv_text, markdown_table, terminal_table
from harness.spelling import blocks_of, number, percent

if TYPE_CHECKING:
    from rich.console import RenderableType


CSV_COLUMNS = ("before", "after", "change", "best", "worst", "p", "excludable", "verdict", "remark")


def conclusion(result: Mapping[str, Any]) -> str:
    """One sentence: what the gate says, of how much, and why."""
    found, comparison = result["gate"], result["comparisons"][0]
    by_verdict = {
        each: [name for name, row in found["metrics"].items() if row["verdict"] == each]
        for each in ("fail", "undecided", "pass")
    }
    limit = f"{100 * found['max_regression']:.3g}%"
    where = f"over {blocks_of(comparison['blocks'])} on the {result['device']} device"
    reasons = {
        "fail": f"{', '.join(by_verdict['fail'])} regressed by more than {limit} {where}",
        "undecided": "; ".join(_undecided(found["metrics"], limit, where)),
        "pass": f"no metric regressed by more than {limit} {where}",
    }
    outputs = divergences.conclusion(comparison["outputs"]).rstrip(".")
    metrics = next(each for each in by_verdict if by_verdict[each])
    parts = dict.fromkeys((outputs, *found["faults"], *found["doubts"], reasons[metrics]))
    reason = "; ".join(filter(None, parts))
    return f"Gate: {found['verdict'].upper()}. {comparison['variant']}: {reason}."


def _undecided(rows: Mapping[str, Mapping[str, Any]], limit: str, where: str) -> Iterator[str]:
    """What is open about the metrics that are undecided: more blocks tell nothing of the offered load."""
    undecided = {name: row["remark"] for name, row in rows.items() if row["verdict"] == "undecided"}
    names = [name for name, remark in undecided.items() if remark != gate.OFFERED]
    if names:
        yield (
            f"{', '.join(names)} may have regressed by more than {limit}, or not, {where}; more blocks or a "
            "quieter machine would tell"
        )
    for name in undecided:
        if name not in names:
            yield f"{name} {gate.OFFERED}, {where}: no number of blocks would tell"


def regression_table(result: Mapping[str, Any]) -> Table:
    """What was gated: the change, the bounds of the regression, and what could be ruled out."""
    found = result["gate"]
    rows = tuple(
        (
            name,
            number(row["before"]),
            number(row["after"]),
            percent(row["change"]),
            percent(row["best"]) or "–",
            percent(row["worst"]) or "–",
            "–" if row["excludable"] is None else f"{100 * row['excludable']:.3g}%",
            row["verdict"] + (f" ({row['remark']})" if row["remark"] else ""),
        )
        for name, row in found["metrics"].items()
    )
    sides = 100 * found["confidence"]
    return Table(
        "Gate",
        ("metric", "base", "head", "change", "at best", "at worst", "can rule out", "gate"),
        rows,
        f"At best and at worst: bounds of the regression, {sides:.4g}% each; positive is worse. Pass: at "
        f"worst within {100 * found['max_regression']:.3g}%; fail: at best beyond it, corrected by Holm. Can "
        "rule out: the smallest regression that this machine and so many blocks exclude in 4 of 5 runs "
        "without a change.",
        numbers=("base", "head", "change", "at best", "at worst", "can rule out"),
    )


def to_markdown(result: Mapping[str, Any]) -> str:
    """The summary of a gate, with the whole comparison folded away below."""
    lines = [f"**{conclusion(result)}**", "", *markdown_table(regression_table(result))]
    whole = tables.to_markdown(result)
    lines += ["<details><summary>The whole comparison</summary>", "", whole, "</details>", ""]
    return "\n".join(lines)


def to_csv(result: Mapping[str, Any]) -> str:
    """One line per gated metric, unrounded: `best` and `worst` are bounds of the regression, at `confidence`
    each, and `gate` the verdict of all."""
    found, comparison = result["gate"], result["comparisons"][0]
    about = {"run": result["run"], "device": result["device"], "variant": comparison["variant"]}
    all_in_all = {
        "max_regression": found["max_regression"],
        "confidence": found["confidence"],
        "gate": found["verdict"],
        "faults": "; ".join(found["faults"]),
        "doubts": "; ".join(found["doubts"]),
    }
    lines = []
    for name, row in found["metrics"].items():
        unit = comparison["metrics"][name]["unit"]
        judged = (row[column] for column in CSV_COLUMNS)
        lines.append([*about.values(), name, unit, *judged, *all_in_all.values()])
    return csv_text((*about, "metric", "unit", *CSV_COLUMNS, *all_in_all), lines)


def to_terminal(result: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The same for a rich console, then the comparison."""
    from rich.text import Text

    yield Text(conclusion(result), style="bold")
    yield from terminal_table(regression_table(result), width)
    yield from tables.to_terminal(result, width)
