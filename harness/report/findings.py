"""What was found besides the verdict: warnings that overrule or qualify it, what would decide it where
nothing is decided, the mechanism that tells the arms apart, and the host phases that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from overlap_bench.harness.analysis.decision import ONE_BOOT
from overlap_bench.harness.analysis.result import Comparison, Counter, MetricRow
from overlap_bench.harness.analysis.warnings import Severity, Warning, ranked
from overlap_bench.harness.analysis.words import difference, interval
from overlap_bench.harness.common.formatting import number
from overlap_bench.harness.metrics.definitions import PHASES_IN_ROUNDS, PHASES_IN_TURNS

MOST_WARNINGS = 3  # on the first screen
MOST_PHASES, MOST_COUNTERS = 4, 2  # in the line of what an undecided run found all the same
DIFFERS = 0.1  # of the larger: a counter that changed by less is no mechanism
LEAST = 0.01  # of something per step: a collection in a hundred steps, 10 us
NS = "_ns"


def leading(comparison: Comparison) -> Iterator[str]:
    """Lines right below the verdict: warnings that overrule or qualify it, and, where nothing is decided, the
    way out, and what was found all the same."""
    yield from below_verdict(comparison.warnings)
    verdict = comparison.verdict
    if verdict is None or verdict.word != "undecided" or verdict == ONE_BOOT:
        return
    phases = [f"{name} {difference(each)} {interval(each)}" for name, each in _phases(comparison).items()]
    counters = [
        f"{name} {number(each.before)} → {number(each.after)} {each.unit}".rstrip()
        for name, each in list(mechanism(comparison.mechanism).items())[:MOST_COUNTERS]
    ]
    turned = any(name in PHASES_IN_TURNS for name in comparison.metrics)
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


def _phases(comparison: Comparison) -> dict[str, MetricRow]:
    """Host phases of a step whose interval excludes 0, the largest change first: by turns, where they have
    them."""
    turned = any(name in PHASES_IN_TURNS for name in comparison.metrics)
    found = {
        name: row
        for name, row in comparison.metrics.items()
        if name in (PHASES_IN_TURNS if turned else PHASES_IN_ROUNDS) and row.excludes_zero
    }
    names = sorted(found, key=lambda name: -abs(_by(found[name])))[:MOST_PHASES]
    return {name: found[name] for name in names}


def _by(row: MetricRow) -> float:
    """What it changed by, in its unit."""
    return row.delta or (row.after or 0.0) - (row.before or 0.0)


def mechanism(counters: Mapping[str, Counter]) -> dict[str, Counter]:
    """Counters that tell the arms apart, the farthest apart first; times in ms."""

    def apart(counter: Counter) -> float:
        sides = (counter.before or 0.0, counter.after or 0.0)
        most = max(map(abs, sides))
        return abs(sides[1] - sides[0]) / most if most > LEAST else 0.0

    readable = dict(_readable(*each) for each in counters.items())
    telling = {name: apart(counter) for name, counter in readable.items() if apart(counter) > DIFFERS}
    return {name: readable[name] for name in sorted(telling, key=lambda name: -telling[name])}


def _readable(name: str, counter: Counter) -> tuple[str, Counter]:
    """wait_copy_done_ns 42,861,137 per step is wait_copy_done 42.9 ms per step."""
    if not name.endswith(NS):
        return name, counter
    before, after = (None if each is None else each / 1e6 for each in (counter.before, counter.after))
    return name.removesuffix(NS), Counter(before=before, after=after, unit=f"ms {counter.unit}")
