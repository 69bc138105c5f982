"""What is measured in several sittings goes on where it was, and is read as it should be."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.validation import paced_step, real_aa

US = {"off": {0.0: 1000, 0.5: 1310, 1.0: 1800, 2.0: 2821}, "on": {0.0: 1000, 0.5: 1005, 1.0: 1100, 2.0: 2080}}


def found() -> paced_step.Found:
    """A host's work of 1 ms, 200 us of it beside the device."""
    return {
        (0, mode, 16, f"share {share}"): {
            "step_us": [us] * 3,
            "device_us": share * 1000,
            "phases": {"launch": [200] * 3},
        }
        for mode, steps in US.items()
        for share, us in steps.items()
    }


def test_a_step_is_held_against_the_sum_or_the_larger_where_they_are_apart() -> None:
    cells = [paced_step.cell(found(), [0], 16, share) for share in (0.5, 1.0, 2.0)]
    assert [each.ratio for each in cells] == [2, 1, 0.5]
    assert [each.against["off"] for each in cells] == [
        [pytest.approx(1310 / 1300 - 1)],
        [0],
        [pytest.approx(2821 / 2800 - 1)],
    ]
    assert cells[2].against["on"] == [pytest.approx(0.04)]
    assert "on: within 1% in 1 of 2 cells" in paced_step.within(cells, "on")
    assert "furthest +4.0%, at batch 16, host/device 0.50" in paced_step.within(cells, "on")
    assert "off: within 1% in 2 of 2" in paced_step.within(cells, "off")


def test_steps_right_behind_a_change_of_pace_do_not_count() -> None:
    ends = [0, 5, 11, 18, 26, 35, 36, 37, 38, 39, 40, 42]
    took = [5] * 6 + [1] * 6
    rows = [{"begin": 1000 * (end - us), "end": 1000 * end} for end, us in zip(ends, took, strict=True)]
    first, second = (list(paced_step.kept_of(rows, us)) for us in (5000, 1000))
    assert [[gap for gap, _ in cycle] for cycle in first] == [[8, 9]]
    assert [[gap for gap, _ in cycle] for cycle in second] == [[1, 2]]


def test_no_pace_comes_twice_in_a_row() -> None:
    order = paced_step.shuffled(["a", "b"], random.Random(0))
    assert sorted(order) == ["a"] * paced_step.CYCLES + ["b"] * paced_step.CYCLES
    assert all(first != second for first, second in pairwise(order))


def test_a_trial_counts_once_both_its_boots_are_there() -> None:
    rows = [{"batch": 16, "name": "k"}]
    boots: dict[str, Any] = {"host": rows, "0 on": rows, "0 off": rows, "1 off": rows}
    assert set(paced_step.complete(boots, 2)) == {(0, "off", 16, "k"), (0, "on", 16, "k")}


def test_runs_of_equal_arms_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"before": 10, "change": 0.01, "ci_low": 0.005, "ci_high": 0.015, "sd": 0.002}
    seeds: list[str] = []

    def bench(*arguments: str) -> dict[str, Any]:
        seeds.append(arguments[-1])
        row = {**step, "verdict": "slower" if arguments[-1] == "1" else "same"}
        compared = {"primary": "step", "metrics": {"step": row}, "warnings": [], "outputs": {}}
        return {"code": 0, "seconds": 90.0, "commit": "0123abc", "comparison": compared}

    monkeypatch.setattr(real_aa, "bench", bench)

    def ask(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["real_aa", *words])
        real_aa.main()

    folder = ("--folder", str(tmp_path))
    ask("1", *folder, "--", "--engine", "sglang")
    ask("3", *folder, "--", "--engine", "sglang")
    ask("4", *folder, "--minutes", "-1", "--", "--engine", "sglang")
    assert seeds == ["0", "1", "2"]
    kept = json.loads((tmp_path / "real_aa.json").read_text())
    assert kept["title"] == "`bench aa --engine sglang`: 1 of 3 called different"
    assert [row[-1] for row in kept["rows"]] == ["no", "yes", "no"]
    with pytest.raises(SystemExit):  # all there already
        ask("3", *folder, "--", "--engine", "sglang")
    with pytest.raises(SystemExit):
        ask("4", *folder, "--", "--engine", "vllm")
