"""Reads an SQLite export of Nsight Systems (`nsys export --type sqlite`); which tables of it: trace.md."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace import events, rows
from overlap_bench.harness.trace.events import NONE, Coder, Ranges, Trace
from overlap_bench.harness.trace.nsys_tables import Tables
from overlap_bench.harness.trace.rows import Columns
from overlap_bench.harness.trace.waits import recorded

META_DATA = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # the second until 2022
MAGIC = b"SQLite format 3\0"
PREFIX = "CUPTI_ACTIVITY_KIND_"
GPU = ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")
TABLES = (
    *("StringIds", *META_DATA, "NVTX_EVENTS", "TARGET_INFO_CUDA_DEVICE", "DIAGNOSTIC_EVENT"),
    *("ENUM_NSYS_EVENT_TYPE", *(PREFIX + kind for kind in (*GPU, "RUNTIME", "SYNCHRONIZATION"))),
)
# What may hold the same under a name that is not known.
LIKE_THESE = re.compile("KERNEL|GRAPH_TRACE|MEMCPY|MEMSET|RUNTIME|DRIVER|SYNCHRONIZATION|NVTX|CUDA_API")
KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
PUSH_POP, START_END, DOMAIN = 59, 60, 75  # event types, where the export has no table of them
PROCESS_BITS = 24  # of a global id, below the process
MACHINE_BITS = 24  # of what is above those, below the machine
DIRECTIONS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
              9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD"}  # fmt: skip
MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device", 6: "managed"}
FROM_HOST, TO_HOST = ("HtoD", "HtoA", "HtoH", "UVM HtoD"), ("DtoH", "AtoH", "UVM DtoH")
SYNCHRONIZATIONS = {1: events.EVENT, 2: events.STREAM_WAITS, 3: events.STREAM, 4: events.CONTEXT}


def read(path: Path, progress: events.Progress) -> Trace:
    """The whole export. Raises BadFile, one line, for a file that is cut short or damaged, that is no
    export, or that has neither rows of a GPU nor ranges."""
    check_whole(path)
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as database:
            return _Export(path, Tables(path, database, progress)).read()
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


class _Export:
    """One open export, and the codes handed out while it is read."""

    def __init__(self, path: Path, tables: Tables) -> None:
        self.path, self.tables = path, tables
        self.threads, self.processes, self.devices = Coder(), Coder(), Coder()

    def read(self) -> Trace:
        self.tables.find(TABLES, LIKE_THESE)
        self._check_gpu()
        if not self.tables.has("StringIds", "id", "value"):
            self.tables.warnings.append(
                "the export has no table StringIds: calls, kernels and most ranges are named by their "
                "number; export it again"
            )
        calls, waits, ranges = self._calls(), self._waits(), self._ranges()
        work, of_copies = self._work()
        found, left_out = rows.sound({"calls": calls, "work": work, "waits": waits, "ranges": ranges})
        calls, work, waits, ranges = (found[name] for name in ("calls", "work", "waits", "ranges"))
        del found
        if not (len(work["start"]) or len(ranges["start"])):
            raise BadFile(f"{self.path} has no rows with times; {'; '.join(left_out.warnings())}")
        work["device"] = self._gpus(work)
        devices = tuple(self.devices.values)
        for each in (work, waits):
            self._own(each, calls)
        launched = rows.launched(calls, work, self.tables.names.values, devices, left_out)
        waits |= {"blocks": waits["kind"] != 2, "kind": self._named(waits["kind"], SYNCHRONIZATIONS)}
        synchronizations, unknown = recorded(launched.calls, calls, waits, self.tables.names)
        self._warn_of_lost_rows()
        return Trace(
            file=str(self.path),
            format=self._format(),
            names=tuple(self.tables.names.values),
            devices=devices,
            ranges=Ranges(
                ranges["start"], ranges["end"], ranges["name"], ranges["thread"], ranges["nests"].astype(bool)
            ),
            calls=launched.calls,
            work=launched.work,
            copies=rows.copies(launched.columns, of_copies),
            synchronizations=synchronizations,
            untold=launched.untold,
            warnings=(*left_out.warnings(), *launched.warnings, *self.tables.warnings, *unknown),
        )

    def _check_gpu(self) -> None:
        tables = self.tables
        if not {"StringIds", *META_DATA, "NVTX_EVENTS"} & tables.columns.keys() and not any(
            table.startswith(PREFIX) for table in tables.columns
        ):
            raise BadFile(
                f"{self.path} is an SQLite file, but not an export of nsys: none of its tables is known"
            )
        if not any(tables.has_rows(PREFIX + kind) for kind in GPU):
            lacks = (
                "no GPU rows, neither kernels nor copies: profile with --trace=cuda,nvtx, and see that the "
                "capture range holds GPU work"
            )
            # A domain alone has a row in the table of ranges too.
            ended = f"{tables.column('NVTX_EVENTS', 'end', 'NULL')} IS NOT NULL"
            if not tables.has_rows("NVTX_EVENTS", f"{ended} AND {self._is_range()}"):
                more = "".join(f"; {each}" for each in tables.warnings)
                raise BadFile(f"{self.path} has {lacks}{more}")
            tables.warnings.append(f"the export has {lacks}; all it has are the host's ranges")

    def _format(self) -> str:
        known: dict[str, str] = {}
        for table in META_DATA:
            if self.tables.has(table, "name", "value"):
                known |= dict(self.tables.database.execute(f"SELECT name, value FROM {table}"))
        version, schema = (known.get(f"EXPORT_{each}_VERSION") for each in ("PRODUCT", "SCHEMA"))
        return "nsys export" + (f", {version}" if version else "") + (f", schema {schema}" if schema else "")

    # -----------------------------------------------------------------------------------------------------
    # Ranges

    def _ranges(self) -> Columns:
        table = "NVTX_EVENTS"
        found = self.tables.select(
            table,
            {
                "thread": self.tables.column(table, "globalTid"),
                "nests": f"{self._range_kind()} = {self._push_pop()}",
            },
            names="domain || " + _without_tail("label"),
            source=self._labelled(table),
            where=self._is_range(),
            end="COALESCE(end, start - 1)",  # it was open when the trace ended
        )
        found["thread"] = self.threads.encode(found["thread"])
        return found

    def _push_pop(self) -> int:
        return self._event_type("NvtxPushPopRange", PUSH_POP)

    def _range_kind(self) -> str:
        return self.tables.column("NVTX_EVENTS", "eventType", str(PUSH_POP))

    def _is_range(self) -> str:
        start_end = self._event_type("NvtxStartEndRange", START_END)
        return f"{self._range_kind()} IN ({self._push_pop()}, {start_end})"

    def _labelled(self, table: str) -> str:
        """NVTX_EVENTS with two more columns: `label`, the whole name, and `domain`, "name/" or nothing for
        the default one. A domain's id is unique within its process."""
        columns = self.tables.columns.get(table, frozenset())
        texts = ["text"] if "text" in columns else []
        if "textId" in columns:
            texts.append(self.tables.string_of("textId"))
        label = f"COALESCE({', '.join([*texts, chr(39) * 2, chr(39) * 2])})"
        domains = f"eventType = {self._event_type('NvtxDomainCreate', DOMAIN)}"
        if not {"eventType", "domainId", "globalTid"} <= columns or not self.tables.has_rows(table, domains):
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
        table = "ENUM_NSYS_EVENT_TYPE"
        if not self.tables.has(table, "id", "name"):
            return otherwise
        found = self.tables.value(f"SELECT CAST(id AS INTEGER) FROM {table} WHERE name = '{name}'")
        return otherwise if found is None else int(found)

    # -----------------------------------------------------------------------------------------------------
    # Calls, work and waits

    def _calls(self) -> Columns:
        table = PREFIX + "RUNTIME"
        found = self.tables.select(
            table,
            {
                "thread": self.tables.column(table, "globalTid"),
                "correlation": self.tables.column(table, "correlationId", "-1"),
            },
            names=self.tables.string(table, "nameId"),
        )
        found["process"] = self.processes.encode(found["thread"] >> PROCESS_BITS)
        found["thread"] = self.threads.encode(found["thread"])
        return found

    def _work(self) -> tuple[Columns, Columns]:
        """All of it, and what only copies have."""
        parts = [
            self._work_of(kind, PREFIX + table, names)
            for kind, table, names in (
                (events.KERNEL, "KERNEL", self.tables.string(PREFIX + "KERNEL", *KERNEL_NAMES)),
                (events.GRAPH, "GRAPH_TRACE", self._graph_name()),
                (events.COPY, "MEMCPY", "'copy'"),
                (events.MEMSET, "MEMSET", "'memset'"),
            )
        ]
        of_copies = self._of_copies(parts[2])
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        found["process"] >>= PROCESS_BITS
        found["kind"] = found["kind"].astype(np.int32)
        found["copy"] = rows.numbered(found["kind"] == events.COPY)
        contexts = self.processes.encode(found["process"]).astype(np.int64) << 32 | found.pop("context")
        found["thread"] = Coder().encode(
            Coder().encode(contexts).astype(np.int64) << 32 | found.pop("stream")
        )
        return found, of_copies

    def _work_of(self, kind: int, table: str, names: str) -> Columns:
        columns = {
            "device": self.tables.column(table, "deviceId"),
            "context": self.tables.column(table, "contextId"),
            "stream": self.tables.column(table, "streamId"),
            "process": self.tables.column(table, "globalPid"),
            "correlation": self.tables.column(table, "correlationId", "-1"),
            "kind": str(kind),
        }
        copies = ("bytes", "copyKind", "srcKind", "dstKind") if kind == events.COPY else ()
        return self.tables.select(
            table,
            {**columns, **{name: self.tables.column(table, name, "-1") for name in copies}},
            names=names,
        )

    def _graph_name(self) -> str:
        return f"'CUDA graph ' || {self.tables.column(PREFIX + 'GRAPH_TRACE', 'graphId', chr(39) * 2)}"

    def _of_copies(self, found: Columns) -> Columns:
        """Names for what the export has as numbers. The memory is that of the host's side, if it has one."""
        kind, source, target = found.pop("copyKind"), found.pop("srcKind"), found.pop("dstKind")
        from_host, to_host = (
            np.isin(kind, [number for number, name in DIRECTIONS.items() if name in side])
            for side in (FROM_HOST, TO_HOST)
        )
        side = np.where(from_host, source, np.where(to_host, target, source))
        return {
            "direction": self._named(kind, DIRECTIONS),
            "memory": self._named(side, MEMORIES),
            "bytes": found.pop("bytes"),
        }

    def _named(self, numbers: NDArray[Any], known: Mapping[int, str]) -> events.Codes:
        distinct, places = np.unique(numbers, return_inverse=True)
        codes = [self.tables.names.code(known.get(int(each), "unknown")) for each in distinct]
        return np.array(codes, np.int32)[places] if codes else np.empty(0, np.int32)

    def _gpus(self, work: Columns) -> NDArray[np.int32]:
        """The GPU that each process means by its device, as code. Under CUDA_VISIBLE_DEVICES every process
        may call its own one device 0, and so does every machine."""
        processes, ids = self.processes.encode(work["process"]).astype(np.int64), Coder()
        devices = ids.encode(work["device"])
        distinct, place = np.unique(processes << 32 | devices, return_inverse=True)
        used = [
            (self.processes.values[each >> 32], ids.values[each & 0xFFFFFFFF]) for each in distinct.tolist()
        ]
        known = self._listed_gpus()
        found = [known.get((process & (1 << PROCESS_BITS) - 1, device)) for process, device in used]
        machines = {process >> MACHINE_BITS for process, _ in used if process}
        if None in found:
            found = [device for _, device in used]
            shared = Counter((process >> MACHINE_BITS, device) for process, device in used if process)
            self.tables.warnings += [
                f"several processes use a device {device}, and the export does not tell whether it is one "
                "GPU; it is taken for one"
                for (_, device), count in shared.items()
                if count > 1
            ]
        names = [
            f"{gpu} (machine {process >> MACHINE_BITS})" if len(machines) > 1 else str(gpu)
            for gpu, (process, _) in zip(found, used, strict=True)
        ]
        return np.array([self.devices.code(name) for name in names], np.int32)[place]

    def _listed_gpus(self) -> dict[tuple[int, int], int]:
        table = "TARGET_INFO_CUDA_DEVICE"
        if not self.tables.has(table, "gpuId", "cudaId", "pid"):
            return {}
        listed = self.tables.database.execute(f"SELECT gpuId, cudaId, pid FROM {table}")
        return {(pid, cuda): gpu for gpu, cuda, pid in listed}

    def _own(self, found: Columns, calls: Columns) -> None:
        """Codes for the processes of work or of waits; NONE where the export does not have them."""
        raw = found["process"]
        found["process"] = np.where(raw <= 0, NONE, self.processes.encode(raw)).astype(np.int32)
        if not np.isin(np.unique(found["process"]), np.unique(calls["process"])).any():
            found["process"][:] = NONE

    def _waits(self) -> Columns:
        table = PREFIX + "SYNCHRONIZATION"
        found = self.tables.select(
            table,
            {
                "kind": self.tables.column(table, "syncType", "0"),
                "process": self.tables.column(table, "globalPid"),
                "correlation": self.tables.column(table, "correlationId", "-1"),
            },
        )
        found["process"] >>= PROCESS_BITS
        found["thread"] = np.full(len(found["start"]), NONE, np.int32)
        return found

    def _warn_of_lost_rows(self) -> None:
        """What nsys itself reports as a warning or an error: events that were dropped, above all."""
        if not self.tables.has("DIAGNOSTIC_EVENT", "severity", "text"):
            return
        said = "SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity IN (2, 3) LIMIT 5"
        self.tables.warnings += [
            f"nsys: {' '.join(str(text).split())}" for (text,) in self.tables.database.execute(said) if text
        ]


def _without_tail(label: str) -> str:
    """SQL for a name without what emit_nvtx appends: ", seq = 3, op_id = 14" and sizes behind it."""
    cases = (
        f"WHEN instr({label}, '{tail}') > 0 THEN substr({label}, 1, instr({label}, '{tail}') - 1)"
        for tail in (", seq = ", ", op_id = ")
    )
    return f"CASE {' '.join(cases)} ELSE {label} END"
