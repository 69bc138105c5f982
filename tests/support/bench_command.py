"""Runs `bench` as a person does, in a process, and knows every process below it."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from overlap_bench.harness.store import tables

T = TypeVar("T")
PATIENCE_S = 300  # for what must happen at all, however busy the machine is
LOOK_S = 0.1  # between two looks at all processes: looking takes a core from what is looked at
BENCH = (sys.executable, "-c", "from overlap_bench.harness.__main__ import main; main()")


def wait_until(
    happened: Callable[[], T], else_told: Callable[[], object] = lambda: "", every_s: float = 0.01
) -> T:
    """What it says once that is true, however busy the machine is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, else_told()
        time.sleep(every_s)
    return found


def compared(*words: str, out: Path) -> dict[str, Any]:
    """The only comparison of `bench run` with these words, where every output was the same in both arms."""
    done = subprocess.run(
        [*BENCH, "run", *words, "--format", "json", "--out", str(out)],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["comparisons"]
    assert found["outputs"]["identical"] == found["outputs"]["compared"] > 0
    only: dict[str, Any] = found
    return only


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
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

        def told() -> bool:
            running = self.popen.poll() is None
            said = self.stderr.read_text()
            assert running or text in said, said
            self.look()
            return text in said

        wait_until(told, self.stderr.read_text, LOOK_S)

    def look(self) -> None:
        try:
            below = psutil.Process(self.popen.pid).children(recursive=True)
        except psutil.Error:
            return
        self.seen |= {each.pid: each for each in below}

    def find(self, word: str) -> psutil.Process:
        """A process below that has `word` in its command line; waits for it."""

        def found() -> psutil.Process | None:
            self.look()
            for process in psutil.Process(self.popen.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if word in " ".join(process.cmdline()):
                        return process
            return None

        process = wait_until(found, lambda: f"no process runs {word}", LOOK_S)
        assert process is not None
        return process

    def end(self, seconds: float = PATIENCE_S) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        stdout, _ = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, stdout, self.stderr.read_text()

    def interrupt(self) -> str:
        """Ctrl-C, and the last line that is said after it; no result is."""
        self.popen.send_signal(signal.SIGINT)
        code, stdout, stderr = self.end()
        assert (code, stdout) == (130, ""), stderr
        return last_line(stderr)

    def left(self) -> list[psutil.Process]:
        """Processes of the run that still live."""
        return [each for each in self.seen.values() if _runs(each)]


def wait_until_serving(process: psutil.Process) -> None:
    """Until it is in a round: then it has a voluntary switch for each step, and a few when it has booted."""
    wait_until(lambda: process.num_ctx_switches().voluntary >= 100)


def answer_signals() -> None:
    """Whoever started this in the background may have it ignore these, and what it starts."""
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


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def only_run(folder: Path) -> Path:
    """The one run that was measured into this folder's results."""
    (found,) = (folder / "results").iterdir()
    return found


def finished(run: Path) -> dict[int, str]:
    """Each finished block of a run, by what is in it."""
    return {
        number: hashlib.sha256(
            b"".join(each.read_bytes() for each in sorted((run / "blocks" / f"{number:03d}").iterdir()))
        ).hexdigest()
        for number in tables.finished_blocks(run)
    }
