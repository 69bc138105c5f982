"""The folders of runs: created, locked for one process, removed where they hold nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.store.files import StoreError, WriteFailed, create_within, prepare, reason_of
from overlap_bench.harness.store.tables import finished_blocks


def create(results: Path, name: str, now: datetime) -> Path:
    """A new, empty folder under `results`, for a run, or for another kind of result, whose `name` begins with
    its kind. A stranger's manifest may bring the name: it can't lead elsewhere. Raises BadSetting where that
    can't be written: nothing was measured yet."""
    prepare(results)
    try:
        return create_within(results, name, now)
    except WriteFailed as error:
        raise api.BadSetting(f"{error}; choose another --out") from error


def discard_if_empty(folder: Path) -> bool:
    """Remove a run folder that holds no finished block; whether it did so."""
    if finished_blocks(folder):
        return False
    discard(folder)
    return True


def discard(folder: Path) -> None:
    """Remove a folder, whatever it holds."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A run's folder, locked for this process: two that measured its blocks at the same time would mix them.
    Raises StoreError where another one has it. On a file system without such locks nothing is locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"can't open {folder}: {reason_of(error)}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{folder} is being measured by another bench: wait for its end") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
