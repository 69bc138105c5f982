"""What a gate says of a run, as a person reads it, before the comparison that it judged.

Input is the object of `--format json` with its part `gate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness import divergences, tables
from harness.pages import Table, markdown_table, terminal_table
from harness.spelling import blocks_of, number, percent

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        "undecided": f"{', '.join(by_verdict['undecided'])} may have regressed by more than {limit}, or not, "
        f"{where}; more blocks or a quieter machine would tell",
        "pass": f"no metric regressed by more than {limit} {where}",
    }
    outputs = divergences.conclusion(comparison["outputs"]).rstrip(".")
    metrics = next(each for each in by_verdict if by_verdict[each])
    reason = "; ".join(filter(None, dict.fromkeys((outputs, *found["faults"], reasons[metrics]))))
    return f"Gate: {found['verdict'].upper()}. {comparison['variant']}: {reason}."


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


def to_terminal(result: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The same for a rich console, then the comparison."""
    from rich.text import Text

    yield Text(conclusion(result), style="bold")
    yield from terminal_table(regression_table(result), width)
    yield from tables.to_terminal(result, width)
