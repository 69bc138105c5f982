"""What a factorial found, as a person reads it. Input is the object of `--format json` with its part
`factorial`, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import divergences, tables
from harness.factorial import label
from harness.pages import Page, Table, csv_text
from harness.spelling import blocks_of, confidence, difference, interval, percent, with_unit

NOTE = (
    "Alone: the others at their before. With the others: the others at their after. On average: over all "
    "settings of the others; of two toggles (×), half of what the change of one differs by between the "
    "other's after and before, so 0 where each gives the same in any company. Weaker (stronger) together: "
    "both give less (more) gain than each without the other comes to; same together: all of that difference, "
    "not half, is within the margin. Verdicts are at 5% over all main effects and pairs together (Holm), "
    "margin ±{margin:.3g}%; all else is descriptive. Intervals: {confidence}%, t over blocks."
)
CSV_COLUMNS = ("change", "ci_low", "ci_high", "sd", "p", "p_adjusted", "verdict")


def conclusion(result: Mapping[str, Any]) -> str:
    """One sentence: what all toggles give together, what each gives on average, and whether outputs agree."""
    first, found = result["comparisons"][0], result["factorial"]
    primary = first["primary"]
    effects = found["metrics"][primary]
    blocks = blocks_of(first["blocks"])
    mains = [row for row in effects["effects"] if len(row["effect"]) == 1]
    each = ", ".join(f"{row['effect'][0]} {_change(row)} ({row['verdict'] or 'no verdict'})" for row in mains)
    assumed = " and ".join(taken_for_none(mains))
    taking = f", taking {assumed} as zero" if assumed else ""
    said = f"On average over the settings of the others{taking}, {primary} changes by: {each}"
    if effects["together"] is not None:
        said += f"; by all together {_change(effects['together'])}"
    said += f"; over {blocks} on the {result['device']} device."
    differ = [name for name, each in _by_setting(result).items() if _differ(each["outputs"])]
    if differ:
        said += f" OUTPUTS DIFFER in {', '.join(differ)}."
    return said


def taken_for_none(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effects that these estimates also contain, since settings were left out; taken to be zero."""
    return list(dict.fromkeys(label(each) for row in rows for each in row["assumes"]))


def _differ(outputs: Mapping[str, Any]) -> bool:
    return divergences.unexplained(outputs) > 0


def _by_setting(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The comparison of each setting with the first, by the setting's name."""
    _, *others = result["factorial"]["settings"]
    return dict(zip(others, result["comparisons"], strict=True))


def _change(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{percent(row['change'])} {interval(row)}".rstrip()


def page(result: Mapping[str, Any]) -> Page:
    """All of it; the warnings are those of the run as a whole."""
    warnings = result["factorial"]["warnings"]
    return Page(conclusion(result), (tables.stopped(result),), tuple(parts(result)), warnings)


def parts(result: Mapping[str, Any]) -> Iterator[Table]:
    """The tables, in the order in which they are read."""
    yield effects_table(result)
    yield settings_table(result)
    found = result["factorial"]
    if found["left_out"]:
        yield Table(
            "Left out",
            ("setting", "why"),
            tuple((each["name"], each["reason"]) for each in found["left_out"]),
            numbers=(),
        )
    if found["aliased"]:
        rows = tuple(
            (label(each["effect"]), ", ".join(label(other) for other in each["with"]) or "the mean")
            for each in found["aliased"]
        )
        note = "These effects are taken as zero: with settings left out, they are part of those beside them."
        yield Table("Can't be told apart", ("effect", "from"), rows, note, numbers=())


def effects_table(result: Mapping[str, Any]) -> Table:
    """Each toggle's effect on the primary alone, with the others and on average, then the interactions."""
    comparison, found = result["comparisons"][0], result["factorial"]
    effects = found["metrics"][comparison["primary"]]
    rows = []
    for row in effects["effects"]:
        (name, *more) = row["effect"]
        ends = (effects["alone"][name], effects["with_others"][name])
        rows.append(
            (
                label(row["effect"]) + ("*" if row["assumes"] else ""),
                *(("", "") if more else map(_change, ends)),
                percent(row["change"]),
                interval(row),
                row["verdict"] or ("descriptive" if row["ci_low"] is not None else ""),
            )
        )
    if effects["together"] is not None:
        cells = (percent(effects["together"]["change"]), interval(effects["together"]), "descriptive")
        rows.append(("all, against none", "", "", *cells))
    note = NOTE.format(margin=100 * comparison["margin"], confidence=confidence(comparison))
    if any(row["assumes"] for row in effects["effects"]):
        note += " *: as if the effects below that can't be told from it were zero."
    return Table(
        f"Effects on {comparison['primary']}",
        ("toggle", "alone", "with the others", "on average", "interval", "verdict"),
        tuple(rows),
        note,
        numbers=("on average",),
    )


def settings_table(result: Mapping[str, Any]) -> Table:
    """Each setting with its choices, the primary, and the change against the first."""
    primary, found = result["comparisons"][0]["primary"], result["factorial"]
    effects = found["metrics"][primary]
    changes = {name: each["metrics"][primary] for name, each in _by_setting(result).items()}
    names = [each["toggle"] for each in found["factors"]]
    rows = tuple(
        (
            *(choices[name] for name in names),
            with_unit(effects["settings"][arm], effects["unit"]),
            difference(changes[arm]) if arm in changes else "",
            interval(changes[arm]) if arm in changes else "",
        )
        for arm, choices in found["settings"].items()
    )
    outputs = [each["outputs"] for each in result["comparisons"]]
    identical, compared = (sum(each[name] for each in outputs) for name in ("identical", "compared"))
    note = f"Outputs: {identical} of {compared} requests have the tokens of the first setting."
    ties = sum(each["near_ties"] or 0 for each in outputs)
    note += f" {ties} others differ at near-ties." if ties else ""
    return Table("Settings", (*names, primary, "change", "interval"), rows, note, numbers=(primary, "change"))


def to_csv(result: Mapping[str, Any]) -> str:
    """One line per metric and effect, unrounded; `where`: alone, with_others, average or together."""
    columns = ("metric", "effect", "where", *CSV_COLUMNS)
    lines = [(result["run"], result["device"], *(row[column] for column in columns)) for row in rows(result)]
    return csv_text(("run", "device", *columns), lines)


def rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every effect on every metric, one by one; `effect` as in `label`."""
    for metric, effects in result["factorial"]["metrics"].items():
        placed = [
            *(("alone", row) for row in effects["alone"].values()),
            *(("with_others", row) for row in effects["with_others"].values()),
            *(("average", row) for row in effects["effects"]),
            ("together", effects["together"]),
        ]
        for where, row in placed:
            if row is not None:
                yield {"metric": metric, **row, "effect": label(row["effect"]), "where": where}
