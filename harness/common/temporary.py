"""Folders of a run outside of its results: sockets, trees of refs. Each is locked by whoever made it, so that
the next run can tell those whose maker was killed, and removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from overlap_bench.harness.common.signals import undisturbed

PREFIX = "bench-"
LOCK, UNNAMED = "lock", "lock.new"
OURS = "a folder of bench's, to be removed once nobody holds this lock\n"  # else it is somebody's own
BEING_MADE_S = 60  # a lock without its name that is older was left by a kill
SOCKET_PATH = 60  # characters of a folder for sockets: the kernel allows 107 for a whole path


@contextmanager
def room(where: str | None = None) -> Iterator[Path]:
    """A folder in `where` (the temporary folder), gone when this is left; abandoned ones there go first."""
    where = where or tempfile.gettempdir()
    remove_abandoned(Path(where))
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    try:
        unnamed = made / UNNAMED
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
    for lock in (each for name in (LOCK, UNNAMED) for each in where.glob(f"{PREFIX}*/{name}")):
        try:
            if lock.stat().st_uid != os.getuid() or not lock.is_file():
                continue
            if lock.name != LOCK and time.time() - lock.stat().st_mtime < BEING_MADE_S:
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
