"""From the runs of an experiment to what it found: tables of cells, claims beside what was measured, the
conclusion. Pure: frames in, structs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from overlap_bench.harness.analysis import comparison, nodes, outputs, tail, turns, words
from overlap_bench.harness.analysis.arm_warnings import circumstances
from overlap_bench.harness.analysis.mechanism import COUNTER
from overlap_bench.harness.analysis.result import Comparison, Outputs
from overlap_bench.harness.analysis.values import block_values, counted, scale_of, series
from overlap_bench.harness.analysis.verdict_warnings import (
    Contradicted,
    FewRequests,
    OfVerdict,
    TurnsNotBelieved,
    few_trials,
    of_order,
)
from overlap_bench.harness.analysis.warnings import Warning
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values, values_between
from overlap_bench.harness.metrics.steps import round_step_ms_mean
from overlap_bench.harness.plan.experiment_file import (
    DECODE_STEP,
    SUBMIT_WALL,
    US,
    Claim,
    Column,
    Layout,
    Plan,
    Quantity,
    Row,
    Source,
    counter_as_shown,
    unit_of,
)
from overlap_bench.harness.stats import paired, planning
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag_field="shown"):
    """A cell with a number and its interval. Levels are geometric means where a change would be a ratio, so
    that the change is that of the levels beside it."""

    value: float
    low: float
    high: float
    unit: str = ""


class Level(Measured, frozen=True, kw_only=True, tag="value"):
    """A mean over blocks."""


class Share(Measured, frozen=True, kw_only=True, tag="share"):
    """A mean over blocks of one time as a fraction of another."""


class Change(Measured, frozen=True, kw_only=True, tag="change"):
    """An effect of paired blocks, as a fraction."""


class Delta(Measured, frozen=True, kw_only=True, tag="delta"):
    """An effect of paired blocks in the metric's unit."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True, tag_field="shown", tag="percentiles"):
    value: list[float]
    low: None = None
    high: None = None
    unit: str


class NotMeasured(msgspec.Struct, frozen=True, tag_field="shown", tag="none"):
    """A cell where the engine does not say, or nothing is compared."""


NONE = NotMeasured()
NOT_BELIEVED = "not believed here"
Number = Level | Share | Change | Delta | NotMeasured
Cell = str | Percentiles | Number


class ClaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says, what was measured, and how the two compare. `detectable`: of the first claim, the
    smallest true change that such a run detects in 4 of 5 cases, by the spread of its blocks."""

    says: str
    workload: str
    before: str | None
    after: str
    metric: str
    reported: float | None
    measured: Number
    finding: str
    detectable: float | None = None


class TableResult(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str


class RunSize(msgspec.Struct, frozen=True, kw_only=True):
    boots: str
    workload: str
    blocks: int = msgspec.field(name="trials")


class ExperimentResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema_version: int
    experiment: str
    run: str
    device: str  # every kind
    conclusion: str
    verdict: str | None = None  # of the first claim, where that is a change
    title: str
    question: str
    sources: list[Source]
    extents: list[str]
    scaling: list[str]
    claims: list[ClaimResult]
    tables: list[TableResult]
    outputs: Outputs
    notes: list[str]
    follow_up: list[str]
    runs: list[RunSize]
    warnings: list[Warning]


@dataclass(frozen=True)  # no slots: `values` is cached
class Finished:
    manifest: Manifest
    blocks: Sequence[Block]
    per_block: Sequence[Values]

    @cached_property
    def values(self) -> dict[str, dict[str, list[float]]]:
        """metric or counter → arm → one value per block, for what has a finite one in every block. Metrics
        whose value depends on the other arms are left out: a cell is of one arm, or of two (`sides`)."""
        found = {
            arm.name: [
                {**values[arm.name], **_besides(block, arm.name)}
                for block, values in zip(self.blocks, self.per_block, strict=True)
            ]
            for arm in self.manifest.design.arms
        }
        names = dict.fromkeys(name for boots in found.values() for boot in boots for name in boot)
        return series(found, [name for name in names if name not in definitions.BETWEEN_ARMS])

    def of(self, name: str, arm: str) -> list[float] | None:
        """One value per block, or None where the engine does not say, or has no sample."""
        return self.values.get(name, {}).get(arm)

    def sides(self, quantity: Quantity) -> dict[str, list[float]] | None:
        """arm → one value per block, of both arms of a change; of metrics between arms, between these two."""
        name, arms = quantity.change, (quantity.before, quantity.arm)
        found = self.values.get(name, {})
        if name in definitions.BETWEEN_ARMS and quantity.before != quantity.arm:
            between = [values_between(block.of, arms) for block in self.trials(quantity)]
            found = series({arm: [each[arm] for each in between] for arm in arms}, [name]).get(name, {})
        if quantity.before == quantity.arm or not all(arm in found for arm in arms):
            return None
        return {arm: found[arm] for arm in arms}

    def trials(self, quantity: Quantity) -> Sequence[Block]:
        """The blocks that both sides of a change are made of: between two arms, as for a verdict, without
        disturbed ones where others are enough."""
        name, arms = quantity.change, (quantity.before, quantity.arm)
        if name not in definitions.BETWEEN_ARMS:
            return self.blocks
        between = [values_between(block.of, arms) for block in self.blocks]
        return [self.blocks[place] for place in counted(self.manifest.design, between, [name])]

    def doubt(self, quantity: Quantity) -> str | None:
        """Why turns are not believed of a change in them; None where nothing speaks against it."""
        arms = quantity.before, quantity.arm
        metric = definitions.METRICS.get(quantity.change)
        if metric is None or not metric.of_turns or quantity.before == quantity.arm:
            return None
        design = self.manifest.pair(*arms).design
        pairs = [block_values(design, block.only(arms)) for block in self.trials(quantity)]
        return turns.disagreement(design, pairs, design.alpha(len(pairs)))

    def effect(self, quantity: Quantity) -> paired.Effect | None:
        sides = self.sides(quantity)
        if sides is None:
            return None
        places = [block.node for block in self.trials(quantity)]
        design = self.manifest.design
        return nodes.effect(design, quantity.change, sides, places, ALPHA)

    def shares(self, quantity: Quantity) -> list[float] | None:
        """How much of one time another is, in each block."""
        parts, wholes = self.of(quantity.share, quantity.arm), self.of(quantity.of, quantity.arm)
        if parts is None or wholes is None or min(wholes) <= 0:
            return None
        factor = US[unit_of(quantity.share)] / US[unit_of(quantity.of)]
        return [factor * part / whole for part, whole in zip(parts, wholes, strict=True)]

    def outputs(self) -> list[Outputs]:
        """As outputs.same, of every arm against the first."""
        first, *others = (arm.name for arm in self.manifest.design.arms)
        return [outputs.same(self.manifest.pair(first, other), self.blocks) for other in others]


Runs = Mapping[tuple[str, str], Finished]  # by boots and workload


def _besides(block: Block, arm: str) -> dict[str, float]:
    """What a cell can show of a boot that is no metric: EXTRA, and the counters."""
    requests, steps, rounds = (block.of(arm, name) for name in ("requests", "steps", "rounds"))
    by_round = requests.groupby("round")
    walls = by_round["submitted_ns"].max() - by_round["sent_ns"].min()
    found = {SUBMIT_WALL: float(walls.mean()) / definitions.NS_PER_S}
    if len(steps):
        found[DECODE_STEP] = round_step_ms_mean(steps)
    for column in rounds.columns:
        if column.startswith(COUNTER) and rounds[column].notna().any():
            scale = definitions.NS_PER_US if column.endswith("_ns") else 1
            per_step = float(rounds[column].sum()) / max(1, len(steps) or len(rounds))
            found[counter_as_shown(column.removeprefix(COUNTER))] = per_step / scale
    return found


def outputs_differ(runs: Runs) -> bool:
    return any(each.fail(run.manifest.promises_outputs) for run in runs.values() for each in run.outputs())


def result(plan: Plan, folder: str, runs: Runs) -> ExperimentResult:
    """What `--format json` prints."""
    experiment = plan.experiment
    main = experiment.claims[0]
    run = runs[main.boots, main.workload]
    decided = None
    if main.change:
        decided = comparison.of_pair(_deciding_by(main, run), run.blocks, main.before, main.arm)
    claims = [_claim(claim, runs[claim.boots, claim.workload], claim is main) for claim in experiment.claims]
    kinds = {each.device["kind"] for run in runs.values() for each in run.manifest.descriptions.values()}
    return ExperimentResult(
        schema_version=SCHEMA_VERSION,
        experiment=experiment.name,
        run=folder,
        device=", ".join(sorted(kinds)),
        conclusion=_conclusion(plan, claims[0], decided, runs),
        verdict=decided.decided.verdict if decided is not None and decided.decided is not None else None,
        title=experiment.title,
        question=experiment.question,
        sources=experiment.sources,
        extents=plan.extents(),
        scaling=plan.scaling(),
        claims=claims,
        tables=[_table(layout, plan, runs) for layout in experiment.tables],
        outputs=sum_of([each for run in runs.values() for each in run.outputs()]),
        notes=experiment.notes,
        follow_up=experiment.follow_up,
        runs=[
            RunSize(boots=boots, workload=workload, blocks=len(run.blocks))
            for (boots, workload), run in runs.items()
        ],
        warnings=_warnings(plan, decided, runs),
    )


def sum_of(parts: Sequence[Outputs]) -> Outputs:
    """`near_ties` is None where nothing differs, or where a part that differs was not judged. It is weak
    where every part is."""
    ties = [each.near_ties for each in parts if each.identical != each.compared]
    judged = [each for each in ties if each is not None]
    return Outputs(
        compared=sum(each.compared for each in parts),
        identical=sum(each.identical for each in parts),
        near_ties=sum(judged) if judged and len(judged) == len(ties) else None,
        weak="those of each workload are few texts" if parts and all(each.weak for each in parts) else "",
    )


def _warnings(plan: Plan, decided: Comparison | None, runs: Runs) -> list[Warning]:
    """The warnings of the claims, the first one first, then the circumstances of each run; one that holds for
    every run is said once, others name their workloads, with their boots where others have one of that
    name."""
    places: dict[Warning, dict[tuple[str, str], None]] = {}
    first, *others = plan.experiment.claims
    where = first.boots, first.workload
    of_first = few_trials(runs[where].manifest.design, len(runs[where].blocks))
    if decided is not None:
        of_first = [
            each
            for each in decided.warnings
            if isinstance(each, Contradicted) or (isinstance(each, OfVerdict) and not each.settles)
        ]
    said = [(where, [*of_first, *_few_requests(first, runs[where])])]
    for claim in others:
        run = runs[where := (claim.boots, claim.workload)]
        said.append((where, [*_of_described(claim, run), *_few_requests(claim, run)]))
    for where, run in runs.items():
        said.append((where, circumstances(run.manifest, run.blocks, run.values)))
    for where, found in said:
        for each in found:
            places.setdefault(each, {})[where] = None
    count = Counter(workload for _, workload in runs)
    return [
        each
        if runs.keys() <= among.keys()
        else each.about(", ".join(name if count[name] == 1 else f"{boots} {name}" for boots, name in among))
        for each, among in places.items()
    ]


def _of_described(claim: Claim, run: Finished) -> list[Warning]:
    """Why a change that has no verdict is not believed, and what the order of the arms did to it."""
    effect, sides = run.effect(claim), run.sides(claim)
    if effect is None or sides is None or effect.scale != "ratio" or effect.sd is None:
        return []
    manifest = _deciding_by(claim, run).pair(claim.before, claim.arm)
    before, after = sides.values()
    order = of_order(manifest, [block.number for block in run.trials(claim)], before, after, judged=False)
    doubt = run.doubt(claim)
    doubted = [] if doubt is None else [TurnsNotBelieved((claim.change,), doubt)]
    return [each.about(f"{claim.change}, {claim.before} → {claim.arm}") for each in (*doubted, *order)]


def _few_requests(claim: Claim, run: Finished) -> list[Warning]:
    """Warn that a high percentile is made of few requests. It is made per boot: more boots do not help."""
    name, _, level = claim.change.rpartition("_p")
    needed = tail.NEEDED_SAMPLES.get(int(level)) if name in definitions.TIMES else None
    if needed is None or name.startswith(("itl", "client_lag")):  # these have many samples a request
        return []
    requests = [block.of(arm, "requests") for block in run.blocks for arm in (claim.before, claim.arm)]
    fewest = min(int((each["error"] == "").sum()) for each in requests)
    return [FewRequests(claim.change, fewest, int(level), needed)] if fewest < needed else []


def _claim(claim: Claim, run: Finished, first: bool = False) -> ClaimResult:
    measured, effect = number(run, claim), run.effect(claim)
    detectable = None
    if first and effect is not None and effect.sd is not None:
        detectable = paired.as_change(planning.smallest_detectable(effect.sd, effect.blocks), effect.scale)
    return ClaimResult(
        says=claim.says,
        workload=claim.workload,
        before=claim.before or None,
        after=claim.arm,
        metric=claim.change or f"{claim.share} / {claim.of}",
        reported=claim.reported,
        measured=measured,
        finding=finding(claim.reported, measured) if run.doubt(claim) is None else NOT_BELIEVED,
        detectable=detectable,
    )


def finding(reported: float | None, cell: Number) -> str:
    """How a reported number compares with a measured interval."""
    if reported is None or isinstance(cell, NotMeasured | Delta):
        return ""
    low, high, change = cell.low, cell.high, isinstance(cell, Change)
    if low <= reported <= high:
        return "the interval holds it" + (", and no change" if change and low <= 0 <= high else "")
    if change and reported * cell.value < 0 and (low > 0 or high < 0):
        return "the other way here"
    return "less here" if abs(high if reported > high else low) < abs(reported) else "more here"


def _conclusion(plan: Plan, first: ClaimResult, decided: Comparison | None, runs: Runs) -> str:
    main = plan.experiment.claims[0]
    run = runs[main.boots, main.workload]
    device = next(iter(run.manifest.descriptions.values())).device["kind"]
    if decided is not None:
        found = words.conclusion(device, decided)
    else:
        value = "not measured"
        if isinstance(first.measured, Measured):
            value = f"{first.measured.value:.1%} [{first.measured.low:.1%}, {first.measured.high:.1%}]"
        found = (
            f"{plan.experiment.name}, {main.workload}: {main.share} is {value} of {main.of} over "
            f"{len(run.blocks)} trials on the {device} device."
        )
    finding = f": {first.finding}" if first.finding else ""
    return f"{found} The source says: {main.says}{finding}."


def _deciding_by(claim: Claim, run: Finished) -> Manifest:
    """The run's manifest, deciding by the claim's own metric."""
    replace, design = msgspec.structs.replace, run.manifest.design
    name = f"{design.name}, {claim.before} → {claim.arm}"
    return replace(run.manifest, design=replace(design, name=name, primary=claim.change))


def _table(layout: Layout, plan: Plan, runs: Runs) -> TableResult:
    """A row of the layout on each workload; the workload is named where there are several."""
    workloads = list(plan.experiment.boots[layout.boots].workloads)
    heads = ["workload"] if len(workloads) > 1 else []
    heads += [""] if any(row.label for row in layout.rows) else []
    rows: list[list[Cell]] = []
    for workload in workloads:
        for row in layout.rows:
            starts = {"workload": workload, "": row.label}
            cells = [cell(runs[layout.boots, workload], row, column) for column in layout.columns]
            rows.append([*(starts[head] for head in heads), *cells])
    columns = [*heads, *(column.title for column in layout.columns)]
    return TableResult(title=layout.title, columns=columns, rows=rows, note=layout.note)


def cell(run: Finished, row: Row, column: Column) -> Cell:
    """What stands where a row and a column meet."""
    here = column.of_row(row)
    match column.kinds[0]:
        case "reported":
            return row.reported or "–"
        case "option":
            return str(getattr(run.manifest.design.workload, here.option))
        case "outputs":
            if not here.before or here.before == here.arm:
                return "–"
            found = outputs.same(run.manifest.pair(here.before, here.arm), run.blocks)
            return words.counts(found) if found.compared else "–"
        case "percentiles":
            numbers = [number(run, Quantity(value=name, arm=here.arm)) for name in here.percentiles]
            values = [each.value for each in numbers if isinstance(each, Measured)]
            whole = len(values) == len(numbers)
            return Percentiles(value=values, unit=unit_of(here.percentiles[0])) if whole else NONE
    return number(run, here)


def number(run: Finished, quantity: Quantity) -> Number:
    """A value, a change or a share."""
    if quantity.change:
        effect = run.effect(quantity)
        if effect is None:
            return NONE
        low, high = _interval(effect)
        if effect.change is None:
            return Delta(value=effect.delta, low=low, high=high, unit=unit_of(quantity.change))
        return Change(value=effect.change, low=low, high=high)
    values = run.shares(quantity) if quantity.share else run.of(quantity.value, quantity.arm)
    if values is None:
        return NONE
    scale: paired.Scale = "difference" if quantity.share else scale_of(quantity.value, values)
    base = 1.0 if scale == "ratio" else 0.0
    effect = paired.effect([base] * len(values), values, scale)
    low, high = _interval(effect)
    if quantity.share:
        return Share(value=effect.after, low=low, high=high)
    return Level(value=effect.after, low=base + low, high=base + high, unit=unit_of(quantity.value))


def _interval(effect: paired.Effect) -> tuple[float, float]:
    assert effect.low is not None  # an experiment has several blocks
    assert effect.high is not None
    return effect.low, effect.high
