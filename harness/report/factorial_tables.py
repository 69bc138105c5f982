"""What a factorial found, as a person reads it. Input is a `Result` with its part `factorial`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap_bench.harness.analysis.factorial import CSV_COLUMNS, rows
from overlap_bench.harness.analysis.result import Comparison, Effect, Effects, FactorialResult, Result
from overlap_bench.harness.analysis.warnings import texts
from overlap_bench.harness.analysis.words import confidence, difference, interval
from overlap_bench.harness.common.formatting import blocks_of, percent, with_unit
from overlap_bench.harness.report.page import Page, Table, csv_text
from overlap_bench.harness.report.tables import stopped, weak_check
from overlap_bench.harness.stats.contrasts import label

NOTE = (
    "Alone: the others at their before. With the others: the others at their after. On average: over all "
    "settings of the others. Two toggles (×): half the difference between what one changes with the other at "
    "its after and at its before; 0 if they don't affect each other. Weaker (stronger) together: both gain "
    "less (more) than the sum of each alone; same together: that whole difference, not half of it, is within "
    "the margin. Verdicts are at 5% over all main effects and pairs together (Holm), "
    "margin ±{margin:.3g}%; all else is descriptive. Intervals: {confidence}%, t over trials."
)


def conclusion(result: Result) -> str:
    first, effects = result.comparisons[0], effects_of(result)
    mains = [row for row in effects.effects if len(row.effect) == 1]
    each = ", ".join(f"{row.effect[0]} {_change(row)} ({row.verdict or 'no verdict'})" for row in mains)
    assumed = " and ".join(taken_for_none(mains))
    taking = f", taking {assumed} as zero" if assumed else ""
    said = f"On average over the settings of the others{taking}, {first.primary} changes by: {each}"
    if effects.together is not None:
        said += f"; by all together {_change(effects.together)}"
    said += f"; over {blocks_of(factorial_of(result).blocks or first.blocks)} on the {result.device} device."
    differ = [name for name, each in _by_setting(result).items() if each.outputs.unexplained > 0]
    if differ:
        said += f" OUTPUTS DIFFER in {', '.join(differ)}."
    return said


def taken_for_none(rows: Sequence[Effect]) -> list[str]:
    """The effects that these estimates also contain, since settings were left out; taken to be zero."""
    return list(dict.fromkeys(label(each) for row in rows for each in row.assumes))


def factorial_of(result: Result) -> FactorialResult:
    assert result.factorial is not None
    return result.factorial


def effects_of(result: Result) -> Effects:
    """On the primary."""
    return factorial_of(result).metrics[result.comparisons[0].primary]


def _by_setting(result: Result) -> dict[str, Comparison]:
    """The comparison of each setting with the first, by the setting's name."""
    _, *others = factorial_of(result).settings
    return dict(zip(others, result.comparisons, strict=True))


def _change(row: Effect | None) -> str:
    return "–" if row is None else f"{percent(row.change)} {interval(row)}".rstrip()


def page(result: Result) -> Page:
    """All of it; the warnings are those of the run as a whole."""
    found = factorial_of(result)
    return Page(conclusion(result), (stopped(result),), tuple(parts(result)), texts(found.warnings))


def parts(result: Result) -> Iterator[Table]:
    yield effects_table(result)
    yield settings_table(result)
    found = factorial_of(result)
    if found.left_out:
        left_out = tuple((each.name, each.reason) for each in found.left_out)
        yield Table("Left out", ("setting", "why"), left_out, numbers=())
    if found.aliased:
        rows = tuple(
            (label(each.effect), ", ".join(label(other) for other in each.others) or "the mean")
            for each in found.aliased
        )
        note = "These effects are taken as zero: with settings left out, they are part of those beside them."
        yield Table("Can't be told apart", ("effect", "from"), rows, note, numbers=())


def effects_table(result: Result) -> Table:
    """Each toggle's effect on the primary alone, with the others and on average, then the interactions."""
    comparison, effects = result.comparisons[0], effects_of(result)
    rows = []
    for row in effects.effects:
        ends = ["", ""]
        if len(row.effect) == 1:
            (name,) = row.effect
            ends = [_change(effects.alone[name]), _change(effects.with_others[name])]
        verdict = row.verdict or ("descriptive" if row.ci_low is not None else "")
        starred = label(row.effect) + ("*" if row.assumes else "")
        rows.append((starred, *ends, percent(row.change), interval(row), verdict))
    if effects.together is not None:
        cells = (percent(effects.together.change), interval(effects.together), "descriptive")
        rows.append(("all, against none", "", "", *cells))
    note = NOTE.format(margin=100 * comparison.margin, confidence=confidence(comparison.confidence))
    if any(row.assumes for row in effects.effects):
        note += " *: if the effects listed beside it below are zero."
    columns = ("toggle", "alone", "with the others", "on average", "interval", "verdict")
    return Table(f"Effects on {comparison.primary}", columns, tuple(rows), note, numbers=("on average",))


def settings_table(result: Result) -> Table:
    """Each setting with its choices, the primary, and the change against the first."""
    primary, found, effects = result.comparisons[0].primary, factorial_of(result), effects_of(result)
    changes = {name: each.metrics[primary] for name, each in _by_setting(result).items()}
    rows = []
    for arm, choices in found.settings.items():
        change = (difference(changes[arm]), interval(changes[arm])) if arm in changes else ("", "")
        level = with_unit(effects.settings[arm], effects.unit)
        rows.append((*(choices[each.toggle] for each in found.factors), level, *change))
    outputs = [each.outputs for each in result.comparisons]
    identical, compared = (sum(each.identical for each in outputs), sum(each.compared for each in outputs))
    note = f"Outputs: {identical} of {compared} requests have the tokens of the first setting."
    ties = sum(each.near_ties or 0 for each in outputs)
    note += f" {ties} others differ at near-ties." if ties else ""
    note = " ".join([note, *dict.fromkeys(line for each in outputs for line in weak_check(each))])
    columns = (*(each.toggle for each in found.factors), primary, "change", "interval")
    return Table("Settings", columns, tuple(rows), note, numbers=(primary, "change"))


def to_csv(result: Result) -> str:
    """One line per metric and effect, unrounded; `where`: alone, with_others, average or together."""
    columns = ("metric", "effect", "where", *CSV_COLUMNS)
    lines = [
        (result.run, result.device, *(row[column] for column in columns))
        for row in rows(factorial_of(result))
    ]
    return csv_text(("run", "device", *columns), lines)
