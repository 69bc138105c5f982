"""What of a paced vLLM needs no vLLM: its tokens, and what its device counts."""

from time import perf_counter_ns
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import clock
from overlap_bench.engines.api import PHASES
from overlap_bench.engines.pace import Size, make_pace
from overlap_bench.engines.paced import device as paced
from overlap_bench.engines.paced.device import (
    LOOKS,
    Device,
    Event,
    Graph,
    Kernel,
    Stream,
    mean_context,
    sizes_of,
)
from overlap_bench.engines.paced.tokens import EOS_ONE_IN, RIGHT, draw, kept, rates_of, seed_of, words_of

WORDS = np.arange(10, 400, dtype=np.int64)
PROMPTS = st.lists(st.integers(0, 1 << 17), min_size=1, max_size=40)


@given(PROMPTS, PROMPTS, st.integers(1, 1 << 20))
def test_a_token_follows_from_prompt_and_index_alone(prompt: list[int], other: list[int], index: int) -> None:
    seeds = np.array([seed_of(each, None) for each in (prompt, other, prompt)], np.uint64)
    together = draw(seeds, np.array([index, index + 3, index]), WORDS, None)
    alone = draw(seeds[:1], np.array([index]), WORDS, None)
    assert together[0] == together[2] == alone[0]
    assert together[0] in WORDS


def test_tokens_differ_by_prompt_by_index_and_by_the_seed_of_sampling() -> None:
    index = np.arange(200)
    rows = [
        draw(np.full(200, seed_of(prompt, seed), np.uint64), index, WORDS, None)
        for prompt, seed in (([1, 2], None), ([1, 3], None), ([1, 2], 5), ([1, 2], 6))
    ]
    for first, one in enumerate(rows):
        assert len(set(one.tolist())) > 100
        for other in rows[first + 1 :]:
            assert (one == other).mean() < 0.05


def test_a_text_ends_now_and_then() -> None:
    ids = draw(np.full(100_000, 7, np.uint64), np.arange(100_000), WORDS, 3)
    assert 0.5 < (ids == 3).mean() * EOS_ONE_IN < 2


def test_which_drafts_are_right_follows_from_prompt_and_index_alone() -> None:
    seeds = np.array([[seed_of(each, None)] for each in ([1, 2], [1, 3], [1, 2])], np.uint64)
    positions = np.arange(400)[:, None] + np.arange(3)
    rates = np.full(3, RIGHT)
    rows = [kept(np.broadcast_to(seed, (400, 1)), positions, rates) for seed in seeds]
    assert rows[0].tolist() == rows[2].tolist() != rows[1].tolist()
    assert set(rows[0].tolist()) == {0, 1, 2, 3}
    # A draft that is right is so in any step that it is in.
    right = rows[0] > 0
    for at, count in enumerate(rows[0][:-3]):
        assert all(right[at : at + count])
        assert count == 3 or not right[at + count]


@pytest.mark.parametrize("stated", [[0.5, 0.25, 0.125], [1.0, 0.5, 0.0], [0.9], [0.0, 0.0]])
def test_as_many_drafts_are_right_as_somebody_states(stated: list[float]) -> None:
    seeds = np.arange(20_000, dtype=np.uint64)[:, None]
    found = kept(seeds, np.full((20_000, 1), 77) + np.arange(len(stated)), rates_of(stated))
    for upto, share in enumerate(stated, 1):
        assert (found >= upto).mean() == pytest.approx(share, abs=0.015)


def test_words_are_whole_characters() -> None:
    assert words_of([" the", "\ufffd", "", "\n", "é", " "]).tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]


def make_device(pace: str) -> Device:
    device = Device(make_pace(pace))
    Event.owner = Stream.owner = Graph.owner = Kernel.owner = device
    device.serving = True
    return device


def begin(device: Device, kind: str = "decode") -> None:
    """A step of one row, about to be prepared."""
    device.begin(kind)
    device.program.sizes = [Size(kind, 1, 1, 1)]


