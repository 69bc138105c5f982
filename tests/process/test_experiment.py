"""Experiments measured, stored, reread and laid beside what their sources say."""

import csv
import io
import json
import shutil
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import overlap_bench
from overlap_bench.harness.analysis import comparison, experiment_result
from overlap_bench.harness.analysis.experiment_result import (
    Cell,
    Change,
    ClaimResult,
    Delta,
    ExperimentResult,
    Finished,
    Level,
    Measured,
    NotMeasured,
    Percentiles,
    Share,
    TableResult,
    _claim,
    cell,
)
from overlap_bench.harness.analysis.values import block_values
from overlap_bench.harness.plan.design import orders
from overlap_bench.harness.plan.experiment_file import Claim, Column, Experiment, Plan, Row
from overlap_bench.harness.report import experiment_tables
from overlap_bench.harness.stats import planning
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.store.tables import Block
from tests.process.test_trust import what_reading_touches
from tests.support import keep
from tests.support.bench_command import only_run, start
from tests.support.in_process import done, ended
from tests.support.made_blocks import block, blocks, manifest, side

OWN = """
title = "Two paces of a clock"
question = "Is the fast one faster?"
follow_up = ["look at the clock"]

[[sources]]
name = "the clockmaker"
reported = ["twice as fast"]

[boots.clocks]
trials = 4
rounds = 2

[boots.clocks.arms]
slow = { engine = "clockwork", toggles = { pace = "slow" } }
fast = { engine = "clockwork", toggles = { pace = "fast" } }

[boots.clocks.arms.other]
engine = "clockwork"
toggles = { pace = "fast", service = "all", tokens = "TOKENS" }
options = { seed = 1 }

[boots.clocks.workloads]
few = { pretok = false, arrival = "closed", concurrency = 2, num_requests = 4, max_new_tokens = 8 }
many = { pretok = false, arrival = "closed", concurrency = 4, num_requests = 8, max_new_tokens = 8 }

[[claims]]
says = "TPOT halves"
boots = "clocks"
workload = "few"
before = "slow"
arm = "fast"
change = "tpot_ms_p50"
reported = -0.5

[[tables]]
title = "Paces"
boots = "clocks"
rows = [{ label = "slow", arm = "slow" }, { label = "fast", arm = "fast", before = "slow" }]
columns = [
    { title = "in flight", option = "concurrency" },
    { title = "TPOT", value = "tpot_ms_p50" },
    { title = "change", change = "tpot_ms_p50" },
    { title = "equal", outputs = true },
]
"""


def write(folder: Path, tokens: str = "counted") -> str:
    path = folder / "clocks.toml"
    path.write_text(OWN.replace("TOKENS", tokens))
    return str(path)


def test_an_interrupted_experiment_goes_on_and_is_reread_as_it_was_printed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    bench = start(environment, tmp_path, "experiment", "run", write(tmp_path))
    bench.wait_for("trial 1 of 4 done")
    said = bench.interrupt()
    folder = only_run(tmp_path)
    assert f"go on with bench experiment run --resume {folder.relative_to(tmp_path)}" in said

    stderr = ended(environment, tmp_path, "experiment", "show", str(folder), code=2).err
    assert "is not finished" in stderr or "lacks trial" in stderr

    resume = ("experiment", "run", "--resume", str(folder), "--format", "json")
    _, stdout, stderr = ended(environment, tmp_path, *resume)
    assert "trial 1 of 4" not in stderr
    result = json.loads(stdout)
    assert {(each["workload"], each["trials"]) for each in result["runs"]} == {("few", 4), ("many", 4)}
    assert any("interrupted and resumed" in each for each in map(str, result["warnings"])), result["warnings"]
    requests = 2 * 4 * 2 * 12  # arms but the first, blocks, rounds, requests
    weak = {"weak": "those of each workload are few texts"}
    assert result["outputs"] == {"compared": requests, "identical": requests, "near_ties": None, **weak}
    assert "The source says: TPOT halves" in result["conclusion"]
    (table,) = result["tables"]
    assert [row[:3] for row in table["rows"]] == [
        ["few", "slow", "2"],
        ["few", "fast", "2"],
        ["many", "slow", "4"],
        ["many", "fast", "4"],
    ]

    show = ("experiment", "show", str(folder), "--format", "json")
    assert json.loads(done(environment, tmp_path, *show)) == result
    assert not bench.left()
    reading = "experiment show experiment"
    assert what_reading_touches(environment, tmp_path, {"experiment": folder}, reading) == ""
    kept = tmp_path / folder.name
    shutil.copytree(folder, kept)
    keep.keep_experiment(kept)
    assert not [*kept.rglob("blocks")]
    assert json.loads(done(environment, tmp_path, "experiment", "show", str(kept), *show[3:])) == result

    run = folder / "clocks-few"  # an ordinary run, of the same boots as the other
    design = read_manifest(run).design
    assert [arm.name for arm in design.arms] == ["slow", "fast", "other"]
    drawn = [orders(f"{folder.name}/clocks", number, 3) for number in range(4)]
    assert [read_manifest(folder / f"clocks-{each}").orders for each in ("few", "many")] == [drawn, drawn]
    loaded = overlap_bench.load(run)
    assert set(loaded.requests["round"]) == {0, 1}
    compared = overlap_bench.compare(f"{run}:slow", f"{run}:fast").comparisons[0]
    change = compared.metrics["tpot_ms_p50"].change
    assert change == pytest.approx(table["rows"][1][4]["value"])
    assert compared.outputs.compared == 32
    rounds = [overlap_bench.load(folder / f"clocks-{name}").rounds for name in ("few", "many")]
    spans = [(each["started_ns"].min(), each["ended_ns"].max()) for each in rounds]
    assert spans[0][0] < spans[1][1]
    assert spans[1][0] < spans[0][1]  # in turn, not one after the other


