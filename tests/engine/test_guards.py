"""Each guard of the engine, taken out: the outputs must then be wrong, or the guard guards nothing.

Chaos holds back device streams and the forward thread at random, so that what can overtake does.
"""

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC, layout, scheduler
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.forward import Forward
from overlap_bench.engines.overlap.programs import Decode
from overlap_bench.engines.overlap.step import Step
from overlap_bench.engines.overlap.toggles import h2d
from overlap_bench.engines.overlap.toggles.d2h import BehindEvent
from overlap_bench.engines.overlap.toggles.h2d import PinnedSet
from overlap_bench.engines.overlap.toggles.tables import DirtyRows, Full
from tests.engine.conftest import CHAOS_SEED
from tests.engine.test_device_emulated import Gates, hold, load
from tests.support.bench_command import PATIENCE_S
from tests.support.device_contract import read
from tests.support.in_process_engine import generated, serve

REQUESTS = [api.Request(number, [number * 37 % 4000 + 1, 11, number + 5], 24) for number in range(4)]

INLINE = {"schedule": "overlap", "launch": "inline", "h2d": "pinned", "graph": "on"}
THREAD = {"schedule": "overlap", "launch": "thread", "sync": "copy-done", "h2d": "pinned", "graph": "on"}
THREAD_PAGEABLE = THREAD | {"h2d": "pageable"}
SERIAL = {"schedule": "serial", "d2h": "event", "h2d": "pinned", "graph": "on"}
READER = INLINE | {"d2h": "thread"}
READER_THREAD = THREAD | {"d2h": "thread"}
DIRTY_ROWS = INLINE | {"tables": "dirty-rows"}
DRAFTS = INLINE | {"spec": "ngram", "accept": "device"}

