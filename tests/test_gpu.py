"""The same engine on a real GPU: `pytest -m gpu`. CI has none and skips these."""

from __future__ import annotations

import pytest
import torch

from engines.devices import open_device
from engines.overlap import SPEC
from tests.serving import near_ties, serve, some_requests
from tests.test_tokens import COVER, MODELS, name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def exact_fp32():
    """TF32 would make near-ties of what are none."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module", params=[None, 7], ids=["calm", "chaos"])
def cuda(request):
    opened = open_device("cuda", chaos=request.param)
    yield opened, request.param
    opened.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", COVER, ids=name)
def test_tokens_equal_generate(cuda, model, settings):
    device, chaos = cuda
    requests = some_requests(12)
    tokens, _, _ = serve(
        device, settings, requests, model=model, max_batch_size=6, max_context=128, chaos=chaos
    )
    near_ties(model, requests, tokens)


def test_a_planted_delay_takes_as_long_as_asked(cuda):
    device, _ = cuda
    settings = SPEC.check({"schedule": "overlap", "launch": "inline", "graph": "on"})
    requests, ns = some_requests(6), 500_000
    plain, _, _ = serve(device, settings, requests, max_batch_size=6, max_context=128)
    delayed, _, record = serve(
        device, settings, requests, max_batch_size=6, max_context=128, plant_at="device", plant_ns=ns
    )
    assert delayed == plain
    mean = record.counters["planted_device_ns"] / record.steps.rows
    assert 0.8 * ns < mean < 1.5 * ns  # the clock may move, and events are 0.5 us fine


def test_every_decode_shape_is_captured_and_replayed(cuda):
    device, chaos = cuda
    settings = SPEC.check({"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"})
    requests = some_requests(20)
    tokens, _, record = serve(device, settings, requests, max_batch_size=8, max_context=128, chaos=chaos)
    near_ties("tiny-gpt2", requests, tokens)
    prefills = record.counters["eager_launches"]
    assert record.counters["captured_launches"] == record.steps.rows - prefills
    assert record.counters["captured_launches"] > 0
