"""What is asked of a lent card, rehearsed where the CPU plays it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.bench_command import PATIENCE_S
from tests.support.places import ROOT

CHECK = (sys.executable, "-m", "experiments.gpu.check")
PLAYED = os.pathsep.join([str(ROOT / "tests/support/card"), str(ROOT)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_nothing_counts_as_passed(tmp_path: Path) -> None:
    done = subprocess.run([*CHECK, "--out", tmp_path / "out"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no CUDA device here" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_rehearsal_passes_where_the_cpu_plays_the_card(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CHECK, "--rehearse", "--out", tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PLAYED},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.*")}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    assert "tokens: passed" in done.stdout
    assert "1 passed" in logs["tokens.txt"]
    assert "| decode_step_ms |" in logs["pinned-h2d.md"]
