"""What NVIDIA's compute-sanitizer finds in a short decode on a card:

    python -m experiments.gpu.sanitizer [--minutes 4] [--out FOLDER]

memcheck: accesses outside of a buffer, as by a wrong KV slot, on eager steps, with a cudaMalloc of its own
for each tensor (inside torch's caching allocator nothing is outside). racecheck: threads of one kernel that
race for shared memory, on captured decode; errors only, as the kernels are torch's and cuBLAS's, and threads
of one warp that rely on each other are a warning. Neither sees two streams race for a buffer: that is sought
with random delays (tests/gpu). The tokens are held against transformers'.

Exit 1 where one found an error, could not run here, or did not end in its half of the minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result

TOOL = "compute-sanitizer"
USUAL_PLACE = Path("/usr/local/cuda/bin") / TOOL
FOUND = 9  # the exit code asked of the tool where it found something
DECODED = "requests as transformers'"  # said at the end of the decode


@dataclass(frozen=True, slots=True)
class Check:
    """One of the tool's tools, and the decode it looks at."""

    tool: str
    graph: str
    options: tuple[str, ...]
    environment: dict[str, str]


CHECKS = (
    Check("memcheck", "off", (), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Check("racecheck", "on", ("--racecheck-detect-level", "error"), {}),
)


def decode(device_kind: str, graph: str) -> None:
    """What is looked at: six requests over all afters; AssertionError where a token is wrong."""
    from overlap_bench.engines.devices import open_device
    from overlap_bench.engines.overlap import SPEC
    from tests.support.in_process_engine import near_ties, serve, some_requests

    settings = SPEC.check({"schedule": "overlap", "sync": "copy-done", "h2d": "packed", "graph": graph})
    requests = some_requests(6)
    device = open_device(device_kind)
    try:
        tokens, _, _ = serve(device, settings, requests, max_batch_size=4, max_context=64)
    finally:
        device.close()
    ties = near_ties("tiny-gpt2", requests, tokens)
    print(f"{len(requests)} {DECODED}, {ties} of them up to a near-tie")


def passed(code: int | None, log: str) -> bool:
    """Whether the tool looked at a whole decode and found nothing. It may end with 0 where it can't run."""
    return code == 0 and "SUMMARY" in log and DECODED in log


def outcome(code: int | None, log: str) -> str:
    """How a check ended, in a line: the tool's own summary, or why there is none."""
    if code is None:
        return "did not end in time"
    lines = [line.strip("= ") for line in log.splitlines() if line.strip("= ")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), None)
    if summary is None or code not in {0, FOUND}:
        return f"exit {code}: {lines[-1] if lines else 'it said nothing'}"
    return summary


def run(tool: str, check: Check, decoding: list[str], seconds: float, log: Path) -> tuple[int | None, float]:
    """The exit code, None where time ran out, and seconds; all that was said is in `log`."""
    # Calls that may fail, such as probes for a driver's features, are torch's own affair: it checks them.
    command = [tool, "--tool", check.tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    command += ["--print-limit", "20", *check.options, *decoding]
    began = monotonic()
    environment = os.environ | check.environment
    with log.open("w") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(child.pid, signal.SIGKILL)  # the tool and the decode below it, which has the card
            child.wait()
    return code, monotonic() - began


def main() -> int:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu")
    parser.add_argument("--decode", metavar="GRAPH", help=argparse.SUPPRESS)  # what the tool is given to run
    given = parser.parse_args()
    if given.decode:
        decode("cuda", given.decode)
        return 0
    tool = shutil.which(TOOL) or (str(USUAL_PLACE) if USUAL_PLACE.exists() else None)
    if tool is None:
        raise SystemExit(
            f"{TOOL} is neither on the PATH nor at {USUAL_PLACE}: it comes with the CUDA toolkit"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    rows, clean, codes = [], [], {}
    for check in CHECKS:
        decoding = [sys.executable, "-m", "experiments.gpu.sanitizer", "--decode", check.graph]
        log = given.out / f"{check.tool}.log"
        code, seconds = run(tool, check, decoding, given.minutes * 60 / len(CHECKS), log)
        said = log.read_text()
        codes[check.tool] = code
        clean.append(passed(code, said))
        rows.append([check.tool, check.graph, outcome(code, said), f"{seconds:.0f}"])
        print(": ".join(rows[-1]), flush=True)
    write_result(
        __file__,
        title="compute-sanitizer on a short decode, tiny-gpt2, overlap with the other afters",
        header=["tool", "graph", "what it says", "s"],
        rows=rows,
        data=codes,
        folder=given.out,
    )
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
