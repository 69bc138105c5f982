"""The action for other projects: its shell steps, as a runner would run them, and what its files may do."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.process.test_gate_refs import EXAMPLE
from tests.support.clockwork import installed
from tests.support.places import ROOT
from tests.support.repositories import commit, git

ACTION = ROOT / "action"
ACTIONS = (ACTION / "action.yml", ACTION / "comment" / "action.yml")
WORKFLOWS = (*sorted((ACTION / "examples").glob("*.yml")), *sorted((ROOT / ".github").rglob("*.yml")))
PINNED = re.compile(r"actions/[\w/-]+@[0-9a-f]{40}|OWNER/overlap-bench/action(/comment)?@COMMIT|\./action")

# What stands for bench: it notes how it was called, and ends as $ENDS says.
BENCH = """#!/bin/bash
printf '%s\\n' "$*" >> calls
case "$*" in
  *fingerprint*) echo "a cpu 2 []" ;;
  "-m pip "*) ;;
  *" bisect "*)
    if [ "$ENDS" = 4 ]; then echo "bench: no way from a to b" >&2; exit 4; fi
    mkdir -p bench-gate/bisect/run
    printf '**abc “slow” made it slower: 2%% of it.**\\n\\nrest\\n' > bench-gate/bisect/run/bisect.md
    echo "git bisect good $(printf 'b%.0s' {1..40})" > bench-gate/bisect/run/bisect.log
    if [ "$ENDS" = 0 ]; then
      echo "# first bad commit: [$(printf 'c%.0s' {1..40})] slow" >> bench-gate/bisect/run/bisect.log
    fi
    exit "$ENDS" ;;
  *--calibrate*)
    echo '{}' > bench-gate/calibration.json
    printf '**On this machine: 2%%.**\\n\\nrest\\n' > bench-gate/calibration.md
    cat bench-gate/calibration.md >> "$GITHUB_STEP_SUMMARY" ;;
  *)
    if [ "$ENDS" = 4 ]; then echo "bench: the engine died" >&2; exit 4; fi
    printf '**Gate: %s. 2%% of it.**\\n' "$SAYS" | tee bench-gate/gate.md >> "$GITHUB_STEP_SUMMARY"
    exit "$ENDS" ;;
esac
"""


@dataclass
class Runner:
    """A GitHub runner, as far as `run:` steps see one."""

    action: Path
    workspace: Path
    environment: dict[str, str]
    inputs: Mapping[str, str]
    event: Mapping[str, Any] = field(default_factory=dict)
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)  # by step

    def value(self, text: str) -> str:
        """What the runner would put in the place of an expression."""

        def found(match: re.Match[str]) -> str:
            first, *path = match[1].split(".")
            if first == "inputs":
                return self.inputs.get(path[0], self.file["inputs"][path[0]].get("default", ""))
            if first == "steps":
                return self.outputs.get(path[0], {}).get(path[2], "")
            github = {"event": self.event, "token": "a-token", "run_id": 3, "run_attempt": 1}
            value: Any = {"github": github, "strategy": {"job-index": 0}}[first]
            for name in path:
                value = value[name]
            return str(value)

        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", found, text)

    @property
    def file(self) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(self.action.read_text())
        return loaded

    def run(self, name: str, code: int = 0) -> str:
        """What the step of that name prints; it ends so."""
        (step,) = (each for each in self.file["runs"]["steps"] if each["name"].startswith(name))
        assert step["shell"] == "bash"
        script, told = self.workspace.parent / "step.sh", self.workspace.parent / "told"
        script.write_text(step["run"])
        told.write_text("")
        values = {key: self.value(text) for key, text in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace,
            env={**self.environment, **values, "GITHUB_OUTPUT": str(told)},
            capture_output=True,
            text=True,
        )
        pairs = (line.split("=", 1) for line in told.read_text().splitlines())
        self.outputs[step.get("id", name)] = dict(pairs)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    @property
    def summary(self) -> str:
        return Path(self.environment["GITHUB_STEP_SUMMARY"]).read_text()

    @property
    def calls(self) -> list[str]:
        """How the stand-in was called."""
        return (self.workspace / "calls").read_text().splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A pull request's merge commit, on a base that has moved on since."""
    where = tmp_path / "workspace"
    where.mkdir()
    git(where, "init", "--quiet")
    git(where, "commit", "--quiet", "--allow-empty", "-m", "base")
    git(where, "tag", "v1.0")
    git(where, "checkout", "--quiet", "-b", "change")
    git(where, "commit", "--quiet", "--allow-empty", "-m", "change")
    git(where, "checkout", "--quiet", "main")
    git(where, "commit", "--quiet", "--allow-empty", "-m", "merged before")
    git(where, "checkout", "--quiet", "--detach")
    git(where, "merge", "--quiet", "--no-ff", "change", "-m", "what is tried")
    git(where, "commit-tree", "HEAD^{tree}", "-p", "main", "-m", "merged since")
    later = git(where, "commit-tree", "HEAD^{tree}", "-p", "main", "-m", "merged since").strip()
    git(where, "update-ref", "refs/remotes/origin/main", later)
    return where


