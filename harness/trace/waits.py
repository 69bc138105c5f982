"""Which calls of the host wait for a device, told by their names: those of every vendor, in one table."""

from __future__ import annotations

import numpy as np

from overlap_bench.harness.trace import events, pairs, rows
from overlap_bench.harness.trace.events import (
    CONTEXT,
    EVENT,
    NONE,
    STREAM,
    STREAM_WAITS,
    Calls,
    Coder,
    Synchronizations,
)
from overlap_bench.harness.trace.rows import Columns

LIKE_CUDA = {
    "StreamWaitEvent": STREAM_WAITS,
    "StreamWaitValue": STREAM_WAITS,
    "EventSynchronize": EVENT,
    "StreamSynchronize": STREAM,
    "DeviceSynchronize": CONTEXT,
    "CtxSynchronize": CONTEXT,
    "ThreadSynchronize": CONTEXT,
}
BELOW_SYCL = {
    "EnqueueEventsWait": STREAM_WAITS,
    "EventWait": EVENT,
    "EventsWait": EVENT,
    "QueueFinish": STREAM,
}
LIKE_CNRT = {
    "QueueWaitNotifier": STREAM_WAITS,
    "WaitNotifier": EVENT,
    "NotifierWait": EVENT,
    "QueueSync": STREAM,
    "SyncDevice": CONTEXT,
    "CtxSync": CONTEXT,
}
# By how the names of an API's calls begin: those that wait, and for what. Versions and variants of a call
# have more behind: cudaStreamSynchronize_ptsz_v7000, aclrtSynchronizeStreamWithTimeout.
APIS = {
    **dict.fromkeys(("cuda", "cu"), LIKE_CUDA),  # NVIDIA
    "hip": LIKE_CUDA,  # AMD
    "hsa_": {"signal_wait": EVENT, "amd_signal_wait": EVENT},
    "ze": {  # Intel, Level Zero
        "CommandListAppendWaitOnEvents": STREAM_WAITS,
        "EventHostSynchronize": EVENT,
        "FenceHostSynchronize": EVENT,
        "CommandQueueSynchronize": STREAM,
        "CommandListHostSynchronize": STREAM,
    },
    **dict.fromkeys(("ur", "pi"), BELOW_SYCL),  # Intel
    "sycl::": {"event::wait": EVENT, "queue::wait": STREAM},
    "cl": {  # OpenCL
        "EnqueueMarkerWithWaitList": STREAM_WAITS,
        "EnqueueBarrierWithWaitList": STREAM_WAITS,
        "WaitForEvents": EVENT,
        "Finish": STREAM,
    },
    "aclrt": {  # Huawei, CANN
        "StreamWaitEvent": STREAM_WAITS,
        "SynchronizeEvent": EVENT,
        "SynchronizeStream": STREAM,
        "SynchronizeDevice": CONTEXT,
    },
    "rt": LIKE_CUDA,  # below CANN
    **dict.fromkeys(("musa", "mu"), LIKE_CUDA),  # Moore Threads
    "mc": LIKE_CUDA,  # MetaX
    "tops": LIKE_CUDA,  # Enflame
    "syn": LIKE_CUDA,  # Habana
    **dict.fromkeys(("cnrt", "cn"), LIKE_CNRT),  # Cambricon
}
NAMED = 3  # calls of an unknown API that are named in a warning


def recorded(
    known: Calls, calls: Columns, waits: Columns, names: Coder
) -> tuple[Synchronizations, list[str]]:
    """Waits as a trace has them, or where it has none as `synchronizing` tells."""
    start = waits["start"]
    if not len(start):
        return synchronizing(known, names)
    call = pairs.of_waits(rows.ids(calls), rows.ids(waits))
    found = Synchronizations(
        start=start,
        end=waits["end"],
        kind=waits["kind"],
        blocks=waits["blocks"],
        called=np.where(call == NONE, start, events.take(known.start, call, NONE)),
        thread=events.take(known.thread, call, NONE),
        own=np.full(len(start), NONE, np.int64),
    )
    return found, []


def synchronizing(calls: Calls, names: Coder) -> tuple[Synchronizations, list[str]]:
    """Waits as the names of the calls tell of them, for a trace that has no rows of waits; and a warning
    where most calls are of an API whose waits are not known."""
    kinds = [kind_of_call(name) for name in names.values]
    kind_of = np.array([NONE if kind is None else names.code(kind) for kind in kinds], np.int32)
    kind = events.take(kind_of, calls.name.astype(np.int64), NONE)
    rows = np.flatnonzero(kind != NONE)
    found = Synchronizations(
        start=calls.start[rows],
        end=calls.end[rows],
        kind=kind[rows],
        blocks=kind[rows] != names.code(STREAM_WAITS),
        called=calls.start[rows],
        thread=calls.thread[rows],
        own=np.full(len(rows), NONE, np.int64),
    )
    return found, _unknown(calls, names)


def _unknown(calls: Calls, names: Coder) -> list[str]:
    counts = np.bincount(calls.name, minlength=len(names.values))
    strange = [code for code in np.flatnonzero(counts).tolist() if _in_api(names.values[code]) is None]
    if 2 * sum(counts[strange]) <= len(calls.name):
        return []
    said = ", ".join(names.values[code] for code in sorted(strange, key=lambda code: -counts[code])[:NAMED])
    return [
        f"which calls of this API wait for the device is not known ({said}): a thread that waits in one "
        "counts as host wait, and Synchronizations lacks it"
    ]


def kind_of_call(name: str) -> str | None:
    """What a call of that name waits for: "cudaStreamSynchronize_v3020" is "stream"."""
    found = _in_api(name)
    if found is None:
        return None
    api, rest = found
    return next((kind for words, kind in APIS[api].items() if rest.startswith(words)), None)


def _in_api(name: str) -> tuple[str, str] | None:
    """How the names of the call's API begin, and the rest of its name; None of an unknown API. What a
    profiler puts in front of a name goes: "AscendCL@aclrtMalloc", "sycl::_V1::queue::wait"."""
    bare = name.rpartition("@")[2].replace("::_V1::", "::")
    for api in APIS:
        rest = bare.removeprefix(api)
        if rest != bare and (not api[-1].isalpha() or rest[:1].isupper()):
            return api, rest
    return None
