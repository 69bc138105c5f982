"""What would be measured on this machine and what would spoil it. Each check is one function, one finding."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import psutil

from harness import machine, readings
from harness.wakeups import ask_for_short_slice

CPU = Path("/sys/devices/system/cpu")
WATCH_S = 0.5  # how long other processes are watched
BUSY_SHARE = 0.05  # of one core, from which a process disturbs


@dataclass(frozen=True, slots=True)
class Finding:
    """`fine`: nothing to do; else `remedy` says what to do."""

    what: str
    fine: bool
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every check, in the order in which to read them. Takes a second."""
    checks: tuple[Callable[[], Finding], ...] = (
        device, versions, nsys, cores, governor, turbo, load, steal, other_processes, huge_pages, swap,
        memory, scheduler_slice, bytecode,
    )  # fmt: skip
    return [check() for check in checks]


def device() -> Finding:
    names = machine.gpu_names()
    if names:
        return Finding("device", True, f"cuda: {', '.join(names)}")
    return Finding(
        "device",
        True,
        "emulated: NVIDIA's driver shows no GPU here, so a second process is the accelerator; its times are "
        "those of CPU cores",
    )


def versions() -> Finding:
    found = machine.versions()
    return Finding("versions", True, ", ".join(f"{name} {version}" for name, version in found.items()))


def nsys() -> Finding:
    path = shutil.which("nsys")
    return Finding("nsys", True, path or "not on PATH; only needed for kernel traces of a GPU")


def cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    remedy = "" if count >= 2 else "the emulated device needs a core to itself: give two"
    return Finding("cores", count >= 2, f"{count} usable, {machine.cpu_model()}", remedy)


def governor() -> Finding:
    found = {_read(path) for path in CPU.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {None}
    if not found:
        return Finding("governor", True, "not readable here")
    fine = found == {"performance"}
    return Finding("governor", fine, ", ".join(sorted(map(str, found))), "" if fine else "set performance")


def turbo() -> Finding:
    intel, boost = _read(CPU / "intel_pstate/no_turbo"), _read(CPU / "cpufreq/boost")
    if intel is None and boost is None:
        return Finding("turbo", True, "not readable here")
    on = intel == "0" or boost == "1"
    return Finding("turbo", not on, "on" if on else "off", "switch it off for steady clocks" if on else "")


def load() -> Finding:
    now = os.getloadavg()[0]
    fine = now < 0.5
    return Finding("load average", fine, f"{now:.2f}", "" if fine else "wait until the machine is quiet")


def steal() -> Finding:
    start = readings.cpu_ticks()
    time.sleep(WATCH_S)
    ticks = [end - begin for begin, end in zip(start, readings.cpu_ticks(), strict=True)]
    share = ticks[7] / max(1, sum(ticks))
    fine = share < 0.01
    remedy = "" if fine else "other virtual machines take CPU time: use a dedicated host, or more blocks"
    return Finding("steal", fine, f"{share:.1%} of CPU time", remedy)


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
    return Finding("other processes", not busy, found or "none is busy", "end them or wait" if busy else "")


def huge_pages() -> Finding:
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    if text is None:
        return Finding("huge pages", True, "not readable here")
    mode = text.partition("[")[2].partition("]")[0]
    fine = mode != "always"
    remedy = (
        "" if fine else "compaction stalls steps: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return Finding("huge pages", fine, mode, remedy)


def swap() -> Finding:
    used = psutil.swap_memory().used
    return Finding(
        "swap", not used, f"{used / 2**30:.1f} GiB in use", "" if not used else "swapoff, or free memory"
    )


def memory() -> Finding:
    found = psutil.virtual_memory()
    fine = found.available > 4 * 2**30
    text = f"{found.available / 2**30:.0f} of {found.total / 2**30:.0f} GiB available"
    return Finding(
        "memory", fine, text, "" if fine else "two engines side by side need about 4 GiB: free some"
    )


def scheduler_slice() -> Finding:
    granted = ask_for_short_slice()
    if granted:
        return Finding("scheduler slice", True, f"{granted / 1e6:g} ms granted to the load generator")
    return Finding(
        "scheduler slice",
        False,
        "not granted",
        "Linux 6.12 has it; without it some requests go out 1 to 2 ms late",
    )


def bytecode() -> Finding:
    """A boot is a fresh process: it compiles what no process before it, and no installer, left compiled."""
    torch = find_spec("torch")
    assert torch is not None  # this package needs it
    assert torch.origin is not None
    kept = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if kept or Path(cache_from_source(torch.origin)).exists():
        return Finding("bytecode", True, "kept, or compiled when torch was installed")
    return Finding(
        "bytecode",
        False,
        "torch is not compiled, and what is compiled is not kept: each boot does it anew",
        "unset PYTHONDONTWRITEBYTECODE, or compile: python -m compileall",
    )


def _cpu_seconds(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
