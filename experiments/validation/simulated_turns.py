"""How often turns find 1% and 2%, and call nothing a change: simulated from what this machine's noise was.

    python -m experiments.validation.simulated_turns    two minutes, once recorded_turns has run

A simulated run draws its blocks from those that `recorded_turns` kept of its loop, each with the two arms as
they were or swapped, so that what their boots differ by stays in. A neighbour comes on top: it computes and
rests for times of one mean, drawn from an exponential distribution, and a turn takes SLOWER times as long
while it computes; where the change itself alters how an arm waits, the second arm suffers WAITS times as much
from it. Pairs beside it are left out as a run leaves them out (slices.deciding), and blocks with
too few others as well, where values.FEWEST_CALM blocks are left (values.counted). The change between the arms
is a factor on every turn of the second one, the same in each boot: one that is another from boot to boot, as
that of `overlap`, needs more blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from experiments.validation import recorded_turns
from experiments.validation.sliced_aa import LOOPS
from overlap_bench.harness.analysis import decision, values
from overlap_bench.harness.common.intervals import Floats
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import MARGIN
from overlap_bench.harness.stats import paired

DWELLS_S = (None, 0.1, 1.0, 10.0, 60.0)  # of a neighbour; None: there is none
SLOWER = 2.0
WAITS = (1.0, 3.0)
CHANGES = (0.0, 0.01, 0.02)
RUNS = 2_000  # simulated, of each cell
SECONDS = (90.0, 180.0, 480.0)  # of a run
FIRST_S = 14.0  # of them, what comes before its first block: imports, and boots that are thrown away
US_PER_S = 1e6
HEADER = [
    "loop",
    "run",
    "neighbour computes for",
    "second arm suffers",
    "0%: called a change",
    "by all turns",
    "1%: seen",
    "2%: seen",
    "intervals that hold the truth, fewest",
    "half-width, median",
    "no verdict",
    "decided without some blocks",
]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a recorded block, in their order. Each array: [pairs, 2], before and after."""

    step_us: Floats  # a turn's mean step
    turn_us: Floats  # the whole turn

    @classmethod
    def of(cls, block: Sequence[Mapping[str, Any]]) -> Pairs:
        """From recorded_turns.segments."""
        steps = [np.array([each["before"], each["after"]], np.float64).T for each in block]
        turns = [us * each["steps"] for us, each in zip(steps, block, strict=True)]
        return cls(np.concatenate(steps), np.concatenate(turns))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """How long, s, it has computed by each of these moments, at which it begins or ends to."""

    moments: Floats
    computed: Floats

    @classmethod
    def drawn(cls, random: np.random.Generator, dwell_s: float, seconds: float) -> Neighbour:
        """At 0 it is anywhere in a dwell of either kind."""
        lengths = random.exponential(dwell_s, 10 + int(2 * seconds / dwell_s))
        computes = (np.arange(len(lengths)) + random.integers(2)) % 2
        return cls(
            np.concatenate([[0.0], np.cumsum(lengths)]) - random.exponential(dwell_s),
            np.concatenate([[0.0], np.cumsum(lengths * computes)]),
        )

    def share(self, pairs: Pairs, began_s: float) -> Floats:
        """What it computes in each turn of these pairs beside it, one turn behind the other from that
        moment on."""
        lengths = pairs.turn_us.ravel() / US_PER_S
        ends = began_s + np.cumsum(lengths)
        begun, ended = np.interp([ends - lengths, ends], self.moments, self.computed)
        share: Floats = ((ended - begun) / lengths).reshape(pairs.step_us.shape)
        return share


@dataclass(frozen=True, slots=True)
class Cell:
    loop: str
    blocks: int
    seconds: float
    dwell_s: float | None
    waits: float


@dataclass(frozen=True, slots=True)
class Found:
    """Shares of RUNS, by CHANGES."""

    by_all: float  # that all turns would call a change, where there is none
    no_verdict: float  # too few turns were undisturbed, and nothing differs
    fewer: float  # decided without some blocks
    called: tuple[float, ...]  # a change
    seen: tuple[float, ...]  # called slower, and the interval holds the truth
    holding: tuple[float, ...]
    half_width: float  # of runs without a change, the median


