"""`bench` on a system that is odd in one way: does it end well, or in one line, and can it go on?

    python -m experiments.validation.odd_systems [CASE ...]

One arm of the overlap engine, a block or two; and `bench serve`, whose tokens must be transformers'. What is
odd is done to real processes: by a library that answers some system calls in the kernel's place
(experiments/fuzzing/odd_system.c), by small file systems mounted where only they see them, and by limits of
the kernel's (both take root). A disk that is full becomes so at each write of a run in turn, and each time
the run must go on once there is room again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from experiments.common import command_line
from experiments.common.bench_command import BENCH, PATIENCE_S, last_line
from experiments.common.record import write_result
from experiments.fuzzing.servers import running
from experiments.validation.mixed_load import OPTIONS as SERVED
from experiments.validation.mixed_load import ask, good_requests
from harness.analysis import frames

SOURCE = command_line.ROOT / "experiments" / "fuzzing" / "odd_system.c"
RUN = (
    *("run", "--engine", "overlap", "--device", "emulated", "--model", "micro-gpt2"),
    *("--blocks", "1", "--rounds", "1", "--num-requests", "8", "--max-new-tokens", "16"),
)
ENOLCK, ENOTSUP = 37, 95
# Where they get no memory, libzmq aborts and glibc's loader exits, each with a line; nothing above is asked.
BELOW_US = (-6, 127)
MOST_WRITES = 200  # of a run, and more than it has
MEMORY_GIB = (0.25, 0.5, 1, 2, 3, 4, 6, 8)
CONTAINERS_MIB = (64, 128, 256, 384, 512, 768, 1024, 2048)
CGROUPS = Path("/sys/fs/cgroup/memory")  # of the first version
REQUESTS, CLIENTS = 200, 6
SMALL = 'mount -t tmpfs -o size={size} tmpfs {where} && exec "$@"'


@dataclass(frozen=True, slots=True)
class Seen:
    """One `bench`: how it ended, and what is wrong with that."""

    what: str
    code: int
    said: str
    seconds: float
    wrong: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case runs: a folder of its own, and the library of odd answers."""

    folder: Path
    library: Path

    def bench(
        self,
        what: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        codes: Sequence[int] = (0,),
        **odd: str,
    ) -> Seen:
        """`odd`: what the library does. `codes`: how it may end; but for 0 and signals, in one line that says
        why."""
        environment = {**os.environ, "PYTHONPATH": str(command_line.ROOT)}
        if odd:
            environment |= {"LD_PRELOAD": str(self.library), **odd}
        began = time.perf_counter()
        done = subprocess.run(
            [*prefix, *BENCH, *arguments],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        said = last_line(done.stderr) if done.stderr.strip() else ""
        said = said.replace(f"{self.folder}/", "")
        wrong = ""
        if done.returncode not in codes:
            wrong = f"exit code {done.returncode}: {said}"
        elif "Traceback" in done.stderr or "unexpected" in done.stderr:
            wrong = done.stderr[-500:]
        elif 0 < done.returncode < 127 and not said.startswith("bench: "):
            wrong = f"no line says why: {said}"
        return Seen(what, done.returncode, said, time.perf_counter() - began, wrong)

    @property
    def runs(self) -> list[Path]:
        folder = self.folder / "results"
        return sorted(each for each in folder.iterdir() if (each / "manifest.json").exists())


@contextmanager
def place(library: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results").mkdir()
        yield Place(Path(folder), library)


def jumping_clock(library: Path) -> Iterator[Seen]:
    """Latencies must be those of a clock that does not jump."""
    for seconds in ("3600", "-3600", "100000000"):
        with place(library) as here:
            seen = here.bench(f"by {seconds} s", *RUN, ODD_JUMP_S=seconds)
            for run in here.runs:
                ttft_ms = frames.load(run).values["ttft_ms_p50"]
                if not ttft_ms.between(0, 60_000).all():
                    seen = replace(seen, wrong=f"TTFT of {ttft_ms.tolist()} ms")
            yield seen


def no_locks(library: Path) -> Iterator[Seen]:
    for error in (ENOLCK, ENOTSUP):
        with place(library) as here:
            yield here.bench(f"errno {error}", *RUN, ODD_LOCKS=str(error))
            for run in here.runs:
                yield here.bench(
                    f"errno {error}, --resume", "run", "--resume", str(run), ODD_LOCKS=str(error)
                )


def full_disk(library: Path) -> Iterator[Seen]:
    """At each write in turn; then with room again."""
    for writes in range(MOST_WRITES):
        with place(library) as here:
            odd = {"ODD_FULL": str(here.folder.resolve()), "ODD_WRITES": str(writes)}
            seen = here.bench(f"after {writes} writes", *RUN, "--blocks", "2", codes=(0, 2, 4), **odd)
            yield seen
            if not seen.code:
                return
            for run in here.runs:
                yield here.bench(f"after {writes} writes, then --resume", "run", "--resume", str(run))


def small_file_systems(library: Path) -> Iterator[Seen]:
    """Where this user may mount."""
    for what, where, size, codes in (
        ("shared memory of 64 KiB", "/dev/shm", "64k", (0,)),
        ("a temporary folder of 1 MiB", "{temporary}", "1m", (0,)),
        ("a temporary folder of 4 KiB", "{temporary}", "4k", (0, 2, 4)),
        ("results on 16 KiB", "{results}", "16k", (2, 4)),
        ("results on 128 KiB", "{results}", "128k", (0, 4)),
    ):
        with place(library) as here, tempfile.TemporaryDirectory() as temporary:
            filled = where.format(temporary=temporary, results=here.folder / "results")
            mounted = ("unshare", "-m", "sh", "-c", SMALL.format(size=size, where=filled), "sh")
            prefix = (*mounted, "env", f"TMPDIR={temporary}")
            yield here.bench(what, *RUN, prefix=prefix, codes=codes)


def little_memory(library: Path) -> Iterator[Seen]:
    """Address space of each process, which is what can be limited without a cgroup."""
    for gib in MEMORY_GIB:
        with place(library) as here:
            prefix = ("prlimit", f"--as={round(gib * (1 << 30))}")
            codes = (0, 2, 4, *BELOW_US)
            yield here.bench(f"{gib:g} GiB of addresses a process", *RUN, prefix=prefix, codes=codes)


def small_container(library: Path) -> Iterator[Seen]:
    """Memory of all processes together, beyond which the kernel kills one; then on with all there is."""
    for mib in CONTAINERS_MIB:
        with place(library) as here, container(mib) as prefix:
            seen = here.bench(f"{mib} MiB", *RUN, "--blocks", "2", prefix=prefix, codes=(0, 4, -9))
            yield seen
            for run in here.runs if seen.code else ():
                yield here.bench(f"{mib} MiB, then --resume", "run", "--resume", str(run))


@contextmanager
def container(mib: int) -> Iterator[tuple[str, ...]]:
    """What a command is begun with that is to have no more memory."""
    group = CGROUPS / f"bench-{os.getpid()}-{mib}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(mib << 20))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while (group / "cgroup.procs").read_text():  # whoever outlived its harness has seconds to go
            assert time.monotonic() < deadline, f"{group} has processes left"
            time.sleep(0.1)
        group.rmdir()


def serving_beside_jumps(library: Path) -> Iterator[Seen]:
    """Every answer must be right, and none may be cut off by a limit in time."""
    for seconds in ("3600", "-3600"):
        began = time.perf_counter()
        with running(SERVED, LD_PRELOAD=str(library), ODD_JUMP_S=seconds) as (bench, url):
            wrong = asyncio.run(asked(url))
            said = bench.stderr.read_text().strip()
        yield Seen(
            f"by {seconds} s",
            bench.popen.returncode,
            said,
            time.perf_counter() - began,
            f"exit code {bench.popen.returncode}" if bench.popen.returncode else "; ".join(wrong[:3]),
        )


async def asked(url: str) -> list[str]:
    """What was wrong with the answers to many requests, several at a time."""
    goods, rng, wrong = good_requests(), Random(1), list[str]()
    todo = iter(range(REQUESTS))

    async def client() -> None:
        for number in todo:
            said, _ = await ask(url, goods[number % len(goods)], rng)
            if said:
                wrong.append(f"request {number}: {said}")

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return wrong


CASES: dict[str, Callable[[Path], Iterator[Seen]]] = {
    "the time of day jumps ten times a second": jumping_clock,
    "locks fail": no_locks,
    "the disk is full": full_disk,
    "a file system is small": small_file_systems,
    "memory is limited": little_memory,
    "a container has little memory": small_container,
    "the time of day jumps under `bench serve`": serving_beside_jumps,
}


def main() -> None:
    names = {each.__name__: name for name, each in CASES.items()}
    wanted = command_line.chosen(__file__, __doc__, names) or list(names)
    rows, data = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "odd_system.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        for short in wanted:
            seen = []
            for each in CASES[names[short]](library):
                seen.append(each)
                print(
                    f"{names[short]}: {each.what}: exit {each.code}: {each.said or 'nothing'}",
                    file=sys.stderr,
                )
                if each.wrong:
                    print(f"    WRONG: {each.wrong}", file=sys.stderr)
            wrong = [f"{each.what}: {each.wrong}" for each in seen if each.wrong]
            ended = {
                code: sum(each.code == code for each in seen) for code in sorted({each.code for each in seen})
            }
            rows.append(
                [
                    names[short],
                    f"{len(seen)}",
                    ", ".join(f"{count} × {code}" for code, count in ended.items()),
                    f"{max(each.seconds for each in seen):.0f} s",
                    "; ".join(wrong) or "nothing",
                ]
            )
            data[short] = [asdict(each) for each in seen]
    write_result(
        __file__,
        title="`bench` on odd systems",
        header=["what is odd", "commands", "exit codes", "the longest", "what is wrong"],
        rows=rows,
        data=data,
    )


if __name__ == "__main__":
    main()
