"""What would be measured on this machine and what would spoil it. Each check is one function, one finding."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from overlap_bench.engines.machine import cpu_model, known
from overlap_bench.engines.timers import ask_for_exact_timers, ask_for_short_slice
from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.analysis.verdict_warnings import FEASIBLE_S
from overlap_bench.harness.common import core_speed, machine
from overlap_bench.harness.common.formatting import between, duration
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.design import MARGIN
from overlap_bench.harness.run.hosts import bytecode_is_kept
from overlap_bench.harness.stats import planning
from overlap_bench.harness.store.files import FLOORS

CPU = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
WATCH_S = 0.5  # how long other processes are watched
BUSY_SHARE = 0.05  # of one core, from which a process disturbs
BUSY_S = 2.0  # how long the cores are kept busy
SLEEPS, SLEEP_S = 500, 0.0005
LATE_MS = 0.5
UNREADABLE = "not readable here"


class Finding(NamedTuple):
    """`fine`: nothing to do; else `remedy` says what to do."""

    what: str
    fine: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Busy:
    """What cores showed while they had work all the time: the share of that time that was stolen, and the
    time of each of many equal loops."""

    stolen: float
    loops_us: list[float]


def examine(results: Path) -> list[Finding]:
    """Every check, in the order in which to read them; `results`: where `bench aa` left what it found. Takes
    four seconds."""
    at_rest = [
        told(each) for each in (device, versions, nsys, cores, governor, turbo, load_average, other_processes)
    ]
    busy = known(keep_busy, None)
    while_busy = [told(each, busy) for each in (steal, speed)]
    after = [told(each) for each in (wake_ups, huge_pages, swap, memory, scheduler_slice, bytecode)]
    return [*at_rest, *while_busy, *after, decides(results / FLOORS)]


def told(check: Callable[..., Finding], *given: object) -> Finding:
    """What a check finds, or that this machine hides it."""
    return known(check, Finding(check.__name__.replace("_", " "), True, UNREADABLE), *given)


def finding(what: str, fine: bool, found: str, remedy: str) -> Finding:
    return Finding(what, fine, found, "" if fine else remedy)


def device() -> Finding:
    names = machine.gpu_names()
    emulated = (
        "emulated: NVIDIA's driver shows no GPU here, so a second process is the accelerator; its times are "
        "those of CPU cores"
    )
    return Finding("device", True, f"cuda: {', '.join(names)}" if names else emulated)


def versions() -> Finding:
    found = machine.versions()
    return Finding("versions", True, ", ".join(f"{name} {version}" for name, version in found.items()))


def nsys() -> Finding:
    path = shutil.which("nsys")
    return Finding("nsys", True, path or "not on PATH; only needed for kernel traces of a GPU")


def cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    remedy = "the emulated device needs a core to itself: give two"
    return finding("cores", count >= 2, f"{count} usable, {cpu_model()}", remedy)


def governor() -> Finding:
    found = {_read(path) for path in CPU.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {None}
    if not found:
        return Finding("governor", True, UNREADABLE)
    return finding(
        "governor", found == {"performance"}, ", ".join(sorted(map(str, found))), "set performance"
    )


def turbo() -> Finding:
    intel, boost = _read(CPU / "intel_pstate/no_turbo"), _read(CPU / "cpufreq/boost")
    if intel is None and boost is None:
        return Finding("turbo", True, UNREADABLE)
    on = intel == "0" or boost == "1"
    return finding("turbo", not on, "on" if on else "off", "switch it off for steady clocks")


def load_average() -> Finding:
    now = os.getloadavg()[0]
    return finding("load average", now < 0.5, f"{now:.2f}", "wait until the machine is quiet")


def keep_busy() -> Busy:
    """Nothing can be stolen from a core that has no work: those of core_speed.cores are given some."""
    start = psutil.cpu_times()
    command = [sys.executable, "-I", core_speed.__file__]
    running = [
        subprocess.Popen(
            [*command, str(core), str(BUSY_S)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for core in core_speed.cores()
    ]
    loops = [float(each) for process in running for each in process.communicate()[0].split()]
    spent = [end - begin for begin, end in zip(start, psutil.cpu_times(), strict=True)]
    user, nice, system, _, _, irq, softirq, steal = spent[:8]  # left out: idle and iowait
    busy = user + nice + system + irq + softirq + steal
    return Busy(steal / max(0.01, busy), loops)  # the kernel counts in hundredths


def steal(busy: Busy) -> Finding:
    remedy = "other virtual machines take CPU time: use a dedicated host, or more trials"
    return finding("steal", busy.stolen < 0.01, f"{busy.stolen:.1%} of the time of busy cores", remedy)


def speed(busy: Busy) -> Finding:
    """How quick busy cores are; all of them together, for threads move."""
    fast, slow = core_speed.spread(busy.loops_us)
    remedy = "other work on the same physical core, or clocks that move: use a dedicated host"
    steady = slow < core_speed.STEADY * fast
    return finding("speed", steady, f"the same loop takes {fast:.0f} to {slow:.0f} us", remedy)


def wake_ups() -> Finding:
    """A virtual machine's idle core is handed back, and may be slow to return. On one such machine the
    p99 was 1 to 3 ms, and 0.08 ms while a process of policy SCHED_IDLE kept each core from idling; but that
    made the engine's steps 40% longer, so it is no remedy."""
    ask_for_exact_timers()
    late_ms = []
    for _ in range(SLEEPS):
        began = time.perf_counter()
        time.sleep(SLEEP_S)
        late_ms.append(1e3 * (time.perf_counter() - began - SLEEP_S))
    late = float(np.quantile(late_ms, 0.99))
    remedy = "a core is slow to return from idle: use a dedicated host"
    return finding("wake-ups", late < LATE_MS, f"a sleep ends {late:.2f} ms late (p99)", remedy)