def noise(
    recorded: Sequence[Pairs], cell: Cell, random: np.random.Generator
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """What each block of a run says of arms that do not differ, log ratios: by the turns that decide, and by
    all; and whether enough of its turns were undisturbed."""
    dwell_s = cell.dwell_s
    neighbour = None if dwell_s is None else Neighbour.drawn(random, dwell_s, 2 * cell.seconds)
    deciding, all_, enough = [], [], []
    for number, drawn in enumerate(random.integers(len(recorded), size=cell.blocks)):
        pairs = recorded[drawn]
        began_s = number * cell.seconds / cell.blocks
        calm = np.ones(len(pairs.step_us), bool)
        ratios = np.log(pairs.step_us[:, 1] / pairs.step_us[:, 0]) * random.choice((-1, 1))
        if neighbour is not None:
            share = neighbour.share(pairs, began_s)
            suffered = np.log1p((SLOWER - 1) * share * (1.0, cell.waits))
            ratios = ratios + suffered[:, 1] - suffered[:, 0]
            calm = np.all(share <= slices.HELD, axis=1)
        few = calm.sum() < max(slices.FEWEST_PAIRS, slices.ENOUGH * len(ratios))
        enough.append(not few)
        deciding.append(slices.trimmed(ratios if few else ratios[calm]))
        all_.append(slices.trimmed(ratios))
    return np.array(deciding), np.array(all_), np.array(enough)


def judged(ratios: Floats) -> tuple[paired.Effect, str | None]:
    effect = paired.effect([1.0] * len(ratios), ratios.tolist())
    return effect, decision.verdict(effect, MARGIN, "lower", is_time=True)


def simulated(recorded: Sequence[Pairs], cell: Cell, random: np.random.Generator) -> Found:
    called, seen, holding = np.zeros((3, RUNS, len(CHANGES)), bool)
    by_all, no_verdict, fewer = np.zeros((3, RUNS), bool)
    half_widths = []
    for run in range(RUNS):
        deciding, all_, enough = noise(recorded, cell, random)
        by_all[run] = judged(np.exp(all_))[1] in decision.CHANGES
        counted = enough if enough.sum() >= values.FEWEST_CALM else np.ones_like(enough)
        decides = bool(enough[counted].all())
        no_verdict[run], fewer[run] = not decides, decides and not enough.all()
        for place, change in enumerate(CHANGES):
            effect, verdict = judged(np.exp(deciding[counted]) * (1 + change))
            assert effect.low is not None
            assert effect.high is not None
            holding[run, place] = not decides or effect.low <= change <= effect.high
            called[run, place] = decides and verdict in decision.CHANGES
            seen[run, place] = decides and verdict == "slower" and holding[run, place]
            if not change:
                half_widths.append((effect.high - effect.low) / 2)
    return Found(
        by_all=float(by_all.mean()),
        no_verdict=float(no_verdict.mean()),
        fewer=float(fewer.mean()),
        called=tuple(called.mean(axis=0).tolist()),
        seen=tuple(seen.mean(axis=0).tolist()),
        holding=tuple(holding.mean(axis=0).tolist()),
        half_width=float(np.median(half_widths)),
    )


def cells_of(loop: str, runs: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """With as many blocks as fit, by these recorded runs of that loop."""
    block_s = max((run["seconds"] - FIRST_S) / len(run["blocks"]) for run in runs)
    return [
        Cell(loop, int((seconds - FIRST_S) / block_s), seconds, dwell_s, waits)
        for seconds in SECONDS
        for dwell_s in DWELLS_S
        for waits in (WAITS if dwell_s is not None else WAITS[:1])
    ]


def row(cell: Cell, found: Found) -> list[str]:
    return [
        cell.loop,
        f"{cell.seconds:g} s, {cell.blocks} blocks",
        "no neighbour" if cell.dwell_s is None else f"{cell.dwell_s:g} s",
        f"{cell.waits:g} times as much",
        f"{found.called[0]:.1%}",
        f"{found.by_all:.1%}",
        *(f"{each:.1%}" for each in found.seen[1:]),
        f"{min(found.holding):.1%}",
        f"±{found.half_width:.2%}",
        f"{found.no_verdict:.1%}",
        f"{found.fewer:.1%}",
    ]


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    if not (runs := earlier(recorded_turns.__file__)):
        raise SystemExit("nothing is recorded yet: " + command_line.command(recorded_turns.__file__))
    random = np.random.default_rng(len(runs))
    done = []
    for loop in LOOPS:
        mine = [run for run in runs if run["loop"] == loop]
        recorded = [Pairs.of(block) for run in mine for block in run["blocks"]]
        for cell in cells_of(loop, mine):
            done.append((cell, simulated(recorded, cell, random)))
            print(*row(*done[-1]), sep=" | ", file=sys.stderr)
    write_result(
        __file__,
        title=f"What turns find in the noise of this machine, {RUNS:,} simulated runs each",
        header=HEADER,
        rows=[row(*each) for each in done],
        data=[asdict(cell) | asdict(found) for cell, found in done],
    )


if __name__ == "__main__":
    main()
