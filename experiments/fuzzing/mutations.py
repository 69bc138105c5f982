"""A valid file, changed: anywhere in its bytes, or in what it says by its own format."""

from __future__ import annotations

import gzip
import io
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from experiments.fuzzing import values

Mutation = Callable[[bytes, Random], bytes]
TOML_VALUES = (
    "nan",
    "inf",
    "-1",
    "0",
    "9223372036854775808",
    "1e400",
    '""',
    '"\\u0000"',
    "[]",
    "{}",
    "true",
    "1979-05-27",
    "07:32:00",
    "[[]]",
    '"' + "x" * 5000 + '"',
    "[" * 200,
    "''",
)
ENDLESS = (
    "WITH RECURSIVE more(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM more) SELECT *, start AS end"
)


def in_bytes(content: bytes, random: Random) -> bytes:
    """Cut, doubled, flipped, filled: what a disk, a network or a person leaves of a file."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8, 50))):
        at = random.randrange(len(data) + 1)
        match random.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1 if data:
                data[at % len(data)] = random.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + random.randrange(1, 64)]
            case 4:
                data[at:at] = bytes(random.randrange(256) for _ in range(random.randrange(1, 16)))
            case 5:
                data[at:at] = data[at : at + random.randrange(1, 256)]
            case _:
                data[at : at + 8] = random.choice((b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7))
    return bytes(data)


def in_json(content: bytes, random: Random) -> bytes:
    """One document, or one a line."""
    try:
        return _dumped(changed(json.loads(content), random))
    except ValueError:
        lines = content.splitlines()
        at = random.randrange(len(lines))
        lines[at] = _dumped(changed(json.loads(lines[at]), random))
        if random.random() < 0.2:
            lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
        return b"\n".join(lines)


def changed(document: Any, random: Random) -> Any:
    """The document with a few of its values, keys and kinds changed."""
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        document = _once(document, random)
    return document


def _once(node: Any, random: Random) -> Any:
    """Goes down a random way, and changes what is there."""
    if isinstance(node, dict | list) and node and random.random() < 0.85:
        key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        match random.randrange(12):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[values.text(random)] = node.pop(key)
            case 1 if isinstance(node, list):
                node *= random.choice((0, 2, 3))
            case 2 if isinstance(node, dict):
                node[random.choice((key, values.text(random)))] = values.any_value(random)
            case _:
                node[key] = _once(node[key], random)
        return node
    if isinstance(node, bool | int | float) and random.random() < 0.6:
        return values.number(random)
    return (
        values.text(random) if isinstance(node, str) and random.random() < 0.5 else values.any_value(random)
    )


def _dumped(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def in_lines(content: bytes, random: Random) -> bytes:
    """TOML, CSV, text: a line gone, doubled, moved, with another value or another name."""
    lines = content.split(b"\n")
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(lines))
        match random.randrange(6):
            case 0:
                lines[at : at + random.randrange(1, 4)] = [b""]
            case 1:
                lines.insert(random.randrange(len(lines)), lines[at])
            case 2:
                lines[at] = re.sub(rb"[=,].*", b"", lines[at])
            case 3:
                lines[at] = re.sub(
                    rb"[\w-]+",
                    values.word(random).encode("utf-8", "replace").replace(b"\\", b""),
                    lines[at],
                    count=1,
                )
            case _:
                lines[at] = re.sub(
                    rb"=.*", b"= " + random.choice(TOML_VALUES).encode().replace(b"\\", b""), lines[at]
                )
    return b"\n".join(lines)


def in_csv(content: bytes, random: Random) -> bytes:
    rows = [line.split(b",") for line in content.split(b"\n")]
    row = random.choice(rows)
    row[random.randrange(len(row))] = values.word(random).encode("utf-8", "replace")
    return b"\n".join(b",".join(each) for each in rows)


def in_gzip(content: bytes, random: Random) -> bytes:
    return gzip.compress(random.choice((in_bytes, in_json))(gzip.decompress(content), random), 1)


def in_safetensors(content: bytes, random: Random) -> bytes:
    """Its header, which says of each tensor its kind, its shape and where it lies; or how long that is."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if random.random() < 0.2:
        wrong = random.choice((0, 1, length - 1, length + 1, 1 << 20, (1 << 63) - 1, (1 << 64) - 1))
        return wrong.to_bytes(8, "little") + header + data
    header = random.choice((in_json, in_json, in_bytes))(header, random)
    return len(header).to_bytes(8, "little") + header + data


