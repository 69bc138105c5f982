"""What the trials of a bisection say: which commit, how sure, and of every commit what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1, isfinite, log
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from overlap_bench.harness.analysis.values import block_values
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.stats import bisection
from overlap_bench.harness.stats.bisection import Ends, Posterior, Trial
from overlap_bench.harness.stats.distributions import t_quantile
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.bisection import BAD, GOOD, Bisection, Commit, Foretold
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.tables import Block, finished_blocks, read_block

Verdict = Literal["found", "undecided", "nothing to find"]


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of the span. `change` is against good, a fraction, in a 95% interval; None without a trial."""

    commit: str
    subject: str
    posterior: float  # that the metric changed with it
    trials: int
    change: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    skipped: str | None = None  # why it could not be measured


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Where the metric changed: with one of the commits `first` to `last`, or with that one where they are
    the same. `effect`: by how much, a fraction, in a 95% interval if the place is right."""

    first: str
    last: str
    posterior: float
    effect: float
    ci_low: float
    ci_high: float


class Bisected(msgspec.Struct, frozen=True, kw_only=True):
    """What a bisection found. `culprit`: the commit of the largest change, where there is a verdict and no
    skipped commit stands beside it; `posterior`: of all `changes` together. `effect`: of bad against good, in
    an interval of 99% over all looks where there is nothing to find, of 95% else."""

    schema_version: int
    run: str
    verdict: Verdict
    good: str
    bad: str
    effect: float | None
    ci_low: float | None
    ci_high: float | None
    culprit: str | None
    posterior: float
    changes: list[Change]
    commits: list[Tried]
    good_ref: str
    bad_ref: str
    engine: str
    device: str
    metric: str
    better: str
    margin: float  # good and bad are taken as equal once their difference is surely smaller
    sd: float | None  # of log(bad / good), from trial to trial
    trials: int
    unusable: int  # trials without a value, as where too few turns have a partner
    minutes: float
    foretold: Foretold | None
    disturbed: int = 0  # trials in most of whose turns other processes used the cores


def trials_of(folder: Path, stored: Bisection) -> list[Trial | None]:
    """Every trial on disk; None for one without a value. Raises StoreError."""
    return [trial_of(stored, Block(number, read_block(folder, number))) for number in finished_blocks(folder)]


def trial_of(stored: Bisection, block: Block) -> Trial | None:
    """What a block says; None where it has no value."""
    arms = [each for each in block.tables["rounds"]["arm"].unique() if each not in (GOOD, BAD)]
    places = {each.short: place for place, each in enumerate(stored.commits, 1)}
    place = places[str(arms[0])] if arms else 0
    values = block_values(stored.design(place), block)
    metric = stored.manifest.design.primary
    of_arm = {arm: float(each.get(metric, np.nan)) for arm, each in values.items()}
    if not all(isfinite(each) and each > 0 for each in of_arm.values()):
        return None
    good = of_arm[GOOD]
    change = log(of_arm[str(arms[0])] / good) if arms else 0.0
    return Trial(place, log(of_arm[BAD] / good), change, slices.believed(values))


def ends_of(stored: Bisection, trials: Sequence[Trial]) -> Ends:
    """Whether good and bad differ, by the trials of these two alone."""
    alone = [each.effect for each in trials if not each.commit]
    return bisection.ends(alone, log(1 + stored.manifest.design.margin))


def known_of(stored: Bisection, trials: Sequence[Trial]) -> Posterior | None:
    """The posterior, once good and bad are known to differ."""
    differ = ends_of(stored, trials).verdict == "different"
    return bisection.posterior(trials, len(stored.commits)) if differ else None


def result(stored: Bisection, measured: Sequence[Trial | None], better: str) -> Bisected:
    """What the trials say; `better` is which way the metric is."""
    trials = [each for each in measured if each is not None]
    ends, known = ends_of(stored, trials), known_of(stored, trials)
    first, last = stored.manifest.design.arms
    assert first.ref is not None
    assert last.ref is not None
    arm = next(iter(stored.manifest.descriptions.values()), None)
    found = known is not None and known.found(stored.left_out)
    changes = [] if known is None else list(_changes(stored, trials, known))
    largest = max(changes, key=lambda each: abs(each.effect), default=None)
    closed = all(each.first == each.last for each in changes)
    verdict: Verdict = "found" if found and closed else "undecided"
    effects = [each.effect for each in trials]
    effect, low, high = _mean(effects, _sd(effects), len(effects))
    if ends.verdict != "different":
        verdict = "nothing to find" if ends.verdict == "equal" else "undecided"
        low, high = (expm1(each) if isfinite(each) else None for each in (ends.low, ends.high))
    return Bisected(
        schema_version=SCHEMA_VERSION,
        run=stored.manifest.run,
        verdict=verdict,
        good=first.ref.commit,
        bad=last.ref.commit,
        effect=effect,
        ci_low=low,
        ci_high=high,
        culprit=largest.first if largest is not None and verdict == "found" else None,
        posterior=0.0 if known is None else known.claim,
        changes=changes,
        commits=[_tried(stored, trials, known, place, each) for place, each in enumerate(stored.commits, 1)],
        good_ref=first.ref.name,
        bad_ref=last.ref.name,
        engine=first.engine,
        device="" if arm is None else arm.device["kind"],
        metric=stored.manifest.design.primary,
        better=better,
        margin=stored.manifest.design.margin,
        sd=_sd(effects),
        trials=len(measured),
        unusable=len(measured) - len(trials),
        disturbed=sum(not each.calm for each in trials),
        minutes=stored.spent_s / 60,
        foretold=stored.foretold,
    )


def _tried(
    stored: Bisection, trials: Sequence[Trial], known: Posterior | None, place: int, commit: Commit
) -> Tried:
    """A commit by its place; bad has been in every trial."""
    bad = place == len(stored.commits)
    changes = [each.effect if bad else each.change for each in trials if bad or each.commit == place]
    mean, low, high = _mean(changes, _sd([each.effect for each in trials]), len(trials))
    return Tried(
        commit=commit.commit,
        subject=commit.subject,
        posterior=0.0 if known is None else float(known.commits[place]),
        trials=len(changes),
        change=mean,
        ci_low=low,
        ci_high=high,
        skipped=stored.skipped.get(commit.commit),
    )


def _changes(stored: Bisection, trials: Sequence[Trial], known: Posterior) -> Iterator[Change]:
    """Each change of the likeliest set with its size: what the commits behind it differ by from those before
    it, up to the next change."""
    sd = float(np.std([each.effect for each in trials], ddof=1))  # ends differ, so there are several
    starts = [0, *(last for _, last in known.best), len(stored.commits)]
    levels: list[tuple[float, float]] = []  # mean, and its variance, of the effects' variance
    for number in range(len(known.best) + 1):
        inside = range(starts[number], starts[number + 1])
        values = [each.change for each in trials if each.commit and each.commit in inside]
        of_commits = len(values) if number == len(known.best) else 0
        if number == len(known.best):
            values += [each.effect for each in trials]
        # A trial of one of these commits gives its change and its effect against the same boot of good: half
        # of the variance of each is the other's, too.
        variance = (len(values) + of_commits) / len(values) ** 2 if values else 0.0
        levels.append((float(np.mean(values)), variance) if values and number else (0.0, 0.0))
    for (first, last), before, after in zip(known.best, levels, levels[1:], strict=False):
        error = sd * (before[1] + after[1]) ** 0.5
        half = float(t_quantile(1 - ALPHA / 2, len(trials) - 1)) * error
        size = after[0] - before[0]
        yield Change(
            first=stored.commits[first - 1].commit,
            last=stored.commits[last - 1].commit,
            posterior=float(known.commits[first : last + 1].sum()),
            effect=expm1(size),
            ci_low=expm1(size - half),
            ci_high=expm1(size + half),
        )


def _sd(effects: Sequence[float]) -> float | None:
    return float(np.std(effects, ddof=1)) if len(effects) > 1 else None


def _mean(
    values: Sequence[float], sd: float | None, trials: int
) -> tuple[float | None, float | None, float | None]:
    """The change that these log ratios say, with its 95% interval by the SD of all trials."""
    if not values:
        return None, None, None
    mean = float(np.mean(values))
    if sd is None:
        return expm1(mean), None, None
    half = float(t_quantile(1 - ALPHA / 2, trials - 1)) * sd / len(values) ** 0.5
    return expm1(mean), expm1(mean - half), expm1(mean + half)


def git_log(found: Bisected) -> str:
    """What `git bisect log` would say, which `git bisect replay` takes: each measured commit by the side of
    the largest change that it is on, where that is known."""
    subjects = {each.commit: each.subject for each in found.commits}
    lines = [
        f"# bad: [{found.bad}] {subjects[found.bad]}",
        f"# good: [{found.good}] {found.good_ref}",
        f"git bisect start '--first-parent' '{found.bad}' '{found.good}'",
    ]
    largest = max(found.changes, key=lambda each: abs(each.effect), default=None)
    order = [each.commit for each in found.commits]
    for place, each in enumerate(found.commits[:-1]):
        if each.skipped is not None:
            word = "skip"
        elif not each.trials or largest is None:
            continue
        elif place < order.index(largest.first):
            word = "good"
        elif place >= order.index(largest.last):
            word = "bad"
        else:
            continue
        lines += [f"# {word}: [{each.commit}] {each.subject}", f"git bisect {word} {each.commit}"]
    if found.culprit is not None:
        lines.append(f"# first bad commit: [{found.culprit}] {subjects[found.culprit]}")
    return "\n".join(lines) + "\n"
