"""Events of a Chrome trace that are odd: each costs itself, and is counted."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_bench.harness.trace import trace_file
from overlap_bench.harness.trace.events import Trace
from tests.support.traces import complete, launched, part, parts, values, written

EPOCH, UPTIME = 1615207264505020.0, 5933690131.0  # us
KERNEL: dict[str, Any] = complete("odd", "kernel", 51.0, 52.0, (0, 7), device=0, stream=7)


def sound(base: float = 0.0) -> list[dict[str, object]]:
    steps = [
        complete(f"ProfilerStep#{n}", "user_annotation", base + n, base + n + 1, (9, 9)) for n in (1, 501)
    ]
    return steps + [event for n in range(10) for event in launched(base + 1 + 100 * n, n + 1)]


def text(events: list[dict[str, object]], *more: bytes) -> bytes:
    """A trace as torch.profiler writes it, with more text among its events."""
    lines = [json.dumps(each).encode() for each in events]
    return b'{"schemaVersion": 1, "traceEvents": [\n' + b",\n".join([*lines[:4], *more, *lines[4:]]) + b"\n]}"


def read(folder: Path, content: bytes) -> Trace:
    path = folder / "trace.json"
    path.write_bytes(content)
    return trace_file.read(path)


def said(trace: Trace) -> tuple[object, ...]:
    """What must not change: window, busy and idle, launches, ranges."""
    found, span = parts(trace), trace.span()
    row, latency = values(found["devices"], "0"), values(found["launches"], "kernel", "any")
    return (*row.values(), *latency.values(), found["ranges"].rows, span[1] - span[0])


NOT_TAKEN = "left out: 1 kernel whose time was not taken (it is 0, missing, or far from all others)"
UNFINISHED = "left out: 1 kernel that did not end in the trace (no end, or one before the start)"
BUSIER = "; the devices were busier than shown"


@pytest.mark.parametrize("base", [0.0, UPTIME, EPOCH], ids=["from 0", "uptime", "epoch"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ts": 0, "dur": 0}, NOT_TAKEN),
        ({"ts": 0, "args": {"device": 0, "stream": 7, "correlation": 6}}, NOT_TAKEN),
        ({"ts": -1, "args": {"device": 0, "stream": 7, "correlation": 6}}, NOT_TAKEN),
        ({"ts": None}, NOT_TAKEN),
        ({"ts": "soon"}, NOT_TAKEN),
        ({"ts": [1]}, NOT_TAKEN),
        ({"ts": 9.2e18}, NOT_TAKEN),
        ({"ts": -1.6e15}, NOT_TAKEN),
        ({"dur": 1.6e15}, NOT_TAKEN),
        ({"dur": -1}, UNFINISHED),
        ({"dur": -1615207264505020.0}, UNFINISHED),
        ({"dur": None}, UNFINISHED),
    ],
)
def test_a_time_that_was_not_taken_and_an_end_that_did_not_come_cost_their_event(
    tmp_path: Path, base: float, change: dict[str, Any], why: str
) -> None:
    odd = {**KERNEL, "ts": base + 51, **change}
    trace = read(tmp_path, text(sound(base), json.dumps(odd).encode()))
    assert said(trace) == said(read(tmp_path, text(sound(base))))
    assert trace.warnings == (why + BUSIER,)


def test_events_of_all_tables_are_counted_by_what_they_are(tmp_path: Path) -> None:
    odd = [
        {key: value for key, value in KERNEL.items() if key != "ts"},
        {key: value for key, value in KERNEL.items() if key != "dur"},
        {**complete("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 0, 0, (0, 7), device=0), "ts": 0},
        complete("aten::open", "cpu_op", 60.0, 59.0, (9, 9)),
        complete("cudaLaunchKernel", "cuda_runtime", 0.0, 0.0, (9, 9), correlation=77),
    ]
    trace = read(tmp_path, text(sound(), *(json.dumps(each).encode() for each in odd)))
    assert said(trace) == said(read(tmp_path, text(sound())))
    assert trace.warnings == (
        NOT_TAKEN.replace("1 kernel", "1 kernel, 1 copy, 1 call") + BUSIER,
        UNFINISHED.replace("1 kernel", "1 kernel, 1 range") + BUSIER,
    )
    assert trace.copies.start.size == 0


def test_half_of_all_kernels_without_a_time_are_left_out(tmp_path: Path) -> None:
    kernels = 0
    events = sound(EPOCH)
    for each in events:
        if each["cat"] == "kernel":
            kernels += 1
            each |= {"ts": 0, "dur": 0} if kernels % 2 else {}
    trace = read(tmp_path, text(events))
    assert trace.warnings[0].startswith("left out: 5 kernels whose time was not taken")
    assert values(part(trace, "kernels"), "0", "gemm")["count"] == 5


def test_a_trace_may_begin_at_0_and_a_copy_may_take_no_time(tmp_path: Path) -> None:
    events = [
        complete("load", "user_annotation", 0.0, 2e6, (9, 9)),
        *(event for n in range(3) for event in launched(5e6 + 100 * n, n + 1)),
        complete("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5e6, 5e6, (0, 7), device=0, bytes=200),
    ]
    trace = trace_file.read(written(tmp_path / "trace.json", events))
    assert trace.warnings == ()
    assert (trace.rows()["ranges"], trace.rows()["copies"]) == (1, 1)


def test_processes_of_two_clocks_keep_their_events_and_are_warned_of(tmp_path: Path) -> None:
    events = sound() + [
        {**each, "pid": f"other {each['pid']}", "ts": each["ts"] + 1e12}  # type: ignore[operator]
        for each in sound()
    ]
    trace = trace_file.read(written(tmp_path / "trace.json", events))
    assert trace.rows()["work"] == 20
    assert any(line.startswith("the trace spans 11.6 days: some of its processes") for line in trace.warnings)


def test_a_begin_and_an_end_make_an_event_and_a_begin_alone_is_unfinished(tmp_path: Path) -> None:
    halves = [
        {"ph": "B", "cat": "cpu_op", "name": "outer", "pid": 9, "tid": 9, "ts": 600.0},
        {"ph": "B", "cat": "python_function", "name": "not read", "pid": 9, "tid": 9, "ts": 601.0},
        {"ph": "B", "cat": "cpu_op", "name": "inner", "pid": 9, "tid": 9, "ts": 602.0},
        {"ph": "E", "pid": 9, "tid": 9, "ts": 603.5},
        {"ph": "E", "pid": 9, "tid": 9, "ts": 604.0},
        {"ph": "E", "pid": 9, "tid": 9, "ts": 605.0},
        {"ph": "E", "pid": 9, "tid": 9, "ts": 606.0},
        {"ph": "B", "cat": "cpu_op", "name": "open", "pid": 9, "tid": 9, "ts": 607.0},
    ]
    trace = trace_file.read(written(tmp_path / "trace.json", [*sound(), *halves]))
    found = part(trace, "ranges")
    assert values(found, "outer")["total_ms"] == pytest.approx(0.005)
    assert values(found, "inner")["total_ms"] == pytest.approx(0.0015)
    assert trace.warnings == (UNFINISHED.replace("kernel", "range"),)


@pytest.mark.parametrize(
    "pair",
    [
        ('"1615207264505020.123"', '"1615207264505021.124"'),
        ("1615207264505020.123", "1615207264505021.124"),
        ("1.615207264505020123e15", "1.615207264505021124e15"),
        ("0.123", "1.124"),
        ("1615207264505020", '"1615207264505021.001"'),
    ],
)
def test_nanoseconds_are_kept_however_a_time_is_written(tmp_path: Path, pair: tuple[str, str]) -> None:
    """A float of us since the epoch is off by up to 125 ns."""
    events = (
        f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": {ts}, "dur": 0.001}}'
        for ts in pair
    )
    trace = read(tmp_path, f"[{', '.join(events)}]".encode())
    assert np.diff(trace.work.start).tolist() == [1001]
    assert (trace.work.end - trace.work.start).tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------------------
# Text that is not quite JSON


def kernel(name: bytes = b'"odd"', arg: bytes = b"1", **changes: bytes) -> bytes:
    fields = {
        "ph": b'"X"',
        "cat": b'"kernel"',
        "name": name,
        "pid": b"0",
        "tid": b"7",
        "ts": b"51",
        "dur": b"1",
    }
    fields |= changes
    fields.setdefault("args", b'{"device": 0, "stream": 7, "arg": %b}' % arg)
    return b"{%b}" % b", ".join(b'"%b": %b' % (key.encode(), value) for key, value in fields.items())


@pytest.mark.parametrize(
    "value",
    b"NaN nan -nan(ind) Infinity -Infinity +Infinity inf -INF 1.#INF None .5 01 [inf,nan]".split(),
)
def test_a_number_that_json_does_not_have_in_an_argument_that_nobody_needs_costs_nothing(
    tmp_path: Path, value: bytes
) -> None:
    trace = read(tmp_path, text(sound(), kernel(b'"a: inf, [nan]"', value)))
    assert values(part(trace, "kernels"), "0", "a: inf, [nan]")["count"] == 1
    assert (trace.rows()["work"], trace.warnings) == (11, ())


@pytest.mark.parametrize(
    ("written_as", "shown"),
    [
        (b"g\xe5mm\xff", r"g\xe5mm\xff"),
        (b"a\xed\xa0\x80b", r"a\xed\xa0\x80b"),
        (b"a\\ud800b", r"a\ud800b"),
        (b"\\ud83d\\ude00", "\U0001f600"),
        (b"\\x1b[31m\\q", r"\x1b[31m\q"),
        (b"a\\u001b[31mb\\u009b2J", r"a\x1b[31mb\x9b2J"),
        (b"a\x1b[2J\n\tb\\u202e", r"a\x1b[2J\n\tb\u202e"),
    ],
)
def test_a_name_of_any_bytes_is_shown_without_what_moves_a_cursor(
    tmp_path: Path, written_as: bytes, shown: str
) -> None:
    trace = read(tmp_path, text(sound(), kernel(b'"%b"' % written_as)))
    assert {row.key[1] for row in part(trace, "kernels").rows} == {"gemm", shown}
    assert trace.warnings == ()


@pytest.mark.parametrize(
    "odd",
    [
        b"null",
        b"5",
        b'"x"',
        b'[1, {"ph": 2}]',
        kernel(b'"a"b"'),
        kernel(b'"a"b"', b'[{"a": 1}, {"b": [{"c": 2}]}]'),
        b'{"ph":"X","cat":"kernel","name":"abc',
        b'{"ph":"X","cat":"kernel"',
        kernel(arg=b"[" * 3000 + b"]" * 3000),
    ],
)
def test_what_is_no_event_costs_itself(tmp_path: Path, odd: bytes) -> None:
    trace = read(tmp_path, text(sound(), odd))
    assert said(trace) == said(read(tmp_path, text(sound())))
    assert len(trace.warnings) == 1
    assert trace.warnings[0].startswith("left out: 1 entry that is no event, the first: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": b"null"},
        {"name": b"5"},
        {"ts": b'"51.0"'},
        {"pid": b"0.0"},
        {"pid": b'"0"', "tid": b'"7"'},
        {"args": b"null"},
        {"args": b'{"device": "0", "correlation": "x", "bytes": inf}'},
        {"args": b'{"device": 0, "correlation": 1180591620717411303424}'},
        {"args": b'{"device": 0, "memory": "\xe5"}'},
    ],
)
def test_a_field_that_is_not_what_it_should_be_costs_no_more_than_itself(
    tmp_path: Path, changes: dict[str, bytes]
) -> None:
    trace = read(tmp_path, text(sound(), kernel(**changes)))
    assert (trace.rows()["work"], trace.devices, trace.warnings) == (11, ("0",), ())
    assert len(np.unique(trace.work.stream)) == 1


def test_a_file_with_a_mark_in_front_or_of_two_packed_parts_is_read(tmp_path: Path) -> None:
    content = text(sound())
    for odd in (
        b"\xef\xbb\xbf" + content,
        gzip.compress(b"\xef\xbb\xbf" + content),
        gzip.compress(content[:300]) + gzip.compress(content[300:]),
    ):
        assert said(read(tmp_path, odd)) == said(read(tmp_path, content))


def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A killed program writes no end; a list needs none."""
    whole = text(sound())
    listed = b"[" + whole.partition(b"[")[2]
    for complete_list in (listed[:-2], listed[:-3] + b",\n", listed[:-3] + b",]", whole[:-3] + b",]}"):
        trace = read(tmp_path, complete_list)
        assert (trace.rows()["work"], trace.warnings) == (10, ())
    for cut, work in (
        (whole[:-2], 10),
        (whole[:-40], 9),
        (listed[:-40], 9),
        (gzip.compress(whole)[:-30], None),
    ):
        trace = read(tmp_path, cut)
        assert trace.warnings[0].startswith("the file is cut short: it was read as far as it goes")
        assert work is None or trace.rows()["work"] == work


def test_odd_text_is_mended_across_the_pieces_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = text(sound(), kernel(b'"a"b"'), kernel(arg=b"inf"), b"7", kernel(b'"\xe5"'))
    monkeypatch.setattr("overlap_bench.harness.trace.chrome_events.CHUNK", 150)
    trace = read(tmp_path, content)
    assert trace.rows()["work"] == 12
    assert trace.warnings[0].startswith("left out: 2 entries that are no event")
