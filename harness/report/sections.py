"""The sections of a report of a comparison. The first screen, the whole in a terminal, markdown and the web
page show them in this order: the lines under the verdict, the tables below.

To add one: a function that says it of a comparison, and a line in SECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from overlap_bench.harness.analysis.decision import ONE_BOOT
from overlap_bench.harness.analysis.result import Comparison, Counter, MetricRow, Result
from overlap_bench.harness.analysis.warnings import Severity, Warning, ranked
from overlap_bench.harness.analysis.words import conclusion, confidence, difference, interval
from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.metrics.definitions import PHASES_IN_ROUNDS, PHASES_IN_TURNS
from overlap_bench.harness.plan.variants import load_variants, measured_by
from overlap_bench.harness.report import tables
from overlap_bench.harness.report.page import Page, Table

ROWS = ("ttft_ms_p50", "tpot_ms_p50", "throughput_tok_s")  # below what has a verdict
MOST_COUNTERS, MOST_WARNINGS = 4, 3  # on the first screen
MOST_PHASES, MOST_FOUND = 4, 2  # in the line of what an undecided run found all the same
DIFFERS = 0.1  # of the larger: a counter that changed by less is no mechanism
LEAST = 0.01  # of something per step: a collection in a hundred steps, 10 us
NS = "_ns"
NO_CLAIM = "none"  # how the claim of a variant begins whose source has none
NOTE = "{confidence}% intervals over trials; change = after/before − 1; --all shows more.{rounds}"

Say = Callable[[Comparison], str | Table | None]  # None: there is nothing to say


@dataclass(frozen=True, slots=True)
class Section:
    """A line or a table: `whole` of a full report, `brief` of the first screen; None where it isn't shown."""

    whole: Say | None = None
    brief: Say | None = None


def claimed(comparison: Comparison) -> str | None:
    """What the source of this change says today, and what was measured of the same metrics; None where no
    variant makes the change, or its source says nothing. No part of the result: a stored one has it not."""
    variant = measured_by(load_variants(), *comparison.toggled)
    if variant is None or variant.claim.startswith(NO_CLAIM):
        return None
    rows = {name: comparison.metrics[name] for name in variant.claimed if name in comparison.metrics}
    if not rows:
        return f"Its source ({variant.source}) says: {variant.claim}."
    ours = ", ".join(f"{name} {difference(row)} {interval(row)}".rstrip() for name, row in rows.items())
    # Else a number like the source's would be read as its confirmation.
    settled = any(row.excludes_zero for row in rows.values())
    bounded = all(row.ci_low is not None for row in rows.values())
    why = "every interval includes zero" if bounded else "one trial has no interval"
    open_still = "" if settled else f": not confirmed, as {why}"
    where = "" if comparison.sliced is None else " in rounds"
    return f"Its source ({variant.source}) says: {variant.claim}. Here{where}: {ours}{open_still}."


def first_metrics(comparison: Comparison) -> Table:
    """The primary and what else has a verdict, TTFT, TPOT and throughput."""
    judged = [name for name, row in comparison.metrics.items() if row.verdict is not None]
    chosen = {comparison.primary, *judged, *ROWS}
    shown = {name: row for name, row in comparison.metrics.items() if name in chosen}
    note = NOTE.format(confidence=confidence(comparison.confidence), rounds=tables.of_rounds(comparison))
    return replace(tables.metric_table(structs.replace(comparison, metrics=shown)), note=note)


def first_counters(comparison: Comparison) -> Table | None:
    """What the toggle did, and how busy the device was."""
    counters = list(telling(comparison.mechanism).items())[:MOST_COUNTERS]
    title = "Mechanism and idle time" if comparison.sliced is None else "Mechanism and idle time, in rounds"
    return tables.sides_table(title, {**dict(counters), **tables.limit(comparison)}, comparison)


def telling(counters: Mapping[str, Counter]) -> dict[str, Counter]:
    """Counters that tell the arms apart, the farthest apart first; times in ms."""

    def apart(counter: Counter) -> float:
        sides = (counter.before or 0.0, counter.after or 0.0)
        most = max(map(abs, sides))
        return abs(sides[1] - sides[0]) / most if most > LEAST else 0.0

    readable = dict(_readable(*each) for each in counters.items())
    found = {name: apart(counter) for name, counter in readable.items() if apart(counter) > DIFFERS}
    return {name: readable[name] for name in sorted(found, key=lambda name: -found[name])}


