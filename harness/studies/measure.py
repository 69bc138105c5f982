"""One `bench run` from its design to its result: a folder, the trials in it, the object that is printed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.analysis.comparison import result, so_far
from overlap_bench.harness.analysis.noise_floor import with_floor
from overlap_bench.harness.analysis.outputs import outputs_differ
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.rule import enough
from overlap_bench.harness.analysis.values import block_seconds, block_values
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.checks import check_metrics
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run import first_boots, trial
from overlap_bench.harness.run.events import BlockBegun, Observer, Said, SoFar
from overlap_bench.harness.run.forecast import Clock
from overlap_bench.harness.run.session import Session, checked_out
from overlap_bench.harness.store import folders
from overlap_bench.harness.store.block import Block, stored_block
from overlap_bench.harness.store.files import SUMMARY_FILE, StoreError, write_summary
from overlap_bench.harness.store.folders import discard_if_empty, held
from overlap_bench.harness.store.manifest import (
    Manifest,
    check_resume,
    described_here,
    read_manifest,
    signed,
    write_manifest,
)
from overlap_bench.harness.store.tables import finished_blocks, write_block
from overlap_bench.harness.store.trust import Admit

Display = Callable[[Path, Design], AbstractContextManager[Observer]]
Trials = Generator[tuple[list[Manifest], list[Block]]]
# What measures the trials of runs: `trials`, or the same on a cluster.
Source = Callable[[Mapping[Path, Manifest], Observer], Trials]
Joined = Callable[[], AbstractContextManager[Source]]  # a cluster, whose source measures several runs at once
Run = AbstractContextManager[tuple[Path, Manifest]]  # that is to be measured: its folder is held while inside


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `outputs_differ`: tokens differ between the arms of engines that promise equal ones, or
    differ where no near-tie explains it (metrics/divergences.py)."""

    result: Result
    outputs_differ: bool
    folder: Path


Steps = Generator[None, None, Outcome]


@contextmanager
def fresh(
    design: Design,
    results: Path,
    create: Callable[[Path, str, datetime], Path] = folders.create,
    made_here: bool = True,
) -> Iterator[tuple[Path, Manifest]]:
    """A run in a new folder under `results`, which `create` makes. `made_here`: no stored run of elsewhere
    asked for it. One that ends before its first trial leaves no folder. Raises BadSetting, as `create` does,
    and WriteFailed."""
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now, lot=folder.name)
        manifest = signed(manifest) if made_here else manifest
        write_manifest(folder, manifest)
        with held(folder):
            yield folder, manifest
    finally:
        discard_if_empty(folder)


@contextmanager
def stored(folder: Path, design: Design | None, admit: Admit) -> Iterator[tuple[Path, Manifest]]:
    """A run to go on with; `design` None: as it was asked for, if `admit` allows that. Raises StoreError
    where the commit, the settings, the machine or the versions are others, and as `admit` does."""
    manifest = read_manifest(folder)
    if design is None:  # before anything that it names is looked at
        admit(folder, [manifest.design], manifest.signature)
    now = described_here(design or manifest.design, manifest.run, datetime.now().astimezone(), manifest.run)
    check_resume(manifest, now)
    with held(folder):
        kept = len(finished_blocks(folder))
        if kept < manifest.design.blocks and not (folder / SUMMARY_FILE).exists():
            manifest = msgspec.structs.replace(manifest, resumed_after=[*manifest.resumed_after, kept])
            write_manifest(folder, manifest)
        yield folder, manifest


def run_of(design: Design | None, resume: Path | None, results: Path, admit: Admit, **more: Any) -> Run:
    """A fresh run of `design`; with `resume` that run, to go on with. `more`: as of `fresh`."""
    if resume is not None:
        return stored(resume, design, admit)
    assert design is not None
    return fresh(design, results, **more)


