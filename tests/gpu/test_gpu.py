"""The same engine on a real GPU: `pytest -m gpu`. CI has none and skips these."""

import pytest
import torch

from overlap_bench.engines.api import STEP_KINDS
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.overlap import SPEC
from tests.engine.test_scoring import FOUR, NEAR, errors, forced_requests
from tests.engine.test_tokens import APART, COVER, MODELS, growing_requests, name, some_sampled_requests
from tests.support.in_process_engine import column, near_ties, sampled, serve, some_requests

TIGHT = {
    "max_batch_size": 6, "max_context": 64, "block_size": 4, "num_blocks": 1 + 18, "prefix_cache": True,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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
    prefills = column(record, "kind").count(STEP_KINDS.index("prefill"))
    assert record.counters["eager_launches"] == prefills
    assert record.counters["captured_launches"] == record.steps.rows - prefills > 0


@pytest.mark.parametrize("settings", APART, ids=name)
def test_tokens_equal_generate_when_blocks_run_out_and_prefixes_are_kept(cuda, settings):
    device, chaos = cuda
    requests = growing_requests(10)
    tokens, _, record = serve(device, settings, requests, **TIGHT, chaos=chaos)
    assert sum(column(record, "preempted")) > 0
    assert record.counters["prefix_cached_tokens"] > 0
    near_ties("tiny-gpt2", requests, tokens)


@pytest.mark.parametrize("settings", APART, ids=name)
def test_sampled_tokens_are_those_of_the_reference(cuda, settings):
    device, chaos = cuda
    requests = some_sampled_requests()
    tokens, _, record = serve(device, settings, requests, sampling=True, **TIGHT, chaos=chaos)
    assert sum(column(record, "preempted")) > 0
    assert tokens == sampled("tiny-gpt2", requests)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", FOUR, ids=name)
def test_scores_equal_transformers(cuda, model, settings):
    device, chaos = cuda
    requests = forced_requests(9)
    _, events, _ = serve(device, settings, requests, model=model, scoring=True, max_batch_size=5, chaos=chaos)
    assert max(errors(model, requests, events)) < NEAR


@pytest.mark.parametrize("model", MODELS)
def test_half_precision_serves_every_request_to_its_end(cuda, model):
    device, chaos = cuda
    requests = some_requests(9)
    tokens, _, _ = serve(
        device, APART[1], requests, model=model, dtype="bfloat16", max_batch_size=6, chaos=chaos
    )
    assert {each.id: len(tokens[each.id]) for each in requests} == {
        each.id: each.max_new_tokens for each in requests
    }
