"""One `bench run` from its design to its result: a folder, the blocks in it, the object that is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import datetime
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.analysis.comparison import result, so_far
from overlap_bench.harness.analysis.noise_floor import with_floor
from overlap_bench.harness.analysis.outputs import outputs_differ
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.rule import enough
from overlap_bench.harness.analysis.values import block_seconds, block_values
from overlap_bench.harness.common.differences import difference
from overlap_bench.harness.common.formatting import blocks_of, duration, minutes_of
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.checks import check_metrics
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run.blocks import measure as measure_blocks
from overlap_bench.harness.run.events import BlockDone, Event, Foreseen, Observer, Said, SoFar
from overlap_bench.harness.run.teacher_forcing import judge
from overlap_bench.harness.store import folders
from overlap_bench.harness.store.block import Block
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
from overlap_bench.harness.store.tables import finished_blocks
from overlap_bench.harness.store.trust import Admit

USUAL = 6  # blocks of a run of a fixed number
SPARE = 1.25  # of the time that is asked for instead: the next boots may be slower
Display = Callable[[Path, Design], AbstractContextManager[Observer]]
# What measures the blocks of runs: run.blocks.measure, or the same on a cluster.
Source = Callable[[Mapping[Path, Manifest], Observer], Generator[tuple[list[Manifest], list[Block]]]]
Joined = Callable[[], AbstractContextManager[Source]]  # a cluster, whose source measures several runs at once


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `outputs_differ`: tokens differ between the arms of engines that promise equal ones, or
    differ where no near-tie explains it (metrics/divergences.py)."""

    result: Result
    outputs_differ: bool
    folder: Path


# A run that stands still once its blocks are asked for, and after each.
Steps = Generator[None, None, Outcome]


def to_its_end(steps: Steps) -> Outcome:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def measure(
    design: Design,
    results: Path,
    display: Display,
    create: Callable[[Path, str, datetime], Path] = folders.create,
    made_here: bool = True,
    source: Source = measure_blocks,
) -> Outcome:
    """A fresh run in a new folder under `results`, which `create` makes. `made_here`: no stored run of
    elsewhere asked for it. Raises as run.blocks.measure and `create` do, and WriteFailed. A run that ends
    before its first block leaves no folder; after that the error's note says how to go on."""
    return to_its_end(in_steps(design, results, display, create, made_here, source))


def in_steps(
    design: Design,
    results: Path,
    display: Display,
    create: Callable[[Path, str, datetime], Path],
    made_here: bool,
    source: Source,
) -> Steps:
    """`measure`, for whoever has several runs measured at once."""
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now, lot=folder.name)
        if made_here:
            manifest = signed(manifest)
        write_manifest(folder, manifest)
        with held(folder):
            return (yield from _measure(folder, manifest, display, source))
    finally:
        discard_if_empty(folder)


def resume(
    folder: Path, design: Design | None, display: Display, admit: Admit, source: Source = measure_blocks
) -> Outcome:
    """Go on with a stored run; `design` None: as it was asked for, if `admit` allows that. Raises StoreError
    where the commit, the settings, the machine or the versions are others, and as `admit` does."""
    return to_its_end(resume_in_steps(folder, design, display, admit, source))


def resume_in_steps(
    folder: Path, design: Design | None, display: Display, admit: Admit, source: Source
) -> Steps:
    """`resume`, for whoever has several runs measured at once."""
    stored = read_manifest(folder)
    if design is None:  # before anything that it names is looked at
        admit(folder, [stored.design], stored.signature)
    now = described_here(design or stored.design, stored.run, datetime.now().astimezone(), stored.run)
    check_resume(stored, now)
    with held(folder):
        kept = len(finished_blocks(folder))
        if kept < stored.design.blocks and not (folder / SUMMARY_FILE).exists():
            stored = msgspec.structs.replace(stored, resumed_after=[*stored.resumed_after, kept])
            write_manifest(folder, stored)
        return (yield from _measure(folder, stored, display, source))


def measure_or_resume(
    design: Design | None,
    stored: Path | None,
    results: Path,
    display: Display,
    admit: Admit,
    source: Source = measure_blocks,
) -> Outcome:
    """A fresh run of `design`; with `stored` that run gone on with."""
    if stored is not None:
        return resume(stored, design, display, admit, source)
    assert design is not None
    return measure(design, results, display, source=source)


