"""The processes of a run: started, watched for their end, and ended with all their descendants.

A child gets a session of its own, so that Ctrl-C in a terminal reaches the harness alone, which then ends
the rest; if the harness is killed, children that asked for it (PDEATHSIG) follow.

Their sockets, logs and trees of refs lie in a room: a folder that is locked by whoever made it, so that the
next run can tell those whose maker was killed, and removes them. And what ends a run from outside: it goes
through typer, which would swallow it and what it carries.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import TERMINATE_S, is_stopped, with_below

PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
ROUNDS = 10  # of ending orphans: more than a tree of processes has levels
GRACE_S = 5.0  # for a process that was asked to stop, before it is killed
PREFIX = "bench-"
LOCK = "lock"
OURS = "a folder of bench's, to be removed once nobody holds this lock\n"  # else it is somebody's own
SOCKET_PATH = 60  # characters of a folder for sockets: the kernel allows 107 for a whole path
ENDING = (signal.SIGTERM, signal.SIGHUP)  # a job that is cancelled, a terminal that is closed


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
        code = self.code if self.popen is not None else _zombie_code(self.pid)
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
    with postponed():
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


@contextmanager
def room(where: str | None = None) -> Iterator[Path]:
    """A folder in `where` (the temporary folder), gone when this is left; abandoned ones there go first."""
    where = where or tempfile.gettempdir()
    remove_abandoned(Path(where))
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    try:
        unnamed = made / "lock.new"
        with unnamed.open("w") as lock:  # no child inherits it: a device that outlives its run holds no lock
            lock.write(OURS)
            lock.flush()
            with suppress(OSError):  # of a file system without locks: then nobody may find it
                fcntl.flock(lock, fcntl.LOCK_EX)
                unnamed.rename(made / LOCK)  # from now on it can be found, and is locked already
            yield made
    finally:
        with undisturbed():
            _remove(made)


def for_sockets() -> AbstractContextManager[Path]:
    """A room whose path is short enough to be followed by a socket's name."""
    return room(None if len(tempfile.gettempdir()) < SOCKET_PATH else "/tmp")


def remove_abandoned(where: Path) -> None:
    """Every room of this user in `where` that nobody holds."""
    for lock in where.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid() or not lock.is_file():
                continue
            with lock.open(errors="replace") as held:
                if held.read(len(OURS)) != OURS:
                    continue
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.parent)
        except OSError:  # held, or gone meanwhile
            continue


def _remove(made: Path) -> None:
    """The lock goes last, once all else is gone: by it what a kill leaves of this is found again."""
    with suppress(OSError):
        for each in made.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != LOCK:
                each.unlink()
        if not [each for each in made.iterdir() if each.name != LOCK]:
            shutil.rmtree(made, ignore_errors=True)


class Ended(KeyboardInterrupt):
    """One of `ENDING`. Whatever cleans up after a Ctrl-C does so after these too."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__()
        self.by = by


class Interrupted(Exception):
    """Ctrl-C, or one of `ENDING`; the message says what is kept."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def interruptible() -> Iterator[None]:
    """A Ctrl-C inside is raised as Interrupted, and so is each of `ENDING`, unless it is ignored, as SIGHUP
    is under `nohup`."""
    taken = [each for each in ENDING if signal.getsignal(each) == signal.SIG_DFL]
    try:
        with _handled(taken, _end):
            yield
    except KeyboardInterrupt as error:
        raise _interrupted(error) from error
    except OSError as error:  # a closed terminal takes no last line
        if isinstance(error.__context__, Ended):
            raise _interrupted(error.__context__) from error
        raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, a Ctrl-C and each of `ENDING` are ignored, so that no clean-up stops half way."""
    with _handled((signal.SIGINT, *ENDING), signal.SIG_IGN):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, a Ctrl-C and each of `ENDING` waits for the end of this. For what must not be left half done, a
    process that runs and that nobody knows of yet; a signal that is blocked, or ignored, would be so in the
    process too."""
    came: list[int] = []
    taken = [each for each in (signal.SIGINT, *ENDING) if signal.getsignal(each) != signal.SIG_IGN]
    try:
        with _handled(taken, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.Signals(came[0]))


@contextmanager
def _handled(
    which: Iterable[signal.Signals], by: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Inside, these signals are handled so; only in the main thread may a handler be set."""
    main = threading.current_thread() is threading.main_thread()
    previous = {each: signal.signal(each, by) for each in which if main}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def notes(error: BaseException) -> list[str]:
    """What was added to an error on its way: how to go on, and the like."""
    return list(getattr(error, "__notes__", []))


def _interrupted(error: KeyboardInterrupt) -> Interrupted:
    by = error.by if isinstance(error, Ended) else signal.SIGINT
    said = "interrupted" if by == signal.SIGINT else f"ended by {by.name}"
    return Interrupted("; ".join([said, *notes(error)]), 128 + by)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(signal.Signals(number))