@pytest.fixture
def runner(repository: Path, tmp_path: Path) -> Callable[..., Runner]:
    def made(event: str = "pull_request", says: str = "PASS", ends: int = 0, **inputs: str) -> Runner:
        python = tmp_path / "python"
        python.write_text(BENCH)
        python.chmod(0o755)
        summary = tmp_path / "summary.md"
        summary.write_text("")
        environment = {
            "PATH": os.environ["PATH"],
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_ACTION_REF": "abc",
            "GITHUB_BASE_REF": "main" if event == "pull_request" else "",
            "GITHUB_EVENT_NAME": event,
            "GITHUB_JOB": "gate",
            "GITHUB_STEP_SUMMARY": str(summary),
            "SAYS": says,
            "ENDS": str(ends),
        }
        asked = {"gate": "--engine yours", "python": str(python), **inputs}
        return Runner(ACTIONS[0], repository, environment, asked)

    return made


# -- the gate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "ends", "on_undecided", "verdict", "level", "green"),
    [
        ("PASS", 0, "fail", "pass", "notice", True),
        ("FAIL", 1, "pass", "fail", "error", False),
        ("UNDECIDED", 3, "fail", "undecided", "warning", False),
        ("UNDECIDED", 3, "pass", "undecided", "warning", True),
        ("NO RESULT", 4, "pass", "none", "error", False),
    ],
)
def test_the_job_ends_as_the_gate_did_and_undecided_is_always_called_so(
    runner: Callable[..., Runner],
    says: str,
    ends: int,
    on_undecided: str,
    verdict: str,
    level: str,
    green: bool,
) -> None:
    job = runner(says=says, ends=ends, **{"on-undecided": on_undecided})
    job.run("Name what")
    printed = job.run("Gate")
    assert job.outputs["gate"] == {"verdict": verdict}
    said = "bench: the engine died" if ends == 4 else "2%25 of it."
    assert f"::{level} title=bench gate::Gate: {says}. {said}" in printed
    assert f"**Gate: {says}. " in job.summary
    job.run("End as", code=0 if green else 1)


def test_a_job_whose_gate_did_not_come_to_run_fails(runner: Callable[..., Runner]) -> None:
    runner().run("End as", code=1)


def test_a_pull_request_is_compared_with_the_commit_that_it_was_merged_into(
    runner: Callable[..., Runner],
) -> None:
    """Not with what its branch is by now: that would be the head's regression, backwards."""
    job = runner()
    job.run("Name what")
    job.run("Gate")
    base = git(job.workspace, "rev-parse", "main").strip()
    assert f"--head-ref HEAD --base-ref {base} --engine yours" in job.calls[-1]
    assert "--history" not in job.calls[-1]


