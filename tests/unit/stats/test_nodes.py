"""Whether nodes disagree about a change, and what is made of those that do."""

import numpy as np
import pytest
from scipy import stats

from overlap_bench.harness.stats.nodes import LEVEL, agreement, of_nodes

NODES = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]


def test_the_test_is_the_analysis_of_variance() -> None:
    values = np.random.default_rng(1).normal(0, 0.01, 9)
    found = agreement(values, NODES, 0.01)
    assert found.p == pytest.approx(stats.f_oneway(*values.reshape(3, 3)).pvalue)


def test_nodes_that_differ_are_found_and_their_spread_is_told() -> None:
    random = np.random.default_rng(3)
    nodes = [str(node) for node in range(40) for _ in range(5)]
    values = np.repeat(0.02 * random.standard_normal(40), 5) + 0.01 * random.standard_normal(200)
    found = agreement(values, nodes, 0.01)
    assert found.disagree
    assert found.spread == pytest.approx(0.02, rel=0.3)


def test_nodes_that_agree_are_let_be_but_for_the_level() -> None:
    runs = np.random.default_rng(4).normal(0, 0.01, (4000, 9))
    found = [agreement(run, NODES, 0.01) for run in runs]
    assert np.mean([each is not None and each.disagree for each in found]) == pytest.approx(LEVEL, abs=0.02)


def test_one_node_or_one_block_of_each_can_not_disagree() -> None:
    assert agreement([0.1, 0.2, 0.3], ["a"] * 3, 0.01) is None
    assert agreement([0.1, 0.2, 0.3], ["a", "b", "c"], 0.01) is None


def test_blocks_without_any_scatter_leave_no_doubt() -> None:
    same, other = (agreement(each, ["a", "a", "b", "b"], 0.01) for each in ([0.1] * 4, [0.1, 0.1, 0.2, 0.2]))
    assert (same.p, same.disagree) == (1.0, False)
    assert (other.p, other.disagree) == (0.0, True)


def test_a_node_counts_once_however_many_blocks_it_has() -> None:
    assert of_nodes([1.0, 4.0, 3.0], ["a", "a", "b"], "ratio") == pytest.approx([2.0, 3.0])
    assert of_nodes([1.0, 4.0, 3.0], ["a", "b", "a"], "difference") == [2.0, 4.0]
