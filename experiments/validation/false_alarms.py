"""How often the verdicts are wrong, by simulation.

    python -m experiments.validation.false_alarms    two minutes

How runs are simulated stands in tests/support/simulated_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import stats as distributions

from experiments.common import command_line
from experiments.common.record import write_result
from overlap_bench.harness.stats import paired, planning, stopping
from overlap_bench.harness.stats.stopping import ALPHA, Until
from tests.support.simulated_runs import (
    MOST,
    NEVER_SAME,
    NOISES,
    SD,
    SECONDARIES,
    Ended,
    Floats,
    agree,
    alternating,
    differences,
    family,
    fixed,
    intervals,
    normal,
    ordered,
    periodic,
    sequential,
)

RUNS = 100_000


# -- what is asked of them --------------------------------------------------------------------------------


def false_alarms(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows: a plan, and its rate under each noise."""
    decided = stopping.until_decided(MOST)
    rows: dict[str, list[float]] = {}
    for noise in NOISES.values():
        pairs, after_first = ordered(noise, random, runs, MOST)
        own = [ordered(noise, random, runs, MOST, after_first)[0] for _ in range(SECONDARIES)]
        for n in (2, 5, 6, 8, 10, 20):
            rows.setdefault(f"primary, {n} blocks", []).append(fixed(pairs, n, NEVER_SAME).detected)
        for share in (0.0, 0.5, 1.0):
            ended = sequential(pairs, decided, share * SD)
            name = f"primary, until decided, margin {share:g} SD"
            rows.setdefault(name, []).append(ended.detected)
        for share in (0.4, 0.6, 0.8, 1.0):
            precise = stopping.until_precise(share * SD, MOST)
            ended = sequential(pairs, precise, NEVER_SAME)
            rows.setdefault(f"primary, until a half-width of {share:g} SD", []).append(ended.detected)
        for rho in (0.0, 0.5, 0.9):
            others = [rho * pairs + (1 - rho**2) ** 0.5 * each for each in own]
            for n in (6, 10):
                found = family(others, fixed(pairs, n, SD), lambda _: ALPHA)
                rows.setdefault(f"5 secondaries, correlation {rho:g}, {n} blocks", []).append(found)
            levels = dict(zip(decided.looks, decided.levels, strict=True))
            found = family(others, sequential(pairs, decided, SD), levels.__getitem__)
            rows.setdefault(f"5 secondaries, correlation {rho:g}, until decided", []).append(found)
            changed = sequential(pairs + np.log1p(2 * SD), decided, SD)
            found = family(others, changed, levels.__getitem__)
            name = f"5 secondaries, correlation {rho:g}, until decided, primary 2 SD slower"
            rows.setdefault(name, []).append(found)
    return [[name, *(f"{rate:.1%}" for rate in rates)] for name, rates in rows.items()]


