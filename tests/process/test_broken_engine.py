"""Engines that do not keep to engines/api: the run says which did what, and gives no numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.common.processes import Child, end, stopped
from overlap_bench.harness.common.processes import start as start_child
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import session
from overlap_bench.harness.run.messages import LoadFailed
from overlap_bench.harness.store import tables
from overlap_bench.harness.workload.plan import Planned
from tests.support import broken_engine
from tests.support.bench_command import PATIENCE_S, wait_until
from tests.support.clockwork import installed
from tests.support.in_process import ended, refused

ONE_ARM = (
    *("run", "--engine", "broken", "--no-pretok", "--trials", "1", "--rounds", "1"),
    *("--num-requests", "4", "--max-new-tokens", "4", "--format", "json"),
)
UNSERVED = "before served no request: the engine"
RECORDED = "the engine of before made impossible records:"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the broken engine is an installed distribution."""
    return installed(tmp_path_factory.mktemp("site"), broken="tests.support.broken_engine:SPEC")


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("finishes twice", "the load generator gave up on before: the engine sent Finish(id=0, "),
        ("chunks for nobody", "the load generator gave up on before: the engine sent Chunk(id=987654, "),
        (
            "ids of text",
            "the load generator gave up on before: the engine sent something other than events: Exp",
        ),
        ("describes nothing", "the engine of before broke engines/api: Expected `object`, got `None`"),
        ("describes no context", "the engine of before describes its model without context"),
        ("counts in halves", "the engine of before broke engines/api: Expected `int`, got `float`"),
        ("starts half", "the engine of before failed: ValueError: no hands and no feet (broken_engine.py:"),
        (
            "starts half and hangs",
            "the engine of before failed: ValueError: no hands and no feet (broken_engine",
        ),
        ("returns early", "the engine of before failed: its run returned before pump said stop"),
        ("loses a token", f"{UNSERVED} sent 4 tokens, but says at the end that it sent 5"),
        ("ends before it starts", f"{RECORDED} launch of a step ends before it starts"),
    ],
)
def test_an_engine_that_breaks_the_contract_is_named_with_what_it_did(
    environment: dict[str, str], tmp_path: Path, breaks: str, message: str
) -> None:
    said = refused(environment, tmp_path, *ONE_ARM, "--before", f"breaks={breaks}", code=4)
    assert said.startswith(f"bench: {message}")
    assert not list((tmp_path / "results").iterdir())


def test_an_engine_that_had_to_be_killed_at_its_end_is_told_of(
    environment: dict[str, str], tmp_path: Path
) -> None:
    stderr = ended(environment, tmp_path, *ONE_ARM, "--before", "breaks=does not stop").err
    # In the discarded block too.
    assert stderr.count("the engine of before did not stop within 5 s and was killed") == 2


def test_an_engine_that_fails_when_it_is_stopped_for_the_last_time_fails_the_run_which_is_kept(
    environment: dict[str, str], tmp_path: Path
) -> None:
    said = refused(environment, tmp_path, *ONE_ARM, "--before", "breaks=can not stop again", code=4)
    assert said.startswith(
        "bench: the engine of before failed: ValueError: the spring is stuck (broken_engine.py:"
    )
    assert "1 of 1 trials are kept" in said
    (folder,) = (tmp_path / "results").iterdir()
    assert tables.finished_blocks(folder) == [0]


