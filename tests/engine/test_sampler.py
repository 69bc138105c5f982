"""Sampling: the numbers, the filters against transformers' own, the frequencies against the distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from overlap_bench.engines.overlap.sampler import sample, uniforms

VOCABULARY = 50


def split_mix(seed: int, position: int) -> int:
    """The same numbers with Python's integers."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    return mix(mix(seed & mask) + position * gamma & mask)


def test_the_numbers_are_split_mix():
    assert split_mix(0, 1) == 0xE220A8397B1DCDAF, "as its authors' program prints first"


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(1, 1 << 20))
def test_the_device_computes_the_same_numbers(seed, position):
    got = uniforms(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32)).item()
    assert got == (split_mix(seed, position) >> 12) / 2**52
    assert 0 <= got < 1


def draw(logits: torch.Tensor, count: int, temperature=1.0, top_k=0, top_p=1.0, seed=3) -> torch.Tensor:
    """`count` tokens from one row of logits, as at as many positions of one request."""
    rows = logits.expand(count, -1)
    out = torch.zeros(count, dtype=torch.int64)
    sample(
        rows,
        out,
        temperatures=torch.full((count,), temperature),
        seeds=torch.full((count,), seed),
        positions=torch.arange(1, count + 1, dtype=torch.int32),
        top_ks=torch.full((count,), top_k, dtype=torch.int32),
        top_ps=torch.full((count,), top_p),
    )
    return out


def some_logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution that transformers would sample from."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)[0]


@settings(max_examples=60, derandomize=True)  # rounding may move a border
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.3, 3.0),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.floats(0.05, 1.0),
)
def test_tokens_are_as_frequent_as_in_the_distribution_that_transformers_filters(
    seed, temperature, top_k, top_p
):
    """By uniform numbers that step through the distribution."""
    from overlap_bench.engines.overlap import sampler

    logits, steps = some_logits(seed), 4000
    shares = filtered(logits, temperature, top_k, top_p)
    evenly = torch.arange(steps, dtype=torch.float64) / steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "uniforms", lambda seeds, positions: evenly)
        found = draw(logits, steps, temperature, top_k, top_p).bincount(minlength=VOCABULARY)
    assert found[shares == 0].sum() == 0
    assert (found / steps - shares).abs().max() < 2 / steps


def test_a_tokens_draw_does_not_depend_on_the_rows_beside_it():
    logits = torch.cat([some_logits(seed) for seed in range(6)])
    arguments = {
        "temperatures": torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0, 1.0]),
        "seeds": torch.arange(6),
        "positions": torch.tensor([5, 9, 2, 7, 7, 1], dtype=torch.int32),
        "top_ks": torch.tensor([0, 0, 5, 0, 9, 1], dtype=torch.int32),
        "top_ps": torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9, 1.0]),
    }
    together = torch.zeros(6, dtype=torch.int64)
    sample(logits, together, **arguments)
    for row in range(6):
        alone = torch.zeros(1, dtype=torch.int64)
        told = {name: each[row : row + 1] for name, each in arguments.items()}
        sample(logits[row : row + 1], alone, **told)
        assert alone == together[row]
    assert together[0] == logits[0].argmax(), "temperature 0 is greedy"
    assert together[5] == logits[5].argmax(), "the most likely of one is it"


def test_a_filter_that_lets_all_through_changes_nothing():
    logits = some_logits(seed=4).expand(500, -1)
    without, with_filter = torch.zeros(2, 500, dtype=torch.int64)
    told = {
        "temperatures": torch.ones(500),
        "seeds": torch.arange(500),
        "positions": torch.ones(500, dtype=torch.int32),
    }
    sample(logits, without, **told)
    everything = {"top_ks": torch.zeros(500, dtype=torch.int32), "top_ps": torch.ones(500)}
    sample(logits, with_filter, **told, **everything)
    assert torch.equal(without, with_filter)


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"top_p": 1e-50}])
def test_what_is_too_small_for_float32_leaves_the_most_likely(options):
    logits = some_logits(seed=5)
    assert set(draw(logits, 50, **options).tolist()) == {int(logits.argmax())}
