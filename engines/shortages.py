"""What a machine may run out of, told as what it is and what helps: the bare errors name neither."""

from __future__ import annotations

import errno
import re

FILES = (errno.EMFILE, errno.ENFILE)


def shortage(error: BaseException) -> str:
    """What was used up where `error` was raised, in a line; "" where it is another error."""
    number = getattr(error, "errno", None)  # ZeroMQ's errors have one too, and are no OSError
    if number in FILES:
        return f"too many files are open; raise the limit (ulimit -n), or ask for less at once: {error}"
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    # Of CPython's own, where it had no memory even to say so.
    silent = isinstance(error, SystemError) and re.search(r"without (setting an )?exception", str(error))
    if isinstance(error, MemoryError) or number == errno.ENOMEM or unmapped or silent:
        said = str(error) or type(error).__name__
        return (
            f"memory is used up; end other processes, raise their limit (ulimit -v), or ask for less: {said}"
        )
    return ""
