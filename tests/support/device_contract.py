"""What every device promises; run against the emulated one and, where there is a card, against CUDA."""

import threading
from time import perf_counter_ns

import pytest
import torch

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.devices.base import Buffer, Device, ModuleSpec
from tests.support.device_module import ROWS
from tests.support.refusals import refusal

BUILD = "tests.support.device_module:build"


def ints(value: int, count: int = ROWS) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64)


def read(device: Device, source: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """What is in a buffer once every stream is empty."""
    device.drain()
    found = torch.empty(source.nbytes // dtype.itemsize, dtype=dtype)
    device.to_host(found, source, device.stream("read"))
    return found


def value(device: Device, name: str = "a") -> int:
    """The one number all of a buffer holds; a torn copy would show as an assertion here."""
    seen = read(device, device.buffer(name), torch.int64).unique()
    assert len(seen) == 1
    return int(seen)


class DeviceContract:
    """Tests take a `device` fixture: open, tests.support.device_module loaded."""

    def test_commands_of_a_stream_run_in_order(self, device: Device) -> None:
        stream = device.stream("forward")
        device.to_device(device.buffer("a"), ints(1), stream)
        device.launch("add", 2, stream=stream, step=0)
        device.launch("double", stream=stream, step=1)
        device.to_device(device.buffer("a", 0, 8), ints(6, 1), stream)
        assert value(device) == 6

    def test_a_stream_waits_for_an_event_of_another(self, device: Device) -> None:
        forward, copy = device.stream("forward"), device.stream("copy")
        device.to_device(device.buffer("a"), ints(0), forward)
        for step in range(20):
            device.launch("slow", 2, stream=forward, step=step)
            device.launch("add", 1, stream=forward, step=step)
            device.wait(copy, device.record(forward))
            result = device.pinned(ROWS, torch.int64)
            device.to_host(result, device.buffer("a"), copy)
            fetched = device.record(copy)
            device.wait(forward, fetched)  # or the next `add` could come before the copy has read
            device.synchronize(fetched)
            assert result.unique().tolist() == [step + 1]

    def test_an_event_before_any_command_has_happened(self, device: Device) -> None:
        fresh = device.stream("fresh")
        event = device.record(fresh)
        device.synchronize(event)
        device.wait(device.stream("forward"), event)
        device.drain()

    def test_a_pageable_source_may_be_rewritten_at_once(self, device: Device) -> None:
        stream = device.stream("forward")
        source = ints(0)
        for number in range(20):
            device.launch("slow", 2, stream=stream, step=0)
            source.fill_(number)
            device.to_device(device.buffer("a"), source, stream)
            source.fill_(-1)
            device.launch("copy", stream=stream, step=0)
            assert value(device, "b") == number

    def test_a_pageable_copy_larger_than_the_staging_memory_is_whole(self, device: Device) -> None:
        stream = device.stream("forward")
        buffer = device.buffer("big")
        source = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8)
        device.to_device(buffer, source, stream)
        assert torch.equal(read(device, buffer, torch.uint8), source)

    def test_a_pageable_target_is_complete_when_the_copy_returns(self, device: Device) -> None:
        stream = device.stream("forward")
        target = ints(-1)
        for number in range(10):
            device.to_device(device.buffer("a"), ints(number), stream)
            device.launch("slow", 2, stream=stream, step=0)
            device.launch("add", 100, stream=stream, step=0)
            device.to_host(target, device.buffer("a"), stream)
            assert target.unique().tolist() == [number + 100]

    def test_a_pinned_source_is_whole_when_its_event_is_waited_for(self, device: Device) -> None:
        stream = device.stream("forward")
        source = device.pinned(ROWS, torch.int64)
        for number in range(30):
            source.fill_(number)
            device.to_device(device.buffer("a"), source, stream)
            copied = device.record(stream)
            device.launch("copy", stream=stream, step=0)
            device.synchronize(copied)
            source.fill_(-1)
            assert value(device, "b") == number

    def test_pin_keeps_a_dropped_tensor_until_its_copy_is_done(self, device: Device) -> None:
        stream = device.stream("forward")
        pieces = [device.buffer("a", 8 * place, 8) for place in range(20)]
        device.launch("slow", 20, stream=stream, step=0)
        for number, piece in enumerate(pieces):
            device.to_device(piece, device.pin(ints(number, 1)), stream)
        assert read(device, device.buffer("a", 0, 160), torch.int64).tolist() == list(range(20))

    def test_pin_keeps_shape_and_type(self, device: Device) -> None:
        tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
        pinned = device.pin(tensor)
        assert pinned.dtype == torch.int32
        assert torch.equal(pinned, tensor)
        part = device.pin(torch.arange(6).view(2, 3))[1]
        device.to_device(device.buffer("a", 16, 24), part, device.stream("forward"))
        assert read(device, device.buffer("a", 16, 24), torch.int64).tolist() == [3, 4, 5]

    def test_captured_and_eager_give_the_same(self, device: Device) -> None:
        stream = device.stream("forward")
        device.launch("net", stream=stream, step=0)
        device.launch("net", stream=stream, step=1)
        eager = read(device, device.buffer("y"), torch.float32)
        device.to_device(device.buffer("y"), torch.zeros(4, 8), stream)
        device.drain()
        device.capture("net")
        device.to_device(device.buffer("y"), torch.zeros(4, 8), stream)
        device.launch("net", stream=stream, step=2)
        captured = read(device, device.buffer("y"), torch.float32)
        assert eager.abs().sum() > 0
        assert torch.equal(eager, captured)

    def test_arguments_reach_the_program(self, device: Device) -> None:
        stream = device.stream("forward")
        device.to_device(device.buffer("a"), ints(0), stream)
        device.launch("sum5", 1, 2, 3, 4, 5, stream=stream, step=0)
        assert value(device) == 12345

    def test_a_buffer_is_a_range_of_bytes(self, device: Device) -> None:
        stream = device.stream("forward")
        device.to_device(device.buffer("a"), ints(0), stream)
        middle = device.buffer("a", 80, 16)
        assert middle.nbytes == 16
        device.to_device(middle, ints(7, 2), stream)
        device.to_device(middle, ints(8, 1), stream)  # to the start of the range
        assert read(device, device.buffer("a", 72, 32), torch.int64).tolist() == [0, 8, 7, 0]
        with pytest.raises(ValueError, match="24 bytes"):
            device.to_device(middle, ints(0, 3), stream)
        with pytest.raises(ValueError, match="2048"):
            device.buffer("a", 8 * ROWS, 8)
        with pytest.raises(ValueError, match="contiguous"):
            device.to_device(middle, ints(0, 4)[::2], stream)

    def test_threads_may_share_a_stream(self, device: Device) -> None:
        stream = device.stream("forward")
        device.to_device(device.buffer("a"), ints(0), stream)
        device.launch("add", 0, stream=stream, step=0)  # the first launch of an uncaptured program is slow

        def work() -> None:
            device.adopt_thread()
            for _ in range(50):
                device.launch("add", 1, stream=stream, step=0)
                device.synchronize(device.record(stream))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert value(device) == 200

    def test_work_has_a_row_per_program_in_order_on_the_hosts_clock(self, device: Device) -> None:
        stream = device.stream("forward")
        device.capture("add", 5)
        device.begin_round()
        before = perf_counter_ns()
        for step in range(10):
            device.launch("add", 5, stream=stream, step=step)
            device.synchronize(device.record(stream))
        device.drain()
        after = perf_counter_ns()
        work = device.work()
        programs = work[work[:, 0] == 0]
        assert programs[:, 1].tolist() == list(range(10))
        times = programs[:, 2:].ravel().tolist()
        assert times == sorted(times)
        anchor = 50_000  # ns: how well a card's clock is known on the host
        assert before - anchor < times[0]
        assert times[-1] < after + anchor
        device.begin_round()
        assert len(device.work()) == 0

    def test_copies_are_counted_by_direction_and_kind_of_memory(self, device: Device) -> None:
        stream = device.stream("forward")
        target = device.pinned(4, torch.int64)
        device.begin_round()
        device.to_device(device.buffer("a"), ints(1, 3), stream)
        device.to_device(device.buffer("a"), device.pin(ints(1, 2)), stream)
        device.to_device(device.buffer("a"), target[:1], stream)
        device.to_host(target, device.buffer("a"), stream)
        device.to_host(ints(1, 5), device.buffer("a"), stream)
        device.drain()
        copies = ("_copies", "_bytes")
        counted = {name: count for name, count in device.counters.items() if name.endswith(copies)}
        assert counted == {
            "h2d_pageable_copies": 1,
            "h2d_pageable_bytes": 24,
            "h2d_pinned_copies": 2,
            "h2d_pinned_bytes": 24,
            "d2h_pageable_copies": 1,
            "d2h_pageable_bytes": 40,
            "d2h_pinned_copies": 1,
            "d2h_pinned_bytes": 32,
        }
        device.begin_round()
        assert not any(device.counters.values())

    def test_memory_grows_with_what_is_pinned(self, device: Device) -> None:
        before = device.memory()["pinned_peak"]
        device.pinned(1 << 20, torch.uint8)
        # Half of it: a peak may have been reached by blocks that a capture has freed since.
        assert device.memory()["pinned_peak"] >= before + (1 << 19)

    def test_names_that_do_not_exist_offer_the_nearest(self, device: Device) -> None:
        with pytest.raises(BadSetting, match="did you mean big"):
            device.buffer("bigg")
        with pytest.raises(BadSetting, match="did you mean double"):
            device.launch("doubel", stream=device.stream("forward"), step=0)

    def test_errors_in_build_come_back_as_one_line(self, device: Device) -> None:
        facts = {"tag": 0, "leaf_calls": 4}
        try:
            with pytest.raises(EngineError) as raised:
                device.load(ModuleSpec("tests.support.device_module:build_badly", {}))
            assert str(raised.value) == "RuntimeError: no weights to be found"
            assert not isinstance(raised.value, BadSetting)
            wrongly_asked = ModuleSpec("tests.support.device_module:build_wrongly_asked", {})
            assert refusal(lambda: device.load(wrongly_asked)) == "unknown model 'gtp2'"
        finally:
            assert device.load(ModuleSpec(BUILD, {})) == facts

    def test_load_replaces_the_module(self, device: Device) -> None:
        stream = device.stream("forward")
        device.to_device(device.buffer("a"), ints(5), stream)
        device.capture("add", 1)
        assert device.load(ModuleSpec(BUILD, {"tag": 3}))["tag"] == 3
        assert value(device) == 0
        device.launch("add", 1, stream=stream, step=0)
        assert value(device) == 1
