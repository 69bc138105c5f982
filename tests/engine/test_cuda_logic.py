"""engines/devices/cuda.py on a stand-in for torch.cuda: its own logic, without a card."""

from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np
import pytest

from overlap_bench.engines.devices import cuda
from overlap_bench.engines.devices.base import ModuleSpec
from overlap_bench.engines.devices.cuda import CudaDevice
from tests.engine.test_tokens import COVER, INLINE, MODELS, name, some_sampled_requests
from tests.support.cuda_stand_in import Event, stand_in
from tests.support.device_contract import BUILD, DeviceContract
from tests.support.in_process_engine import near_ties, sampled, serve, some_requests

US = 1000


def opened(**options: int) -> Iterator[CudaDevice]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        device = CudaDevice(**options)
        yield device
        device.close()


@pytest.fixture(scope="module")
def card() -> Iterator[CudaDevice]:
    yield from opened()


@pytest.fixture(scope="module")
def chaotic_card() -> Iterator[CudaDevice]:
    yield from opened(chaos=7)


@pytest.fixture
def device(card: CudaDevice) -> CudaDevice:
    card.load(ModuleSpec(BUILD, {}))
    return card


class TestContract(DeviceContract):
    pass


class TestContractUnderChaos(DeviceContract):
    @pytest.fixture
    def device(self, chaotic_card: CudaDevice) -> CudaDevice:
        chaotic_card.load(ModuleSpec(BUILD, {}))
        return chaotic_card


@pytest.mark.parametrize(
    ("settings", "model"),
    [(each, MODELS[place % 2]) for place, each in enumerate(COVER)],
    ids=lambda value: name(value) if isinstance(value, dict) else value,
)
def test_tokens_equal_generate(card: CudaDevice, settings: dict[str, str], model: str) -> None:
    """A captured decode replays on the tensors that it was captured with, and asks the host nothing."""
    few = {"max_batch_size": 3, "max_context": 32}  # each shape is captured twice
    requests = [
        each for each in some_requests(20) if len(each.prompt) + each.max_new_tokens <= few["max_context"]
    ]
    tokens, _, record = serve(card, settings, requests, model=model, **few)
    assert near_ties(model, requests, tokens) == 0
    captured = record.counters["captured_launches"] > 0
    assert captured == (settings["graph"] == "on")


def test_sampled_tokens_depend_on_seed_and_position_alone(card: CudaDevice) -> None:
    requests = some_sampled_requests()
    options = {"sampling": True, "max_batch_size": 4, "max_context": 64}
    tokens, _, _ = serve(card, INLINE, requests, **options)
    assert tokens == sampled("tiny-gpt2", requests)


# -- times of programs --------------------------------------------------------------------------------------


def launched(device: CudaDevice, program: str, count: int) -> tuple[np.ndarray, int, int]:
    """The rows of so many launches in a round, and when on the host it began and ended."""
    stream = device.stream("forward")
    device.begin_round()
    began = perf_counter_ns()
    for step in range(count):
        device.launch(program, stream=stream, step=step)
    ended = perf_counter_ns()
    return device.work(), began, ended


@pytest.mark.parametrize("program", ["net", "double"])  # eager, captured
@pytest.mark.parametrize("anchor_age_ns", [cuda._ANCHOR_AGE_NS, 0])  # 0: each launch moves the anchor
def test_each_launch_has_its_own_times(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, program: str, anchor_age_ns: int
) -> None:
    monkeypatch.setattr(cuda, "_ANCHOR_AGE_NS", anchor_age_ns)
    device.capture("double")
    work, began, ended = launched(device, program, 600)
    assert device.counters["work_rows_lost"] == 0
    assert work[:, 0].tolist() == [cuda.PROGRAM] * 600
    assert work[:, 1].tolist() == list(range(600))
    assert (work[:, 2] <= work[:, 3]).all()
    assert (work[1:, 2] >= work[:-1, 3] - 2 * US).all(), "they overlap"
    assert began - 20 * US < work[0, 2]
    assert work[-1, 3] < ended + 20 * US


def test_a_device_clock_that_runs_fast_is_brought_back_to_the_hosts(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happen(event: Event) -> None:
        event.ns = perf_counter_ns() * 11 // 10

    monkeypatch.setattr(Event, "happen", happen)
    device.capture("double")
    work, began, ended = launched(device, "double", 2000)
    assert began - 20 * US < work[0, 2]
    assert work[-1, 3] < ended + 20 * US, "a tenth of the round too late"


def test_times_that_can_not_be_read_yet_are_counted_and_not_waited_for(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture is launched a third time when its first launch is read: one that still runs is given up."""
    device.capture("double")
    stream = device.stream("forward")
    device.begin_round()
    with monkeypatch.context() as running:
        running.setattr(Event, "query", lambda _: False)
        for step in range(6):
            device.launch("double", stream=stream, step=step)
        assert device.counters["work_rows_lost"] == 4
        for step in range(6, 6 + cuda._EAGER_PAIRS + 5):  # all pairs are in use, and the others go without
            device.launch("net", stream=stream, step=step)
        assert device.counters["work_rows_lost"] == 4 + 5
    assert device.work()[:, 1].tolist() == list(range(4, 6 + cuda._EAGER_PAIRS))
