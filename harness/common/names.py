"""Names and words that stored files have from before, by those of today; options have theirs in cli/app.py.

What is stored stays as it is, and is translated where it is read: all that is computed and shown has today's.
Where two stored values differ is told in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

FIRST = {  # of the first schema, by which designs are signed
    "step_ms_sliced": "decode_step_ms",
    "step_ms_sliced_same_device": "decode_step_ms_same_device",
    "step_ms_sliced_same_host": "decode_step_ms_same_host",
    "step_ms_sliced_mean": "decode_step_ms_untrimmed",
    "step_ms_drained": "decode_step_ms_drained",
    "step_ms_matched": "round_step_ms",
    "step_ms_same_device": "round_step_ms_same_device",
    "step_ms_same_host": "round_step_ms_same_host",
    "decode_step_ms_mean": "round_step_ms_mean",
}
# Of the second schema: taken for the host's time, where the whole step is meant, at the same device time.
SECOND = {
    f"{which}_step_ms_{part}": f"{which}_step_ms_same_{other}"
    for which in ("decode", "round")
    for part, other in (("host", "device"), ("device", "host"))
}
METRICS = FIRST | SECOND
BEFORE = {today: name for name, today in FIRST.items()}
COUNTERS = {f"planted_{what}": f"injected_{what}" for what in ("device_ns", "host_ns", "share")}
OLD = re.compile(rf"\b(?:{'|'.join([*METRICS, *COUNTERS])}|phase_\w+_us_sliced)\b")
TODAY = re.compile(rf"\b(?:{'|'.join(BEFORE)}|decode_phase_\w+_us)\b")
TOLD = 4  # differences, in a line
FIELDS = {  # of a design, as its options are called
    "blocks": "trials",
    "segments": "interleaved_rounds",
    "plant": "inject_delay",
    "plant_at": "inject_at",
    "plant_ns": "inject_ns",
}
# Of a sentence: what stored warnings say, in this order.
WORDS = (
    (re.compile(r"--max-blocks\b"), "--max-trials"),
    (re.compile(r"--segments\b"), "--interleaved-rounds"),
    (re.compile(r"--plant(?!-)"), "--inject-delay"),
    (re.compile(r"--plant-at\b"), "--inject-at"),
    (re.compile(r"\ba planted delay\b"), "an injected delay"),
    (re.compile(r"\bsegments in turns\b"), "interleaved rounds"),
    (re.compile(r"\bslices and rounds disagree\b"), "turns and rounds disagree"),
    (re.compile(r"\bwhile it was parked\b"), "while it waited for its turn"),
    (re.compile(r"\bblock(s?)\b"), r"trial\1"),
)


def of_today(text: str) -> str:
    """A name of a metric or a counter, or a text with such names in it, by what they are called today."""
    return OLD.sub(lambda found: _of_today(found[0]), text)


def _of_today(name: str) -> str:
    known = METRICS.get(name) or COUNTERS.get(name)
    return known or f"decode_{name.removesuffix('_sliced')}"


def as_before(text: str) -> str:
    """The reverse of `of_today` for metrics: signatures of designs are about the older names."""
    return TODAY.sub(lambda found: BEFORE.get(found[0]) or f"{found[0].removeprefix('decode_')}_sliced", text)


def sentence_of_today(text: str) -> str:
    for old, new in WORDS:
        text = old.sub(new, text)
    return of_today(text)


def difference(old: Any, new: Any, path: str = "") -> str:
    """Where two values, plain ones or structs, differ: "arms.0.toggles.h2d was 'pinned', is 'packed'; ...",
    the first ones and how many there are besides; "" where they are equal."""
    found = list(_differences(msgspec.to_builtins(old), msgspec.to_builtins(new), path))
    more = [f"and {len(found) - TOLD} more"] if len(found) > TOLD else []
    return "; ".join(found[:TOLD] + more)


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(each for each in new if each not in old)]:
            shown = FIELDS.get(str(key), str(key))
            yield from _differences(old.get(key), new.get(key), f"{path}.{shown}" if path else shown)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(left, right, f"{path}.{index}")
    else:
        yield f"{path} was {old!r}, is {new!r}"