def test_outputs_that_differ_fail_the_experiment(environment: dict[str, str], tmp_path: Path) -> None:
    few = ("--rounds", "1")
    stdout = ended(environment, tmp_path, "experiment", "run", write(tmp_path, "shifted"), *few, code=1).out
    assert "Outputs: 48 of 96 identical." in stdout
    assert "clocks: 4 trials of 1 round, asked for in place of the experiment's 4 of 2" in stdout


# -- cells and claims from stored blocks ------------------------------------------------------------------


def finished(measured: list[Block]) -> Finished:
    plan = manifest(len(measured))
    return Finished(plan, measured, [block_values(plan.design, each) for each in measured])


@cache
def faster() -> Finished:
    """The after arm takes 0.9 of the before arm's time. Read by many, changed by none."""
    return finished(blocks(0.9))


def claimed(reported: float | None) -> ClaimResult:
    claim = Claim(
        says="so", boots="b", workload="w", before="before", arm="after", change="tpot_ms_p50",
        reported=reported,
    )  # fmt: skip
    return _claim(claim, faster())


def number(found: Cell) -> Level | Share | Change | Delta:
    assert isinstance(found, Measured)
    return found


@pytest.mark.parametrize(
    ("reported", "finding"),
    [
        (-0.1, "the interval holds it"),
        (-0.3, "less here"),
        (-0.02, "more here"),
        (0.1, "the other way here"),
        (None, ""),
    ],
)
def test_how_a_reported_number_lies_to_what_was_measured(reported: float | None, finding: str) -> None:
    found = claimed(reported)
    assert number(found.measured).value == pytest.approx(-0.1, abs=0.002)
    assert found.finding == finding


def found_by(
    claims: list[dict[str, str]],
    measured: dict[str, list[Block]],
    elsewhere: dict[str, list[Block]] | None = None,
) -> ExperimentResult:
    """The result of such an experiment, with those blocks by workload, and with those of boots c; a claim is
    one of tpot_ms_p50 on workload w of boots b where it does not say otherwise."""
    usual = {"says": "", "boots": "b", "workload": "w", "before": "before", "arm": "after"}
    experiment = msgspec.convert(
        {
            "name": "e", "title": "", "question": "", "sources": [], "tables": [],
            "boots": {"b": {"arms": {}, "workloads": {name: {} for name in measured}}},
            "claims": [
                {**usual, **({} if "share" in claim else {"change": "tpot_ms_p50"}), **claim}
                for claim in claims
            ],
        },
        type=Experiment,
    )  # fmt: skip
    runs = {
        (boots, name): finished(found)
        for boots, by_workload in (("b", measured), ("c", elsewhere or {}))
        for name, found in by_workload.items()
    }
    return experiment_result.result(Plan(experiment=experiment, kind="emulated"), "a-run", runs)


def warned(result: ExperimentResult) -> list[str]:
    return [each.text for each in result.warnings]


def test_a_position_effect_is_told_of_every_claim() -> None:
    weak = [
        block(number, {"before": side(4), "after": side(3.6 if number % 2 else 3.8)}) for number in range(6)
    ]
    found = found_by([{"workload": "w"}, {"workload": "v"}], {"w": blocks(0.9), "v": weak})
    (line,) = [line for line in warned(found) if "position effect" in line]
    assert line.startswith("v: tpot_ms_p50, before → after: position effect: running second makes an arm")
    assert "margin" not in line  # it means nothing to what has no verdict


def test_a_share_of_few_blocks_is_said_to_be_one() -> None:
    share = {"before": "", "share": "phase_output_us", "of": "round_step_ms_mean"}
    few = "too few trials: 4; the interval is wide; --trials 6 gives a narrower one"
    assert few in warned(found_by([share], {"w": blocks(0.9, 4)}))
    assert few not in warned(found_by([share], {"w": blocks(0.9, 6)}))
    assert few in warned(found_by([{}], {"w": blocks(0.9, 4)}))


