"""How other ranks are told of a step: all of it arrives, and no step's in place of another's."""

import threading
from collections import Counter

import numpy as np
import pytest

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.programs import Mixed, Prefill, Verify
from overlap_bench.engines.overlap.toggles import share
from overlap_bench.engines.overlap.toggles.share import SLOTS
from tests.support.bench_command import PATIENCE_S

STEP_BYTES = 4096


def decode(number: int) -> Batch:
    """A step whose every value says which one it is; its requests are nobody else's affair."""
    values = {
        "input_ids": [number, -1 - number, number],
        "position_ids": [number] * 3,
        "slot_mapping": [number] * 3,
        "request_slots": [0, 1, 2],
        "temperatures": [number / 4] * 3,
        "block_tables": np.full((3, 2), number, dtype=np.int32),
    }
    changed = [(2, np.full(5, number, dtype=np.int32))]
    program = Verify(3, 2, family="sampled", gives=4)
    return Batch(program, ("somebody",), values, changed)  # type: ignore[arg-type]


def prompts() -> Batch:
    values = {"input_ids": list(range(17)), "block_tables": np.arange(6, dtype=np.int32).reshape(2, 3)}
    return Batch(Mixed(1, 2, 2, 8, 2), (), values, unfinished=1)


def plain(batch: Batch) -> dict[str, object]:
    """All that a rank's program and its metadata are made from."""
    return {
        "program": batch.program,
        "values": {name: np.asarray(each).ravel().tolist() for name, each in batch.values.items()},
        "changed": [(slot, row.tolist()) for slot, row in batch.changed_rows],
    }


@pytest.fixture(params=["pickle", "ring"])
def choice(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_rank_is_told_of_each_step_and_order_in_turn(choice: str) -> None:
    counters: Counter[str] = Counter()
    sender = share.CHOICES[choice](2, STEP_BYTES, counters, lambda: None)
    receivers = [share.RECEIVERS[choice](ends) for ends in sender.ends]
    sender.send(7, decode(7))
    sender.order("drain")
    sender.send(8, prompts())
    for receiver in receivers:
        first = receiver.receive()
        assert first.number == 7
        assert first.batch.requests == ()
        assert plain(first.batch) == plain(decode(7))
        receiver.done()
        assert receiver.receive().order == "drain"
        receiver.done()
        last = receiver.receive()
        assert plain(last.batch) == plain(prompts())
        receiver.done()
    assert counters["shared_steps"] == 2
    assert counters["shared_bytes"] > 200
    assert counters["share_ns"] > 0
    sender.close()


def test_a_rank_that_is_late_reads_every_step(choice: str) -> None:
    """More steps than a ring has slots, all of them sent before it looks at the first, as far as they may
    be."""
    count = 2 * SLOTS
    sender = share.CHOICES[choice](1, STEP_BYTES, Counter(), lambda: None)
    receiver = share.RECEIVERS[choice](sender.ends[0])
    sending = threading.Thread(
        target=lambda: [sender.send(number, decode(number)) for number in range(count)]
    )
    sending.start()
    sending.join(0.2)
    read = []
    for _ in range(count):
        told = receiver.receive()
        read.append(int(told.batch.values["position_ids"][0]))
        receiver.done()
    sending.join(PATIENCE_S)
    sender.close()
    assert read == list(range(count))


def test_a_full_ring_asks_whether_the_ranks_still_live() -> None:
    def gone() -> None:
        raise EngineError("rank 1 died")

    sender = share.CHOICES["ring"](1, STEP_BYTES, Counter(), gone)
    for number in range(SLOTS):
        sender.send(number, decode(number))
    with pytest.raises(EngineError, match="rank 1 died"):
        sender.send(SLOTS, decode(SLOTS))
    sender.close()


def test_a_step_too_large_for_a_slot_is_refused_rather_than_cut() -> None:
    sender = share.CHOICES["ring"](1, 64, Counter(), lambda: None)
    huge = Batch(Prefill(1, 9000), (), {"input_ids": list(range(9000))})
    with pytest.raises(EngineError, match="step 3 does not fit into the ring's slots"):
        sender.send(3, huge)
    sender.close()