def test_a_replay_is_queued_behind_what_runs_and_an_event_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device("decode=3ms+1us*batch,prefill=1us*tokens")
    ends = []
    # Time stands still while the steps are launched: a busy machine may take the core away for longer than
    # a step lasts, and the next one would rightly begin late.
    now = perf_counter_ns()
    for module in (clock, paced):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now)
    for _ in range(3):
        device.begin("decode")
        device.program.sizes = [Size("decode", 8, 8, 100)]
        Graph().replay()
        event = Event()
        event.record()
        assert not event.query()
        ends.append(event)
    monkeypatch.undo()
    first, second, third = device.programs
    assert second.begin_ns == first.end_ns
    assert third.end_ns - third.begin_ns == 3_008_000
    for event, program in zip(ends, (first, second, third), strict=True):
        event.synchronize()
        assert event.query()
        assert program.wait_ns <= program.woke_ns
        assert program.woke_ns >= program.end_ns


def test_what_a_step_asks_for_is_counted_by_its_kind() -> None:
    device = make_device("1us")
    for kind in ("prefill", "decode", "decode"):
        begin(device, kind)
        for _ in range(4):
            Kernel(None, None)()
        Graph().replay()
    counts = device.counts["decode"]
    assert (counts.steps, counts.launches, counts.replays) == (2, 8, 2)
    assert device.counts["prefill"].of_a_step()["launches"] == 4


