"""How often equal arms on several nodes are called a change, where the change is another one on each node.

    python -m experiments.validation.node_effects    a minute

Nodes whose own change has a spread of tau, in units of the SD of a block within a node; the same number of
blocks on each. Three rules are simulated: t over blocks whatever the nodes say, t over nodes whatever they
say, and what the harness does (harness/stats/nodes.py): over nodes where a lax test finds that they disagree,
else over blocks. `agree` checks some runs against the harness itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy import stats as distributions

from experiments.common import command_line
from experiments.common.record import write_result
from harness.stats import paired
from harness.stats.nodes import LEVEL, agreement, of_nodes
from harness.stats.stopping import ALPHA

RUNS = 100_000
SIZES = ((2, 3), (2, 10), (4, 2), (4, 3), (4, 6), (4, 25), (8, 2), (8, 6), (20, 3))  # nodes, blocks of each
SPREADS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # tau, in units of sigma
LEVELS = (0.05, 0.1, 0.25, 0.5)
SHOWN = (4, 6)  # of which every level is shown
CHANGE = 1.5  # a true change in units of sigma, for the power

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def simulated(random: np.random.Generator, nodes: int, blocks: int, tau: float, runs: int = RUNS) -> Floats:
    """Differences of equal arms: [runs, nodes, blocks]."""
    own = tau * random.standard_normal((runs, nodes, 1))
    return own + random.standard_normal((runs, nodes, blocks))


def over_blocks(found: Floats) -> Flags:
    """Whether t over all blocks calls a change."""
    return over_nodes(found.reshape(len(found), -1, 1))


def over_nodes(found: Floats) -> Flags:
    """Whether t over the means of the nodes does."""
    means = found.mean(axis=2)
    n = means.shape[1]
    half = distributions.t.ppf(1 - ALPHA / 2, n - 1) * means.std(axis=1, ddof=1) / n**0.5
    called: Flags = np.abs(means.mean(axis=1)) > half
    return called


def disagree(found: Floats, level: float) -> Flags:
    """Whether the F test at that level finds that nodes disagree."""
    _, nodes, blocks = found.shape
    between = blocks * found.mean(axis=2).var(axis=1, ddof=1)
    within = found.var(axis=2, ddof=1).mean(axis=1)
    flags: Flags = between / within > distributions.f.ppf(1 - level, nodes - 1, nodes * (blocks - 1))
    return flags


def decided(found: Floats, level: float = LEVEL) -> Flags:
    """Whether the harness calls a change."""
    return np.where(disagree(found, level), over_nodes(found), over_blocks(found))


def agree(found: Floats) -> None:
    """Raises AssertionError where the harness decides otherwise than these arrays."""
    _, nodes, blocks = found.shape
    names = [str(node) for node in range(nodes) for _ in range(blocks)]
    for run, called in zip(found, decided(found), strict=True):
        before, after = [1.0] * run.size, np.exp(0.01 * run.reshape(-1)).tolist()
        said = agreement(paired.paired(before, after, "ratio"), names, 0.01)
        assert said is not None
        if said.disagree:
            before, after = (of_nodes(values, names, "ratio") for values in (before, after))
        p = paired.effect(before, after).p
        assert p is not None
        assert (p < ALPHA) == called


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    random = np.random.default_rng(2026)
    agree(simulated(random, 4, 3, 0.7, 200))
    rows = []
    rules: dict[str, Callable[[Floats], Flags]] = {
        "over blocks": over_blocks,
        "over nodes": over_nodes,
        "as decided here": decided,
        **{
            f"the same, a test at {level:.0%}": partial(decided, level=level)
            for level in LEVELS
            if level != LEVEL
        },
    }
    rates: dict[str, dict[str, list[float]]] = {}
    for nodes, blocks in SIZES:
        found = [simulated(random, nodes, blocks, tau) for tau in SPREADS]
        for name, called in rules.items():
            where = f"{nodes} nodes of {blocks} blocks"
            rate = rates.setdefault(where, {})[name] = [float(called(each).mean()) for each in found]
            if name in ("over blocks", "as decided here") or (nodes, blocks) == SHOWN:
                rows.append([where, name, *(f"{each:.1%}" for each in rate)])
    power = {
        f"{nodes} nodes of {blocks} blocks": {
            name: [float(called(simulated(random, nodes, blocks, tau) + CHANGE).mean()) for tau in SPREADS]
            for name, called in rules.items()
        }
        for nodes, blocks in SIZES
    }
    write_result(
        __file__,
        title="Equal arms called a change, on nodes of which each has a change of its own (its SD, in those "
        f"of a block, above each column); {RUNS:,} simulated runs each",
        header=["", "unit", *(f"{each:g}" for each in SPREADS)],
        rows=rows,
        data={"runs": RUNS, "level": LEVEL, "spreads": SPREADS, "rates": rates, "power": power},
    )


if __name__ == "__main__":
    main()