@pytest.mark.parametrize(
    ("event", "origin", "said"),
    [
        ("push", True, "what is HEAD compared with"),
        ("pull_request", False, "give actions/checkout fetch-depth: 0"),
    ],
)
def test_a_gate_without_a_base_says_what_to_do(
    runner: Callable[..., Runner], event: str, origin: bool, said: str
) -> None:
    job = runner(event)
    if not origin:
        git(job.workspace, "update-ref", "-d", "refs/remotes/origin/main")
    job.run("Name what")
    printed = job.run("Gate", code=1)
    assert "::error title=bench gate::" in printed
    assert said in printed


def test_what_is_measured_is_words_and_never_a_program(runner: Callable[..., Runner]) -> None:
    job = runner(gate="--engine yours --prompt 'two words' $(touch ran) `touch ran`;touch ran\n--seed 1 *")
    (job.workspace / "a-file").write_text("")
    job.run("Name what")
    job.run("Gate")
    assert not (job.workspace / "ran").exists()
    assert job.calls[-1].endswith("--prompt two words $(touch ran) `touch ran`;touch ran --seed 1 *")


def test_a_calibration_that_was_kept_is_not_measured_again(runner: Callable[..., Runner]) -> None:
    job = runner(minutes="7")
    job.run("Name what")
    job.run("Gate")
    assert [call for call in job.calls if "--calibrate --max-minutes 7 --engine yours" in call]
    (job.workspace / "calls").unlink()
    Path(job.environment["GITHUB_STEP_SUMMARY"]).write_text("")
    job.run("Gate")
    assert not [call for call in job.calls if "--calibrate" in call]
    assert job.summary == "**On this machine: 2%.**\n\n**Gate: PASS. 2% of it.**\n"


def test_two_gates_of_one_job_keep_a_run_and_a_history_each(runner: Callable[..., Runner]) -> None:
    """Under one name, the later run would replace the other, and the later history would not be saved."""
    kept = []
    for asked in ("--engine yours", "--engine yours --set async_scheduling=on"):
        job = runner("schedule", gate=asked)
        job.run("Name what")
        named = {step["name"]: step.get("with", {}) for step in steps(job.action)}
        kept.append(
            [
                job.value(named[step][what])
                for step, what in (
                    ("Keep the run", "name"),
                    ("Keep the history", "key"),
                    ("Restore the history", "restore-keys"),
                )
            ]
        )
    (run, history, restored), (other_run, other_history, other_restored) = kept
    assert run != other_run
    assert run.startswith("bench-gate-gate-0-")  # what the comment fetches
    assert history.startswith(restored)
    assert other_history.startswith(other_restored)
    assert not other_history.startswith(restored)


@pytest.mark.parametrize(("ends", "culprit"), [(0, "c" * 40 + "\n"), (3, ""), (4, None)])
def test_a_change_in_the_history_is_bisected(
    runner: Callable[..., Runner], ends: int, culprit: str | None
) -> None:
    """The job ends as the gate did, whether the bisection finds a commit, nothing, or fails."""
    only_gates = "--metric a --max-regression=2% --trials 4 --max-minutes 9"
    only_gates += " --on-undecided pass --until-precision=1%"
    asked = f"--engine yours {only_gates} --set 'x=y z' --concurrency 16"
    job = runner(
        "schedule", gate=asked, says="UNDECIDED. It moved, as no gate before showed", ends=3, base="v1.0"
    )
    job.run("Gate")
    assert job.outputs["gate"] == {"verdict": "undecided", "moved": "true"}
    job.environment["ENDS"] = str(ends)
    job.inputs = {**job.inputs, "bisect-minutes": "45"}
    printed = job.run("Bisect")
    assert job.calls[-1] == (
        "-P -m overlap_bench bisect --history bench-gate/history.jsonl --max-minutes 45 --out "
        "bench-gate/bisect --engine yours --set x=y z --concurrency 16"
    )
    if culprit is None:
        assert "::warning title=bench bisect::bench: no way from a to b" in printed
        return
    assert "::notice title=bench bisect::abc “slow” made it slower: 2%25 of it." in printed
    assert (job.workspace / "bench-gate" / "culprit").read_text() == culprit


