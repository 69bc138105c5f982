"""field_names: how a batch is kept alive while its step runs, under overlap.

Before (`installed`), SGLang asks the batch's class for its fields on each step, and takes each field's
value. After (`cached`), as our rewriting of what SGLang 36369 describes: the class is asked once. The
function is SGLang's own on both sides; what it asks is ours.

Claim: SGLang 36369 (closed), 1.0% of the scheduler's thread at 1,500 requests. It is the same at any
batch.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles.change import INSTALLED, Change

Fields = tuple[dataclasses.Field[Any], ...]
known: dict[type, Fields] = {}


def asked_once(batch: Any) -> Fields:
    kind = type(batch)
    if kind not in known:
        known[kind] = dataclasses.fields(kind)
    return known[kind]


# What SGLang's scheduler has for `dataclasses.fields`: the before, and the after.
FIELDS = {INSTALLED: dataclasses.fields, "cached": asked_once}


def put_cached() -> None:
    import sglang.srt.managers.scheduler as own

    module = ModuleType("dataclasses")
    module.__dict__.update(vars(dataclasses), fields=FIELDS["cached"])
    own.dataclasses = module


def shown(scheduler: Any, result: Any) -> str:
    found = type(scheduler).record_batch_in_overlap.__globals__["dataclasses"].fields
    return next(choice for choice, each in FIELDS.items() if each is found)


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
