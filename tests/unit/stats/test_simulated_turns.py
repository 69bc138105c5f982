"""experiments.validation.simulated_turns: a run is made of recorded pairs, and is judged as a real one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments.validation import simulated_turns
from experiments.validation.simulated_turns import Cell, Neighbour, Pairs, noise, simulated
from harness.metrics import slices
from harness.metrics.definitions import SLICED

QUIET = Cell("serial", blocks=6, seconds=90.0, dwell_s=None)


def recorded(seed: int, pairs: int = 60, of_pairs: float = 0.1, of_boots: float = 0.003) -> Pairs:
    """A block of steps of about 1 ms, in turns of two."""
    random = np.random.default_rng(seed)
    steps = 1_000 * np.exp(of_pairs * random.standard_normal((pairs, 2)))
    steps[:, 1] *= np.exp(of_boots * random.standard_normal())
    return Pairs.of([{"steps": 2, "before": steps[:, 0].tolist(), "after": steps[:, 1].tolist()}])


def slices_of(steps_us: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pd.DataFrame:
    turns = np.arange(len(steps_us))
    columns = {
        name: turns * 0 + value for name, value in (("round", 0), ("steps", 2), ("batch", 4), ("tokens", 8))
    }
    times = {"interval_ns": steps_us * 1e3, "device_ns": steps_us * 5e2, "turn_ns": steps_us * 1e3}
    return pd.DataFrame({"turn": turns, "first_step": 2 * turns, **columns, **times})


def test_a_block_says_what_the_metric_says_of_the_same_turns() -> None:
    block = recorded(seed=1)
    before, after = slices.step_sliced(*(slices_of(block.step_us[:, arm]) for arm in (0, 1)))
    (found,) = noise([block], Cell("serial", 1, 90.0, None), np.random.default_rng(0))
    assert abs(found) == pytest.approx(abs(np.log(after[SLICED] / before[SLICED])))


def test_both_arms_are_swapped_in_half_of_the_blocks() -> None:
    found = noise([recorded(seed=1)], Cell("serial", 400, 90.0, None), np.random.default_rng(0))
    assert 150 < (found > 0).sum() < 250
    assert np.unique(np.abs(found).round(12)).size == 1


def test_a_turn_is_slower_for_as_much_of_it_as_the_neighbour_computes() -> None:
    pairs = Pairs.of([{"steps": 1_000, "before": [1_000, 1_000], "after": [1_000, 1_000]}])  # turns of 1 s
    neighbour = Neighbour(np.array([-1.0, 0.0, 1.5, 9.0]), np.array([0.0, 0.0, 1.5, 1.5]))  # from 0 to 1.5 s
    slowed = neighbour.slowed(pairs, 0.0) / pairs.step_us
    assert slowed.ravel().tolist() == pytest.approx([2.0, 1.5, 1.0, 1.0])


@pytest.mark.parametrize("dwell_s", simulated_turns.DWELLS_S[1:])
def test_a_neighbour_computes_for_half_of_the_time_and_covers_the_run(dwell_s: float) -> None:
    random = np.random.default_rng(0)
    drawn = [Neighbour.drawn(random, dwell_s, 360.0) for _ in range(200)]
    assert all(each.moments[0] <= 0 and each.moments[-1] > 270 for each in drawn)
    computed = [
        np.interp(180.0, each.moments, each.computed) - np.interp(0, each.moments, each.computed)
        for each in drawn
    ]
    assert np.mean(computed) / 180 == pytest.approx(0.5, abs=0.06)


def test_equal_arms_are_rarely_called_a_change_and_a_large_one_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_turns, "RUNS", 300)
    blocks = [recorded(seed) for seed in range(20)]
    for cell in (QUIET, Cell("serial", 6, 90.0, dwell_s=1.0)):
        found = simulated(blocks, cell, np.random.default_rng(0))
        assert found.called[0] < 0.1
        assert found.seen[2] > found.seen[1] > found.called[0]
        assert min(found.holding) > 0.9
