"""What the kernel is asked for, so that a thread that sleeps runs again when it should."""

from __future__ import annotations

import ctypes
import platform

PR_SET_TIMERSLACK = 29
SLICE_NS = 100_000
SCHED_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr


class SchedAttr(ctypes.Structure):
    """struct sched_attr of linux/sched/types.h, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def ask_for_exact_timers() -> None:
    """Timer slack of this thread as near to 0 as can be (by default 50 us: every sleep ends late)."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def ask_for_short_slice() -> int:
    """A short slice under the normal policy (EEVDF: a thread that wakes is run soon, for the same share of
    the core); what was granted, ns, or 0. Older kernels take the call and ignore it, so the answer is read
    back."""
    if platform.machine() not in SCHED_CALLS:
        return 0
    libc = ctypes.CDLL(None)
    set_call, get_call = SCHED_CALLS[platform.machine()]
    size = ctypes.sizeof(SchedAttr)
    attributes = SchedAttr()
    if libc.syscall(get_call, 0, ctypes.byref(attributes), size, 0) != 0:
        return 0
    attributes.runtime = SLICE_NS
    if libc.syscall(set_call, 0, ctypes.byref(attributes), 0) != 0:
        return 0
    libc.syscall(get_call, 0, ctypes.byref(attributes), size, 0)
    return int(attributes.runtime)
