"""What is said where the machine has no more of something."""

import errno
import os

import pytest
import zmq

from overlap_bench.engines.shortages import shortage

FILES, MEMORY = (
    "too many files are open; raise the limit (ulimit -n)",
    "memory is used up; end other processes",
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a/file"), FILES),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), FILES),
        (zmq.ZMQError(errno.EMFILE), FILES),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MEMORY),
        (MemoryError(), MEMORY),
        (ImportError("lib.so: failed to map segment from shared object"), MEMORY),
        (SystemError("error return without exception set"), MEMORY),
        (SystemError("<function f> returned NULL without setting an exception"), MEMORY),
    ],
)
def test_a_shortage_is_told_with_what_helps(error: Exception, said: str) -> None:
    assert shortage(error).startswith(said)
    assert shortage(error).endswith(str(error) or "MemoryError")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "no"), ImportError("no such"), ValueError("errno"), SystemError("bad argument")],
)
def test_another_error_is_no_shortage(error: Exception) -> None:
    assert shortage(error) == ""
