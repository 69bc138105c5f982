"""The emulated device: a real second process, a tiny module (tests/support/device_module.py)."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device, DeviceLost, ModuleSpec
from overlap_bench.engines.devices.emulated import streams
from overlap_bench.engines.devices.emulated.commands import (
    COMPLETED,
    KERNEL,
    LAUNCH,
    MAX_WAITERS,
    PAGE_BYTES,
    RECORD,
    WAITERS,
    WORK_HEAD,
    WORK_ROWS,
)
from overlap_bench.engines.devices.emulated.device import EmulatedDevice
from overlap_bench.engines.devices.emulated.memory import SLOTS
from overlap_bench.engines.devices.emulated.streams import EmulatedEvent, Waiting
from tests.support.bench_command import PATIENCE_S, wait_until
from tests.support.device_contract import BUILD, DeviceContract, ints, read, value
from tests.support.processes import ends


class Gates:
    """Lets a test hold a stream at a place of its choice: launch("hold", gate), later open(gate)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last = 0

    def new(self) -> int:
        self._last += 1
        return self._last

    def open(self, gate: int) -> None:
        (self.folder / str(gate)).touch()


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


def opened(gates: Gates, **options: Any) -> Device:
    device = open_device("emulated", cores="shared", **options)
    load(device, gates)
    return device


def load(device: Device, gates: Gates) -> None:
    device.load(ModuleSpec(BUILD, {"gates": str(gates.folder)}))
    for program, arguments in (("hold", 0), ("add", 0)):
        (gates.folder / "0").touch()
        device.launch(program, arguments, stream=device.stream("forward"), step=0)  # counts its leaves


@pytest.fixture
def device(device: Device, gates: Gates) -> Device:
    load(device, gates)
    return device


@pytest.fixture
def chaotic_device(chaotic_device: Device, gates: Gates) -> Device:
    load(chaotic_device, gates)
    return chaotic_device


def somebody_waits(device: Device) -> bool:
    """A thread of this process sleeps until the device has done something."""
    seats = cast(EmulatedDevice, device)._cells[WAITERS : WAITERS + MAX_WAITERS]
    return any(seats)


def happened(device: Device, event: object) -> bool:
    return cast(EmulatedDevice, device)._waiting.happened(cast(EmulatedEvent, event))


def hold(device: Device, gate: int, stream: str = "forward") -> None:
    """Queue a program that runs until the gate is opened. Uncaptured, one command, as it calls no leaf."""
    device.launch("hold", gate, stream=device.stream(stream), step=99)


@pytest.fixture
def mortal(gates: Gates) -> Iterator[Device]:
    """A device of the test's own, to do away with."""
    device = opened(gates)
    yield device
    device.close()


class TestContract(DeviceContract):
    pass


class TestContractUnderChaos(DeviceContract):
    @pytest.fixture
    def device(self, chaotic_device: Device) -> Device:
        return chaotic_device


# -- memory -----------------------------------------------------------------------------------------------


def test_pinned_memory_is_read_late(device: Device, gates: Gates) -> None:
    stream, gate = device.stream("forward"), gates.new()
    source = device.pinned(256, torch.int64)
    source.fill_(1)
    hold(device, gate)
    device.to_device(device.buffer("a"), source, stream)
    source.fill_(2)
    gates.open(gate)
    assert value(device) == 2


def test_a_full_bounce_ring_blocks_the_caller(device: Device, gates: Gates) -> None:
    stream, gate = device.stream("forward"), gates.new()
    hold(device, gate)
    for number in range(SLOTS):
        device.to_device(device.buffer("a"), ints(number), stream)
    ninth = threading.Thread(target=device.to_device, args=(device.buffer("a"), ints(SLOTS), stream))
    ninth.start()
    wait_until(lambda: somebody_waits(device))
    gates.open(gate)
    ninth.join(PATIENCE_S)
    assert value(device) == SLOTS
    assert device.counters["staging_wait_ns"] > 0


