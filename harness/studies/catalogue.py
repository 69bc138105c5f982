"""From a results folder to the catalogue of claims: whatever in it measures a variant stands beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path

import msgspec

from overlap_bench.harness.analysis import catalogue, stored
from overlap_bench.harness.analysis.catalogue import Catalogue, Entry
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.stored import summary
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.plan.variants import Variant, load_unmeasured, load_variants, measured_by
from overlap_bench.harness.store.files import EXPERIMENT_FILE, SCHEMA_VERSION, SUMMARY_FILE, StoreError
from overlap_bench.harness.store.manifest import Manifest, read_manifest
from overlap_bench.harness.studies import experiment

SHIPPED = "claims.json"  # in harness.analysis: the best measurement of each claim in each regime
Variants = Mapping[str, Variant]


def catalogue_of(folder: Path | None, name: str | None = None) -> Catalogue:
    """Every claim, or that of one variant, with what was measured of it: by this project, as it ships; or in
    a folder, by experiments with a summary and by finished runs. Raises StoreError for a damaged file."""
    variants = load_variants()
    measured: dict[str, list[Entry]] = {each: [] for each in variants}
    if folder is None:
        shipped = files("overlap_bench.harness.analysis").joinpath(SHIPPED).read_text("utf-8")
        found: Iterable[Entry] = msgspec.json.decode(of_today(shipped), type=Catalogue).entries
    else:
        found = chain(_claimed(folder, variants), _runs(folder, variants))
    for entry in found:
        if entry.claim in measured:
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


def _claimed(folder: Path, variants: Variants) -> Iterator[Entry]:
    """What experiments found of the changes that they name; shares of a step are no variant's claim."""
    for path in sorted(folder.rglob(EXPERIMENT_FILE)):
        if not experiment.is_finished(path.parent):
            continue
        kept, found = experiment.read(path.parent), experiment.show(path.parent).result
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
            options = msgspec.to_builtins(before.options), msgspec.to_builtins(after.options)
            variant = measured_by(variants, before.engine, before.toggles, after.toggles, options)
            if variant is None:
                continue
            result = summary(run, Result) if (run / SUMMARY_FILE).exists() else stored.result(run, manifest)
            regime = catalogue.regime_of_arm(result.comparisons, [*arms].index(asked.before))
            entry = catalogue.of_claim(
                variant,
                claim,
                result.device,
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


def _page(folder: Path, path: Path) -> str:
    """What a person opens: the page beside a file or a folder of results, or else itself."""
    page = path.with_suffix(".md")
    return str((page if page.exists() else path).relative_to(folder))


def _machine(manifest: Manifest) -> str:
    machine = manifest.measured_on  # of a cluster a node, and not where the driver ran
    return ", ".join(machine.gpus) or machine.cpu
