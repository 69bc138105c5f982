"""What a machine shows between two equal arms: the noise floor, kept under results/floors/ by `bench aa`.

A floor is of one machine, engine, model, workload and number of blocks; another A/A of the same replaces it.
Later runs show it beside their verdicts. Where the only floor at hand is old, or was measured under other
circumstances, it is shown too, and a warning says what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from math import log2
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis import decision
from overlap_bench.harness.analysis.outputs import NONE_COMPARED
from overlap_bench.harness.analysis.result import Comparison, MetricRow, Outputs, Result
from overlap_bench.harness.analysis.verdict_warnings import FloorRemark, OutputsBesideFloor, WithinFloor
from overlap_bench.harness.analysis.warnings import Warning, ranked
from overlap_bench.harness.common import names
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.common.names import FIELDS, of_today
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store.files import SCHEMA_VERSION, write_json
from overlap_bench.harness.store.manifest import Manifest, is_moment
from overlap_bench.harness.workload.workload import Workload

STALE_DAYS = 30
NEEDED = ("engine", "model", "kind", "method")  # a floor that differs in one of these says nothing of a run
# A floor does not know the toggles, and these depend on little else: 0.04% where all host time is hidden, 1%
# where none is.
OF_ONE_SETTING = (*definitions.MATCHED[1:], *definitions.IN_TURNS[1:])
# The weightiest first.
WEIGHED = ("machine", "device", "workload", "options", "goodput", "rounds", "segments", "blocks")
# A run sizes these by its first boots, so no two have the same. Within this factor an interval differs by
# less than a quarter: its width goes with the root of how much is measured, or less.
SIZES, ALIKE = ("rounds", "segments"), 1.5


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """What one metric does between equal arms. `floor` is half of the 95% interval: a smaller change says
    nothing here; `detectable`, the true change that as many blocks detect in 4 of 5 runs. Fractions, or in
    the metric's unit on the difference scale."""

    scale: paired.Scale
    sd: float  # of the paired differences, log ratios or in the unit
    floor: float
    detectable: float


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a floor is a floor of."""

    machine: Machine
    device: str  # its name
    kind: str  # "cuda", "emulated", ...
    engine: str
    model: str
    options: api.EngineOptions
    workload: Workload
    rounds: int
    blocks: int
    method: str = "rounds"  # or "slices", where arms took turns; a floor is of one
    segments: int = 0
    goodput: dict[str, float] = {}  # limits, ms


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    run: str
    created: str
    commit: str
    versions: dict[str, str]
    toggles: dict[str, str]
    of: Circumstances
    metrics: dict[str, Spread]
    outputs: Outputs = NONE_COMPARED  # an older floor has none
    seconds: float | None = None  # of a block, boots included; likewise


@dataclass(frozen=True, slots=True)
class Shown:
    """The floor of each metric, for the blocks of a later run; and what there is to say of it."""

    values: Mapping[str, tuple[paired.Scale, float]]
    remarks: tuple[str, ...]
    outputs: Outputs = NONE_COMPARED  # of the equal arms


def circumstances(manifest: Manifest, blocks: int) -> Circumstances:
    """The circumstances of a run; the before arm speaks for both."""
    design = manifest.design
    before: Arm = design.arms[0]
    device = manifest.descriptions[before.name].device
    return Circumstances(
        machine=manifest.measured_on,
        device=without_k(device["name"]),
        kind=without_k(device["kind"]),
        engine=before.engine,
        model=before.options.model,
        options=without_k_of(before.options, device["kind"]),
        workload=design.workload,
        rounds=design.rounds,
        blocks=blocks,
        method="slices" if design.segments else "rounds",
        segments=design.segments,
        goodput=dict(design.goodput),
    )


def without_k(pace: str) -> str:
    """A pace, or the kind of a paced device, whose stretch is rounded to a power of two: each run measures
    another k, by some percent, and k/2 and 2k are other settings."""
    found = re.search(r"\*(\d+(?:\.\d+)?)$", pace)
    return pace if found is None else f"{pace[: found.start()]}*2^{round(log2(float(found[1])))}"


def without_k_of(options: api.EngineOptions, kind: str) -> api.EngineOptions:
    """An arm's options on that kind of device, which "auto" does not name, without what k was."""
    pace = None if options.pace is None else without_k(options.pace)
    return msgspec.structs.replace(options, device=without_k(kind), pace=pace)


