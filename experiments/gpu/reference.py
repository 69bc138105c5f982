"""The reference runs of one CUDA machine, part by part, for as long as there is:

    python -m experiments.gpu.reference [PART ...] [--model gpt2:bfloat16] [--minutes 9] [--out FOLDER]

Parts, in this order where none is named: `facts` (what small copies do, a decode step against the device's
limits, what a second live engine costs), the sources' experiments, `factorial`, `aa`. Each is a command of
its own, its table and its log in FOLDER; a part for which no time is left is named and not begun, one that
runs out of it is interrupted, and what its finished blocks hold is described. All ends within the minutes.
Runs go under FOLDER/runs; one of a session that was cut short is described by

    python -m experiments.gpu.unfinished FOLDER/runs/RUN

and on the same machine each can be gone on with: bench run, factorial or experiment run, with --resume.

--model is a preset, with a dtype: gpt2:bfloat16, gpt2:float32, llama-1b:bfloat16. A large one is written to
the temporary folder once, gigabytes, for its random weights take a boot ten seconds to make.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from time import monotonic

from experiments.common import command_line
from experiments.common.record import FOLDER as RECORDS
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.presets.checkpoints import save
from overlap_bench.harness.plan import experiment_file

EXPERIMENTS = ("roseinfer-pinned-h2d", "sglang-launch-done", "vllm-output-processor")
PARTS = ("facts", *EXPERIMENTS, "factorial", "aa")
LARGE = ("llama-1b",)
MODELS = Path(gettempdir()) / "overlap-bench-models"
BENCH = (sys.executable, "-m", "overlap_bench")
BLOCKS = ("--trials", "4")  # the fewest an experiment takes: a boot captures a hundred programs
ROUNDS = {"roseinfer-pinned-h2d": "2", "sglang-launch-done": "2", "vllm-output-processor": "2"}
LEAST_S = 60  # a part is not begun with less
STOP_S = 30  # for bench to keep its blocks when it is interrupted, and as long again to show them
END_S = 2 * STOP_S


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured. `path` is what an engine is told."""

    name: str
    dtype: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.name}-{self.dtype}"


def prepared(asked: str, models: Path) -> Model:
    name, _, dtype = asked.partition(":")
    path = name
    if name in LARGE:
        folder = models / name
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")  # an earlier one may have been killed half way
            shutil.rmtree(partial, ignore_errors=True)
            save(PRESETS[name], partial)
            partial.rename(folder)
        path = str(folder)
    return Model(name, dtype or "float32", path)


def experiment_of(name: str, model: Model, out: Path) -> Path:
    """A copy of a committed experiment whose boots have this model; they are written for gpt2 in float32."""
    text = experiment_file.find(name).read_text()
    written = 'model = "gpt2"'
    if written not in text:
        raise SystemExit(f"{name} names no gpt2 to be replaced")
    file = out / f"{name}.toml"
    file.write_text(text.replace(written, f'model = "{model.path}", dtype = "{model.dtype}"'))
    return file


def commands(part: str, model: Model, out: Path) -> list[list[str]]:
    runs = ["--out", str(out / "runs")]
    said = ["--format", "markdown"]
    asked = ["--device", "cuda", "--model", model.path, "--dtype", model.dtype]
    if part == "facts":
        copies = [sys.executable, "-m", "experiments.gpu.pageable_copies"]
        shape = f"{model.path}:{model.dtype}"
        limit = [sys.executable, "-m", "experiments.gpu.decode_limit", shape]
        two = [sys.executable, "-m", "experiments.gpu.two_engines", shape]
        return [[*each, "--out", str(out)] for each in (copies, limit, two)]
    if part == "factorial":
        return [
            [
                *BENCH,
                "factorial",
                "--toggles",
                "h2d,sync,output",
                *asked,
                *BLOCKS,
                "--rounds",
                "2",
                *runs,
                *said,
            ]
        ]
    if part == "aa":
        return [[*BENCH, "aa", "--variant", "overlap", *asked, "--trials", "8", *runs, *said]]
    file = experiment_of(part, model, out)
    size = [*BLOCKS, "--rounds", ROUNDS[part]]
    return [[*BENCH, "experiment", "run", str(file), "--device", "cuda", *size, *runs, *said]]


def run(command: list[str], seconds: float, table: Path, log: Path) -> str:
    """How it ended; its output in `table`, what it said beside that in `log`."""
    with table.open("a") as out, log.open("a") as said:
        child = subprocess.Popen(command, stdout=out, stderr=said)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            return "interrupted"
    return "done" if code == 0 else f"exit {code}"


def show_unfinished(folders: set[Path], table: Path, log: Path) -> None:
    """What the finished blocks of these runs hold."""
    if folders:
        command = [sys.executable, "-m", "experiments.gpu.unfinished", *map(str, sorted(folders))]
        run(command, STOP_S, table, log)


def runs_under(out: Path) -> set[Path]:
    return set((out / "runs").glob("[0-9]*"))


def main() -> int:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", default="gpt2:bfloat16")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=RECORDS / "gpu")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    ends = monotonic() + 60 * given.minutes
    model = prepared(given.model, MODELS)
    out = given.out / model.label
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in given.parts or PARTS:
        table, log = out / f"{part}.md", out / f"{part}.log"
        for file in (table, log):
            file.unlink(missing_ok=True)  # what an earlier session wrote there
        for command in commands(part, model, out):
            began, left = monotonic(), ends - END_S - monotonic()
            if left < LEAST_S:
                print(f"{part}: not begun, no time is left", flush=True)
                break
            earlier = runs_under(out)
            ended = run(command, left, table, log)
            if ended == "interrupted":
                show_unfinished(runs_under(out) - earlier, table, log)
            print(f"{part}: {ended} in {monotonic() - began:.0f} s ({table})", flush=True)
            failed = failed or ended.startswith("exit")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