def wrongly_same(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows: a plan, and how often a true change of just the margin is called the same, by the margin."""
    decided = stopping.until_decided(MOST)
    pairs = differences(normal, random, runs, MOST)
    shares = (1.0, 2.0, 3.0)  # margin, in pair SDs
    plans: dict[str, Callable[[Floats, float], Ended]] = {
        "6 blocks": lambda shifted, margin: fixed(shifted, 6, margin),
        "20 blocks": lambda shifted, margin: fixed(shifted, 20, margin),
        "until decided": lambda shifted, margin: sequential(shifted, decided, margin),
        "until a half-width of half the margin": lambda shifted, margin: sequential(
            shifted, stopping.until_precise(margin / 2, MOST), margin
        ),
    }
    return [
        [name, *(f"{plan(pairs + np.log1p(share * SD), share * SD).same:.1%}" for share in shares)]
        for name, plan in plans.items()
    ]


def power(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows: blocks, pair SD, the simulated power for a true 1%, and that of the noncentral t."""
    rows = []
    for n, sd in ((5, 0.005), (10, 0.01)):
        pairs = differences(normal, random, runs, n) * (sd / SD) + np.log1p(0.01)
        low, high = intervals(pairs, n, ALPHA)
        found = float(((low > 0) | (high < 0)).mean())
        calculated = planning.detection_power(np.log1p(0.01) / sd, n)
        rows.append([str(n), f"{sd:.1%}", f"{found:.3f}", f"{calculated:.3f}"])
    return rows


def savings(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows by pair SD: a fixed plan for 80% power at the margin, and the group-sequential plan with the
    smallest maximum number of blocks that detects the margin at least as often."""
    rows = []
    for ratio in (1.0, 1.25, 1.5, 1.75, 2.0):
        margin = SD / ratio
        blocks = planning.fixed_plan(SD, margin)
        wanted = planning.detection_power(1 / ratio, blocks)
        most = blocks + blocks % 2
        while True:
            until = stopping.until_decided(most)
            pairs = differences(normal, random, runs, most)
            at_margin = sequential(pairs + np.log1p(margin), until, margin)
            if at_margin.detected >= wanted:
                break
            most += 2
        twice = sequential(pairs + np.log1p(2 * margin), until, margin)
        nothing = sequential(pairs, until, margin)
        rows.append(
            [
                f"{ratio:g}",
                str(blocks),
                f"{wanted:.3f}",
                str(most),
                f"{at_margin.detected:.3f}",
                f"{twice.blocks.mean():.1f}",
                f"{1 - twice.blocks.mean() / blocks:.0%}",
                f"{at_margin.blocks.mean():.1f}",
                f"{nothing.blocks.mean():.1f}",
            ]
        )
    return rows


def gates(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows by pair SD and true change: how often a gate at 2% passes and fails, and after how many blocks, by
    its usual plan and until it is decided; as gate.judge does for one metric."""
    bar = np.log1p(0.02)
    plans = [
        (looks, stopping.levels(looks, 0.10))  # two-sided 10%: 5% on the side that counts
        for looks in (stopping.LOOKS_OF_GATE, stopping.looks(MOST))
    ]
    rows = []
    for sd in (0.005, 0.01, 0.02):
        for truth in (0.0, 0.01, 0.02, 0.05):
            pairs = differences(normal, random, runs, MOST) * (sd / SD) + np.log1p(truth)
            found = []
            for looks, levels in plans:
                running, passed, failed = np.ones(runs, bool), np.zeros(runs, bool), np.zeros(runs, bool)
                blocks = np.full(runs, looks[-1])
                for look, level in zip(looks, levels, strict=True):
                    low, high = intervals(pairs, look, level)
                    passed |= running & (high <= bar)
                    failed |= running & (low > bar)
                    blocks[running & (passed | failed)] = look
                    running &= ~(passed | failed)
                found += [f"{passed.mean():.1%}", f"{failed.mean():.1%}", f"{blocks.mean():.1f}"]
            rows.append([f"{sd:.1%}", f"{truth:.0%}", *found])
    return rows


def warned(random: np.random.Generator) -> list[list[str]]:
    """Rows by noise: of the false alarms of 8 blocks, the share whose run warns of a position effect."""
    rows = []
    for name, noise in NOISES.items():
        pairs, after_first = ordered(noise, random, 20_000, 8)
        alarms = np.abs(fixed(pairs, 8, NEVER_SAME).verdict) == 1
        found = [paired.position(*each) for each in zip(pairs[alarms], after_first[alarms], strict=True)]
        told = np.mean([each is None or each.weakens(SD) for each in found])
        rows.append([name, f"{alarms.mean():.1%}", f"{told:.0%}"])
    return rows


def falsely_warned(random: np.random.Generator) -> list[list[str]]:
    """Rows by blocks and pair SD: the share of 4,000 runs without a position effect that are called weakened
    by one, at a margin of 1%; and what it would be if an effect whose interval holds 0 were believed."""
    rows = []
    for blocks in (6, 8, 10):
        for sd in (0.013, 0.02, 0.03, 0.065):
            pairs, after_first = ordered(normal, random, 4000, blocks)
            found = [paired.position(*each) for each in zip(pairs * (sd / SD), after_first, strict=True)]
            told = np.mean([each is not None and each.weakens(0.01) for each in found])
            believed = np.mean([each is not None and abs(each.left) > 0.01 / 2 for each in found])
            rows.append([f"{blocks} blocks, {sd:.1%}", f"{told:.1%}", f"{believed:.0%}"])
    return rows


def welch(first: Floats, second: Floats) -> Floats:
    """Two-sided p of each row; as stats.unpaired."""
    parts = [each.var(axis=1, ddof=1) / each.shape[1] for each in (first, second)]
    freedom = (parts[0] + parts[1]) ** 2 / sum(
        part**2 / (each.shape[1] - 1) for part, each in zip(parts, (first, second), strict=True)
    )
    t = np.abs(second.mean(axis=1) - first.mean(axis=1)) / np.sqrt(parts[0] + parts[1])
    found: Floats = 2 * distributions.t.sf(t, freedom)
    return found


def shortcuts(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows: a shortcut, and how often it finds a difference between equal arms at a nominal 5%."""
    rows = []

    def told(name: str, rate: float) -> None:
        rows.append([name, f"{rate:.1%}"])

    some = runs // 20  # of those with many samples a run

    # Boots differ by an SD of 1%, the requests of a boot by 10% of their time.
    boots, requests = 0.01 * random.standard_normal((2, some, 5, 1)), 0.1
    values = boots + requests * random.standard_normal((2, some, 5, 200))
    told(
        "requests as independent: 5 boots of 200, Welch", (welch(*values.reshape(2, some, -1)) < ALPHA).mean()
    )
    values += 0.005 * np.arange(10).reshape(2, 1, 5, 1)  # one arm after the other
    found = welch(*values.reshape(2, some, -1))
    told("the same, the machine slower by 0.5% with each boot", (found < ALPHA).mean())

    # Boots differ by 0.6%, the rounds of a boot by 0.5%.
    for rounds in (6, 20):
        luck = 0.006 * random.standard_normal((2, runs, 1))
        values = luck + 0.005 * random.standard_normal((2, runs, rounds))
        told(f"{rounds} rounds of one boot as blocks, Welch", (welch(*values) < ALPHA).mean())

    pairs = differences(normal, random, runs, MOST)
    for name, looks in (
        ("6 blocks, undecided ones topped up once, to 12", (6, 12)),
        ("a look at 5% after every second block, 6 to 20", tuple(range(6, 21, 2))),
        ("a look at 5% after every block, 6 to 20", tuple(range(6, 21))),
    ):
        plan = Until(rule="decided", looks=looks, levels=(ALPHA,) * len(looks))
        told(name, sequential(pairs, plan, NEVER_SAME).detected)

    for name, noise in NOISES.items():
        if name != "extreme drift":
            one, other = np.split(noise(random, runs, 16), 2, axis=1)
            told(
                f"two runs of 8 boots, one after the other, Welch; {name}", (welch(one, other) < ALPHA).mean()
            )

    for blocks in (6, 8, 20):
        turns = np.resize([False, True, True, False], (1, blocks)).repeat(runs, axis=0)[:, :blocks]
        turned = ordered(periodic, random, runs, blocks, turns)[0]
        told(f"ABBA in place of drawn orders, period of 8 boots, {blocks} blocks",
             fixed(turned, blocks, NEVER_SAME).detected)  # fmt: skip
    for blocks in (6, 8, 20):
        first = random.random((runs, blocks // 2, 1)) < 0.5
        turns = np.concatenate([first, ~first], axis=2).reshape(runs, blocks)
        turned = ordered(alternating, random, runs, blocks, turns)[0]
        told(f"one of each order in every two blocks, period of 4 boots, {blocks} blocks",
             fixed(turned, blocks, NEVER_SAME).detected)  # fmt: skip
    return rows


def other_rates(runs: int, random: np.random.Generator) -> list[list[str]]:
    """Rows: what else stats.md says, and its rate."""
    decided = stopping.until_decided(MOST)
    heavy = SD * random.standard_t(3, (runs, MOST)) / 3**0.5
    rows = [("until decided, heavy tails on a pair", sequential(heavy, decided, NEVER_SAME).detected)]
    for sd in (0.005, 0.01, 0.02):
        pairs = differences(normal, random, runs, 8) * (sd / SD) + np.log1p(0.01)
        low, _ = intervals(pairs, 8, 0.10)
        rate = float((low > 0).mean())
        rows.append((f"a gate that fails above 0, true 1%, 8 blocks, pair SD {sd:.1%}", rate))
    return [[name, f"{rate:.1%}"] for name, rate in rows]


def sections(data: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """The further tables of the page, each with its header first."""
    plans = ("usual plan", "until decided")
    gates = [f"{what}, {plan}" for plan in plans for what in ("passes", "fails", "blocks")]
    return {
        "Shortcuts": [["equal arms, at a nominal 5%", "called different"], *data["shortcuts"]],
        "Gates at 2%": [["pair SD", "true change", *gates], *data["gates"]],
        "A change of the margin, called same": [
            ["", *(f"margin of {share} pair SD" for share in (1, 2, 3))],
            *data["wrongly same"],
        ],
        "Others": [["", "rate"], *data["other rates"]],
    }


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    random = np.random.default_rng(2026)
    decided = stopping.until_decided(MOST)
    for shift in (0.0, 1.0, 2.0):
        some = differences(normal, random, 100, MOST) + np.log1p(shift * SD)
        agree(some, decided, SD)
        agree(some, stopping.until_precise(0.6 * SD, MOST), SD)
    data: dict[str, Any] = {
        "runs": RUNS,
        "levels": dict(zip(map(str, decided.looks), decided.levels, strict=True)),
        "wrongly same": wrongly_same(RUNS, random),
        "power": power(RUNS, random),
        "savings": savings(RUNS, random),
        "warned": warned(random),
        "falsely warned": falsely_warned(np.random.default_rng(2029)),
        "gates": gates(RUNS, random),
        "shortcuts": shortcuts(RUNS, np.random.default_rng(2027)),
        "other rates": other_rates(RUNS, np.random.default_rng(2028)),
    }
    write_result(
        __file__,
        title=f"False alarms between arms that do not differ, {RUNS:,} simulated runs each",
        header=["", *NOISES],
        rows=false_alarms(RUNS, random),
        data=data,
        sections=sections(data),
    )
    for name, value in data.items():
        print(name, *(value if isinstance(value, list) else [value]), sep="\n  ")


if __name__ == "__main__":
    main()