def test_sync_staging_waits_for_the_stream_first(gates: Gates) -> None:
    device = opened(gates, staging="sync")
    try:
        stream, gate = device.stream("forward"), gates.new()
        hold(device, gate)
        first = threading.Thread(target=device.to_device, args=(device.buffer("a"), ints(4), stream))
        first.start()
        wait_until(lambda: somebody_waits(device))
        gates.open(gate)
        first.join(PATIENCE_S)
        assert value(device) == 4
    finally:
        device.close()


def test_pin_reuses_a_block_once_its_copy_is_done(device: Device, gates: Gates) -> None:
    stream, gate = device.stream("forward"), gates.new()
    device.drain()
    hold(device, gate)
    tensor = device.pin(ints(1, 200))
    address = tensor.data_ptr()
    device.to_device(device.buffer("a"), tensor, stream)
    del tensor
    assert device.pin(ints(2, 200)).data_ptr() != address
    gates.open(gate)
    device.drain()
    kept = [device.pin(ints(3, 200)) for _ in range(2)]
    assert address in {each.data_ptr() for each in kept}


def test_a_view_keeps_a_pinned_block(device: Device) -> None:
    view = device.pin(ints(1, 200))[100:]
    others = [device.pin(ints(2, 200)) for _ in range(4)]
    assert view.unique().tolist() == [1]
    del others


# -- queues -----------------------------------------------------------------------------------------------


def test_a_blocked_stream_blocks_no_other(device: Device, gates: Gates) -> None:
    forward, copy, side = (device.stream(name) for name in ("forward", "copy", "side"))
    gate = gates.new()
    device.launch("add", 0, stream=forward, step=0)
    device.wait(copy, device.record(forward))
    hold(device, gate)
    blocked = device.record(forward)
    device.wait(copy, blocked)
    device.to_device(device.buffer("b"), ints(3), copy)
    late = device.record(copy)
    gates.open(gate)
    device.to_device(device.buffer("a"), ints(5), side)
    device.synchronize(device.record(side))
    device.synchronize(late)
    assert happened(device, blocked)
    assert (value(device, "a"), value(device, "b")) == (5, 3)


def test_the_launch_queue_is_bounded(device: Device, gates: Gates) -> None:
    stream, gate = device.stream("forward"), gates.new()
    device.capture("add", 1)
    hold(device, gate)
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        for _ in range(2000):
            device.launch("add", 1, stream=stream, step=0)
            submitted += 1

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: submitted >= 1024)
    time.sleep(0.1)  # in which it could submit thousands
    assert submitted <= 1024 + 64
    gates.open(gate)
    thread.join(PATIENCE_S)
    assert value(device) == 2000


def test_an_uncaptured_launch_is_a_command_per_leaf_module(device: Device) -> None:
    stream = device.stream("forward")
    device.launch("net", stream=stream, step=0)  # counts them
    device.begin_round()
    device.launch("net", stream=stream, step=1)
    device.drain()
    assert device.counters["kernel_commands"] == 4
    assert device.counters["eager_launches"] == 1
    device.capture("net")
    device.begin_round()
    device.launch("net", stream=stream, step=2)
    device.drain()
    assert device.counters["kernel_commands"] == 0
    assert device.counters["captured_launches"] == 1