@pytest.mark.parametrize("event", ["pull_request_target", "workflow_run"])
def test_a_pull_request_never_runs_beside_secrets(runner: Callable[..., Runner], event: str) -> None:
    assert "use pull_request" in runner(event).run("Refuse", code=1)
    runner().run("Refuse")


def test_the_whole_job_on_the_example(
    repository: Path, tmp_path: Path, runner: Callable[..., Runner]
) -> None:
    """What a runner would do but for installing and keeping: the real bench, a head ten times as slow."""
    values = installed(tmp_path / "site", paced="paced_engine:SPEC")
    engine = repository / "paced_engine.py"
    shutil.copy(EXAMPLE / "paced_engine.py", engine)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "an engine")
    git(repository, "tag", "release")
    engine.write_text(engine.read_text().replace("STEP_US = 2000", "STEP_US = 20_000"))
    git(repository, "commit", "--quiet", "-a", "-m", "slower")

    quick = (
        "--engine paced --no-pretok --num-requests 4 --max-new-tokens 8 --interval-ms 1 --trials 3 --rounds 1"
    )
    job = runner("schedule", gate=f"{quick} --interleaved-rounds 3", base="release", minutes="3")
    job.inputs = {**job.inputs, "python": sys.executable}
    path = f"{values['PYTHONPATH']}{os.pathsep}{repository}"
    job.environment = {**values, **job.environment, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    job.run("Name what")
    job.run("Gate")
    # Which metric it is that this machine can gate best is the machine's, and one that others keep busy may
    # say nothing: what a gate decides is another test's.
    assert job.outputs["gate"]["verdict"] in ("fail", "undecided")
    recommended, _, rest = job.summary.partition("**Gate: ")
    assert rest.startswith(job.outputs["gate"]["verdict"].upper())
    assert "On this machine: --metric " in recommended or "No limit that was tried" in recommended
    assert "1 gate against " in rest
    (line,) = (repository / "bench-gate" / "history.jsonl").read_text().splitlines()
    assert json.loads(line)["base"] == git(repository, "rev-parse", "release").strip()


def test_a_pull_request_to_vllm_is_gated_by_what_each_side_changes_of_the_release(
    repository: Path, tmp_path: Path, runner: Callable[..., Runner]
) -> None:
    """The workflow's own steps, and the action's. The base and its tests have changed since the release."""
    release = {"vllm/__init__.py": "STEP = 2\n", "tests/test_it.py": "one = 1\n"}
    since = {"vllm/__init__.py": "STEP = 2\n# since\n", "tests/test_it.py": "one = 2\n"}
    head = {"vllm/__init__.py": "STEP = 20\n# since\n"}
    for name, files in (("v0.32.0", release), ("since", since), ("head", head)):
        if name == "head":
            git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
        commit(repository, files, name)
    git(repository, "tag", "v0.32.0", "refs/heads/v0.32.0")
    git(repository, "branch", "--delete", "--force", "v0.32.0")

    (file,) = (each for each in WORKFLOWS if each.name == "vllm.yml")
    workflow = yaml.safe_load(file.read_text())
    named = {step.get("name", ""): step for step in steps(file)}
    install = named["Install the release"]["run"].replace("$RELEASE", workflow["env"]["RELEASE"])
    assert install in (ROOT / "engines" / "vllm" / "README.md").read_text()
    told = tmp_path / "told.env"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c",
         named["Write both sides as diffs of the release"]["run"]],
        cwd=repository,
        env={**os.environ, **workflow["env"], "GITHUB_BASE_REF": "main", "GITHUB_ENV": str(told)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, _, arms = told.read_text().strip().partition("=")
    assert (name, arms) == ("ARMS", " --before patch=before.diff --after patch=after.diff")
    diffs = [(repository / f"{side}.diff").read_text() for side in ("before", "after")]
    assert [re.findall(r"^\+\+\+ (.+)$", diff, re.MULTILINE) for diff in diffs] == [
        ["b/vllm/__init__.py"]
    ] * 2
    changed = [re.findall(r"^\+(?!\+)(.+)$", diff, re.MULTILINE) for diff in diffs]
    assert changed == [["# since"], ["STEP = 20", "# since"]]

    (gating,) = (step for step in steps(file) if step.get("uses", "").startswith("OWNER/"))
    job = runner(**{**gating["with"], "gate": gating["with"]["gate"].replace("${{ env.ARMS }}", arms)})
    job.run("Name what")
    job.run("Gate")
    assert " gate --out bench-gate --plan bench-gate/calibration.json --engine vllm --pace " in job.calls[-1]
    assert job.calls[-1].endswith(f" --num-requests 64{arms}")


# -- the comment ------------------------------------------------------------------------------------------

GH = """#!/bin/bash
printf '%s\\n' "$*" >> calls
case "$*" in
  *"--method GET"*/pulls* | *commits/*/pulls*) cat pulls ;;
  *--paginate*) cat comments ;;
  *body=@comment.md*) cp comment.md posted ;;
esac
"""
OURS = [{"number": 7, "head": {"sha": "f" * 40}}]


@pytest.fixture
def commenting(tmp_path: Path) -> Callable[..., Runner]:
    def made(pulls: object = OURS, comments: object = ()) -> Runner:
        where = tmp_path / "workspace"
        where.mkdir()
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "gh").write_text(GH)
        (programs / "gh").chmod(0o755)
        (where / "pulls").write_text(json.dumps(pulls))
        (where / "comments").write_text(json.dumps(comments))
        (where / "bench-gates" / "bench-gate-gate-0").mkdir(parents=True)
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_REPOSITORY": "them/engine",
        }
        event = {
            "workflow": {"name": "bench gpu"},
            "workflow_run": {
                "name": "what run-name says",
                "head_repository": {"owner": {"login": "a-fork"}},
                "head_branch": "faster",
                "head_sha": "f" * 40,
                "html_url": "https://example.com/run",
            },
        }
        return Runner(ACTIONS[1], where, environment, {"token": "a-token"}, event)

    return made


