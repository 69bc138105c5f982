"""An experiment from its file to its folder, and from its folder to what it found.

results/<time>-experiment-<name>-<id>/ holds experiment.json and a run folder for each workload, such as any
run has: what is laid side by side here can be looked at there one by one (bench compare RUN:arm RUN:arm).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, experiment_result, outputs
from overlap_bench.harness.analysis.experiment_result import ExperimentResult
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.stored import finished, readable, summary
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.plan import experiment_file
from overlap_bench.harness.plan.design import Design, check_metrics
from overlap_bench.harness.plan.experiment_file import Adjusted, Plan
from overlap_bench.harness.store import files, tables, trust
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import (
    check_resume,
    create,
    described_here,
    discard_if_empty,
    held,
    note_resumed,
    read_manifest,
    signed,
    write_manifest,
)
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.store.trust import Admit
from overlap_bench.harness.studies.measure import Display, Source, judged, trials


class Kept(Plan, frozen=True, kw_only=True):
    """experiment.json."""

    schema_version: int
    created: str

    def runs(self, folder: Path) -> dict[tuple[str, str], Path]:
        """Their folders, by boots and workload."""
        return {
            (name, workload): folder / f"{name}-{workload}"
            for name, boots in self.experiment.boots.items()
            for workload in boots.workloads
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished experiment. `outputs_differ`: as in measure.Outcome, of any of its runs."""

    result: ExperimentResult
    outputs_differ: bool


def plan(name: str, adjusted: Adjusted, admit: Admit | None = None) -> Plan:
    """The plan of a committed experiment by its name, or of one's own by its .toml file. `admit`: where it is
    to be run; a file is as easily somebody else's, so one that names more than engines and built-in models
    must be admitted before what it names is read. Raises BadSetting."""
    path = experiment_file.find(name)
    experiment = experiment_file.read(path)
    try:
        experiment_file.check(experiment)
    except api.BadSetting as error:
        raise api.BadFile(f"{path}: {error}") from error
    kind = guess_device() if adjusted.device == "auto" else adjusted.device
    experiment = experiment_file.settled(experiment)
    planned = Plan(experiment=experiment, kind=kind, adjusted=adjusted)
    designs = planned.every_design()
    made_here = True
    if admit is not None and experiment_file.is_own(name) and trust.named(designs):
        made_here = admit(path, designs, "")
    try:
        experiment_file.check_workloads(experiment)
    except api.BadSetting as error:
        raise api.BadFile(f"{path}: {error}") from error
    signature = trust.signature(designs) if admit is not None and made_here else ""
    return msgspec.structs.replace(planned, signature=signature)


def run(planned: Plan, results: Path, display: Display, source: Source = trials) -> Outcome:
    """A fresh experiment in a new folder under `results`. Raises as measure.measure does; one that ends
    before its first block leaves no folder."""
    now = datetime.now().astimezone()
    folder = create(results, f"experiment-{planned.experiment.name}", now)
    created = now.isoformat(timespec="seconds")
    kept = Kept(schema_version=files.SCHEMA_VERSION, created=created, **msgspec.structs.asdict(planned))
    try:
        files.write_json(folder / files.EXPERIMENT_FILE, kept)
        return _measure(folder, kept, display, bool(kept.signature), source)
    finally:
        if not _has_blocks(kept, folder):
            discard_if_empty(folder)


def resume(folder: Path, display: Display, admit: Admit, source: Source = trials) -> Outcome:
    """Go on with an experiment that was interrupted, as it was asked for. Raises StoreError where the
    commit, the machine or the versions are others, and as `admit` does."""
    kept = read(folder)
    made_here = admit(folder, kept.every_design(), kept.signature)
    return _measure(folder, kept, display, made_here, source)


def _has_blocks(kept: Kept, folder: Path) -> bool:
    return any(map(tables.finished_blocks, kept.runs(folder).values()))


def _measure(folder: Path, kept: Kept, display: Display, made_here: bool, source: Source) -> Outcome:
    """Measure what is missing, one Boots after the other, and read everything back. `made_here`: no file of
    elsewhere asks for it, so its runs are signed."""
    try:
        for boots, of_workload in kept.designs().items():
            designs = {kept.runs(folder)[boots, name]: design for name, design in of_workload.items()}
            _measure_boots(designs, f"{folder.name}/{boots}", display, made_here, source)
    except BaseException as error:
        if _has_blocks(kept, folder):
            error.add_note(f"its finished trials are kept, go on with bench experiment run --resume {folder}")
        raise
    return show(folder)


def _measure_boots(
    designs: Mapping[Path, Design], lot: str, display: Display, made_here: bool, source: Source
) -> None:
    """The runs of one Boots, together, in the order drawn by `lot`, each into its folder."""
    runs, resumed = {}, []
    for path, design in designs.items():
        check_metrics(design)
        now = described_here(design, path.name, datetime.now().astimezone(), lot)
        runs[path] = signed(now) if made_here else now
        if (path / "manifest.json").exists():
            runs[path] = read_manifest(path)
            check_resume(runs[path], now)
            resumed.append(path)
        else:
            write_manifest(path, runs[path])
    path, design = next(iter(designs.items()))
    with held(path.parent), display(path.parent, design) as observe:
        runs |= {each: note_resumed(each, runs[each]) for each in resumed}
        together: list[list[Block]] = []
        with closing(source(runs, observe)) as measured:
            for described, blocks in measured:
                runs = dict(zip(runs, described, strict=True))
                together.append(blocks)
        for (path, manifest), own in zip(runs.items(), zip(*together, strict=True), strict=True):
            blocks = judged(source, path, manifest, own, observe)
            files.write_summary(path, to_stored(comparison.result(manifest, blocks)))


def read(folder: Path) -> Kept:
    """What an experiment's folder says of itself. Raises StoreError."""
    path = folder / files.EXPERIMENT_FILE
    kept = files.read_json(path, Kept, "an experiment's folder")
    if any(run.parent != folder for run in kept.runs(folder).values()):
        raise StoreError(f"{path} was edited: its runs lie outside of it")
    return kept


def is_finished(folder: Path) -> bool:
    """Whether there is a result: as it was stored, or of all trials of each of its runs."""
    runs = read(folder).runs(folder).values()
    return (folder / files.SUMMARY_FILE).exists() or all(map(_is_whole, runs))


def _is_whole(run: Path) -> bool:
    kept = tables.finished_blocks(run)
    return bool(kept) and len(kept) >= read_manifest(run).design.blocks


def show(folder: Path) -> Outcome:
    """What a finished experiment found, made again from its blocks, or as it was stored where its runs have
    them no longer. Raises StoreError."""
    kept = read(folder)
    paths = kept.runs(folder)
    if (folder / files.SUMMARY_FILE).exists():
        differ = any(
            outputs.outputs_differ(read_manifest(path), summary(path, Result)) for path in paths.values()
        )
        return Outcome(summary(folder, ExperimentResult), differ)
    if not is_finished(folder):
        raise StoreError(f"{folder} is not finished; go on with bench experiment run --resume {folder}")
    runs = {}
    for place, path in paths.items():
        manifest = readable(path)
        runs[place] = experiment_result.Finished(manifest, *finished(path, manifest))
    found = experiment_result.result(kept, folder.name, runs)
    return Outcome(found, experiment_result.outputs_differ(runs))
