"""The device process as its host holds it: start, requests, how it died, end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from mmap import mmap
from multiprocessing import Pipe
from typing import Any

import msgspec

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.devices.base import DeviceLost
from overlap_bench.engines.devices.emulated.commands import (
    LAST_WORDS,
    Boot,
    Booted,
    FromDevice,
    Load,
    Loaded,
    Refused,
)

_PROCESS = "overlap_bench.engines.devices.emulated.process"
_PATIENCE_S = 2.0  # for a process that was asked to end; then it is killed

# One thread of compute, whatever the caller's settings. The allocator keeps what it has freed, as a device's
# caching allocator does; handing every large temporary back to the kernel costs 2 to 5 times its compute.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(16 << 20),
}


class Child:
    """The device process. Threads may call `lost` at any time; `request` one at a time."""

    def __init__(self, boot: dict[str, Any], page: mmap, inherited: list[int]) -> None:
        self._page = page
        self._closed = False
        self._control, theirs = Pipe()
        with theirs:
            config = Boot(
                control=theirs.fileno(),
                parent=os.getpid(),
                # The kernel's "parent" is the thread that started the process: the signal would come when
                # that thread ends, so only the main one, which ends last, may bind the device's life to it.
                # Without it the process ends when it next looks at its pipes.
                die_with_parent=threading.current_thread() is threading.main_thread(),
                **boot,
            )
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    _PROCESS,
                    msgspec.json.encode(config).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to results
                pass_fds=[*inherited, theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _search_path()},
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def booted(self) -> int:
        """Wait until it is up; its resident bytes then."""
        answer = self._receive()
        assert isinstance(answer, Booted)
        return answer.resident

    def request(self, message: Load) -> Loaded:
        """Ask and wait. Raises what the device process raised, as BadSetting or EngineError; DeviceLost."""
        try:
            self._control.send_bytes(msgspec.msgpack.encode(message))
        except OSError as error:
            raise self.lost() from error
        answer = self._receive()
        if isinstance(answer, Refused):
            raised = (BadSetting if answer.usage else EngineError)(answer.message)
            raised.add_note(f"In the device process:\n{answer.traceback}")
            raise raised
        assert isinstance(answer, Loaded)
        return answer

    def lost(self) -> DeviceLost:
        """What to raise where the device was waited for in vain."""
        if self._closed:
            return DeviceLost("the emulated device is closed")
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return DeviceLost(f"the emulated device's process (pid {self.pid}) does not answer")
        words = self._page[LAST_WORDS:].partition(b"\0")[0].decode(errors="replace")
        why, _, story = words.partition("\n")
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        lost = DeviceLost(
            f"the emulated device's process (pid {self.pid}) died ({how}){': ' if why else ''}{why}"
        )
        if story:
            lost.add_note(f"In the device process:\n{story}")
        return lost

    def close(self) -> None:
        """End the process: it leaves when it sees the channel closed, and is killed if it does not."""
        self._closed = True
        self._control.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> FromDevice:
        try:
            body = self._control.recv_bytes()
        except (EOFError, OSError) as error:
            raise self.lost() from error
        answer: FromDevice = msgspec.msgpack.decode(body, type=FromDevice)
        return answer


def _search_path() -> str:
    """Where this process finds its modules, so that a ModuleSpec means the same over there."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
