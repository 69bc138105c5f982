"""What a thousand connections need of the kernel: descriptors, and a stamp of when bytes arrived."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
TIMESPEC = struct.Struct("@ll")
STAMP_BYTES = socket.CMSG_SPACE(TIMESPEC.size)  # of control messages, to be asked for in recvmsg


def allow_many() -> None:
    """Let this process have as many open files as the system allows: by default a thousand sockets are more
    than that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stamp_arrivals(which: socket.socket) -> None:
    """Have the kernel say when bytes arrived, where it can: Linux does."""
    with suppress(OSError):
        which.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def arrival_ns(control: Sequence[tuple[int, int, bytes]]) -> int:
    """When the last byte of what recvmsg gave arrived, by CLOCK_REALTIME; -1 where the kernel did not say.

    `control` is recvmsg's. No other message can be in it: nothing else was asked for.
    """
    if not control:
        return -1
    seconds, rest = TIMESPEC.unpack(control[0][2])
    stamp: int = seconds * 1_000_000_000 + rest
    return stamp
