"""Blocks of several machines: whether these disagree about the change, and what then is the unit.

Model: d_ij = theta + u_i + e_ij for block j of node i, with SD tau of the u_i between nodes and sigma within
one. theta is what a further node of the kind would show. With tau > 0 the blocks of a node share its luck,
and t over blocks is too sure of itself; t over the means of the nodes is right whatever tau is, and wide,
since nodes are few. So nodes are asked first, by a test so lax that what it misses does little harm
(stats.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_bench.harness.stats.distributions import f_quantile, f_tail
from overlap_bench.harness.stats.paired import Differences, Scale

LEVEL = 0.5  # of the test: at 5%, equal arms would be called a change in up to 13% of runs


@dataclass(frozen=True, slots=True)
class Agreement:
    """What nodes of several blocks say of each other. `spread`: tau, as far as blocks do not explain it.
    `power`: the chance that nodes with a tau of the margin are found to disagree."""

    p: float
    spread: float
    power: float

    @property
    def disagree(self) -> bool:
        return self.p < LEVEL


def agreement(
    differences: Sequence[float] | Differences, nodes: Sequence[str], margin: float
) -> Agreement | None:
    """The F test of a random effect of the nodes; None with one node, or without two blocks of any.

    With n_i blocks of k nodes, MSB between and MSW within: F = MSB / MSW on k-1 and n-k degrees of freedom,
    tau^2 = (MSB - MSW) / n0, n0 = (n - sum(n_i^2) / n) / (k - 1). With tau > 0, F is
    (1 + n0 tau^2 / sigma^2) times as large (exactly so where all n_i are equal), which is its power. Source:
    Searle, Casella & McCulloch, "Variance Components", ch. 3.
    """
    values = np.asarray(differences, float)
    groups = [values[places] for places in _places(nodes)]
    n, k = len(values), len(groups)
    if k < 2 or n == k:
        return None
    between = sum(len(each) * (each.mean() - values.mean()) ** 2 for each in groups) / (k - 1)
    within = sum(float(((each - each.mean()) ** 2).sum()) for each in groups) / (n - k)
    blocks = (n - sum(len(each) ** 2 for each in groups) / n) / (k - 1)
    if within == 0:
        return Agreement(1.0 if between == 0 else 0.0, float(between / blocks) ** 0.5, 1.0)
    found = 1 + blocks * np.log1p(margin) ** 2 / within
    return Agreement(
        p=f_tail(float(between / within), k - 1, n - k),
        spread=float(max(0.0, between - within) / blocks) ** 0.5,
        power=f_tail(f_quantile(1 - LEVEL, k - 1, n - k) / float(found), k - 1, n - k),
    )


def of_nodes(values: Sequence[float], nodes: Sequence[str], scale: Scale) -> list[float]:
    """One value for each node, in the order in which they come: the mean of its blocks, geometric where a
    ratio is made of it."""
    given = np.asarray(values, float)
    if scale == "ratio":
        return [float(np.exp(np.log(given[places]).mean())) for places in _places(nodes)]
    return [float(given[places].mean()) for places in _places(nodes)]


def _places(nodes: Sequence[str]) -> list[list[int]]:
    """Which blocks each node has."""
    return [[place for place, each in enumerate(nodes) if each == node] for node in dict.fromkeys(nodes)]
