"""An arm's own interpreter and environment, with real processes."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from overlap_bench.harness.store.manifest import read_manifest
from tests.support.bench_command import PATIENCE_S, Bench, start
from tests.support.clockwork import CLOCKWORK
from tests.support.in_process import done, refused

SMALL = ("--trials", "1", "--rounds", "1", "--num-requests", "4", "--max-new-tokens", "4")


def virtual_environment(folder: Path, packages: bool) -> str:
    """The interpreter of a fresh virtual environment, that sees this one's packages or none."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    if packages:
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin/python")


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return virtual_environment(tmp_path_factory.mktemp("other") / "venv", packages=True)


@pytest.fixture
def running(
    environment: dict[str, str], tmp_path: Path, other_python: str
) -> Iterator[tuple[Bench, dict[str, psutil.Process]]]:
    """The overlap engine in two arms, and its four processes by the end of their module and their arm."""
    engine = ("--engine", "overlap", "--device", "emulated", "--set", "env.SHARED=yes")
    before, after = ("--before", "env.ARM=before"), ("--after", "env.ARM=after")
    python = ("--after", f"python={other_python}")
    bench = start(environment, tmp_path, "run", *engine, *before, *after, *python, *SMALL)
    found: dict[str, psutil.Process] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < 4:
        assert bench.popen.poll() is None, bench.stderr.read_text()
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        bench.look()
        for process in bench.left():
            try:
                line, variables = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            for module in ("overlap_bench.engines.host", "overlap_bench.engines.devices.emulated.process"):
                if module in line:
                    found[f"{module.rpartition('.')[2]} of {variables['ARM']}"] = process
    yield bench, found
    bench.popen.send_signal(signal.SIGINT)
    bench.end()
    assert not bench.left()


def test_interpreter_and_environment_reach_every_process_of_an_arm(
    running: tuple[Bench, dict[str, psutil.Process]], tmp_path: Path, other_python: str
) -> None:
    _, processes = running
    roles = ("host", "process")
    assert set(processes) == {f"{role} of {arm}" for role in roles for arm in ("before", "after")}
    for name, process in processes.items():
        expected = other_python if name.endswith("after") else sys.executable
        assert process.cmdline()[0] == expected, name
        assert process.environ()["SHARED"] == "yes"
    (folder,) = (tmp_path / "results").iterdir()
    before, after = read_manifest(folder).design.arms
    assert (before.python, after.python) == (None, other_python)
    assert (before.env, after.env) == ({"SHARED": "yes", "ARM": "before"}, {"SHARED": "yes", "ARM": "after"})


def test_another_interpreter_serves_and_is_shown(
    environment: dict[str, str], tmp_path: Path, other_python: str
) -> None:
    arguments = (*CLOCKWORK, "--after", f"python={other_python}", "--after", "env.ARM=after", *SMALL)
    stdout = done(environment, tmp_path, "run", *arguments, "--format", "markdown")
    assert f"after: python={other_python}, env.ARM=after" in stdout


def test_an_interpreter_that_lacks_what_a_host_needs_is_told(
    environment: dict[str, str], tmp_path: Path
) -> None:
    bare = virtual_environment(tmp_path / "bare", packages=False)
    without = {**environment, "PYTHONPATH": os.pathsep.join(environment["PYTHONPATH"].split(os.pathsep)[:4])}
    said = refused(environment | without, tmp_path, "run", *CLOCKWORK, "--after", f"python={bare}")
    assert said == f"bench: can't start after with {bare}: ModuleNotFoundError: No module named 'msgspec'"


def test_a_program_that_is_no_python_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    said = refused(environment, tmp_path, "run", *CLOCKWORK, "--before", "python=/bin/true", *SMALL)
    assert said == "bench: can't start before with /bin/true: it is not a Python that can run an engine"
    assert not list((tmp_path / "results").iterdir())
