"""What a stored run may start: nothing that this machine has not signed, unless a person says so.

The runs are such as a stranger would make: the machine's fingerprint is copied, and what they name leaves a
file, or waits to be sent a key.
"""

import importlib
import json
import multiprocessing
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan import experiment_file, settings
from overlap_bench.harness.plan.design import Arm, Design, Factor, Factorial, Ref
from overlap_bench.harness.plan.grid import Point
from overlap_bench.harness.run import worktrees
from overlap_bench.harness.store import sweep, trust
from overlap_bench.harness.store.files import (
    EXPERIMENT_FILE,
    SCHEMA_VERSION,
    SWEEP_FILE,
    StoreError,
    write_json,
)
from overlap_bench.harness.store.manifest import create, described_here, read_manifest, write_manifest
from overlap_bench.harness.studies import experiment, measure
from overlap_bench.harness.workload.workload import Workload
from tests.support.bench_command import last_line, only_run
from tests.support.clockwork import CLOCKWORK, installed
from tests.support.in_process import done, ended, refused
from tests.support.places import REFERENCE, ROOT
from tests.support.repositories import commit, git

PINNED = REFERENCE / "runs" / "pinned-h2d"
KEY = "sk-mine"
SERVER = {"api": "completions", "count": "usage", "timeout_s": "60", "start_timeout_s": "600"}
ONE = (*CLOCKWORK, "--rounds", "1", "--trials", "1")
OWN_ENGINE = ROOT / "examples" / "own_engine"
SIZED = (
    *("--engine", "paced", "--before", "output=inline", "--after", "output=deferred"),
    *("--num-requests", "2", "--max-new-tokens", "32"),
)
FEW = Workload(num_requests=1, max_new_tokens=2, interval_ms=1.0, pretok=False)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With two keys, whatever others the machine holds, and with the built-in engines by their entry points,
    wherever the tests run."""
    own = {name: f"overlap_bench.engines.{name}:SPEC" for name in ("overlap", "openai")}
    own["paced"] = "paced_engine:SPEC"
    found = installed(tmp_path_factory.mktemp("site"), **own)
    without = {name: value for name, value in found.items() if not trust.KEYS.search(name)}
    return {**without, "OPENAI_API_KEY": KEY, "HF_TOKEN": KEY}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server of a stranger's, to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def marking(path: Path, marker: Path, by: str = "touch") -> Path:
    """A program that leaves a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{by} {marker}\nexit 1\n")
    path.chmod(0o755)
    return path


def repository(where: Path, marker: Path) -> Ref:
    """A repository with a file, and hooks and a file system monitor that leave a marker."""
    first = commit(where, {"file": "as committed\n"}, "first")
    git(where, "config", "core.fsmonitor", str(marking(where / ".git" / "monitor", marker)))
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        marking(where / ".git" / "hooks" / hook, marker)
    return Ref(repository=str(where), name="first", commit=first)


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


HIDDEN = "/bin/sh\x1b[1A\x1b[2K\nbench:   run the engine 'clockwork'\u202e"  # moves the cursor


