"""Warnings about what can be decided by a run: its trials, their order, what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from overlap_bench.harness.analysis.run_warnings import BlockSeries
from overlap_bench.harness.analysis.warnings import UNDECIDED, Kind, Severity, Warning
from overlap_bench.harness.common.formatting import between, duration, percent
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.manifest import Manifest

Floats = NDArray[np.float64]
FEASIBLE_S = 2 * 3600  # a run that takes longer keeps nobody's machine quiet
FEW = 6  # trials


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided about the primary, and by how much. `seconds`: what a trial takes, where it is known;
    `disagree_by`: the SD of the change between nodes that disagree about it."""

    design: Design
    trials: int
    effect: paired.Effect | None
    word: str | None
    seconds: float | None
    nodes: int = 1
    disagree_by: float | None = None

    @property
    def one_boot(self) -> bool:
        return any(arm.is_remote for arm in self.design.arms)


class OfVerdict(Kind, frozen=True):
    """A warning about what can be decided by an effect; without one nothing is."""

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        """Each that applies to what was decided; of some kinds, who has what they are about tells."""
        yield from ()


class OneBoot(OfVerdict, frozen=True):
    usual = Severity.OVERRULES
    says = (
        "one boot per side: each server was started once; two starts of one server differ by a percent and "
        "more, which looks like a change; let bench start them, by cmd= in place of url=, for intervals and "
        "a verdict"
    )

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        if decided.one_boot:
            yield cls()


class OneTrial(OfVerdict, frozen=True):
    more: str
    usual = Severity.QUALIFIES
    says = (
        "one trial: no interval and no verdict; another may differ by more than the change; {more} gives both"
    )

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        if decided.trials == 1 and not decided.one_boot:
            yield cls(_more(decided.design))


class FewTrials(OfVerdict, frozen=True):
    trials: int
    more: str
    says = "too few trials: {trials}; the interval is wide; {more} gives a narrower one"

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        if 1 < decided.trials < FEW and decided.design.until is None and not decided.one_boot:
            yield cls(decided.trials, _more(decided.design))


def few_trials(design: Design, trials: int) -> list[Warning]:
    """Whether these are too few for a narrow interval, or for any."""
    decided = Decided(design, trials, None, None, None)
    return [*OneTrial.found(decided), *FewTrials.found(decided)]


def _more(design: Design) -> str:
    return "--trials 6" if design.max_minutes is None else "a longer --max-minutes, or --trials 6,"


class WayOut(OfVerdict, frozen=True):
    """How long a fresh run has to be, judged by the spread alone (planning.blocks_needed)."""

    trials: tuple[int, int]
    margin: float
    seconds: float | None = None
    usual = Severity.OVERRULES
    settles: ClassVar[bool] = True

    def sentence(self) -> str:
        trials = between(*(f"{each:,}" for each in self.trials))
        wide = f"{UNDECIDED}: these trials scatter too much to show a change of {100 * self.margin:.3g}%"
        peeking = "trials added to this one until it decides raise false alarms (peeking)"
        again = "or with --until-decided"
        if self.seconds is None:
            return f"{wide}; {peeking}; run again with --trials {trials} (an 80% chance to show it), {again}"
        time = between(*(duration(each * self.seconds) for each in self.trials))
        run = (
            f"a fresh run of about {time} on this machine (--trials {trials}, {duration(self.seconds)} each)"
        )
        if self.trials[0] * self.seconds > FEASIBLE_S:
            needed = f"{run} would be needed, which is not feasible"
            return f"{wide}; {needed}; look for what disturbs it (bench doctor)"
        return (
            f"{wide}; {peeking}; run again with --trials {trials} (about {time} on this machine, an 80% "
            f"chance to show it), {again}"
        )

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        effect = decided.effect
        assert effect is not None
        if effect.sd is None or decided.word != UNDECIDED or decided.disagree_by is not None:
            return
        if effect.scale == "ratio" and not decided.one_boot:
            from overlap_bench.harness.stats import planning

            margin = decided.design.margin
            low, high = planning.blocks_needed(effect.sd, effect.blocks, margin)
            yield cls((low, high), margin, decided.seconds)


class Contradicted(OfVerdict, frozen=True):
    why: str
    usual = Severity.OVERRULES
    settles: ClassVar[bool] = True
    says = f"{UNDECIDED}: {{why}}"


class TurnsNotBelieved(OfVerdict, frozen=True):
    """Metrics of turns, beside a primary of rounds that keeps its verdict."""

    metrics: tuple[str, ...]
    why: str
    usual = Severity.QUALIFIES

    def sentence(self) -> str:
        return f"{', '.join(self.metrics)} undecided: {self.why}"


