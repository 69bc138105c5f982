"""What was measured of vLLM's argued changes, and the answers that it gives: what a change does to its own
phase, what a step feels of it, where that starts to matter, whether it depends on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlap_bench.engines.vllm import SPEC
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.analysis.foretold import felt
from overlap_bench.harness.analysis.sensitivity import Phase, Sensitivity
from overlap_bench.harness.common.formatting import percent
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.variants import Variant, load_variants

PACE = "llama3-8b-h100*{at}"
BATCHES = (1, 16, 64, 256)
MODES = ("off", "on")  # async scheduling
HERE = "k"  # this host's slowness beside the card's own
HOSTS = ("k/2", HERE, "2k")  # what the device's times are stretched by
BETWEEN = 64  # the batch at which other hosts, and whole runs with async scheduling, are tried
MATTERS = 0.01  # of a step: the harness's own margin
WIDE = 0.03  # of a step: an interval of this half-width, or of more, overlaps nearly anything
# A pace decides these: what computing takes, and which drafts are right.
LEFT_OUT = ("vllm-compiled", "vllm-chunked-prefill", "vllm-speculation")
# The least batch at which the arms differ: one chunk of 128 outputs is all of fewer, and where one request
# runs, no step follows its end.
LEAST = {"vllm-output-chunk": 256, "vllm-remove-all": 16}
NOTHING = "–"
Cells = Mapping[str, Mapping[str, Any]]  # by name, as vllm_toggles keeps them


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change, as a fraction, with its 95% interval. `before` and `after`: us of a phase, ms of a step; None
    where it is foretold."""

    change: float
    ci_low: float | None = None
    ci_high: float | None = None
    before: float | None = None
    after: float | None = None
    verdict: str | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        return None if self.ci_low is None or self.ci_high is None else (self.ci_low, self.ci_high)

    @property
    def disturbed(self) -> bool:
        """Whether its verdict was taken back, as where other processes use the cores: its interval alone
        would give one."""
        if self.verdict != "undecided" or self.ends is None:
            return False
        low, high = self.ends
        return low > 0 or high < 0 or max(-low, high) < MATTERS


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a change at a batch, without async scheduling or with it, on a host: of its own phase,
    and of a step, foretold by that and run whole."""

    batch: int
    mode: str
    at: str = HERE
    phase: Row | None = None
    foretold: Row | None = None
    added: int = 1  # phases that it adds up
    whole: Row | None = None
    metric: str = SLICED  # of the run whole
    trials: int | None = None  # of the run
    outputs: tuple[int, int] | None = None  # identical, of so many
    failed: int | None = None  # what bench ended with
    machine: str = ""  # where its phase was measured, and it was run whole, if on another than the others

    @property
    def step(self) -> Row | None:
        return self.whole or self.foretold

    @property
    def overlaps(self) -> bool | None:
        """Whether what was foretold and what was run whole do; None where one of them is not there."""
        if self.foretold is None or self.whole is None:
            return None
        one, other = self.foretold.ends, self.whole.ends
        return None if one is None or other is None else one[0] <= other[1] and other[0] <= one[1]


class Judged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change. `rewritten`: the side that is our own rewriting; then there is no verdict on its source."""

    name: str
    title: str
    source: str
    says: str
    phase: str = ""
    rewritten: str = ""
    cells: list[Cell] = []

    @property
    def is_measured(self) -> bool:
        return any(cell.step is not None for cell in self.cells)

    def of(self, mode: str, at: str = HERE) -> list[Cell]:
        return [each for each in self.cells if (each.mode, each.at) == (mode, at)]

    def changes_a_step(self, mode: str) -> bool:
        return any(matters(each.step) for each in self.of(mode) if each.step is not None)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The file that all pages are made of."""

    date: str
    commits: list[str]  # whose code measured
    machine: str
    pace: str
    changes: list[Judged]

    @property
    def cells(self) -> list[tuple[Judged, Cell]]:
        return [(each, cell) for each in self.changes for cell in each.cells]


# ---------------------------------------------------------------------------------------------------------
# From cells to a judgement


def variants() -> dict[str, Variant]:
    return {
        name: each for name, each in load_variants().items() if each.engine == "vllm" and name not in LEFT_OUT
    }


def modes(variant: Variant) -> tuple[str, ...]:
    """What a change is judged beside: async scheduling itself has both in its arms."""
    return MODES[:1] if "async_scheduling" in variant.changes else MODES


def places(variant: Variant) -> list[tuple[int, str, str]]:
    """Where a change is judged: batch, async scheduling, host. Async scheduling itself depends on the host
    most, and its source says by how much it helps, so it is tried on the other hosts at every batch."""
    batches = [between(variant.name)] if modes(variant) == MODES else BATCHES
    elsewhere = product(batches, modes(variant), [at for at in HOSTS if at != HERE])
    every = [*product(BATCHES, modes(variant), [HERE]), *elsewhere]
    return [place for place in every if place[0] >= LEAST.get(variant.name, 1)]


def between(name: str) -> int:
    """The batch at which a change is tried on other hosts."""
    return max(BETWEEN, LEAST.get(name, 1))


def cell_name(what: str, batch: int, mode: str, at: str = HERE) -> str:
    return f"{what} {batch} {mode}" + (f" {at}" if at != HERE else "")


def run_folder(folder: Path, cell: str) -> Path:
    """Where the runs of a cell are kept."""
    return folder / "runs" / cell.replace(" ", "-").replace("/", "_")


def slope(folder: Path, batch: int, mode: str, at: str) -> Sensitivity | None:
    """What a microsecond in each phase costs a step there, by the latest run; None where none is kept."""
    found = sorted(
        run_folder(folder, cell_name("slope", batch, mode, at)).glob(f"*/{sensitivity.FILE}"),
        key=lambda each: each.stat().st_mtime_ns,
    )
    return sensitivity.read(found[-1].parent) if found else None


def judged(cells: Cells, folder: Path) -> list[Judged]:
    """Every change. `folder`: where the runs of slopes are kept."""
    cells = {name: each for name, each in cells.items() if each.get("trials") != 1}  # which have no interval
    slopes = {place: slope(folder, *place) for place in product(BATCHES, MODES, HOSTS)}
    return [
        Judged(
            name=name,
            title=each.title,
            source=each.source,
            says=each.claim,
            phase=each.phase,
            rewritten=", ".join(filter(None, (SPEC.toggle(one).rewritten for one in each.changes))),
            cells=[_cell(cells, slopes[place], name, each.phase, *place) for place in places(each)],
        )
        for name, each in variants().items()
    ]


def _cell(
    cells: Cells, found: Sensitivity | None, name: str, phase: str, batch: int, mode: str, at: str
) -> Cell:
    """How long its phase takes is the host's own: where a change was not run, its phase is that of the run
    without async scheduling at this host's k. Where it was run, the expected change is a share of that run's
    own step: the slope may have been measured on another day, when this host was slower."""
    run = cells.get(cell_name(name, batch, mode, at), {})
    near = run if "phase" in run else cells.get(cell_name(name, batch, "off"), {})
    own = _row(near.get("phase"))
    every = {name: _row(each) for name, each in near.get("phases", {phase: near.get("phase")}).items()}
    known = {} if own is None else {name: each for name, each in every.items() if each is not None}
    outputs = run.get("outputs")
    whole = _row(run.get("step"))
    step_us = 1000 * whole.before if whole and whole.before else found.step_us if found else 0.0
    return Cell(
        batch=batch,
        mode=mode,
        at=at,
        phase=own,
        added=len(known),
        foretold=foretold(known, found.phases, step_us) if known and found else None,
        whole=whole,
        metric=run.get("metric", SLICED),
        trials=run.get("trials"),
        outputs=None if outputs is None else (outputs["identical"], outputs["compared"]),
        failed=run.get("failed"),
    )


def _row(found: Mapping[str, Any] | None) -> Row | None:
    return None if found is None or found["change"] is None else msgspec.convert(found, Row)


def foretold(changes: Mapping[str, Row], phases: Sequence[Phase], step_us: float) -> Row:
    """What a step feels of the changes of its phases, as a share of it: the sum, and nothing of a phase that
    is hidden. Its interval: that of each phase goes from corner to corner of the change's and the slope's;
    phases are taken as independent."""
    felt_of_each = [_felt(changes[each.phase], each, step_us) for each in phases if each.phase in changes]
    middle, low, high = (np.array(felt_of_each).reshape(-1, 3)).T
    total = float(middle.sum())
    return Row(
        change=total,
        ci_low=total - float(np.hypot.reduce(middle - low, initial=0.0)),
        ci_high=total + float(np.hypot.reduce(high - middle, initial=0.0)),
    )


def _felt(change: Row, phase: Phase, step_us: float) -> tuple[float, float, float]:
    """What a step feels of a phase's change, as a share of it, and the ends of the interval."""

    def share(of: float, slope: float) -> float:
        return felt(msgspec.structs.replace(phase, slope=slope), (change.before or 0.0) * of) / step_us

    ends = change.ends or (change.change, change.change)
    corners = [share(*each) for each in product(ends, (phase.slope_low, phase.slope_high))]
    return share(change.change, phase.slope), min(corners), max(corners)


