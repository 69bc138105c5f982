"""What is recorded: what processes said, as data frames, whose columns are stored and make metrics; and the
counters of the machine, the processes and the card, read before and after a round.

All stamps are perf_counter_ns, and -1 where something did not happen. Columns called "list" hold one int64
array per row. The runner adds `round` (and block and arm) and writes the frames as they are.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from overlap_bench.engines import api
from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import with_below
from overlap_bench.harness.common import core_speed
from overlap_bench.harness.run.messages import REQUEST_COLUMNS, RoundDone

Int64s = NDArray[np.int64]

DEVICE_KINDS = ("program", "h2d", "d2h")  # by the number in api.DeviceWork
DEVICE_COLUMNS = ("kind", "step", "start_ns", "end_ns")
OTHER_CLOCK_NS = 1_000_000_000  # device stamps are converted to our clock; one further off is of another
OWN = "own"  # names the CPU time of each process of the run, in ms
CPUFREQ = Path("/sys/devices/system/cpu")


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


def read_counters(pids: Mapping[str, int]) -> dict[str, float]:
    """Counters that only grow, by name: CPU time of the machine in ms (all of it, stolen, busy) and of each
    process that is the run's (this one, and what descends from it or from `pids`: parked arms and the workers
    of a server too); and for each of `pids`, by its role, context switches and CPU time. A process that is
    gone is left out, and so is what this machine does not tell. Besides, how long a loop takes now
    (core_speed)."""
    values: dict[str, float] = {}
    if spent := known(psutil.cpu_times, None):
        busy = spent.user + spent.nice + spent.system + spent.irq + spent.softirq
        every = busy + spent.idle + spent.iowait + spent.steal
        values |= {"all": 1e3 * every, "steal": 1e3 * spent.steal, "busy": 1e3 * busy}
    here = [os.getpid(), *pids.values()]
    for pid in known(with_below, here, here):
        with suppress(OSError):
            values[f"{OWN} {pid}"] = cpu_ns(pid) / 1e6
    for role, pid in pids.items():
        values |= known(_of_process, {}, role, pid)
    if (loop_us := known(core_speed.mean_loop_us, None)) is not None:
        values["loop_us"] = loop_us
    return values


def _of_process(role: str, pid: int) -> dict[str, float]:
    switches, spent_ns = psutil.Process(pid).num_ctx_switches(), cpu_ns(pid)
    return {
        f"switches_voluntary.{role}": float(switches.voluntary),
        f"switches_forced.{role}": float(switches.involuntary),
        f"cpu_ms.{role}": spent_ns / 1e6,
    }


def counters_between(start: Mapping[str, float], end: Mapping[str, float]) -> dict[str, float]:
    """The row's columns from the readings before and after: differences per process and, as shares of all
    CPU time, what was stolen and what processes used that are not the run's. `load_1m` is read now."""
    spent = {name: value - start[name] for name, value in end.items() if name in start}
    row = {name: value for name, value in spent.items() if "." in name}
    # A process that began in between has spent all of its time since.
    own = sum(value - start.get(name, 0) for name, value in end.items() if name.startswith(OWN))
    if spent.get("all", 0) > 0:
        row["steal_share"] = spent["steal"] / spent["all"]
        row["others_share"] = max(0.0, spent["busy"] - own) / spent["all"]
    if "loop_us" in spent:
        row["loop_us"] = (start["loop_us"] + end["loop_us"]) / 2
    row["load_1m"] = known(os.getloadavg, (math.nan,))[0]
    frequency = known(frequency_mhz, None)
    if frequency is not None:
        row["frequency_mhz"] = frequency
    return row


def cpu_ns(pid: int) -> int:
    """CPU time of a process, all of its threads, to the nanosecond: /proc counts it in ticks of 10 ms, more
    than a hundred steps take. Raises OSError where it is gone."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # clock_getcpuclockid(3): the process's CPUCLOCK_SCHED


def frequency_mhz() -> float | None:
    """Mean current frequency over cores, where the kernel tells."""
    values = []
    for path in CPUFREQ.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            values.append(int(path.read_bytes()) / 1e3)
        except (OSError, ValueError):
            continue
    return sum(values) / len(values) if values else None


class Gpu:
    """The card an engine runs on, through NVML: CUDA's device 0 under this environment. Raises what it likes
    where NVML can't be had, or does not know the card, as in some sandboxes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        card = visible_gpu(environment)
        by_name = isinstance(card, str)
        find = pynvml.nvmlDeviceGetHandleByUUID if by_name else pynvml.nvmlDeviceGetHandleByIndex
        try:
            self._handle = find(card)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        known(self._nvml.nvmlShutdown, None)

    def read(self, own: set[int]) -> dict[str, float]:
        """Clocks (MHz), temperature (C), power (W), throttle reasons (NVML's bit mask) and the number of
        processes on the card that are not in `own`. What the card does not tell is left out, and so are its
        processes where it knows them by other ids than this machine does, as in a container."""
        nvml, handle = self._nvml, self._handle
        asked: dict[str, Callable[[], float]] = {
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "gpu_throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        values: dict[str, float] = {}
        for name, ask in asked.items():
            if (told := known(ask, None)) is not None:
                values[name] = float(told)
        running = {each.pid for each in known(nvml.nvmlDeviceGetComputeRunningProcesses, [], handle)}
        if running & own:
            values["gpu_other_processes"] = float(len(running - own))
        return values


def visible_gpu(environment: Mapping[str, str]) -> int | str:
    """NVML's index, or the UUID, of CUDA's device 0 under this environment."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith(("GPU-", "MIG-")) else int(first) if first.isdigit() else 0