def trials(runs: Mapping[Path, Manifest], observe: Observer) -> Trials:
    """Each trial in its turn, with the manifests as they then stand; those that a run's folder holds already
    are read, the others measured and written. Whoever has enough closes it. `runs`, by folder: one, or
    several that differ in their workload alone, and share their boots. In each round every workload has its
    turn; each run keeps its own folder, as if it had been alone.

    Raises BadSetting (the request can't be served), RunFailed (a process failed or died) or
    KeyboardInterrupt; in each case every finished trial is on disk and no process is left.
    """
    folders, manifests = list(runs), list(runs.values())
    design = manifests[0].design
    kept = [set(finished_blocks(folder)) for folder in folders]
    missing = [number for number in range(design.blocks) if not all(number in there for there in kept)]

    def write(number: int, measured: Sequence[trial.Tables]) -> None:
        for folder, there, tables in zip(folders, kept, measured, strict=True):
            if number not in there:  # killed between two writes, some have it
                write_block(folder, number, tables)

    with ExitStack() as stack:
        session: Session | None = None
        for number in range(design.blocks):
            measured: Sequence[trial.Tables | None] = [None] * len(folders)
            if number in missing:
                if session is None:
                    trees = stack.enter_context(checked_out(design))
                    session = stack.enter_context(Session(trees.places))
                    manifests = first_boots.measure(session, trees, manifests, len(missing), observe)
                    for folder, manifest in zip(folders, manifests, strict=True):
                        write_manifest(folder, manifest)
                observe(BlockBegun(number, sum(each >= number for each in missing)))
                measured = trial.measure(session, manifests, number, observe, partial(write, number))
            blocks = [
                stored_block(folder, number) if tables is None or number in there else Block(number, tables)
                for folder, there, tables in zip(folders, kept, measured, strict=True)
            ]
            yield manifests, blocks


def measure(run: Run, display: Display, source: Source = trials) -> Outcome:
    """Measure a run, `fresh` or `stored`, to its end. Raises as `source` does, and WriteFailed; after its
    first trial the error's note says how to go on."""
    steps = in_steps(run, display, source)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def in_steps(run: Run, display: Display, source: Source) -> Steps:
    """Measure trial after trial, until all are done or the declared rule has enough; then the result. It
    stands still once its trials are asked for, and after each, for whoever has several runs measured at
    once."""
    with run as (folder, manifest):
        design = manifest.design
        blocks: list[Block] = []
        values: list[Values] = []
        try:
            with display(folder, design) as observe:
                clock = Clock(design, len(finished_blocks(folder)), observe)
                with closing(source({folder: manifest}, clock.hear)) as measured:
                    yield
                    for (manifest,), (block,) in measured:
                        blocks.append(block)
                        values.append(block_values(design, block))
                        clock.block_done()
                        if enough(design, values) or len(blocks) == manifest.blocks_in_time:
                            break
                        if manifest.blocks_in_time is None and clock.is_up():
                            manifest = msgspec.structs.replace(
                                manifest, blocks_in_time=len(blocks), blocks_foreseen=clock.foreseen
                            )
                            write_manifest(folder, manifest)
                            break
                        if len(blocks) < design.blocks and (seen := so_far(design, values)):
                            observe(SoFar(len(blocks), seen))
                        yield
                blocks = judged(source, folder, manifest, blocks, observe)
            found = with_floor(
                result(manifest, blocks, values),
                manifest,
                noise_floor.folder_of(folder),
                block_seconds(blocks),
            )
            write_summary(folder, to_stored(found))
        except BaseException as error:
            _tell(error, folder, manifest)
            raise
        return Outcome(found, outputs_differ(manifest, found), folder)


def _tell(error: BaseException, folder: Path, manifest: Manifest) -> None:
    """Add what is kept of the run, and how to go on with it."""
    kept, design = len(finished_blocks(folder)), manifest.design
    if kept and not isinstance(error, StoreError):  # what lies there can't be gone on with as it is
        most = "at most " if design.may_end_early else ""
        again = f"go on with {manifest.resumed_by} --resume {folder}"
        error.add_note(f"{kept} of {most}{design.blocks} trials are kept, {again}")
    elif isinstance(error, KeyboardInterrupt):
        error.add_note("no trial was done, so nothing is kept")


def judged(
    source: Source, folder: Path, manifest: Manifest, blocks: Sequence[Block], observe: Observer
) -> list[Block]:
    """The blocks with each divergence judged, by the model of this machine: not where others measured."""
    if not any(len(block.tables["divergences"]) for block in blocks):
        return [*blocks]
    if source is not trials:
        observe(Said("the outputs that differ are not judged: --resume without --ray asks the model"))
        return [*blocks]

    from overlap_bench.harness.run.teacher_forcing import judge

    return judge(folder, manifest, blocks, lambda line: observe(Said(line)))


def differences_from(manifest: Manifest) -> list[str]:
    """How here and now differ from where and when a run was measured; a rerun tells."""
    now = described_here(manifest.design, manifest.run, datetime.now().astimezone(), manifest.run)
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("commit", manifest.code, now.code),
        ("machine", manifest.machine, now.machine),
        ("versions", manifest.versions, now.versions),
    )
    return [
        f"different {what}: {found}"
        for what, old, new in pairs
        if (found := difference(msgspec.to_builtins(old), msgspec.to_builtins(new)))
    ]
