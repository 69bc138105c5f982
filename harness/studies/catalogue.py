"""From a results folder to the catalogue of claims: whatever in it measures a variant stands beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from harness.analysis import catalogue
from harness.analysis.catalogue import Catalogue, Entry
from harness.analysis.experiment_result import ExperimentResult
from harness.analysis.result import MetricRow, Result, Sliced
from harness.analysis.stored import summary
from harness.common.machine import Machine
from harness.metrics.definitions import SLICED
from harness.plan.variants import Variant, load_unmeasured, load_variants
from harness.store.files import EXPERIMENT_FILE, SCHEMA_VERSION, SUMMARY_FILE, StoreError
from harness.store.manifest import Manifest, read_manifest
from harness.studies import experiment

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"  # of a checkout
SERIES = ("sliced_variants*.json", "todays_variants*.json")  # scripts that repeat `bench run --variant`
MAPPED_BATCH = 16  # of the points of a step map, those with the batch that most variants ask for
OVERRUN = 0.01  # of a point's steps, from which on its device had no known speed
Data = TypeVar("Data")
Variants = Mapping[str, Variant]


class Series(msgspec.Struct, Generic[Data]):
    """What a script of experiments/validation writes, as far as it is read here."""

    machine: Machine
    data: list[Data]


class Repeated(msgspec.Struct):
    """A run of SERIES."""

    variant: str
    metrics: dict[str, MetricRow]
    device: str = "paced"
    primary: str = SLICED
    sliced: Sliced | None = None  # None: decided in rounds


class Point(msgspec.Struct):
    """Of step_map: a variant at a pace and a batch."""

    variant: str
    pace: str
    batch: int
    change: float
    low: float
    high: float
    overrun: float


class Family(msgspec.Struct):
    points: list[Point]


def catalogue_of(folder: Path, name: str | None = None) -> Catalogue:
    """Every claim, or that of one variant, with what the folder has of it: the repeated runs and the step map
    of experiments/validation, experiments with a summary, and finished runs. Raises StoreError for a file
    that is damaged."""
    variants = load_variants()
    measured: dict[str, list[Entry]] = {each: [] for each in variants}
    for read in (_repeated, _mapped, _claimed, _runs):
        for entry in read(folder, variants):
            measured[entry.claim].append(entry)
    entries = [
        entry
        for variant in variants.values()
        for entry in measured[variant.name] or [catalogue.of_variant(variant)]
    ]
    entries += [catalogue.of_unmeasured(*each) for each in load_unmeasured().items()]
    return Catalogue(
        schema_version=SCHEMA_VERSION, entries=[each for each in entries if name in (None, each.claim)]
    )


def _repeated(folder: Path, variants: Variants) -> Iterator[Entry]:
    for path in [path for name in SERIES for path in sorted(folder.glob(name))]:
        series = _series(path, Series[Repeated])
        for run in series.data:
            if run.variant in variants:
                yield catalogue.measured(
                    variants[run.variant],
                    run.primary,
                    run.metrics[run.primary],
                    _kind(run.device),
                    machine=series.machine.cpu,
                    step_ms=catalogue.step_ms(run.metrics),
                    batch=run.sliced and run.sliced.batch,
                    found_in=_page(folder, path),
                )


def _mapped(folder: Path, variants: Variants) -> Iterator[Entry]:
    path = folder / "step_map.json"
    if not path.exists():
        return
    series = _series(path, Series[Family])
    for point in [point for family in series.data for point in family.points]:
        if point.variant in variants and point.batch == MAPPED_BATCH and point.overrun < OVERRUN:
            row = MetricRow(
                unit="ms", better="lower", change=point.change, ci_low=point.low, ci_high=point.high
            )
            yield catalogue.measured(
                variants[point.variant],
                SLICED,
                row,
                f"emulated, paced: {point.pace}",
                machine=series.machine.cpu,
                step_ms=float(point.pace.removesuffix("ms")),
                batch=float(point.batch),
                found_in=_page(folder, path),
            )


def _claimed(folder: Path, variants: Variants) -> Iterator[Entry]:
    """What experiments found of the changes that they name; shares of a step are no variant's claim."""
    for path in sorted(folder.rglob(EXPERIMENT_FILE)):
        if not (path.parent / SUMMARY_FILE).exists():
            continue
        kept, found = experiment.read(path.parent), summary(path.parent, ExperimentResult)
        runs = kept.runs(path.parent)
        for asked, claim in zip(kept.experiment.claims, found.claims, strict=False):
            if not asked.change:
                continue
            try:
                run = runs[asked.boots, asked.workload]
                manifest = read_manifest(run)
                arms = {arm.name: arm for arm in manifest.design.arms}
                before, after = arms[asked.before], arms[asked.arm]
            except KeyError as error:
                raise StoreError(f"{path} was edited: a claim names {error}, which no run has") from error
            variant = catalogue.measured_by(variants, before.engine, before.toggles, after.toggles)
            if variant is None or before.options != after.options:
                continue
            regime = catalogue.regime(summary(run, Result).comparisons[0])
            entry = catalogue.of_claim(
                variant,
                claim,
                found.device,
                machine=_machine(manifest),
                found_in=_page(folder, path.parent),
                **regime,
            )
            if entry is not None:
                yield entry


def _runs(folder: Path, variants: Variants) -> Iterator[Entry]:
    """Runs by themselves and the points of sweeps, by the time at which they were measured. What a factorial
    varies belongs together, and of a planted delay no source speaks."""
    found: list[tuple[str, Path, Manifest]] = []
    for path in folder.rglob("manifest.json"):
        run = path.parent
        if (run / SUMMARY_FILE).exists() and not (run.parent / EXPERIMENT_FILE).exists():
            manifest = read_manifest(run)
            if manifest.design.factorial is None and manifest.design.plant is None:
                found.append((manifest.created, run, manifest))
    for _, run, manifest in sorted(found, key=lambda each: each[:2]):
        result = summary(run, Result)
        yield from catalogue.of_run(variants, result, _machine(manifest), _page(folder, run))


def _series(path: Path, kind: type[Series[Data]]) -> Series[Data]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path} is damaged or was edited: {error}") from error


def _kind(device: str) -> str:
    """As devices call themselves: "paced, 10 ms" is "emulated, paced: 10ms"."""
    if device == "unpaced":
        return "emulated"
    return f"emulated, {device}".replace("paced, ", "paced: ").replace(" ms", "ms")


def _page(folder: Path, path: Path) -> str:
    """What a person opens: the page beside a file or a folder of results, or else itself."""
    page = path.with_suffix(".md")
    return str((page if page.exists() else path).relative_to(folder))


def _machine(manifest: Manifest) -> str:
    return ", ".join(manifest.machine.gpus) or manifest.machine.cpu
