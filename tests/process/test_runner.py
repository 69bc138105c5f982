"""Whole runs of real processes on the clockwork engine: what is kept and what is left when one dies."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pandas as pd
import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.processes import ORPHANED
from overlap_bench.harness.common import processes
from overlap_bench.harness.common.processes import Interrupted, interruptible
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import forecast, hosts, session, trial
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import held, read_manifest, write_manifest
from overlap_bench.harness.studies import measure
from overlap_bench.harness.workload.workload import Workload
from tests.support import clockwork_engine, gap
from tests.support.bench_command import (
    BENCH,
    PATIENCE_S,
    Bench,
    answer_signals,
    last_line,
    only_run,
    start,
    wait_until,
)
from tests.support.clockwork import CLOCKWORK
from tests.support.in_process import done, ended, refused
from tests.support.made_blocks import described, manifest, stored_result
from tests.support.processes import nobody_reads

COMPARE = (*CLOCKWORK, "--before", "pace=slow", "--after", "pace=fast")


def in_second_block(environment: dict[str, str], folder: Path) -> Bench:
    """A run of two blocks that has one on disk and works on the next."""
    bench = start(environment, folder, "run", *COMPARE, "--trials", "2", "--num-requests", "60")
    bench.wait_for("trial 1 of 2 done")
    return bench


def test_every_arm_is_asked_what_fits_into_the_smallest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one skips for its length moves all prompts behind it. And what an engine started is no stranger on
    a card."""
    asked = []

    def remember(*arguments: Any) -> dict[str, pd.DataFrame]:
        asked.append((arguments[4].arm.name, arguments[5]))
        assert os.getpid() in arguments[7]
        return {"rounds": pd.DataFrame([{"seed": 0}])}

    plan = manifest(rounds=1, warmup_rounds=0)
    booted = {}
    for arm, context in zip(plan.design.arms, (1024, 512), strict=True):
        described = plan.descriptions[arm.name]
        smaller = msgspec.structs.replace(described, model={**described.model, "context": context})
        booted[arm.name] = session.Booted(arm, (), cast(Any, None), "", smaller, Path())
    monkeypatch.setattr(trial, "_round", remember)
    monkeypatch.setattr(session.Booted, "pids", {"engine": os.getppid()})
    trial.serve(cast(Any, SimpleNamespace(pids={})), [plan], 0, booted, lambda happening: None)
    assert dict(asked) == {"before": 512, "after": 512}


def test_a_comparison_from_boot_to_result(environment: dict[str, str], tmp_path: Path) -> None:
    bench = start(environment, tmp_path, "run", *COMPARE, "--trials", "3", "--format", "json")
    code, stdout, stderr = bench.end()
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result.items() >= stored_result(only_run(tmp_path)).items()
    assert stderr.count("no verdict yet: tpot_ms_p50") == 1  # after the second block of three
    assert last_line(stderr).startswith(f"bench: next: bench report results/{only_run(tmp_path).name} ")
    comparison = result["comparisons"][0]
    assert comparison["metrics"]["tpot_ms_p50"]["verdict"] is not None  # which one, is the machine's affair
    assert comparison["outputs"].pop("weak").startswith("all are one of 8 texts")
    assert comparison["outputs"] == {"compared": 48, "identical": 48, "near_ties": None, "distinct": 8}
    assert comparison["mechanism"]["ticks"]["before"] > 0
    manifest = read_manifest(only_run(tmp_path))
    assert set(manifest.descriptions) == {"before", "after"}
    rounds = tables.read_block(only_run(tmp_path), 0)["rounds"]
    assert {"load_1m", "steal_share", "switches_voluntary.engine", "cpu_ms.device", "seed"} <= set(
        rounds.columns
    )
    assert sorted(rounds["position"]) == [0, 0, 1, 1]
    seeds = rounds.groupby("round")["seed"].nunique()
    assert (seeds == 1).all()  # both arms are asked the same
    assert not bench.left()