def other_processes() -> Finding:
    """Processes that keep a core busy now, this one left out."""
    watched = [each for each in psutil.process_iter(["name"]) if each.pid != os.getpid()]
    start = {each.pid: spent for each in watched if (spent := _cpu_seconds(each)) is not None}
    time.sleep(WATCH_S)
    busy: list[tuple[float, str]] = []
    for each in watched:
        spent = _cpu_seconds(each)
        if spent is not None and each.pid in start:
            share = (spent - start[each.pid]) / WATCH_S
            if share > BUSY_SHARE:
                busy.append((share, f"{each.info['name']} (pid {each.pid}) {share:.0%} of a core"))
    found = ", ".join(text for _, text in sorted(busy, reverse=True)[:3])
    return finding("other processes", not busy, found or "none is busy", "end them or wait")


def huge_pages() -> Finding:
    text = _read(HUGE_PAGES)
    if text is None:
        return Finding("huge pages", True, UNREADABLE)
    mode = text.partition("[")[2].partition("]")[0]
    remedy = f"compaction stalls steps: echo madvise > {HUGE_PAGES}"
    return finding("huge pages", mode != "always", mode, remedy)


def swap() -> Finding:
    with warnings.catch_warnings(action="ignore"):  # of what a container hides
        used = psutil.swap_memory().used
    return finding("swap", not used, f"{used / 2**30:.1f} GiB in use", "swapoff, or free memory")


def memory() -> Finding:
    found = psutil.virtual_memory()
    text = f"{found.available / 2**30:.0f} of {found.total / 2**30:.0f} GiB available"
    remedy = "two engines side by side need about 4 GiB: free some"
    return finding("memory", found.available > 4 * 2**30, text, remedy)


def scheduler_slice() -> Finding:
    granted = ask_for_short_slice()
    found = f"{granted / 1e6:g} ms granted to the load generator" if granted else "not granted"
    remedy = "Linux 6.12 has it; without it some requests go out 1 to 2 ms late"
    return finding("scheduler slice", granted > 0, found, remedy)


def bytecode() -> Finding:
    """A boot is a fresh process, and a run's first boots compile what nobody left compiled."""
    if bytecode_is_kept():
        return Finding("bytecode", True, "kept, or compiled when torch was installed")
    return Finding(
        "bytecode",
        False,
        "torch has no bytecode, and what is compiled is not kept: each run's first boots compile it again",
        "unset PYTHONDONTWRITEBYTECODE, or compile: python -m compileall",
    )


def decides(floors: Path) -> Finding:
    """How long a change of the default margin takes to be seen here in 4 of 5 runs, by the newest noise floor
    of this machine that knows how long its blocks took."""
    here = machine.fingerprint()
    known = [
        (floor.created, metric, floor, floor.seconds)
        for floor in noise_floor.read(floors)[0]
        for metric in (SLICED, "tpot_ms_p50")
        if floor.of.machine == here and floor.seconds and metric in floor.metrics
    ]
    if not known:
        return Finding("time to show 1%", True, "not known yet: bench aa --variant pinned-h2d finds out")
    created, metric, floor, seconds = max(known, key=lambda each: (each[0], each[1] == SLICED))
    low, high = planning.blocks_needed(floor.metrics[metric].sd, floor.of.blocks, MARGIN)
    what = f"{metric} of {floor.of.engine}, {floor.of.model}, {floor.of.kind}"
    if low * seconds > FEASIBLE_S:
        found = f"not feasible: {duration(low * seconds)} at least"
    else:
        found = f"in {between(*(duration(each * seconds) for each in (low, high)))}"
    return Finding("time to show 1%", True, f"{found} ({what}; {floor.run}, {created[:10]})")


def _cpu_seconds(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None
