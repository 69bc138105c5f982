"""What decides, block by block, whether a run goes on."""

from __future__ import annotations

import time

import pytest

from engines import api
from harness.analysis.rule import enough
from harness.analysis.values import block_values
from harness.metrics.block import Values
from harness.plan.design import Design, Gate
from harness.store.block import Block
from harness.studies import measure
from tests.support.made_blocks import blocks, manifest


def untold(design: Design) -> list[Values]:
    """Of a first block without a time at which a prompt was tokenized."""
    (first,) = blocks(0.9, 1)
    asked = first.tables["requests"].assign(tokenized_ns=-1)
    return [block_values(design, Block(0, {**first.tables, "requests": asked}))]


def test_a_primary_that_the_first_block_cannot_give_is_not_waited_for_in_the_others() -> None:
    design = manifest(primary="tokenize_ms_p50").design
    with pytest.raises(api.EngineError, match="tokenize_ms_p50 has no value in block 0 of before"):
        enough(design, untold(design))


def test_every_metric_of_a_gate_is_looked_for_after_the_first_block() -> None:
    design = manifest(secondaries=("tokenize_ms_p50",), gate=Gate(max_regression=0.02, levels=(0.05,))).design
    with pytest.raises(api.EngineError, match="tokenize_ms_p50 has no value in block 0 of before"):
        enough(design, untold(design))


def test_a_fixed_number_of_blocks_is_run_whatever_they_say() -> None:
    design = manifest(2).design
    values = [block_values(design, each) for each in blocks(0.5, 2)]
    assert [enough(design, values[:done]) for done in (1, 2)] == [False, False]


@pytest.mark.parametrize(
    ("seconds", "minutes", "wanted"),
    [
        ([0, 10, 10, 10, 10], 0.5, 3),
        ([5, 25, 10, 10, 10], 1.0, 2),  # another one may take as long as the longest
        ([30, 10, 10, 10], 1.0, 3),  # and the first boots, which take long, are had once
        ([0, 100, 10], 1.0, 1),  # one there is, however long it took
        ([5, 10, 10, 10, 10], None, 4),
    ],
)
def test_a_run_ends_when_another_block_as_long_as_the_longest_would_not_fit(
    seconds: list[float], minutes: float | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([sum(seconds[:done]) for done in range(len(seconds) + 1)])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    clock, done = measure._Clock(), 0
    clock.boots_done()
    for _ in seconds[1:]:
        clock.block_done()
        done += 1
        if clock.is_up(minutes):
            break
    assert done == wanted
