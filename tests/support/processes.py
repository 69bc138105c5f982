"""What tests ask of processes: that a killed one ends, that a pipe has no reader, that a death is noticed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.support.bench_command import wait_until


def ends(pid: int) -> bool:
    """A killed process may take a moment to go, and is a zombie where nobody reaps it."""
    with suppress(psutil.NoSuchProcess):
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


@contextmanager
def nobody_reads() -> Iterator[int]:
    """A pipe whose reader is gone, as behind `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
