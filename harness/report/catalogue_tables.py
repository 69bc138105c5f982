"""The catalogue of claims for people: one table to read, and a web page whose columns sort it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from overlap_bench.engines import api
from overlap_bench.harness.analysis.catalogue import Catalogue, Entry
from overlap_bench.harness.analysis.words import confidence, interval
from overlap_bench.harness.common.formatting import number, percent
from overlap_bench.harness.report.page import Page, Table, csv_of, markdown_page, rendered
from overlap_bench.harness.store.files import WriteFailed, write_text

NOTE = (
    "measured: change = after/before − 1 with its interval, of 95% where it does not say; for times, "
    "negative is faster. verdict: that of the run; of a number that a source reports, how it compares with "
    "the interval; descriptive: one of several, with none of its own. step, ms and batch: of a decode step "
    "before the change, where it was measured."
)
NUMBERS = ("measured", "step, ms", "batch")
Say = Callable[[Entry], str]
CLAIM: dict[str, Say] = {
    "claim": lambda each: each.claim,
    "what changes": lambda each: each.title,
    "source": lambda each: each.source,
    "the source says": lambda each: each.says,
}
MEASURED: dict[str, Say] = {
    "measured": lambda each: f"{percent(each.change)} {interval(each)}{_level(each)}".strip(),
    "of": lambda each: each.metric,
    "verdict": lambda each: each.verdict,
    "device": lambda each: each.device,
    "step, ms": lambda each: "" if each.step_ms is None else number(each.step_ms),
    "batch": lambda each: "" if each.batch is None else number(each.batch),
    "machine": lambda each: each.machine,
}
PLACE = "found in"
USUAL = 0.95  # level of an interval
COLUMNS = (*CLAIM, *MEASURED, PLACE)
# A terminal has no room for more; `bench variants NAME` says the rest of a claim.
NARROW = ("claim", "the source says", "measured", "of", "verdict", "device", "step, ms", "batch")
# What a column sorts by where that is not its text.
KEYS: dict[str, Callable[[Entry], float | None]] = {
    "measured": lambda each: each.change,
    "step, ms": lambda each: each.step_ms,
    "batch": lambda each: each.batch,
}


def _level(each: Entry) -> str:
    """The level of an interval that is not the usual one, as of a run that may stop early."""
    return "" if each.ci_low is None or each.confidence == USUAL else f" at {confidence(each.confidence)}%"


def page(found: Catalogue, columns: tuple[str, ...] = NARROW) -> Page:
    """What a line says of its claim is left empty where the one above says the same."""
    says = CLAIM | MEASURED | {PLACE: _linked}
    rows = tuple(
        tuple(
            "" if name in CLAIM and _repeats(above, each, says[name]) else says[name](each)
            for name in columns
        )
        for above, each in zip([None, *found.entries], found.entries, strict=False)
    )
    return Page(conclusion(found), (), (Table("Claims", columns, rows, NOTE, NUMBERS),), ())


def _repeats(above: Entry | None, each: Entry, say: Say) -> bool:
    return above is not None and above.claim == each.claim and say(above) == say(each)


def conclusion(found: Catalogue) -> str:
    claims = {each.claim for each in found.entries}
    measured = [each.claim for each in found.entries if each.change is not None]
    return f"{len(claims)} claims, {len(set(measured))} of them measured, {len(measured)} times in all."


def to_markdown(found: Catalogue) -> str:
    """With links, for a page that lies in the results folder."""
    return markdown_page(page(found, COLUMNS))


def _linked(entry: Entry) -> str:
    return f"[{PurePosixPath(entry.found_in).stem}]({entry.found_in})" if entry.found_in else ""


def to_csv(found: Catalogue) -> str:
    return csv_of((), Entry, (((), each) for each in found.entries))


def write(found: Catalogue, path: Path) -> None:
    """The web page at `path`. Raises BadSetting where it can't be written."""
    try:
        write_text(path, to_html(found))
    except WriteFailed as error:  # nothing was measured that could be lost
        raise api.BadSetting(str(error)) from error


def to_html(found: Catalogue) -> str:
    """A page that needs nothing else; a click on a column's name sorts by it."""
    says = CLAIM | MEASURED | {PLACE: lambda each: each.found_in}
    rows = [
        [(column, say(each), KEYS[column](each) if column in KEYS else None) for column, say in says.items()]
        for each in found.entries
    ]
    return rendered(
        "claims.html.jinja",
        conclusion=conclusion(found),
        columns=COLUMNS,
        numbers=NUMBERS,
        rows=rows,
        note=NOTE,
    )
