"""What a stored run may start: nothing that this machine has not signed, unless a person says so.

The runs are such as a stranger would make: the machine's fingerprint is copied, and what they name leaves a
file, or waits to be sent a key.
"""

from __future__ import annotations

import http.server
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan import experiment_file
from overlap_bench.harness.plan.design import Arm, Design, Factor, Factorial, Ref
from overlap_bench.harness.plan.grid import Point
from overlap_bench.harness.run import worktrees
from overlap_bench.harness.store import manifest, sweep, trust
from overlap_bench.harness.store.files import (
    EXPERIMENT_FILE,
    SCHEMA_VERSION,
    SWEEP_FILE,
    StoreError,
    write_json,
)
from overlap_bench.harness.store.folders import create
from overlap_bench.harness.store.manifest import described_here, read_manifest, write_manifest
from overlap_bench.harness.studies import experiment
from overlap_bench.harness.workload.workload import Workload
from tests.support.bench_command import last_line, start
from tests.support.clockwork import CLOCKWORK, installed
from tests.support.in_process import ended
from tests.support.places import REFERENCE

PINNED = REFERENCE / "runs" / "pinned-h2d"
KEY = "sk-mine"
SERVER = {"api": "completions", "count": "usage", "timeout_s": "60", "start_timeout_s": "600"}
FEW = Workload(num_requests=1, max_new_tokens=2, interval_ms=1.0, pretok=False)
ONE, TWO = ((*CLOCKWORK, "--rounds", "1", "--blocks", count) for count in ("1", "2"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With two keys, whatever others the machine holds, and with the built-in engines by their entry points,
    wherever the tests run."""
    site = tmp_path_factory.mktemp("site")
    found = installed(site)
    entries = site / "clockwork-1.dist-info" / "entry_points.txt"
    own = "".join(f"{name} = overlap_bench.engines.{name}:SPEC\n" for name in ("overlap", "openai"))
    entries.write_text(entries.read_text() + own)
    without = {name: value for name, value in found.items() if not trust.KEYS.search(name)}
    return {**without, "OPENAI_API_KEY": KEY, "HF_TOKEN": KEY}


@dataclass(slots=True)
class Listener:
    """A real server that keeps what it was sent, and answers little."""

    port: int = 0
    heard: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> set[str | None]:
        return {key for _, key in self.heard}


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


@contextmanager
def listening() -> Iterator[Listener]:
    found = Listener()

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found.heard.append((self.path, self.headers.get("Authorization")))
            models = self.path.endswith("/models")
            body = b'{"data": [{"id": "small"}]}' if models else b"no"
            self.send_response(200 if models else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_POST = answer  # noqa: N815 (http.server looks for these)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield found
        server.shutdown()


def marking(path: Path, marker: Path) -> Path:
    """A program that leaves a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    path.chmod(0o755)
    return path


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
    command = ["git", *identity, "-c", "core.fsmonitor=false", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=True).stdout.strip()


def repository(where: Path, marker: Path) -> Ref:
    """A repository with a file, and hooks and a file system monitor that leave a marker."""
    where.mkdir(parents=True)
    git(where, "init", "--quiet")
    (where / "file").write_text("as committed\n")
    git(where, "add", "file")
    git(where, "commit", "--quiet", "-m", "first")
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        marking(where / ".git" / "hooks" / hook, marker)
    monitor = marking(where / ".git" / "monitor", marker)
    git(where, "config", "core.fsmonitor", str(monitor))
    return Ref(repository=str(where), name="main", commit=git(where, "rev-parse", "HEAD"))


def arm(engine: str = "clockwork", **of_arm: Any) -> Arm:
    clockwork = {"pace": "slow", "tokens": "counted", "boot": "works", "service": "all"}
    toggles = {"clockwork": clockwork, "openai": SERVER, "overlap": {}}[engine]
    options = api.EngineOptions(model="" if engine == "openai" else "tiny-gpt2")
    plain = {"name": "before", "engine": engine, "options": options, "toggles": toggles}
    return Arm(**{**plain, **of_arm})


def planned(one: Arm, workload: Workload = FEW) -> Design:
    return Design(name="theirs", arms=(one,), workload=workload, blocks=1, rounds=1, warmup_rounds=0)


def stranger(folder: Path, design: Design, **of_manifest: Any) -> Path:
    """A run that was never measured, with the fingerprint of this machine and this code, as anybody can copy
    them out of a run that was."""
    plain = described_here(design, folder.name, datetime.now().astimezone(), folder.name)
    write_manifest(folder, msgspec.structs.replace(plain, **of_manifest))
    return folder


# What a manifest can name, each as it would harm: (where, marker, address) to a design, and what is listed.
def _python(where: Path, marker: Path, address: str) -> Design:
    return planned(arm(python=str(marking(where / "python", marker))))


def _cmd(where: Path, marker: Path, address: str) -> Design:
    command = f"{marking(where / 'server', marker)} {{port}}"
    return planned(arm("openai", toggles={**SERVER, "cmd": command}))


def _url(where: Path, marker: Path, address: str) -> Design:
    return planned(arm("openai", toggles={**SERVER, "url": address}))


def _env(where: Path, marker: Path, address: str) -> Design:
    where.mkdir(exist_ok=True)
    (where / "sitecustomize.py").write_text(f"open({str(marker)!r}, 'w')\n")
    return planned(arm(env={"PYTHONPATH": f"{where}:{':'.join(sys.path)}"}))


def _ref(where: Path, marker: Path, address: str) -> Design:
    return planned(arm(ref=repository(where / "repository", marker)))


def _file(where: Path, marker: Path, address: str) -> Design:
    where.mkdir(exist_ok=True)
    (where / "diary").write_text("nobody's business\n")
    workload = msgspec.structs.replace(FEW, prompts=str(where / "diary"))
    return planned(arm("openai", toggles={**SERVER, "url": address}), workload)


def _model(where: Path, marker: Path, address: str) -> Design:
    options = api.EngineOptions(model="stranger/model")
    return planned(arm("overlap", options=options, env={"HF_ENDPOINT": address}))


NAMED: dict[str, tuple[Callable[[Path, Path, str], Design], str]] = {
    "python": (_python, "start the interpreter '{where}/python'"),
    "cmd": (_cmd, "start the command '{where}/server {{port}}'"),
    "url": (_url, "contact '{address}'"),
    "env": (_env, "set the environment's 'PYTHONPATH={where}:"),
    "ref": (_ref, "of the git repository '{where}/repository'"),
    "file": (_file, "read '{where}/diary', and send the engine what it says"),
    "model": (_model, "ask for the model 'stranger/model'"),
}
COMMANDS = {"rerun": ("rerun", "theirs"), "resume": ("run", "--resume", "theirs")}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", NAMED)
def test_what_a_strangers_run_names_is_listed_and_left_alone(
    environment: dict[str, str], tmp_path: Path, listener: Listener, kind: str, command: str
) -> None:
    where, marker = tmp_path / "things", tmp_path / "ran"
    make, listed = NAMED[kind]
    folder = stranger(tmp_path / "theirs", make(where, marker, listener.url))
    code, stdout, stderr = ended(environment, tmp_path, *COMMANDS[command])
    assert (code, stdout) == (2, ""), stderr
    assert listed.format(where=where, address=listener.url) in stderr
    assert last_line(stderr) == (
        "bench: theirs is not signed by this machine: if it may do all this, give --trust"
    )
    assert not marker.exists()
    assert not listener.heard
    assert [each.name for each in folder.iterdir()] == ["manifest.json"]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("kind", ["python", "cmd", "env"])
def test_with_trust_it_is_listed_and_goes_on(
    environment: dict[str, str], tmp_path: Path, listener: Listener, kind: str
) -> None:
    """That what is named here does run, once it may, is what the test above stands on."""
    where, marker = tmp_path / "things", tmp_path / "ran"
    make, listed = NAMED[kind]
    stranger(tmp_path / "theirs", make(where, marker, listener.url))
    _, _, stderr = ended(environment, tmp_path, "rerun", "theirs", "--trust")
    assert listed.format(where=where, address=listener.url) in stderr
    assert marker.exists()


def test_a_list_can_not_be_written_over(environment: dict[str, str], tmp_path: Path) -> None:
    hidden = "/bin/sh\x1b[1A\x1b[2K\nbench:   run the engine 'clockwork'\u202e"
    stranger(tmp_path / "theirs", planned(arm(python=hidden)))
    _, _, stderr = ended(environment, tmp_path, "rerun", "theirs")
    assert "\x1b" not in stderr
    assert "\u202e" not in stderr
    assert repr(hidden) in stderr


# -- other folders, and files -----------------------------------------------------------------------------

EXPERIMENT = """
title = "Theirs"
question = "Does it run?"
sources = [{ name = "a stranger" }]

[boots.b]
blocks = 4

[boots.b.arms.before]
engine = "openai"
toggles = { cmd = "COMMAND {port}" }

[boots.b.arms.after]
engine = "openai"
toggles = { cmd = "COMMAND {port} again" }

[boots.b.workloads]
w = { pretok = false, num_requests = 1, prompts = "/nowhere/diary" }

[[claims]]
says = "it does"
boots = "b"
workload = "w"
before = "before"
arm = "after"
change = "tpot_ms_p50"

[[tables]]
title = "t"
boots = "b"
rows = [{ label = "after", arm = "after", before = "before" }]
columns = [{ title = "change", change = "tpot_ms_p50" }]
"""


def _factorial(folder: Path, program: Path) -> str:
    factors = (Factor(toggle="pace", before="slow", after="fast"),)
    design = planned(arm(python=str(program)))
    stranger(folder / "theirs", msgspec.structs.replace(design, factorial=Factorial(factors=factors)))
    return "factorial --resume theirs"


def _sweep(folder: Path, program: Path) -> str:
    point = Point(at={"seed": "0"}, design=planned(arm(python=str(program))))
    grid = sweep.described_here((), (point,), "theirs", datetime.now().astimezone())
    write_json(folder / "theirs" / SWEEP_FILE, grid)
    return "sweep --resume theirs"


def _toml(folder: Path, program: Path) -> str:
    (folder / "theirs.toml").write_text(EXPERIMENT.replace("COMMAND", str(program)))
    return "experiment run theirs.toml"


def _experiment(folder: Path, program: Path) -> str:
    _toml(folder, program)
    kept = experiment.Kept(
        schema_version=SCHEMA_VERSION,
        created="",
        experiment=experiment_file.read(folder / "theirs.toml"),
        kind="emulated",
    )
    write_json(folder / "theirs" / EXPERIMENT_FILE, kept)
    return "experiment run --resume theirs"


@pytest.mark.parametrize("make", [_factorial, _sweep, _toml, _experiment])
def test_nothing_is_started_for_a_strangers(
    environment: dict[str, str], tmp_path: Path, make: Callable[[Path, Path], str]
) -> None:
    """Nor is a file read: that there is no such one goes unnoticed."""
    marker = tmp_path / "ran"
    program = marking(tmp_path / "program", marker)
    arguments = make(tmp_path, program).split()
    code, stdout, stderr = ended(environment, tmp_path, *arguments)
    assert (code, stdout) == (2, ""), stderr
    assert f"bench:   start the interpreter '{program}'" in stderr or (
        f"bench:   start the command '{program} {{port}}'" in stderr
        and "bench:   read '/nowhere/diary', and send the engine what it says" in stderr
    )
    assert last_line(stderr).endswith("is not signed by this machine: if it may do all this, give --trust")
    assert not marker.exists()


def test_an_experiments_runs_lie_inside_of_it(tmp_path: Path) -> None:
    _experiment(tmp_path, tmp_path / "program")
    path = tmp_path / "theirs" / EXPERIMENT_FILE
    experiment.read(path.parent)
    whole = path.read_text()
    for outside in ("../elsewhere", str(tmp_path / "elsewhere"), "/.."):
        path.write_text(whole.replace('"w": {', f"{json.dumps(outside)}: {{"))
        with pytest.raises(StoreError, match="was edited: its runs lie outside of it"):
            experiment.read(path.parent)


def test_a_designs_name_leads_nowhere_else(tmp_path: Path) -> None:
    now = datetime.now().astimezone()
    folder = create(tmp_path / "results", "x/../../../elsewhere/x", now)
    assert folder.resolve().parent == (tmp_path / "results").resolve()


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "env", "sent"),
    [
        ("", {}, None),
        ("http://127.0.0.1:1", {}, None),
        ("{address}/v1", {}, f"Bearer {KEY}"),
        ("{address}", {"LD_LIBRARY_PATH": "/theirs"}, None),
    ],
    ids=["no address", "another address", "its address", "its address, and a variable of theirs"],
)
def test_a_key_goes_only_to_an_address_that_is_given_again(
    environment: dict[str, str],
    tmp_path: Path,
    listener: Listener,
    given: str,
    env: dict[str, str],
    sent: str | None,
) -> None:
    one = arm("openai", toggles={**SERVER, "url": listener.url}, env=env)
    stranger(tmp_path / "theirs", planned(one))
    again = {**environment, "OPENAI_BASE_URL": given.format(address=listener.url)}
    _, _, stderr = ended(again, tmp_path, "rerun", "theirs", "--trust")
    assert {path for path, _ in listener.heard} == {"/v1/models", "/v1/completions"}, stderr
    assert listener.keys == {sent}
    assert ("it gets no HF_TOKEN and no OPENAI_API_KEY" in stderr) == (sent is None)


