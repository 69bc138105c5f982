"""The emulated device with a pace: its programs compute, and take exactly as long as they are told."""

import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device, ModuleSpec
from overlap_bench.engines.devices.emulated.commands import KERNEL, LAUNCH, RECORD
from overlap_bench.engines.devices.emulated.device import EmulatedDevice
from overlap_bench.engines.overlap import SPEC
from tests.support.device_contract import BUILD, DeviceContract, ints, value
from tests.support.in_process_engine import generated, serve, some_requests

# `add` of 2 rows and `net` have far longer than a core takes for them, `slow` of 1 row less.
PACE = "decode=batch[1:0.2ms 2:200ms 3:0.2ms],prefill=200ms"
BRIEF = "decode=1ms,prefill=2ms"
MS = 1_000_000


def opened(pace: str, chaos: int | None = None) -> Device:
    device = open_device("emulated", cores="shared", pace=pace, chaos=chaos)
    device.load(ModuleSpec(BUILD, {"gates": "/nowhere"}))
    return device


@pytest.fixture(scope="module")
def _paced() -> Iterator[Device]:
    device = opened(PACE)
    yield device
    device.close()


@pytest.fixture
def device(_paced: Device) -> Device:
    _paced.load(ModuleSpec(BUILD, {"gates": "/nowhere"}))
    for program, arguments in (("add", (2,)), ("net", ()), ("slow", (1,))):
        _paced.capture(program, *arguments)
    _paced.begin_round()
    return _paced


@pytest.fixture(scope="module", params=[None, 7], ids=["calm", "chaotic"])
def brief(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = opened(BRIEF, request.param)
    yield device
    device.close()


class TestContract(DeviceContract):
    """What every device promises is promised at a pace."""

    @pytest.fixture
    def device(self, brief: Device) -> Device:
        brief.load(ModuleSpec(BUILD, {"gates": "/nowhere"}))
        return brief


def programs(device: Device) -> np.ndarray:
    """[n, 2]: when each program began and ended, ns; idle times within are apart."""
    device.drain()
    work = device.work()
    return work[work[:, 0] == 0, 2:]


def test_a_program_takes_its_pace_and_no_less(device: Device) -> None:
    stream = device.stream("forward")
    for step in range(3):
        device.launch("add", 2, stream=stream, step=step)
    ran = programs(device)
    assert np.all(ran[:, 1] - ran[:, 0] == 200 * MS)
    assert np.all(ran[1:, 0] == ran[:-1, 1])  # one after another: that the process woke up late adds nothing
    assert device.counters["paced_programs"] == 3
    assert device.counters["paced_overruns"] == 0
    assert device.counters["paced_late_ns"] > 0
    assert value(device) == 6
    assert device.kind == f"emulated, paced: {device.details['pace']}" == f"emulated, paced: {PACE}"


def test_a_program_begins_once_the_copies_before_it_are_there(device: Device) -> None:
    stream = device.stream("forward")
    device.launch("add", 2, stream=stream, step=0)
    device.to_device(device.buffer("b"), ints(9), stream)
    device.launch("add", 2, stream=stream, step=1)
    device.drain()
    work = device.work()
    (copied,) = work[work[:, 0] == 1, 2:]
    first, second = work[work[:, 0] == 0, 2:]
    assert first[1] <= copied[0] < copied[1] <= second[0]
    assert second[1] - second[0] == 200 * MS


def test_what_has_no_pace_holds_up_what_has_one(device: Device) -> None:
    stream = device.stream("forward")
    for step, (program, *arguments) in enumerate((("double",), ("add", 2), ("slow", 1), ("add", 2))):
        device.launch(program, *arguments, stream=stream, step=step)
    ran = programs(device)
    assert np.all(ran[1:, 0] >= ran[:-1, 1])
    assert ran[3, 1] - ran[3, 0] == 200 * MS
    assert device.counters["paced_programs"] == 3


def test_copies_of_other_streams_go_on_while_a_program_waits(device: Device) -> None:
    forward, side = device.stream("forward"), device.stream("side")
    device.launch("add", 2, stream=forward, step=0)
    time.sleep(0.02)  # it has computed, most likely, and waits
    device.to_device(device.buffer("b"), ints(9), side)
    device.synchronize(device.record(side))
    device.drain()
    work = device.work()
    (program,) = work[work[:, 0] == 0, 2:]
    (copied,) = work[work[:, 0] == 1, 2:]
    assert program[0] < copied[0]
    assert copied[1] < program[1]


def test_another_stream_waits_for_the_end_of_its_pace(device: Device) -> None:
    forward, side = device.stream("forward"), device.stream("side")
    device.launch("add", 2, stream=forward, step=0)
    device.wait(side, device.record(forward))
    device.to_device(device.buffer("b"), ints(9), side)
    device.drain()
    work = device.work()
    assert work[work[:, 0] == 1, 2] >= work[work[:, 0] == 0, 3]


def test_a_program_that_computes_for_longer_is_counted(device: Device) -> None:
    device.launch("slow", 1, stream=device.stream("forward"), step=0)  # 1 ms against 0.2
    ran = programs(device)
    assert ran[0, 1] - ran[0, 0] >= MS
    assert device.counters["paced_overruns"] == device.counters["paced_programs"] == 1
    assert device.counters["paced_late_ns"] == 0


def test_waiting_uses_no_core(device: Device) -> None:
    def used() -> int:
        with open(f"/proc/{device.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # hundredths of a second

    before = used()
    for step in range(5):
        device.launch("add", 2, stream=device.stream("forward"), step=step)
    device.drain()
    assert used() - before < 50  # of 100, where it looks at the clock all the time
    before = used()
    time.sleep(1)  # with nothing to do; the timer has rung
    assert used() - before < 50


def test_each_kernel_of_an_eager_program_has_its_share(device: Device) -> None:
    """Four leaf modules share 200 ms, 50 each: when the last command comes late, three shares are over."""
    emulated, stream = cast(EmulatedDevice, device), cast(EmulatedDevice, device).stream("forward")
    identity = emulated._programs["net"]
    stream.submit(RECORD.pack(LAUNCH, identity, 7, 4, 0, 0, 0, 0), kernels=3)
    time.sleep(0.4)
    assert not emulated._waiting.happened(emulated.record(stream))
    stream.submit(RECORD.pack(KERNEL, 0, 0, 0, 0, 0, 0, 0), kernels=0)
    ran = programs(device)
    took = (ran[:, 1] - ran[:, 0]) / MS
    assert took.sum() >= 199.9
    assert took[-1] >= 49.9  # the last kernel's own share, after its command
    assert len(ran) >= 2
    assert device.counters["paced_programs"] == 1


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_tokens_are_those_of_generate(brief: Device, schedule: str, graph: str) -> None:
    requests = some_requests(8)
    toggles = SPEC.check({"schedule": schedule, "graph": graph})
    tokens, _, record = serve(brief, toggles, requests, model="micro-gpt2", max_context=64)
    assert tokens == generated("micro-gpt2", requests)
    assert record.counters["paced_programs"] > 0