class LeftOut(OfVerdict, frozen=True):
    trials: int
    all_trials: int
    usual = Severity.DESCRIBES
    says = (
        "disturbed trials: in {trials} of {all_trials} trials, other processes used the cores during most "
        "turns; these trials are left out, and the others decide; stop these processes, and all trials count"
    )


class NodesDisagree(OfVerdict, frozen=True):
    nodes: int
    sd: float
    usual = Severity.QUALIFIES
    says = (
        "nodes disagree: the change differs between them by an SD of {sd:.2%}, beyond the spread of trials; "
        "each of the {nodes} nodes counts once, so the interval is wider; more nodes narrow it"
    )

    @classmethod
    def found(cls, decided: Decided) -> Iterator[Self]:
        if decided.disagree_by is not None and (decided.word == UNDECIDED) == cls.settles:
            yield cls(decided.nodes, decided.disagree_by)


class NodesLeaveItOpen(NodesDisagree, frozen=True):
    """The same, where nothing is decided."""

    usual = Severity.OVERRULES
    settles: ClassVar[bool] = True

    says = (
        f"{UNDECIDED}: nodes disagree: the change differs between them by an SD of {{sd:.2%}}, beyond the "
        "spread of trials; each of the {nodes} nodes counts once, so more trials would not settle it; "
        "measure on more nodes"
    )


class NodesDisagreeAbout(OfVerdict, frozen=True):
    """The same, of effects of a factorial."""

    effects: tuple[str, ...]
    nodes: int
    usual = Severity.QUALIFIES

    def sentence(self) -> str:
        return (
            f"nodes disagree about {', '.join(self.effects)}; each of the {self.nodes} nodes counts once "
            "there, so these intervals are wider; more nodes narrow them"
        )


class OneOrder(OfVerdict, frozen=True):
    ran: str
    usual = Severity.QUALIFIES
    says = (
        "every trial ran its arms in the same order; if running {ran} makes an arm slower, the change "
        "contains that; a fresh run draws other orders"
    )


class Position(OfVerdict, frozen=True):
    """Running second, or last, made an arm slower or faster. `left`: what of that is in the change."""

    ran: str
    change: float
    low: float
    high: float
    left: str
    weakens: bool

    def sentence(self) -> str:
        was = (
            f"position effect: running {self.ran} makes an arm's time differ by {percent(self.change)} "
            f"[{percent(self.low)}, {percent(self.high)}]; {self.left}"
        )
        less = "a fresh run of more trials balances the orders"
        much = " (more than half the margin, so the verdict is weaker than it looks)"
        return f"{was}{much if self.weakens else ''}; {less}"


class SignFlip(OfVerdict, frozen=True):
    """A test that assumes less says something else. `about`: each effect with its p."""

    about_each: tuple[tuple[str, float], ...]
    usual = Severity.QUALIFIES

    def sentence(self) -> str:
        if [name for name, _ in self.about_each] == [""]:
            where = f"(p = {self.about_each[0][1]:.3f}) disagrees with the t test of the verdict"
        else:
            named = ", ".join(f"{name} (p = {p:.3f})" for name, p in self.about_each)
            where = f"disagrees with the t test on {named}"
        return (
            f"a permutation test, which needs no normal distribution, {where}; the verdict stands, but may "
            "rest on one odd trial; look at the trials one by one (bench report), and run again if one "
            "stands out"
        )


class Drift(OfVerdict, frozen=True):
    """All arms became slower or faster during the run."""

    change: float
    arms: str

    def sentence(self) -> str:
        return (
            f"drift: the times of {self.arms} changed by {percent(self.change)} from the first trial to the "
            "last; the change between arms stands, as each trial has all of them; quote no time of this run "
            "by itself"
        )


def of_order(
    manifest: Manifest,
    numbers: Sequence[int],
    before: Sequence[float],
    after: Sequence[float],
    *,
    judged: bool = True,
) -> Iterator[Warning]:
    """What the order of the arms and of the trials did to a change, from one value per trial (`numbers`).
    Where it is described, not judged, a position effect is never said to weaken it: there is no verdict."""
    margin, differences = manifest.design.margin, paired.paired(before, after, "ratio")
    found = paired.position(differences, [manifest.after_first[number] for number in numbers])
    if found is None:
        yield OneOrder("second")
    else:
        left = f"given the orders that were drawn, it adds {percent(found.left)} to the change"
        yield from _position(found, "second", left, judged and found.weakens(margin))
    if paired.sign_flip_disagrees(differences):
        yield SignFlip((("", paired.sign_flip(differences)),))
    yield from _drift(margin, "both arms", before, after)


