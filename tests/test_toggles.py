"""What a toggle does besides leaving the tokens as they are: by its counters and the step records."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import api
from engines.overlap import SPEC
from engines.overlap.toggles import tables
from tests.serving import serve, some_requests

INLINE = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}
THREAD = {"schedule": "overlap", "launch": "thread", "graph": "on"}
SLOTS, BLOCKS = 4, 6


def steps_of(record: api.RoundRecord) -> list[dict[str, int]]:
    table = record.steps
    rows = np.frombuffer(table.data, dtype=np.int64).reshape(table.rows, -1)
    return [dict(zip(table.columns, row.tolist(), strict=True)) for row in rows]


# -- tables ---------------------------------------------------------------------------------------------

row_writes = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.lists(st.integers(1, 99), min_size=1, max_size=BLOCKS)),
    max_size=5,
)
batches = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(row_writes, batches, st.integers(1, BLOCKS)), max_size=12))
def test_changed_rows_leave_the_device_with_the_table_that_whole_ones_tell(script):
    full, dirty = (tables.choose(choice, SLOTS + 1, BLOCKS, Counter()) for choice in tables.TOGGLE.choices)
    kept = np.zeros((SLOTS + 1, BLOCKS), dtype=np.int32)
    for written, slots, blocks in script:
        for slot, numbers in written:
            full.write(slot, numbers)
            dirty.write(slot, numbers)
        padded = [*slots, SLOTS, SLOTS]
        for slot, row in dirty.changed(padded):
            kept[slot] = row
        assert not dirty.changed(padded)
        assert dirty.whole(padded, blocks) == {}
        assert (kept[padded, :blocks] == full.whole(padded, blocks)["block_tables"]).all()


def test_only_rows_that_changed_are_sent(device):
    requests = some_requests(12)
    sent = {}
    for choice in tables.TOGGLE.choices:
        full_settings = SPEC.check(INLINE | {"tables": choice})
        _, _, record = serve(device, full_settings, requests, max_batch_size=6, max_context=128)
        sent[choice] = record.counters
    decoding = sum(request.max_new_tokens > 1 for request in requests)
    assert decoding <= sent["dirty-rows"]["table_rows"] < sent["full"]["table_rows"]
    assert sent["dirty-rows"]["table_bytes"] == sent["dirty-rows"]["table_rows"] * 128 // 16 * 4
    steps = sent["full"]["h2d_pinned_copies"]
    assert sent["dirty-rows"]["h2d_pinned_copies"] == steps + sent["dirty-rows"]["table_rows"]
