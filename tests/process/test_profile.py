"""`bench profile`, as a person runs it: the built-in timeline, nsys in front of it, what is refused."""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.common.processes import Interrupted, interruptible
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.studies import profile
from overlap_bench.harness.trace.timeline import Timeline
from tests.support import gap
from tests.support.bench_command import last_line, start
from tests.support.clockwork import installed
from tests.support.in_process import complaint, done, refused
from tests.support.made_blocks import described

# Everything there is to see: a forward thread, an output process, a stream for copies.
THREADED = ("schedule=overlap", "launch=thread", "output=process")
SMALL = (
    *("--engine", "overlap", *(word for each in THREADED for word in ("--set", each))),
    *("--num-requests", "2", "--arrival", "burst", "--max-new-tokens", "40", "--max-batch-size", "4"),
    *("--steps", "6", "--device", "emulated"),
)
# Records how it was called, and else does as nsys does: attaches a tool, runs what it was given, writes a
# report where it was told to, exports it.
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> "$STAND_IN_CALLS"
what=$1
shift
while [ "${1#--}" != "$1" ]; do
  case "$1" in --output=*) output=${1#--output=} ;; esac
  shift
done
if [ "$what" = export ]; then
  cp "$1" "$output"
  exit
fi
NVTX_INJECTION64_PATH=$STAND_IN_TOOL "$@" && echo report > "$output.nsys-rep"
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def design() -> Design:
    asked = Request(variant="overlap", options={"device": "emulated"})
    return make_design(asked, api.find_engines(), load_variants(), lambda: "emulated")


def test_an_arms_title_has_what_others_have_not_or_all_where_none_differs() -> None:
    def captured(arm: str, **toggles: str) -> profile.Captured:
        return profile.Captured(
            timeline=Timeline(arm=arm, opened_ns=0, closed_ns=1, tracks=[], ranges=[], arrows=[]),
            description=msgspec.structs.replace(described(), toggles=toggles),
        )

    before = captured("before", h2d="pinned", gc="frozen")
    after = captured("after", h2d="packed", gc="frozen")
    assert profile.title(before, [before, after]) == "before: h2d=pinned"
    assert profile.title(before, [before]) == "before: h2d=pinned, gc=frozen"


# -- the commands of nsys ---------------------------------------------------------------------------------


def test_nsys_captures_the_window_without_sampling_and_follows_children() -> None:
    command = profile.nsys_capture("/opt/nsys", Path("out/before"), "node", ["python", "-m", "it"])
    assert command == [
        "/opt/nsys",
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--trace-fork-before-exec=true",
        "--cuda-graph-trace=node",
        "--capture-range=nvtx",
        "--nvtx-capture=steady-decode@profile",
        "--capture-range-end=stop",
        "--output=out/before",
        "python",
        "-m",
        "it",
    ]
    assert profile.nsys_export("nsys", Path("out/before")) == [
        "nsys",
        "export",
        "--type=sqlite",
        "--output=out/before.sqlite",
        "out/before.nsys-rep",
    ]


def test_each_arm_is_captured_alone() -> None:
    whole = design()
    commands = profile.commands(profile.Nsys("nsys", "graph"), whole, 5, Path("results"))
    for (*nsys, module, config), arm in zip(commands, whole.arms, strict=True):
        assert module == "overlap_bench.harness.studies.profiled_arm"
        assert f"--output=results/{arm.name}" in nsys
        asked = msgspec.json.decode(config, type=profile.ProfiledArm)
        assert (asked.design.arms, asked.steps) == ((arm,), 5)


def test_nsys_on_path_is_used_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path / "nsys", STAND_IN)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert profile.find_nsys(None, "cuda") == str(found)
    assert profile.find_nsys(None, "emulated") is None
    assert profile.find_nsys(str(found), "emulated") == str(found)


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("profile", "say what to run: --variant NAME"),
        ("profile --variant overlop", "unknown variant 'overlop'; did you mean overlap?"),
        ("profile --variant overlap --steps 1", "--steps must be at least 2, not 1"),
        ("profile --variant overlap --trials 6", "--trials"),
        ("profile --variant overlap --margin 1%", "--margin"),
        ("profile --variant overlap --graph-trace kernel", "kernel"),
        ("profile --variant overlap --graph-trace node", "--graph-trace applies only with nsys"),
        ("profile --variant overlap --nsys /no/nsys", "--nsys /no/nsys: there is no such program"),
        ("profile --variant overlap --out /dev/null/results", "can't write results to /dev/null/results"),
        ("compare {profile}", "is a profile, not a run"),
        ("compare {profile}:before {profile}:after", "is a profile, not a run"),
        ("rerun {profile}", "is a profile, not a run"),
        ("gate {profile}", "is a profile, not a run"),
        ("run --resume {profile}", "is a profile, not a run"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    (tmp_path / "profile.json").write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert message in complaint(*arguments.format(profile=tmp_path).split())


def test_an_engine_without_ranges_and_a_round_without_steady_decode_are_refused(tmp_path: Path) -> None:
    asked = ("profile", "--engine", "clockwork", "--no-pretok", "--num-requests", "2")
    said = refused(installed(tmp_path), tmp_path, *asked)
    assert said == "bench: this engine has nothing to profile: it records no ranges"
    assert not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho no driver >&2\nexit 3\n", "profile of before failed (status 3): no driver"),
        (
            "#!/bin/sh\nexit 0\n",
            "profile of before wrote no before.nsys-rep: its capture range (steady-decode@profile) never "
            "began",
        ),
        (
            "#!/bin/sh\necho Capture range started\necho Importer error status: not found\necho Generated:\n",
            "profile of before wrote no before.nsys-rep: Importer error status: not found",
        ),
        (
            "#!/bin/sh\necho WARNING: no driver\nkill -9 $$\n",
            "profile of before was killed by SIGKILL",
        ),
    ],
)
def test_nsys_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, script: str, message: str) -> None:
    nsys = program(tmp_path / "nsys", script)
    said = refused(installed(tmp_path), tmp_path, "profile", *SMALL, "--nsys", str(nsys), code=4)
    assert said == f"bench: {nsys} {message}"
    assert not list((tmp_path / "results").iterdir())


