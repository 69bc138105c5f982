"""Runs `bench` as a person does, in a process, with the clockwork engine installed beside the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PATIENCE_S = 300  # for what must happen at all: no test is about how quick a busy machine is
# The claim is ten seconds, and experiments/deaths.py measures it. A death that goes unnoticed would end a run
# when the engine has been silent for a minute.
DEATH_LIMIT_S = 30
TESTS = Path(__file__).resolve().parent
BENCH = (sys.executable, "-c", "from harness.cli import main; main()")
ENTRY_POINTS = "[bench.engines]\nclockwork = clockwork_engine:SPEC\n"
CLOCKWORK = (
    *("--engine", "clockwork", "--no-pretok", "--rounds", "2"),
    *("--num-requests", "8", "--max-new-tokens", "8"),
)


def installed(where: Path) -> dict[str, str]:
    """An environment in which the clockwork engine is an installed distribution."""
    information = where / "clockwork-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: clockwork\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join((str(TESTS.parent), str(TESTS), str(where), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


@dataclass(slots=True)
class Bench:
    """One running `bench`. `seen` gathers every process below it, so that none can be missed at the end."""

    popen: subprocess.Popen[str]
    stderr: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def wait_for(self, text: str) -> None:
        """Until stderr holds `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.stderr.read_text():
            self.look()
            assert self.popen.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.05)
        self.look()

    def look(self) -> None:
        try:
            below = psutil.Process(self.popen.pid).children(recursive=True)
        except psutil.Error:
            return
        self.seen |= {each.pid: each for each in below}

    def find(self, word: str) -> psutil.Process:
        """A process below that has `word` in its command line; waits for it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.look()
            for process in psutil.Process(self.popen.pid).children(recursive=True):
                try:
                    if word in " ".join(process.cmdline()):
                        return process
                except psutil.Error:
                    continue
        raise AssertionError(f"no process runs {word}")

    def end(self, seconds: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        stdout, _ = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, stdout, self.stderr.read_text()

    def left(self) -> list[psutil.Process]:
        """Processes of the run that still live."""
        return [each for each in self.seen.values() if _runs(each)]


def wait_until_serving(process: psutil.Process) -> None:
    """Until it is in a round: then it has a voluntary switch for each step, and a few when it has booted."""
    deadline = time.monotonic() + PATIENCE_S
    while process.num_ctx_switches().voluntary < 100:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ends(pid: int) -> bool:
    """A killed process may take a moment to go, and is a zombie where nobody reaps it."""
    deadline = time.monotonic() + PATIENCE_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def answer_signals() -> None:
    """Whoever started the tests in the background may have them ignore these, and what they start."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def start(environment: dict[str, str], folder: Path, *arguments: str) -> Bench:
    log = folder / f"stderr-{time.monotonic_ns()}"
    with log.open("w") as sink:
        popen = subprocess.Popen(
            [*BENCH, *arguments],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            preexec_fn=answer_signals,
        )
    return Bench(popen, log)


@contextmanager
def nobody_reads() -> Iterator[int]:
    """A pipe whose reader is gone, as behind `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
