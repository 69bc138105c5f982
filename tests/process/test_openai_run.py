"""`bench run --engine openai`, as a person calls it: servers at addresses, and such that commands start."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from overlap_bench.harness.store import tables
from tests.support.bench_command import PATIENCE_S, Bench, only_run, start, wait_until
from tests.support.clockwork import distribution
from tests.support.in_process import done, refused
from tests.support.places import ROOT
from tests.support.small_server import SmallServer, running

KEY = "sk-secret"
ENGINE = ("run", "--engine", "openai", "--rounds", "1", "--num-requests", "4", "--max-new-tokens", "4")
COMMAND = f"{sys.executable} -m tests.support.small_server {{port}}"


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The engine as it is installed: by its entry point."""
    site = tmp_path_factory.mktemp("site")
    distribution(site, "openai-engine", openai="engines.openai:SPEC")
    path = os.pathsep.join((str(ROOT), str(site), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "OPENAI_API_KEY": KEY}


def url(server: SmallServer) -> str:
    return f"url=http://127.0.0.1:{server.port}"


def find_server(bench: Bench) -> psutil.Process:
    """The server that a run started; its host has the command in its own command line, too."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        bench.look()
        for process in bench.left():
            with suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", "tests.support.small_server"]:
                    return process
        time.sleep(0.02)
    raise AssertionError("no server was started")


def test_two_addresses_are_two_arms_of_one_boot_each(
    server: SmallServer, environment: dict[str, str], tmp_path: Path
) -> None:
    with running() as other:
        arms = ("--before", url(server), "--after", url(other), "--set", "api=chat")
        stdout = done(environment, tmp_path, *ENGINE, *arms, "--format", "json")
    comparison = json.loads(stdout)["comparisons"][0]
    row = comparison["metrics"]["tpot_ms_p50"]
    assert row["verdict"] == "undecided: one boot per side"
    assert row["before"] > 0 < row["after"]
    assert comparison["trials"] == 1
    weak = comparison["outputs"].pop("weak")
    assert comparison["outputs"] == {"compared": 4, "identical": 4, "near_ties": None, "distinct": 1}
    assert weak.startswith("all are one text, though prompts differ")
    assert comparison["failures"]["after"] == {"failed": 0, "requests": 4, "causes": {}}
    assert comparison["mechanism"]["requests_counted_by_usage"]["before"] == 4
    assert comparison["metrics"]["client_lag_ms_p99"]["before"] >= 0
    assert any(line.startswith("one boot per side") for line in comparison["warnings"])
    requests = tables.read_block(only_run(tmp_path), 0)["requests"]
    assert all(sorted(each) == list(each) for each in requests["chunk_ns"])
    assert (requests["sent_ns"] < requests["chunk_ns"].str[0]).all()
    assert [list(each) for each in requests["chunk_tokens"]] == [[1, 1, 1, 1]] * 8
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_a_command_is_a_server_per_boot(environment: dict[str, str], tmp_path: Path) -> None:
    arms = ("--before", f"cmd={COMMAND}", "--after", f"cmd={COMMAND} 0.2")
    bench = start(environment, tmp_path, *ENGINE, *arms, "--trials", "2", "--format", "json")
    found = find_server(bench)
    assert os.getpgid(found.pid) == found.pid
    code, stdout, stderr = bench.end()
    assert code == 0, stderr
    comparison = json.loads(stdout)["comparisons"][0]
    assert comparison["trials"] == 2
    assert comparison["metrics"]["tpot_ms_p50"]["verdict"] in ("faster", "slower", "undecided", "same")
    rounds = tables.read_block(only_run(tmp_path), 1)["rounds"]
    assert (rounds["cpu_ms.server"] > 0).all()
    assert not bench.left()


def test_a_server_that_is_none_of_what_its_command_started_takes_no_turns(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """As where the command is that of a container: what serves has another parent."""
    script = tmp_path / "away.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if not os.fork():\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid(), signal.alarm(60)\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'tests.support.small_server', sys.argv[1]])\n"
        "os.wait(), time.sleep(60)\n"
    )
    arms = (
        "--set",
        f"cmd={sys.executable} {script} {{port}}",
        "--before",
        "count=usage",
        "--after",
        "count=ids",
    )
    asked = (*ENGINE[:-1], "64")
    said = refused(environment, tmp_path, *asked, *arms)
    assert "before can't take turns: what its command started serves from elsewhere" in said
    for process in psutil.process_iter(["cmdline"]):
        if "tests.support.small_server" in (process.info["cmdline"] or ()) and process.ppid() == 1:
            process.kill()


def test_a_server_that_does_not_start_leaves_its_last_words(
    environment: dict[str, str], tmp_path: Path
) -> None:
    dies = (
        f"{sys.executable} -uc {shlex.quote('import sys; print(1); sys.exit(*[chr(110) + str()])')} {{port}}"
    )
    said = refused(environment, tmp_path, *ENGINE, "--before", f"cmd={dies}", code=4)
    assert "the server ended with status 1 before it was ready: n; its output is in " in said
    kept = Path(said.rpartition(" ")[2])
    assert kept.read_text().split() == ["1", "n"]
    kept.unlink()
    sleeping = ["sleep", "60.25"]  # nobody else's
    loads = f"sh -c {shlex.quote(f'echo loading the model; exec {shlex.join(sleeping)}')} {{port}}"
    late = (f"cmd={loads}", "--before", "start_timeout_s=2")
    said = refused(environment, tmp_path, *ENGINE, "--before", *late, code=4)
    assert "the server was not ready after 2 s (start_timeout_s): loading the model" in said
    Path(said.rpartition(" ")[2]).unlink()
    assert sleeping not in [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]


def test_a_killed_harness_leaves_no_server_that_a_script_started(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script, ended = tmp_path / "serve.sh", tmp_path / "ended"
    script.write_text(
        f"trap 'sleep 0.2; touch {ended}; exit' TERM\n{COMMAND.replace('{port}', '$1')} & wait\n"
    )
    arm = ("--before", f"cmd=sh {script} {{port}}", "--interval-ms", "50", "--num-requests", "400")
    bench = start(environment, tmp_path, "run", "--engine", "openai", *arm)
    server = find_server(bench)
    wait_until(lambda: psutil.CONN_ESTABLISHED in {each.status for each in server.net_connections("tcp")})
    parent = server.parent()
    assert parent.name() == "sh"
    bench.popen.kill()
    bench.end()
    server.wait(PATIENCE_S)
    parent.wait(PATIENCE_S)
    assert ended.exists(), "SIGTERM came first"


def test_what_pays_no_heed_to_sigterm_is_killed_with_its_session() -> None:
    host = """
import subprocess, sys
from overlap_bench.engines import processes
processes.TERMINATE_S = 0.3
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
processes.end_session()
"""
    command = [sys.executable, "-c", host]
    told = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=PATIENCE_S, start_new_session=True, check=False
    )
    assert not psutil.pid_exists(int(told.stdout))  # it was reaped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "before: which server? --before url=http://HOST:PORT, or --before cmd="),
        (("--before", "url=http://a", "--before", "cmd=b {port}"), "cmd and url exclude each other"),
        (("--before", "cmd=b"), "cmd needs {port} where the server's port goes"),
        (("--before", "ulr=http://a"), "unknown setting 'ulr'; did you mean url?"),
        (("--before", "url=http://a", "--trials", "6"), "a server at a url is one boot"),
        (("--before", "url=http://a", "--before", "env.OPENAI_API_KEY=x"), "export it instead"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(environment, tmp_path, *ENGINE, *arguments)
