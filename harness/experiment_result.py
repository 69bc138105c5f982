"""From the runs of an experiment to the object of `--format json`: tables of cells, claims beside what was
measured, the conclusion. Pure: frames in, plain data out.

A cell is a text, or `{"shown", "value", "low", "high", "unit"}`: "value" and "share" are means over blocks,
"change" and "delta" effects of paired blocks (stats.py), each with its interval; "percentiles" has a list of
values and no interval. Values and percentiles are geometric means where a change would be a ratio, so that
the change is that of the levels beside it. A share and a change are fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from harness import cautions, comparison, divergences, metrics, outputs, stats, store, tables, tail
from harness.block import Block
from harness.experiment_file import (
    DECODE_STEP,
    EXTRA,
    SUBMIT_WALL,
    Adjusted,
    Claim,
    Column,
    Experiment,
    Layout,
    Row,
    counter_as_shown,
    extents,
    measured_in,
    scaling,
)
from harness.mechanism import COUNTER
from harness.store import Manifest

US = {"us": 1.0, "ms": 1e3, "s": 1e6}  # factors to us, for shares
NONE = {"shown": "none"}

Cell = str | dict[str, Any]
Outputs = dict[str, int | None]


@dataclass(frozen=True)  # no slots: `values` is cached
class Finished:
    """One finished run: its manifest and its blocks."""

    manifest: Manifest
    blocks: Sequence[Block]

    @cached_property
    def values(self) -> dict[str, dict[str, list[float]]]:
        """metric or counter → arm → one value per block, for what has a finite one in every block."""
        found = {
            arm.name: [self._of_boot(block, arm.name) for block in self.blocks]
            for arm in self.manifest.design.arms
        }
        names = dict.fromkeys(name for boots in found.values() for boot in boots for name in boot)
        return comparison.series(found, names)

    def _of_boot(self, block: Block, arm: str) -> dict[str, float]:
        requests, steps, rounds, work = (
            block.of(arm, name) for name in ("requests", "steps", "rounds", "work")
        )
        found = metrics.of_boot(requests, steps, rounds, work)
        by_round = requests.groupby("round")
        walls = by_round["submitted_ns"].max() - by_round["sent_ns"].min()
        found[SUBMIT_WALL] = float(walls.mean()) / metrics.NS_PER_S
        if len(steps):
            found[DECODE_STEP] = metrics.decode_step_ms_mean(steps)
        for column in rounds.columns:
            if column.startswith(COUNTER) and rounds[column].notna().any():
                name, unit = counter_as_shown(column.removeprefix(COUNTER))
                per_step = float(rounds[column].sum()) / max(1, len(steps) or len(rounds))
                found[name] = per_step / metrics.NS_PER_US if unit == "us" else per_step
        return found

    def of(self, name: str, arm: str) -> list[float] | None:
        """One value per block, or None where the engine does not say, or has no sample."""
        return self.values.get(name, {}).get(arm)

    def outputs(self, before: str, after: str) -> Outputs:
        """As outputs.same, of two arms."""
        return outputs.same(self.manifest.pair(before, after), self.blocks)

    def all_outputs(self) -> list[Outputs]:
        """Of every arm against the first."""
        first, *others = (arm.name for arm in self.manifest.design.arms)
        return [self.outputs(first, other) for other in others]


Runs = Mapping[tuple[str, str], Finished]  # by boots and workload


def outputs_differ(runs: Runs) -> bool:
    """Whether outputs that must be equal differ, in any run."""
    return any(
        divergences.fails(each, run.manifest.promises_outputs)
        for run in runs.values()
        for each in run.all_outputs()
    )


def result(experiment: Experiment, folder: str, kind: str, adjusted: Adjusted, runs: Runs) -> dict[str, Any]:
    """The object that `--format json` prints. `kind`: the device that the workloads were chosen for."""
    claims = [_claim(claim, runs[claim.boots, claim.workload]) for claim in experiment.claims]
    main = experiment.claims[0]
    claims[0]["detectable"] = _detectable(main, runs[main.boots, main.workload])
    described = [each for run in runs.values() for each in run.manifest.descriptions.values()]
    kinds = sorted({each.device["kind"] for each in described})
    return {
        "schema_version": store.SCHEMA_VERSION,
        "experiment": experiment.name,
        "run": folder,
        "device": ", ".join(kinds),
        "conclusion": conclusion(experiment, claims[0], runs),
        "title": experiment.title,
        "question": experiment.question,
        "sources": msgspec.to_builtins(experiment.sources),
        "extents": extents(experiment, kind, adjusted),
        "scaling": scaling(experiment, adjusted) if kind == "emulated" else [],
        "claims": claims,
        "tables": [_table(layout, experiment, runs) for layout in experiment.tables],
        "outputs": _outputs(runs),
        "notes": experiment.notes,
        "follow_up": experiment.follow_up,
        "runs": [
            {"boots": boots, "workload": workload, "blocks": len(run.blocks)}
            for (boots, workload), run in runs.items()
        ],
        "warnings": _warnings(experiment, runs),
    }


def _outputs(runs: Runs) -> Outputs:
    return sum_of([each for run in runs.values() for each in run.all_outputs()])


def sum_of(parts: Sequence[Outputs]) -> Outputs:
    """`near_ties` is null where nothing differs, or where a part that differs was not judged."""
    ties = [each["near_ties"] for each in parts if each["identical"] != each["compared"]]
    judged = [each for each in ties if each is not None]
    return {
        "compared": sum(each["compared"] or 0 for each in parts),
        "identical": sum(each["identical"] or 0 for each in parts),
        "near_ties": sum(judged) if judged and len(judged) == len(ties) else None,
    }


def _warnings(experiment: Experiment, runs: Runs) -> list[str]:
    """Those of the claims, the first one first, then the circumstances of each run; a line that holds for
    every run is said once."""
    lines: list[tuple[tuple[str, str], str]] = []
    for claim in experiment.claims:
        where = claim.boots, claim.workload
        lines += [(where, line) for line in _of_claim(claim, runs[where], claim is experiment.claims[0])]
    for where, run in runs.items():
        values = comparison.measured(
            run.manifest.design,
            [comparison.block_values(run.manifest.design, block) for block in run.blocks],
        )
        lines += [(where, line) for line in cautions.circumstances(run.manifest, run.blocks, values)]
    by_line: dict[str, list[tuple[str, str]]] = {}
    for where, line in lines:
        by_line.setdefault(line, []).append(where)
    return [
        line if runs.keys() <= set(places) else f"{', '.join(_named(places, runs))}: {line}"
        for line, places in by_line.items()
    ]


def _named(places: Sequence[tuple[str, str]], runs: Runs) -> list[str]:
    """Their workloads, each with its boots where others have a workload of that name."""
    count = Counter(workload for _, workload in runs)
    return [
        workload if count[workload] == 1 else f"{boots} {workload}"
        for boots, workload in dict.fromkeys(places)
    ]


def _of_claim(claim: Claim, run: Finished, first: bool) -> list[str]:
    """What a reader must know of what was measured for a claim; the first one has a verdict."""
    before, after = run.of(claim.change, claim.before), run.of(claim.change, claim.arm)
    if before is None or after is None:
        return cautions.few_blocks(len(run.blocks)) if first else []
    manifest = _deciding_by(claim, run).pair(claim.before, claim.arm)
    values = {claim.change: {claim.before: before, claim.arm: after}}
    effect = stats.effect(before, after, _scale(claim.change, before, after))
    order = cautions.of_order(manifest, run.blocks, values, effect, judged=first)
    if first:
        verdict = _judged(claim, run)["metrics"][claim.change]["verdict"]
        return [*cautions.of_decision(manifest, effect, verdict), *order, *_few_requests(claim, run)]
    named = [f"{claim.change}, {claim.before} → {claim.arm}: {line}" for line in order]
    return [*named, *_few_requests(claim, run)]


def _few_requests(claim: Claim, run: Finished) -> list[str]:
    """That a high percentile is made of few requests. It is computed per boot, so more boots do not help."""
    name, _, level = claim.change.rpartition("_p")
    needed = tail.NEEDED_SAMPLES.get(int(level)) if name in metrics.DISTRIBUTIONS else None
    if needed is None or name.startswith(("itl", "client_lag")):  # these have many samples a request
        return []
    requests = [block.of(arm, "requests") for block in run.blocks for arm in (claim.before, claim.arm)]
    fewest = min(int((each["error"] == "").sum()) for each in requests)
    if fewest >= needed:
        return []
    return [
        f"{claim.change} is made of {fewest} requests in a boot, where P{level} wants {needed}: so few that "
        "single slow ones decide it"
    ]


# ---------------------------------------------------------------------------------------------------------
# Claims


def _claim(claim: Claim, run: Finished) -> dict[str, Any]:
    """What the source says, what was measured, and how the two compare."""
    if claim.change:
        metric = claim.change
        cell = _change(run, claim.change, claim.before, claim.arm)
    else:
        metric = f"{claim.share} / {claim.of}"
        cell = _share(run, claim.share, claim.of, claim.arm)
    return {
        "says": claim.says,
        "workload": claim.workload,
        "before": claim.before or None,
        "after": claim.arm,
        "metric": metric,
        "reported": claim.reported,
        "measured": cell,
        "finding": _finding(claim.reported, cell),
        "detectable": None,
    }


def _detectable(claim: Claim, run: Finished) -> float | None:
    """The smallest true change that such a run detects in 4 of 5 cases, by the spread of its blocks, as a
    fraction; None for a share."""
    before, after = run.of(claim.change, claim.before), run.of(claim.change, claim.arm)
    if before is None or after is None:
        return None
    effect = stats.effect(before, after)
    if effect.sd is None:
        return None
    return stats.as_change(stats.smallest_detectable(effect.sd, effect.blocks), effect.scale)


def _finding(reported: float | None, cell: Mapping[str, Any]) -> str:
    """How a reported number compares with a measured interval."""
    if reported is None or cell["shown"] not in ("change", "share") or cell["low"] is None:
        return ""
    low, high = cell["low"], cell["high"]
    if low <= reported <= high:
        no_change = cell["shown"] == "change" and low <= 0 <= high
        return "the interval holds it, and no change" if no_change else "the interval holds it"
    if cell["shown"] == "change" and reported * cell["value"] < 0 and (low > 0 or high < 0):
        return "the other way here"
    nearest = high if reported > high else low
    return "less here" if abs(nearest) < abs(reported) else "more here"


def conclusion(experiment: Experiment, claim: Mapping[str, Any], runs: Runs) -> str:
    """One sentence of what was measured, with its verdict, and one of what the source says."""
    main = experiment.claims[0]
    run = runs[main.boots, main.workload]
    device = next(iter(run.manifest.descriptions.values())).device["kind"]
    if main.change:
        found = tables.conclusion({"device": device}, _judged(main, run))
    else:
        cell = claim["measured"]
        interval = "" if cell.get("low") is None else f" [{cell['low']:.1%}, {cell['high']:.1%}]"
        value = "not measured" if cell["shown"] == "none" else f"{cell['value']:.1%}{interval}"
        found = (
            f"{experiment.name}, {main.workload}: {main.share} is {value} of {main.of} over "
            f"{len(run.blocks)} blocks on the {device} device."
        )
    finding = f": {claim['finding']}" if claim["finding"] else ""
    return f"{found} The source says: {main.says}{finding}."


def _judged(claim: Claim, run: Finished) -> dict[str, Any]:
    """The comparison that a claim is about, with its verdict."""
    return comparison.of_pair(_deciding_by(claim, run), run.blocks, claim.before, claim.arm)


def _deciding_by(claim: Claim, run: Finished) -> Manifest:
    """The run's manifest, deciding by the claim's own metric."""
    design = run.manifest.design
    name = f"{design.name}, {claim.before} → {claim.arm}"
    return msgspec.structs.replace(
        run.manifest, design=msgspec.structs.replace(design, name=name, primary=claim.change)
    )


# ---------------------------------------------------------------------------------------------------------
# Tables


def _table(layout: Layout, experiment: Experiment, runs: Runs) -> dict[str, Any]:
    """A row of the layout on each workload; the workload is named where there are several."""
    workloads = layout.workloads or list(experiment.boots[layout.boots].workloads)
    labelled = any(row.label for row in layout.rows)
    named = len(workloads) > 1
    rows: list[list[Cell]] = []
    for workload in workloads:
        run = runs[layout.boots, workload]
        for row in layout.rows:
            start: list[Cell] = [*([workload] if named else []), *([row.label] if labelled else [])]
            rows.append([*start, *(cell(run, row, column) for column in layout.columns)])
    heads = [*(["workload"] if named else []), *([""] if labelled else [])]
    return {
        "title": layout.title,
        "columns": [*heads, *(column.title for column in layout.columns)],
        "rows": rows,
        "note": layout.note,
    }


def cell(run: Finished, row: Row, column: Column) -> Cell:
    """What stands where a row and a column meet."""
    arm, before = column.arm or row.arm, column.before or row.before
    names = list(measured_in(row, column))
    match column.kinds[0]:
        case "reported":
            return row.reported or "–"
        case "option":
            return str(getattr(run.manifest.design.workload, column.option))
        case "value":
            return _value(run, names[0], arm)
        case "percentiles":
            return _percentiles(run, names, arm)
        case "change":
            return _change(run, names[0], before, arm)
        case "share":
            return _share(run, names[0], names[1], arm)
    found = run.outputs(before, arm) if before and before != arm else None
    return divergences.counts(found) if found and found["compared"] else "–"


def unit_of(name: str) -> str:
    """Of a metric or a counter."""
    if name in metrics.METRICS:
        return metrics.METRICS[name].unit
    return EXTRA.get(name) or ("us" if name.endswith("_us") else "per step")


def _value(run: Finished, name: str, arm: str) -> dict[str, Any]:
    values = run.of(name, arm)
    if values is None:
        return NONE
    return _one_sample("value", values, _scale(name, values), unit_of(name))


def _scale(name: str, *series: Sequence[float]) -> stats.Scale:
    """As comparison.scale_of, for counters too."""
    can_be_zero = name in metrics.METRICS and metrics.METRICS[name].can_be_zero
    return "ratio" if min(map(min, series)) > 0 and not can_be_zero else "difference"


def _one_sample(shown: str, values: Sequence[float], scale: stats.Scale, unit: str) -> dict[str, Any]:
    """Mean over blocks with its t interval; of the logarithms where the scale is that of ratios."""
    nothing = 1.0 if scale == "ratio" else 0.0
    found = stats.effect([nothing] * len(values), values, scale)
    low, high = (None if each is None else nothing + each for each in (found.low, found.high))
    return {"shown": shown, "value": found.after, "low": low, "high": high, "unit": unit}


def _percentiles(run: Finished, names: Sequence[str], arm: str) -> dict[str, Any]:
    found = [_value(run, name, arm) for name in names]
    if NONE in found:
        return NONE
    levels = [each["value"] for each in found]
    return {"shown": "percentiles", "value": levels, "low": None, "high": None, "unit": unit_of(names[0])}


def _change(run: Finished, name: str, before: str, arm: str) -> dict[str, Any]:
    first, second = run.of(name, before), run.of(name, arm)
    if not before or before == arm or first is None or second is None:
        return NONE
    effect = stats.effect(first, second, _scale(name, first, second))
    if effect.change is None:
        shown, value, unit = "delta", effect.delta, unit_of(name)
    else:
        shown, value, unit = "change", effect.change, ""
    return {"shown": shown, "value": value, "low": effect.low, "high": effect.high, "unit": unit}


def _share(run: Finished, part: str, whole: str, arm: str) -> dict[str, Any]:
    """How much of one time another is, in each block."""
    parts, wholes = run.of(part, arm), run.of(whole, arm)
    if parts is None or wholes is None or min(wholes) <= 0:
        return NONE
    factor = US[unit_of(part)] / US[unit_of(whole)]
    shares = [factor * one / other for one, other in zip(parts, wholes, strict=True)]
    return _one_sample("share", shares, "difference", "")
