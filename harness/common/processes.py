"""The processes of a run: started, watched for their end, and ended with all their descendants.

A child gets a session of its own, so that Ctrl-C in a terminal reaches the harness alone, which then ends
the rest; if the harness is killed, children that asked for it (PDEATHSIG) follow.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import TERMINATE_S, is_stopped, with_below
from overlap_bench.harness.common.signals import undisturbed

PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
ROUNDS = 10  # of ending orphans: more than a tree of processes has levels
GRACE_S = 5.0  # for a process that was asked to stop, before it is killed


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A process of the run by its role ("load generator", "device process of before"). `popen`: where the
    harness started it itself; `log` is then the file of its stdout and stderr."""

    role: str
    pid: int
    pidfd: int  # readable once the process has ended
    popen: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def ended(self) -> bool:
        if self.popen is not None:
            return self.popen.poll() is not None
        return bool(select.select([self.pidfd], [], [], 0)[0])

    @property
    def code(self) -> int | None:
        """How it ended where the harness started it: its status, negative for a signal."""
        return self.popen.returncode if self.popen is not None else None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it; known of what the harness started itself."""
        return (self.code or 0) < 0

    def obituary(self) -> str:
        """How it ended, for a message: which process, and by which signal or status as far as is known."""
        code = self.popen.returncode if self.popen is not None else _zombie_code(self.pid)
        who = f"the {self.role} (pid {self.pid})"
        if code is None:
            return f"{who} died"
        if code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended with status {code}"

    def last_words(self) -> str:
        """The last line it printed, "" where there is none."""
        lines = self.output().strip().splitlines()
        return lines[-1].strip() if lines else ""

    def output(self) -> str:
        """All it printed."""
        return self.log.read_text("utf-8", "replace") if self.log is not None and self.log.exists() else ""


def start(role: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start a process. Raises OSError where the command can't be run."""
    with log.open("wb") as sink:
        popen = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    return Child(role, popen.pid, os.pidfd_open(popen.pid), popen, log)


def adopt(role: str, pid: int) -> Child | None:
    """Watch a process that a child started; None where it has ended already."""
    try:
        return Child(role, pid, os.pidfd_open(pid))
    except ProcessLookupError:
        return None


def stopped(children: Sequence[Child], parked: Collection[int] = ()) -> str:
    """Which of them, or of what they started, is stopped, as by SIGSTOP, for a message; "" where none is.
    `parked`: processes that stand still between their turns, with all that they started."""
    roles = {child.pid: child.role for child in children}
    still = with_below(parked)
    for child in children:
        for pid in with_below([child.pid]):
            if pid not in still and is_stopped(pid):
                below = f"{' '.join(_words(pid)[1:3])} of the {child.role}"
                return f"{f'the {roles[pid]}' if pid in roles else below} (pid {pid})"
    return ""


def _words(pid: int) -> list[str]:
    """The words of its command line; none where it has ended."""
    line: bytes = known(Path(f"/proc/{pid}/cmdline").read_bytes, b"")
    return line.decode(errors="replace").rstrip("\0").split("\0")


def wait(children: Sequence[Child], seconds: float | None) -> bool:
    """Whether all of them ended within `seconds` (None: however long it takes)."""
    deadline = None if seconds is None else time.monotonic() + seconds
    for child in children:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([child.pidfd], [], [], left)[0]:
            return False
    return True


def end(children: Sequence[Child], grace: float = 0.0) -> list[Child]:
    """Give them `grace` seconds to end, then kill what the harness started, ask the rest and every descendant
    to end, and kill what does not. Returns, when all are gone, those of `children` that outlasted the grace.
    Asking lets a server end what is not its descendant, such as a container. A Ctrl-C during the grace
    leaves all of them to whoever calls this again."""
    family = _descendants(children)
    _signal([*children, *family], signal.SIGCONT)  # what stands still, as between turns, can't end
    wait(children, grace)
    late = [child for child in children if not child.ended()]
    with undisturbed():
        started = [child for child in children if child.popen is not None]
        others = [*(child for child in children if child.popen is None), *family]
        _signal(started, signal.SIGKILL)
        _signal(others, signal.SIGTERM)
        wait(others, TERMINATE_S)
        _signal(others, signal.SIGKILL)
        wait([*children, *family], GRACE_S)
        for child in started:
            if child.popen is not None:
                child.popen.wait()
        for child in [*children, *family]:
            os.close(child.pidfd)
    return late


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within, a descendant that loses its parent becomes a child of this process, not of init."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def below() -> frozenset[int]:
    """The processes that this one started, and theirs."""
    return frozenset(with_below([os.getpid()])) - {os.getpid()}


def end_orphans(others: frozenset[int], grace: float) -> None:
    """Give the descendants of this process that are not `others` `grace` seconds to end, then kill them, and
    what that orphans. All are reaped."""
    for _ in range(ROUNDS):
        new = below() - others
        if not new:
            return
        found = [child for child in (adopt("descendant", pid) for pid in new) if child is not None]
        wait(found, grace)
        _signal(found, signal.SIGKILL)
        wait(found, GRACE_S)
        for child in found:
            os.close(child.pidfd)
        for pid in new:
            with suppress(ChildProcessError):  # its parent reaps it
                os.waitpid(pid, os.WNOHANG)
        grace = 0.0


def _descendants(children: Sequence[Child]) -> list[Child]:
    """Below a child, or in its session, which a process whose parent is gone is still in."""
    sessions = {child.pid for child in children if child.popen is not None}
    below = set(with_below([child.pid for child in children]))
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) in sessions:
                below.add(pid)
    found = (adopt("descendant", pid) for pid in below - {child.pid for child in children})
    return [each for each in found if each is not None]


def _signal(children: Sequence[Child], which: signal.Signals) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, which)


def _zombie_code(pid: int) -> int | None:
    """Exit status of an ended process that its parent has not reaped yet, negative for a signal."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may be no text
    except OSError:
        return None
    if fields[0] != b"Z":
        return None
    status = int(fields[-1])
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
