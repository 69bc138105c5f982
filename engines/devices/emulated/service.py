"""Inside the device process: the module's life, and the control channel that asks for it."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.devices.base import Module, ModuleSpec
from overlap_bench.engines.devices.emulated.commands import (
    LAST_WORDS,
    MAX_PROGRAMS,
    PAGE_BYTES,
    WORK_BYTES,
    Boot,
    Booted,
    FromDevice,
    Load,
    Loaded,
    Refused,
)
from overlap_bench.engines.devices.emulated.executor import HostGone, make_executor, unpaced
from overlap_bench.engines.devices.emulated.memory import bytes_of
from overlap_bench.engines.devices.loading import build, one_line, settle_garbage
from overlap_bench.engines.machine import known, move_threads
from overlap_bench.engines.timers import ask_for_short_slice


class Service:
    """Boots, then serves until the host is gone."""

    def __init__(self, boot: Boot) -> None:
        torch.set_num_threads(1)
        self._all_cores = os.sched_getaffinity(0)
        self._core = boot.core
        self._pace = boot.pace
        self._control = Connection(boot.control)
        self._page = mmap(boot.page, PAGE_BYTES)
        self._executor = make_executor(
            page=self._page,
            work=mmap(boot.work, WORK_BYTES),
            arena=mmap(boot.arena, boot.arena_bytes),
            pipes=boot.pipes,
            wakeups=boot.wakeups,
            control=boot.control,
            chaos=boot.chaos,
            paced=boot.pace is not None,
        )
        self._module: Module | None = None
        self._next_buffer = 0

    def run(self) -> None:
        if self._pace is not None:
            ask_for_short_slice()  # who sleeps through a pace must run again at its end
        settle_garbage()
        try:
            self._send(Booted(resident=known(_resident_bytes, 0)))
            with torch.inference_mode():
                self._executor.serve(self._answer)
        except (HostGone, EOFError, BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            # The host is in no call that could be answered. As after a CUDA error, the device is lost, and
            # whoever waits for it next is told why: one line, and the traceback after it.
            words = f"{one_line(error)}\n{traceback.format_exc()}".encode()[: PAGE_BYTES - LAST_WORDS - 1]
            self._page[LAST_WORDS : LAST_WORDS + len(words)] = words
            sys.exit(1)

    # -- control channel -----------------------------------------------------------------------------------

    def _answer(self) -> None:
        request = msgspec.msgpack.decode(self._control.recv_bytes(), type=Load)
        answer: FromDevice
        gc.disable()  # a build imports and makes thousands of objects that stay
        try:
            answer = self._load(request)
        except Exception as error:  # it is the host's to raise, and goes there
            answer = Refused(
                usage=isinstance(error, BadSetting),
                message=one_line(error),
                traceback=traceback.format_exc(),
            )
        settle_garbage()
        gc.enable()
        self._send(answer)

    def _send(self, message: FromDevice) -> None:
        self._control.send_bytes(msgspec.msgpack.encode(message))

    # -- modules -------------------------------------------------------------------------------------------

    def _load(self, request: Load) -> Loaded:
        """Build the new module once the old one is gone: both together might not fit.

        On any core: two arms boot side by side, and would take turns on the core that each uses in a round.
        """
        os.sched_setaffinity(0, self._all_cores)
        self._module = None
        self._executor.use({}, {}, frozenset(), unpaced)
        module = build(ModuleSpec(request.build, request.arguments), torch.device("cpu"))
        if len(module.programs) > MAX_PROGRAMS:
            raise BadSetting(f"{len(module.programs)} programs; the emulated device holds {MAX_PROGRAMS}")
        buffers: dict[str, tuple[int, int]] = {}
        memory: dict[int, memoryview] = {}
        for name, tensor in module.buffers.items():
            # Ids go on from module to module: a handle on an old buffer finds nothing, not another buffer.
            buffers[name] = (self._next_buffer, tensor.nbytes)
            memory[self._next_buffer] = bytes_of(tensor)
            self._next_buffer += 1
        programs: dict[str, int] = {name: index for index, name in enumerate(module.programs)}
        runs: dict[int, Callable[..., None]] = {programs[name]: run for name, run in module.programs.items()}
        leaves = frozenset(each for each in module.root.modules() if not any(True for _ in each.children()))
        names, pace = list(programs), self._pace

        def pace_ns(program: int, arguments: tuple[int, ...]) -> int:
            return pace.ns_of(module.sizes(names[program], *arguments)) if pace else 0

        self._executor.use(memory, runs, leaves, pace_ns)
        self._module = module
        if self._core is not None:
            move_threads({self._core})  # those too that a module started, to talk to another device
        return Loaded(buffers=buffers, programs=programs, facts=module.facts)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
