"""The gate on two refs of a real repository."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.common.processes import remove_abandoned, room
from overlap_bench.harness.run import worktrees
from overlap_bench.harness.store.manifest import read_manifest
from tests.support.bench_command import start
from tests.support.clockwork import installed
from tests.support.in_process import done, ended, refused
from tests.support.places import ROOT
from tests.support.processes import ends
from tests.support.refusals import refusal
from tests.support.repositories import commit, fingerprint, git

EXAMPLE = ROOT / "examples" / "own_engine"
QUICK = (
    *("gate", "--engine", "paced", "--no-pretok", "--num-requests", "4", "--max-new-tokens", "8"),
    *("--interval-ms", "1", "--rounds", "1", "--max-regression", "10%"),
)
SEGMENTS = ("--interleaved-rounds", "3")
THREE = ("--trials", "3")
EARLY = ("--until-decided", "--max-trials", "12")  # two trials do, but for a busy machine
BROKEN = "\n\ndef build(options, toggles):\n    raise RuntimeError(options)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's repository: `base`, `slower` (five times), and `tidied` (as fast), checked out.
    Their steps are so long that a machine of which others take the half does not hide that."""
    where = tmp_path_factory.mktemp("repository")
    text = (EXAMPLE / "paced_engine.py").read_text().replace("STEP_US = 2000", "STEP_US = 5000")
    for branch, content in (
        ("base", text),
        ("slower", text.replace("STEP_US = 5000", "STEP_US = 25_000")),
        ("tidied", text + "\n# tidied\n"),
    ):
        commit(where, {"paced_engine.py": content}, branch)
    git(where, "checkout", "--quiet", "--detach")
    return where


@pytest.fixture
def repository(made: Path) -> Iterator[Path]:
    """As it was made, whatever the test before left in it; nothing below its .git may change."""
    before = fingerprint(made / ".git")
    yield made
    assert fingerprint(made / ".git") == before
    shutil.rmtree(made / "results", ignore_errors=True)
    git(made, "checkout", "--quiet", "paced_engine.py")


