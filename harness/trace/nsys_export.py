"""Reads an SQLite export of Nsight Systems (`nsys export --type sqlite`); which tables of it: trace.md."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from engines.api import BadFile
from harness.trace import events
from harness.trace.events import NONE, Calls, Coder, Copies, Ranges, Synchronizations, Trace, Work

META_DATA = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # the second until 2022
MAGIC = b"SQLite format 3\0"
CHUNK = 1_000_000  # rows between two lines of progress; bounds the memory that names take while they are read
PREFIX = "CUPTI_ACTIVITY_KIND_"
PUSH_POP, START_END, DOMAIN = 59, 60, 75  # event types, where the export has no table of them
PROCESS_BITS = 24  # of a global id, below the process
CORRELATION_BITS = 32  # CUPTI's type for the id
DIRECTIONS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
              9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD"}  # fmt: skip
MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device", 6: "managed"}
FROM_HOST, TO_HOST = ("HtoD", "HtoA", "HtoH", "UVM HtoD"), ("DtoH", "AtoH", "UVM DtoH")
SYNCHRONIZATIONS = {1: events.EVENT, 2: events.STREAM_WAITS, 3: events.STREAM, 4: events.CONTEXT}

Progress = Callable[[str], None]
Columns = dict[str, NDArray[Any]]


def read(path: Path, progress: Progress) -> Trace:
    """The whole export. Raises BadFile, one line, for a file that is cut short or damaged, that is no
    export, or that has neither rows of a GPU nor ranges."""
    check_whole(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as database:
            return _Export(path, database, progress).read()
    except sqlite3.Error as error:
        raise BadFile(f"cannot read {path}, it is damaged or not an export of nsys: {error}") from None


def check_whole(path: Path) -> None:
    """Raises BadFile where the file is shorter than its header says. Numbers in the header of an SQLite
    file are big-endian: the page size at 16 (1 stands for 65536), the pages at 28, valid only if the counters
    at 24 and 92 agree."""
    with path.open("rb") as file:
        header = file.read(100)
    size = path.stat().st_size

    def number(at: int, width: int) -> int:
        return int.from_bytes(header[at : at + width], "big")

    page = number(16, 2)
    whole = number(28, 4) * (65536 if page == 1 else page)
    if len(header) < 100 or (number(24, 4) == number(92, 4) and size < whole):
        of = f" of {whole:,}" if len(header) == 100 else ""
        raise BadFile(f"{path} is cut short: it has {size:,}{of} bytes; copy or export it again")


@dataclass(slots=True)
class _Export:
    """One open export, and the codes handed out while it is read."""

    path: Path
    database: sqlite3.Connection
    progress: Progress
    tables: dict[str, frozenset[str]] = field(default_factory=dict)  # columns of each
    names: Coder = field(default_factory=Coder)
    threads: Coder = field(default_factory=Coder)
    processes: Coder = field(default_factory=Coder)
    devices: Coder = field(default_factory=Coder)
    warnings: list[str] = field(default_factory=list)

    def read(self) -> Trace:
        for (table,) in self.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            found = self.database.execute(f'SELECT name FROM pragma_table_info("{table}")')
            self.tables[table] = frozenset(name for (name,) in found)
        self._check_gpu()
        calls, call_keys = self._calls()
        work, copies = self._work(call_keys)
        synchronizations = self._synchronizations(calls, call_keys)
        ranges = self._ranges()
        self._warn_of_lost_rows()
        return Trace(
            file=str(self.path),
            format=self._format(),
            names=tuple(self.names.values),
            devices=tuple(str(each) for each in self.devices.values),
            ranges=ranges,
            calls=calls,
            work=work,
            copies=copies,
            synchronizations=synchronizations,
            warnings=tuple(self.warnings),
        )

    def _check_gpu(self) -> None:
        if not {"StringIds", *META_DATA, "NVTX_EVENTS"} & self.tables.keys() and not any(
            table.startswith(PREFIX) for table in self.tables
        ):
            raise BadFile(
                f"{self.path} is an SQLite file, but not an export of nsys: none of its tables is known"
            )
        if not any(self._has_rows(PREFIX + kind) for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")):
            lacks = (
                "no GPU rows, neither kernels nor copies: profile with --trace=cuda,nvtx, and see that the "
                "capture range holds GPU work"
            )
            # A domain alone has a row in the table of ranges too.
            if not self._has_rows("NVTX_EVENTS", f"end IS NOT NULL AND {self._is_range()}"):
                raise BadFile(f"{self.path} has {lacks}")
            self.warnings.append(f"the export has {lacks}; all it has are the host's ranges")

    def _value(self, query: str) -> Any:
        """The one cell that a query finds, None where it finds no row."""
        found = self.database.execute(query).fetchone()
        return None if found is None else found[0]

    def _has_rows(self, table: str, where: str = "1") -> bool:
        return table in self.tables and bool(
            self._value(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {where})")
        )

    def _format(self) -> str:
        known: dict[str, str] = {}
        for table in self.tables.keys() & set(META_DATA):
            known = dict(self.database.execute(f"SELECT name, value FROM {table}"))
        version, schema = (known.get(f"EXPORT_{each}_VERSION") for each in ("PRODUCT", "SCHEMA"))
        return "nsys export" + (f", {version}" if version else "") + (f", schema {schema}" if schema else "")

    # -----------------------------------------------------------------------------------------------------
    # Rows into columns

    def _select(
        self,
        table: str,
        columns: Mapping[str, str],
        *,
        names: str = "",
        source: str = "",
        where: str = "1",
    ) -> Columns:
        """Columns of `table` by SQL expressions of whole numbers, int64, empty where there is no such table.
        `names`: one more column, `name`, by an expression of text; it comes as codes, int32."""
        kinds: list[Any] = [(name, np.int64) for name in columns]
        expressions = list(columns.values())
        if names:
            kinds.append(("name", object))
            expressions.append(names)
        chunks: list[Columns] = []
        for chunk in self._chunks(table, ", ".join(expressions), source or table, where, np.dtype(kinds)):
            found: Columns = {name: np.ascontiguousarray(chunk[name]) for name in columns}
            if names:
                found["name"] = self.names.encode(chunk["name"])
            chunks.append(found)
        empty: Columns = {name: np.empty(0, np.int64) for name in columns}
        if names:
            empty["name"] = np.empty(0, np.int32)
        return {name: np.concatenate([empty[name], *(each.pop(name) for each in chunks)]) for name in empty}

    def _chunks(
        self, table: str, expressions: str, source: str, where: str, kinds: np.dtype[Any]
    ) -> Iterator[NDArray[Any]]:
        if not self._has_rows(table):
            return
        rows = self._value(f"SELECT max(rowid) FROM {table}")
        cursor = self.database.execute(f"SELECT {expressions} FROM {source} WHERE {where}")
        read = 0
        self.progress(f"{table}: {rows:,} rows")
        while len(chunk := self._chunk(table, cursor, kinds)):
            read += len(chunk)
            yield chunk
            self.progress(f"{table}: {read:,} of {rows:,} rows")

    def _chunk(self, table: str, cursor: sqlite3.Cursor, kinds: np.dtype[Any]) -> NDArray[Any]:
        """The next rows. SQLite keeps whatever was put into a column: a text, 1e300, nothing."""
        try:
            return np.fromiter(islice(cursor, CHUNK), kinds)
        except (OverflowError, TypeError, ValueError) as error:
            raise BadFile(
                f"cannot read {self.path}, it is damaged or was edited: {table} has something other than a "
                f"whole number of 64 bits: {error}"
            ) from None

    def _column(self, table: str, name: str, otherwise: str = "0") -> str:
        """An expression for the column; for NULL, and where the table has none, `otherwise`."""
        return f"COALESCE({name}, {otherwise})" if name in self.tables.get(table, ()) else otherwise

    def _string(self, table: str, *candidates: str) -> str:
        """An expression for the text of the first of these columns of string ids that the table has."""
        for name in candidates:
            if name in self.tables.get(table, ()):
                known = (
                    f"(SELECT value FROM StringIds WHERE id = {name})"
                    if "StringIds" in self.tables
                    else "NULL"
                )
                return f"COALESCE({known}, 'unknown ' || {name})"
        return "'unknown'"

    def _keys(self, processes: NDArray[Any], correlations: NDArray[Any]) -> events.Times:
        """What joins a call to its work: process and correlation id; NONE without an id."""
        keys = (self.processes.encode(processes).astype(np.int64) << CORRELATION_BITS) | correlations
        return np.where(correlations < 0, np.int64(NONE), keys)

    # -----------------------------------------------------------------------------------------------------
    # The tables

    def _ranges(self) -> Ranges:
        table = "NVTX_EVENTS"
        push_pop, kind, is_range = self._push_pop(), self._range_kind(), self._is_range()
        if self._has_rows(table):
            still_open = f"SELECT count(*) FROM {table} WHERE end IS NULL AND {is_range}"
            if left := self._value(still_open):
                self.warnings.append(
                    f"{left:,} NVTX ranges were open when the trace ended; they are left out"
                )
        rows = self._select(
            table,
            {
                "start": "start",
                "end": "end",
                "thread": self._column(table, "globalTid"),
                "nests": f"{kind} = {push_pop}",
            },
            names="domain || " + _without_tail("label"),
            source=self._labelled(table),
            where=f"end IS NOT NULL AND {is_range}",
        )
        threads = self.threads.encode(rows["thread"])
        return Ranges(rows["start"], rows["end"], rows["name"], threads, rows["nests"].astype(bool))

    def _push_pop(self) -> int:
        return self._event_type("NvtxPushPopRange", PUSH_POP)

    def _range_kind(self) -> str:
        return self._column("NVTX_EVENTS", "eventType", str(PUSH_POP))

    def _is_range(self) -> str:
        start_end = self._event_type("NvtxStartEndRange", START_END)
        return f"{self._range_kind()} IN ({self._push_pop()}, {start_end})"

    def _labelled(self, table: str) -> str:
        """NVTX_EVENTS with two more columns: `label`, the whole name, and `domain`, "name/" or nothing for
        the default one. A domain's id is unique within its process."""
        columns = self.tables.get(table, frozenset())
        texts = ["text"] if "text" in columns else []
        if "textId" in columns and "StringIds" in self.tables:
            texts.append("(SELECT value FROM StringIds WHERE id = textId)")
        label = f"COALESCE({', '.join([*texts, chr(39) * 2, chr(39) * 2])})"
        domains = f"eventType = {self._event_type('NvtxDomainCreate', DOMAIN)}"
        if not {"eventType", "domainId", "globalTid"} <= columns or not self._has_rows(table, domains):
            return f"(SELECT *, {label} AS label, '' AS domain FROM {table})"
        created = (
            f"SELECT globalTid >> {PROCESS_BITS} AS process, domainId AS id, max({label}) || '/' AS domain "
            f"FROM {table} WHERE {domains} GROUP BY 1, 2"
        )
        return (
            f"(SELECT {table}.*, {label} AS label, COALESCE(created.domain, '') AS domain FROM {table} "
            f"LEFT JOIN ({created}) AS created ON created.id = domainId "
            f"AND created.process = globalTid >> {PROCESS_BITS})"
        )

    def _event_type(self, name: str, otherwise: int) -> int:
        if "ENUM_NSYS_EVENT_TYPE" not in self.tables:
            return otherwise
        found = self._value(f"SELECT CAST(id AS INTEGER) FROM ENUM_NSYS_EVENT_TYPE WHERE name = '{name}'")
        return otherwise if found is None else int(found)

    def _calls(self) -> tuple[Calls, events.Times]:
        """The calls, and what joins each to its work."""
        table = PREFIX + "RUNTIME"
        rows = self._select(
            table,
            {
                "start": "start",
                "end": "end",
                "thread": self._column(table, "globalTid"),
                "correlation": self._column(table, "correlationId", "-1"),
            },
            names=self._string(table, "nameId"),
        )
        keys = self._keys(rows["thread"] >> PROCESS_BITS, rows["correlation"])
        threads = self.threads.encode(rows["thread"])
        return Calls(rows["start"], rows["end"], threads, rows["name"]), keys

    def _work(self, call_keys: events.Times) -> tuple[Work, Copies]:
        parts = [
            self._work_of(kind, PREFIX + table, names)
            for kind, table, names in (
                (events.KERNEL, "KERNEL", self._string(PREFIX + "KERNEL", "demangledName", "shortName")),
                (events.GRAPH, "GRAPH_TRACE", self._graph_name()),
                (events.COPY, "MEMCPY", "'copy'"),
                (events.MEMSET, "MEMSET", "'memset'"),
            )
        ]
        copies = parts[2]
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        process, local = rows["process"], rows["device"]
        keys = self._keys(process, rows["correlation"])
        contexts = self.processes.encode(process).astype(np.int64) << 32 | rows["context"]
        streams = Coder().encode(contexts).astype(np.int64) << 32 | rows["stream"]
        work = Work(
            start=rows["start"],
            end=rows["end"],
            device=self.devices.encode(self._gpus(process, local)),
            stream=Coder().encode(streams),
            kind=rows["kind"].astype(np.int32),
            name=rows["name"],
            call=events.match(keys, call_keys),
        )
        return work, self._copies(copies)

    def _work_of(self, kind: int, table: str, names: str) -> Columns:
        columns = {
            "start": "start",
            "end": "end",
            "device": self._column(table, "deviceId"),
            "context": self._column(table, "contextId"),
            "stream": self._column(table, "streamId"),
            "process": f"{self._column(table, 'globalPid')} >> {PROCESS_BITS}",
            "correlation": self._column(table, "correlationId", "-1"),
            "kind": str(kind),
        }
        copies = ("bytes", "copyKind", "srcKind", "dstKind") if kind == events.COPY else ()
        rows = self._select(
            table,
            {**columns, **{name: self._column(table, name, "-1") for name in copies}},
            names=names,
            where="end > 0",  # CUPTI gives 0 for a graph whose times it could not take
        )
        untimed = f"SELECT count(*) FROM {table} WHERE end <= 0"
        if kind == events.GRAPH and self._has_rows(table) and (count := self._value(untimed)):
            self.warnings.append(f"{count:,} graph launches have no times; the device was busier than shown")
        return rows

    def _graph_name(self) -> str:
        return f"'CUDA graph ' || {self._column(PREFIX + 'GRAPH_TRACE', 'graphId', chr(39) * 2)}"

    def _copies(self, rows: Columns) -> Copies:
        """Names for what the export has as numbers. The memory is that of the host's side, if it has one."""
        from_host, to_host = (
            np.isin(rows["copyKind"], [kind for kind, name in DIRECTIONS.items() if name in side])
            for side in (FROM_HOST, TO_HOST)
        )
        side = np.where(from_host, rows["srcKind"], np.where(to_host, rows["dstKind"], rows["srcKind"]))
        directions, memories = self._named(rows["copyKind"], DIRECTIONS), self._named(side, MEMORIES)
        return Copies(rows["start"], rows["end"], directions, memories, rows["bytes"])

    def _named(self, numbers: NDArray[Any], known: Mapping[int, str]) -> events.Codes:
        distinct, places = np.unique(numbers, return_inverse=True)
        codes = [self.names.code(known.get(int(each), "unknown")) for each in distinct]
        return np.array(codes, np.int32)[places] if codes else np.empty(0, np.int32)

    def _gpus(self, processes: NDArray[Any], devices: NDArray[Any]) -> NDArray[Any]:
        """The GPU that each process means by its device. Under CUDA_VISIBLE_DEVICES every process may call
        its own one device 0."""
        table = "TARGET_INFO_CUDA_DEVICE"
        pairs = np.unique(np.stack((processes, devices)), axis=1)
        if {"gpuId", "cudaId", "pid"} <= self.tables.get(table, frozenset()):
            known = {
                (pid, cuda): gpu
                for gpu, cuda, pid in self.database.execute(f"SELECT gpuId, cudaId, pid FROM {table}")
            }
            found = {
                (process, device): known.get((process & (1 << PROCESS_BITS) - 1, device))
                for process, device in pairs.T.tolist()
            }
            if None not in found.values():
                gpus = np.empty_like(devices)
                for (process, device), gpu in found.items():
                    gpus[(processes == process) & (devices == device)] = gpu
                return gpus
        shared, users = np.unique(pairs[1], return_counts=True)
        for device in shared[users > 1]:
            self.warnings.append(
                f"several processes use a device {device}, and the export does not tell whether it is one "
                "GPU; it is taken for one"
            )
        return devices

    def _synchronizations(self, calls: Calls, call_keys: events.Times) -> Synchronizations:
        table = PREFIX + "SYNCHRONIZATION"
        if not self._has_rows(table):
            return events.synchronizing(calls, self.names)
        rows = self._select(
            table,
            {
                "start": "start",
                "end": "end",
                "kind": self._column(table, "syncType", "0"),
                "process": f"{self._column(table, 'globalPid')} >> {PROCESS_BITS}",
                "correlation": self._column(table, "correlationId", "-1"),
            },
        )
        call = events.match(self._keys(rows["process"], rows["correlation"]), call_keys)
        return Synchronizations(
            start=rows["start"],
            end=rows["end"],
            kind=self._named(rows["kind"], SYNCHRONIZATIONS),
            blocks=rows["kind"] != 2,
            called=np.where(call == NONE, rows["start"], events.take(calls.start, call, NONE)),
            thread=events.take(calls.thread, call, NONE),
            own=np.full(len(call), NONE, np.int64),
        )

    def _warn_of_lost_rows(self) -> None:
        """What nsys itself reports as a warning or an error: events that were dropped, above all."""
        if not {"severity", "text"} <= self.tables.get("DIAGNOSTIC_EVENT", frozenset()):
            return
        said = "SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity IN (2, 3) LIMIT 5"
        self.warnings += [
            f"nsys: {' '.join(str(text).split())}" for (text,) in self.database.execute(said) if text
        ]


def _without_tail(label: str) -> str:
    """SQL for a name without what emit_nvtx appends: ", seq = 3, op_id = 14" and sizes behind it."""
    cases = (
        f"WHEN instr({label}, '{tail}') > 0 THEN substr({label}, 1, instr({label}, '{tail}') - 1)"
        for tail in (", seq = ", ", op_id = ")
    )
    return f"CASE {' '.join(cases)} ELSE {label} END"