def of_all_kinds(where: Path, marker: Path, address: str) -> tuple[Design, list[str]]:
    """A run that names all that a manifest can, each as it would harm; and how each is listed."""
    where.mkdir()
    (where / "sitecustomize.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (where / "diary").write_text("nobody's business\n")
    python, server = (marking(where / name, marker) for name in ("python", "server"))
    of_hub = api.EngineOptions(model="stranger/model")
    arms = (
        arm(name="a", env={"PYTHONPATH": f"{where}:{':'.join(sys.path)}"}),
        arm(name="b", python=str(python)),
        arm("openai", name="c", toggles={**SERVER, "cmd": f"{server} {{port}}"}),
        arm("openai", name="d", toggles={**SERVER, "url": address}),
        arm(name="e", ref=repository(where / "repository", marker)),
        arm("overlap", name="f", options=of_hub, env={"HF_ENDPOINT": address}),
        arm(name="g", python=HIDDEN),
    )
    workload = msgspec.structs.replace(FEW, prompts=str(where / "diary"))
    listed = [
        f"set the environment's 'PYTHONPATH={where}:",
        f"start the interpreter '{python}'",
        f"start the command '{server} {{port}}'",
        f"contact '{address}'",
        f"of the git repository '{where}/repository'",
        "ask for the model 'stranger/model'",
        f"read '{where}/diary', and send the engine what it says",
        repr(HIDDEN),
    ]
    return msgspec.structs.replace(planned(arms[0], workload), arms=arms), listed


def left_alone(environment: dict[str, str], where: Path, marker: Path, command: str) -> str:
    """What is said, where nothing is started."""
    _, stdout, stderr = ended(environment, where, *command.split(), code=2)
    assert stdout == ""
    assert last_line(stderr).endswith("is not signed by this machine: if it may do all this, give --trust")
    assert not marker.exists()
    return stderr


@pytest.mark.parametrize("command", ["rerun theirs", "run --resume theirs"])
def test_what_a_strangers_run_names_is_listed_and_left_alone(
    environment: dict[str, str], tmp_path: Path, listener: socket.socket, command: str
) -> None:
    marker = tmp_path / "ran"
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    design, listed = of_all_kinds(tmp_path / "things", marker, address)
    folder = stranger(tmp_path / "theirs", design)
    stderr = left_alone(environment, tmp_path, marker, command)
    assert [each for each in listed if each not in stderr] == []
    assert "\x1b" not in stderr
    assert select.select([listener], [], [], 0) == ([], [], [])  # nobody waits to be let in
    assert [each.name for each in folder.iterdir()] == ["manifest.json"]


# -- other folders, and files -----------------------------------------------------------------------------

EXPERIMENT = """
title = "Theirs"
question = "Does it run?"
sources = [{ name = "a stranger" }]

[boots.b]
trials = 4

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


def _paced(folder: Path, program: Path) -> str:
    """Whose k nobody measures by an interpreter that the file names."""
    text, _, rest = EXPERIMENT.partition("[boots.b.arms.before]")
    _, _, rest = rest.partition("[boots.b.workloads]")
    own = f'engine = "overlap"\ntoggles = {{ python = "{program}", "env.X" = "NAME" }}\n'
    arms = "".join(f"[boots.b.arms.{name}]\n{own.replace('NAME', name)}" for name in ("before", "after"))
    text = text.replace("trials = 4\n", 'trials = 4\noptions = { pace = "10ms*k" }\n')
    workload = rest.replace(
        'pretok = false, num_requests = 1, prompts = "/nowhere/diary"', "num_requests = 1"
    )
    (folder / "theirs.toml").write_text(f"{text}{arms}[boots.b.workloads]{workload}")
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


@pytest.mark.parametrize("make", [_factorial, _sweep, _toml, _paced, _experiment])
def test_nothing_is_started_for_a_strangers(
    environment: dict[str, str], tmp_path: Path, make: Callable[[Path, Path], str]
) -> None:
    """Nor is a file read: that there is no such one goes unnoticed."""
    program = marking(tmp_path / "program", tmp_path / "ran")
    stderr = left_alone(environment, tmp_path, tmp_path / "ran", make(tmp_path, program))
    assert f"bench:   start the interpreter '{program}'" in stderr or (
        f"bench:   start the command '{program} {{port}}'" in stderr
        and "bench:   read '/nowhere/diary', and send the engine what it says" in stderr
    )


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


@patch.dict(os.environ)  # whose keys are gone then
@pytest.mark.parametrize(
    ("given", "env", "withheld"),
    [
        ("", {}, True),
        ("http://127.0.0.1:1", {}, True),
        ("http://127.0.0.1:9/v1", {}, False),
        ("http://127.0.0.1:9", {"LD_LIBRARY_PATH": "/theirs"}, True),
    ],
)
def test_a_key_goes_only_to_an_address_that_is_given_again(
    secret: Path, given: str, env: dict[str, str], withheld: bool
) -> None:
    """And Hugging Face's token to no address, nor may its library take one from a file."""
    os.environ.update({trust.KEY: KEY, "HF_TOKEN": KEY, trust.ADDRESS: given, trust.NO_TOKEN: ""})
    design = planned(arm("openai", toggles={**SERVER, "url": "http://127.0.0.1:9"}, env=env))
    said: list[str] = []
    assert not trust.admit(Path("run"), [design], "", trusted=True, say=said.append)
    assert ("OPENAI_API_KEY" not in os.environ) == withheld
    assert "HF_TOKEN" not in os.environ
    assert os.environ[trust.NO_TOKEN] == "1"
    assert ("OPENAI_API_KEY" in said[-1], "HF_TOKEN" in said[-1]) == (withheld, True)
    os.environ[trust.KEY] = KEY
    assert trust.admit(Path("run"), [design], trust.signature([design]), trusted=False, say=said.append)
    assert os.environ[trust.KEY] == KEY  # what was asked for here gets it


def test_no_key_is_left_to_what_is_started(environment: dict[str, str], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = marking(tmp_path / "program", seen, by="env >")
    stranger(tmp_path / "theirs", planned(arm("openai", toggles={**SERVER, "cmd": f"{program} {{port}}"})))
    more = {**environment, "AWS_SECRET_ACCESS_KEY": KEY, "DB_PASSWORD": KEY, "OPENAI_BASE_URL": ""}
    stderr = ended(more, tmp_path, "rerun", "theirs", "--trust", code=None).err
    assert f"start the command '{program} {{port}}'" in stderr  # it is listed, and goes on
    assert "PATH=" in seen.read_text()
    assert KEY not in seen.read_text()


# -- one's own --------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_run_of_ones_own_is_repeated_from_anywhere_and_no_other(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ended(environment, tmp_path, "run", *ONE)
    mine = only_run(tmp_path)
    assert read_manifest(mine).descriptions  # it was rewritten since it was signed
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(mine, elsewhere / "a copy")
    assert "--trust" not in ended(environment, elsewhere, "rerun", "a copy").err
    other = {**environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    assert "was signed by another machine" in refused(other, tmp_path, "rerun", str(mine))
    edit(elsewhere / "a copy", lambda each: each["design"]["arms"][0].update(python="/theirs/python"))
    assert "or in another folder, or edited" in refused(environment, elsewhere, "rerun", "a copy")


def test_what_a_trusted_run_leaves_is_trusted_no_further_unless_it_is_asked_for_in_full(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Else its second half would get the keys that were kept from the first."""
    stranger(tmp_path / "theirs", planned(arm()))
    ended(environment, tmp_path, "rerun", "theirs", "--trust")
    left = str(only_run(tmp_path))
    assert "is not signed by this machine" in refused(environment, tmp_path, "run", "--resume", left)
    ended(environment, tmp_path, "run", *ONE)
    (mine,) = {*(tmp_path / "results").iterdir()} - {Path(left)}
    edit(mine, lambda each: each.pop("signature"))
    done(environment, tmp_path, "run", *ONE, "--resume", str(mine))


def test_a_run_that_its_first_boots_sized_is_still_ones_own(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says no number of trials or rounds, is interrupted once a trial is kept, and gone on with; a copy of
    it that is trusted, but not signed, gets no signature from that."""
    plain = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{OWN_ENGINE}"}
    monkeypatch.setattr(settings, "AIM_S", 0.1)
    monkeypatch.setattr(measure, "write_block", interrupting(measure.write_block))
    ended(plain, tmp_path, "run", *SIZED, code=130)
    mine = only_run(tmp_path)
    assert read_manifest(mine).design.aim_s is None
    shutil.copytree(mine, tmp_path / "theirs")
    edit(tmp_path / "theirs", lambda each: each["design"].update(aim_s=0.1) or each.pop("signature"))
    for command in ("run --resume", "rerun"):
        stderr = ended(plain, tmp_path, *command.split(), str(mine), code=130).err
        assert "--trust" not in stderr
        said = refused(plain, tmp_path, *command.split(), "theirs")
        assert "theirs is not signed by this machine" in said
    ended(plain, tmp_path, "run", "--resume", "theirs", "--trust", code=130)
    theirs = read_manifest(tmp_path / "theirs")
    assert (theirs.design.aim_s, theirs.signature) == (None, "")


def interrupting(write: Callable[..., None]) -> Callable[..., None]:
    def written(*block: Any) -> None:
        write(*block)
        raise KeyboardInterrupt

    return written


# -- the secret -------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it will be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "overlap-bench" / "secret"


DESIGN = planned(arm())


def doubted(signature: str, design: Design = DESIGN) -> str:
    """What is said of it, "" where it is believed."""
    try:
        trust.admit(Path("run"), [design], signature, trusted=False, say=lambda line: None)
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


def test_what_names_a_path_is_signed_for_the_folder_where_bench_ran(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a relative path leads to something else."""
    with_path = planned(arm(python="./python"))
    without = planned(arm(toggles={}))
    plain, named = (trust.signature([each]) for each in (without, with_path))
    monkeypatch.chdir(tmp_path)
    assert not doubted(plain, without)
    assert "in another folder" in doubted(named, with_path)


def test_without_a_place_for_the_secret_nothing_is_signed_and_nothing_believed(
    secret: Path, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("")
    assert trust.signature([DESIGN]) == ""
    assert doubted("").startswith(f"run can't be verified ({secret}: Not a directory)")


def _sign(place: str, barrier: Any, signatures: Any) -> None:
    os.environ["XDG_STATE_HOME"] = place
    barrier.wait()
    signatures.put(trust.signature([DESIGN]))


@pytest.mark.parametrize("attempt", range(5))
def test_those_who_sign_at_once_for_the_first_time_share_one_secret(tmp_path: Path, attempt: int) -> None:
    forked = multiprocessing.get_context("fork")
    shared = (str(tmp_path), forked.Barrier(8), forked.SimpleQueue())
    for signing in [forked.Process(target=_sign, args=shared) for _ in range(8)]:
        signing.start()
    (found,) = {shared[2].get() for _ in range(8)}
    assert found


def given_away(secret: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(secret, 12345, -1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda secret: secret.chmod(0o640),
        lambda secret: secret.symlink_to(secret.rename(secret.with_name("theirs"))),
        lambda secret: secret.write_bytes(b""),
        lambda secret: (secret.unlink(), os.mkfifo(secret, 0o600)),
        given_away,
    ],
    ids=["readable", "linked", "short", "a pipe", "another's"],
)
def test_a_secret_that_others_may_know_proves_nothing(secret: Path, spoil: Callable[[Path], object]) -> None:
    signature = trust.signature([DESIGN])
    assert not doubted(signature)
    spoil(secret)
    assert trust.signature([DESIGN]) == ""
    assert doubted(signature).startswith(f"run can't be verified ({secret}: ")


# -- git --------------------------------------------------------------------------------------------------


def test_a_checkout_runs_no_hook_and_no_monitor_and_leads_out_of_no_folder(tmp_path: Path) -> None:
    marker, outside = tmp_path / "ran", tmp_path / "outside"
    ref = repository(tmp_path / "repository", marker)
    assert worktrees.resolve("HEAD", Path(ref.repository)).commit == ref.commit
    with worktrees.checked_out([arm(name=str(outside), ref=ref)]) as places:
        assert (places[str(outside)] / "file").read_text() == "as committed\n"
        assert not places[str(outside)].is_relative_to(tmp_path)
        assert not outside.exists()
    assert worktrees.uncommitted(ref) == []
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
for arguments in {reading!r}:
    sys.argv = ["bench", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, 3), (arguments, end.code)
"""
LOAD = """
run = overlap_bench.load("run")
run.result, run.requests, run.steps, run.rounds
overlap_bench.compare("run")
overlap_bench.load("factorial").effects
"""
BENCH = "import sys; from overlap_bench.harness.cli.app import main; sys.argv = {arguments!r}; main()"
STORED = {
    "run": PINNED.with_name("overlap"),  # with steps, as they were measured
    "factorial": REFERENCE / "experiments" / "factorial-schedule-h2d-output",
}
READING = (
    *("compare run", "compare run:before run:after", "gate run --out gate", "explain run"),
    *("report run -o a.html", "report run -o a.md"),
    "factorial factorial",
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


def what_reading_touches(
    environment: dict[str, str], folder: Path, stored: dict[str, Path], *reading: str, code: str = ""
) -> str:
    """What commands, and code behind them, start, contact or open that copies of results name."""
    tmp_path = folder / "read"
    for name, run in stored.items():
        shutil.copytree(run, tmp_path / name)
        for path in (tmp_path / name).rglob("*.json"):
            content = json.loads(path.read_text())
            poison(content)
            path.write_text(json.dumps(content))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    log = tmp_path / "log"
    (tmp_path / "lookout").mkdir()
    (tmp_path / "lookout" / "sitecustomize.py").write_text(LOOKOUT.format(log=str(log)))
    modules = f"{tmp_path}/lookout{os.pathsep}{environment['PYTHONPATH']}"
    watched = {**environment, "PYTHONPATH": modules}
    importlib.import_module("matplotlib.font_manager")  # asks fc-list for fonts, once for each user
    command = [sys.executable, "-c", READ.format(reading=reading) + code]
    done = subprocess.run(command, cwd=tmp_path, env=watched, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text()


def test_reading_a_run_starts_and_contacts_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    assert what_reading_touches(environment, tmp_path, STORED, *READING, code=LOAD) == ""


def test_no_module_of_the_current_folder_is_imported(environment: dict[str, str], tmp_path: Path) -> None:
    """By the processes of a run. `bench` itself, as it is installed, does not look there either: here, -P."""
    marker = tmp_path / "ran"
    (tmp_path / "msgspec.py").write_text(f"open({str(marker)!r}, 'w')\n")
    command = [sys.executable, "-P", "-c", BENCH.format(arguments=["bench", "run", *ONE])]
    nowhere_else = {**environment, "PYTHONPATH": environment["PYTHONPATH"].strip(os.pathsep)}
    subprocess.run(command, cwd=tmp_path, env=nowhere_else, capture_output=True, check=True)
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
        "import torch; from overlap_bench.engines.presets.checkpoints import load_model;"
        "load_model('./theirs', torch.float32, torch.device('cpu'), 0)"
    )
    command = [sys.executable, "-c", load]
    subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, input="y\n" * 9)
    assert not marker.exists()
