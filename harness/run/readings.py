"""What the machine did during a round: load, steal, context switches, CPU time, speed, clocks, a GPU's state.

A reading is taken before and after a round, never during it. Each is plain numbers by name; `between` turns
two of them into columns of the round's row.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import with_below
from overlap_bench.harness.common import core_speed

OWN = "own"  # names the CPU time of each process of the run, in ms
STAT = Path("/proc/stat")
CPUFREQ = Path("/sys/devices/system/cpu")


def read(pids: Mapping[str, int]) -> dict[str, float]:
    """Counters that only grow, by name: CPU time of the machine in ms (all of it, stolen, busy) and of each
    process that is the run's (this one, and what descends from it or from `pids`: parked arms and the workers
    of a server too); and for each of `pids`, by its role, context switches and CPU time. A process that is
    gone is left out, and so is what this machine does not tell. Besides, how long a loop takes now
    (core_speed)."""
    values: dict[str, float] = {}
    if ticks := known(cpu_ticks, []):
        ms = [1e3 * each / os.sysconf("SC_CLK_TCK") for each in ticks]
        user, nice, system, _, _, irq, softirq, steal = ms  # left out: idle and iowait
        values |= {"all": sum(ms), "steal": steal, "busy": user + nice + system + irq + softirq}
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


def between(start: Mapping[str, float], end: Mapping[str, float]) -> dict[str, float]:
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


def cpu_ticks() -> list[int]:
    """The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal. An old kernel ends
    before the last. Raises OSError or ValueError where it is hidden, as in some containers."""
    name, *ticks = STAT.read_text("utf-8").split("\n", 1)[0].split()
    if name != "cpu" or len(ticks) < 4:
        raise ValueError(f"no times in {STAT}")
    return [*map(int, ticks[:8]), *[0] * (8 - len(ticks))]


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
    """The card an engine runs on, through NVML: CUDA's device 0 under this environment."""

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
            known(pynvml.nvmlShutdown, None)
            raise

    def __enter__(self) -> Gpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def open_gpu(environment: Mapping[str, str]) -> Gpu | None:
    """None where NVML can't be had, or does not know the card, as in some sandboxes. A run measures without
    it, and a caution says what is missing (analysis/warnings.py)."""
    return known(Gpu, None, environment)


def visible_gpu(environment: Mapping[str, str]) -> int | str:
    """NVML's index, or the UUID, of CUDA's device 0 under this environment."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith(("GPU-", "MIG-")) else int(first) if first.isdigit() else 0
