"""The whole GPU check in one go, in nine minutes at most.

    python -m experiments.gpu.check [--out FOLDER] [--rehearse]

Tokens in fp32 over every pair of toggle choices, calm and under chaos, with captured graphs (the tests marked
`gpu`, the device contract among them); then a short before/after of each claim's variant with the `gpt2`
shape. A line per part as it ends; exit 1 if any part failed. A part may take what time is left, but for a
minute each of the parts that are still to come; the finished blocks of one that was cut off are shown by
python -m experiments.gpu.unfinished. Results go to results/reference/gpu/.

--rehearse cuts a few parts down to seconds, for a machine whose CPU plays the card
(PYTHONPATH=tests/support/card:.): it shows that the commands still run, and measures nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

import torch

from experiments.common import command_line

VARIANTS = ("pinned-h2d", "copy-done", "async-output")
# The tests of tokens. All others look at times, and want the card to themselves.
TOKENS = "(test_tokens_equal_generate or test_sampled_tokens or test_scores or test_half_precision)"
TESTS = ("tests/gpu",)  # others need extras
WORKERS = "8"
ALL_S, PART_S = 540, 60
# Of a rehearsal. Of an option that is given twice the last one counts.
SHORT = ["--model", "micro-gpt2", "--num-requests", "2", "--max-new-tokens", "32", "--interval-ms", "1"]
SHORT += ["--set", "max_batch_size=2", "--set", "max_context=48", "--trials", "1", "--rounds", "1"]
REHEARSED = {
    "tokens": ["-k", "calm and scores and tiny-gpt2 and thread", "-n", "0"],
    "pinned-h2d": SHORT,
}


def run(title: str, command: list[str], limit_s: float, log: Path) -> tuple[str, bool]:
    """Run one part, its output into `log`; (line to print, whether it passed)."""
    began = monotonic()
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(limit_s)
            outcome = "passed" if code == 0 else f"failed, exit {code}"
        except subprocess.TimeoutExpired:
            outcome = f"did not end within {limit_s:.0f} s"
        finally:  # kill the workers of a cut-off part too: what comes next would be timed beside them
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return f"{title}: {outcome} in {monotonic() - began:.0f} s ({log})", outcome == "passed"


def commands(out: Path) -> dict[str, list[str]]:
    """What is run, by its title."""
    # Without the project's own options: a lent machine's pytest may be too old for one of them.
    tests = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", *TESTS]
    tests += ["-v", "--maxfail=5", "--durations=15"]
    parts = {
        "device": [*tests, "-k", f"not {TOKENS}"],
        "tokens": [*tests, "-k", TOKENS, "-n", WORKERS],
    }
    for variant in VARIANTS:
        command = [sys.executable, "-m", "overlap_bench", "run", "--variant", variant, "--device", "cuda"]
        command += ["--model", "gpt2", "--trials", "2", "--out", str(out), "--format", "markdown"]
        parts[variant] = command
    return parts


def main() -> int:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--out", type=Path, default=Path("results/reference/gpu"))
    parser.add_argument("--rehearse", action="store_true", help="a few parts, cut down to seconds")
    asked = parser.parse_args()
    out: Path = asked.out
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: every test would be skipped, and that counts as passed")
    out.mkdir(parents=True, exist_ok=True)
    ends, parts, passed = monotonic() + ALL_S, commands(out), []
    if asked.rehearse:
        parts = {title: [*parts[title], *less] for title, less in REHEARSED.items()}
    for number, (title, command) in enumerate(parts.items(), start=1):
        limit = ends - monotonic() - PART_S * (len(parts) - number)
        log = out / f"{title}.{'md' if title in VARIANTS else 'txt'}"
        line, well = run(title, command, limit, log)
        print(line, flush=True)
        passed.append(well)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
