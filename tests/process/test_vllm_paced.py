"""vLLM's own host code at a GPU's pace, where BENCH_VLLM names an interpreter that has it."""

import json
import os
import re
import subprocess
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.presets.checkpoints import save_without_weights
from overlap_bench.engines.vllm import SPEC
from overlap_bench.engines.vllm.paced import environment
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.settings import make_arm
from overlap_bench.harness.run.records import beside_frame, steps_frame, turns_frame
from overlap_bench.harness.run.session import Session
from overlap_bench.harness.workload.plan import Planned
from tests.support.bench_command import BENCH, PATIENCE_S, compared
from tests.support.places import ROOT

PYTHON = os.environ.get("BENCH_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="BENCH_VLLM names no interpreter that has vLLM")
SAID = ("off", "on", "off ngram_gpu", "on ngram_gpu", "off v1", "on v1")
PACED = {"pace": "3ms", "model": "tiny-llama", "dtype": "bfloat16", "enforce_eager": "off"}
PACED |= {"chunked_prefill": "on", "multiprocessing": "off", "max_context": "512"}
AHEAD = {"async_scheduling": "on"}
ASKED = [Planned(number, 0, [number + 5] * 16, 48, False) for number in range(4)]
Said = dict[str, dict[str, Any]]


# What a server of vLLM's makes of its flags, told at the start of a paced one.
CONFIGURED = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
asked = AsyncEngineArgs(model=sys.argv[1], dtype="bfloat16", max_model_len=512, **json.loads(sys.argv[2]))
found = asked.create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config
print(found.max_num_seqs, found.max_num_batched_tokens)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
current_platform.get_attn_backend_cls(AttentionBackendEnum[sys.argv[3]], None)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What vLLM gave on a paced device, with async scheduling off and on, without drafts and with them."""
    folder = tmp_path_factory.mktemp("model")
    save_without_weights(PRESETS["tiny-llama"], folder)
    found = {}
    for name in SAID:
        done = subprocess.run(
            [PYTHON, "-m", "tests.support.paced_vllm", str(folder), *name.split()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_chooses_what_it_would_on_a_card(said: Said) -> None:
    for name, each in said.items():
        found = "vllm.v1.worker.gpu_model_runner" if "v1" in name else "vllm.v1.worker.gpu.model_runner"
        assert each["runner"] == found
        assert each["executor"] == "UniProcExecutor"
        assert each["block_size"] == 16
        assert each["scheduler"] == ("AsyncScheduler" if name.startswith("on") else "Scheduler")


@pytest.mark.parametrize(
    ("flags", "backend", "refused"),
    [
        ({}, "FLASH_ATTN", ""),
        ({"enforce_eager": True}, "FLASH_ATTN", "does not know enforce_eager"),
        (
            {"compilation_config": {"cudagraph_mode": "NONE"}},
            "FLASH_ATTN",
            "the cudagraph_mode FULL_DECODE_ONLY",
        ),
        ({}, "TRITON_ATTN", "the attention backend FLASH_ATTN alone"),
    ],
)
def test_a_server_is_as_large_as_on_a_card_and_refuses_what_the_clock_does_not_tell_apart(
    tmp_path: Path, flags: dict[str, Any], backend: str, refused: str
) -> None:
    save_without_weights(PRESETS["tiny-llama"], tmp_path)
    paced = environment("3ms")
    done = subprocess.run(
        [PYTHON, "-c", CONFIGURED, str(tmp_path), json.dumps(flags), backend],
        env={**os.environ, **paced, "PYTHONPATH": os.pathsep.join((str(ROOT), paced["PYTHONPATH"]))},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    assert refused in done.stderr
    assert (done.returncode == 0) is (refused == ""), done.stderr
    if not refused:
        assert done.stdout.splitlines()[-1] == "1024 8192"


def test_tokens_follow_from_the_prompt_whatever_the_batch_the_scheduling_and_the_drafts(said: Said) -> None:
    off = said["off"]
    for what in ("together", "several", "ended", "crowd"):
        assert off[what] == said["on"][what], what
        for each in said.values():  # how much of a prompt is cached depends on when its blocks were full
            assert answers(each[what]) == answers(off[what]), what
    for each in said.values():
        ids = [
            {name: one["ids"] for name, one in each[what].items()} for what in ("together", "again", "alone")
        ]
        assert ids[0] == ids[1] == ids[2]
    assert len({tuple(each["ids"]) for each in off["together"].values()}) == 8


def answers(found: dict[str, Any]) -> Any:
    """Ids, texts and why they end, of one request, or of several by name."""
    if "ids" in found:
        return [found[name] for name in ("ids", "text", "reason")]
    return {name: answers(one) for name, one in found.items()}


def test_drafts_give_requests_several_tokens_a_step_and_cost_it_launches(said: Said) -> None:
    for scheduling in ("off", "on"):
        plain, drafted = said[scheduling], said[f"{scheduling} ngram_gpu"]
        assert drafted["steps"]["decode"] < 0.75 * plain["steps"]["decode"]
        assert drafted["counts"]["decode"]["launches"] > plain["counts"]["decode"]["launches"]
        assert drafted["counts"]["decode"]["replays"] > 0.9


def test_text_ends_at_a_stop_string_and_at_an_end_of_text(said: Said) -> None:
    whole = said["off"]["together"]["0"]["text"]
    stopped = said["off"]["several"]["stop"]
    assert stopped["reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(whole[12:16])]
    reasons = {each["reason"] for each in said["off"]["ended"].values()}
    assert reasons == {"stop", "length"}
    assert "\ufffd" not in whole


def test_logprobs_prefix_cache_chunks_and_preemption_are_vllms_own(said: Said) -> None:
    for name, each in said.items():
        assert each["several"]["scored"]["logprobs"] == (None if "v1" in name else [4] * 24)
        assert all(one["cached"] > 0 for one in each["again"].values())
        assert each["counts"]["mixed"]["launches"] > 0  # a long prompt in parts, beside rows that decode
        assert each["preempted"] > 0
        assert each["crowd"] == each["calm"]


def test_a_decode_step_is_one_replay_and_several_launches(said: Said) -> None:
    for name, each in said.items():
        decode = each["counts"]["decode"]
        # Near the longest that a request may be, drafts are fewer than a graph has rows for.
        assert 1 <= decode["replays"] <= (1.5 if "ngram_gpu" in name else 1)
        assert decode["launches"] > (3 if "v1" in name else 5)
        assert decode["operations"] > 5
        assert decode["copies"] >= 2


def test_a_prefill_is_pieces_between_layers_of_attention(said: Said) -> None:
    layers = PRESETS["tiny-llama"].config["num_hidden_layers"]
    for name in ("off", "on", "off v1", "on v1"):  # with drafts, graphs hold four times the tokens
        graphs, kernels = (said[name]["pieces"][each] for each in ("graphs", "kernels"))
        assert graphs["prefill_replays"] == 1 + layers
        assert "prefill_replays" not in kernels
        # Per layer four matrices, two norms, positions and the activation; the embedding and the last norm.
        assert kernels["prefill_launches"] - graphs["prefill_launches"] == 8 * layers + 2


def test_a_version_that_lacks_a_name_is_told_which(said: Said) -> None:
    for name, missing in said["off"]["lacking"].items():
        assert any(each == name or each.startswith(f"{name}'s ") for each in missing), name


def test_async_scheduling_hides_the_host_behind_the_device(tmp_path: Path) -> None:
    """The variant of its name, by turns: the device's part is the clock's in both arms."""
    found = compared(
        *("--variant", "vllm-async-scheduling", "--pace", "12ms", "--trials", "2", "--all"),
        *("--set", f"python={PYTHON}", "--max-new-tokens", "32", "--num-requests", "16"),
        out=tmp_path,
    )
    metrics = found["metrics"]
    assert metrics[SLICED]["after"] < metrics[SLICED]["before"]
    assert metrics["exposed_host_us"]["after"] < metrics["exposed_host_us"]["before"]
    for phase in ("schedule", "metadata", "launch", "append"):
        assert metrics[f"phase_{phase}_us"]["before"] > 0


@pytest.mark.parametrize("multiprocessing", ["off", "on"])
def test_a_profile_shows_each_phase_of_a_step_and_the_device(tmp_path: Path, multiprocessing: str) -> None:
    done = subprocess.run(
        [
            *BENCH,
            *("profile", "--engine", "vllm", "--pace", "3ms", "--set", f"python={PYTHON}"),
            *("--set", f"multiprocessing={multiprocessing}", "--set", "async_scheduling=on"),
            *("--max-new-tokens", "48", "--num-requests", "4", "--arrival", "burst", "--out", str(tmp_path)),
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.glob("*/*.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    steps: dict[str, set[int]] = {}
    for each in events:
        if each["ph"] == "X" and "step" in each["args"]:
            steps.setdefault(each["name"], set()).add(each["args"]["step"])
    for name in ("schedule", "metadata", "launch", "wait.copy_done", "append", "output", "decode"):
        assert len(steps[name]) >= 24, name


def short_run(out: Path, *arguments: str) -> dict[str, Any]:
    """What a short run of vLLM at a pace found."""
    return compared(
        *("--engine", "vllm", "--pace", "3ms", "--trials", "2", "--interleaved-rounds", "2", "--all"),
        *("--set", f"python={PYTHON}", "--arrival", "closed", "--concurrency", "4"),
        *("--max-new-tokens", "40", "--num-requests", "8"),
        *arguments,
        out=out,
    )


def scheduler_of(python: str) -> Path:
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", where], encoding="utf-8").strip()
    return Path(site, "vllm", "v1", "core", "sched", "scheduler.py")


def diff_of(source: Path, changed: str) -> str:
    lines = [source.read_text().splitlines(keepends=True), changed.splitlines(keepends=True)]
    name = "vllm/v1/core/sched/scheduler.py"
    return "".join(unified_diff(*lines, f"a/{name}", f"b/{name}"))


def test_a_diff_of_vllm_is_an_arm(tmp_path: Path) -> None:
    """The diff schedules for a known time longer. What is installed stays as it is."""
    source = scheduler_of(PYTHON)
    begins = re.search(r"    def schedule\(.*\n", source.read_text())
    busy = ["import time", "until = time.perf_counter() + 0.001", "while time.perf_counter() < until: pass"]
    lines = "".join(f"        {line}\n" for line in busy)
    changed = source.read_text().replace(begins[0], begins[0] + lines)
    (tmp_path / "busy.diff").write_text(diff_of(source, changed))
    before = source.read_bytes()
    found = short_run(
        tmp_path / "runs",
        *("--after", f"patch={tmp_path / 'busy.diff'}", "--set", "multiprocessing=off"),
    )
    assert source.read_bytes() == before
    assert found["after"]["patch"]["files"] == ["vllm/v1/core/sched/scheduler.py"]
    assert found["changed_code"]["in_rounds"] == ["vllm/v1/core/sched/scheduler.py: Scheduler.schedule"]
    row = found["metrics"]["decode_phase_schedule_us"]
    assert 900 < row["after"] - row["before"] < 1_500
    assert found["metrics"][SLICED]["change"] > 0


def test_every_before_of_ours_and_of_vllms_is_in_force_and_gives_the_same(tmp_path: Path) -> None:
    """Each toggle looks for itself whether it is, and ends the engine where it is not."""
    both = ["logprobs=0"]
    before = ["flat_logprobs=off", "block_hash=sha256"]
    after = ["flat_logprobs=on", "block_hash=sha256_cbor", "block_hasher=full", "block_map=nested"]
    after += ["detokenizer=slow", "empty_blocks=new", "env_cache=off", "free_list=one-by-one"]
    after += ["heap=collected", "remove_all=filter"]
    asked = [f"--{side}={each}" for side, sides in (("set", both), ("before", before), ("after", after))
             for each in sides]  # fmt: skip
    short_run(tmp_path, "--prefix-cache", "--set", "multiprocessing=off", *asked)


def test_drafts_give_the_same_outputs_in_rounds_in_turns_and_in_a_core_of_its_own() -> None:
    drafted = {"spec": "ngram_gpu"}
    changes = {"plain": {}, "before": drafted, "after": {**drafted, **AHEAD, "multiprocessing": "on"}}
    arms = [
        make_arm({"vllm": SPEC}, name, "vllm", {}, {}, {"python": PYTHON, **PACED, **each})
        for name, each in changes.items()
    ]
    with Session() as session:
        booted = session.boot(arms)
        outputs = []
        assert all(each.description.deterministic for each in booted.values())  # an output that differs fails
        for name, each in booted.items():
            session.begin(each)
            done = session.load(each, ASKED, None, 0, lambda progress: None)
            assert not any(done.data.errors)
            outputs.append(done.data.digests)
            record = session.collect(each)
            steps, counters = steps_frame(record), record.counters
            assert counters["decode_launches"] > 5 * (steps["kind"] == "decode").sum()
            if name == "plain":
                assert "draft_tokens" not in counters
                continue
            # Half, a quarter and an eighth of three.
            assert 0.15 < counters["accepted_drafts"] / counters["draft_tokens"] < 0.45
            assert steps["given"].max() > steps["batch"].max()
        both = [booted[name] for name in ("before", "after")]
        for each in both:
            session.begin(each)
        delays = [("", 0), ("send", 200_000), ("output-process", 200_000)]
        done = session.take_turns(both, ASKED, 4, lambda progress: None, delays)
        assert not any(done.data.errors)
        half = len(ASKED)
        assert outputs == 3 * [done.data.digests[:half]]
        assert outputs[0] == done.data.digests[half:]
        for each, beside in zip(both, (set(), {"send", "output-process"}), strict=True):
            record, turns = session.collect_turns(each)
            assert set(beside_frame(record)["phase"]) == beside
            assert bool(turns_frame(turns)["delayed_ns"].sum()) == bool(beside)


def test_short_ways_of_a_decode_give_the_same_also_in_a_core_of_its_own(tmp_path: Path) -> None:
    asked = ["--before=output_chunk=all", "--after=output_chunk=128"]
    asked += ["--after=update=decode-path", "--after=slots=decode-path"]
    short_run(tmp_path, "--set", "multiprocessing=on", "--set", "async_scheduling=on", *asked)