def test_an_arm_against_itself_leaves_a_floor_that_a_later_run_shows(
    environment: dict[str, str], tmp_path: Path
) -> None:
    few = (*CLOCKWORK, "--trials", "2", "--rounds", "1", "--format", "json")
    stdout = done(environment, tmp_path, "aa", *few)
    first = json.loads(stdout)
    assert first["comparisons"][0]["variant"] == "aa-clockwork"
    assert first["comparisons"][0]["before"] == first["comparisons"][0]["after"]
    floor = first["comparisons"][0]["metrics"]["tpot_ms_p50"]["floor"]
    assert floor > 0
    stdout = done(environment, tmp_path, "run", *few, "--after", "pace=fast")
    assert json.loads(stdout)["comparisons"][0]["metrics"]["tpot_ms_p50"]["floor"] == floor


def test_a_run_until_decided_stops_at_a_look_and_is_resumed_by_the_same_rule(
    environment: dict[str, str], tmp_path: Path
) -> None:
    until = ("--until-decided", "--max-trials", "8", "--rounds", "1", "--interval-ms", "1")
    bench = start(environment, tmp_path, "run", *COMPARE, *until)
    bench.wait_for("trial 2 of at most 8 done")
    assert "of at most 8 trials are kept" in bench.interrupt()
    again = ("run", "--resume", str(only_run(tmp_path)), "--format", "json")
    code, stdout, stderr = start(environment, tmp_path, *again).end()
    assert code == 0, stderr
    result = json.loads(stdout)
    blocks = result["comparisons"][0]["trials"]
    assert blocks in (6, 8)  # the looks; at which one it is clear, is the machine's affair
    assert result["stopped_because"].startswith((f"decided at {blocks} of at most 8 trials", "8 trials, the"))
    assert tables.finished_blocks(only_run(tmp_path)) == list(range(blocks))
    assert result["comparisons"][0]["confidence"] > 0.95
    assert any("resumed after 2 trials" in each for each in result["comparisons"][0]["warnings"])


def test_a_run_whose_time_is_up_sooner_than_foreseen_ends_with_what_there_is_and_is_whole(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast.Clock, "is_up", lambda self: True)
    short = ("--max-minutes", "100", "--rounds", "1", "--interleaved-rounds", "0")
    _, stdout, stderr = ended(environment, tmp_path, "run", *COMPARE, *short, "--format", "json")
    assert " 100 trials fit into 100 minutes" in stderr
    result = json.loads(stdout)
    fewer = "by the first boots 100 would have: the machine became slower"
    assert result["stopped_because"] == f"1 trial, as many as fit into 100 minutes ({fewer})"
    folder = only_run(tmp_path)
    assert tables.finished_blocks(folder) == [0]
    again = ("run", "--resume", str(folder), "--format", "json")  # there is nothing left to do
    assert json.loads(done(environment, tmp_path, *again)) == result
    done(environment, tmp_path, "compare", str(folder))


def test_a_run_is_repeated_from_its_manifest(environment: dict[str, str], tmp_path: Path) -> None:
    few = ("--trials", "1", "--rounds", "1", "--seed", "5", "--margin", "3%")
    done(environment, tmp_path, "run", *COMPARE, *few)
    first = only_run(tmp_path)
    again = ("rerun", str(first), "--out", "again", "--format", "json")
    stdout = done(environment, tmp_path, *again)
    (second,) = (tmp_path / "again").iterdir()
    assert json.loads(stdout)["run"] == second.name != first.name
    assert read_manifest(second).design == read_manifest(first).design
    manifest = first / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"cores": ', '"cores": 1'))
    stderr = ended(environment, tmp_path, *again).err
    assert f"bench: unlike {first.name}: different machine: cores was 1" in stderr


