"""The gate: by hand, by simulation, in its words and files. On two refs: test_gate_refs.py."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_bench.harness.analysis import comparison, gate
from overlap_bench.harness.analysis.result import Comparison, GateResult, GateVerdict, Judged
from overlap_bench.harness.analysis.values import reason_to_stop
from overlap_bench.harness.plan.design import Design, Gate, Ref, check_gated
from overlap_bench.harness.plan.settings import make_gate
from overlap_bench.harness.report import formats, gate_tables
from overlap_bench.harness.report.gate_tables import write
from overlap_bench.harness.stats.stopping import until_clear, until_decided, until_precise
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import read_manifest, write_manifest
from overlap_bench.harness.studies import gate as study
from overlap_bench.harness.studies.gate import judge
from overlap_bench.harness.workload.workload import Workload
from tests.engine.test_plant import arm
from tests.support.in_process import bench
from tests.support.made_blocks import blocks as some_blocks
from tests.support.made_blocks import manifest
from tests.support.made_runs import stored
from tests.support.refusals import refusal

LIMIT = 0.02


def judged(
    *changes: float, name: str = "tpot_ms_p50", level: float = 0.05, limit: float = LIMIT, **more: Any
) -> Judged:
    values = {name: {"before": [5.0] * len(changes), "after": [5.0 * (1 + each) for each in changes]}}
    return gate.judge(values, [name], limit, level, **more)[name]


# -- one metric -------------------------------------------------------------------------------------------


def test_the_bounds_by_hand() -> None:
    # log ratios log(1.01), log(1.03): mean 0.019755, sd 0.013864, t(.95; 1) = 6.313752
    found = judged(0.01, 0.03)
    half = 6.313752 * 0.013866 / math.sqrt(2)
    assert found.best == pytest.approx(math.exp(0.019755 - half) - 1, rel=1e-3)
    assert found.worst == pytest.approx(math.exp(0.019755 + half) - 1, rel=1e-3)
    assert found.verdict == "undecided"
    one = judged(0.05)
    assert one.change == pytest.approx(0.05)
    assert (one.best, one.worst, one.p, one.excludable) == (None, None, None, None)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ((0.001, -0.001, 0.0, 0.001), "pass"),
        ((0.009, 0.011, 0.010, 0.010), "pass"),  # slower for sure, and harmless
        ((-0.20, -0.21, -0.19, -0.20), "pass"),
        ((0.05, 0.051, 0.049, 0.05), "fail"),
        ((0.05, 0.0, 0.04, -0.01), "undecided"),
        ((0.05,), "undecided"),  # one block: numbers, no verdict
    ],
)
def test_a_time_that_rises_is_a_regression(changes: tuple[float, ...], verdict: str) -> None:
    assert judged(*changes).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [((-0.05, -0.051, -0.049), "fail"), ((0.05, 0.051, 0.049), "pass"), ((-0.01, -0.011, -0.01), "pass")],
)
def test_a_rate_that_falls_is_a_regression(changes: tuple[float, ...], verdict: str) -> None:
    found = judged(*changes, name="throughput_tok_s")
    assert found.verdict == verdict
    assert found.best <= -found.change + 1e-9 <= found.worst + 2e-9


def test_what_could_be_ruled_out_is_ruled_out_in_four_of_five_runs_without_a_change() -> None:
    random = np.random.default_rng(3)
    runs = [judged(*random.normal(0, 0.01, 8)) for _ in range(400)]
    typical = float(np.median([each.excludable for each in runs]))
    assert np.mean([(each.worst or 0) <= typical for each in runs]) == pytest.approx(0.8, abs=0.06)


def test_what_falls_to_nothing_in_some_trials_fails_once_that_is_no_chance() -> None:
    def gone(*after: float) -> Judged:
        values = {"goodput_req_s": {"before": [20.0] * len(after), "after": list(after)}}
        return gate.judge(values, ["goodput_req_s"], LIMIT, 0.05)["goodput_req_s"]

    found = gone(0, 0.5, 0, 0.2, 0)
    assert (found.verdict, found.remark) == ("fail", "0 in some trials of after")
    assert found.p == pytest.approx(0.5**5)
    assert found.change == pytest.approx(0.14 / 20 - 1)
    assert gone(0, 20, 20, 20, 20).verdict == "undecided"
    assert gone(0, 0, 0, 0, 0).remark == "0 in every trial of after"


def test_the_limit_that_would_have_failed_is_none_of_the_offered_load() -> None:
    names = ("tpot_ms_p50", "throughput_tok_s")
    values = {names[0]: {"before": [5.0] * 4, "after": [5.01, 4.99, 5.0, 5.02]}}
    values[names[1]] = {"before": [100.0] * 4, "after": [98.9, 99.0, 99.1, 99.0]}
    judged = gate.judge(values, names, LIMIT, 0.05, offered=names[1:])
    assert judged[names[1]].fails_to is not None
    assert gate.result_of(judged, LIMIT, 0.05, no_change(), True, "pass").fails_to is None


def test_a_gate_does_not_end_early_on_a_pass_while_more_requests_fail_in_after() -> None:
    until = until_clear()
    plan = manifest(6, gate=Gate(max_regression=LIMIT, levels=until.levels), until=until).design
    name = plan.arms[0].name, plan.arms[1].name
    served = [{each: {plan.primary: 5.0 + number / 1000, "failed_requests": 0.0} for each in name}
              for number in range(3)]  # fmt: skip
    assert "the gate says pass" in (reason_to_stop(plan, served) or "")
    requests = plan.rounds * plan.workload.num_requests

    def failing(share: float) -> list[dict[str, dict[str, float]]]:
        lost = {"failed_requests": share * requests}
        return [{**each, name[1]: {**each[name[1]], **lost}} for each in served]

    assert reason_to_stop(plan, failing(2 * LIMIT)) is None
    assert reason_to_stop(plan, failing(LIMIT / 2)) is not None  # no more than a gate lets pass


def test_the_offered_load_is_no_pass() -> None:
    found = judged(0.0, 0.0, 0.0, name="throughput_tok_s", offered=("throughput_tok_s",))
    assert (found.verdict, found.remark) == ("undecided", "is the offered load, whatever the engine does")


# -- several metrics --------------------------------------------------------------------------------------


def verdicts(*each: GateVerdict) -> dict[str, Judged]:
    plain = judged(0.0, 0.01)
    return {str(index): msgspec.structs.replace(plain, verdict=verdict) for index, verdict in enumerate(each)}


def test_all_must_pass_and_one_fails() -> None:
    assert gate.overall(verdicts("pass", "pass")) == "pass"
    assert gate.overall(verdicts("pass", "undecided")) == "undecided"
    assert gate.overall(verdicts("pass", "undecided", "fail")) == "fail"


def test_fails_are_corrected_for_their_number() -> None:
    slower = [5.0 * (1 + each) for each in (0.045, 0.026, 0.05, 0.025)]
    steady = [5.0, 5.2, 4.9, 5.1]
    alone = {"tpot_ms_p50": {"before": [5.0] * 4, "after": slower}}
    others = {
        name: {"before": [5.0] * 4, "after": steady} for name in ("ttft_ms_p50", "latency_ms_p50", "step_ms")
    }
    assert gate.judge(alone, list(alone), LIMIT, 0.05)["tpot_ms_p50"].verdict == "fail"
    many = {**alone, **others}
    assert gate.judge(many, list(many), LIMIT, 0.05)["tpot_ms_p50"].verdict == "undecided"


@pytest.mark.parametrize(
    ("names", "limit", "reason"),
    [
        (("submit_lag_ms_p99",), 0.02, "has no regression in percent"),
        (("peak_concurrency",), 0.02, "has no regression in percent"),
        (("tpot_p50",), 0.02, "did you mean tpot_ms_p50?"),
        (("tpot_ms_p50",) * 2, 0.02, "up to 5 different metrics"),
        (("tpot_ms_p50",), 0.0, "--max-regression must be above 0% and below 100%"),
    ],
)
def test_what_cannot_be_gated_is_refused(names: tuple[str, ...], limit: float, reason: str) -> None:
    assert reason in refusal(lambda: check_gated(names, limit))


# -- levels and rates -------------------------------------------------------------------------------------


def planned(**changes: Any) -> Design:
    return Design(name="x", arms=(arm("before"), arm("after")), workload=Workload(), **changes)


def test_the_levels_of_planned_and_of_unplanned_gates() -> None:
    until = until_decided(20)
    assert planned().one_sided(6) == 0.05
    assert planned(blocks=20, until=until).one_sided(8) == until.levels[1] / 2
    assert planned(blocks=9, until=until_precise(0.01, 9)).one_sided(7) == 0.03
    assert make_gate(0.02, None) == Gate(max_regression=0.02, levels=(0.05,))
    sequential = planned(blocks=20, until=until, gate=make_gate(0.02, until))
    assert sequential.one_sided(8) > until.levels[1] / 2  # all of the 5% is on one side


def rates(shift: float, runs: int = 800, blocks: int = 8, sd: float = 0.01) -> dict[str, float]:
    random = np.random.default_rng(12)
    found = [judged(*np.expm1(random.normal(shift, sd, blocks))).verdict for _ in range(runs)]
    return {each: found.count(each) / runs for each in ("pass", "fail", "undecided")}


def test_a_change_at_the_limit_is_judged_wrongly_in_five_percent_on_either_side() -> None:
    found = rates(math.log1p(LIMIT))
    assert found["pass"] == pytest.approx(0.05, abs=0.023)
    assert found["fail"] == pytest.approx(0.05, abs=0.023)


# -- words and files --------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, factor: float, count: int = 6, **design: Any) -> Path:
    """A finished run on disk, whose after arm's TPOT is `factor` times the before arm's."""
    return Path(stored(tmp_path / "results", "a-run", factor, manifest(6, **design), count))


@pytest.mark.parametrize(
    ("factor", "verdict", "words"),
    [
        (1.0, "pass", "Gate: PASS. pinned-h2d: no metric regressed by more than 2%"),
        (1.1, "fail", "Gate: FAIL. pinned-h2d: tpot_ms_p50 regressed by more than 2%"),
        (
            1.0201,
            "undecided",
            "tpot_ms_p50 changed by +2.0% over 6 trials on the emulated device, at the limit",
        ),
    ],
)
def test_a_finished_run_is_judged(tmp_path: Path, factor: float, verdict: str, words: str) -> None:
    gated = judge(folder_of(tmp_path, factor), (), None)
    assert gated.gate.verdict == verdict
    text = gate_tables.to_markdown(gated)
    assert words in text
    assert "| tpot_ms_p50 |" in text
    plain = json.loads(formats.to_json(gated))
    assert plain["gate"]["verdict"] == plain["verdict"] == verdict
    assert [*plain][:3] == ["schema_version", "headline", "verdict"]
    assert plain["headline"] == gate_tables.conclusion(gated)


def test_outputs_that_differ_fail_the_gate_in_all_that_is_written(tmp_path: Path) -> None:
    differing = some_blocks(1.0, 6, digest="other")
    gated = judge(Path(stored(tmp_path, "a-run", measured=differing)), (), None)
    assert gated.gate.verdict == "fail"
    assert gated.gate.metrics["tpot_ms_p50"].verdict == "pass"
    assert gate_tables.conclusion(gated).startswith(
        "Gate: FAIL. pinned-h2d: OUTPUTS DIFFER in 72 of 72 requests; no metric regressed by more than 2%"
    )
    write(tmp_path, gated, {})
    (row,) = json.loads((tmp_path / "smaller-is-better.json").read_text())
    assert row["extra"].endswith("pass (at most 2%); OUTPUTS DIFFER in 72 of 72 requests: fail")


def failing(folder: Path, arm: str, by_block: Sequence[int]) -> None:
    """As if the first so many requests of each block had failed in that arm."""
    for number, count in enumerate(by_block):
        asked = tables.read_table(folder, number, "requests")
        asked.loc[(asked["arm"] == arm) & (asked["request"] < count), "error"] = "timed out"
        tables.write_table(tables.table_path(folder, number, "requests"), asked)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0] * 6, [6] * 6, "fail"),
        ([1] * 6, [2] * 6, "fail"),
        ([0] * 6, [1, 2, 1, 0, 1, 2], "fail"),
        ([0] * 6, [1, 0, 0, 0, 0, 0], "undecided"),
        ([1, 0, 2, 1, 0, 0], [0, 2, 1, 0, 0, 2], "undecided"),
        ([3, 2, 0, 0, 0, 0], [0, 0, 0, 3, 2, 0], "undecided"),
        ([0] * 6, [0] * 6, "pass"),
        ([2] * 6, [2] * 6, "pass"),
        ([2] * 6, [1] * 6, "pass"),
    ],
)
def test_a_head_that_fails_more_of_its_requests_does_not_pass_and_beyond_chance_fails(
    tmp_path: Path, before: list[int], after: list[int], verdict: str
) -> None:
    folder = folder_of(tmp_path, 1.0)
    failing(folder, "before", before)
    failing(folder, "after", after)
    gated = judge(folder, (), None)
    assert gated.gate.verdict == verdict
    said = f"{sum(after)} of 72 requests failed in after, {sum(before)} of 72 in before"
    assert gated.gate.faults == ([said] if verdict == "fail" else [])
    doubt = f"{said}: too few trials to tell it from chance"
    assert gated.gate.doubts == ([doubt] if verdict == "undecided" else [])
    told = {"fail": said, "undecided": doubt, "pass": "nothing"}[verdict]
    assert (f"{told}; no metric regressed" in gate_tables.to_markdown(gated)) == (verdict != "pass")
    assert gated.comparisons[0].outputs.identical == gated.comparisons[0].outputs.compared


def test_a_doubt_about_turns_takes_no_fail_back_that_rounds_made() -> None:
    level, rising = [1.0, 1.01] * 3, [2.0, 2.01] * 3
    found = gate._judge("ttft_ms_p50", level, level, LIMIT, 0.05, 2, 0.9, offered=False)
    sure = gate._judge("ttft_ms_p50", level, rising, LIMIT, 0.05, 2, 1e-6, offered=False)
    (only,) = comparison.result(manifest(), some_blocks(1.0)).comparisons
    judged = {"decode_step_ms": found, "ttft_ms_p50": sure}

    def said(believed: dict[str, Any]) -> str:
        why = "turns differ"
        return gate.result_of(judged, LIMIT, 0.05, only, True, "pass", why, believed=believed).verdict

    assert said({}) == "undecided"
    assert said({"ttft_ms_p50": sure}) == "fail"
    assert said({"ttft_ms_p50": found}) == "undecided"


def test_few_blocks_do_not_tell_whether_more_requests_fail() -> None:
    for blocks in (1, 2, 4):
        assert gate.more_failed([0.0] * blocks, [0.5] * blocks, LIMIT, 0.05) == "undecided"
        assert gate.more_failed([0.5] * blocks, [0.5] * blocks, LIMIT, 0.05) == "pass"
        rounded = [0.3 - 0.2, 0.1, 0.4 - 0.3, 0.1][:blocks]  # equal, but for the last bit
        assert gate.more_failed([0.0] * blocks, rounded, LIMIT, 0.05) == "undecided"
        assert gate.more_failed([0.0] * blocks, [LIMIT / 2] * blocks, LIMIT, 0.05) == "pass"


@pytest.mark.parametrize("requests", [64, 160])
def test_what_fails_at_random_fails_a_gate_in_few_runs_and_what_began_to_fail_passes_in_few(
    requests: int,
) -> None:
    random, runs = np.random.default_rng(1), 1000

    def share(verdict: str, before: float, after: float) -> float:
        drawn = (random.binomial(requests, rate, (runs, 6)) / requests for rate in (before, after))
        found = [gate.more_failed(*pair, LIMIT, 0.05) for pair in zip(*drawn, strict=True)]
        return found.count(verdict) / runs

    for rate in (0.001, 0.005, 0.02):
        assert share("fail", rate, rate) < 0.07
    assert share("pass", 0.001, 0.001) > 0.9
    assert share("pass", 0, 0.02) < 0.05
    assert share("fail", 0, 0.05) > 0.95


def test_the_files_of_a_gate(tmp_path: Path) -> None:
    folder, step = folder_of(tmp_path, 1.0), tmp_path / "step.md"
    step.write_text("before\n")
    names = ("tpot_ms_p50", "ttft_ms_p50", "throughput_tok_s")
    write(tmp_path, judge(folder, names, 0.05), {"GITHUB_STEP_SUMMARY": str(step)})
    assert step.read_text() == "before\n" + (tmp_path / "gate.md").read_text()
    smaller = json.loads((tmp_path / "smaller-is-better.json").read_text())
    assert [each["name"].split()[-1] for each in smaller] == ["tpot_ms_p50", "ttft_ms_p50"]
    for each in smaller:
        assert set(each) == {"name", "unit", "value", "range", "extra"}
        assert isinstance(each["value"], float)
    (bigger,) = json.loads((tmp_path / "bigger-is-better.json").read_text())
    assert bigger["unit"] == "tok/s"
    write(tmp_path, judge(folder, names[:1], 0.05), {})
    assert not (tmp_path / "bigger-is-better.json").exists()  # or it would be taken for this gate's


def test_a_gate_as_csv_has_its_verdicts_bounds_and_limit(tmp_path: Path) -> None:
    folder, asked = str(folder_of(tmp_path, 1.1)), ("--metric", "tpot_ms_p50", "--metric", "ttft_ms_p50")
    arguments = ("gate", folder, *asked, "--out", str(tmp_path), "--format", "csv")
    tpot, ttft = csv.DictReader(io.StringIO(bench(*arguments, code=1).out))
    assert (tpot["metric"], tpot["verdict"], tpot["gate"]) == ("tpot_ms_p50", "fail", "fail")
    assert (ttft["metric"], ttft["verdict"], ttft["gate"]) == ("ttft_ms_p50", "pass", "fail")
    assert LIMIT < float(tpot["best"]) < float(tpot["change"]) < float(tpot["worst"])
    assert (tpot["max_regression"], tpot["confidence"], tpot["unit"]) == ("0.02", "0.95", "ms")


def test_a_gate_is_added_to_its_history_once(tmp_path: Path) -> None:
    folder, gates = folder_of(tmp_path, 1.0), tmp_path / "gates.jsonl"
    plan = read_manifest(folder)
    arms = tuple(
        msgspec.structs.replace(arm, ref=Ref(repository="r", name=arm.name, commit=40 * arm.name[0]))
        for arm in plan.design.arms
    )
    write_manifest(
        folder, msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
    )
    asked = ("gate", str(folder), "--history", str(gates), "--out", str(tmp_path))
    for _ in range(2):
        bench(*asked)
    (line,) = gates.read_text().splitlines()
    assert json.loads(line)["base"] == 40 * "b"
    assert "1 gate against bbbbbbbbbb: fewer than" in (tmp_path / "gate.md").read_text()


@cache
def no_change() -> Comparison:
    """The comparison of a run in which nothing changed."""
    return comparison.result(manifest(), some_blocks(1.0)).comparisons[0]


def open_gate(*changes: float, seconds: float | None = None, limit: float = LIMIT) -> GateResult:
    """What a gate says of these changes of TPOT."""
    rows = {"tpot_ms_p50": judged(*changes, limit=limit)}
    return gate.result_of(rows, limit, 0.05, no_change(), True, "pass", seconds=seconds)


@pytest.mark.parametrize(
    "changes",
    [(0.018, 0.013, 0.023, 0.020, 0.016, 0.018), (0.04, 0.01, 0.07, 0.02, 0.05, 0.03)],
)
def test_the_limits_that_an_undecided_gate_names_would_have_decided_it(
    changes: Sequence[float],
) -> None:
    found = open_gate(*changes)
    said = gate_tables._limits(found)
    passed, failed = (float(each) / 100 for each in re.findall(r"([\d.]+)%", said))
    assert found.verdict == "undecided"
    assert failed < LIMIT < passed
    assert open_gate(*changes, limit=passed).verdict == "pass"
    assert open_gate(*changes, limit=failed).verdict == "fail"
    assert open_gate(*changes, limit=passed - 0.0002).verdict == "undecided"
    assert open_gate(*changes, limit=failed + 0.0002).verdict == "undecided"


def test_of_several_metrics_the_limit_that_fails_is_the_one_that_holm_leaves() -> None:
    worse = [5.0 * (1 + each) for each in (0.045, 0.026, 0.05, 0.025)]
    names = ("tpot_ms_p50", "ttft_ms_p50", "latency_ms_p50", "step_ms")
    values = {
        name: {"before": [5.0] * 4, "after": worse if name == "step_ms" else [5.01] * 4} for name in names
    }

    def at(limit: float) -> GateResult:
        return gate.result_of(gate.judge(values, names, limit, 0.05), limit, 0.05, no_change(), True, "pass")

    found = at(LIMIT)
    assert found.verdict == "undecided"
    assert at(found.fails_to * 0.999).verdict == "fail"
    assert at(found.fails_to * 1.001).verdict == "undecided"
    assert at(found.passes_from * 1.001).verdict == "pass"


AT = (0.018, 0.013, 0.023, 0.020, 0.016, 0.018)


@pytest.mark.parametrize(
    ("changes", "seconds", "said"),
    [
        ((0.0199, 0.0211, 0.0192, 0.0205, 0.0188, 0.0202), 12.0, "*at the limit of 2%: *; {hardly}"),
        (AT, 12.0, "*at the limit of 2%: *; a fresh gate with --trials 39, about 7.8 min, {tells}"),
        (AT, 300.0, "*at the limit of 2%: *; {hardly}: 39 take 3.2 h"),
        (
            (0.02, 0.03, -0.03, 0.02, -0.02, 0.01),
            None,
            "*may be above or below the limit of 2%: *, none failed; a fresh gate with --trials * {tells}",
        ),
        ((0.05,), 12.0, "*can't be judged * (one trial): that takes more trials, 6 as a rule"),
    ],
)
def test_an_undecided_gate_says_whether_more_blocks_would_tell_and_how_many(
    changes: Sequence[float], seconds: float | None, said: str
) -> None:
    found = open_gate(*changes, seconds=seconds)
    told = said.format(hardly="more trials would hardly tell", tells="would tell in 4 of 5 cases")
    assert fnmatch("; ".join(gate_tables._undecided(found, "over 6 trials")), told)


@pytest.mark.parametrize(
    ("planned", "names", "limit", "said"),
    [
        (0.05, (), None, ""),
        (0.05, ("tpot_ms_p50",), 0.05, ""),
        (0.05, (), 0.02, "The run was measured for a limit of 5%, and is judged by a limit of 2%; w"),
        (None, (), 0.04, "The run was measured without a gate, and is judged by a limit of 4%; w"),
        (
            None,
            ("ttft_ms_p50",),
            None,
            "The run was measured for tpot_ms_p50, and is judged by ttft_ms_p50; w",
        ),
    ],
)
def test_what_a_finished_run_was_not_measured_for_is_told_in_all_that_is_written(
    tmp_path: Path, planned: float | None, names: Sequence[str], limit: float | None, said: str
) -> None:
    declared = {} if planned is None else {"gate": Gate(max_regression=planned, levels=(0.05,))}
    gated = judge(folder_of(tmp_path, 1.0, **declared), names, limit)
    text = gate_tables.to_markdown(gated)
    assert said in text
    assert ("Gate: PASS by another limit or metric than it was measured for." in text) == bool(said)
    assert ("Gate: PASS. " in text) == (not said)
    assert gate_tables.page(gated, whole=False).lines == gate_tables.page(gated).lines
    assert said[4:-3] in "; ".join(gated.gate.unplanned)


def test_a_run_that_stopped_for_another_limit_says_so() -> None:
    until = until_clear()
    design = planned(blocks=6, until=until, gate=make_gate(0.05, until))
    assert gate.unplanned(design, ("tpot_ms_p50",), 0.05) == []
    assert gate.unplanned(design, ("tpot_ms_p50",), 0.02)[1:] == [
        "it ended when its stopping rule had enough for the former",
        gate.CHOSEN_LATE,
    ]


@pytest.mark.parametrize(
    ("count", "design", "reason"),
    [
        (3, {}, "is not finished: 3 of 6 trials, and a verdict now would be peeking; go on with bench run"),
        (6, {"arms": 1}, "has one arm"),
    ],
)
def test_a_run_that_cannot_be_judged(tmp_path: Path, count: int, design: dict[str, Any], reason: str) -> None:
    folder = folder_of(tmp_path, 1.0, count, **design)
    assert reason in refusal(lambda: judge(folder, (), None))


def test_nodes_are_asked_about_the_trials_that_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disturbed one, far off, would hide that they disagree in the others."""
    asked: list[tuple[int, int]] = []

    def disagreement(design: Any, per_block: Any, nodes: Any, names: Any) -> str:
        asked.append((len(per_block), len(nodes)))
        return "nodes disagree about tpot_ms_p50 (p = 0.005)"

    monkeypatch.setattr(study, "counted", lambda design, per_block, names: [0, 1, 3, 4, 5])
    monkeypatch.setattr(study.nodes, "disagreement", disagreement)
    found = judge(Path(stored(tmp_path, "run")), ["tpot_ms_p50"], 0.05)
    assert asked == [(5, 5)]
    assert found.gate.verdict == "undecided"
