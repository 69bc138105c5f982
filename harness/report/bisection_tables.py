"""What `bench bisect` found, as a person reads it: on a screen, as markdown, as a page with its picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from overlap_bench.harness.analysis.bisection import Bisected, Change, Tried, git_log
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.common.formatting import duration, percent, visible_line
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.report.page import Page, Table, csv_of, markdown_page, tabulated
from overlap_bench.harness.stats.bisection import CLAIMED
from overlap_bench.harness.store.bisection import SHORT
from overlap_bench.harness.store.files import append_step_summary, write_summary, write_text

MARKDOWN, PAGE, LOG = "bisect.md", "bisect.html", "bisect.log"  # in its folder
SHOWN = 0.01  # posterior from which a commit that was not measured is in the table
LONGEST = 60  # characters of a subject
TONES = {"found": "bad", "undecided": "open", "nothing to find": "calm"}
CAPTION = (
    "Above: each commit that was measured, against good in the same trials, with its 95% interval; the line "
    "is what the likeliest changes make. Below: how likely the metric changed with each commit."
)
NOTE = (
    "Change: against good in the same trials, 95% intervals by the SD of all trials. Posterior: that the "
    "metric changed with this commit; commits that stand between the same two measured ones share theirs "
    "evenly."
)


def page(found: Bisected) -> Page:
    tables = [change_table(found)] if len(found.changes) > 1 else []
    skipped = [
        f"{each.commit[:SHORT]} was skipped, it can't be measured: {each.skipped}"
        for each in found.commits
        if each.skipped is not None
    ]
    if found.unusable:
        skipped.append(
            f"{found.unusable} trials had no value, as where too few turns have a partner: not counted"
        )
    if found.disturbed:
        skipped.append(
            f"disturbed trials: in {found.disturbed} of {found.trials} trials, other processes used the "
            "cores during most turns; the change may be theirs; stop them, and bisect again"
        )
    return Page(conclusion(found), lines(found), (*tables, commit_table(found)), skipped)


def conclusion(found: Bisected) -> str:
    between = f"{found.good_ref} and {found.bad_ref}"
    if found.verdict == "nothing to find":
        return (
            f"Nothing to find: {found.metric} of {between} differs by {_effect(found)} over {found.trials} "
            "trials, which may be 0 (at 1%)."
        )
    if not found.changes:
        differ = "" if found.effect is None else f" They differ by {_effect(found)} so far."
        return (
            f"Undecided: {found.trials} trials don't tell whether {between} differ in {found.metric}.{differ}"
        )
    *others, last = (f"{_where(found, each)} ({_effect(each)})" for each in found.changes)
    told = f"{', '.join(others)} and {last}" if others else last
    if found.verdict == "undecided":
        return f"Undecided: likeliest {told}, posterior {found.posterior:.1%}."
    if len(found.changes) == 1:
        (change,) = found.changes
        return (
            f"{_where(found, change)} made it {_word(found, change)}: {found.metric} {_effect(change)}, "
            f"posterior {_chance(found)}."
        )
    return f"{len(found.changes)} commits changed {found.metric}: {told}, posterior {_chance(found)}."


def _chance(found: Bisected) -> str:
    """The posterior of what is named, which is never certain."""
    return f"{found.posterior:.0%}" if found.posterior < 0.99 else "over 99%"


def lines(found: Bisected) -> tuple[str, ...]:
    said = []
    if found.changes:
        said.append(
            f"{found.bad_ref} against {found.good_ref}: {found.metric} {_effect(found)}, SD "
            f"{found.sd or 0:.2%} from trial to trial."
        )
        if shape := _shape(found):
            said.append(shape)
    if found.verdict == "nothing to find" and found.ci_low is not None and found.ci_high is not None:
        most = max(-found.ci_low, found.ci_high)
        if most > found.margin:
            said.append(f"A change of up to {most:.1%} is not excluded; a quieter machine would tell more.")
    foretold = ""
    if found.foretold is not None:
        usual, (low, _, high) = found.foretold.minutes[1], found.foretold.minutes
        foretold = f"; expected: {found.foretold.trials[1]} in {usual:g} min ({low:g} to {high:g})"
    said.append(
        f"{found.trials} trials in {duration(60 * found.minutes)}{foretold}; {len(found.commits)} commits, "
        f"by first parents; {found.engine} on the {found.device} device."
    )
    if found.verdict == "undecided":
        said.append(_why_undecided(found))
    return tuple(said)


def _why_undecided(found: Bisected) -> str:
    more = "--resume goes on where it ended."
    order = [each.commit for each in found.commits]
    beside = [
        each.skipped is not None
        for change in found.changes
        for each in found.commits[order.index(change.first) : order.index(change.last)]
    ]
    if found.posterior < CLAIMED or not all(beside):
        return more
    if beside:
        return "Commits that were skipped stand beside it: which of them it was can't be told."
    return f"A change that came and went among the commits that were not measured is not excluded. {more}"


def _shape(found: Bisected) -> str:
    signs = [each.effect > 0 for each in found.changes]
    if len(signs) == 2 and signs[0] == signs[1]:
        return "It changed in two steps, both in one direction."
    if len(signs) == 2:
        return "It changed, and a part of that went back with the second commit."
    if len(signs) == 3:
        return "A change came and went again; the third one is of its own."
    return ""


def _where(found: Bisected, change: Change) -> str:
    subjects = {each.commit: each.subject for each in found.commits}
    if change.first == change.last:
        return f"{change.first[:SHORT]} “{_subject(subjects[change.first])}”"
    order = [each.commit for each in found.commits]
    count = order.index(change.last) - order.index(change.first) + 1
    return f"one of the {count} commits from {change.first[:SHORT]} to {change.last[:SHORT]}"


def _subject(text: str) -> str:
    text = visible_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _effect(found: Bisected | Change) -> str:
    return f"{percent(found.effect)} {_interval(found)}".rstrip()


def _interval(found: Bisected | Change | Tried) -> str:
    if found.ci_low is None or found.ci_high is None:
        return ""
    return f"[{percent(found.ci_low)}, {percent(found.ci_high)}]"


def _is_worse(found: Bisected, effect: float) -> bool:
    return (effect > 0) == (found.better == "lower")


def _word(found: Bisected, change: Change) -> str:
    worse = _is_worse(found, change.effect)
    if definitions.METRICS[found.metric].is_time:
        return "slower" if worse else "faster"
    return "worse" if worse else "better"


def change_table(found: Bisected) -> Table:
    columns: dict[str, Callable[[Change], str]] = {
        "commit": lambda each: _where(found, each),
        "effect": lambda each: percent(each.effect),
        "interval": _interval,
        "posterior": lambda each: f"{each.posterior:.1%}",
    }
    return tabulated("Changes", found.changes, columns, "", ("effect", "posterior"))


def commit_table(found: Bisected) -> Table:
    """Each commit that was measured, skipped, or may be it."""
    last = found.commits[-1].commit
    rows = [
        each
        for each in found.commits
        if each.trials or each.skipped is not None or each.posterior >= SHOWN or each.commit == last
    ]
    columns: dict[str, Callable[[Tried], str]] = {
        "commit": lambda each: each.commit[:SHORT],
        "trials": lambda each: "skipped" if each.skipped is not None else str(each.trials),
        "change": lambda each: percent(each.change),
        "interval": _interval,
        "posterior": lambda each: f"{each.posterior:.1%}",
        "subject": lambda each: _subject(each.subject),
    }
    return tabulated("Commits, the oldest first", rows, columns, NOTE, ("trials", "change", "posterior"))


def to_csv(found: Bisected) -> str:
    about = (found.run, found.metric, found.verdict, found.culprit)
    return csv_of(("run", "metric", "verdict", "culprit"), Tried, ((about, each) for each in found.commits))


def to_html(found: Bisected) -> str:
    """A page that needs nothing else."""
    from overlap_bench.harness.report import html
    from overlap_bench.harness.report.figures import commits

    is_gain = found.verdict == "found" and not _is_worse(found, found.effect or 0.0)
    picture = html.drawn("Commits", partial(commits.bisection, found))
    tone = "good" if is_gain else TONES[found.verdict]
    return html.page_of_tables(found.run, page(found), picture, CAPTION, tone)


def write(folder: Path, found: Bisected, environment: Mapping[str, str] = os.environ) -> Path:
    """In its folder: summary.json, bisect.md, the page, and what `git bisect log` would say; on GitHub also
    the summary of the step. Where the page lies. Raises WriteFailed."""
    text = markdown_page(page(found))
    write_summary(folder, to_stored(found))
    write_text(folder / MARKDOWN, text)
    write_text(folder / LOG, git_log(found))
    write_text(folder / PAGE, to_html(found))
    append_step_summary(text, environment)
    return folder / PAGE
