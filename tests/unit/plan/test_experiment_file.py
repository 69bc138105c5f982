"""The experiments of harness/plan/claims: valid on every device, strict, and true to what they quote."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.plan import experiment_file
from overlap_bench.harness.plan.design import workload_order
from overlap_bench.harness.plan.experiment_file import Adjusted
from overlap_bench.harness.studies import experiment
from tests.support.in_process import bench, complaint
from tests.support.refusals import refusal

NAMES = experiment_file.names()
GIL = experiment_file.folder() / "gil.toml"


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_experiment_names_only_what_there_is_and_quotes_its_source(name: str) -> None:
    """Phases are means over decode steps: a median, or a mean over requests, is no whole of theirs."""
    found = experiment_file.read(experiment_file.find(name))
    experiment_file.check(found)
    for claim in found.claims:
        percent = f"{abs(100 * (claim.reported or 0)):.3g}%"
        times = f"{claim.reported:.3g} times" if claim.reported and claim.reported >= 1 else percent
        assert claim.reported is None or percent in claim.says or times in claim.says
    columns = [column for table in found.tables for column in table.columns]
    wholes = {each.of for each in (*found.claims, *columns) if each.share.startswith("phase_")}
    assert wholes <= {"round_step_ms_mean"}


def test_a_pace_by_k_is_settled_once_so_that_resume_goes_on_with_it() -> None:
    found = experiment_file.read(GIL)
    boots = {
        name: msgspec.structs.replace(
            each,
            options={**each.options, "pace": "10ms*k"},
            arms={
                arm: msgspec.structs.replace(its, options={"pace": "2ms*k/2"})
                for arm, its in each.arms.items()
            },
        )
        for name, each in found.boots.items()
    }
    found = experiment_file.settled(msgspec.structs.replace(found, boots=boots))
    for each in found.boots.values():
        for options in (each.options, *(arm.options for arm in each.arms.values())):
            assert re.fullmatch(r"(10|2)ms\*[\d.]+", options["pace"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials = 6", "trialz = 6", "unknown key 'trialz'; did you mean trials?"),
        ('"launch_lag_us"', '"goodput_req_s"', "goodput_req_s needs limits, and a file gives none"),
        ("question =", "qestion =", "unknown key 'qestion'; did you mean question?"),
        ('arm = "no-wait"', 'arm = "no-wayt"', "unknown arm of load 'no-wayt'; did you mean no-wait?"),
        ('"copy-done:before"', '"copy-dun:before"', "unknown variant 'copy-dun'; did you mean copy-done?"),
        ('"copy-done:before"', '"copy-done:befor"', "unknown side of copy-done 'befor'"),
        ('gil = "fast-switch"', 'gil = "fast-swich"', "did you mean fast-switch?"),
        ('"launch_lag_us"', '"launch_lagg_us"', "did you mean launch_lag_us?"),
        ('workload = "light"', 'workload = "lite"', "unknown workload of load 'lite'; did you mean light?"),
        ("concurrency = 4", "concurency = 4", "did you mean concurrency?"),
        ("idle_stops = 400", 'idle_stops = "many"', "idle_stops must be a number of stop strings"),
        ("stream_interval = 1", "stream_intervall = 1", "did you mean stream_interval?"),
        ("trials = 6", "trials = 3", "an experiment needs at least 4 trials, not 3"),
        ("outputs = true }", 'outputs = true, value = "step_ms" }', "column outputs equal needs one of"),
        ("trials = 6", "trials = 6\nmargin = 2.0", "--margin must be above 0% and below 100%, not 200%"),
        (
            'change = "tpot_ms_p50"\n\n[[claims]]\nsays = "and',
            'change = "tpot_ms_p50"\nreported = -0.01\n\n[[claims]]\nsays = "and',
            "the claim of -1% lies within the margin of load, 1%",
        ),
        (
            'change = "tpot_ms_p50"',
            'change = "decode_step_ms"',
            "is measured in turns: give load interleaved_rounds",
        ),
        ("trials = 6", 'trials = "six"', "Expected `int`, got `str`"),
        ("trials = 6", "trials = 6\nblocks = 8", "blocks is the old name of trials: leave it out"),
        ("trials = 6", "trials = ", "is not TOML"),
        ("[boots.load.workloads]", '[boots.load.workloads]\n"/../elsewhere" = {}', "must have no slash"),
        (
            'change = "tpot_ms_p50"\n\n[[claims]]\nsays = "and',
            'change = "launch_lag_us"\n\n[[claims]]\nsays = "and',
            "launch_lag_us can't carry a verdict",
        ),
    ],
)  # fmt: skip
def test_a_file_with_a_fault_is_one_line_that_names_it(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = GIL.read_text()
    assert old in text
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new, 1))
    said = refusal(lambda: experiment.plan(str(path), Adjusted(device="emulated")))
    assert said.startswith(str(path))
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show gill", "unknown experiment 'gill'; did you mean gil?"),
        ("run sglang-launch-dun", "unknown experiment 'sglang-launch-dun'; did you mean sglang-launch-done?"),
        ("run gil --trials 3", "an experiment needs at least 4 trials, not 3"),
        ("run gil --rounds 0", "--rounds must be at least 1, not 0"),
        ("run gil --device cudda", "unknown device 'cudda'; did you mean cuda?"),
        ("run", "say which experiment to run"),
        ("run gil --trust", "what you ask for here needs none"),
        ("run gil --resume somewhere", "leave name and options out"),
        ("run --resume /nowhere/at/all", "/nowhere/at/all is not an experiment's folder"),
        ("show gil --format json", "--format is for what a finished experiment found"),
        ("show /nowhere/own.toml", "cannot read /nowhere/own.toml: No such file"),
    ],
)
def test_a_bad_request_is_one_line(arguments: str, message: str) -> None:
    assert message in complaint("experiment", *arguments.split())


def test_listing_and_showing_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listed = bench("experiment", "list").out
    assert all(name in listed for name in NAMES)
    shown = " ".join(bench("experiment", "show", "roseinfer-pinned-h2d", "--device", "emulated").out.split())
    assert "3042.19 -> 3210.51 tokens/s (+5.5%)" in shown
    assert "num_requests 64 → 32" in shown
    assert "pace default → roseinfer-gpt2" in shown


def test_boots_with_segments_take_turns_and_say_so() -> None:
    planned = experiment.plan("roseinfer-pinned-h2d", Adjusted(device="emulated"))
    design = planned.designs()["stream"]["blog"]
    assert (design.segments, design.turn_steps, design.turn_lead) == (3, 4, 1)
    assert any("; 3 interleaved rounds" in line for line in planned.extents())
    overlapped = experiment.plan("sglang-launch-done", Adjusted(device="emulated")).designs()["ways"]
    assert overlapped["device-bound"].turn_lead == 2
    rounds = experiment.plan("gil", Adjusted(device="emulated")).designs()["load"]["light"]
    assert (rounds.segments, rounds.turn_steps) == (0, 0)


@pytest.mark.parametrize(
    ("pattern", "new", "message"),
    [
        (
            r"(\[boots.load.arms\]\n)",
            r'\1other = { engine = "transformers" }\n',
            "load has interleaved_rounds, and other's engine takes no turns",
        ),
        (r"(\[boots.load.arms\]\n)[^\[]*\n\[", r"\1[", "load needs an arm and a workload"),
        (r"(\[boots.load.workloads\]\n)[^\[]*\n\[", r"\1[", "load needs an arm and a workload"),
    ],
)
def test_boots_that_can_take_no_turns_are_refused(
    tmp_path: Path, pattern: str, new: str, message: str
) -> None:
    text = GIL.read_text().replace("trials = 6", "trials = 6\nsegments = 3", 1)
    changed = re.sub(pattern, new, text, count=1)
    assert changed != text
    (tmp_path / "own.toml").write_text(changed)
    with pytest.raises(api.BadSetting, match=message):
        experiment.plan(str(tmp_path / "own.toml"), Adjusted(device="emulated"))


def test_only_the_emulated_device_is_scaled() -> None:
    asked = {kind: experiment.plan("vllm-output-processor", Adjusted(device=kind)) for kind in
             experiment_file.DEVICE_KINDS}  # fmt: skip
    largest = {kind: planned.designs()["output"]["largest"] for kind, planned in asked.items()}
    assert largest["cuda"].workload.concurrency == 1024
    assert largest["emulated"].workload.concurrency == 256
    assert asked["cuda"].scaling() == []
    (line,) = asked["emulated"].scaling()
    assert "largest: concurrency 1024 → 256" in line


@pytest.mark.parametrize("kind", experiment_file.DEVICE_KINDS)
def test_blocks_and_rounds_that_were_asked_for_are_said(kind: str) -> None:
    adjusted = experiment.plan("sglang-launch-done", Adjusted(device=kind, blocks=4, rounds=2))
    design = adjusted.designs()["ways"]["host-bound"]
    assert (design.blocks, design.rounds) == (4, 2)
    files = {"emulated": "8 of 2", "cuda": "8 of 10"}[kind]
    said = f"ways: 4 trials of 2 rounds, asked for in place of the experiment's {files}; 3 interleaved rounds"
    assert adjusted.extents() == [said]
    assert "rounds 10 →" not in "".join(adjusted.scaling())
    plain = experiment.plan("sglang-launch-done", Adjusted(device=kind))
    (line,) = plain.extents()
    assert line == f"ways: {files.replace(' of ', ' trials of ')} rounds; 3 interleaved rounds"
    assert ("rounds 10 → 2" in "".join(plain.scaling())) is (kind == "emulated")


def test_what_an_older_program_stored_is_read_without_the_keys_that_are_gone() -> None:
    stored = {"title": "t", "boots": "b", "columns": [], "rows": [], "workloads": []}
    assert msgspec.convert(stored, experiment_file.Layout).rows == []


def test_designs_of_the_same_boots_differ_in_their_workload_alone() -> None:
    designs = experiment.plan("gil", Adjusted(device="emulated", seed=3)).designs()["load"]
    same = designs["light"]
    for design in designs.values():
        assert msgspec.structs.replace(design, workload=same.workload, name=same.name) == same
    assert len({len(design.workload.stop) for design in designs.values()}) == len(designs)


@given(st.integers(0, 2**31), st.integers(0, 20), st.integers(-2, 20), st.integers(1, 6))
def test_in_a_round_every_workload_has_one_turn(seed: int, block: int, index: int, workloads: int) -> None:
    assert sorted(workload_order(seed, block, index, workloads)) == list(range(workloads))


def test_workloads_come_in_every_order() -> None:
    found = {tuple(workload_order(0, block, index, 3)) for block in range(6) for index in range(20)}
    assert len(found) == 6


def test_an_experiment_on_a_card_knows_what_an_eager_arms_device_times_hold(tmp_path: Path) -> None:
    """As a run does: or gaps between kernels would be shown as the device's time."""
    text = experiment_file.find("small-model-share").read_text()
    (tmp_path / "own.toml").write_text(text.replace('"async-output:before"', '"cuda-graph:before"'))
    found = experiment_file.read(tmp_path / "own.toml")
    for kind in ("cuda", "emulated"):
        designs = experiment_file.Plan(experiment=found, kind=kind).every_design()
        eager = [arm for each in designs for arm in each.arms if arm.toggles["graph"] == "off"]
        assert eager
        assert all(bool(arm.device_holds) == (kind == "cuda") for arm in eager)