def test_outputs_that_differ_fail_the_run(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = (*CLOCKWORK, "--after", "tokens=shifted", "--trials", "1")
    stdout = ended(environment, tmp_path, "run", *arguments, code=1).out
    assert "OUTPUTS DIFFER in 16 of 16 requests" in " ".join(stdout.split())


@pytest.mark.parametrize(
    ("change", "expected", "message"),
    [
        ("boot=breaks", 4, "bench: the engine of after failed: the mainspring is broken"),
        ("boot=refuses", 2, "bench: it wants to be wound up first"),
        ("boot=lacks", 2, "can't run the engine of after: No module named 'mainspring'"),
        ("service=none", 4, "bench: after served no request: out of order"),
        (
            "python=/nowhere/python",
            2,
            "bench: can't start after with /nowhere/python: No such file or directory",
        ),
    ],
)
def test_an_engine_that_does_not_serve(
    environment: dict[str, str], tmp_path: Path, change: str, expected: int, message: str
) -> None:
    said = refused(environment, tmp_path, "run", *CLOCKWORK, "--after", change, code=expected)
    assert said.endswith(message)
    assert not list((tmp_path / "results").iterdir())  # no finished block: nothing to keep


def test_arms_on_different_devices_are_never_compared() -> None:
    plan = manifest()
    kinds = {"before": "emulated", "after": "cuda"}
    booted: Any = {name: SimpleNamespace(description=described(kind)) for name, kind in kinds.items()}
    with pytest.raises(BadSetting, match=r"run on different devices \(cuda, emulated\): never compared"):
        trial.described(plan, booted)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"name": "n"}}, "model was 'm', is 'n'"),
        ({"versions": {"vllm": "0.2"}}, "versions.vllm was '0.1', is '0.2'"),
        ({"device": {"kind": "emulated", "name": "y"}}, "device.name was 'x', is 'y'"),
        ({"model": {"name": "m", "tokenizer": "/of/another/checkout/tokenizer.json"}}, None),
    ],
)
def test_a_run_is_not_resumed_with_another_engine_than_it_began_with(
    changes: dict[str, Any], told: str | None
) -> None:
    model = {"name": "m", "tokenizer": "/of/a/machine/that/is/gone/tokenizer.json"}  # as older runs say
    first = msgspec.structs.replace(described(), versions={"vllm": "0.1"}, model=model)
    booted: Any = {"before": SimpleNamespace(description=msgspec.structs.replace(first, **changes))}
    plan = msgspec.structs.replace(manifest(arms=1), descriptions={"before": first})
    if told is None:
        assert trial.described(plan, booted).descriptions["before"].model == {"name": "m"}  # and no path
    else:
        with pytest.raises(StoreError, match=f"another engine in before: {told}"):
            trial.described(plan, booted)
        session: Any = SimpleNamespace(boot=lambda arms, observe: booted)  # nor does it go on with it
        with pytest.raises(StoreError, match=f"another engine in before: {told}"):
            trial.measure(session, [plan], 0, lambda event: None, lambda measured: None)


def test_a_run_whose_processes_were_killed_can_be_resumed_unless_a_block_is_damaged(
    environment: dict[str, str], tmp_path: Path
) -> None:
    bench = in_second_block(environment, tmp_path)
    word = "overlap_bench.harness.run.load_generator"
    assert_death_is_told(bench, bench.find(word), "the load generator")
    folder = only_run(tmp_path)
    resume = ("run", "--resume", str(folder), "--format", "json")
    bench = start(environment, tmp_path, *resume)
    assert_death_is_told(bench, bench.find("overlap_bench.engines.host"), "the engine host of ")
    kept = (folder / "blocks/000/requests.parquet").read_bytes()
    with held(folder):
        said = refused(environment, tmp_path, *resume)
    assert said == f"bench: {folder} is being measured by another bench: wait for its end"
    _, stdout, stderr = ended(environment, tmp_path, *resume)
    assert "trial 1 of 2" not in stderr
    assert json.loads(stdout)["comparisons"][0]["trials"] == 2
    damaged = folder / "blocks" / "000"
    assert (damaged / "requests.parquet").read_bytes() == kept
    (damaged / "requests.parquet").write_bytes(b"PAR1")
    said = refused(environment, tmp_path, *resume)
    assert "requests.parquet is damaged or was edited" in said
    assert said.endswith(f"remove {damaged}, and --resume measures it again")
    assert "are kept" not in said


