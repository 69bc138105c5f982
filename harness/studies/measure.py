"""One `bench run` from its design to its result: a folder, the trials in it, the object that is printed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from overlap_bench.harness.analysis.comparison import result
from overlap_bench.harness.analysis.outputs import outputs_differ
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.values import block_seconds, block_values, enough, so_far
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run import trial
from overlap_bench.harness.run.forecast import Clock
from overlap_bench.harness.run.messages import BlockBegun, Observer, Said, SoFar
from overlap_bench.harness.run.session import Session, checked_out
from overlap_bench.harness.store.files import StoreError, floors_of, write_summary
from overlap_bench.harness.store.manifest import (
    Manifest,
    Run,
    sign_anew,
    write_manifest,
)
from overlap_bench.harness.store.tables import Block, finished_blocks, stored_block, write_block

Display = Callable[[Path, Design], AbstractContextManager[Observer]]
Trials = Generator[tuple[list[Manifest], list[Block]]]
# What measures the trials of runs: `trials`, or the same on a cluster.
Source = Callable[[Mapping[Path, Manifest], Observer], Trials]
Joined = Callable[[], AbstractContextManager[Source]]  # a cluster, whose source measures several runs at once


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `outputs_differ`: tokens differ between the arms of engines that promise equal ones, or
    differ where no near-tie explains it (metrics/divergences.py)."""

    result: Result
    outputs_differ: bool
    folder: Path


Steps = Generator[None, None, Outcome]


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
                    found = trial.first_boots(session, trees, manifests, len(missing), observe)
                    manifests = [*map(sign_anew, manifests, found)]
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
    with run as (folder, manifest), _telling_what_is_kept(folder, manifest):
        design = manifest.design
        blocks: list[Block] = []
        values: list[Values] = []
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
        found = result(manifest, blocks, values)
        floors = floors_of(folder)
        if design.against_itself or floors.is_dir():
            from overlap_bench.harness.analysis import noise_floor

            found = noise_floor.with_floor(found, manifest, floors, block_seconds(blocks))
        write_summary(folder, to_stored(found))
        return Outcome(found, outputs_differ(manifest, found), folder)


@contextmanager
def _telling_what_is_kept(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Add to an error what is kept of the run, and how to go on with it."""
    try:
        yield
    except BaseException as error:
        kept, design = len(finished_blocks(folder)), manifest.design
        if kept and not isinstance(error, StoreError):  # what lies there can't be gone on with as it is
            most = "at most " if design.may_end_early else ""
            again = f"go on with {manifest.resumed_by} --resume {folder}"
            error.add_note(f"{kept} of {most}{design.blocks} trials are kept, {again}")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("no trial was done, so nothing is kept")
        raise


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
