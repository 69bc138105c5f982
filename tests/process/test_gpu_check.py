"""The parts of the GPU check run one after another, each within its time, and on a stand-in for the card they
pass. They need no card for that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from experiments.common.command_line import ROOT
from experiments.gpu import check
from tests.support.processes import ends

WORKER = "import time; print('at work', flush=True); time.sleep(60)"
PART = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}])
print("pid", worker.pid, flush=True)
worker.wait()
"""


def test_a_part_that_is_cut_off_leaves_no_worker_beside_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line, passed = check.run("tokens", [sys.executable, "-c", PART], 3, log)
    assert not passed
    assert line.startswith("tokens: did not end within 3 s in ")
    said = log.read_text().split()
    assert said[:1] == ["pid"], "it began"
    assert ends(int(said[1]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_nothing_counts_as_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no CUDA device here"):
        check.main()
    assert not list(tmp_path.iterdir())


def test_a_part_that_fails_says_how(tmp_path: Path) -> None:
    line, passed = check.run("device", [sys.executable, "-c", "raise SystemExit(3)"], 60, tmp_path / "log")
    assert not passed
    assert line.startswith("device: failed, exit 3 in ")


# The card's own commands, cut down to seconds: of an option that is given twice the last one counts.
FEW = ["-k", "calm and scores and tiny-gpt2 and (thread or pageable)", "-n", "0"]
SHORT = ["--model", "micro-gpt2", "--num-requests", "2", "--max-new-tokens", "32", "--interval-ms", "1"]
SHORT += ["--set", "max_batch_size=2", "--set", "max_context=48", "--blocks", "1", "--rounds", "1"]


@pytest.mark.parametrize(
    ("part", "less", "says"),
    [("tokens", FEW, "2 passed"), ("pinned-h2d", SHORT, "| step_ms_sliced |")],
)
def test_a_part_passes_where_the_cpu_plays_the_card(
    part: str, less: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/support/card"), str(ROOT)]))
    log = tmp_path / "log"
    line, passed = check.run(part, [*check.commands(tmp_path / "runs")[part], *less], 300, log)
    assert passed, f"{line}\n{log.read_text()}"
    assert says in log.read_text()
