"""A model that spans two cards, over NCCL, its decode captured with the all-reduces in it."""

import pytest
import torch

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.overlap import SPEC
from tests.support.in_process_engine import near_ties, serve, some_requests

INLINE = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}
SERIAL = {"schedule": "serial"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("chaos", [None, 7], ids=["calm", "chaos"])
@pytest.mark.parametrize(
    ("model", "settings", "share"),
    [("tiny-gpt2", SERIAL, "pickle"), ("tiny-llama", INLINE, "ring")],
    ids=["gpt2-serial-pickle", "llama-overlap-ring"],
)
def test_two_cards_give_the_tokens_of_transformers(model, settings, share, chaos):
    torch.backends.cuda.matmul.allow_tf32 = False
    device = open_device("cuda", chaos=chaos, place=(0, 2))
    try:
        requests = some_requests(12)
        chosen = SPEC.check(settings | {"ranks": "2", "share": share})
        tokens, _, _ = serve(
            device, chosen, requests, model=model, max_batch_size=6, max_context=128, chaos=chaos
        )
        near_ties(model, requests, tokens)  # raises where they part at what is no near-tie
    finally:
        device.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_ranks_than_cards_are_refused_in_one_line():
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(BadSetting, match=f"ranks={ranks}: each takes a card, and torch finds {ranks - 1}"):
        open_device("cuda", place=(0, ranks))