# ---------------------------------------------------------------------------------------------------------
# The answers


def matters(row: Row) -> bool | None:
    """Whether a step changes by 1% or more: no, where its whole interval is within; None: that is open, as
    where its verdict was taken back."""
    if row.disturbed:
        return None
    low, high = row.ends or (-math.inf, math.inf)
    if low > -MATTERS and high < MATTERS:
        return False
    return True if high <= -MATTERS or low >= MATTERS else None


def starts(each: Judged, mode: str) -> str:
    """Where a change starts to matter, among the batches that were tried."""
    said = {cell.batch: matters(cell.step) for cell in each.of(mode) if cell.step is not None}
    if not said:
        return NOTHING
    there, unsettled = ([batch for batch in said if said[batch] is what] for what in (True, None))
    if not there:
        return f"not settled at {listed(unsettled)}" if unsettled else f"nowhere up to {max(said)}"
    if not unsettled and there == [*said][-len(there) :] and there[0] != min(said):
        return f"from {there[0]} on"
    return f"at {listed(there)}" + (f"; not settled at {listed(unsettled)}" if unsettled else "")


def depends_on_host(each: Judged, mode: str) -> str:
    """Whether that is another answer where the device takes half as long, and twice as long."""
    steps = [cell.step for at in HOSTS for cell in each.of(mode, at) if cell.batch == between(each.name)]
    known = [step for step in steps if step is not None]
    if len(known) < len(HOSTS):
        return NOTHING
    said = [matters(step) for step in known]
    word = "yes" if {True, False} <= {*said} else "not settled" if None in said else "no"
    return f"{word}: {', '.join(percent(step.change) for step in known)}"


class Agreement(msgspec.Struct, frozen=True):
    """Counts of cells that have an interval foretold and one run whole: in how many these overlap, how many
    there are, how many runs have an effect (their interval leaves out 0), and how many are WIDE."""

    agree: int
    cells: int
    with_effect: int
    wide: int

    @classmethod
    def of(cls, found: Judgement) -> Agreement:
        known = [cell for _, cell in found.cells if cell.overlaps is not None]
        ends = [cell.whole.ends for cell in known if cell.whole and cell.whole.ends]
        return cls(
            agree=sum(bool(cell.overlaps) for cell in known),
            cells=len(known),
            with_effect=sum(low > 0 or high < 0 for low, high in ends),
            wide=sum(high - low >= 2 * WIDE for low, high in ends),
        )


def listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def failures(found: Judgement) -> Iterator[str]:
    for each, cell in found.cells:
        if cell.failed is not None:
            yield f"{each.name}, {where(cell)}: not measured, bench ended with {cell.failed}"


def where(cell: Cell) -> str:
    at = f", {cell.at}" if cell.at != HERE else ""
    return f"batch {cell.batch}, async {cell.mode}{at}" + (f", on {cell.machine}" if cell.machine else "")
