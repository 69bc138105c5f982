"""Notes which files a Python process loads, and which functions of some of them run: for harness.run.watch.

Every Python imports `sitecustomize` as it starts. In a boot that is thrown away this folder comes first on
PYTHONPATH, so that each process of an engine, and each that it starts, notes what it does in a file of its
own in the folder $BENCH_WATCH, a line of JSON each:

    ["process", pid, prefix]         of this process, and where its Python is installed
    ["module", name, file]           a module's code runs
    ["compiled", file]               a compiled file is loaded
    ["data", phase, file]            a file that was asked about is opened
    ["code", phase, file, line, name]  code that begins in that line of a file that was asked about runs
    ["traced", file, line, name]     torch makes such code, or what calls it, into a graph, which runs unseen
    ["failed", error]                noting failed here, so that more may have run than stands here

Standard library alone, of any Python from 3.8: an arm may have another interpreter than the harness.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes as long as all else here
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

TRACER = os.path.join("torch", "_dynamo", "symbolic_convert.py")  # an instance for each function in a graph
BOOTING, SERVING, OVER = 0, 1, 2  # the phases, as harness.run.watch writes them into the file `phase`


class Watcher:
    """What this process, and each that it forks, has noted so far."""

    def __init__(self, folder: str) -> None:
        import json
        import mmap
        import time

        self.encode = json.dumps
        with open(os.path.join(folder, "asked.json"), encoding="utf-8") as file:
            asked = json.load(file)
        self.files = frozenset(asked["code"])
        self.endings = tuple(asked["endings"])  # of files that are asked about wherever they are
        self.data = frozenset(asked["data"])
        self.data_names = frozenset(os.path.basename(each) for each in self.data)
        with open(os.path.join(folder, "phase"), "rb") as file:
            self.now = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)  # its one byte is the phase
        self.log = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}.jsonl")
        self.descriptor = -1  # of the log
        self.inode = 0
        self.paths: dict[str, str | None] = {}  # as code calls its file → as it was asked about, or None
        self.seen: set[tuple[str | int, ...]] = set()

    def note(self, *line: str | int) -> None:
        if line in self.seen:
            return
        self.seen.add(line)
        os.write(self._opened(), self.encode(line).encode("utf-8", "surrogateescape") + b"\n")

    def failed(self, error: Exception) -> None:
        """An engine must not fail because it is watched. Nor may what was missed pass for what never ran."""
        try:  # noqa: SIM105
            self.note("failed", repr(error))
        except Exception:  # the log can't be written: the process is then missing from what was seen
            pass

    def _opened(self) -> int:
        """The log. An engine that closes all descriptors may have given ours to another file."""
        try:
            if os.fstat(self.descriptor).st_ino == self.inode:
                return self.descriptor
        except OSError:
            pass
        self.descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.inode = os.fstat(self.descriptor).st_ino
        return self.descriptor

    def path(self, code: CodeType, frame: FrameType) -> str | None:
        """The file of some code, where it was asked about. A module's own code is the first of its file."""
        filename = code.co_filename
        real = os.path.realpath(filename) if filename[:1] != "<" else ""
        if real and code.co_name == "<module>":
            spec = frame.f_globals.get("__spec__")
            name = getattr(spec, "name", None) or frame.f_globals.get("__name__", "")
            self.note("module", str(name), real)
        asked = real in self.files or (real and real.endswith((TRACER, *self.endings)))
        path = self.paths[filename] = real if asked else None
        return path

    def began(self, code: CodeType, frame: FrameType) -> bool:
        """A code object begins, or goes on after a pause. Whether it is one that was asked about, and is not
        known to have run while requests are served."""
        try:
            path = self.paths[code.co_filename]
        except KeyError:
            path = self.path(code, frame)
        if path is None:
            return False
        if path.endswith(TRACER):
            traced = frame.f_locals.get("f_code") if code.co_name == "__init__" else None
            if traced is not None and (inside := os.path.realpath(traced.co_filename)) in self.files:
                self.note("traced", inside, traced.co_firstlineno, traced.co_name)
            return traced is not None
        return self.runs(code)

    def runs(self, code: CodeType) -> bool:
        path = self.paths.get(code.co_filename)
        phase = self.now[0]
        if path is None or phase == OVER:
            return False
        self.note("code", phase, path, code.co_firstlineno, code.co_name)
        return phase != SERVING

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "import":
            if given[1]:  # only a compiled module's import names its file
                self.note("compiled", os.path.realpath(given[1]))
        elif event == "ctypes.dlopen":
            if given[0] and os.path.isfile(given[0]):
                self.note("compiled", os.path.realpath(given[0]))
        elif event == "open" and isinstance(given[0], str) and os.path.basename(given[0]) in self.data_names:
            path = os.path.realpath(given[0])
            if path in self.data and self.now[0] != OVER:
                self.note("data", self.now[0], path)


