"""What decides, block by block, whether a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import api
from harness import measure, store
from harness.design import Gate
from tests.made_blocks import blocks, manifest


def test_a_primary_that_the_first_block_cannot_give_is_not_waited_for_in_the_others(tmp_path: Path) -> None:
    plan = manifest(primary="tokenize_ms_p50")
    (first,) = blocks(0.9, 1)
    untold = first.tables["requests"].assign(tokenized_ns=-1)
    store.write_block(tmp_path, 0, {**first.tables, "requests": untold})
    with pytest.raises(api.EngineError, match="tokenize_ms_p50 has no value in block 0 of before"):
        measure._rule(tmp_path, plan.design)(1)


def test_every_metric_of_a_gate_is_looked_for_after_the_first_block(tmp_path: Path) -> None:
    plan = manifest(secondaries=("tokenize_ms_p50",), gate=Gate(max_regression=0.02, levels=(0.05,)))
    (first,) = blocks(0.9, 1)
    untold = first.tables["requests"].assign(tokenized_ns=-1)
    store.write_block(tmp_path, 0, {**first.tables, "requests": untold})
    with pytest.raises(api.EngineError, match="tokenize_ms_p50 has no value in block 0 of before"):
        measure._rule(tmp_path, plan.design)(1)


def test_a_fixed_number_of_blocks_is_run_whatever_they_say(tmp_path: Path) -> None:
    design = manifest(2).design
    for each in blocks(0.5, 2):
        store.write_block(tmp_path, each.number, each.tables)
    enough = measure._rule(tmp_path, design)
    assert [enough(done) for done in (1, 2)] == [False, False]
