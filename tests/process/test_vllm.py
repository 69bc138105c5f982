"""vLLM itself on a CPU, where BENCH_VLLM names an interpreter that has it (engines/vllm/README.md)."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.vllm import SPEC
from overlap_bench.harness.cli.printing import GATE_FAILED
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.plan.settings import make_arm
from overlap_bench.harness.run import preflight, records
from overlap_bench.harness.run.session import Session
from overlap_bench.harness.workload.plan import Planned
from tests.support.bench_command import PATIENCE_S, start
from tests.support.places import ROOT
from tests.support.vllm_builds import PLANTED_US, build

PYTHON = os.environ.get("BENCH_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="BENCH_VLLM names no interpreter that has vLLM")
COMPUTES = """
import threading
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
import overlap_bench.engines.vllm.worker

writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
ready = threading.Thread(target=writer.wait_until_ready)
ready.start()
reader.wait_until_ready()
ready.join()
waits = reader._spin_condition
waits.busy_loop_s, poll, polls = 5, waits.poller.poll, []
waits.poller.poll = lambda timeout: polls.append(timeout) or poll(timeout)
writer.enqueue("compute")
reader.dequeue()
waits.last_read -= 10  # it computes for longer than it stays awake
threading.Timer(0.1, writer.enqueue, ["sample"]).start()
assert reader.dequeue() == "sample"
print(len(polls), flush=True)
"""
ASKED = [Planned(number, 0, [number + 5] * 16, 33, False) for number in range(4)]
STEPS = 4


def arm(name: str, **changes: str) -> Arm:
    return make_arm({"vllm": SPEC}, name, "vllm", {}, {}, {"python": PYTHON, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "tiny-gpt2"}, "tiny-gpt2 has attention heads of size 16; on the CPU, vLLM"),
        ({"async_scheduling": "on"}, "async_scheduling=on: vLLM"),
        ({"num_blocks": "100000000"}, "a KV cache of 100000000 blocks of 128 tokens takes"),
    ],
)
def test_what_can_not_work_on_a_cpu_is_refused_before_anything_boots(
    changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(api.BadSetting, match=f"^after can't run: {reason}"):
        preflight.check([arm("after", **changes)])


def test_both_arms_have_to_fit_into_what_memory_is_free() -> None:
    """They boot side by side: neither would see what the other takes."""

    def refusal(num_blocks: int) -> re.Match[str]:
        with pytest.raises(api.BadSetting) as refused:
            preflight.check([arm("after", num_blocks=str(num_blocks))])
        found = re.search(r"takes ([\d.]+) GiB in each arm, and ([\d.]+) GiB are free", str(refused.value))
        assert found
        return found

    many = 100_000_000
    takes, free = map(float, refusal(many).groups())
    takes, free = map(float, refusal(int(many * 0.7 * free / takes)).groups())
    assert takes < free


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as found:
        yield found


@pytest.mark.parametrize("apart", ["off", "on"])
def test_it_takes_turns_and_records_every_step(session: Session, apart: str) -> None:
    """In the host's process, and with its core in one of its own."""
    booted = list(session.boot([arm(name, multiprocessing=apart) for name in ("before", "after")]).values())
    *elsewhere, core = sorted(os.sched_getaffinity(0))
    for each in booted:
        session.begin(each)
        host, computes = (psutil.Process(each.children[at].pid) for at in (0, -1))  # the worker, or the host
        assert computes.cpu_affinity() == [core]
        if apart == "on" and elsewhere:
            assert host.cpu_affinity() == computes.parent().cpu_affinity() == elsewhere
    done = session.take_turns(booted, ASKED, STEPS, lambda progress: None)
    assert not any(done.data.errors)
    spans = []
    for each in booted:
        record, turns = session.collect_turns(each)
        steps, taken = records.steps_frame(record), records.turns_frame(turns)
        assert list(steps["kind"]) == ["prefill"] + ["decode"] * 32
        assert (steps["batch"] == 4).all()
        assert (steps["device_ns"] > 0).all()
        assert (steps["schedule.end"] <= steps["device_start_ns"]).all()
        if apart == "off":
            assert (steps["append.end"] <= steps["output.end"]).all()
        found = slices.of_turns(steps, taken, lead=1)
        assert found["steps"].tolist() == [STEPS] * 8 + [1]
        assert slices.busy_while_parked(found) < 0.2
        spans += list(zip(taken["taken_ns"], taken["drained_ns"], strict=True))
    spans.sort()
    assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))
    half = len(ASKED)
    assert done.data.digests[:half] == done.data.digests[half:]
    assert len(set(done.data.digests)) > 1
    assert session.shut(booted) == []


def test_a_worker_that_computed_for_long_is_awake_for_its_next_word() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([PYTHON, "-c", COMPUTES], env=environment, text=True)
    assert said.split()[-1] == "0"


def test_its_core_in_a_process_of_its_own_gives_the_same_tokens(session: Session) -> None:
    arms = [arm("before", multiprocessing="off"), arm("after", multiprocessing="on")]
    digests = []
    for booted in session.boot(arms).values():
        session.begin(booted)
        done = session.load(booted, ASKED, None, 0, lambda progress: None)
        assert not any(done.data.errors)
        digests.append(done.data.digests)
        steps = records.steps_frame(session.collect(booted))
        assert steps["batch"].sum() == sum(each.max_new_tokens for each in ASKED)  # however they came
        assert session.shut([booted]) == []
    assert digests[0] == digests[1]


def test_a_gate_fails_a_build_whose_steps_take_6_percent_longer_and_passes_the_same_build(
    tmp_path: Path,
) -> None:
    """Two environments; the vLLM of the head has a scheduler that waits for as long as it is told."""
    head = build(PYTHON, tmp_path)

    def gate(longer_us: float) -> tuple[int, dict[str, Any]]:
        bench = start(
            {**os.environ, "PYTHONPATH": str(ROOT)},
            tmp_path,
            *("gate", "--engine", "vllm", "--set", "multiprocessing=off", "--before", f"python={PYTHON}"),
            *("--after", f"python={head}", "--after", f"env.{PLANTED_US}={longer_us:.1f}"),
            *("--metric", SLICED, "--max-regression", "3%", "--max-minutes", "10"),
            *("--format", "json"),
        )
        code, stdout, stderr = bench.end(2 * PATIENCE_S)
        assert stdout, stderr
        return code, json.loads(stdout)

    code, same = gate(0)
    assert code == 0, same["gate"]
    step_ms = same["comparisons"][0]["metrics"][SLICED]["before"]
    code, longer = gate(0.06 * step_ms * 1e3)
    assert code == GATE_FAILED, longer["gate"]