def test_an_engine_that_does_not_answer_between_rounds_is_taken_for_hanging(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    arm = in_process(monkeypatch, environment, "hangs between rounds")
    with session.Session() as processes:
        booted = processes.boot([arm])["before"]
        processes.begin(booted)
        monkeypatch.setattr(session, "ANSWER_S", 0.5)
        with pytest.raises(session.RunFailed, match=r"engine of before hangs: .* Collect for 0\.5 s"):
            processes.collect(booted)


def test_a_load_generator_that_is_stopped_in_mid_round_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    arm = in_process(monkeypatch, environment, "nothing")
    with session.Session() as processes:
        booted = processes.boot([arm])["before"]
        processes.begin(booted)
        monkeypatch.setattr(session, "ANSWER_S", 0.5)
        pid = processes.pids["load_generator"]
        assert Path(f"/proc/{pid}/timerslack_ns").read_text() == "1\n"
        psutil.Process(pid).suspend()
        stopped = rf"^the load generator \(pid {pid}\) is stopped, as by SIGSTOP, and .* for 0\.5 s$"
        with pytest.raises(session.RunFailed, match=stopped):
            processes.load(booted, [Planned(0, 0, "a", 3, False)], None, 0, lambda _: None)


@pytest.mark.parametrize("ends", [True, False], ids=["another one ended", "the load generator gave up"])
def test_a_process_that_is_stopped_is_named_and_not_who_waited_for_it(tmp_path: Path, ends: bool) -> None:
    """One of two ranks' devices, say: the other ends, and an engine that waits for the first says nothing."""
    with session.Session() as processes:
        waited_for, waiting = (
            start_child(role, ["sleep", "99"], {}, tmp_path / role) for role in ("device", "device of rank 1")
        )
        assert waiting.popen is not None
        processes._watch(waited_for)
        processes._watch(replace(waiting, popen=None))
        psutil.Process(waited_for.pid).suspend()

        def notice() -> None:
            if ends:
                waiting.popen.terminate()
                processes._wait(processes._from_hosts)
            else:
                processes._raise_load_failure(LoadFailed("the engine has been silent for 60 s"))

        stopped = rf"^the device \(pid {waited_for.pid}\) is stopped, as by SIGSTOP; seen by this: the "
        with pytest.raises(session.RunFailed, match=stopped):
            notice()
    waiting.popen.wait()


def test_a_start_may_take_any_time_unless_a_process_of_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    arm = in_process(monkeypatch, environment, "nothing")
    with session.Session() as processes:
        monkeypatch.setattr(session, "ANSWER_S", 0.02)  # no start is as quick
        processes.boot([arm])
        start = session.processes.start

        def start_stopped(*given: Any) -> Child:
            child = start(*given)
            psutil.Process(child.pid).suspend()
            return child

        monkeypatch.setattr(session.processes, "start", start_stopped)
        with pytest.raises(session.RunFailed, match=r"^the engine host of before \(pid \d+\) is stopped, "):
            processes.boot([arm])


def test_what_a_process_started_is_named_where_it_is_stopped(tmp_path: Path) -> None:
    parent = start_child("engine host", ["sh", "-c", "sleep 99 & wait"], {}, tmp_path / "log")
    try:
        while not (below := psutil.Process(parent.pid).children()) or below[0].name() != "sleep":
            pass  # the shell has forked, and is about to become what it starts
        assert stopped([parent]) == ""
        below[0].suspend()
        wait_until(lambda: below[0].status() == psutil.STATUS_STOPPED)
        assert stopped([parent]) == f"99 of the engine host (pid {below[0].pid})"
    finally:
        end([parent])


def test_a_process_that_is_stopped_goes_on_to_end_when_it_is_asked(tmp_path: Path) -> None:
    """A server between its turns, say, which was told to end while it stood still."""
    child = start_child("server", ["sleep", "99"], {}, tmp_path / "log")
    psutil.Process(child.pid).suspend()
    psutil.Process(child.pid).terminate()
    assert end([child], PATIENCE_S) == []


def in_process(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], breaks: str) -> Arm:
    """An arm for a session of this process."""
    monkeypatch.setattr(api, "find_engines", lambda: {"broken": broken_engine.SPEC})
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    toggles = {"pace": "fast", "tokens": "counted", "boot": "works", "service": "all", "breaks": breaks}
    return Arm(name="before", engine="broken", options=api.EngineOptions(), toggles=toggles)
