"""What a machine tells of itself is part of the record, and ends no run where it can't be had."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pynvml
import pytest

from overlap_bench.engines import machine as of_engines
from overlap_bench.engines import processes
from overlap_bench.harness.common import core_speed, machine
from overlap_bench.harness.common import processes as started
from overlap_bench.harness.run import records
from overlap_bench.harness.studies import doctor
from tests.support.bench_command import wait_until
from tests.support.places import ROOT


def failing(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


NOT_TEXT = UnicodeDecodeError("utf-8", b"\xf8\x91", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"processor\t: 0\nmodel name\t: A CPU @ 3 GHz\n\nmodel name\t: A CPU\n", "A CPU"),
        (b"model name\t: AMD \xff\xfe\n", "AMD \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
        (
            b"processor\t: 0\nCPU implementer\t: 0x41\n\nHardware\t: BCM2835\nModel\t\t: A Board 4\n",
            "A Board 4",
        ),
        (b"cpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        (b"model name\t:\nprocessor\n", "arch"),
        (b"", "arch"),
        (None, "arch"),
    ],
)
def test_a_processor_has_a_name_whatever_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, name: str
) -> None:
    monkeypatch.setattr(of_engines, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(of_engines.platform, "machine", lambda: "arch")
    if content is None:
        of_engines.CPUINFO.mkdir()  # as a masked file may be
    else:
        of_engines.CPUINFO.write_bytes(content)
    assert of_engines.cpu_model() == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (lambda card: "A100", "A100"),
        (failing(NOT_TEXT), machine.UNNAMED),
        (failing(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)), machine.UNNAMED),
    ],
)
def test_a_card_whose_name_is_no_text_is_a_card(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[object], Any], told: str
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", failing(OSError()))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", name)
    assert machine.gpu_names() == [told, told]
    assert doctor.device().found == f"cuda: {told}, {told}"


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError(9), NOT_TEXT, RuntimeError(), AttributeError(), OSError()]
)
def test_a_driver_may_fail_as_it_likes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", failing(error))
    assert machine.gpu_names() == []
    assert of_engines.known(records.Gpu, None, {}) is None
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlShutdown", failing(error))
    for name in [each for each in vars(pynvml) if each.startswith("nvmlDeviceGet") and "Handle" not in each]:
        monkeypatch.setattr(pynvml, name, failing(error))
    gpu = records.Gpu({})
    assert gpu.read({1}) == {}
    gpu.close()


def test_nothing_that_the_machine_hides_ends_a_reading_or_a_doctors_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (os, "getloadavg"),
        (os, "sched_setaffinity"),
        (psutil, "cpu_times"),
        (core_speed, "mean_loop_us"),
        (psutil, "process_iter"),
        (psutil, "virtual_memory"),
        (psutil, "swap_memory"),
        (psutil, "Process"),
        (machine, "version"),
    ):
        monkeypatch.setattr(module, name, failing(PermissionError(13, "masked")))
    row = records.counters_between(
        records.read_counters({"self": os.getpid()}), records.read_counters({"self": os.getpid()})
    )
    assert set(row) <= {"load_1m", "frequency_mhz"}
    assert machine.fingerprint().memory_gib == 0
    assert set(machine.versions()) == {"python"}
    monkeypatch.setattr(doctor, "SLEEPS", 1)
    found = {each.what: each.found for each in doctor.examine(tmp_path)}
    for what in ("load average", "other processes", "steal", "speed", "swap", "memory"):
        assert found[what] == doctor.UNREADABLE, found


def test_a_process_may_have_any_name() -> None:
    name = f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_NAME}, b') \\xff\\xfe'); input()"
    with subprocess.Popen([sys.executable, "-c", name], stdin=subprocess.PIPE) as child:
        wait_until(lambda: b"\xff" in Path(f"/proc/{child.pid}/comm").read_bytes())
        assert processes.state(child.pid) in "RSD"
        child.communicate(b"\n")


def test_what_was_started_is_found_where_the_time_of_boot_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil._pslinux, "boot_time", failing(RuntimeError("line 'btime' not found")))
    here = os.getpid()
    with subprocess.Popen(["sh", "-c", "sleep 60 & read end"], stdin=subprocess.PIPE) as child:
        while len(found := processes.with_below([child.pid])) < 2:
            pass
        parent, sleeping = found
        assert parent == child.pid
        assert started.below() >= set(found)
        assert f"{records.OWN} {sleeping}" in records.read_counters({"self": here})
        os.kill(sleeping, signal.SIGSTOP)
        wait_until(lambda: processes.is_stopped(sleeping))
        of_child = [started.Child("server", child.pid, None)]
        assert started.stopped(of_child) == f"60 of the server (pid {sleeping})"
        assert started.stopped(of_child, parked=[child.pid]) == ""
        os.kill(sleeping, signal.SIGKILL)
        child.communicate(b"\n")
    left = processes.with_below([child.pid, here])  # other tests of this process have children, too
    assert left[0] == here
    assert child.pid not in left


def test_changes_to_code_may_be_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nprintf 'caf\\351'\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.code().dirty
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.code() == machine.Code(commit="", changes="")


SEVERAL = """
import sys
from overlap_bench.harness.cli.app import main
for words in {commands!a}:
    sys.argv = ["bench", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    print("-- done")
"""


@pytest.mark.parametrize(
    "more",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "tr_TR.UTF-8", "PYTHONIOENCODING": "latin-1:strict", "TERM": "none", "COLUMNS": "0"},
    ],
)
def test_a_locale_that_lacks_a_character_ends_no_command(tmp_path: Path, more: dict[str, str]) -> None:
    run = str(ROOT / "results" / "reference" / "runs" / "pinned-h2d-turns")
    commands = [
        ["compare", run],
        ["compare", run, "--format", "json"],
        ["variants", "pinned-h2d"],
        ["devices"],
        ["report", run, "-o", os.fsdecode(b"\xe9.html")],
    ]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **more}  # no home, no user
    script = [sys.executable, "-c", SEVERAL.format(commands=commands)]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    compared, as_json, *_ = done.stdout.decode("latin-1").split("-- done\n")
    assert "The decode step is 3.0% shorter [1.8%, 4.1%]: 3.425 -> 3.324 ms" in compared
    assert json.loads(as_json)["comparisons"]
    assert len(list(tmp_path.iterdir())) == 1


PR_SET_NAME = 15