def _readable(name: str, counter: Counter) -> tuple[str, Counter]:
    """wait_copy_done_ns 42,861,137 per step is wait_copy_done 42.9 ms per step."""
    if not name.endswith(NS):
        return name, counter
    before, after = (None if each is None else each / 1e6 for each in (counter.before, counter.after))
    return name.removesuffix(NS), Counter(before=before, after=after, unit=f"ms {counter.unit}")


SECTIONS = (
    Section(tables.changed_code, tables.changed_code),
    Section(tables.overlaid, tables.overlaid),
    Section(tables.in_turns, tables.in_turns),
    Section(tables.step_parts, tables.step_parts),
    Section(brief=claimed),
    Section(tables.planted, tables.planted),
    Section(tables.detectable, tables.detectable),
    Section(tables.scatter),
    Section(tables.outputs_line, tables.outputs_line),
    Section(tables.metric_table, first_metrics),
    Section(tables.failures_table, tables.failures_table),
    Section(tables.nodes_table),
    Section(tables.request_times),
    Section(tables.mechanism_table, first_counters),
    Section(tables.limit_table),
)


def pages(result: Result, whole: bool = True) -> list[Page]:
    """One for each comparison; of one arm alone, which is short, always all of it."""
    whole = whole or any(each.after is None for each in result.comparisons)
    return [page(result, each, whole) for each in result.comparisons]


def page(result: Result, comparison: Comparison, whole: bool = True) -> Page:
    said = [say(comparison) for each in SECTIONS if (say := each.whole if whole else each.brief)]
    expected = not whole and result.stopped_because.startswith("all ")
    lines = [
        *leading(comparison),
        tables.changed_settings(comparison.before, comparison.after),
        *([] if expected else [tables.stopped(result)]),
        *(each for each in said if isinstance(each, str)),
    ]
    return Page(
        conclusion(result.device, comparison),
        tuple(lines),
        tuple(each for each in said if isinstance(each, Table)),
        warned(comparison.warnings, whole),
    )


def leading(comparison: Comparison) -> Iterator[str]:
    """Lines right below the verdict: warnings that overrule or qualify it, and, where nothing is decided, the
    way out, and what was found all the same."""
    yield from below_verdict(comparison.warnings)
    verdict = comparison.verdict
    if verdict is None or verdict.word != "undecided" or verdict == ONE_BOOT:
        return
    turned = any(name in PHASES_IN_TURNS for name in comparison.metrics)
    changed = _changed_phases(comparison, PHASES_IN_TURNS if turned else PHASES_IN_ROUNDS)
    phases = [f"{name} {difference(each)} {interval(each)}" for name, each in changed.items()]
    counters = [
        f"{name} {number(each.before)} → {number(each.after)} {each.unit}".rstrip()
        for name, each in list(telling(comparison.mechanism).items())[:MOST_FOUND]
    ]
    rounds = "" if comparison.sliced is None else ", in rounds"
    told = {", in turns": phases, rounds: counters} if turned else {rounds: [*phases, *counters]}
    for where, found in told.items():
        if found:
            yield f"Descriptive{where}, no verdict: {'; '.join(found)}."


def below_verdict(warnings: Iterable[Warning]) -> Iterator[str]:
    """Sentences of the warnings that overrule or qualify the verdict."""
    for each in ranked(warnings):
        if each.settles:
            yield each.text[:1].upper() + each.text[1:]
        elif each.leads:
            yield f"Warning: {each.text}"


def following(warnings: Iterable[Warning]) -> list[Warning]:
    """All others, which stand below the tables."""
    return [each for each in ranked(warnings) if not each.settles and not each.leads]


def warned(warnings: Iterable[Warning], whole: bool = True) -> list[str]:
    """Sentences of these; unless `whole`, the first few and all that may do something to the verdict."""
    found = following(warnings)
    known = [] if whole else [each for each in found[MOST_WARNINGS:] if each.severity == Severity.DESCRIBES]
    shown = [each.text for each in found if each not in known]
    return [*shown, *([f"and {len(known)} more: --all"] if known else [])]


def _changed_phases(comparison: Comparison, of: Collection[str]) -> dict[str, MetricRow]:
    """Host phases of a step whose interval excludes 0, the largest change first."""
    found = {name: row for name, row in comparison.metrics.items() if name in of and row.excludes_zero}
    names = sorted(found, key=lambda name: -abs(_by(found[name])))[:MOST_PHASES]
    return {name: found[name] for name in names}


def _by(row: MetricRow) -> float:
    """What it changed by, in its unit."""
    return row.delta or (row.after or 0.0) - (row.before or 0.0)