needs_jq = pytest.mark.skipif(
    shutil.which("jq") is None, reason="there is no jq, as there is on GitHub's runners"
)


def kept(job: Runner) -> Path:
    return job.workspace / "bench-gates" / "bench-gate-gate-0" / "gate.md"


@needs_jq
def test_the_gate_is_shown_on_the_pull_request_of_the_event(commenting: Callable[..., Runner]) -> None:
    job = commenting()
    kept(job).write_text("**Gate: UNDECIDED. ruled out: more than 3%**\n\nthanks to @somebody\n")
    job.run("Comment")
    assert "head=a-fork:faster" in job.calls[0]
    assert job.calls[-1] == "api --method POST repos/them/engine/issues/7/comments -F body=@comment.md"
    posted = (job.workspace / "posted").read_text()
    assert posted.startswith("<!-- bench gate: bench gpu -->\n**Gate: UNDECIDED. ruled out: more than 3%**\n")
    assert "@somebody" not in posted
    assert "https://example.com/run" in posted


@needs_jq
def test_a_pull_request_has_one_comment_of_each_workflow(commenting: Callable[..., Runner]) -> None:
    said = [
        {"id": 1, "user": {"type": "User"}, "body": "<!-- bench gate: bench gpu --> not ours"},
        {"id": 2, "user": {"type": "Bot"}, "body": "<!-- bench gate: bench gpu -->\nours"},
        {"id": 3, "user": {"type": "Bot"}, "body": "<!-- bench gate: bench -->\nanother workflow's"},
        {"id": 4, "user": {"type": "Bot"}, "body": "<!-- bench gate: bench gpu 2 -->\nanother's"},
        {"id": 5, "user": {"type": "Bot"}, "body": "another bot's"},
    ]
    job = commenting(comments=said)
    kept(job).write_text("**Gate: PASS.**\n")
    job.run("Comment")
    assert job.calls[-1] == "api --method PATCH repos/them/engine/issues/comments/2 -F body=@comment.md"


@needs_jq
def test_a_workflows_name_stays_inside_the_mark(commenting: Callable[..., Runner]) -> None:
    job = commenting()
    job.event["workflow"]["name"] = "--> @somebody"
    job.run("Comment")
    first, _, _ = (job.workspace / "posted").read_text().partition("\n")
    assert first == "<!-- bench gate: -- @somebody -->"


