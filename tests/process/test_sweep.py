"""Sweeps: from axes to points, what is refused, and a grid that goes on where it was killed."""

import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.harness.analysis import sweep as sweep_
from overlap_bench.harness.analysis.warnings import Severity, Told
from overlap_bench.harness.common import formatting
from overlap_bench.harness.plan import grid
from overlap_bench.harness.plan.grid import Point
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.report import page, sweep_tables
from overlap_bench.harness.store import sweep, tables
from overlap_bench.harness.store.files import SWEEP_FILE, StoreError, floors_of, write_json
from overlap_bench.harness.store.manifest import read_manifest, write_manifest
from overlap_bench.harness.store.tables import write_block
from tests.support.bench_command import start
from tests.support.clockwork import CLOCKWORK
from tests.support.in_process import bench, done, ended, refused
from tests.support.made_blocks import blocks, described, manifest, shown
from tests.support.made_runs import stored_sweep
from tests.support.refusals import refusal

ENGINES = {"overlap": SPEC}


def points(*over: str, **asked: Any) -> tuple[Point, ...]:
    axes = grid.parse_axes(over)
    return grid.make_points(Request(**asked), axes, ENGINES, load_variants(), lambda: "emulated")


# -- points -----------------------------------------------------------------------------------------------


def test_every_value_of_one_axis_meets_every_value_of_the_others() -> None:
    found = points("concurrency=1,8,64", "variant=pinned-h2d,async-output")
    assert [each.at for each in found][:3] == [
        {"concurrency": "1", "variant": "pinned-h2d"},
        {"concurrency": "1", "variant": "async-output"},
        {"concurrency": "8", "variant": "pinned-h2d"},
    ]
    assert [each.design.name for each in found] == ["pinned-h2d", "async-output"] * 3
    assert {each.design.workload.arrival for each in found} == {"closed"}  # what concurrency is of
    assert [each.design.workload.concurrency for each in found] == [1, 1, 8, 8, 64, 64]


def test_a_variant_s_metrics_stay_where_an_option_is_swept() -> None:
    """As where the option is given to a run: it is no change of the arms."""
    found = points("pace=2ms,5ms", variant="chunked-prefill")
    assert {each.design.primary for each in found} == {"itl_token_ms_p99"}
    assert [each.design.arms[0].options.pace for each in found] == ["2ms", "5ms"]


def test_a_point_whose_places_ask_for_more_prompts_than_there_are_is_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([f"text {number}" for number in range(10)]))
    asked = {"prompts": str(texts), "prompt_repeats": 2, "input_tokens": None}
    with pytest.raises(api.BadSetting, match="prompt_repeats=2 of 24 requests needs 12 different prompts"):
        points("concurrency=4,12", variant="pinned-h2d", workload=asked)


def test_a_closed_loop_has_requests_for_all_its_places() -> None:
    counts = [each.design.workload.num_requests for each in points("concurrency=1,64", variant="pinned-h2d")]
    assert counts == [16, 128]
    asked = points("concurrency=1,8", variant="pinned-h2d", workload={"num_requests": 8})
    assert [each.design.workload.num_requests for each in asked] == [8, 8]
    with pytest.raises(api.BadSetting, match="concurrency=64: num_requests=8 leaves some of 64 places empty"):
        points("concurrency=1,64", variant="pinned-h2d", workload={"num_requests": 8})


def test_toggles_engine_options_and_workload_options_can_be_swept() -> None:
    found = points("h2d=pageable,packed", "stream-interval=1,8", "prefix_cache=on,off", variant="overlap")
    assert [each.design.arms[1].toggles["h2d"] for each in found] == ["pageable"] * 4 + ["packed"] * 4
    assert [each.design.arms[0].options.stream_interval for each in found[:4]] == [1, 1, 8, 8]
    assert [each.design.arms[0].options.prefix_cache for each in found[:2]] == [True, False]
    lengths = points("max_new_tokens=8,uniform:4:9", "pretok=true,false", variant="overlap")
    assert [each.design.workload.max_new_tokens for each in lengths] == [8, 8, "uniform:4:9", "uniform:4:9"]
    assert [each.design.workload.pretok for each in lengths] == [True, False] * 2
    alone = points("model=tiny-gpt2,tiny-llama", engine="overlap")
    assert [len(each.design.arms) for each in alone] == [1, 1]


