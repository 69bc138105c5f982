"""A model divided among ranks, each a thread here: what they get together is what the whole model gets."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, distributed, nn

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap.attention import Pages, Prefill
from overlap_bench.engines.overlap.models import open_model
from overlap_bench.engines.overlap.models.contract import Model
from overlap_bench.engines.overlap.models.published import _plan
from overlap_bench.engines.overlap.models.tensor_parallel import AllReduce, Group, shard
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.presets.checkpoints import save
from tests.support.bench_command import PATIENCE_S

CPU = torch.device("cpu")
RANKS = 2
IDS = torch.tensor([[5, 900, 77, 3, 2048, 11]])


class Meeting:
    """In place of torch.distributed's all-reduce: threads that wait for each other."""

    def __init__(self) -> None:
        self.sums = 0
        self._barrier = threading.Barrier(RANKS, timeout=PATIENCE_S)
        self._parts: list[Tensor] = []

    def all_reduce(self, part: Tensor) -> None:
        self._parts.append(part.clone())
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        if self._barrier.wait() == 0:
            self._parts, self.sums = [], self.sums + 1
        self._barrier.wait()
        part.copy_(total)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    made = Meeting()
    monkeypatch.setattr(distributed, "all_reduce", made.all_reduce)
    return made


def on_every_rank(work: Callable[[int], Tensor]) -> list[Tensor]:
    """What each rank gets, all at the same time."""
    found: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        with torch.inference_mode():
            found[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    return [found[rank] for rank in range(RANKS)]


def logits(model: Model) -> Tensor:
    """The logits of a prompt, with a cache for the heads that the model has."""
    shape = model.shape
    keys, values = (
        [torch.zeros(1, 16, shape.kv_heads, shape.width) for _ in range(shape.layers)] for _ in range(2)
    )
    places = torch.arange(IDS.numel())
    return model.logits(model.hidden(IDS, places[None], Prefill(Pages(keys, values, 16), places)))


def made(name: str, rank: int | None = None) -> Model:
    group = None if rank is None else Group(rank, RANKS)
    return open_model(name, torch.float32, CPU, 0, group)


@pytest.mark.parametrize("published", [False, True], ids=["preset", "published"])
@pytest.mark.parametrize("name", ["micro-gpt2", "tiny-llama"])
def test_the_parts_of_a_model_give_what_the_whole_gives_and_the_same_on_every_rank(
    meeting: Meeting, tmp_path: Path, name: str, published: bool
) -> None:
    if published:
        save(PRESETS[name], tmp_path)
    where = str(tmp_path) if published else name
    with torch.inference_mode():
        whole = made(where)
        expected = logits(whole)
    parts = [made(where, rank) for rank in range(RANKS)]
    got = on_every_rank(lambda rank: logits(parts[rank]))
    assert torch.equal(got[0], got[1])
    assert (got[0] - expected).abs().max() < 1e-3
    assert meeting.sums == 2 * whole.shape.layers  # one for attention and one for the MLP
    assert parts[0].shape.kv_heads * RANKS == whole.shape.kv_heads
    kept = sum(each.numel() for each in parts[0].root.parameters())
    assert kept < 0.95 * sum(each.numel() for each in whole.root.parameters())


def test_a_sum_has_its_bias_once_from_the_first_rank() -> None:
    layer = nn.Linear(4, 3)
    biases = []
    for rank in range(RANKS):
        holder = nn.ModuleDict({"down": nn.Linear(4, 3)})
        holder.load_state_dict({"down.weight": layer.weight, "down.bias": layer.bias})
        shard(holder, {"down": "rows"}, Group(rank, RANKS), "a model")
        biases.append(holder["down"][0].bias)
    assert torch.equal(biases[0], layer.bias)
    assert not biases[1].any()


def test_heads_and_widths_that_ranks_can_not_divide_are_refused_in_one_line() -> None:
    with pytest.raises(BadSetting, match="tiny-llama has 2 KV heads, which 4 ranks can't divide: set ranks"):
        open_model("tiny-llama", torch.float32, CPU, 0, Group(0, 4))
    with pytest.raises(BadSetting, match="m's up has 6 columns or rows, which 4 ranks can't divide"):
        shard(nn.ModuleDict({"up": nn.Linear(4, 6)}), {"up": "columns"}, Group(0, 4), "m")
    with pytest.raises(BadSetting, match="m has no down, which 2 ranks were to divide"):
        shard(nn.ModuleDict({"up": nn.Linear(4, 6)}), {"down": "rows"}, Group(0, 2), "m")


@pytest.mark.parametrize("plan", [None, {}, {"layers.*.q_proj": "colwise_gather_output"}])
def test_a_published_model_that_does_not_say_how_it_is_divided_is_refused(plan: object) -> None:
    config = SimpleNamespace(model_type="odd", base_model_tp_plan=plan)
    with pytest.raises(BadSetting, match="x is a odd, which this engine can't divide among ranks"):
        _plan(config, "x")  # type: ignore[arg-type]


def test_a_sum_that_another_rank_does_not_come_to_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "all_reduce", fail)
    with pytest.raises(Exception, match="waited for another rank in vain: RuntimeError: Connection closed"):
        AllReduce()(torch.zeros(1))
