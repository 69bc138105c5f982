"""Opens a trace, whichever of the formats it has; the content decides, not the name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace import chrome_events, chrome_trace, events, nsys_export, times
from overlap_bench.harness.trace.events import Trace

REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")


def read(path: Path, progress: events.Progress = lambda line: None) -> Trace:
    """The trace in columns; `progress` gets a line now and then. Raises BadFile, one line, for a file that
    is missing, empty, cut short, of no known format, or without anything that a device did (an export of nsys
    that has ranges is read all the same, with a warning)."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
        if not start:
            raise BadFile(f"{path} is empty")
        if nsys_export.MAGIC.startswith(start[: len(nsys_export.MAGIC)]):
            return _checked(nsys_export.read(path, progress))
        if chrome_events.begins(start):
            return _checked(chrome_trace.read(path, progress))
    except OSError as error:
        raise BadFile(f"cannot read the trace {path}: {error.strerror}") from None
    if path.suffix in REPORTS:
        raise BadFile(
            f"{path} is a report of nsys; export it first: nsys export --type sqlite "
            f"--output {path.with_suffix('.sqlite').name} {path.name}"
        )
    raise BadFile(
        f"{path} is neither an SQLite export of nsys (nsys export --type sqlite) nor a Chrome trace (JSON, "
        "plain or gzipped)"
    )


def _checked(trace: Trace) -> Trace:
    """The trace with names that can be shown, and a warning where its times are of clocks that differ."""
    first, last = trace.span()
    if last - first > times.DAY:
        apart = (
            f"the trace spans {(last - first) / times.DAY:,.1f} days: some of its processes have another "
            "clock. Windows, idle time and gaps are wrong, the length of each event is not"
        )
        trace = replace(trace, warnings=(*trace.warnings, apart))
    return events.readable(trace)
