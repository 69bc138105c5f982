"""What the overlap engine refuses, each with one line, and that it refuses nothing else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.refusal import why_refused
from overlap_bench.engines.overlap.request import Active

VOCABULARY = 4096
OPTIONS = api.EngineOptions(max_context=32, prefill_max_tokens=24, sampling=True)
SCORING = msgspec.structs.replace(OPTIONS, sampling=False, scoring=True)


def refused(
    prompt: list[int], most: int = 4, options: api.EngineOptions = OPTIONS, blocks: int = 4, **asked: object
) -> str | None:
    """Why an engine whose pool has `blocks` KV blocks of 8 tokens refuses a request; None if it does not."""
    request = api.Request(0, prompt, most, **asked)
    return why_refused(Active(request, prompt, 0, 0), options, VOCABULARY, BlockPool(blocks + 1, 8))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1], "most": 0}, "max_new_tokens is 0; at least one token must be asked for"),
        ({"prompt": [1] * 20, "most": 13}, "a prompt of 20 tokens and 13 new ones exceed max_context=32"),
        ({"prompt": [1] * 25}, "a prompt of 25 tokens exceeds prefill_max_tokens=24"),
        ({"prompt": [1, 4096]}, "the prompt has ids beyond the model's vocabulary, 0 to 4095"),
        ({"prompt": [-1]}, "the prompt has ids beyond the model's vocabulary, 0 to 4095"),
        ({"stop": ["END", ""]}, "a stop string is empty"),
        ({"prompt": [1] * 14, "blocks": 2}, "18 tokens do not fit into 2 KV blocks of 8"),
        ({"temperature": -1.0}, "temperature is -1; it must be 0 (greedy) or above"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 (greedy) or above"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0 and at most 1 (all)"),
        ({"top_k": -3}, "top_k is -3; it must be 0 (all) or above"),
        ({"top_k": 1 << 31}, "top_k 2147483648 does not fit into 32 bits"),
        ({"seed": 1 << 63}, "seed 9223372036854775808 does not fit into 64 bits"),
        (
            {"temperature": 0.5, "options": SCORING},
            "a temperature needs an engine started with sampling=on",
        ),
        ({"forced": [1] * 4}, "forced tokens need an engine started with scoring=on"),
        ({"forced": [1, 2], "options": SCORING}, "max_new_tokens is 4, and 2 tokens are forced"),
        (
            {"forced": [1, 2, 3, 4096], "options": SCORING},
            "forced tokens have ids beyond the model's vocabulary, 0 to 4095",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_one_line(asked, why):
    assert refused(**{"prompt": [1], **asked}) == why


@given(prompt=st.integers(1, 24), most=st.integers(1, 31), blocks=st.integers(1, 4))
def test_a_request_is_refused_exactly_where_its_tokens_have_no_place(prompt, most, blocks):
    """The last token is never fed back, so it needs no KV slot."""
    fits = prompt + most <= OPTIONS.max_context and prompt + most - 1 <= blocks * 8
    assert (refused([1] * prompt, most, blocks=blocks) is None) == fits