def _of_floor(of: Circumstances) -> Circumstances:
    """A floor's circumstances; one of an earlier version has its k in them."""
    return msgspec.structs.replace(
        of, device=without_k(of.device), kind=without_k(of.kind), options=without_k_of(of.options, of.kind)
    )


def floor_of(manifest: Manifest, comparison: Comparison, seconds: float | None = None) -> Floor:
    """The floor that an A/A run has found, whose blocks took `seconds` each."""
    return Floor(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        created=manifest.created,
        commit=manifest.code.commit,
        versions=manifest.versions,
        toggles=manifest.design.arms[0].toggles,
        of=circumstances(manifest, comparison.blocks),
        metrics={
            name: _spread(sd, _scale(row), comparison.blocks)
            for name, row in comparison.metrics.items()
            if (sd := _sd_of_trials(row, comparison.blocks)) is not None
        },
        outputs=comparison.outputs,
        seconds=seconds,
    )


def _sd_of_trials(row: MetricRow, trials: int) -> float | None:
    """What trials scatter by; where nodes disagree, what as many trials would, to be as sure as they are."""
    if row.sd is None or row.counted in (None, trials):
        return row.sd
    return paired.half_width(row.sd, row.counted) / paired.half_width(1.0, trials)


def _spread(sd: float, scale: paired.Scale, blocks: int) -> Spread:
    from overlap_bench.harness.stats import planning

    floor, smallest = paired.half_width(sd, blocks), planning.smallest_detectable(sd, blocks)
    return Spread(
        scale=scale,
        sd=sd,
        floor=paired.as_change(floor, scale),
        detectable=paired.as_change(smallest, scale),
    )


def keep(folder: Path, floor: Floor) -> Path:
    """Write a floor, in place of an earlier one of the same circumstances. Raises WriteFailed."""
    what = floor.of
    digest = blake2b(msgspec.json.encode(what, order="sorted"), digest_size=4).hexdigest()
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", what.model)
    path = folder / f"{what.engine}-{model}-{what.blocks}-blocks-{digest}.json"
    write_json(path, floor)
    return path


def read(folder: Path) -> tuple[list[Floor], list[str]]:
    """Every floor in a folder, and a line for each file that is none."""
    floors, remarks = list[Floor](), list[str]()
    for path in sorted(folder.glob("*.json")):
        try:
            floor = msgspec.json.decode(of_today(path.read_text("utf-8")), type=Floor)
            if not is_moment(floor.created):
                raise ValueError(f"it was created '{floor.created}'")
            floors.append(floor)
        except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
            remarks.append(
                f"the noise floor in {path} is damaged or was edited: {error}; it is left out; bench aa "
                "measures a fresh one"
            )
    return floors, remarks


def find(folder: Path, manifest: Manifest, blocks: int, alpha: float) -> Shown:
    """The floor that fits a run best, as half of the interval that `blocks` blocks at level `alpha` would
    have; no values where there is none of its engine, model and kind of device. A file that can't be read is
    named and left out: it must not cost a finished run its result."""
    wanted = circumstances(manifest, blocks)
    floors, remarks = read(folder)
    known = [(_of_floor(floor.of), floor) for floor in floors]
    fitting = [
        (_differences(of, wanted), floor)
        for of, floor in known
        if all(getattr(of, name) == getattr(wanted, name) for name in NEEDED)
    ]
    if not fitting or blocks < 2:
        return Shown({}, tuple(remarks))
    newest_first = sorted(fitting, key=lambda each: each[1].created, reverse=True)
    differences, floor = min(newest_first, key=lambda each: [name in each[0] for name in WEIGHED])
    then = f"noise floor, measured on {floor.created[:10]} by {floor.run}"
    other = "equal arms may differ by more or less now; bench aa measures a fresh one"
    if differences:
        remarks.append(f"foreign {then}: {', '.join(differences.values())}; {other}")
    if age := _age(floor, manifest):
        remarks.append(f"stale {then}: {age}; {other}")
    return Shown(at_level(floor, blocks, alpha), tuple(remarks), floor.outputs)


