"""The check with compute-sanitizer, without a card: what is run below it, and what is made of its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.gpu import sanitizer
from experiments.gpu.sanitizer import CHECKS, FOUND
from tests.support.processes import ends


@pytest.mark.parametrize("graph", sorted(check.graph for check in CHECKS))
def test_the_decode_that_is_looked_at_gives_the_tokens_of_transformers(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitizer.decode("emulated", graph)
    assert capsys.readouterr().out == DECODED


DECODED = "6 requests as transformers', 0 of them up to a near-tie\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{DECODED}========= ERROR SUMMARY: 0 errors\n"
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to\n"


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (0, CLEAN, "ERROR SUMMARY: 0 errors"),
        (FOUND, RACES, "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"),
        (1, CLEAN + "AssertionError: request 0\n", "exit 1: AssertionError: request 0"),
        (0, REFUSED, "exit 0: Error: Device not supported. Please refer to"),
        (1, "", "exit 1: it said nothing"),
        (None, CLEAN, "did not end in time"),
    ],
)
def test_the_line_is_the_tools_own_summary_or_why_there_is_none(
    code: int | None, log: str, said: str
) -> None:
    assert sanitizer.outcome(code, log) == said


@pytest.mark.parametrize(
    ("code", "log", "passed"),
    [
        (0, CLEAN, True),
        (0, REFUSED, False),
        (0, CLEAN.replace(DECODED, ""), False),
        (FOUND, CLEAN, False),
        (None, CLEAN, False),
    ],
)
def test_a_tool_that_refuses_or_sees_no_decode_has_not_passed(
    code: int | None, log: str, passed: bool
) -> None:
    assert sanitizer.passed(code, log) is passed


def test_each_tool_gets_the_decode_with_its_environment_and_ends_in_time(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nset -e\necho "$1 $2 $PYTORCH_NO_CUDA_MEMORY_CACHING"\nshift 8\nexec "$@"\n')
    tool.chmod(0o755)
    log = tmp_path / "log"
    memcheck, _ = CHECKS
    code, _ = sanitizer.run(str(tool), memcheck, [sys.executable, "-c", "print('decoded')"], 60, log)
    assert (code, log.read_text()) == (0, "--tool memcheck 1\ndecoded\n")

    tool.write_text("#!/bin/sh\nsleep 60 &\necho $!\nwait\n")
    code, _ = sanitizer.run(str(tool), memcheck, [], 0.5, log)
    assert code is None
    assert ends(int(log.read_text()))