# -- from disk --------------------------------------------------------------------------------------------


def test_a_point_that_goes_on_is_shown_without_a_verdict(tmp_path: Path) -> None:
    """From its second block on, and by the blocks that follow one another: on a cluster a later one may come
    first."""
    folder = stored_sweep(tmp_path / "a-sweep")
    last = sweep.read(folder).points[2]
    run = folder / "run-2"
    write_manifest(run, replace(manifest(), run=run.name, design=last.design))
    first, second, third, fourth, *_ = blocks(0.8)
    write_block(run, 0, dict(first.tables))
    write_block(run, 3, dict(fourth.tables))
    assert sweep_.result(folder)[0].stopped_because == "2 of 3 points done"
    write_block(run, 1, dict(second.tables))
    result, _ = sweep_.result(folder)
    assert result.stopped_because == "2 of 3 points done; 1 shown as far as measured, without a verdict"
    shown = result.comparisons[2]
    assert (shown.at, shown.blocks) == ({"concurrency": "32"}, 2)
    assert shown.metrics["tpot_ms_p50"].change == pytest.approx(-0.2, abs=0.01)
    assert {row.verdict for row in shown.metrics.values()} == {None}
    assert shown.warnings[0].text.startswith("not finished: 2 of 6 trials are done; ")
    assert overlap_bench.load_sweep(folder).result == result  # what the figures are drawn from
    write_block(run, 2, dict(third.tables))
    assert sweep_.result(folder)[0].comparisons[2].blocks == 4


