"""Calls that wait, by the names of every vendor."""

from pathlib import Path

import pytest

from overlap_bench.harness.trace import trace_file, waits
from overlap_bench.harness.trace.events import CONTEXT, EVENT, STREAM, STREAM_WAITS
from tests.support.traces import complete, launched, part, values, written

NAMES = {
    STREAM: """cudaStreamSynchronize_v3020 cudaStreamSynchronize_ptsz_v7000 cuStreamSynchronize
        hipStreamSynchronize zeCommandQueueSynchronize zeCommandListHostSynchronize urQueueFinish
        piQueueFinish clFinish aclrtSynchronizeStream aclrtSynchronizeStreamWithTimeout
        AscendCL@aclrtSynchronizeStream
        rtStreamSynchronize musaStreamSynchronize muStreamSynchronize mcStreamSynchronize
        topsStreamSynchronize synStreamSynchronize cnrtQueueSync sycl::_V1::queue::wait_and_throw""",
    EVENT: """cudaEventSynchronize cuEventSynchronize hipEventSynchronize zeEventHostSynchronize
        zeFenceHostSynchronize urEventWait piEventsWait clWaitForEvents hsa_signal_wait_scacquire
        aclrtSynchronizeEvent musaEventSynchronize cnrtWaitNotifier sycl::event::wait""",
    CONTEXT: """cudaDeviceSynchronize cudaThreadSynchronize cuCtxSynchronize hipDeviceSynchronize
        hipCtxSynchronize aclrtSynchronizeDevice musaDeviceSynchronize muCtxSynchronize cnrtSyncDevice""",
    STREAM_WAITS: """cudaStreamWaitEvent cuStreamWaitEvent cuStreamWaitValue32 hipStreamWaitEvent
        hipStreamWaitValue64 zeCommandListAppendWaitOnEvents urEnqueueEventsWaitWithBarrier
        clEnqueueBarrierWithWaitList aclrtStreamWaitEvent musaStreamWaitEvent cnrtQueueWaitNotifier""",
    None: """cudaLaunchKernel cuLaunchKernel hipLaunchKernel hipMemcpyAsync zeCommandListAppendLaunchKernel
        urEnqueueKernelLaunch aclrtLaunchKernel cublasStreamSynchronize StreamSynchronize cudaEventRecord zero
        hipStreamCreate""",
}


def test_a_call_waits_for_what_its_name_says() -> None:
    for kind, names in NAMES.items():
        assert {waits.kind_of_call(name) for name in names.split()} == {kind}, kind


@pytest.mark.parametrize(
    ("launch", "wait", "category"),
    [
        ("hipLaunchKernel", "hipStreamSynchronize", "cuda_runtime"),
        ("hipLaunchKernel", "hipStreamSynchronize", "hip_runtime"),
        ("urEnqueueKernelLaunch", "urQueueFinish", "xpu_runtime"),
        ("aclrtLaunchKernel", "aclrtSynchronizeStream", "privateuse1_runtime"),
        ("musaLaunchKernel", "musaStreamSynchronize", "musa_driver"),
        ("cudaLaunchKernel", "cudaStreamSynchronize", "Runtime"),
    ],
)
def test_idle_time_is_split_by_any_vendors_names(
    tmp_path: Path, launch: str, wait: str, category: str
) -> None:
    events = []
    for n in range(5):
        pair = launched(1000.0 + 1000 * n, n + 1)
        pair[0] |= {"name": launch, "cat": category}
        events += [*pair, complete(wait, category, 1015.0 + 1000 * n, 1900.0 + 1000 * n, (9, 9))]
    trace = trace_file.read(written(tmp_path / "trace.json", events))
    row = values(part(trace, "synchronizations"), "stream", "(no range)")
    assert (row["count"], row["total_ms"]) == (5, pytest.approx(5 * 0.885))
    device = values(part(trace, "devices"), "0")
    assert device["sync_wait_ms"] == pytest.approx(4 * 0.82)
    assert trace.warnings == ()


def test_an_api_whose_waits_are_not_known_is_named(tmp_path: Path) -> None:
    events = [event for n in range(5) for event in launched(1000.0 + 100 * n, n + 1)]
    for each in events:
        each["name"] = str(each["name"]).replace("cuda", "fooX")
    trace = trace_file.read(written(tmp_path / "trace.json", events))
    (warning,) = trace.warnings
    assert warning.startswith("which calls of this API wait for the device is not known (fooXLaunchKernel): ")
    events += [complete("Stream Sync", "foo_sync", 1500.0, 1600.0, (0, 7), correlation=1)]
    assert trace_file.read(written(tmp_path / "trace.json", events)).warnings == ()
