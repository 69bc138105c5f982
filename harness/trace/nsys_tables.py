"""The tables of an SQLite export of Nsight Systems as columns, whichever of them a version has."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace.events import Coder, Progress
from overlap_bench.harness.trace.rows import Columns
from overlap_bench.harness.trace.times import UNTAKEN

CHUNK = 1_000_000  # rows between two lines of progress; bounds the memory that names take while they are read
LEAST = f"({UNTAKEN + 1} - 1)"  # UNTAKEN as SQL, which has no literal for it


@dataclass(slots=True)
class Tables:
    """One open export. `columns`: of each table. `sources`: tables that are read in place of those that they
    are named for. `names`: codes for all text that is read."""

    path: Path
    database: sqlite3.Connection
    progress: Progress
    columns: dict[str, frozenset[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    names: Coder = field(default_factory=Coder)
    warnings: list[str] = field(default_factory=list)

    def find(self, wanted: Sequence[str], like_these: re.Pattern[str]) -> None:
        """See which tables there are. One whose name has a version stands in for the one without, where that
        is empty or missing: as a view of that name. What is like the wanted and unknown is warned of."""
        self.database.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
        for (table,) in self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall():
            found = self.database.execute("SELECT name FROM pragma_table_info(?)", (table,))
            self.columns[table] = frozenset(name for (name,) in found)
        for table in wanted:
            named = re.compile(rf"(?i){table}(_V\d+)?")
            others = [name for name in self.columns if name != table and named.fullmatch(name)]
            if others and not self.has_rows(table):
                latest = max(others, key=lambda name: (self.has_rows(name), len(name), name))
                self.database.execute(f'CREATE TEMP VIEW {table} AS SELECT * FROM main."{latest}"')
                self.columns[table] = self.columns.pop(latest)
                self.sources[table] = latest
        self.warnings += [
            f"the export has a table {name}, which is not known here: its rows are not in these numbers"
            for name, columns in self.columns.items()
            if name not in wanted and like_these.search(name.upper()) and "start" in columns
            if self.has_rows(name)
        ]

    def has(self, table: str, *columns: str) -> bool:
        return self.columns.get(table, frozenset()).issuperset(columns) and table in self.columns

    def value(self, query: str) -> Any:
        """The one cell that a query finds, None where it finds no row."""
        found = self.database.execute(query).fetchone()
        return None if found is None else found[0]

    def has_rows(self, table: str, where: str = "1") -> bool:
        quoted = table.replace('"', '""')
        return self.has(table) and bool(self.value(f'SELECT EXISTS (SELECT 1 FROM "{quoted}" WHERE {where})'))

    def column(self, table: str, name: str, otherwise: str = "0") -> str:
        """An expression for the column; for NULL, and where the table has none, `otherwise`."""
        return f"COALESCE({name}, {otherwise})" if self.has(table, name) else otherwise

    def string(self, table: str, *candidates: str) -> str:
        """An expression for the text of the first of these columns of string ids that the table has."""
        for name in candidates:
            if self.has(table, name):
                return f"COALESCE({self.string_of(name)}, 'unknown ' || {name}, 'unknown')"
        return "'unknown'"

    def string_of(self, column: str) -> str:
        """An expression for the text that a string id stands for."""
        if not self.has("StringIds", "id", "value"):
            return "NULL"
        return f"(SELECT value FROM StringIds WHERE id = {column})"

    def select(
        self,
        table: str,
        columns: Mapping[str, str],
        *,
        names: str = "",
        source: str = "",
        where: str = "1",
        end: str = "end",
    ) -> Columns:
        """`start`, `end`, and columns of `table` by SQL expressions of whole numbers, int64, empty where
        there is no such table. `names`: one more column, `name`, by an expression of text; it comes as codes,
        int32. A time that is NULL is UNTAKEN."""
        if self.has(table) and not self.has(table, "start", "end"):
            self.warnings.append(
                f"the export's table {table} has no column start or no end: it is left out; export it again"
            )
            table = ""
        times = {name: f"COALESCE({each}, {LEAST})" for name, each in (("start", "start"), ("end", end))}
        columns = {**times, **columns}
        kinds: list[Any] = [(name, np.int64) for name in columns]
        expressions = list(columns.values())
        if names:
            kinds.append(("name", object))
            expressions.append(f"CAST(({names}) AS BLOB)")  # as bytes, for not every name can be read
        chunks: list[Columns] = []
        try:
            for chunk in self._chunks(table, ", ".join(expressions), source or table, where, np.dtype(kinds)):
                found: Columns = {name: np.ascontiguousarray(chunk[name]) for name in columns}
                if names:
                    found["name"] = self.names.encode(chunk["name"], _text)
                chunks.append(found)
        except (OverflowError, TypeError, ValueError) as error:
            raise BadFile(f"{self.path} is damaged: {table} has a cell that is no number: {error}") from None
        empty: Columns = {name: np.empty(0, np.int64) for name in columns}
        if names:
            empty["name"] = np.empty(0, np.int32)
        return {name: np.concatenate([empty[name], *(each.pop(name) for each in chunks)]) for name in empty}

    def _chunks(
        self, table: str, expressions: str, source: str, where: str, kinds: np.dtype[Any]
    ) -> Iterator[NDArray[Any]]:
        if not self.has_rows(table):
            return
        rows = self.value(f'SELECT max(rowid) FROM main."{self.sources.get(table, table)}"')
        cursor = self.database.execute(f"SELECT {expressions} FROM {source} WHERE {where}")
        read = 0
        self.progress(f"{table}: {rows:,} rows")
        while len(chunk := np.fromiter(islice(cursor, CHUNK), kinds)):
            read += len(chunk)
            yield chunk
            self.progress(f"{table}: {read:,} of {rows:,} rows")


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
