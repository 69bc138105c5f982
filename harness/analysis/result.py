"""What a run found, as types: all that is printed, drawn, judged by a gate or kept is made of these."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from overlap_bench.harness.analysis.decision import Verdict
from overlap_bench.harness.analysis.warnings import Warning
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import Arm, Factor, LeftOut, Patch, Ref
from overlap_bench.harness.stats.paired import Effect as Paired
from overlap_bench.harness.store.manifest import ChangedCode, Overlaid, listed

GateVerdict = Literal["pass", "fail", "undecided"]
TAG = "struct"  # tells the structs of a union apart; JSON has it not, they have no field in common


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a comparison. `change` and its interval are fractions; a metric that can be zero has
    `delta` and its interval in its unit, and no `change`. One arm alone has `before` and nothing else."""

    unit: str
    better: str  # "lower", "higher", "" where neither is
    before: float | None = None
    after: float | None = None
    change: float | None = None
    delta: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    sd: float | None = None  # of the paired differences
    counted: int | None = None  # paired differences: trials, or nodes where these disagree
    p: float | None = None
    p_adjusted: float | None = None
    verdict: str | None = None  # None: descriptive
    floor: float | None = None  # what equal arms show here

    @classmethod
    def of_metric(cls, name: str, before: Sequence[float], effect: Paired | None) -> MetricRow:
        """A row that is not judged yet; without an effect there is one arm alone."""
        metric = definitions.METRICS[name]
        if effect is None:
            return cls(unit=metric.unit, better=metric.better, before=float(np.mean(before)))
        return cls(
            unit=metric.unit,
            better=metric.better,
            before=effect.before,
            after=effect.after,
            change=effect.change,
            delta=effect.delta,
            ci_low=effect.low,
            ci_high=effect.high,
            sd=effect.sd,
            counted=effect.blocks,
            p=effect.p,
        )

    def of(self, side: str) -> float | None:
        return self.before if side == "before" else self.after

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval, and 0 is not in it."""
        return self.ci_low is not None and self.ci_high is not None and (self.ci_low > 0 or self.ci_high < 0)

    @property
    def within_floor(self) -> bool:
        """Whether it changed by less than equal arms do."""
        return self.change is not None and self.floor is not None and abs(self.change) < self.floor


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """A number of each arm; None where there is none."""

    before: float | None
    after: float | None

    def of(self, side: str) -> float | None:
        return self.before if side == "before" else self.after


class Counter(Sides, frozen=True, kw_only=True):
    unit: str


class Outputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests whose outputs were compared by digest. `near_ties`: how many of the differing ones part at a
    near-tie, None where that was not judged. `distinct`: different outputs of the before arm. `weak`: why
    equal outputs show little here, or some could not be compared, and what to try."""

    compared: int
    identical: int
    near_ties: int | None
    distinct: int | None = None
    weak: str = ""

    @property
    def unexplained(self) -> int:
        """How many differ and are not known to be near-ties."""
        return self.compared - self.identical - (self.near_ties or 0)

    def fail(self, promised: bool) -> bool:
        """Whether a run fails by them: by any that differ and are not known to be near-ties where equal ones
        are `promised`, else by those that were judged and are none."""
        return self.unexplained > 0 and (promised or self.near_ties is not None)


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one arm failed, of how many, and how often each cause, the first one first."""

    failed: int
    requests: int
    causes: dict[str, int]


class Patched(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm's package was given; the run's manifest has all of its text."""

    file: str
    sha256: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, patch: Patch) -> Patched:
        sha256 = hashlib.sha256(patch.text.encode()).hexdigest()
        return cls(file=patch.file, sha256=sha256, files=patch.files, left_out=patch.left_out)

    @property
    def shown(self) -> str:
        """Its name, and a few of the files that it changes: a release changes a thousand."""
        return f"{self.file} ({listed([*self.files])})"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """An arm: all that is known of how it was set."""

    engine: str
    options: dict[str, Any]  # api.EngineOptions; of an imported arm those that are known
    toggles: dict[str, str]
    python: str | None
    env: dict[str, str]
    ref: Ref | None
    patch: Patched | None = None

    @classmethod
    def of(cls, arm: Arm) -> Settings:
        """Everything of an arm but its name, and of its options those that are known."""
        options = msgspec.to_builtins(arm.options)
        return cls(
            engine=arm.engine,
            options=options if arm.known is None else {name: options[name] for name in arm.known},
            toggles=arm.toggles,
            python=arm.python,
            env=arm.env,
            ref=arm.ref,
            patch=None if arm.patch is None else Patched.of(arm.patch),
        )