def test_a_point_that_can_not_be_compared_is_named_and_hides_no_other(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    for number in range(6):
        requests = tables.read_table(folder / "run-1", number, "requests")
        tables.write_table(
            tables.table_path(folder / "run-1", number, "requests"),
            requests.assign(error=["gone" if arm == "after" else "" for arm in requests["arm"]]),
        )
    result, _ = sweep_.result(folder)
    assert [each.at for each in result.comparisons] == [{"concurrency": "1"}]
    assert "concurrency=8 is left out: tpot_ms_p50 has no value in trial 0 of after" in result.stopped_because


def test_where_points_have_several_primaries_each_row_says_its_own(tmp_path: Path) -> None:
    result, _ = sweep_.result(stored_sweep(tmp_path / "a-sweep"))
    assert "metric" not in sweep_tables.changes_table(result).columns
    first, second = result.comparisons
    other = msgspec.structs.replace(second, primary="ttft_ms_p50")
    mixed = msgspec.structs.replace(result, comparisons=[first, other])
    table = sweep_tables.changes_table(mixed)
    place = table.columns.index("metric")
    assert [row[place] for row in table.rows] == ["tpot_ms_p50", "ttft_ms_p50"]


def test_a_sweep_that_is_not_finished_shows_what_is(tmp_path: Path) -> None:
    result, differ = sweep_.result(stored_sweep(tmp_path / "a-sweep"))
    assert not differ
    assert result.stopped_because == "2 of 3 points done"
    assert [each.at for each in result.comparisons] == [{"concurrency": "1"}, {"concurrency": "8"}]
    assert [each.metrics["tpot_ms_p50"].verdict for each in result.comparisons] == ["faster"] * 2
    assert sweep_tables.conclusion(result) == (
        "Sweep over concurrency: 2 points on the emulated device: tpot_ms_p50 faster in 2."
    )
    said = " ".join(shown(result, 120).split())
    row = result.comparisons[1].metrics["tpot_ms_p50"]
    levels = f"{formatting.number(row.before)} → {formatting.number(row.after)}"
    for part in ("Change of tpot_ms_p50, margin ±1%", "−9.9%", levels, "with its verdict at 5%", "Levels"):
        assert part in said, part
    assert said.count("emulated device: a CPU core") == 1
    lines = list(csv.DictReader(io.StringIO(sweep_tables.to_csv(result))))
    assert {line["concurrency"] for line in lines} == {"1", "8"}
    assert [float(line["confidence"]) for line in lines if line["metric"] == "tpot_ms_p50"] == [0.95, 0.95]
    assert "| 8 |" in page.markdown_page(sweep_tables.page(result))


def test_a_point_whose_first_boots_sized_its_run_is_found_and_not_measured_again(tmp_path: Path) -> None:
    """By nothing but what those may change: another point's run is not its own."""
    folder = stored_sweep(tmp_path / "a-sweep")
    planned = sweep.read(folder)
    points = tuple(
        replace(point, design=replace(point.design, aim_s=80.0, rounds=3, segments=16))
        for point in planned.points
    )
    write_json(folder / SWEEP_FILE, replace(planned, points=points))
    found = [sweep.run_of(point, list(sweep.runs_in(folder))) for point in points]
    assert [each and each[0].name for each in found] == ["run-0", "run-1", None]
    assert sweep_.result(folder)[0].stopped_because == "2 of 3 points done"


def test_points_of_different_length_say_so(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    planned = sweep.read(folder)
    first = planned.points[0]
    workload = msgspec.structs.replace(first.design.workload, num_requests=16)
    design = msgspec.structs.replace(first.design, workload=workload)
    shorter = msgspec.structs.replace(first, design=design)
    points = (shorter, *planned.points[1:])
    write_json(folder / SWEEP_FILE, msgspec.structs.replace(planned, points=points))
    run = folder / "run-0"
    write_manifest(run, msgspec.structs.replace(read_manifest(run), design=design))
    table = sweep_tables.levels_table(sweep_.result(folder)[0])
    column = table.columns.index("requests")
    assert [row[column] for row in table.rows] == ["16", "64"]


def test_points_that_stopped_at_different_looks_say_their_confidence(tmp_path: Path) -> None:
    result, _ = sweep_.result(stored_sweep(tmp_path / "a-sweep"))
    assert "Intervals: 95%, t over trials." in sweep_tables.changes_table(result).note
    first, last = result.comparisons
    mixed = replace(result, comparisons=[replace(first, confidence=0.9975), replace(last, confidence=0.995)])
    table = sweep_tables.changes_table(mixed)
    column = table.columns.index("interval")
    assert [row[column].partition("] ")[2] for row in table.rows] == ["at 99.75%", "at 99.5%"]
    assert "Intervals: 99.5 to 99.75%, t over trials, each at the level of the look" in table.note


def test_points_of_several_devices_are_told_apart(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    plan = read_manifest(folder / "run-0")
    cuda = {arm: described("cuda") for arm in plan.descriptions}
    write_manifest(folder / "run-0", msgspec.structs.replace(plan, descriptions=cuda))
    result, _ = sweep_.result(folder)
    assert result.device == "cuda, emulated"
    assert [each.device for each in result.comparisons] == ["cuda", "emulated"]
    assert "2 points on the cuda and emulated devices:" in sweep_tables.conclusion(result)
    for table in sweep_tables.page(result).tables:
        assert [row[:2] for row in table.rows] == [("1", "cuda"), ("8", "emulated")]
        assert table.columns[:2] == ("concurrency", "device")
    assert sweep_tables.warnings_of(result)[0].startswith("points of several devices (cuda, emulated): never")
    lines = csv.DictReader(io.StringIO(sweep_tables.to_csv(result)))
    assert {(line["concurrency"], line["device"]) for line in lines} == {("1", "cuda"), ("8", "emulated")}


def test_of_two_warnings_of_one_kind_at_one_point_both_are_told(tmp_path: Path) -> None:
    result, _ = sweep_.result(stored_sweep(tmp_path / "a-sweep"))
    first, last = result.comparisons
    noise = ["noise: up to 9.0% of the CPU time was taken", "noise: processes that are not the run's used 8%"]
    stolen, others = (Told(line, "noise", weight=Severity.DESCRIBES) for line in noise)
    noisy = replace(first, warnings=[*first.warnings, stolen, others])
    one = replace(result, comparisons=[noisy, last])
    assert sweep_tables.warnings_of(one)[-2:] == [f"concurrency=1: {line}" for line in noise]
    both = [
        replace(each, warnings=[*each.warnings, warning])
        for each, warning in ((first, stolen), (last, others))
    ]
    said = sweep_tables.warnings_of(replace(result, comparisons=both))
    assert said[-1] == "noise: at 2 points, concurrency=1, concurrency=8; --format json has the numbers"


def test_a_sweep_from_python(tmp_path: Path) -> None:
    found = overlap_bench.load_sweep(stored_sweep(tmp_path / "a-sweep"))
    assert found.axes == ("concurrency",)
    row = found.changes.query("metric == 'tpot_ms_p50' and concurrency == 8").iloc[0]
    assert row["change"] == pytest.approx(-0.1, abs=0.002)
    assert found.values.groupby(["concurrency", "arm"]).size().tolist() == [6] * 4
    assert {*found.values["device"], *found.changes["device"]} == {"emulated"}
    changed = np.log(
        found.values.pivot_table(index=["concurrency", "trial"], columns="arm", values="tpot_ms_p50")
    )
    assert np.expm1((changed["after"] - changed["before"]).loc[8].mean()) == pytest.approx(row["change"])
    assert [run.folder.name for run in found.runs] == ["run-0", "run-1"]


def test_what_is_no_sweep_and_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    with pytest.raises(StoreError, match="a-sweep is a sweep: each folder in it is a run"):
        overlap_bench.load(folder)
    with pytest.raises(StoreError, match="run-0 is not a sweep folder"):
        overlap_bench.load_sweep(folder / "run-0")


def test_a_sweep_goes_on_as_it_was_asked_for(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    for more in (("--over", "concurrency=1,4"), ("--trials", "3")):
        said = bench("sweep", "--resume", str(folder), *more, code=2).err
        assert "leave the other options out" in said


def test_a_sweep_does_not_go_on_with_other_prompts_than_its_points_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each point that was begun is finished: one table would hold both."""
    folder, texts = stored_sweep(tmp_path / "a-sweep"), tmp_path / "texts.json"
    texts.write_text('["one"]')
    plan = read_manifest(folder / "run-0")
    workload = replace(plan.design.workload, prompts=str(texts))
    plan = replace(plan, design=replace(plan.design, workload=workload), files={str(texts): "another"})
    write_manifest(folder / "run-0", plan)
    monkeypatch.setattr(sweep, "check_resume", lambda stored, now: None)
    said = bench("sweep", "--resume", str(folder), "--trust", code=2).err
    assert "texts.json has changed since" in said


def test_the_floors_of_a_point_lie_beside_its_sweep(tmp_path: Path) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    assert floors_of(folder / "run-0") == tmp_path / "floors"
    assert floors_of(tmp_path / "a-run") == tmp_path / "floors"


def test_another_commit_or_other_points_are_refused(tmp_path: Path) -> None:
    stored = sweep.read(stored_sweep(tmp_path / "a-sweep"))
    sweep.check_resume(stored, stored)
    for change, message in (
        ({"code": replace(stored.code, commit="other")}, "code.commit was 'abc', is 'other'"),
        ({"points": stored.points[:2]}, "points was"),
    ):
        said = refusal(partial(sweep.check_resume, stored, replace(stored, **change)), StoreError)
        assert f"can't resume a-sweep: {message}" in said


# -- whole sweeps -----------------------------------------------------------------------------------------


def test_a_sweep_that_is_killed_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    few = (*CLOCKWORK[:-4], "--max-new-tokens", "8", "--trials", "2", "--after", "pace=fast")
    over = ("--over", "num-requests=2,4")
    bench = start(environment, tmp_path, "sweep", *few, *over)
    bench.wait_for("point 2 of 2: num_requests=4")
    said = bench.interrupt()
    (folder,) = (tmp_path / "results").iterdir()
    assert said == f"bench: interrupted; 1 of 2 points are done, go on with --resume results/{folder.name}"
    assert folder.name.split("-", 2)[2].startswith("sweep-num_requests-")
    first = next(path for path, each in sweep.runs_in(folder) if each.design.workload.num_requests == 2)
    kept = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}

    other = ("sweep", *few, "--over", "num-requests=2,6", "--resume", str(folder))
    assert "can't resume" in refused(environment, tmp_path, *other)

    _, stdout, stderr = ended(environment, tmp_path, "sweep", "--resume", str(folder), "--format", "json")
    assert "point 1 of 2" not in stderr
    result = json.loads(stdout)
    assert result["stopped_because"] == "all 2 points done"
    assert [each["outputs"]["compared"] for each in result["comparisons"]] == [8, 16]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert json.loads(done(environment, tmp_path, "sweep", str(folder), "--format", "json")) == result