def in_parquet(content: bytes, random: Random) -> bytes:
    """Columns gone, of another type or with other values; rows gone, doubled or moved."""
    table = parquet.read_table(io.BytesIO(content))
    for _ in range(random.choice((1, 1, 2))):
        if not table.num_columns:
            break
        at = random.randrange(table.num_columns)
        name, rows = table.column_names[at], table.num_rows
        match random.randrange(7):
            case 0:
                table = table.remove_column(at)
            case 1:
                places = [random.randrange(rows) for _ in range(random.choice((0, 1, rows)))] if rows else []
                table = table.take(pa.array(places, pa.int64()))
            case 2:
                other = values.text(random).encode("utf-8", "replace").decode()
                table = table.rename_columns([other if each == name else each for each in table.column_names])
            case 3:
                table = table.set_column(at, name, _column(random, rows))
            case _:
                table = table.set_column(at, name, _with_others(table.column(at), random))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def _column(random: Random, rows: int) -> pa.Array:
    value = random.choice(
        (None, -1, 0, (1 << 63) - 1, 1.5, float("nan"), "x", b"\xff", [1], [], True, {"a": 1})
    )
    return pa.array([value] * rows)


def _with_others(column: pa.ChunkedArray, random: Random) -> pa.Array:
    """A few cells of a column changed, as far as its type allows."""
    cells = column.to_pylist()
    for _ in range(random.choice((1, 1, 3))):
        if cells:
            at = random.randrange(len(cells))
            own = cells[at]
            cells[at] = random.choice(
                (
                    None,
                    random.choice(cells),
                    [] if isinstance(own, list) else values.number(random),
                    [values.number(random)] * 3 if isinstance(own, list) else values.text(random),
                )
            )
    for kind in (column.type, None, pa.string()):
        with suppress(pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
            return pa.array(cells if kind != pa.string() else [str(each) for each in cells], kind)
    return pa.nulls(len(cells))


def in_sqlite(content: bytes, random: Random) -> bytes:
    """Rows and cells changed, tables and columns gone, renamed, or made of something else."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(content)
        for _ in range(random.choice((1, 1, 2, 4))):
            with suppress(sqlite3.Error, OverflowError, UnicodeError):
                _sql(database, random)
        database.commit()
        return database.serialize()


def _sql(database: sqlite3.Connection, random: Random) -> None:
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    full = [name for name in tables if database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone()]
    table = random.choice(full if full and random.random() < 0.8 else tables)
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    value: Any = random.choice((values.number, values.text))(random)
    where = random.choice(("1", "rowid % 2", "rowid = 1", "rowid = (SELECT max(rowid) FROM t)")).replace(
        " t)", f' "{table}")'
    )
    match random.randrange(9):
        case 0:
            database.execute(f'DELETE FROM "{table}" WHERE {where}')
        case 1:
            database.execute(f'DROP TABLE "{table}"')
        case 2:
            database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
        case 3:
            database.execute(f'ALTER TABLE "{table}" RENAME TO {_quoted(values.text(random))}')
        case 4 if random.random() < 0.3:
            database.execute(f'DROP TABLE "{table}"')
            database.execute(f'CREATE VIEW "{table}" AS {ENDLESS} FROM more')
        case 5:
            database.execute(f'UPDATE "{table}" SET rowid = ? WHERE rowid = 1', (value,))
        case _:
            database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {where}', (value,))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