# Twice as many as run together, each prefilled into more blocks than the one before it in its slot ever had.
SUCCESSORS = [api.Request(number, [number + 7] * (2 + 34 * (number // 4)), 24) for number in range(8)]


def wrong_requests(
    device, settings: dict[str, str], requests: list[api.Request] = REQUESTS, **options: object
) -> int:
    """How many requests got other tokens than generate() gives."""
    expected = generated("tiny-gpt2", requests)
    options = {"max_batch_size": 4, "chaos": CHAOS_SEED} | options
    tokens, _, _ = serve(device, SPEC.check(settings), requests, **options)
    return sum(tokens[number] != expected[number] for number in expected)


def keep_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode batch share one set of lists, rewritten in place by the next schedule."""
    shared: dict[str, list[int]] = {}
    build = scheduler.decode_batch

    def rewrite(*arguments: object) -> Batch:
        batch = build(*arguments)  # type: ignore[arg-type]
        for key, values in batch.values.items():
            if isinstance(values, list):
                shared.setdefault(key, [])[:] = values
                batch.values[key] = shared[key]
        return batch

    monkeypatch.setattr(scheduler, "decode_batch", rewrite)


@pytest.mark.parametrize(
    "settings",
    [INLINE, THREAD, SERIAL, READER, DRAFTS],
    ids=["inline", "thread", "serial", "reader", "drafts"],
)
def test_with_every_guard_in_place_the_tokens_are_right(chaotic_device, settings):
    assert wrong_requests(chaotic_device, settings) == 0


@pytest.mark.parametrize(
    ("of", "guard", "settings"),
    [
        # Else a pinned set is rewritten before its copies are done.
        *((PinnedSet, "wait_until_read", settings) for settings in (INLINE, THREAD)),
        # Else ids are read before they are there.
        *((BehindEvent, "wait_copy_done", settings) for settings in (INLINE, SERIAL, READER, DRAFTS)),
    ],
)
def test_without_a_guard_the_tokens_are_wrong(chaotic_device, monkeypatch, of, guard, settings):
    monkeypatch.setattr(of, guard, lambda *_: None)
    assert wrong_requests(chaotic_device, settings) > 0


def test_overwriting_sampled_ids_before_they_are_copied_gives_wrong_tokens(chaotic_device, monkeypatch):
    monkeypatch.setattr(Forward, "fence", lambda self: None)
    # Chaos has to hold back a copy and not the program behind it: one run in two has no such moment.
    assert any(wrong_requests(chaotic_device, INLINE) for _ in range(12))


def test_a_batch_that_changes_after_it_was_handed_over_gives_wrong_tokens(chaotic_device, monkeypatch):
    assert wrong_requests(chaotic_device, THREAD_PAGEABLE) == 0
    keep_no_snapshot(monkeypatch)
    assert wrong_requests(chaotic_device, THREAD_PAGEABLE) > 0


@pytest.mark.parametrize("missed", ["a new owner", "one block more"])
def test_a_row_that_changed_and_was_not_marked_gives_wrong_tokens(chaotic_device, monkeypatch, missed):
    assert wrong_requests(chaotic_device, DIRTY_ROWS, SUCCESSORS) == 0
    write, known = DirtyRows.write, dict[int, list[int]]()

    def miss_some(tables: DirtyRows, slot: int, blocks: list[int]) -> None:
        write(tables, slot, blocks)
        had = known.get(slot)
        known[slot] = list(blocks)
        if had and ("one block more" if blocks[:-1] == had else "a new owner") == missed:
            tables._dirty.discard(slot)

    monkeypatch.setattr(DirtyRows, "write", miss_some)
    assert wrong_requests(chaotic_device, DIRTY_ROWS, SUCCESSORS) > 0


@pytest.mark.parametrize("settings", [INLINE, SERIAL], ids=["inline", "serial"])
def test_a_token_of_a_prompt_that_is_not_whole_yet_would_be_taken_for_its_first(
    chaotic_device, monkeypatch, settings
):
    long = [api.Request(number, [number + 7] * 40, 8) for number in range(4)]
    chunks = settings | {"chunk": "on"}
    assert wrong_requests(chaotic_device, chunks, long, chunk_tokens=16) == 0
    monkeypatch.setattr(Batch, "given", property(lambda batch: batch.requests))
    assert wrong_requests(chaotic_device, chunks, long, chunk_tokens=16) > 0


def test_a_row_past_its_end_would_write_over_whoever_has_the_blocks_of_its_slots_owner_before(
    chaotic_device, monkeypatch
):
    """Long ones leave their block numbers behind in the rows of the table; short ones follow them there, and
    run past their end in a batch of eight steps, beside long ones that have those blocks by then."""
    lengths = [60] * 4 + [3, 60, 3, 60, 3, 60, 3, 60]
    requests = [
        api.Request(number, [number + 7] * length, 12 if length == 3 else 40)
        for number, length in enumerate(lengths)
    ]
    eight = INLINE | {"steps": "8"}
    assert wrong_requests(chaotic_device, eight, requests) == 0

    def keep_what_follows(tables: Full, slot: int, blocks: list[int]) -> None:
        tables.rows[slot, : len(blocks)] = blocks

    monkeypatch.setattr(Full, "write", keep_what_follows)
    assert wrong_requests(chaotic_device, eight, requests) > 0


@pytest.mark.parametrize("settings", [READER, READER_THREAD], ids=["inline", "thread"])
def test_a_reader_that_is_late_reads_the_next_steps_ids_unless_there_are_two_destinations(
    chaotic_device, monkeypatch, settings
):
    wait = BehindEvent.wait_copy_done

    def oversleep(self: BehindEvent, step: Step) -> None:
        wait(self, step)
        time.sleep(0.02)  # the next step, launched already, takes a tenth of that

    monkeypatch.setattr(BehindEvent, "wait_copy_done", oversleep)
    assert wrong_requests(chaotic_device, settings) == 0
    both = BehindEvent._destination
    monkeypatch.setattr(
        BehindEvent, "_destination", lambda self, step: both(self, Step(0, step.batch, step.staged))
    )
    assert wrong_requests(chaotic_device, settings) > 0


def rows_on_device(device, choice: str, gates: Gates, waits: bool = False) -> list[list[int]]:
    """Two steps that each change a row of another slot, the second staged while the first one's copies are
    held back, unless it waits for them; the rows that the device ends up with."""
    load(device, gates)
    arrays = layout.lay_out(1, 1, 0)
    metadata = h2d.Metadata(
        arrays,
        {array.name: device.buffer("a", array.offset, array.nbytes) for array in arrays},
        device.buffer("a", 0, layout.nbytes(arrays)),
        tuple(device.buffer("b", slot * 16, 16) for slot in range(2)),
    )
    forward = device.stream("forward")
    toggle = h2d.CHOICES[choice](device, forward, {"decode.1.1": metadata}, Counter(), lambda: None)
    values = {array.name: [0] for array in arrays}
    first, second = (
        Batch(Decode(1, 1), (), values, [(slot, np.full(4, slot + 1, dtype=np.int32))]) for slot in range(2)
    )
    gate = gates.new()
    hold(device, gate)
    toggle.copy(Step(0, first, toggle.stage(first)))
    staging = threading.Thread(target=lambda: toggle.copy(Step(1, second, toggle.stage(second))))
    staging.start()
    staging.join(0.1 if waits else PATIENCE_S)
    gates.open(gate)
    staging.join(PATIENCE_S)
    return read(device, device.buffer("b", 0, 32), torch.int32).view(2, 4).tolist()


@pytest.mark.parametrize("choice", ["pinned", "packed"])
def test_rewriting_a_pinned_row_before_its_copy_is_done_sends_another_requests_row(
    device, tmp_path, monkeypatch, choice
):
    gates = Gates(tmp_path)
    assert rows_on_device(device, choice, gates, waits=True) == [[1] * 4, [2] * 4]
    monkeypatch.setattr(PinnedSet, "wait_until_read", lambda self: None)
    assert rows_on_device(device, choice, gates) == [[2] * 4, [2] * 4]