def of_order_of_factorial(
    manifest: Manifest, numbers: Sequence[int], values: BlockSeries, judged: Mapping[str, Floats]
) -> Iterator[Warning]:
    """The same for effects that are contrasts of a trial's arms. Each contains whatever part of a position
    effect the orders that were drawn leave in it. `judged`: the weights of the arms in each effect that
    carries a verdict."""
    if len(numbers) < 2:
        return
    design = manifest.design
    per_arm = [values[design.primary][arm.name] for arm in design.arms]
    logs = np.log(per_arm).T
    places = np.array([np.argsort(manifest.drawn[number]) for number in numbers]) / (len(per_arm) - 1)
    found = paired.position_of_several(logs, places)
    if found is None:
        yield OneOrder("early or late")
    else:
        share = max(abs(float(places.mean(axis=0) @ weights)) for weights in judged.values())
        found = replace(found, left=share * abs(found.change))
        left = f"given the orders that were drawn, it adds up to {found.left:.2%} to an effect"
        yield from _position(found, "last", left, found.weakens(design.margin))
    disagree = tuple(
        (name, paired.sign_flip(logs @ weights))
        for name, weights in judged.items()
        if paired.sign_flip_disagrees(logs @ weights)
    )
    if disagree:
        yield SignFlip(disagree)
    yield from _drift(design.margin, "all arms", *per_arm)


def _position(found: paired.Position, ran: str, left: str, weakens: bool) -> Iterator[Warning]:
    """A position effect whose interval contains 0 is not reported."""
    if found.seen and found.low is not None and found.high is not None:
        severity = Severity.QUALIFIES if weakens else Severity.DESCRIBES
        yield Position(ran, found.change, found.low, found.high, left, weakens, weight=severity)


def _drift(margin: float, arms: str, *per_arm: Sequence[float]) -> Iterator[Warning]:
    found = paired.drift(*per_arm)
    if found is not None and abs(found.change) > margin and found.p < ALPHA:
        yield Drift(found.change, arms)


class RoundsDiffer(OfVerdict, frozen=True):
    metric: str
    in_rounds: str
    apart: str
    usual = Severity.QUALIFIES
    says = (
        "in rounds (one arm at a time, the whole workload), the step changed by {in_rounds} ({metric}), "
        "which differs from turns by {apart}; rounds include arrivals, prefills and the client; to judge by "
        "these, run again with --primary {metric}"
    )


class BusyWhileWaiting(OfVerdict, frozen=True):
    arm: str
    share: float
    usual = Severity.QUALIFIES
    says = (
        "{arm} used up to {share:.0%} of a core while it waited for its turn; that makes only the other "
        "arm's times longer; --interleaved-rounds 0 measures one arm at a time"
    )


class FewRequests(OfVerdict, frozen=True):
    metric: str
    requests: int
    percentile: int
    wanted: int
    usual = Severity.QUALIFIES
    says = (
        "{metric} has {requests} requests of an arm in a trial, too few for a p{percentile}, which wants "
        "{wanted}; single slow ones decide it; try a larger --num-requests or more --rounds"
    )


class NoVerdictOn(OfVerdict, frozen=True):
    metric: str
    where: str
    usual = Severity.QUALIFIES
    says = (
        "no verdict on {metric}: it {where}; such trials are not left out, as the change itself may cause "
        "them; give each trial more to measure: --num-requests, --max-new-tokens"
    )


class Unfinished(OfVerdict, frozen=True):
    trials: int
    planned: str
    usual = Severity.OVERRULES
    says = (
        "not finished: {trials} of {planned} trials are done; to judge before the end raises false alarms "
        "(peeking), so there is no verdict yet; bench run --resume FOLDER goes on"
    )


class FloorRemark(OfVerdict, frozen=True):
    """The noise floor that is known was measured otherwise, or long ago: `said` in full."""

    said: str
    says = "{said}"


class WithinFloor(OfVerdict, frozen=True):
    metric: str
    word: str
    floor: float
    usual = Severity.QUALIFIES
    says = (
        "{metric} is called {word}, but arms of equal code differ here by more than its change (noise floor "
        "±{floor:.2%}); the change may be chance; believe it when a fresh run finds it again"
    )


class OutputsBesideFloor(OfVerdict, frozen=True):
    now: str
    between_equal: str
    usual = Severity.QUALIFIES
    says = (
        "outputs differ in {now} requests; arms of equal code differ here in {between_equal} (bench aa), by "
        "batching; if there are clearly more now, the change alters outputs: read some of them"
    )


class Unattributed(OfVerdict, frozen=True):
    side: str
    share: float
    says = (
        "{share:.1%} of the {side} arm's step is in none of the engine's phases (unattributed); it is code "
        "between two phases, or another process on the host's core; stop other processes, or look at the "
        "gaps in bench profile"
    )