def test_an_uncaptured_program_waits_for_its_commands_idle(device: Device) -> None:
    emulated = cast(EmulatedDevice, device)
    stream, side = emulated.stream("forward"), emulated.stream("side")
    kernel = RECORD.pack(KERNEL, 0, 0, 0, 0, 0, 0, 0)
    device.launch("net", stream=stream, step=0)
    expected = read(device, device.buffer("y"), torch.float32)
    device.to_device(device.buffer("y"), torch.zeros(4, 8), stream)
    device.drain()
    device.begin_round()
    stream.submit(RECORD.pack(LAUNCH, emulated._programs["net"], 7, 4, 0, 0, 0, 0), kernels=2)
    # The first copy may be done before the program begins; the second is while it waits.
    for _ in range(2):
        device.to_device(device.buffer("b"), ints(9), side)
        device.synchronize(device.record(side))
    assert not happened(device, device.record(stream))
    issued = perf_counter_ns()
    stream.submit(kernel, kernels=1)
    device.synchronize(device.record(stream))
    assert torch.equal(read(device, device.buffer("y"), torch.float32), expected)
    work = device.work()
    rows = work[(work[:, 0] == 0) & (work[:, 1] == 7)]
    assert len(rows) >= 2
    assert np.all(np.diff(rows[:, 2:].ravel()) >= 0)
    assert rows[-1, 2] >= issued
    assert rows[0, 3] < issued  # it may have waited once more, between the last two commands


def test_a_copy_that_comes_while_a_program_runs_is_done_while_it_waits_for_its_commands(
    device: Device, gates: Gates
) -> None:
    """The look into the pipes that finds no command of the program may bring the copy. A host that waits for
    that copy before it issues the rest would wait for ever."""
    emulated, gate = cast(EmulatedDevice, device), gates.new()
    stream, side = emulated.stream("forward"), emulated.stream("side")
    program = emulated._programs["held_net"]
    stream.submit(RECORD.pack(LAUNCH | 1 << 8, program, 7, 4, gate, 0, 0, 0))
    time.sleep(0.1)  # it runs, up to the gate
    device.to_device(device.buffer("b"), ints(9), side)
    copied = device.record(side)
    gates.open(gate)
    try:
        wait_until(lambda: happened(device, copied), lambda: "the copy waits for the program")
    finally:
        for _ in range(4):
            stream.submit(RECORD.pack(KERNEL, 0, 0, 0, 0, 0, 0, 0), kernels=0)
        device.drain()


