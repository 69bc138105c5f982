"""What a terminal shows of a comparison, unless all of it is asked for: the answer, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from harness.analysis.result import Comparison, Counter, MetricRow, Result, texts
from harness.analysis.words import conclusion, confidence
from harness.report import gate_tables, tables
from harness.report.page import Page, Table

ROWS = ("ttft_ms_p50", "tpot_ms_p50", "throughput_tok_s")  # below what has a verdict
MOST_PHASES, MOST_COUNTERS, MOST_WARNINGS = 4, 4, 3
DIFFERS = 0.1  # of the larger: a counter that changed by less is no mechanism
LEAST = 0.01  # of something per step: a collection in a hundred steps, 10 us
NS = "_ns"
# What asks for something comes first; what only describes the machine, last.
WEIGHTIEST = ("decision", "failures", "outputs", "order", "records", "steadiness", "blocks", "floor", "noise")
NOTE = "{confidence}% intervals over blocks; change = after/before − 1; --all shows more."


def pages(result: Result) -> Iterator[Page]:
    """One for each comparison, a gate's verdict before it. One arm alone is shown whole."""
    if any(each.after is None for each in result.comparisons):
        yield from tables.pages(result)
        return
    if result.gate is not None:
        found = gate_tables.regression_table(result)
        yield Page(gate_tables.conclusion(result), (), (_without_note(found),), ())
    for each in result.comparisons:
        yield page(result, each)


def page(result: Result, comparison: Comparison) -> Page:
    ended = result.stopped_because
    lines = [
        tables.changed_settings(comparison.before, comparison.after),
        *([] if ended.startswith("all ") else [tables.stopped(result)]),
        *tables.remarks(comparison),
        *filter(None, [_outputs(comparison)]),
    ]
    return Page(
        conclusion(result.device, comparison),
        tuple(lines),
        tuple(_parts(comparison)),
        _warnings(comparison),
    )


def _parts(comparison: Comparison) -> Iterator[Table]:
    """The metrics; what the toggle did, and the limit, in one table."""
    shown = {name: row for name, row in comparison.metrics.items() if name in _chosen(comparison)}
    note = NOTE.format(confidence=confidence(comparison.confidence))
    yield _without_note(tables.metric_table(replace(comparison, metrics=shown)), note)
    if any(side.failed for side in comparison.failures.values()):
        yield tables.failures_table(comparison.failures)
    limit = {
        name: Counter(before=each.before, after=each.after, unit=comparison.metrics[name].unit)
        for name, each in comparison.limit.items()
    }
    counters = {**_mechanism(comparison.mechanism), **limit}
    yield from tables.sides_table("Mechanism and limit", counters, alone=False)


def _chosen(comparison: Comparison) -> list[str]:
    """The primary and what else has a verdict, TTFT, TPOT, throughput; where nothing is decided, also the
    host's phases that surely changed."""
    found = comparison.metrics
    judged = [name for name, row in found.items() if row.verdict is not None]
    names = [comparison.primary, *judged, *ROWS]
    decided = comparison.decided
    if decided is not None and decided.verdict == "undecided":
        phases = [name for name, row in found.items() if name.startswith("phase_") and row.excludes_zero]
        names += sorted(phases, key=lambda name: -abs(_delta(found[name])))[:MOST_PHASES]
    return names


def _delta(row: MetricRow) -> float:
    return row.delta or 0.0


def _mechanism(counters: Mapping[str, Counter]) -> dict[str, Counter]:
    """Those that tell the arms apart, the farthest apart first; times in ms."""

    def apart(counter: Counter) -> float:
        sides = (counter.before or 0.0, counter.after or 0.0)
        most = max(map(abs, sides))
        return abs(sides[1] - sides[0]) / most if most > LEAST else 0.0

    readable = dict(_readable(*each) for each in counters.items())
    telling = {name: apart(counter) for name, counter in readable.items() if apart(counter) > DIFFERS}
    names = sorted(telling, key=lambda name: -telling[name])[:MOST_COUNTERS]
    return {name: readable[name] for name in names}


def _readable(name: str, counter: Counter) -> tuple[str, Counter]:
    """wait_copy_done_ns 42,861,137 per step is wait_copy_done 42.9 ms per step."""
    if not name.endswith(NS):
        return name, counter
    before, after = (None if each is None else each / 1e6 for each in (counter.before, counter.after))
    return name.removesuffix(NS), Counter(before=before, after=after, unit=f"ms {counter.unit}")


def _outputs(comparison: Comparison) -> str:
    outputs = comparison.outputs
    if not outputs.compared:
        return ""
    ties = f", {outputs.near_ties} of the others near-ties" if outputs.near_ties else ""
    identical = f"{outputs.identical} of {outputs.compared} identical"
    return f"Outputs: {identical}{ties} ({outputs.distinct} distinct)."


def _warnings(comparison: Comparison) -> list[str]:
    ranked = sorted(
        comparison.warnings,
        key=lambda each: WEIGHTIEST.index(each.kind) if each.kind in WEIGHTIEST else len(WEIGHTIEST),
    )
    found = texts(ranked)
    more = len(found) - MOST_WARNINGS
    return [*found[:MOST_WARNINGS], *([f"and {more} more: --all"] if more > 0 else [])]


def _without_note(table: Table, note: str = "") -> Table:
    return Table(table.title, table.columns, table.rows, note, table.numbers)