# -- whole ------------------------------------------------------------------------------------------------


def test_a_profile_has_sound_traces_with_every_track_and_arrow_and_a_picture(tmp_path: Path) -> None:
    asked = ("profile", *SMALL, "--after", "output=inline", "--format", "json")
    analysed = json.loads(done(installed(tmp_path), tmp_path, *asked))
    (folder,) = (tmp_path / "results").iterdir()
    assert sorted(each.name for each in folder.iterdir()) == [
        *("after.trace.json", "before.trace.json", "profile.json", "steps.png", "steps.svg"),
    ]
    for arm in ("before", "after"):
        assert analysed[arm]["file"] == f"results/{folder.name}/{arm}.trace.json"
        assert analysed[arm]["devices"] == 1
    rows = [row for part in analysed["parts"].values() for row in part["rows"]]
    assert {value["change"] for row in rows for value in row["values"].values()} == {None}
    about = json.loads((folder / "profile.json").read_text())
    assert (about["kind"], about["steps"], about["nsys"]) == ("profile", 6, [])
    assert about["descriptions"]["after"]["model"]["tokenizer"] == "engines.presets/tokenizer.json"
    picture = (folder / "steps.svg").read_text()
    assert ": steady decode, profiled, on the emulated device<" in picture
    assert "before: output=process<" in picture
    before = json.loads((folder / "before.trace.json").read_text())
    after = json.loads((folder / "after.trace.json").read_text())
    tracks = [each["args"]["name"] for each in before["traceEvents"] if each["name"] == "thread_name"]
    assert tracks == ["load generator", "scheduler", "forward", "output", "stream forward", "stream copy"]
    processes = [each["args"]["name"] for each in after["traceEvents"] if each["name"] == "process_name"]
    assert processes == ["load generator", "engine", "device (emulated)"]
    arrows = {each["name"] for each in before["traceEvents"] if each["ph"] == "s"}
    assert arrows == {"h2d", "launch", "d2h", "copy_done", "hand over"}
    counts = Counter((each["ph"], each["name"]) for each in before["traceEvents"])
    assert 6 <= counts["X", "schedule"] <= 7
    assert 5 <= counts["f", "launch"] == counts["s", "launch"]
    assert 5 <= counts["f", "copy_done"] <= 7