def _measure(folder: Path, manifest: Manifest, display: Display, source: Source) -> Steps:
    """Block after block, until all are done or the declared rule has enough; then the result."""
    design = manifest.design
    blocks: list[Block] = []
    values: list[Values] = []
    clock = _Clock()
    foreseen: int | None = None
    try:
        with display(folder, design) as observe:

            def heard(event: Event) -> None:
                nonlocal foreseen
                if isinstance(event, BlockDone) and event.block < 0:
                    clock.boots_done()
                observe(event)
                if isinstance(event, Foreseen) and design.max_minutes is not None:
                    foreseen, said = clock.forecast(design, len(finished_blocks(folder)), event.seconds)
                    observe(Said(said))
                elif isinstance(event, Foreseen) and design.aim_s is not None:
                    observe(Said(_announced(event)))

            with closing(source({folder: manifest}, heard)) as measured:
                yield
                for (described,), (block,) in measured:
                    manifest = msgspec.structs.replace(
                        described,
                        blocks_in_time=manifest.blocks_in_time,
                        blocks_foreseen=manifest.blocks_foreseen,
                    )
                    blocks.append(block)
                    values.append(block_values(design, block))
                    clock.block_done()
                    if enough(design, values) or len(blocks) == manifest.blocks_in_time:
                        break
                    if manifest.blocks_in_time is None and clock.is_up(design.max_minutes):
                        manifest = msgspec.structs.replace(
                            manifest, blocks_in_time=len(blocks), blocks_foreseen=foreseen
                        )
                        write_manifest(folder, manifest)
                        break
                    if len(blocks) < design.blocks and (seen := so_far(design, values)):
                        observe(SoFar(len(blocks), seen))
                    yield
            blocks = judge_with(source, folder, manifest, blocks, observe)
        found = with_floor(
            result(manifest, blocks, values), manifest, noise_floor.folder_of(folder), block_seconds(blocks)
        )
        write_summary(folder, to_stored(found))
    except BaseException as error:
        kept = len(finished_blocks(folder))
        if kept and not isinstance(error, StoreError):  # what lies there can't be gone on with as it is
            most = "at most " if design.may_end_early else ""
            again = f"go on with {manifest.resumed_by} --resume {folder}"
            error.add_note(f"{kept} of {most}{design.blocks} trials are kept, {again}")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("no trial was done, so nothing is kept")
        raise
    return Outcome(found, outputs_differ(manifest, found), folder)


def _announced(foreseen: Foreseen) -> str:
    """When the answer comes, of a run whose blocks are sized by its first boots."""
    design, each = foreseen.design, duration(foreseen.seconds)
    rounds = "a round" if design.rounds == 1 else f"{design.rounds} rounds"
    return (
        f"{blocks_of(design.blocks)} of about {each}, each {design.segments} interleaved rounds and "
        f"{rounds}: done in about {duration(design.blocks * foreseen.seconds)}"
    )


def judge_with(
    source: Source, folder: Path, manifest: Manifest, blocks: Sequence[Block], observe: Observer
) -> list[Block]:
    """The blocks with each divergence judged, by the model of this machine: not where others measured."""
    if source is measure_blocks:
        return judge(folder, manifest, blocks, lambda line: observe(Said(line)))
    if any(len(block.tables["divergences"]) for block in blocks):
        observe(Said("the outputs that differ are not judged: --resume without --ray asks the model"))
    return [*blocks]


class NoTime(api.BadSetting):
    """--max-minutes ends a run before a verdict is possible."""


class _Clock:
    """When a run has no time for another block: as long as the longest one so far. What the blocks found
    has no part in it, so this is no peeking."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._longest = 0.0

    def boots_done(self) -> None:
        """Say that the boots that are thrown away are done: no block has them again."""
        if not self._longest:
            self._last = time.monotonic()

    def forecast(self, design: Design, kept: int, seconds: float) -> tuple[int, str]:
        """How many blocks there will be, where so many are kept and each other one takes so many seconds; and
        that in words. Raises NoTime where a fresh run has no time for a verdict."""
        assert design.max_minutes is not None
        gone, within = time.monotonic() - self._began, minutes_of(design.max_minutes)
        more = max(0, int((60 * design.max_minutes - gone) / seconds))
        blocks, least = min(design.blocks, kept + more), design.fewest_judged
        first = f"the first boots took {duration(gone)}, a trial will take about {duration(seconds)}"
        all_ = "all " if blocks == design.blocks > 1 else ""
        fit = f"{all_}{blocks_of(blocks)} fit{'s' * (blocks == 1)} into {within}"

        def asking(wanted: int) -> str:
            return f"--max-minutes {_up((gone + (wanted - kept) * seconds) * SPARE / 60):g}"

        if blocks < least and not kept:
            needs = f"a verdict needs {least}" if len(design.arms) > 1 else "there has to be one"
            raise NoTime(f"{fit}, and {needs}: {first}; give it {asking(least)}")
        few = (
            f"; {USUAL}, the usual number, take {asking(USUAL)}" if blocks < min(USUAL, design.blocks) else ""
        )
        return blocks, f"{first}: {fit}{few}"

    def block_done(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def is_up(self, minutes: float | None) -> bool:
        return minutes is not None and self._last - self._began + self._longest > 60 * minutes


def _up(minutes: float) -> float:
    """Two significant digits of it, rounded up: what is asked for has to be enough."""
    digit = 10.0 ** (floor(log10(minutes)) - 1)
    return round(ceil(minutes / digit) * digit, 9)


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
