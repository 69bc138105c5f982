"""What processes recorded, as data frames: the columns that are stored and that metrics are made from.

All stamps are perf_counter_ns, and -1 where something did not happen. Columns called "list" hold one int64
array per row. The runner adds `round` (and block and arm) and writes the frames as they are.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from overlap_bench.engines import api
from overlap_bench.harness.run.messages import REQUEST_COLUMNS, RoundDone

Int64s = NDArray[np.int64]

DEVICE_KINDS = ("program", "h2d", "d2h")  # by the number in api.DeviceWork
DEVICE_COLUMNS = ("kind", "step", "start_ns", "end_ns")
OTHER_CLOCK_NS = 1_000_000_000  # device stamps are converted to our clock; one further off is of another


def requests_frame(done: RoundDone) -> pd.DataFrame:
    """One row per request, in the order in which they were sent.

    request; scheduled_ns, sent_ns, submitted_ns (client); api.STAMPS (engine);
    chunk_ns, chunk_tokens, chunk_lag_ns (lists: arrival of each chunk at the client, its tokens, and how long
    it then lay unread; the last two -1 where not known); token_ns (list: when the engine had each token);
    token_ids (list: the output, as far as it came as ids);
    finished_ns (arrival of the end); reason; prompt_tokens, completion_tokens (the engine's count); digest
    (of the token ids, or of the text); error ("" for a request that did not fail).
    """
    data = done.data
    rows = _matrix(data.rows, len(REQUEST_COLUMNS))
    columns = dict(zip(REQUEST_COLUMNS, rows.T, strict=True))
    chunks, tokens, ids = columns["chunks"], columns["tokens"], columns["ids"]
    return pd.DataFrame(
        {
            **{name: columns[name] for name in REQUEST_COLUMNS[: REQUEST_COLUMNS.index("finished_ns")]},
            "chunk_ns": _ragged(data.chunk_ns, chunks),
            "chunk_tokens": _ragged(data.chunk_tokens, chunks),
            "chunk_lag_ns": _ragged(data.chunk_lag_ns, chunks),
            "token_ns": _ragged(data.token_ns, tokens),
            "token_ids": _ragged(data.token_ids, ids),
            "finished_ns": columns["finished_ns"],
            "reason": pd.Series(data.reasons, dtype="str"),
            "prompt_tokens": columns["prompt_tokens"],
            "completion_tokens": columns["completion_tokens"],
            "digest": pd.Series(data.digests, dtype="str"),
            "error": pd.Series(data.errors, dtype="str"),
        }
    )


def broken(record: api.RoundRecord, began_ns: int, ended_ns: int) -> str:
    """What can't be in the records of a round that was begun and collected at these times, "" where nothing
    is. Metrics would be made of it."""
    works = (record.device_work, *record.other_ranks)
    wrong = (_broken_work(work, began_ns, ended_ns) for work in works)
    return _broken_steps(record.steps, began_ns, ended_ns) or next(filter(None, wrong), "")


def _broken_steps(table: api.StepTable | None, began_ns: int, ended_ns: int) -> str:
    if table is None:
        return ""
    if sorted(table.columns) != sorted(api.STEP_COLUMNS):
        odd = sorted(set(table.columns) ^ set(api.STEP_COLUMNS))
        return (
            f"the columns of its steps are not those of StepTable: {', '.join(odd) or 'one is there twice'}"
        )
    if len(table.data) != table.rows * len(table.columns) * 8:
        return f"its step records are {len(table.data)} bytes, which is not {table.rows} rows"
    frame = pd.DataFrame(_matrix(table.data, len(table.columns)), columns=table.columns)
    if not frame["kind"].between(0, len(api.STEP_KINDS) - 1).all():
        return "a step's kind is not an index into STEP_KINDS"
    if not frame["step"].is_unique:
        return "two steps have the same number"
    for phase in api.PHASES:
        start, end = (frame[f"{phase}.{edge}"].to_numpy() for edge in ("start", "end"))
        if wrong := _broken_span(f"{phase} of a step", start, end, began_ns, ended_ns):
            return wrong
    return ""


def _broken_work(work: api.DeviceWork | None, began_ns: int, ended_ns: int) -> str:
    if work is None:
        return ""
    if len(work.data) != work.rows * len(DEVICE_COLUMNS) * 8:
        return f"its device work is {len(work.data)} bytes, which is not {work.rows} rows"
    kind, _, start, end = _matrix(work.data, len(DEVICE_COLUMNS)).T
    if not ((kind >= 0) & (kind < len(DEVICE_KINDS))).all():
        return f"a kind of device work is not one of 0 to {len(DEVICE_KINDS) - 1}"
    return _broken_span("a piece of device work", start, end, began_ns, ended_ns)


def _broken_span(what: str, start: Int64s, end: Int64s, began_ns: int, ended_ns: int) -> str:
    """-1 for both: it did not happen."""
    happened = (start != -1) | (end != -1)
    start, end = start[happened], end[happened]
    if (end < start).any():
        return f"{what} ends before it starts"
    if ((start < began_ns - OTHER_CLOCK_NS) | (end > ended_ns + OTHER_CLOCK_NS)).any():
        return f"{what} lies outside of the round: its stamps are not perf_counter_ns"
    return ""


def steps_frame(record: api.RoundRecord) -> pd.DataFrame:
    """One row per step; no rows, and all columns, for an engine that records none.

    step; kind ("prefill", "decode", "mixed", or "dropped" where nobody wanted any row of it any more); batch
    (requests); tokens; dropped (rows); preempted (requests); given (tokens that requests got; -1: one each);
    "<phase>.start" and "<phase>.end" for each of api.PHASES; device_start_ns, device_end_ns (first start and
    last end of its programs); device_ns (the time in which one of them ran: an eager step is many programs
    with holes between them). Where the model spans several devices these are the first rank's, and each other
    rank's are in "device_start_ns.1" and so on.
    """
    table = record.steps or api.StepTable(list(api.STEP_COLUMNS), 0, b"")
    frame = pd.DataFrame(_matrix(table.data, len(table.columns)), columns=table.columns)
    dropped = (frame["batch"] > 0) & (frame["dropped"] == frame["batch"])
    kinds = frame["kind"].map(dict(enumerate(api.STEP_KINDS)))
    frame["kind"] = kinds.mask(dropped, "dropped").astype("str")
    # Not a merge: missing values would turn stamps into floats, which are exact up to 104 days' uptime only.
    works = [record.device_work, *record.other_ranks]
    times = [_device_times(work).reindex(frame["step"], fill_value=-1) for work in works]
    named = [each.add_suffix(f".{rank}" if rank else "") for rank, each in enumerate(times)]
    return pd.concat([frame, *(each.reset_index(drop=True) for each in named)], axis=1)


def turns_frame(turns: api.TurnTable) -> pd.DataFrame:
    """One row per turn of an engine: the columns of api.TURN_COLUMNS, -1 where the host of an older commit
    sends no such column."""
    width = len(turns.data) // 8 // turns.rows if turns.rows else len(api.TURN_COLUMNS)
    sent = list(api.TURN_COLUMNS[:width])
    return pd.DataFrame(_matrix(turns.data, width), columns=sent).reindex(
        columns=api.TURN_COLUMNS, fill_value=-1
    )


def device_frame(record: api.RoundRecord) -> pd.DataFrame:
    """One row per piece of work of the device: kind (DEVICE_KINDS), step, start_ns, end_ns."""
    return _work_frame(record.device_work)


def beside_frame(record: api.RoundRecord) -> pd.DataFrame:
    """One row per time that another thread or process did a phase which is no step's column: phase, start_ns,
    end_ns."""
    width = 5  # thread, name, step, start_ns, end_ns
    rows = [_matrix(each.data, width) for each in record.beside]
    phases = [each.names[name] for each, mine in zip(record.beside, rows, strict=True) for name in mine[:, 1]]
    spans = np.concatenate([np.empty((0, width), np.int64), *rows])
    return pd.DataFrame({"phase": phases, "start_ns": spans[:, 3], "end_ns": spans[:, 4]})


def _work_frame(work: api.DeviceWork | None) -> pd.DataFrame:
    work = work or api.DeviceWork(0, b"")
    frame = pd.DataFrame(_matrix(work.data, len(DEVICE_COLUMNS)), columns=DEVICE_COLUMNS)
    frame["kind"] = frame["kind"].map(dict(enumerate(DEVICE_KINDS))).astype("str")
    return frame


def _device_times(done: api.DeviceWork | None) -> pd.DataFrame:
    """device_start_ns, device_end_ns, device_ns of every step that has programs, by step."""
    work = _work_frame(done)
    programs = work[work["kind"] == "program"].sort_values(["step", "start_ns"])
    # What one that runs beside an earlier one adds is only what lies behind that one's end.
    ended = programs.groupby("step")["end_ns"].cummax().groupby(programs["step"]).shift(fill_value=0)
    fresh = np.maximum(programs["start_ns"], ended)
    programs = programs.assign(spent=np.maximum(programs["end_ns"] - fresh, 0))
    return programs.groupby("step").agg(
        device_start_ns=("start_ns", "min"), device_end_ns=("end_ns", "max"), device_ns=("spent", "sum")
    )


def _matrix(data: bytes, columns: int) -> Int64s:
    return np.frombuffer(data, dtype=np.int64).reshape(-1, columns)


def _ragged(data: bytes, lengths: Int64s) -> pd.Series:
    """Flat values as one array per row. A Series of objects: equal lengths must not turn it into a matrix."""
    ends = np.cumsum(lengths)
    values = np.frombuffer(data, dtype=np.int64)
    return pd.Series(
        [values[end - length : end] for end, length in zip(ends, lengths, strict=True)], dtype=object
    )
