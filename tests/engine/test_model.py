"""The device's programs against transformers, and proof that a mistake in a step's metadata shows."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC, model, scheduler
from overlap_bench.engines.overlap.batch import Batch, decode_batch, prefill_batch
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.programs import Decode
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.toggles.tables import Full
from tests.support.in_process_engine import generated, reference_model, serve

SERIAL = {"schedule": "serial", "h2d": "pinned", "graph": "on"}


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_logits_equal_transformers_to_a_thousandth(monkeypatch, name):
    """Prefill, then decode with a teacher, blocks in mixed order, beside a padding row."""
    module, seen = small_module(monkeypatch, name)
    ids = torch.randint(1, 4096, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    request = api_request(ids[:20])
    request.slot, request.blocks = 1, [7, 2, 5]
    with torch.inference_mode():
        tables = Full(slots=3, blocks=3, counters=Counter())
        batch = prefill_batch([request], 20, tables, 16)
        write(module, "prefill", batch)
        module.prefill(1, 20)
        tables.write(1, request.blocks)
        for position in range(20, 40):
            request.tokens, request.context = ids[20 : position + 1], position + 1
            batch = decode_batch([request], Decode(2, 3), tables, 16)
            write(module, "decode.2.3", batch)
            module.decode(2, 3)
        expected = reference_model(name)(torch.tensor([ids])).logits[0, 19:]
    got = torch.stack([logits[0] for logits in seen])
    assert (got - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_logits_behind_a_cached_prefix_equal_transformers_to_a_thousandth(monkeypatch, name):
    """Two prompts that begin alike, of different length; the second one finds a block of the first."""
    module, seen = small_module(monkeypatch, name)
    ids = torch.randint(1, 4096, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    first, second = api_request(ids[:20]), api_request(ids[:16] + ids[25:40])
    first.slot, first.blocks = 0, [7, 2]
    second.slot, second.blocks, second.cached_blocks = 1, [7, 5], 1
    with torch.inference_mode():
        tables = Full(slots=3, blocks=2, counters=Counter())
        write(module, "prefill", prefill_batch([first], 20, tables, 16))
        module.prefill(1, 20)
        tables.write(0, first.blocks)
        tables.write(1, second.blocks)
        batch = prefill_batch([first, second], 20, tables, 16)
        write(module, "extend", batch)
        module.extend(*batch.program.arguments)
        expected = [
            reference_model(name)(torch.tensor([each.prompt])).logits[0, -1] for each in (first, second)
        ]
    for got in (seen[0][0], seen[1][0]):
        assert (got - expected[0]).abs().max() < 1e-3
    assert (seen[1][1] - expected[1]).abs().max() < 1e-3


def small_module(monkeypatch, name: str) -> tuple[model.OverlapModule, list[torch.Tensor]]:
    """The device's module in this process, and where the logits of its steps are put."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "sample_greedy", lambda logits, out: seen.append(logits.clone()))
    config = ModelConfig(
        model=name,
        max_batch_size=2,
        prefill_max_batch_size=2,
        prefill_max_tokens=64,
        max_context=48,
        num_blocks=9,
        block_size=16,
        prefix_cache=True,
    )
    module = model.OverlapModule(torch.device("cpu"), config)
    return module, seen


def api_request(prompt: list[int]):
    return Active(api.Request(0, prompt, 30), prompt, 0, 0)


def write(module: model.OverlapModule, name: str, batch: Batch) -> None:
    for key, values in batch.values.items():
        flat = torch.as_tensor(values).ravel()
        module._arrays[name][key][: len(flat)] = flat


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