def watch_by_monitoring(watcher: Watcher) -> None:
    """Python 3.12 and later: code that nobody asked about costs one call, once."""
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    events = monitoring.events
    tool = next(each for each in (4, 3, 5, 2, 1) if monitoring.get_tool(each) is None)
    monitoring.use_tool_id(tool, "bench")

    def began(code: CodeType, offset: int) -> object:
        try:
            if watcher.began(code, sys._getframe(1)):
                # A loop that began before requests came goes on while they are served.
                monitoring.set_local_events(tool, code, events.LINE)
                return None
        except Exception as error:
            watcher.failed(error)
        return monitoring.DISABLE

    def goes_on(code: CodeType, line: int) -> object:
        try:
            if watcher.runs(code):
                return None
        except Exception as error:
            watcher.failed(error)
        return monitoring.DISABLE

    monitoring.register_callback(tool, events.PY_START, began)
    monitoring.register_callback(tool, events.PY_RESUME, began)
    monitoring.register_callback(tool, events.LINE, goes_on)
    monitoring.set_events(tool, events.PY_START | events.PY_RESUME)


def watch_by_tracing(watcher: Watcher) -> None:
    """Before that: each call of a function costs a call of ours, in every thread that Python starts."""
    import threading

    def line(frame: FrameType, event: str, given: object) -> Any:
        try:
            return line if watcher.runs(frame.f_code) else None
        except Exception as error:
            watcher.failed(error)
            return None

    def call(frame: FrameType, event: str, given: object) -> Any:
        try:
            if watcher.now[0] == OVER:
                sys.settrace(None)
            elif watcher.began(frame.f_code, frame):
                return line
        except Exception as error:
            watcher.failed(error)
        return None

    threading.settrace(call)
    sys.settrace(call)


def begin(folder: str) -> None:
    watcher = Watcher(folder)
    prefix = os.path.realpath(sys.prefix)
    watcher.note("process", os.getpid(), prefix)
    os.register_at_fork(after_in_child=lambda: watcher.note("process", os.getpid(), prefix))
    for name, module in list(sys.modules.items()):  # what was there before, as by a .pth file
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and module is not sys.modules.get("sitecustomize"):
            watcher.note("module", name, os.path.realpath(file))

    def audit(event: str, given: tuple[Any, ...]) -> None:
        try:
            watcher.audit(event, given)
        except Exception as error:
            watcher.failed(error)

    sys.addaudithook(audit)
    if hasattr(sys, "monitoring"):
        watch_by_monitoring(watcher)
    else:
        watch_by_tracing(watcher)


def hidden() -> None:
    """Run the sitecustomize that this one stands in front of. This folder stays on the path: an engine may
    make the path of its processes of its own."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.realpath(__file__))
    spec = PathFinder.find_spec(
        "sitecustomize", [each for each in sys.path if os.path.realpath(each) != here]
    )
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if folder := os.environ.get("BENCH_WATCH"):
        try:  # noqa: SIM105
            begin(folder)
        except Exception:
            pass
    hidden()