def test_a_high_percentile_of_few_requests_is_said_to_be_one() -> None:
    found = warned(found_by([{}, {"change": "ttft_ms_p99"}], {"w": blocks(0.9)}))
    said = "ttft_ms_p99 has 12 requests of an arm in a trial, too few for a p99, which wants 368; single slow"
    assert said in "".join(found)
    plain = found_by([{}, {"change": "ttft_ms_p50"}, {"change": "itl_token_ms_p99"}], {"w": blocks(0.9)})
    assert not [line for line in warned(plain) if "single slow ones" in line]


def test_what_could_have_been_detected_stands_beside_the_first_claim() -> None:
    plan = manifest()
    found = found_by([{"says": "first"}, {"says": "second"}], {"w": blocks(0.9)})
    first, second = found.claims
    compared = comparison.result(plan, blocks(0.9)).comparisons[0].metrics["tpot_ms_p50"]
    assert first.detectable == pytest.approx(np.expm1(planning.smallest_detectable(compared.sd, 6)))
    assert second.detectable is None
    shown = [row[3] for row in experiment_tables.claims(found).rows]
    assert shown == [
        f"a true change of {100 * first.detectable:.2g}% would be seen in 4 of 5 such runs",
        "",
    ]


def of(column: Column, **row: str) -> Cell:
    return cell(faster(), Row(label="", **row), column)


def test_cells_from_stored_blocks() -> None:
    change = number(of(Column(title="", change="tpot_ms_p50"), before="before", arm="after"))
    assert (type(change), change.unit) == (Change, "")  # a ratio, whatever the levels are in
    assert change.low < change.value < change.high < 0
    share = of(Column(title="", share="phase_output_us", of="round_step_ms_mean", arm="before"))
    assert number(share).value == pytest.approx(1 / 4000, rel=0.01)  # 1 us of a step of 4 ms
    copies = of(Column(title="", value="copies", arm="before"))
    assert number(copies).value == pytest.approx(7)
    several = of(Column(title="", percentiles=["p50", "p95"], arm="before"), metric="tpot_ms")
    assert several.value == pytest.approx([4, 4], rel=0.01)
    wall = of(Column(title="", percentiles=["p50", "p95"], arm="before"), metric="submit_wall_s")
    assert wall.value == pytest.approx([0.220001], rel=1e-6)  # 11 intervals of 20 ms, and 1 us of sending
    assert of(Column(title="", change="metric"), metric="tpot_ms", before="before", arm="after") == change
    assert of(Column(title="", outputs=True), before="before", arm="after") == "72 of 72"
    assert of(Column(title="", outputs=True), arm="before") == "–"
    assert of(Column(title="", change="tpot_ms_p50"), arm="before") == NotMeasured()
    matched = Column(title="", value="round_step_ms", arm="before")  # to the batches of every other arm
    assert of(matched) == NotMeasured()
    assert of(Column(title="", reported=True), reported="4 ms") == "4 ms"
    assert of(Column(title="", option="num_requests")) == "64"


@pytest.mark.parametrize("metric", ["tpot_ms_p50", "throughput_tok_s", "copies", "exposed_host_us"])
def test_a_change_is_that_of_the_levels_beside_it(metric: str) -> None:
    run = finished(blocks(0.9, noise=0.3))

    def shown(column: Column, **row: str) -> Cell:
        return cell(run, Row(label="", **row), column)

    before, after = (number(shown(Column(title="", value=metric), arm=arm)) for arm in ("before", "after"))
    change = number(shown(Column(title="", change=metric), before="before", arm="after"))
    if isinstance(change, Change):
        assert after.value / before.value - 1 == pytest.approx(change.value)
    else:
        assert after.value - before.value == pytest.approx(change.value)
    levels = shown(Column(title="", percentiles=["p50"]), metric=metric, arm="after")
    assert levels.value == [pytest.approx(after.value)]
    assert after.low * (1 - 1e-9) <= after.value <= after.high * (1 + 1e-9)


def test_csv_has_every_number_unrounded() -> None:
    cells: list[Cell] = ["row", Percentiles(value=[1 / 3, 0.5], unit="ms"), "2 of 2"]
    table = TableResult(title="t", columns=["", "a", "outputs"], rows=[cells], note="")
    found = replace(found_by([{}], {"w": blocks(0.9)}), claims=[claimed(-0.1)], tables=[table])
    lines = list(csv.reader(io.StringIO(experiment_tables.to_csv(found))))
    assert lines[0][3:] == list(experiment_tables.CSV_COLUMNS)
    assert float(lines[1][7]) == number(found.claims[0].measured).value
    assert [line[7] for line in lines[2:]] == [repr(1 / 3), "0.5"]
    assert {line[4] for line in lines[2:]} == {"row"}  # not what was found in it