def test_a_host_that_was_killed_is_named_though_what_it_started_ends_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends them in this order, and the harness may look in between."""
    monkeypatch.setattr(hosts, "GONE_MS", 1000 * PATIENCE_S)
    with session.Session(generator=False) as run, subprocess.Popen(["sleep", "600"]) as started:
        host = processes.start("engine host of before", ["sleep", "600"], os.environ, tmp_path / "log")
        device = processes.adopt("device process of before", started.pid)
        run._watch(host)
        run._watch(device)
        started.kill()
        assert processes.wait([device], PATIENCE_S)
        threading.Timer(0.2, lambda: os.kill(host.pid, signal.SIGKILL)).start()
        with pytest.raises(session.RunFailed, match=f"engine host of before .pid {host.pid}. was killed by"):
            run._raise_if_dead()


def test_a_process_that_skips_its_teardown_ends_well_and_at_once() -> None:
    """What was to be done at its end is not: it would take seconds after vLLM's imports."""
    script = (
        "import atexit, sys; from overlap_bench.engines.processes import skip_teardown; "
        "atexit.register(print, 'torn down'); skip_teardown(); print('done', flush=True); sys.exit()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"


@pytest.mark.parametrize("by", gap.SIGNALS)
def test_a_process_that_starts_while_a_run_is_ended_is_one_that_it_ends(
    monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    with (
        gap.signalled_at_each_start(monkeypatch, by) as began,
        pytest.raises(Interrupted),
        interruptible(),
        session.Session(generator=False) as run,
    ):
        run._start("engine host of before", ["sleep", "600"], os.environ, "host-1")
    assert began[0].poll() == -signal.SIGKILL


def test_hosts_keep_the_bytecode_that_nobody_else_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(hosts, "bytecode_is_kept", lambda: False)
    monkeypatch.setattr(
        processes, "start", lambda role, command, environment, log: started.append(environment)
    )
    monkeypatch.setattr(session.Session, "_watch", lambda self, child: None)
    arm = Arm(name="before", engine="overlap", options=api.EngineOptions(), toggles={})
    with session.Session(generator=False) as run:
        run._start_host(arm, None)
    assert Path(started[0]["PYTHONPYCACHEPREFIX"]).name == "bytecode"
    assert not started[0]["PYTHONDONTWRITEBYTECODE"]


# A signal in the moment in which pyzmq has made a socket, and its context does not know of it.
ENDED_AS_A_SOCKET_IS_MADE = """
import signal, zmq
add, made = zmq.Context._add_socket, 0
def ended(context, socket):
    global made
    made += 1
    if made == 4:
        signal.raise_signal(signal.SIGTERM)
    add(context, socket)
zmq.Context._add_socket = ended
"""
WITHOUT_LOAD = """
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.run.session import Session
with interruptible(), Session(generator=False):
    pass
"""


def test_what_is_ended_as_it_makes_a_socket_waits_for_none(environment: dict[str, str]) -> None:
    script = ENDED_AS_A_SOCKET_IS_MADE + WITHOUT_LOAD
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert last_line(ran.stderr).endswith("processes.Interrupted: ended by SIGTERM")
    assert not list(Path(environment["TMPDIR"]).iterdir())


def assert_death_is_told(bench: Bench, victim: psutil.Process, name: str) -> None:
    """Kill it: the run ends with exit code 4, names it (who waits in vain would name another) and leaves no
    process. How soon: experiments/validation/deaths.py."""
    victim.send_signal(signal.SIGKILL)
    code, _, stderr = bench.end()
    assert code == 4
    assert last_line(stderr).startswith(f"bench: {name}")
    assert f"(pid {victim.pid})" in last_line(stderr)
    assert "--resume" in last_line(stderr)
    assert not bench.left()


def test_ctrl_c_tells_which_engine_has_not_started(environment: dict[str, str], tmp_path: Path) -> None:
    bench = start(environment, tmp_path, "run", *CLOCKWORK, "--after", "boot=hangs")
    bench.find('"name":"after"')
    said = bench.interrupt()
    assert said.startswith("bench: interrupted; ")
    named, had = said.removeprefix("bench: interrupted; ").split(" had not started yet")
    assert "after" in named.split(" and ")  # `before` may just be starting too
    assert had == "; no trial was done, so nothing is kept"
    assert not bench.left()


def test_a_run_that_is_cancelled_keeps_finished_blocks_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C: the run until decided; a terminal that is closed: below."""
    bench = in_second_block(environment, tmp_path)
    bench.find("overlap_bench.engines.host")
    bench.popen.terminate()
    code, stdout, stderr = bench.end()
    assert (code, stdout) == (128 + signal.SIGTERM, "")
    assert last_line(stderr).startswith("bench: ended by SIGTERM; ")
    assert "; 1 of 2 trials are kept, go on with bench run --resume" in last_line(stderr)
    assert tables.finished_blocks(only_run(tmp_path))
    assert not bench.left()
    assert bench.seen
    assert not list(Path(environment["TMPDIR"]).iterdir())  # where its sockets were


def test_a_run_whose_terminal_is_closed_ends_as_told(environment: dict[str, str], tmp_path: Path) -> None:
    """Though nobody can be told: a write to it fails, and what is buffered would fail again at the end."""
    buffered = {name: value for name, value in environment.items() if name != "PYTHONUNBUFFERED"}

    def take_terminal() -> None:
        answer_signals()
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    screen, terminal = os.openpty()
    command = [*BENCH, "run", *COMPARE, "--trials", "2", "--num-requests", "60"]
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    ran = subprocess.Popen(command, env=buffered, cwd=tmp_path, preexec_fn=take_terminal, **ends)
    os.close(terminal)
    while not list(tmp_path.glob("results/*/blocks/000")):
        os.read(screen, 4096)
    os.close(screen)
    assert ran.wait(PATIENCE_S) == 128 + signal.SIGHUP
    assert tables.finished_blocks(only_run(tmp_path)) == [0]


def test_a_ctrl_c_while_engines_stop_leaves_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session.Session(generator=False) as run:
        host = processes.start("engine host of before", ["sleep", "600"], os.environ, tmp_path / "log")
        run._watch(host)
        booted: Any = SimpleNamespace(children=(host,), inbox=SimpleNamespace(send=lambda message: None))
        with monkeypatch.context() as while_it_stops:
            while_it_stops.setattr(processes, "wait", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                run.shut([booted])
    assert host.code == -signal.SIGKILL


def test_a_block_is_kept_before_its_engines_are_stopped(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take long, or be interrupted."""
    few = (*CLOCKWORK, "--trials", "1", "--rounds", "1")
    done(environment, tmp_path, "run", *few)
    planned = read_manifest(only_run(tmp_path))
    again = tmp_path / "again"
    write_manifest(again, planned)
    boots: list[int] = []

    def shut(self: session.Session, booted: list[session.Booted]) -> list[str]:
        boots.append(1)
        if len(boots) == 2:  # behind the discarded ones
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(session.Session, "shut", shut)
    monkeypatch.setattr(api, "find_engines", lambda: {"clockwork": clockwork_engine.SPEC})
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    with pytest.raises(KeyboardInterrupt):
        list(measure.trials({again: planned}, lambda happening: None))
    assert tables.finished_blocks(again) == [0]


def raising(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(("arguments", "closed", "code"), [("engines", 1, 0), ("engine", 2, 2)])
def test_an_output_that_was_closed_before_changes_no_exit_code(
    environment: dict[str, str], arguments: str, closed: int, code: int
) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *BENCH, arguments]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == code


def test_a_lost_reader_of_stderr_ends_no_run(environment: dict[str, str], tmp_path: Path) -> None:
    few = (*CLOCKWORK, "--trials", "1", "--rounds", "1", "--format", "json")
    with nobody_reads() as pipe:
        ran = subprocess.run(
            [*BENCH, "run", *few],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=pipe,
            check=True,
        )
    assert json.loads(ran.stdout)["comparisons"]


def test_a_killed_harness_takes_its_processes_along(environment: dict[str, str], tmp_path: Path) -> None:
    """Also what an engine started, here the clock's sleep: it asked for no death signal itself. And where the
    signal wakes no host, as it does when it comes just before the host falls asleep."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {ORPHANED})  # which bench and its hosts inherit
    try:
        bench = in_second_block(environment, tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ORPHANED})
    for lifetime in (1001, 1002):
        bench.find(f"sleep {lifetime}")
    bench.popen.kill()
    bench.end()
    wait_until(lambda: not bench.left(), bench.left)


def test_a_segment_has_no_more_requests_at_once_than_a_round() -> None:
    """A variant may bring more places than the requests that somebody asks for."""
    closed = Workload(arrival="closed", concurrency=16, num_requests=8)
    assert trial.of_segment(closed, None).num_requests == 8
    assert trial.of_segment(msgspec.structs.replace(closed, num_requests=32), None).num_requests == 16
    assert trial.of_segment(Workload(arrival="poisson", rate=4.0), 5).num_requests == 5