def at_level(floor: Floor, blocks: int, alpha: float) -> dict[str, tuple[paired.Scale, float]]:
    """The floor of each metric, for so many blocks, on its scale: half of the interval at that level."""
    return {
        name: (spread.scale, paired.as_change(paired.half_width(spread.sd, blocks, alpha), spread.scale))
        for name, spread in floor.metrics.items()
    }


def beside(comparison: Comparison, shown: Shown) -> Comparison:
    """The comparison with the floor of each metric, and with what is to be said of it."""
    rows = {
        name: msgspec.structs.replace(row, floor=_of_row(name, row, shown))
        for name, row in comparison.metrics.items()
    }
    row = rows.get(comparison.primary)
    said: list[Warning] = [FloorRemark(line) for line in shown.remarks]
    if not said and row is not None and row.verdict in decision.CHANGES and row.within_floor:
        said.append(WithinFloor(comparison.primary, row.verdict, row.floor or 0.0))
    outputs = comparison.outputs
    if outputs.identical < outputs.compared and outputs.near_ties is None and shown.outputs.compared:
        now, then = (
            f"{each.compared - each.identical} of {each.compared}" for each in (outputs, shown.outputs)
        )
        said.append(OutputsBesideFloor(now, then))
    return msgspec.structs.replace(comparison, metrics=rows, warnings=ranked([*comparison.warnings, *said]))


def _of_row(name: str, row: MetricRow, shown: Shown) -> float | None:
    """The floor of a metric; None where there is none on the scale of this run: a goodput of 0 among equal
    arms makes it one of requests per second."""
    scale, floor = shown.values.get(name, (None, None))
    return floor if name not in OF_ONE_SETTING and scale == _scale(row) else None


def _scale(row: MetricRow) -> paired.Scale:
    return "difference" if row.change is None else "ratio"


def beside_known(result: Result, manifest: Manifest, folder: Path) -> Result:
    """The result of a run with the floor in `folder` that fits it best; one arm alone has none."""
    comparison = result.comparisons[0]  # all have as many blocks, and the same first arm
    if comparison.after is None:
        return result
    shown = find(folder, manifest, comparison.blocks, 1 - comparison.confidence)
    return msgspec.structs.replace(result, comparisons=[beside(each, shown) for each in result.comparisons])


def _differences(floor: Circumstances, wanted: Circumstances) -> dict[str, str]:
    """What differs, by name, the weightiest first."""
    old, new = msgspec.to_builtins(floor), msgspec.to_builtins(wanted)
    alike = {name for name in SIZES if max(old[name], new[name]) <= ALIKE * min(old[name], new[name])}
    found = {name: names.difference(old[name], new[name], FIELDS.get(name, name)) for name in WEIGHED}
    return {name: said for name, said in found.items() if said and name not in alike}


def _age(floor: Floor, manifest: Manifest) -> str:
    """Why a floor is no longer to be trusted, "" where it is."""
    days = (datetime.fromisoformat(manifest.created) - datetime.fromisoformat(floor.created)).days
    if days > STALE_DAYS:
        return f"{days} days old"
    return names.difference(floor.versions, manifest.versions)


def with_floor(result: Result, manifest: Manifest, folder: Path, seconds: float | None = None) -> Result:
    """The result with the noise floor beside it; an A/A run, whose blocks took `seconds` each, measures that,
    and keeps it in `folder`."""
    design, comparison = manifest.design, result.comparisons[0]
    if design.against_itself and design.plant is None and comparison.blocks > 1:
        floor = floor_of(manifest, comparison, seconds)
        keep(folder, floor)
        shown = Shown(at_level(floor, comparison.blocks, 1 - comparison.confidence), ())
        return msgspec.structs.replace(result, comparisons=[beside(comparison, shown)])
    return beside_known(result, manifest, folder)
