"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TERMINATE_S = 4.0  # from SIGTERM to SIGKILL: less than the 5 s that an engine has for its end
ORPHANED = signal.SIGRTMIN  # a signal that no engine's processes use for anything else
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be


def signal_at_parents_end(which: signal.Signals) -> None:
    """Have the kernel send this process a signal once its parent is gone. The "parent" is the thread that
    started it: the signal comes when that thread ends."""
    _libc.prctl(PR_SET_PDEATHSIG, which, 0, 0, 0)


def die_with_parent(parent: int, with_all: bool = False) -> None:
    """SIGKILL for this process when its parent goes, however it goes; exit where it is gone already.

    `with_all`: also for what it started, by a handler. A handler runs only once the main thread is back in
    Python, which a busy host soon is; one that sleeps in `pump` watches its parent there, as a signal that
    comes just before a thread falls asleep wakes nothing.
    """
    if with_all:
        signal.signal(ORPHANED, lambda *_: end_session())
    signal_at_parents_end(ORPHANED if with_all else signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def skip_teardown() -> None:
    """Have this process end without its interpreter being taken down: that can hang, and takes seconds where
    much was imported. Whatever it has to close is closed before."""
    atexit.register(os._exit, 0)


def state(pid: int) -> str:
    """As the kernel names it (proc(5)): "T" stopped, "Z" and "X" ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X"


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped that process, as by SIGSTOP."""
    return state(pid) == "T"


def with_below(pids: Collection[int]) -> list[int]:
    """These processes but those that are gone, and all that they started: each after its parent."""
    started: dict[int, list[int]] = {}
    for pid in (int(each) for each in os.listdir("/proc") if each.isdecimal()):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            started.setdefault(parent, []).append(pid)
    there = {pid for each in started.values() for pid in each}
    found = [pid for pid in dict.fromkeys(pids) if pid in there]
    for pid in found:
        found += [each for each in started.get(pid, ()) if each not in pids]
    return found


def end_session() -> None:
    """End this process, and with it what it started: vLLM's core and its workers, and what a server's
    wrapper started, do not follow a killed parent by themselves, and would keep the card's memory. SIGTERM
    first, so that a server can end what is not below it, such as a container. A harness gives each host a
    session."""
    if os.getsid(0) == os.getpid():
        _signal(session(), signal.SIGTERM)
        _signal(session(), signal.SIGCONT)  # a server that stands still between its turns takes no other
        deadline = time.monotonic() + TERMINATE_S
        while _left() and time.monotonic() < deadline:
            time.sleep(0.02)
        while (left := _left()) and time.monotonic() < deadline + TERMINATE_S:
            _signal(left, signal.SIGKILL)
            time.sleep(0.02)
    os._exit(1)


def _left() -> list[int]:
    """`session`, without its own children that have ended: whoever waits for one of these waits no more."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return session()


def session() -> list[int]:
    """The other processes of the session that this one leads."""
    own, found = os.getpid(), []
    for pid in (int(each) for each in os.listdir("/proc") if each.isdecimal()):
        with suppress(OSError):
            if pid != own and os.getsid(pid) == own:
                found.append(pid)
    return found


def _signal(pids: Sequence[int], which: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, which)