@pytest.mark.parametrize(("kernels", "launches", "replays"), [(0, 6, 4), (30, 36, 0)])
def test_a_step_without_a_graph_of_its_own_runs_in_pieces(
    kernels: int, launches: int, replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device("decode=1us,prefill=10us,launch=3us,replay=10us")
    spent: list[int] = []
    monkeypatch.setattr(device.clock, "spend", spent.append, raising=False)
    begin(device, "prefill")
    device.run_pieces(4, kernels, between=2)
    counts = device.counts["prefill"]
    assert (counts.launches, counts.replays) == (launches, replays)
    assert sum(spent) == pytest.approx(3_000 * launches + 10_000 * replays, abs=4)
    assert device.clock.free == device.program.end_ns
    assert device.program.begin_ns <= device.program.end_ns - 10_000
    assert device.asked()["prefill_launches"] == launches
    assert device.asked()["decode_launches"] == 0


def test_a_host_that_launches_slowly_leaves_the_device_idle_between_two_pieces() -> None:
    device = make_device("decode=1us,prefill=10us,replay=50us")
    begin(device, "prefill")
    device.run_pieces(4, 0, between=2)
    assert device.program.end_ns - device.program.begin_ns >= 3 * 50_000


def test_torchs_operations_are_counted_and_its_views_are_not() -> None:
    device = make_device("1us")
    device.begin("decode")
    with device.counting():
        one = torch.zeros(4)
        two = one + 1
        two.view(2, 2)
        two[:2].copy_(one[:2])
    counts = device.counts["decode"]
    assert counts.copies == 1
    assert counts.operations == 3 - 1  # zeros fills, and the sum; the copy is apart


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_copies_to_the_card_and_back_are_counted_in_any_mode_of_torch(mode: str) -> None:
    device = make_device("1us")
    tensor = torch.zeros(1, dtype=torch.int32)
    device.begin("decode")
    with getattr(torch, mode)(), device.counting():
        tensor.to("cpu", non_blocking=True, copy=True)
        tensor.to(dtype=torch.int64, copy=True).item()
        tensor.to(torch.int32)  # it is already
        tensor.numpy()
    kernels = int(mode == "no_grad")  # there a copy of another type is one
    assert device.counts["decode"].copies == 2 - kernels
    assert device.counts["decode"].operations == kernels


def test_what_is_sampled_later_is_paid_for_where_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's toggle `sample` has it: behind the step's launch."""
    device = make_device("decode=1us,prefill=1us,launch=3us,copy=7us")
    spent: list[int] = []
    monkeypatch.setattr(device.clock, "spend", spent.append, raising=False)
    for _ in range(LOOKS + 1):  # the last one is not looked at
        del spent[:]
        begin(device)
        with device.counting():
            Graph().replay()
            torch.zeros(4)
        device.launched()
        launched = [*spent]
        with device.delayed():
            torch.zeros(4).add_(1).clone()
        assert sum(launched) == 3_000
        assert sum(spent) - sum(launched) == 2 * 3_000 + 7_000


def test_what_torch_launches_is_paid_for_where_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the inputs before the forward pass, which waits for them; for sampling after it."""
    device = make_device("decode=1us,prefill=1us,launch=3us,copy=7us")
    spent: list[int] = []
    monkeypatch.setattr(device.clock, "spend", spent.append, raising=False)
    for _ in range(LOOKS + 1):  # the last one is not looked at, and asks for as much
        del spent[:]
        begin(device)
        with device.counting():
            torch.zeros(4).add_(1)
            Graph().replay()
            before = [*spent]
            torch.zeros(4).clone()
        device.launched()
        assert sum(before) == 2 * 3_000
        assert sum(spent) - sum(before) == 3_000 + 7_000


def test_only_an_event_that_blocks_wakes_its_thread_late() -> None:
    device = make_device("decode=1ms,prefill=1ms,wake=20ms")
    for blocking in (False, True):
        begin(device)
        Graph().replay()
        event = Event(blocking=blocking)
        event.record()
        event.synchronize()
        assert (device.program.woke_ns - device.program.end_ns >= 20_000_000) == blocking


def test_a_device_that_boots_is_not_paced() -> None:
    device = make_device("50ms")
    device.serving = False
    Graph().replay()
    Kernel(None, None)()
    device.run_pieces(4, 0, between=2)
    assert device.clock.free == 0
    assert not any(device.asked().values())


def test_a_tool_sees_one_range_after_the_other_with_the_step_they_are_for() -> None:
    device = make_device("1us")
    seen: list[tuple[str, int] | str] = []
    device.ranges = SimpleNamespace(  # type: ignore[assignment]
        push=lambda name, step: seen.append((PHASES[name], step)), pop=lambda: seen.append("end")
    )
    for step in (4, 5):
        device.step = step
        begin(device)
        Graph().replay()
        device.launched()
    event = Event()
    event.record()
    device.step = 6  # is prepared while the host waits for the one before
    event.synchronize()
    of_a_step = [(name, step) for step in (4, 5) for name in ("metadata", "launch")]
    assert seen == [each for name in (*of_a_step, ("wait.copy_done", 5)) for each in (name, "end")]


@pytest.mark.parametrize("held", [False, True])
def test_a_drivers_part_is_spent_without_the_gil_unless_it_is_to_be_held(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device("decode=1us,prefill=1us,launch=3us")
    device.held = held
    spent: list[int] = []
    monkeypatch.setattr(device.clock, "spend", spent.append, raising=False)
    began = perf_counter_ns()
    Kernel(None, None)()
    assert spent == ([] if held else [3000])
    assert not held or perf_counter_ns() - began >= 3000


def test_attention_reads_each_rows_own_context_and_padding_none() -> None:
    lengths = np.array([2048, *[300] * 63])
    assert mean_context(lengths, 64) == round((2048 + 63 * 300) / 64)
    assert mean_context(np.array([100, 100]), 4) == 50
    (decode,) = sizes_of(np.zeros(2, bool), np.ones(2, int), np.array([100, 100]), padded=4)
    assert decode == Size("decode", 4, 4, 50)


def test_who_synchronizes_with_the_card_waits_for_all_that_was_queued() -> None:
    device = make_device("decode=3ms,prefill=3ms")
    begin(device)
    Graph().replay()
    assert paced._IN_PLACE[torch.accelerator]["synchronize"] is paced._synchronize
    paced._synchronize()
    assert perf_counter_ns() >= device.clock.free
