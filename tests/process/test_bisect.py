"""`bench bisect` on a real repository, as a person runs it."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from overlap_bench.harness.cli import app
from tests.support.bench_command import finished, only_run, start
from tests.support.clockwork import installed
from tests.support.in_process import done, refused
from tests.support.places import ROOT
from tests.support.processes import ends
from tests.support.repositories import commit, fingerprint, git

EXAMPLE = ROOT / "examples" / "own_engine" / "paced_engine.py"
COMMITS, SLOWER, BROKEN = 4, 4, 2  # the broken one halves them, so it is tried first
# Steps so long, and a change so large, that a busy machine does not hide it.
SMALL = (
    *("bisect", "--engine", "paced", "--no-pretok", "--num-requests", "2", "--max-new-tokens", "32"),
    *("--arrival", "closed", "--concurrency", "2", "--good", "v0", "--bad", f"v{COMMITS}"),
)
OPTIONS = {word for each in app.built("bisect").params for word in each.opts}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("repository")
    text = EXAMPLE.read_text()
    for place in range(COMMITS + 1):
        step = 20000 if place >= SLOWER else 4000
        content = text.replace("STEP_US = 2000", f"STEP_US = {step}") + f"\n# {place}\n"
        if place == BROKEN:
            content = content.replace("    def start(", "    def begin(")
        commit(where, {"paced_engine.py": content}, f"v{place}")
    git(where, "checkout", "--quiet", "--detach")
    return where


@pytest.fixture(scope="module")
def environment(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    values = installed(tmp_path_factory.mktemp("site"), paced="paced_engine:SPEC")
    rooms = tmp_path_factory.mktemp("rooms")
    return {**values, "PYTHONPATH": f"{values['PYTHONPATH']}{os.pathsep}{repository}", "TMPDIR": str(rooms)}


def test_killed_and_gone_on_with_it_names_the_commit(repository: Path, environment: dict[str, str]) -> None:
    before = fingerprint(repository / ".git")
    bench = start(environment, repository, *SMALL)
    bench.wait_for("trial 1: good and bad +")
    bench.popen.send_signal(signal.SIGKILL)
    bench.popen.wait()
    assert all(ends(pid) for pid in bench.seen)
    folder = only_run(repository)
    kept = finished(folder)
    assert kept
    resume = ("bisect", "--resume", str(folder), "--format", "json")
    found = json.loads(done(environment, repository, *resume))
    whole = finished(folder)
    assert {number: whole[number] for number in kept} == kept
    assert found["trials"] == len(whole)
    culprit = git(repository, "rev-parse", f"v{SLOWER}").strip()
    assert (found["verdict"], found["culprit"]) == ("found", culprit)
    assert found["effect"] > 0
    (skipped,) = (each for each in found["commits"] if each["skipped"])
    assert skipped["subject"] == f"v{BROKEN}"
    assert "NotImplementedError" in skipped["skipped"]
    assert json.loads((folder / "summary.json").read_text())["culprit"] == culprit

    again = done(environment, repository, "bisect", str(folder))
    assert "made it slower: decode_step_ms +" in again
    assert fingerprint(repository / ".git") == before
    replayed = git(repository, "bisect", "replay", str(folder / "bisect.log"))
    assert f"{culprit} is the first bad commit" in replayed
    git(repository, "bisect", "reset")
    assert not [each for each in Path(environment["TMPDIR"]).iterdir() if each.name.startswith("bench-")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bad", "v9"), "unknown ref in"),
        (("--good", "v3", "--bad", "v1"), "v3 is later than v1"),
        (("--metric", "tpot_p50"), "did you mean tpot_ms_p50?"),
        (("--max-minutes", "0"), "--max-minutes must be above 0"),
        (("--history", "nothing.jsonl"), "--history says what is good and bad"),
        (("--resume", "results"), "leave the other options out"),
        (("--set", "output=late"), "output"),
        (("--engine", "openai", "--set", "url=http://localhost:1"), "start a server per boot with cmd="),
    ],
)
def test_a_wrong_question_is_one_line_and_leaves_nothing(
    repository: Path, environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    said = refused(environment, repository, *SMALL, "--out", str(out), *arguments)
    assert message in said
    assert {*re.findall(r"--[a-z][a-z-]*", said)} <= OPTIONS  # what it names can be given
    assert not out.exists() or not list(out.iterdir())


def test_what_is_no_bisection_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    for arguments, message in (
        (("bisect", "--engine", "paced"), "say between which commits"),
        (("bisect", str(tmp_path)), "is not a bisection's folder"),
        (("bisect", str(tmp_path), "--max-minutes", "5"), "shown as it is; to go on with it: --resume"),
        (("bisect", "--engine", "paced", "--history", "none.jsonl"), "shows no change for the worse"),
    ):
        assert message in refused(environment, tmp_path, *arguments)