class Prediction(msgspec.Struct, frozen=True, kw_only=True, tag_field=TAG):
    """What the toggle should have given, by the before arm's records. `error`: predicted - measured;
    `remark`: why that is not what the run's first line says."""

    metric: str
    model: str
    change: float
    ci_low: float | None
    ci_high: float | None
    measured: float | None
    error: float | None
    calibration: str
    remark: str = ""


class NoPrediction(msgspec.Struct, frozen=True, kw_only=True, tag_field=TAG):
    """Why there is none."""

    none: str


class Sliced(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared in turns: pairs of neighbouring slices."""

    steps: int  # of a turn
    batch: float  # requests in a step, mean over pairs
    pairs: int
    kept: float  # share of the before arm's slices that have a partner
    undisturbed: int | None = None  # pairs beside which nothing else used the cores; they decide
    disturbed: float | None = None  # the change in the others, where they are many
    within: float | None = None  # SD that the change of a block owes to its pairs alone, of log ratios
    between: float | None = None  # the rest of its SD, from boot to boot; None with one block


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of one node say of the primary, by themselves; no interval of a single block."""

    blocks: int = msgspec.field(name="trials")
    unit: str  # of `delta`
    change: float | None
    delta: float | None
    ci_low: float | None
    ci_high: float | None


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The primary on each node of a cluster. `p`: of the test that they agree; `spread`: the SD of the change
    between nodes, beyond what blocks scatter by (of log ratios); `power`: the chance that a spread as large
    as the margin is found. None where every node has one block."""

    unit: Literal["trial", "node"]  # that the primary's interval counts
    p: float | None
    spread: float | None
    power: float | None
    changes: dict[str, NodeRow]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A before and an after, or one arm alone: `after` and `prediction` are then None."""

    variant: str
    before: Settings
    after: Settings | None
    blocks: int = msgspec.field(name="trials")  # that decide
    left_out: list[int] = []  # the numbers of disturbed trials, of which no metric is made
    confidence: float  # of every interval
    margin: float
    primary: str
    metrics: dict[str, MetricRow]
    outputs: Outputs
    failures: dict[str, Failures]  # by arm
    mechanism: dict[str, Counter]
    limit: dict[str, Sides]
    prediction: Prediction | NoPrediction | None
    sliced: Sliced | None = msgspec.field(name="interleaved", default=None)  # None: no turns were taken
    nodes: Nodes | None = None  # None: one machine measured all blocks
    changed_code: ChangedCode | None = None  # that the arms differ by; None: they run one installation
    overlaid: list[Overlaid] = []  # that no ref has, and both arms run
    verdict: Verdict | None = None  # on the primary, with its reason; None of one arm alone
    warnings: list[Warning]

    @property
    def toggled(
        self,
    ) -> tuple[str, dict[str, str], dict[str, str], tuple[dict[str, Any], dict[str, Any]]]:
        """The engine, and the toggles and the options of both arms; those of the first one twice where there
        is no other, or it differs in more than these."""
        before, after = self.before, self.after
        changed = {} if after is None else {"toggles": after.toggles, "options": after.options}
        if after is None or msgspec.structs.replace(before, **changed) != after:
            after = before
        return before.engine, before.toggles, after.toggles, (before.options, after.options)

    @property
    def decided(self) -> MetricRow | None:
        """The primary's row; None where it was not measured."""
        return self.metrics.get(self.primary)


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """An effect of a factorial: of one toggle, or the interaction of several; fractions."""

    effect: list[str]
    change: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None
    p: float | None
    p_adjusted: float | None = None
    verdict: str | None = None
    assumes: list[list[str]] = []  # higher effects that it would contain, taken to be zero


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """Every effect on one metric; None where a setting that it needs was left out."""

    unit: str
    better: str
    settings: dict[str, float]  # by arm, geometric mean over blocks
    effects: list[Effect]
    alone: dict[str, Effect | None]
    with_others: dict[str, Effect | None]
    together: Effect | None


class Aliased(msgspec.Struct, frozen=True, kw_only=True, rename={"others": "with"}):
    """An effect, and those that it can't be told from."""

    effect: list[str]
    others: list[list[str]]


class FactorialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a result that is about a factorial as a whole."""

    factors: list[Factor]
    blocks: int = msgspec.field(name="trials", default=0)  # that decide; 0 in older files
    settings: dict[str, dict[str, str]]  # by arm
    aliased: list[Aliased]
    metrics: dict[str, Effects]
    left_out: list[LeftOut]
    warnings: list[Warning]

    def __post_init__(self) -> None:
        """ValueError, which a reader of a stored one gets as a ValidationError."""
        toggles = {each.toggle for each in self.factors}
        if not (
            all(toggles <= choices.keys() for choices in self.settings.values())
            and all(each.settings.keys() == self.settings.keys() for each in self.metrics.values())
            and all(toggles <= each.alone.keys() & each.with_others.keys() for each in self.metrics.values())
        ):
            raise ValueError("a setting of the factorial lacks what was measured of it")


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate says of one metric. `change` is after/before - 1; the rest is regression, positive where
    the after arm is worse: `best` and `worst` the bounds, `p` of "it is within the limit", adjusted by Holm,
    and `excludable` the smallest regression that as many blocks with this spread rule out in 4 of 5 runs in
    which nothing changed. With one block there are no bounds. `fails_to`: the largest limit that it would
    have failed. `more_blocks`, of what is undecided: how many a fresh gate needs to decide it in 4 of 5
    cases; None where no number that anybody would wait for does."""

    before: float
    after: float
    change: float
    best: float | None = None
    worst: float | None = None
    p: float | None = None
    excludable: float | None = None
    fails_to: float | None = None
    more_blocks: int | None = msgspec.field(name="more_trials", default=None)
    verdict: GateVerdict
    remark: str = ""


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict` is the last word. `faults` fail the gate whatever the metrics say, `doubts` keep it from
    passing. `confidence`: of each one-sided bound. `passes_from`, `fails_to`: the smallest limit that these
    blocks would have passed, and the largest that they would have failed; None where there is none.
    `unplanned`: what is judged here and was not declared before the first block."""

    verdict: GateVerdict
    faults: list[str]
    doubts: list[str]
    unplanned: list[str] = []
    max_regression: float
    confidence: float
    passes_from: float | None = None
    fails_to: float | None = None
    seconds_per_block: float | None = msgspec.field(name="seconds_per_trial", default=None)
    metrics: dict[str, Judged]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Where the level of a metric moved, in a history of gates against one base: between the commits `last`
    and `first`. `change` is of the new level against the old one, a fraction, with its 95% interval; `gates`
    at the new level."""

    metric: str
    last: str  # the head of the last gate at the old level
    first: str  # and of the first one at the new level, when it was measured
    when: str
    change: float
    ci_low: float
    ci_high: float
    p: float
    gates: int
    worse: bool
    other_machines: bool  # none that measured the old level has measured the new one


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The gates of one setting against one base, this one among them. `scatter`: by metric, the SD of their
    log ratios within a level; None where each is a level of its own."""

    base: str  # commit
    gates: int
    scatter: dict[str, float | None]
    moved: list[Moved]


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run, or stored runs set against each other."""

    schema_version: int
    run: str
    device: str
    stopped_because: str
    comparisons: list[Comparison]
    factorial: FactorialResult | None = None
    gate: GateResult | None = None
    history: History | None = None

    def __post_init__(self) -> None:
        """As of FactorialResult."""
        if self.factorial is None:
            return
        primaries = {each.primary for each in self.comparisons}
        if (
            len(self.factorial.settings) != len(self.comparisons) + 1
            or len(primaries) != 1
            or not primaries <= self.factorial.metrics.keys()
            or not all(primaries <= each.metrics.keys() for each in self.comparisons)
        ):
            raise ValueError("its factorial is not that of its comparisons")


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a sweep and the values it takes, as they were typed."""

    name: str
    values: list[str]


class PointResult(Comparison, frozen=True, kw_only=True):
    """A point of a sweep; without verdicts where it is not finished."""

    at: dict[str, str]  # the value of each axis
    run: str
    device: str
    requests: int  # of each round: a closed loop of more places has more


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    run: str
    device: str  # every kind
    stopped_because: str
    axes: list[Axis]
    comparisons: list[PointResult]
