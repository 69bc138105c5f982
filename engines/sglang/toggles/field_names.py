"""field_names: how a batch is kept alive while its step runs, under overlap.

Before (`installed`), SGLang asks the batch's class for its fields on each step, and takes each field's
value. After (`cached`), as our rewriting of what SGLang 36369 describes: the fields' names are asked for
once.

Claim: SGLang 36369 (closed), 1.0% of the scheduler's thread at 1,500 requests. It is the same at any
batch.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import INSTALLED, Change


def put_cached() -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    names = [each.name for each in fields(ScheduleBatch)]

    def cached(scheduler: Any, batch: Any) -> None:
        kept = [getattr(batch, name, None) for name in names]
        place = scheduler.batch_record_ct = (scheduler.batch_record_ct + 1) % 2
        scheduler.batch_record_buf[place] = [batch, kept]

    Scheduler.record_batch_in_overlap = cached


def shown(scheduler: Any, result: Any) -> str:
    records = type(scheduler).record_batch_in_overlap
    return "cached" if records.__module__ == __name__ else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="field_names",
        module=__name__,
        choices=(INSTALLED, "cached"),
        changes="whether the names of a batch's fields are asked for on each step, or once",
        source="SGLang 36369, the third of its three cuts",
        rewritten="cached",
        requires={"*": {"schedule": ("overlap",)}},
        optional=True,
        phases=("metadata",),
    ),
    put={"cached": put_cached},
    like={"sglang.srt.managers.scheduler:Scheduler.record_batch_in_overlap": "77f046c2b18edb0b"},
    shown=shown,
)