@needs_jq
def test_what_a_fork_kept_shows_nothing_of_this_job_and_fits(
    commenting: Callable[..., Runner], tmp_path: Path
) -> None:
    job = commenting()
    (tmp_path / "secret").write_text("a-secret")
    kept(job).symlink_to(tmp_path / "secret")
    other = job.workspace / "bench-gates" / "bench-gate-other-0"
    other.mkdir()
    (other / "gate.md").write_text("**Gate: PASS.**\n" + "@" * 50_000)
    job.run("Comment")
    posted = (job.workspace / "posted").read_text()
    assert "a-secret" not in posted
    assert "Gate: PASS" in posted
    assert len(posted) < 65_536


@needs_jq
def test_a_bisection_is_shown_on_the_pull_request_that_brought_the_commit(
    commenting: Callable[..., Runner],
) -> None:
    job = commenting(pulls=[{"number": 5}])
    folder = kept(job).parent
    (folder / "bisect.md").write_text("**abc made it slower**\n\nthanks to @somebody\n")
    for text, calls in (("$(touch gone)", 0), ("c" * 40 + "\n", 2)):
        (folder / "culprit").write_text(text)
        job.run("Show a bisection")
        assert len(job.calls if (job.workspace / "calls").exists() else []) == calls
    assert job.calls[0] == f"api repos/them/engine/commits/{'c' * 40}/pulls"
    assert job.calls[1] == "api --method POST repos/them/engine/issues/5/comments -F body=@comment.md"
    posted = (job.workspace / "posted").read_text()
    assert posted.startswith("**abc made it slower**\n")
    assert "@somebody" not in posted


# -- what the files may do --------------------------------------------------------------------------------


def steps(file: Path) -> list[dict[str, Any]]:
    loaded = yaml.safe_load(file.read_text())
    if "runs" in loaded:
        return list(loaded["runs"]["steps"])
    return [step for job in loaded["jobs"].values() for step in job["steps"]]


def short(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", [*ACTIONS, *WORKFLOWS], ids=short)
def test_every_action_is_pinned_and_nothing_is_put_into_a_shell(file: Path) -> None:
    for step in steps(file):
        assert "uses" not in step or PINNED.fullmatch(step["uses"]), step["uses"]
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("file", WORKFLOWS, ids=short)
def test_what_runs_the_code_of_others_may_read_and_what_may_write_runs_none(file: Path) -> None:
    loaded = yaml.safe_load(file.read_text())
    triggers = loaded[True]  # YAML's name for "on"
    assert "pull_request_target" not in triggers
    if "workflow_run" in triggers:
        assert loaded["permissions"] == {}
        (job,) = loaded["jobs"].values()
        assert job["permissions"] == {"actions": "read", "pull-requests": "write"}
        assert [step["uses"] for step in job["steps"]] == ["OWNER/overlap-bench/action/comment@COMMIT"]
    else:
        assert loaded["permissions"] == {"contents": "read"}
        assert not [job for job in loaded["jobs"].values() if "permissions" in job]
        assert "secrets." not in file.read_text()


def test_the_comment_is_for_every_example() -> None:
    named = {}
    for file in (ACTION / "examples").glob("*.yml"):
        loaded = yaml.safe_load(file.read_text())
        named[file.name] = (loaded["name"], loaded[True])
    _, triggers = named.pop("comment.yml")
    assert sorted(triggers["workflow_run"]["workflows"]) == sorted(name for name, _ in named.values())


def test_an_example_gives_only_inputs_that_the_action_has() -> None:
    inputs = yaml.safe_load(ACTIONS[0].read_text())["inputs"]
    given = [
        step["with"]
        for file in WORKFLOWS
        for step in steps(file)
        if "/action" in step.get("uses", "")[-50:] and "with" in step and "gate" in step["with"]
    ]
    assert len(given) == 5
    for each in given:
        assert each.keys() <= inputs.keys()
