"""Recorded traffic: when requests came, how long they were, and which of them began alike.

Two formats, told apart by the name of their time field, and CSV from JSON lines by the first line:

    Mooncake   JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}. Each hash id
               stands for a block of 512 prompt tokens and all that comes before it; the last one for what is
               left. Requests with equal ids share a prefix.
    BurstGPT   CSV, or JSON lines with the same fields: Timestamp (s), Request tokens, Response tokens.
               Requests that failed when they were recorded (0 tokens) are left out, and counted.

A trace has no text: prompts are made of random token ids, the same ids for the same hash.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import msgspec

from overlap_bench.engines.api import BadFile, BadSetting
from overlap_bench.harness.common.text_files import text_file
from overlap_bench.harness.workload.lengths import stream

if TYPE_CHECKING:  # the command line must not wait for numpy
    import numpy as np

BLOCK_TOKENS = 512  # of a Mooncake hash id
LONGEST = 200  # characters of a line's fields in a message

MOST = 1 << 53  # beyond it a float holds no whole number, and a scaled length would be another
AtLeast1 = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class Mooncake(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: AtLeast1
    output_length: AtLeast1
    hash_ids: list[NotNegative]


class BurstGpt(msgspec.Struct, frozen=True):
    """One row of the format; its other columns are not needed."""

    timestamp: float = msgspec.field(name="Timestamp")
    request_tokens: Tokens = msgspec.field(name="Request tokens")
    response_tokens: Tokens = msgspec.field(name="Response tokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded request. `hash_ids` is empty where the format has none."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The first requests of a trace, and how many failed ones were left out on the way."""

    entries: tuple[Entry, ...]
    failed: int


@lru_cache(maxsize=8)
def read(path: str, count: int) -> Trace:
    """The first `count` requests of a trace that were served, all where there are fewer. Raises BadFile,
    one line, with the number of the line that can't be used."""
    try:
        with text_file(Path(path)) as file:
            return _first(path, file, count)
    except csv.Error as error:
        raise BadFile(f"cannot read the trace {path}: {error}") from None


def _first(path: str, file: TextIO, count: int) -> Trace:
    entries: list[Entry] = []
    failed = 0
    before = -math.inf
    for number, line in _numbered(path, file):
        entry = _entry(f"{path}, line {number}", line)
        if not math.isfinite(entry.at_ms):
            raise BadFile(f"{path}, line {number}: its time is no finite number")
        if entry.at_ms < before:
            raise BadFile(f"{path}, line {number}: time goes back, by {before - entry.at_ms:g} ms")
        before = entry.at_ms
        if not (entry.input_tokens and entry.output_tokens):
            failed += 1
            continue
        entries.append(entry)
        if len(entries) == count:
            break
    if not entries:
        raise BadFile(f"no requests in the trace {path}")
    return Trace(tuple(entries), failed)


def _numbered(path: str, file: TextIO) -> Iterator[tuple[int, dict[str, object]]]:
    """Each request's fields, and the number of its line."""
    for before, line in enumerate(file):
        if line.strip():
            lines = chain([line], file)
            return (_lines if line.lstrip().startswith(("{", "[")) else _rows)(path, before, lines)
    return iter(())


def _lines(path: str, before: int, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, start=before + 1):
        if not line.strip():
            continue
        try:
            yield number, msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadFile(f"{path}, line {number} is not a JSON object: {error}") from None


def _rows(path: str, before: int, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, object]]]:
    rows = csv.DictReader(lines)
    for row in rows:
        number = before + rows.line_num
        if None in row:
            raise BadFile(f"{path}, line {number} has more fields than the header")
        yield number, row


def _entry(where: str, line: dict[str, object]) -> Entry:
    try:
        if "timestamp" in line:
            request = msgspec.convert(line, type=Mooncake)
            _check_blocks(where, request)
            return Entry(
                request.timestamp, request.input_length, request.output_length, tuple(request.hash_ids)
            )
        if "Timestamp" in line:
            row = msgspec.convert(line, type=BurstGpt, strict=False)
            return Entry(row.timestamp * 1e3, row.request_tokens, row.response_tokens)
    except msgspec.ValidationError as error:
        raise BadFile(f"{where}: {error}") from None
    raise BadFile(
        f"{where}: neither 'timestamp' (Mooncake) nor 'Timestamp' (BurstGPT) among its fields, "
        f"{json.dumps(list(line))[:LONGEST]}"
    )


def _check_blocks(where: str, request: Mooncake) -> None:
    needed = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != needed:
        raise BadFile(
            f"{where}: {len(request.hash_ids)} hash_ids for {request.input_length} tokens; in blocks of "
            f"{BLOCK_TOKENS} they need {needed}"
        )


# ---------------------------------------------------------------------------------------------------------
# Prompts


def scaled(tokens: int, scale: float) -> int:
    """A length times `scale`, at least 1."""
    return max(1, round(tokens * scale))


def check_fit(trace: Trace, scale: float, context: int) -> None:
    """Raises BadSetting, with a scale that would do, where a scaled request exceeds the context."""
    if all(scaled(each.input_tokens, scale) + scaled(each.output_tokens, scale) <= context
           for each in trace.entries):  # fmt: skip
        return
    longest = max(each.input_tokens + each.output_tokens for each in trace.entries)
    fitting = (context - 1) / longest  # 1: for two lengths that are rounded up
    digits = 1 - math.floor(math.log10(fitting))
    raise BadSetting(
        f"the trace asks for up to {longest} tokens, input and output, and the context holds "
        f"{context}: trace_scale={math.floor(fitting * 10**digits) / 10**digits:g} makes them fit"
    )


def prompts(trace: Trace, scale: float, seed: int, vocabulary: Sequence[int]) -> list[list[int]]:
    """Token ids for each request, drawn from `vocabulary`. Block b of a prompt covers tokens round(512 b
    scale) to round(512 (b+1) scale), so equal hash ids still give equal prefixes: of use to a prefix cache
    only while its own blocks are no longer than 512 scale. Other seeds give other ids: rounds of one boot
    share nothing."""
    import numpy as np

    ids = np.asarray(vocabulary)
    found = []
    for index, entry in enumerate(trace.entries):
        length = scaled(entry.input_tokens, scale)
        if not entry.hash_ids:  # keyed (index, 0), as no hash id is: no other request gets these
            found.append(_draw(stream(seed, "trace", index, 0), ids, length))
            continue
        borders = [round(block * BLOCK_TOKENS * scale) for block in range(len(entry.hash_ids))] + [length]
        prompt: list[int] = []
        for hash_id, start, end in zip(entry.hash_ids, borders, borders[1:], strict=False):
            prompt += _draw(stream(seed, "trace", hash_id), ids, end - start)
        found.append(prompt)
    return found


def _draw(random: np.random.Generator, ids: np.ndarray, count: int) -> list[int]:
    drawn: list[int] = ids[random.integers(0, len(ids), count)].tolist()
    return drawn
