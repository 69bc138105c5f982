"""SGLang's own scheduler on a clock, 0.4.4's and today's, where BENCH_SGLANG044 and BENCH_SGLANG_PACED name
interpreters that have them."""

import json
import os
import subprocess
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.engines.api import STEP_KINDS
from overlap_bench.harness.metrics.definitions import SLICED
from tests.support.bench_command import PATIENCE_S, compared
from tests.support.in_process import ended
from tests.support.places import ROOT
from tests.support.small_sglang import DELAY_NS

PYTHON = {
    "sglang": os.environ.get("BENCH_SGLANG_PACED", ""),
    "sglang_044": os.environ.get("BENCH_SGLANG044", ""),
}
WAYS = {
    "sglang": {
        "normal": "schedule=normal",
        "cached": "schedule=normal prefix_cache=on",
        "overlap": "schedule=overlap",
        "overlap, cached": "schedule=overlap prefix_cache=on",
        "switched": "schedule=overlap ipc=msgpack sample=delayed flag_scan=one-pass field_names=cached",
    },
    "sglang_044": {
        "normal": "schedule=normal attention=flashinfer",
        "released": "schedule=overlap attention=flashinfer sync=launch-and-copy",
        "swapped": "schedule=overlap attention=triton sync=copy-then-launch prefix_cache=on",
        "dropped": "schedule=overlap attention=flashinfer sync=copy-done",
    },
}
THREADED = ("released", "swapped", "dropped")  # the forward pass is launched by another thread
LAUNCH, COPY = "wait.launch_done.start", "wait.copy_done.start"
Said = dict[str, dict[str, Any]]


def have(package: str) -> str:
    """Interpreter that has it, or the test is skipped."""
    if not PYTHON[package]:
        pytest.skip(f"no interpreter is named that has {package}")
    return PYTHON[package]


@pytest.fixture(scope="module", params=sorted(WAYS))
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def said(package: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What it gave, each way."""
    found = {}
    for way, choices in WAYS[package].items():
        done = subprocess.run(
            [have(package), "-m", "tests.support.small_sglang", package, *choices.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path_factory.mktemp("way"),
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


def test_an_answer_ends_at_a_stop_string_and_an_end_of_text(said: Said) -> None:
    for way in said.values():
        rounds = way["said"]
        whole, stop = rounds["together"]["3"]["text"], way["stop"]
        assert rounds["stopped"]["3"]["reason"] == "stop"
        assert rounds["stopped"]["3"]["text"] == whole[: whole.index(stop)]
        assert {each["reason"] for each in rounds["ended"].values()} == {"eos", "length"}
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


def test_no_collection_walks_over_what_was_imported(said: Said, package: str) -> None:
    for way in said.values():
        assert (way["frozen"] > 100_000) == (package == "sglang")  # 0.4.4 has no such switch


def test_each_phase_can_be_delayed_and_shows_it(said: Said) -> None:
    for each in said.values():
        assert set(each["delayed"]) == {"schedule", "metadata", "launch", "append", "output"}
        for phase, (spent_ns, least_ns, steps) in each["delayed"].items():
            assert spent_ns >= steps * DELAY_NS, phase
            assert least_ns >= DELAY_NS, phase


def test_a_step_that_comes_to_an_absent_package_ends_the_round(said: Said) -> None:
    for way, each in said.items():
        assert "came to vllm.ops in a step" in each["broken"]
        assert ("forward thread" in each["broken"]) == (way in THREADED)


@pytest.mark.parametrize(
    ("package", "variant"),
    [
        ("sglang", "sglang-overlap"),
        ("sglang_044", "sglang044-copy-done"),
        ("sglang_044", "sglang044-copy-then-launch"),
    ],
)
def test_a_variant_gives_equal_outputs_in_turns(tmp_path: Path, package: str, variant: str) -> None:
    found = compared(
        *("--variant", variant, "--pace", "3ms", "--trials", "2", "--all"),
        *("--set", f"python={have(package)}", "--max-new-tokens", "32", "--num-requests", "16"),
        out=tmp_path,
    )
    metrics = found["metrics"]
    assert metrics[SLICED]["before"] > 3
    waited = metrics.get("phase_wait_launch_done_us", {}).get("before") or 0
    assert (waited > 0) == (package == "sglang_044")
    (run,) = tmp_path.glob("*/manifest.json")
    arms = json.loads(run.read_text())["descriptions"].values()
    # 64 requests of 2,048 tokens and SGLang's 8: a model's that a host has no such memory for.
    assert [arm["model"]["kv_tokens"] for arm in arms] == [64 * (2048 + 8)] * 2


def changed_streamer(python: str) -> str:
    """A diff of the function that a toggle's own side stands in for, as of a checkout of SGLang."""
    name = "sglang/srt/managers/scheduler_components/output_streamer.py"
    (installed,) = Path(python).absolute().parents[1].glob(f"lib/*/site-packages/{name}")
    before = installed.read_text().splitlines(keepends=True)
    at = before.index("        # Send to detokenizer\n")
    after = [*before[:at], "        accepted = len(acc.rids)  # of no use\n", *before[at:]]
    return "".join(unified_diff(before, after, f"a/python/{name}", f"b/python/{name}"))


def test_a_diff_is_measured_and_our_own_side_does_not_take_its_place(tmp_path: Path) -> None:
    python = have("sglang")
    (tmp_path / "change.diff").write_text(changed_streamer(python))
    patch = f"patch={tmp_path / 'change.diff'}"
    few = (
        *("--engine", "sglang", "--pace", "3ms", "--trials", "2", "--set", f"python={python}"),
        *("--max-new-tokens", "32", "--num-requests", "16"),
    )
    found = compared(*few, "--after", patch, out=tmp_path / "out")
    assert found["after"]["patch"]["files"] == ["sglang/srt/managers/scheduler_components/output_streamer.py"]
    (ran,) = found["changed_code"]["in_rounds"]
    assert ran.endswith("SchedulerOutputStreamer._stream_output_generation")
    sides = ("--set", patch, "--before", "flag_scan=installed", "--after", "flag_scan=one-pass")
    stderr = ended({**os.environ}, tmp_path, "run", *few, *sides, code=2).err
    assert "flag_scan=one-pass does not fit: it is our own rewriting" in stderr
