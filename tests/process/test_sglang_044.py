"""SGLang 0.4.4's own scheduler on a clock, where BENCH_SGLANG044 names an interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.engines.api import STEP_KINDS
from overlap_bench.harness.metrics.definitions import SLICED
from tests.support.bench_command import PATIENCE_S, compared

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("BENCH_SGLANG044", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="BENCH_SGLANG044 names no interpreter that has SGLang 0.4.4"
)
Said = dict[str, dict[str, Any]]
WAYS = {
    "normal": ("normal", "flashinfer"),
    "released": ("overlap", "flashinfer", "launch-and-copy"),
    "swapped": ("overlap", "triton", "copy-then-launch"),
    "dropped": ("overlap", "flashinfer", "copy-done"),
}
LAUNCH, COPY = "wait.launch_done.start", "wait.copy_done.start"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What it gave, each way."""
    found = {}
    for way, choices in WAYS.items():
        done = subprocess.run(
            [PYTHON, "-m", "tests.support.small_sglang", *choices],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path_factory.mktemp(way),
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        found[way] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_tokens_are_the_same_whatever_loop_wait_batch_turn_and_preemption(said: Said) -> None:
    normal = said["normal"]["said"]
    for way in said.values():
        rounds = way["said"]
        for name in ("together", "long", "ended", "crowd", "none", "stopped"):
            assert rounds[name] == normal[name], name
        for name in ("again", "turns", "each"):
            assert rounds[name] == rounds["together"], name
        assert rounds["alone"]["3"] == rounds["together"]["3"]
        assert rounds["calm"]["3"] == rounds["crowd"]["3"]
    assert len({tuple(each["ids"]) for each in normal["together"].values()}) == 8
    assert all(len(each["ids"]) == 24 for each in normal["together"].values())


def test_an_answer_ends_at_a_stop_string_an_end_of_text_and_where_it_is_cancelled(said: Said) -> None:
    for way in said.values():
        rounds = way["said"]
        whole, stop = rounds["together"]["3"]["text"], way["stop"]
        assert rounds["stopped"]["3"]["reason"] == "stop"
        assert rounds["stopped"]["3"]["text"] == whole[: whole.index(stop)]
        assert {each["reason"] for each in rounds["ended"].values()} == {"eos", "length"}
        reasons = {name: each["reason"] for name, each in rounds["cancelled"].items()}
        assert [name for name, reason in reasons.items() if reason == "cancelled"] == ["2", "5"]
        assert rounds["cancelled"]["1"] == rounds["together"]["1"]
        assert "256 at most" in rounds["refused"]["0"]["reason"]
        assert "empty prompt" in rounds["refused"]["1"]["reason"]
        assert rounds["refused"]["3"] == rounds["together"]["3"]


def test_each_step_is_recorded_with_its_phases(said: Said) -> None:
    for way, each in said.items():
        for name, steps in each["steps"].items():
            assert [step["step"] for step in steps] == list(range(len(steps))), name
            for step in steps:
                order = ["schedule.start", "metadata.start", "launch.start", "launch.end", "append.end"]
                stamps = [step[stamp] for stamp in order]
                assert stamps == sorted(stamps)
                assert stamps[0] > 0
                assert (step[LAUNCH] > 0) == (way in ("released", "swapped"))
                assert 0 < step[COPY] <= step["append.start"]
        kinds = [STEP_KINDS[step["kind"]] for step in each["steps"]["together"]]
        assert kinds[0] == "prefill"
        assert kinds.count("decode") >= 23
        assert max(step["batch"] for step in each["steps"]["together"]) == 8
        assert [STEP_KINDS[step["kind"]] for step in each["steps"]["long"]][:3] == ["prefill"] * 3
        assert sum(step["preempted"] for step in each["steps"]["crowd"]) > 0


def test_a_decode_step_is_one_replay_and_a_launch_of_triton(said: Said) -> None:
    for each in said.values():
        decode = each["counts"]["decode"]
        assert decode["replays"] == 1
        assert decode["launches"] >= 1
        assert decode["operations"] >= 5
        assert 5 <= decode["copies"] < 12


def test_a_step_that_comes_to_an_absent_package_ends_the_round(said: Said) -> None:
    for way, each in said.items():
        assert "came to vllm.ops in a step" in each["broken"]
        assert ("forward thread" in each["broken"]) == (way != "normal")


@pytest.mark.parametrize("variant", ["sglang044-copy-done", "sglang044-copy-then-launch"])
def test_a_variant_gives_equal_outputs_in_turns(tmp_path: Path, variant: str) -> None:
    found = compared(
        *("--variant", variant, "--pace", "3ms", "--trials", "2", "--all"),
        *("--set", f"python={PYTHON}", "--max-new-tokens", "32", "--num-requests", "16"),
        out=tmp_path,
    )
    metrics = found["metrics"]
    assert metrics[SLICED]["before"] > 3
    assert metrics["phase_wait_launch_done_us"]["before"] > 0
