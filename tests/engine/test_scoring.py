"""Scores of forced tokens equal transformers' log-probabilities, whatever the toggles, and a missing guard
shows in them."""

import math
import random
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC, scoring
from tests.engine.conftest import CHAOS_SEED
from tests.engine.test_tokens import INLINE, MODELS, THREAD, name
from tests.support.in_process_engine import column, generated, reference_model, serve, some_requests

NEAR = 1e-3

SERIAL = SPEC.check(
    {"schedule": "serial", "d2h": "event", "h2d": "pinned", "output": "deferred", "graph": "on"}
)
PAGEABLE = SPEC.check({"schedule": "serial", "d2h": "blocking", "h2d": "pageable"})
FOUR = (SERIAL, INLINE, THREAD, PAGEABLE)


def forced_requests(count: int, seed: int = 3) -> list[api.Request]:
    """Every third one generates; the others bring their tokens."""
    rng = random.Random(seed)
    return [
        each
        if each.id % 3 == 2
        else msgspec.structs.replace(
            each, forced=[rng.randrange(1, 4096) for _ in range(24)], max_new_tokens=24
        )
        for each in some_requests(count)
    ]


@cache
def logprobs(model: str, prompt: tuple[int, ...], forced: tuple[int, ...]) -> torch.Tensor:
    """transformers' log probability of every token at each forced place: [forced, vocabulary]."""
    with torch.inference_mode():
        logits = reference_model(model)(torch.tensor([prompt + forced])).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def errors(model: str, requests: list[api.Request], events: list[api.Event]) -> list[float]:
    """How far each request's worst score is from transformers'; none of a request that brought no tokens."""
    finished = {event.id: event for event in events if isinstance(event, api.Finish)}
    found = []
    for each in requests:
        scores = finished[each.id].scores
        if not each.forced:
            assert scores == []
            continue
        expected = logprobs(model, tuple(each.prompt), tuple(each.forced))
        at = expected.gather(-1, torch.tensor(each.forced)[:, None])[:, 0]
        assert [score.greedy for score in scores] == (
            expected.argmax(-1) == torch.tensor(each.forced)
        ).tolist()
        found.append((at - torch.tensor([score.logprob for score in scores])).abs().max().item())
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", FOUR, ids=name)
def test_scores_equal_transformers(chaotic_device, model, settings):
    requests = forced_requests(9)
    options = {"model": model, "scoring": True, "max_batch_size": 5, "chaos": CHAOS_SEED}
    tokens, events, _ = serve(chaotic_device, settings, requests, **options)
    assert max(errors(model, requests, events)) < NEAR
    expected = generated(model, [each for each in requests if not each.forced])
    assert tokens == expected | {each.id: each.forced for each in requests if each.forced}


@pytest.mark.parametrize("settings", [INLINE, THREAD], ids=name)
def test_scores_are_right_when_blocks_run_out_and_behind_cached_prefixes(chaotic_device, settings):
    requests = forced_requests(10)
    requests = [msgspec.structs.replace(each, prompt=[*range(1, 9), *each.prompt]) for each in requests]
    tight = {"block_size": 4, "num_blocks": 1 + 20, "max_context": 80, "prefill_max_tokens": 72}
    options = {"scoring": True, "prefix_cache": True, "max_batch_size": 6, "chaos": CHAOS_SEED}
    _, events, record = serve(chaotic_device, settings, requests, **tight, **options)
    assert sum(column(record, "preempted")) > 0
    assert record.counters["prefix_cached_tokens"] > 0
    assert max(errors("tiny-gpt2", requests, events)) < NEAR


def test_a_model_that_is_forced_to_say_what_it_says_is_greedy_all_along(device):
    asked = [each for each in some_requests(4) if each.max_new_tokens > 1]
    expected = generated("tiny-gpt2", asked)
    requests = [msgspec.structs.replace(each, forced=expected[each.id]) for each in asked]
    _, events, _ = serve(device, INLINE, requests, scoring=True)
    scores = [score for event in events if isinstance(event, api.Finish) for score in event.scores]
    assert len(scores) == sum(each.max_new_tokens for each in asked)
    assert all(score.greedy for score in scores)


def test_an_engine_that_does_not_score_has_no_program_for_it(device):
    serve(device, INLINE, [api.Request(0, [5], 2)])
    with pytest.raises(Exception, match="scored"):
        device.buffer("prefill_scored")


def test_an_engine_that_is_to_score_and_to_sample_does_not_start(device):
    with pytest.raises(api.BadSetting, match="scoring and sampling exclude each other"):
        serve(device, SERIAL, [], scoring=True, sampling=True)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from([-1, 0, 3, 6]),
            st.lists(st.floats(-40, 40, width=32), min_size=7, max_size=7, unique=True),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_word_holds_an_id_and_a_logprob(rows):
    logits = torch.tensor([row[2] for row in rows])
    targets = [row[1] for row in rows]
    out = torch.zeros(len(rows), dtype=torch.int64)
    chosen = scoring.score(logits, out=out, targets=torch.tensor(targets))
    tokens, scores = scoring.scores([*out.tolist(), 0, 0], targets)  # two padding rows
    assert tokens == chosen.tolist()
    for row, target, token, score in zip(logits.double(), targets, tokens, scores, strict=True):
        assert token == (target if target >= 0 else int(row.argmax()))
        assert score.greedy == (token == int(row.argmax()))
        expected = float(row[token] - row.logsumexp(-1))
        assert math.isclose(score.logprob, expected, rel_tol=1e-5, abs_tol=1e-5)


def test_a_logprob_that_is_no_number_comes_back_as_it_is():
    """NaN logits are a broken model's, and must not turn into some id or some number."""
    out = torch.zeros(1, dtype=torch.int64)
    scoring.score(torch.full((1, 4), float("nan")), out=out, targets=torch.tensor([2]))
    tokens, (score,) = scoring.scores(out.tolist(), [2])
    assert tokens == [2]
    assert np.isnan(score.logprob)
