"""The whole GPU check in one go, in nine minutes at most: `python -m experiments.gpu_check [--out FOLDER]`.

Tokens in fp32 over every pair of toggle choices, calm and under chaos, with captured graphs (the tests marked
`gpu`, the device contract among them); then a short before/after of each claim's variant with the `gpt2`
shape. Ends with a line per part; exit 1 if any part failed. Results go to results/reference/gpu/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter

VARIANTS = ("pinned-h2d", "copy-done", "async-output")
TESTS = ("tests/test_device_cuda.py", "tests/test_gpu.py")  # all that are marked `gpu`; others need extras
TESTS_S, VARIANT_S = 300, 80


def run(title: str, command: list[str], limit_s: float, log: Path) -> tuple[str, bool]:
    """Run one part, its output into `log`; (line to print, whether it passed)."""
    began = perf_counter()
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
            outcome = "passed" if code == 0 else f"failed, exit {code}"
        except subprocess.TimeoutExpired:
            outcome = f"did not end within {limit_s:.0f} s"
    return f"{title}: {outcome} in {perf_counter() - began:.0f} s ({log})", outcome == "passed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/reference/gpu"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", *TESTS, "-v", "--maxfail=5", "--durations=15"]
    parts = [run("tokens, toggles, graphs", tests, TESTS_S, out / "tests.txt")]
    for variant in VARIANTS:
        command = [sys.executable, "-m", "harness.cli", "run", "--variant", variant, "--device", "cuda"]
        command += ["--model", "gpt2", "--blocks", "2", "--out", str(out), "--format", "markdown"]
        parts.append(run(variant, command, VARIANT_S, out / f"{variant}.md"))
    print("\n".join(line for line, _ in parts))
    return 0 if all(passed for _, passed in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
