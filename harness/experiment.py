"""An experiment from its file to its folder, and from its folder to what it found.

results/<time>-experiment-<name>-<id>/ holds experiment.json and a run folder for each workload, such as any
run has: what is laid side by side here can be looked at there one by one (bench compare RUN:arm RUN:arm,
harness.load).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from engines import api
from harness import comparison, experiment_file, experiment_result, measure, runner, store, teacher_forcing
from harness.across_runs import finished, readable
from harness.design import Design
from harness.experiment_file import FEWEST_BLOCKS, Adjusted, Experiment
from harness.machine import guess_device
from harness.measure import Display
from harness.settings import DEVICES
from harness.store import StoreError
from harness.variants import load_variants


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """experiment.json. `kind`: the device that the workloads were chosen for. `folders`: the runs', by
    boots and workload, inside the experiment's."""

    schema_version: int
    created: str
    experiment: Experiment
    adjusted: Adjusted
    kind: str
    folders: dict[str, dict[str, str]]

    @property
    def names(self) -> list[str]:
        """Of all its run folders."""
        return [name for folders in self.folders.values() for name in folders.values()]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is about to be done: `designs` by boots and workload."""

    experiment: Experiment
    adjusted: Adjusted
    kind: str
    designs: Mapping[str, Mapping[str, Design]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished experiment. `outputs_differ`: as in measure.Outcome, of any of its runs."""

    result: dict[str, Any]
    outputs_differ: bool
    folder: Path


def adjusted(
    device: str = "auto", blocks: int | None = None, rounds: int | None = None, seed: int = 0
) -> Adjusted:
    """What is asked for in place of what the file says. Raises BadSetting."""
    api.pick(device, dict.fromkeys(DEVICES), "device")
    if blocks is not None and blocks < FEWEST_BLOCKS:
        raise api.BadSetting(f"an experiment needs at least {FEWEST_BLOCKS} blocks, not {blocks}")
    if rounds is not None and rounds < 1:
        raise api.BadSetting(f"--rounds must be at least 1, not {rounds}")
    return Adjusted(device=device, blocks=blocks, rounds=rounds, seed=seed)


def plan(name: str, asked: Adjusted) -> Plan:
    """A committed experiment by its name, or one's own by its .toml file. Raises BadSetting."""
    path = experiment_file.find(name)
    experiment = experiment_file.read(path)
    engines, variants = api.find_engines(), load_variants()
    kind = guess_device() if asked.device == "auto" else asked.device
    try:
        experiment_file.check(experiment, engines, variants)
        designs = experiment_file.designs(experiment, kind, asked, engines, variants)
    except api.BadSetting as error:
        raise api.BadSetting(f"{path}: {error}") from error
    return Plan(experiment, asked, kind, designs)


def run(planned: Plan, results: Path, display: Display) -> Outcome:
    """A fresh experiment in a new folder under `results`.

    Raises as measure.measure does; one that ends before its first block leaves no folder.
    """
    now = datetime.now().astimezone()
    name = planned.experiment.name
    folder = store.create(results, f"experiment-{name}", now)
    kept = Kept(
        schema_version=store.SCHEMA_VERSION,
        created=now.isoformat(timespec="seconds"),
        experiment=planned.experiment,
        adjusted=planned.adjusted,
        kind=planned.kind,
        folders={
            boots: {workload: f"{boots}-{workload}" for workload in of_workload}
            for boots, of_workload in planned.designs.items()
        },
    )
    try:
        store.write_json(folder / store.EXPERIMENT_FILE, kept)
        return _go_on(folder, kept, planned, display)
    finally:
        if not any(store.finished_blocks(folder / each) for each in kept.names):
            store.discard_if_empty(folder)


def resume(folder: Path, display: Display) -> Outcome:
    """Go on with an experiment that was interrupted, as it was asked for. Raises StoreError where the
    commit, the machine or the versions are others."""
    kept = read(folder)
    designs = experiment_file.designs(
        kept.experiment, kept.kind, kept.adjusted, api.find_engines(), load_variants()
    )
    return _go_on(folder, kept, Plan(kept.experiment, kept.adjusted, kept.kind, designs), display)


def _go_on(folder: Path, kept: Kept, planned: Plan, display: Display) -> Outcome:
    """Measure what is missing, one Boots after the other, and read everything back."""
    try:
        for boots, of_workload in planned.designs.items():
            _measure({folder / kept.folders[boots][name]: design for name, design in of_workload.items()},
                     f"{folder.name}/{boots}", display)  # fmt: skip
    except BaseException as error:
        if any(store.finished_blocks(folder / each) for each in kept.names):
            error.add_note(f"its finished blocks are kept, go on with bench experiment run --resume {folder}")
        raise
    return show(folder)


def _measure(designs: Mapping[Path, Design], lot: str, display: Display) -> None:
    """The runs of one Boots, together, in the order drawn by `lot`, each into its folder."""
    runs = {}
    for path, design in designs.items():
        comparison.check_metrics(design)
        now = measure.described_here(design, path.name, datetime.now().astimezone(), lot)
        runs[path] = now
        if (path / "manifest.json").exists():
            runs[path] = store.read_manifest(path)
            store.check_resume(runs[path], now)
        else:
            store.write_manifest(path, now)
    path, design = next(iter(designs.items()))
    with store.held(path.parent), display(path.parent, design) as observe:
        runner.run_together(runs, observe)
        for path in runs:
            teacher_forcing.judge(path, store.read_manifest(path), lambda line: observe(runner.Said(line)))
    for path in runs:
        manifest = store.read_manifest(path)
        store.write_summary(path, comparison.result(manifest, *finished(path, manifest)))


# ---------------------------------------------------------------------------------------------------------
# Reading back


def read(folder: Path) -> Kept:
    """What an experiment's folder says of itself. Raises StoreError."""
    return store.read_json(folder / store.EXPERIMENT_FILE, Kept, "an experiment's folder")


def show(folder: Path) -> Outcome:
    """What a finished experiment found, made again from its blocks. Raises StoreError."""
    kept = read(folder)
    if not all(store.finished_blocks(folder / name) for name in kept.names):
        raise StoreError(f"{folder} is not finished; go on with bench experiment run --resume {folder}")
    runs = {}
    for boots, folders in kept.folders.items():
        for workload, name in folders.items():
            manifest = readable(folder / name)
            blocks, _ = finished(folder / name, manifest)
            runs[boots, workload] = experiment_result.Finished(manifest, blocks)
    result = experiment_result.result(kept.experiment, folder.name, kept.kind, kept.adjusted, runs)
    return Outcome(result, experiment_result.outputs_differ(runs), folder)
