"""The same promises as the emulated device's, on a card."""

from collections.abc import Iterator

import pytest
import torch

from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device, ModuleSpec
from tests.support.device_contract import BUILD, DeviceContract, ints, read

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def card() -> Iterator[Device]:
    device = open_device("cuda")
    yield device
    device.close()


@pytest.fixture(scope="module")
def chaotic_card() -> Iterator[Device]:
    device = open_device("cuda", chaos=7)
    yield device
    device.close()


@pytest.fixture
def device(card: Device) -> Device:
    card.load(ModuleSpec(BUILD, {}))
    return card


class TestContract(DeviceContract):
    pass


class TestContractUnderChaos(DeviceContract):
    @pytest.fixture
    def device(self, chaotic_card: Device) -> Device:
        chaotic_card.load(ModuleSpec(BUILD, {}))
        return chaotic_card


def test_pinned_memory_is_read_late(device: Device) -> None:
    stream = device.stream("forward")
    source = device.pinned(256, torch.int64)
    source.fill_(1)
    device.launch("slow", 200, stream=stream, step=0)
    device.to_device(device.buffer("a"), source, stream)
    source.fill_(2)
    assert read(device, device.buffer("a"), torch.int64).unique().tolist() == [2]


def test_times_of_a_captured_program_are_its_own_in_back_to_back_launches(device: Device) -> None:
    """The times are read when the same capture is due again: two launches later, not one, nor stale."""
    stream = device.stream("forward")
    device.capture("slow", 5)
    device.begin_round()
    before = None
    for step in range(50):
        device.launch("slow", 5, stream=stream, step=step)
        recorded = device.record(stream)
        if before is not None:
            device.synchronize(before)
        before = recorded
    device.drain()
    work = device.work()
    assert device.counters["work_rows_lost"] == 0
    assert work[:, 1].tolist() == list(range(50))
    assert (work[1:, 2] >= work[:-1, 3] - 2000).all()  # ns: the resolution of the events


def test_threads_keep_to_the_stream_they_use(device: Device) -> None:
    forward, copy = device.stream("forward"), device.stream("copy")
    source = device.pin(ints(4))  # a block pinned for the first time may wait for the device
    back = device.pinned(len(source), torch.int64)
    device.launch("slow", 300, stream=forward, step=0)
    busy = device.record(forward)
    device.to_device(device.buffer("b", 0, source.nbytes), source, copy)
    device.to_host(back, device.buffer("b", 0, source.nbytes), copy)
    device.synchronize(device.record(copy))
    assert back.tolist() == source.tolist(), "the copies went to the stream that was recorded"
    assert not busy.query()  # type: ignore[attr-defined]
    device.drain()