@pytest.fixture(scope="module")
def environment(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    values = installed(tmp_path_factory.mktemp("site"), paced="paced_engine:SPEC")
    rooms = tmp_path_factory.mktemp("rooms")
    return {**values, "PYTHONPATH": f"{values['PYTHONPATH']}{os.pathsep}{made}", "TMPDIR": str(rooms)}


def assert_nothing_is_left(environment: dict[str, str]) -> None:
    assert not [each for each in Path(environment["TMPDIR"]).iterdir() if each.name.startswith("bench-")]


def test_a_regression_between_two_refs_fails_and_names_the_metric(
    repository: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refs alone have the engine: the repository is not on the path."""
    monkeypatch.delitem(sys.modules, "paced_engine", raising=False)
    alone = {**environment, "PYTHONPATH": environment["PYTHONPATH"].removesuffix(f":{repository}")}
    asked = ("--base-ref", "base", "--head-ref", "slower")
    _, stdout, stderr = ended(alone, repository, *QUICK, *SEGMENTS, *EARLY, *asked, code=1)
    assert "can't be loaded" not in stderr
    assert "Gate: FAIL. paced: decode_step_ms regressed by more than 10%" in " ".join(stdout.split())
    assert "ref=base" in stdout
    assert (repository / "results" / "gate.md").exists()
    assert_nothing_is_left(environment)


def test_two_refs_of_the_same_speed_do_not_fail(repository: Path, environment: dict[str, str]) -> None:
    """The checkout in the current folder is broken: neither ref may run its code. From a hook, whose index a
    commit is made of."""
    engine = repository / "paced_engine.py"
    engine.write_text(engine.read_text() + BROKEN)
    hook = {"GIT_DIR": ".git", "GIT_INDEX_FILE": str(repository / ".git" / "index"), "GIT_PREFIX": ""}
    arguments = ("--base-ref", "base", "--head-ref", "tidied", "--format", "json", "--max-regression", "90%")
    code, stdout, stderr = ended(
        {**environment, **hook}, repository, *QUICK, *SEGMENTS, *THREE, *arguments, code=None
    )
    assert code in (0, 3), stderr
    result = json.loads(stdout)
    assert result["gate"]["verdict"] in ("pass", "undecided")
    (run,) = [each for each in (repository / "results").iterdir() if each.is_dir()]
    refs = [each.ref for each in read_manifest(run).design.arms]
    assert [each.name for each in refs if each is not None] == ["base", "tidied"]
    assert_nothing_is_left(environment)


def test_a_patch_that_makes_it_slower_fails_and_one_that_is_in_already_is_refused(
    repository: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The engine is a module by itself. What is installed stays as it is; the run keeps the diff."""
    (tmp_path / "slower.diff").write_text(git(repository, "diff", "base", "slower"))
    asked = (f"--after=patch={tmp_path / 'slower.diff'}", "--format", "json")
    stdout = ended(environment, repository, *QUICK, *SEGMENTS, *EARLY, *asked, code=1).out
    result = json.loads(stdout)
    assert result["gate"]["verdict"] == "fail"
    assert result["comparisons"][0]["after"]["patch"]["files"] == ["paced_engine.py"]
    (run,) = [each for each in (repository / "results").iterdir() if each.is_dir()]
    changed = read_manifest(run).changed_code
    assert changed.counts
    assert_nothing_is_left(environment)

    (tmp_path / "other.diff").write_text(git(repository, "diff", "slower", "base"))
    patch = f"patch={tmp_path / 'other.diff'}"
    said = refused(environment, repository, *QUICK, *SEGMENTS, "--after", patch)
    assert "is in " in said
    assert "give --before its reverse" in said


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_gate_that_is_ended(repository: Path, environment: dict[str, str], by: signal.Signals) -> None:
    """After kill -9 the next run removes its folders."""
    asked = ("--base-ref", "base", "--head-ref", "tidied", "--trials", "30")
    bench = start(environment, repository, *QUICK, *asked)
    bench.wait_for("first boots (discarded) done")
    bench.popen.send_signal(by)
    code, _, stderr = bench.end()
    assert code == (-by if by == signal.SIGKILL else 128 + by), stderr
    assert all(ends(each.pid) for each in bench.left())
    remove_abandoned(Path(environment["TMPDIR"]))
    assert_nothing_is_left(environment)


def test_a_folder_that_bench_did_not_make_is_left_alone(tmp_path: Path) -> None:
    """A name like ours and a file called lock do not make a folder ours: it may be somebody's clone."""
    for name in ("lock", "lock.c"):
        own = tmp_path / f"bench-{name}"
        own.mkdir()
        (own / name).write_text("mine")
    with room(str(tmp_path)) as made:
        abandoned = made.with_name("bench-abandoned")
        shutil.copytree(made, abandoned)
    remove_abandoned(tmp_path)
    assert not abandoned.exists()
    assert {each.name for each in tmp_path.iterdir()} == {"bench-lock", "bench-lock.c"}


@pytest.mark.parametrize("name", ["^HEAD", "--all", "-v", "HEAD^{tree}", ""])
def test_a_ref_that_is_no_commit_is_refused(repository: Path, name: str) -> None:
    refusal(lambda: worktrees.resolve(name, repository))


def test_a_ref_that_a_shallow_clone_lacks_is_told_of_from_every_kind_of_checkout(
    repository: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--branch", "slower", repository.as_uri(), "clone")
    git(tmp_path / "clone", "worktree", "add", "--quiet", "--detach", "../worktree")
    git(tmp_path, "init", "--quiet", "around")
    allowed = ("-c", "protocol.file.allow=always")
    git(
        tmp_path / "around",
        *allowed,
        "submodule",
        "--quiet",
        "add",
        "--depth",
        "1",
        repository.as_uri(),
        "inside",
    )
    for where, head in (("clone", "slower"), ("worktree", "slower"), ("around/inside", "HEAD")):
        assert (
            worktrees.resolve("HEAD", tmp_path / where).commit == git(repository, "rev-parse", head).strip()
        )
        with pytest.raises(api.BadSetting, match="this clone is shallow, fetch it first"):
            worktrees.resolve("HEAD~1", tmp_path / where)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--base-ref bass", "unknown ref in"),
        ("--head-ref base", "--head-ref needs a --base-ref"),
        ("--base-ref base --head-ref base", "base and base are the same commit, "),
        ("--base-ref base --before python=/nowhere/python", "can't start before with /nowhere/python"),
        ("--base-ref base --engine clockwork", "its interpreter found the engine in"),
        ("--base-ref base --primary tpot_ms_p50", "a gate is about its --metric"),
        ("--base-ref base --metric tpot_p50", "did you mean tpot_ms_p50?"),
        ("--base-ref base --metric ttft_ms_p50 --metric ttft_ms_p50", "--metric takes up to 5 different"),
        ("--base-ref base --until-precision 1%", "a gate stops after --trials, or --until-decided"),
        ("", "a gate needs two arms"),
        ("results/nothing", "is already measured: only the options of Gate"),
    ],
)
def test_a_wrong_gate_is_one_line_and_leaves_nothing(
    repository: Path, environment: dict[str, str], arguments: str, message: str
) -> None:
    assert message in refused(environment, repository, *QUICK, *THREE, *arguments.split())
    assert not list((repository / "results").glob("*"))
    assert_nothing_is_left(environment)


def test_the_base_against_itself_says_what_can_be_gated_here(
    environment: dict[str, str], tmp_path: Path
) -> None:
    quick = ("--trials", "2", *QUICK[1:])
    early = ("--until-decided", "--max-trials", "20")  # as the gate that it is for may be asked to end
    asked = ("gate", "--calibrate", *quick, *SEGMENTS, *early, "--format", "json")
    stdout = done(environment, tmp_path, *asked)
    found = json.loads(stdout)
    assert found["trials"] == 2
    assert {"decode_step_ms", "tpot_ms_p50"} <= found["sd"].keys()
    assert {plan["limit"] for plan in found["plans"]} <= {0.1}
    (folder,) = (tmp_path / "results").glob("*-aa-*")
    assert {arm.name for arm in read_manifest(folder).design.arms} == {"before", "after"}