def test_threads_that_end_give_their_place_among_the_waiters_back(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_ON_ITS_WAY_MS", 1000 * PATIENCE_S)  # a device may lose its core
    stream = device.stream("forward")

    def wait() -> None:
        device.launch("slow", 1, stream=stream, step=0)
        device.synchronize(device.record(stream))

    for _ in range(40):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    device.drain()
    device.work()
    assert device.counters["lost_wakeups"] == 0


def test_a_wake_up_that_is_on_its_way_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device counts first and wakes then: a waiter that looks in between finds it happened."""
    page = mmap(-1, PAGE_BYTES)
    fd = os.eventfd(0)
    waiting = Waiting(page, os.pidfd_open(os.getpid()), [fd], lambda: DeviceLost("gone"))
    wakes = iter([True, False])

    def poll(milliseconds: int) -> list[tuple[int, int]]:
        if milliseconds == streams._BACKSTOP_MS:
            memoryview(page).cast("q")[COMPLETED] += 1
            return []
        if not next(wakes):
            return []
        os.eventfd_write(fd, 1)
        return [(fd, select.POLLIN)]

    monkeypatch.setattr(waiting._seat(), "poll", SimpleNamespace(poll=poll))
    for number, lost in ((1, 0), (2, 1)):
        waiting.until(EmulatedEvent(0, number))
        assert waiting.lost_wakeups == lost


def test_device_work_that_is_lost_is_counted(device: Device) -> None:
    emulated = cast(EmulatedDevice, device)
    device.drain()
    device.begin_round()
    head = emulated._cells[WORK_HEAD]
    emulated._cells[WORK_HEAD] = head + WORK_ROWS + 5
    try:
        assert len(device.work()) == WORK_ROWS
        assert device.counters["work_rows_lost"] == 5
    finally:
        emulated._cells[WORK_HEAD] = head


# -- life -------------------------------------------------------------------------------------------------


def test_a_killed_device_is_lost_to_all_who_wait_and_to_all_later_calls(mortal: Device, gates: Gates) -> None:
    stream = mortal.stream("forward")
    hold(mortal, gates.new())
    last = mortal.record(stream)
    raised: dict[str, DeviceLost] = {}

    def waiter() -> None:
        try:
            mortal.synchronize(last)
        except DeviceLost as lost:
            raised["event"] = lost

    def writer() -> None:
        try:
            while True:
                mortal.launch("add", 0, stream=stream, step=0)
        except DeviceLost as lost:
            raised["queue"] = lost

    threads = [threading.Thread(target=each) for each in (waiter, writer)]
    for thread in threads:
        thread.start()
    wait_until(lambda: mortal.counters["eager_launches"] > 1000)
    os.kill(mortal.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    message = f"the emulated device's process (pid {mortal.pid}) died (signal 9)"
    assert {where: str(lost) for where, lost in raised.items()} == {"event": message, "queue": message}
    for call in (
        lambda: mortal.to_device(mortal.buffer("a"), ints(0), stream),
        lambda: mortal.to_host(ints(0), mortal.buffer("a"), stream),
        lambda: mortal.drain(),
        lambda: mortal.load(ModuleSpec(BUILD, {})),
        lambda: mortal.memory(),
    ):
        with pytest.raises(DeviceLost, match="signal 9"):
            call()


def test_a_program_that_raises_loses_the_device_and_says_why(mortal: Device) -> None:
    with pytest.raises(DeviceLost) as raised:
        mortal.launch("fail", stream=mortal.stream("forward"), step=0)
    expected = (
        f"the emulated device's process (pid {mortal.pid}) died (exit 1): ValueError: the program is broken"
    )
    assert str(raised.value) == expected
    assert "device_module.py" in raised.value.__notes__[0]


def test_close_leaves_no_process_and_may_be_repeated(mortal: Device, gates: Gates) -> None:
    os.kill(mortal.pid, signal.SIGINT)  # a Ctrl-C is the host's to answer
    mortal.launch("add", 0, stream=mortal.stream("forward"), step=0)
    mortal.drain()
    mortal.close()
    assert ends(mortal.pid)
    mortal.close()
    with pytest.raises(DeviceLost, match="closed"):
        mortal.launch("add", 0, stream=mortal.stream("forward"), step=0)


def test_a_killed_host_leaves_no_process() -> None:
    script = (
        "import sys, time\n"
        "from overlap_bench.engines.devices import open_device\n"
        "print(open_device('emulated').pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with host.stdout as said:
        pid = int(said.readline())
    assert Path(f"/proc/{pid}").exists()
    host.kill()
    host.wait()
    assert ends(pid)


def test_a_core_of_its_own_is_taken_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    done = threading.Event()
    earlier = threading.Thread(target=done.wait)  # a thread that was there before the device, as ZeroMQ's is
    earlier.start()
    device = open_device("emulated")
    try:
        assert os.sched_getaffinity(device.pid) == before  # while it boots: two that boot at once share cores
        device.load(ModuleSpec(BUILD, {}))
        assert os.sched_getaffinity(device.pid) == {max(before)}
        assert os.sched_getaffinity(0) == before - {max(before)}
        assert os.sched_getaffinity(earlier.native_id or 0) == before - {max(before)}
    finally:
        device.close()
        done.set()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("card", "kind", "options", "reason"),
    [
        (False, "emulatd", {}, "did you mean emulated"),
        (False, "emulated", {"staging": "copi"}, "did you mean copy"),
        (False, "emulated", {"blocking_sync": True}, "blocking_sync is for CUDA only"),
        (False, "cuda", {}, "no CUDA device"),
        (True, "auto", {"staging": "sync"}, "staging is for the emulated device only"),
        (True, "auto", {"pace": "10ms"}, "pace is for the emulated device only"),
    ],
)
def test_what_is_not_there_or_would_not_be_heeded_is_refused(
    monkeypatch: pytest.MonkeyPatch, card: bool, kind: str, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    with pytest.raises(BadSetting, match=reason):
        open_device(kind, **options)
