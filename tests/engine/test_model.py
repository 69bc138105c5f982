"""Proof that a mistake in a step's metadata shows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC, scheduler
from tests.support.in_process_engine import generated, serve

SERIAL = {"schedule": "serial", "h2d": "pinned", "graph": "on"}


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "input_ids": lambda tokens: [token - 1 if token > 1 else token + 1 for token in tokens],
    "position_ids": lambda positions: [position + 1 for position in positions],
    "slot_mapping": lambda slots: [slot + 1 for slot in slots],
    "block_tables": lambda tables: tables * (np.arange(tables.shape[1]) > 0),
}


@pytest.mark.parametrize("of", MISTAKES)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_one_mistake_in_one_step_changes_the_output(device, monkeypatch, name, of):
    """Or the presets would hide bugs: with transformers' default initializer they do."""
    requests = [api.Request(number, [number * 91 + 3, 44, 2 + number], 16) for number in range(8)]
    build, steps = scheduler.decode_batch, iter(range(100))

    def spoiled(*arguments):
        batch = build(*arguments)
        if next(steps) == 4:
            batch.values[of] = MISTAKES[of](batch.values[of])
        return batch

    monkeypatch.setattr(scheduler, "decode_batch", spoiled)
    tokens, _, _ = serve(device, SPEC.check(SERIAL), requests, model=name, max_batch_size=8)
    expected = generated(name, requests)
    assert sum(tokens[number] != expected[number] for number in expected) >= 6