@pytest.mark.parametrize("nvtx_tool", [""], indirect=True, ids=["listening"])
def test_below_nsys_every_process_tells_a_tool_of_its_ranges_in_its_own_domain(
    tmp_path: Path, nvtx_tool: dict[str, str]
) -> None:
    nsys = program(tmp_path / "nsys", STAND_IN)
    nsys_calls, told = tmp_path / "calls", tmp_path / "told"
    told.mkdir()
    environment = installed(tmp_path) | {
        "STAND_IN_CALLS": str(nsys_calls),
        "STAND_IN_TOOL": nvtx_tool["NVTX_INJECTION64_PATH"],
        "NVTX_TOOL_LOG": str(told / "ranges"),
    }
    out = done(environment, tmp_path, "profile", *SMALL, "--nsys", str(nsys))
    assert len(out.splitlines()) <= 40
    assert "What takes most, us per step" in out
    assert "--all" in out
    (folder,) = (tmp_path / "results").iterdir()
    assert sorted(each.name for each in folder.iterdir()) == [
        *("before.nsys-rep", "before.sqlite", "before.trace.json"),
        *("profile.json", "steps.png", "steps.svg"),
    ]
    assert [call.split()[0] for call in nsys_calls.read_text().splitlines()] == ["profile", "export"]
    ranges = [line.split("\t") for file in told.iterdir() for line in file.read_text().splitlines()]
    seen = {domain: {message for other, _, message, *_ in ranges if other == domain} for domain, *_ in ranges}
    assert seen["engine"] >= {
        *("recv", "schedule", "metadata", "h2d", "launch", "wait.launch_done", "wait.copy_done", "append"),
        "output",
    }
    assert seen["output process"] == {"output"}
    assert seen["device process"] == {"program", "h2d", "d2h"}
    assert seen["load generator"] == {"send", "arrive"}
    assert [each[3] for each in ranges if each[0] == "profile"] == ["6"]


def test_ctrl_c_ends_every_process_and_leaves_no_folder(tmp_path: Path) -> None:
    nsys = program(tmp_path / "nsys", '#!/bin/sh\nshift\nwhile [ "${1#--}" != "$1" ]; do shift; done\n"$@"\n')
    running = start(installed(tmp_path), tmp_path, "profile", *SMALL, "--nsys", str(nsys))
    running.find("overlap_bench.engines.host")
    # During a boot, as most often here, it says whose.
    assert re.fullmatch("bench: interrupted(; [a-z ]+ had not started yet)?", running.interrupt())
    assert running.left() == []
    assert not list((tmp_path / "results").iterdir())


def test_nsys_that_is_killed_takes_what_its_agent_started_along(tmp_path: Path) -> None:
    """The agent of nsys has a session of its own and no parent, and so has the program that it starts."""
    nsys = program(
        tmp_path / "nsys",
        '#!/bin/sh\nshift\nwhile [ "${1#--}" != "$1" ]; do shift; done\n(setsid "$@" &)\nexec sleep 60\n',
    )
    running = start(installed(tmp_path), tmp_path, "profile", *SMALL, "--nsys", str(nsys))
    running.find("overlap_bench.engines.devices.emulated")
    running.find("sleep 60").kill()
    code, out, err = running.end()
    assert (code, out) == (4, "")
    assert last_line(err) == f"bench: {nsys} profile of before was killed by SIGKILL"
    assert running.left() == []
    assert not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize("by", gap.SIGNALS)
def test_nsys_that_starts_while_a_profile_is_ended_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    arm = design().arms[0]
    with (
        gap.signalled_at_each_start(monkeypatch, by) as began,
        pytest.raises(Interrupted),
        interruptible(),
    ):
        profile._run("nsys", "profile", arm, ["sleep", "600"], tmp_path)
    assert began[0].poll() == -signal.SIGKILL