def test_no_key_is_left_to_what_is_started(environment: dict[str, str], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nenv > {seen}\nexit 1\n")
    program.chmod(0o755)
    stranger(tmp_path / "theirs", planned(arm("openai", toggles={**SERVER, "cmd": f"{program} {{port}}"})))
    more = {**environment, "AWS_SECRET_ACCESS_KEY": KEY, "DB_PASSWORD": KEY, "OPENAI_BASE_URL": ""}
    start(more, tmp_path, "rerun", "theirs", "--trust").end()
    assert "PATH=" in seen.read_text()
    assert KEY not in seen.read_text()


def test_hugging_faces_token_does_not_go_to_a_strangers_hub(
    environment: dict[str, str], tmp_path: Path, listener: Listener
) -> None:
    """Neither the environment's, nor that of the file, which the library finds by itself."""
    (tmp_path / "token").write_text(KEY)
    stranger(tmp_path / "theirs", _model(tmp_path, tmp_path, listener.url))
    with_token = {**environment, "HF_HOME": str(tmp_path), "HF_TOKEN_PATH": str(tmp_path / "token")}
    with_token.pop("HF_HUB_OFFLINE", None)
    _, _, stderr = start(with_token, tmp_path, "rerun", "theirs", "--trust").end()
    assert any("stranger/model" in path for path, _ in listener.heard), stderr
    assert listener.keys == {None}


def test_a_key_goes_to_ones_own_address_again(
    environment: dict[str, str], tmp_path: Path, listener: Listener
) -> None:
    own = manifest.signed  # asked for here, by this machine's secret and in this folder
    design = planned(arm("openai", toggles={**SERVER, "url": listener.url}))
    folder = stranger(tmp_path / "mine", design)
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        write_manifest(folder, own(read_manifest(folder)))
    finally:
        os.chdir(here)
    _, _, stderr = ended(environment, tmp_path, "rerun", "mine")
    assert listener.keys == {f"Bearer {KEY}"}, stderr


# -- one's own --------------------------------------------------------------------------------------------


def only_run(folder: Path) -> Path:
    (found,) = (folder / "results").iterdir()
    return found


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def once(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    code, _, stderr = ended(environment, folder, "run", *ONE)
    assert code == 0, stderr
    return only_run(folder)


@pytest.fixture
def finished(once: Path, tmp_path: Path) -> Path:
    """A finished run of one's own, to be spoiled."""
    return Path(shutil.copytree(once, tmp_path / "finished"))


def test_a_run_of_ones_own_goes_on_and_is_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    """Its manifest is rewritten on the way, it may be copied, and it may be repeated from anywhere."""
    bench = start(environment, tmp_path, "run", *TWO)
    bench.wait_for("block 1 of 2 done")
    bench.popen.send_signal(signal.SIGINT)
    assert bench.end()[0] == 130
    mine = only_run(tmp_path)
    signed = read_manifest(mine)
    assert signed.signature
    code, _, stderr = ended(environment, tmp_path, "run", "--resume", str(mine))
    assert code == 0, stderr
    resumed = read_manifest(mine)
    assert resumed.descriptions
    assert resumed.signature == signed.signature
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(mine, elsewhere / "a copy")
    code, _, stderr = ended(environment, elsewhere, "rerun", "a copy")
    assert code == 0, stderr
    assert "--trust" not in stderr

    edit(elsewhere / "a copy", lambda each: each["design"]["arms"][0].update(python="/theirs/python"))
    code, _, stderr = ended(environment, elsewhere, "rerun", "a copy")
    assert (code, "start the interpreter '/theirs/python'" in stderr) == (2, True)
    assert "was signed by another machine, or in another folder, or edited" in last_line(stderr)


def test_a_run_of_another_machine_is_not_ones_own(
    environment: dict[str, str], tmp_path: Path, finished: Path
) -> None:
    other = {**environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    code, _, stderr = ended(other, tmp_path, "rerun", str(finished))
    assert (code, "was signed by another machine" in last_line(stderr)) == (2, True)


def test_what_a_run_names_is_signed_for_the_folder_where_bench_ran(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Elsewhere a relative path leads to something else."""
    own = ("--set", "python=./python")
    (tmp_path / "python").symlink_to(sys.executable)
    with_path = {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], *sys.path])}
    code, _, stderr = ended(with_path, tmp_path, "run", *ONE, *own)
    assert code == 0, stderr
    mine = only_run(tmp_path)
    again = ("rerun", str(mine), "--out", str(tmp_path / "again"))
    code, _, stderr = ended(with_path, tmp_path, *again)
    assert code == 0, stderr
    theirs, marker = tmp_path / "theirs", tmp_path / "ran"
    marking(theirs / "python", marker)
    code, _, stderr = ended(with_path, theirs, *again)
    assert (code, "in another folder" in last_line(stderr)) == (2, True)
    assert not marker.exists()


def test_what_a_trusted_run_leaves_is_trusted_no_further(
    environment: dict[str, str], tmp_path: Path, finished: Path
) -> None:
    """Else its second half would get the keys that were kept from the first."""
    edit(finished, lambda each: each.pop("signature"))
    code, _, stderr = ended(environment, tmp_path, "rerun", str(finished), "--trust")
    assert code == 0, stderr
    left = only_run(tmp_path)
    code, _, stderr = ended(environment, tmp_path, "run", "--resume", str(left))
    assert (code, "is not signed by this machine" in last_line(stderr)) == (2, True)


def test_what_is_asked_for_again_in_full_needs_no_trust(
    environment: dict[str, str], tmp_path: Path, finished: Path
) -> None:
    edit(finished, lambda each: each.pop("signature"))
    code, _, stderr = ended(environment, tmp_path, "run", *ONE, "--resume", str(finished))
    assert code == 0, stderr


# -- the secret -------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it will be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "overlap-bench" / "secret"


DESIGN = planned(arm())


def doubted(signature: str) -> str:
    """What is said of it, "" where it is believed."""
    try:
        trust.admit(Path("run"), [DESIGN], signature, trusted=False, say=lambda line: None)
    except api.BadSetting as error:
        return str(error)
    return ""


def test_the_secret_is_its_owners_alone(secret: Path) -> None:
    before = os.umask(0)
    try:
        signature = trust.signature([DESIGN])
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert [each.name for each in secret.parent.iterdir()] == ["secret"]
    assert not doubted(signature)
    assert doubted(trust.signature([planned(arm(env={"A": "b"}))]))
    assert doubted("")


def _sign(place: str, barrier: Any, signatures: Any) -> None:
    os.environ["XDG_STATE_HOME"] = place
    barrier.wait()
    signatures.put(trust.signature([DESIGN]))


def test_those_who_sign_at_once_for_the_first_time_share_one_secret(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    for attempt in range(5):
        barrier, signatures = forked.Barrier(8), forked.SimpleQueue()
        place = str(tmp_path / str(attempt))
        signing = [forked.Process(target=_sign, args=(place, barrier, signatures)) for _ in range(8)]
        for each in signing:
            each.start()
        found = {signatures.get() for _ in signing}
        for each in signing:
            each.join()
        assert len(found) == 1
        assert "" not in found


def _readable(secret: Path) -> None:
    secret.chmod(0o640)


def _linked(secret: Path) -> None:
    secret.symlink_to(secret.rename(secret.with_name("theirs")))


def _short(secret: Path) -> None:
    secret.write_bytes(b"")


def _pipe(secret: Path) -> None:
    secret.unlink()
    os.mkfifo(secret, 0o600)


def _anothers(secret: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(secret, 12345, -1)


@pytest.mark.parametrize("spoil", [_readable, _linked, _short, _pipe, _anothers])
def test_a_secret_that_others_may_know_proves_nothing(secret: Path, spoil: Callable[[Path], None]) -> None:
    signature = trust.signature([DESIGN])
    assert not doubted(signature)
    spoil(secret)
    assert trust.signature([DESIGN]) == ""
    assert doubted(signature).startswith(f"run can't be verified ({secret}: ")


def test_without_a_place_for_the_secret_runs_go_and_each_rerun_asks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    homeless = {**environment, "XDG_STATE_HOME": str(tmp_path / "a-file")}
    code, _, stderr = ended(homeless, tmp_path, "run", *ONE)
    assert code == 0, stderr
    mine = only_run(tmp_path)
    assert read_manifest(mine).signature == ""
    code, _, stderr = ended(homeless, tmp_path, "rerun", str(mine))
    assert code == 2
    assert f"can't be verified ({tmp_path}/a-file/overlap-bench/secret: Not a directory)" in last_line(stderr)


# -- git --------------------------------------------------------------------------------------------------


def test_a_checkout_runs_no_hook_and_no_monitor(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    ref = repository(tmp_path / "repository", marker)
    found = worktrees.resolve("HEAD", Path(ref.repository))
    assert found.commit == ref.commit
    with worktrees.checked_out([arm(ref=ref)]) as places:
        assert (places["before"] / "file").read_text() == "as committed\n"
    assert worktrees.uncommitted(ref) == []
    assert not marker.exists()


def test_a_checkout_has_its_filters(tmp_path: Path) -> None:
    """Without them, files of Git LFS would be their pointers."""
    where = tmp_path / "repository"
    repository(where, tmp_path / "ran")
    git(where, "config", "filter.loud.smudge", "tr a-z A-Z")
    (where / ".gitattributes").write_text("file filter=loud\n")
    git(where, "add", ".gitattributes")
    git(where, "commit", "--quiet", "-m", "second")
    ref = Ref(repository=str(where), name="HEAD", commit=git(where, "rev-parse", "HEAD"))
    with worktrees.checked_out([arm(ref=ref)]) as places:
        assert (places["before"] / "file").read_text() == "AS COMMITTED\n"


def test_an_arms_name_leads_out_of_no_folder(tmp_path: Path) -> None:
    ref = repository(tmp_path / "repository", tmp_path / "ran")
    outside = tmp_path / "outside"
    with worktrees.checked_out([arm(name=str(outside), ref=ref)]) as places:
        assert not places[str(outside)].is_relative_to(tmp_path)
        assert not outside.exists()


def test_a_trusted_repository_runs_no_hook(environment: dict[str, str], tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    stranger(tmp_path / "theirs", _ref(tmp_path / "things", marker, ""))
    code, _, stderr = ended(environment, tmp_path, "rerun", "theirs", "--trust")
    assert (code, "before was to run the code of its ref" in last_line(stderr)) == (2, True), stderr
    assert not marker.exists()


# -- reading, and the current folder ----------------------------------------------------------------------

LOOKOUT = """
import os, sys
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
CONTACTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")

def look(event, arguments):
    if event in STARTS + CONTACTS or (event == "open" and "/theirs/" in str(arguments[0])):
        os.write(log, f"{{event}} {{arguments!r}}\\n".encode())

sys.addaudithook(look)
"""
READ = """
import sys
import overlap_bench
from overlap_bench.harness.cli.app import main
run = overlap_bench.load("run")
run.result, run.requests, run.steps, run.rounds, run.token_gaps
overlap_bench.compare("run")
overlap_bench.load("factorial").effects
for arguments in {reading!r}:
    sys.argv = ["bench", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, 3), (arguments, end.code)
"""
BENCH = "import sys; from overlap_bench.harness.cli.app import main; sys.argv = {arguments!r}; main()"
STORED = {
    "run": PINNED.with_name("overlap"),  # with steps, as they were measured
    "factorial": REFERENCE / "experiments" / "factorial-schedule-h2d-output",
    "experiment": REFERENCE / "experiments" / "sglang-launch-done-paced",
}
READING = (
    *("compare run", "compare run:before run:after", "gate run --out gate", "explain run"),
    *("report run -o a.html", "report run -o a.md"),
    *("factorial factorial", "experiment show experiment"),
)


def poison(value: Any) -> None:
    """Have every arm of a file name what must not be touched."""
    if isinstance(value, list):
        for each in value:
            poison(each)
    if isinstance(value, dict):
        if isinstance(value.get("toggles"), dict) and isinstance(value.get("options"), dict):
            value["toggles"] |= {"cmd": "/theirs/cmd {port}", "url": "http://127.0.0.1:9"}
            value["options"]["model"] = "/theirs/model"
            if "name" in value:
                ref = {"repository": "/theirs/repository", "name": "main", "commit": "c"}
                value |= {"python": "/theirs/python", "env": {"A": "b"}, "ref": ref}
        if "prompts" in value:
            value["prompts"] = "/theirs/prompts"
        if "tokenizer" in value:
            value["tokenizer"] = "/theirs/tokenizer.json"
        for each in value.values():
            poison(each)


def test_reading_a_run_starts_and_contacts_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    for name, stored in STORED.items():
        shutil.copytree(stored, tmp_path / name)
        for path in (tmp_path / name).rglob("*.json"):
            content = json.loads(path.read_text())
            poison(content)
            path.write_text(json.dumps(content))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    log = tmp_path / "log"
    (tmp_path / "lookout").mkdir()
    (tmp_path / "lookout" / "sitecustomize.py").write_text(LOOKOUT.format(log=str(log)))
    path = f"{tmp_path}/lookout{os.pathsep}{environment['PYTHONPATH']}"
    watched = {**environment, "PYTHONPATH": path}
    importlib.import_module("matplotlib.font_manager")  # asks fc-list for fonts, once for each user
    command = [sys.executable, "-c", READ.format(reading=READING)]
    done = subprocess.run(command, cwd=tmp_path, env=watched, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == ""


@pytest.mark.parametrize("engine", ["clockwork", "openai"])
def test_no_module_of_the_current_folder_is_imported(
    environment: dict[str, str], tmp_path: Path, engine: str
) -> None:
    """By the processes of a run. `bench` itself, as it is installed, does not look there either: here, -P."""
    marker = tmp_path / "ran"
    (tmp_path / "msgspec.py").write_text(f"open({str(marker)!r}, 'w')\n")
    more = () if engine == "clockwork" else ("--set", "cmd=false {port}")
    arguments = ["bench", "run", "--engine", engine, *ONE[2:], *more]
    command = [sys.executable, "-P", "-c", BENCH.format(arguments=arguments)]
    nowhere_else = {**environment, "PYTHONPATH": environment["PYTHONPATH"].strip(os.pathsep)}
    done = subprocess.run(command, cwd=tmp_path, env=nowhere_else, capture_output=True, text=True)
    assert done.returncode == (0 if engine == "clockwork" else 4), done.stderr
    assert not marker.exists()


def test_a_models_own_code_is_not_run(environment: dict[str, str], tmp_path: Path) -> None:
    """transformers would ask on the terminal, and take the next line for an answer."""
    marker, theirs = tmp_path / "ran", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "theirs.py").write_text(f"open({str(marker)!r}, 'w')\n")
    own = {"AutoConfig": "theirs.Theirs", "AutoTokenizer": ["theirs.Theirs", None]}
    (theirs / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": own}))
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Theirs", "auto_map": own}))
    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    load = (
        "import torch; from overlap_bench.engines.overlap.models.published import load_model;"
        "load_model('./theirs', torch.float32, torch.device('cpu'), 0)"
    )
    command = [sys.executable, "-c", load]
    subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, input="y\n" * 9)
    assert not marker.exists()
