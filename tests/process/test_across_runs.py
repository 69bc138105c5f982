"""Stored runs against each other: what is compared, what is refused, and what is said of it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import across_runs
from overlap_bench.harness.analysis import stored as stored_
from overlap_bench.harness.analysis.noise_floor import with_floor
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Comparison, Outputs
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.report import formats
from overlap_bench.harness.store.files import StoreError, floors_of
from overlap_bench.harness.store.manifest import Manifest, read_manifest, write_manifest
from overlap_bench.harness.store.tables import finished_blocks, read_table, table_path, write_table
from overlap_bench.harness.workload.workload import Workload
from tests.support.bench_command import BENCH
from tests.support.in_process import bench
from tests.support.made_blocks import blocks, described, manifest, result, shown, warned
from tests.support.made_runs import stored
from tests.support.places import REFERENCE
from tests.support.processes import nobody_reads
from tests.support.refusals import refusal


def only(found: across_runs.Compared) -> Comparison:
    (comparison,) = found.result.comparisons
    return comparison


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_reader_that_leaves_changes_no_exit_code(tmp_path: Path, form: str) -> None:
    """1 would say that outputs differ, or that a gate failed."""
    run = stored(tmp_path, "a", 0.9)
    with nobody_reads() as pipe:
        ran = subprocess.run(
            [*BENCH, "compare", run, "--format", form], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (ran.returncode, ran.stderr) == (0, b"")


# -- arms of one run --------------------------------------------------------------------------------------


def test_the_arms_of_one_run_are_compared_as_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored(tmp_path, "a", 0.9)
    found = across_runs.compare([run])
    expected = result(0.9).comparisons[0]
    assert only(found) == expected
    assert only(found).metrics["tpot_ms_p50"].verdict == "faster"
    assert "not interleaved" not in "\n".join(warned(only(found)))
    monkeypatch.chdir(tmp_path)
    assert only(across_runs.compare(["a:before", f"{run}:after"])) == expected  # however it is written


def test_the_noise_floor_stands_beside_a_runs_own_comparison(tmp_path: Path) -> None:
    run = stored(tmp_path, "a", 0.9)
    equal = manifest(against_itself=True)
    with_floor(result(1.0, equal, noise=0.2), equal, floors_of(Path(run)))
    found = only(across_runs.compare([run]))
    assert found.metrics["tpot_ms_p50"].floor > 0
    assert "arms of equal code differ here by more than its change" in "\n".join(warned(found))
    assert [found] == stored_.result(Path(run), manifest()).comparisons


def test_the_arms_of_one_run_may_differ_in_what_two_runs_may_not(tmp_path: Path) -> None:
    plan = manifest()
    other = msgspec.structs.replace(described(), model={"name": "n", "vocabulary": 9, "context": 99})
    plan = msgspec.structs.replace(plan, descriptions={**plan.descriptions, "after": other})
    row = only(across_runs.compare([stored(tmp_path, "a", 0.9, plan)])).metrics["tpot_ms_p50"]
    assert row.verdict == "faster"


def test_a_run_that_does_not_say_what_it_ran_on_is_told_of(tmp_path: Path) -> None:
    run = shutil.copytree(REFERENCE / "runs" / "deferred-output", tmp_path / "a")
    write_manifest(run, msgspec.structs.replace(read_manifest(run), descriptions={}))
    with pytest.raises(StoreError, match=r"a was edited: it does not say what before ran on$"):
        across_runs.compare([str(run)])


def test_an_unfinished_run_gets_no_verdict(tmp_path: Path) -> None:
    run = stored(tmp_path, "a", 0.9, count=4)
    with pytest.raises(StoreError, match=r"is not finished: 4 of 6 trials.*--resume"):
        across_runs.compare([run])


# -- arms of several runs ---------------------------------------------------------------------------------


def test_what_was_not_interleaved_gets_an_interval_and_no_verdict(tmp_path: Path) -> None:
    first, second = stored(tmp_path, "a", 1.0), stored(tmp_path, "b", 0.5, count=3, plan=manifest(3))
    found = across_runs.compare([f"{first}:before", f"{second}:after"])
    comparison = only(found)
    row = comparison.metrics["tpot_ms_p50"]
    assert row.ci_low < row.change < row.ci_high < 0
    assert row.change == pytest.approx(-0.5, abs=0.01)
    assert {row.verdict for row in comparison.metrics.values()} == {None}
    assert row.sd is None  # there are no pairs
    assert comparison.blocks == 3
    assert warned(comparison)[0].startswith("not interleaved: a:before was measured at ")
    assert "there is no verdict" in warned(comparison)[0]
    assert "numbers of trials differ: a:before has 6, b:after has 3; " in "".join(warned(comparison))
    assert not set(definitions.MATCHED) & set(comparison.metrics)
    assert "no verdict" in shown(found.result, 120)
    assert "no verdict" in formats.to_markdown(found.result)
    assert set(to_plain(comparison)) == set(to_plain(result())["comparisons"][0])


def without_tpot(run: str) -> str:
    """Its requests have one token each, and so no time per token after the first."""
    for number in finished_blocks(Path(run)):
        asked = read_table(Path(run), number, "requests").assign(completion_tokens=1)
        write_table(table_path(Path(run), number, "requests"), asked)
    return run


def test_in_place_of_a_primary_that_one_run_has_no_values_of_another_is_compared(tmp_path: Path) -> None:
    first, second = (stored(tmp_path, name, plan=manifest(2, arms=1)) for name in "ab")
    found = only(across_runs.compare([first, without_tpot(second)]))
    assert found.primary == "latency_ms_p50"
    said = (
        "latency_ms_p50 is compared in place of tpot_ms_p50, as it has no value in some trial of b:before; "
    )
    assert warned(found)[1].startswith(said)


@pytest.mark.parametrize("name", definitions.MATCHED)
def test_runs_that_were_decided_by_a_metric_of_two_arms_are_compared_by_another(
    name: str, tmp_path: Path
) -> None:
    plan = manifest(2, primary=name)
    runs = [stored(tmp_path, name, plan=plan) for name in "ab"]
    found = only(across_runs.compare([f"{run}:after" for run in runs]))
    assert found.primary == "tpot_ms_p50"
    said = f"tpot_ms_p50 is compared in place of {name}, as it needs both arms in one trial; "
    assert said in "\n".join(warned(found))


def test_goodput_is_compared_where_the_same_is_good_in_both_runs(tmp_path: Path) -> None:
    plans = [manifest(2, arms=1, primary="goodput_req_s", goodput={"ttft": most}) for most in (9.0, 9.0, 8.0)]
    first, same, other = (stored(tmp_path, name, plan=plan) for name, plan in zip("abc", plans, strict=True))
    found = only(across_runs.compare([first, same]))
    assert found.primary == "goodput_req_s"
    assert found.metrics["goodput_req_s"].change == 0
    assert not any("in place of" in line for line in warned(found))
    found = only(across_runs.compare([first, other]))
    assert found.primary == "tpot_ms_p50"
    said = (
        "tpot_ms_p50 is compared in place of goodput_req_s, as the --goodput limits differ, ttft was 9.0, is "
        "8.0; "
    )
    assert said in "\n".join(warned(found))


def test_three_runs_are_two_comparisons_with_the_first(tmp_path: Path) -> None:
    alone = manifest(2, arms=1)
    runs = [stored(tmp_path, name, plan=alone) for name in "abc"]
    found = across_runs.compare(runs)
    variants = [each.variant for each in found.result.comparisons]
    assert variants == [f"a:before against {each}:before, not interleaved" for each in "bc"]
    assert found.result.run == "a:before, b:before, c:before"


def test_outputs_are_compared_where_the_prompts_are_the_same(tmp_path: Path) -> None:
    alone = manifest(2, arms=1)
    same = [stored(tmp_path, name, plan=alone) for name in "ab"]
    found = across_runs.compare(same)
    assert only(found).outputs == Outputs(compared=24, identical=24, near_ties=None, distinct=12)
    other = stored(tmp_path, "c", plan=manifest(2, arms=1, seed=7))
    found = across_runs.compare([same[0], other])
    assert only(found).outputs.compared == 0
    assert "different seeds" in "\n".join(warned(only(found)))
    assert not found.outputs_differ


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": Machine(cpu="a cpu", cores=4, kernel="6", memory_gib=8, gpus=[])}, "different machine"),
        ({"versions": {"torch": "3"}}, "different versions: torch was None, is '3'"),
    ],
)
def test_other_circumstances_are_told(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    alone = manifest(2, arms=1)
    first = stored(tmp_path, "a", plan=alone)
    second = stored(tmp_path, "b", plan=msgspec.structs.replace(alone, **changes))
    assert reason in "\n".join(warned(only(across_runs.compare([first, second]))))


# -- refusals ---------------------------------------------------------------------------------------------


def describing(**changes: Any) -> Manifest:
    plan = manifest(2, arms=1)
    description = msgspec.structs.replace(described(), **changes)
    return msgspec.structs.replace(plan, descriptions={"before": description})


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (describing(device={"kind": "cuda", "name": "x"}), "their device differs: was 'emulated', is 'cuda'"),
        (describing(device={"kind": "emulated", "name": "y"}), "their device differs: was 'x', is 'y'"),
        (
            describing(device={"kind": "emulated, paced: 10ms", "name": "x"}),
            "their device differs: was 'emulated', is 'emulated, paced: 10ms'",
        ),
        (
            describing(model={"name": "other", "vocabulary": 9, "context": 99}),
            "their model differs: was 'm', is 'other'",
        ),
        (
            manifest(2, arms=1, workload=Workload(num_requests=9)),
            "their workload differs: num_requests was 64, is 9",
        ),
    ],
)
def test_other_devices_models_and_workloads_are_refused(tmp_path: Path, plan: Manifest, reason: str) -> None:
    first, second = stored(tmp_path, "a", plan=manifest(2, arms=1)), stored(tmp_path, "b", plan=plan)
    assert reason in refusal(lambda: across_runs.compare([first, second]))


def test_servers_of_other_commands_are_compared_as_a_command_names_no_card(tmp_path: Path) -> None:
    served = []
    for name, command in (("a", "serve A --port {port}"), ("b", "serve B --port {port}")):
        plan = describing(device={"kind": "server", "name": command})
        arm = msgspec.structs.replace(plan.design.arms[0], engine="openai", toggles={"cmd": command})
        design = msgspec.structs.replace(plan.design, arms=(arm,))
        served.append(stored(tmp_path, name, plan=msgspec.structs.replace(plan, design=design)))
    assert only(across_runs.compare(served)).metrics["tpot_ms_p50"].change is not None


def test_prompts_that_were_edited_in_between_are_refused(tmp_path: Path) -> None:
    plan = manifest(2, arms=1, workload=Workload(prompt=None, prompts="p.txt"))
    read, edited = (msgspec.structs.replace(plan, files={"p.txt": each}) for each in ("abc", "def"))
    first, second = stored(tmp_path, "a", plan=read), stored(tmp_path, "b", plan=edited)
    with pytest.raises(api.BadSetting, match=r"their workload's data differs: p\.txt was 'abc', is 'def'"):
        across_runs.compare([first, second])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["{a}", "{b}"], "a has 2 arms: choose "),
        (["{a}:before"], "compare needs two arms"),
        (["{a}:before", "{a}:before"], "a:before is given twice"),
        (["{a}:befor", "{b}:after"], "unknown arm of .* did you mean before?"),
        (["{a}:before", "{c}:after"], "c is not a run folder"),
        (["{c}"], "c is not a run folder"),
    ],
)
def test_what_is_not_two_arms_is_refused(tmp_path: Path, texts: list[str], reason: str) -> None:
    folders = {name: tmp_path / name for name in "abc"}
    for name in "ab":
        stored(tmp_path, name, plan=manifest(2))
    with pytest.raises(api.BadSetting, match=reason):
        across_runs.compare([text.format(**folders) for text in texts])


@pytest.mark.parametrize("table", ["requests", "rounds"])
def test_an_arm_that_was_taken_out_is_named(tmp_path: Path, table: str) -> None:
    run = stored(tmp_path, "a")
    path = table_path(Path(run), 2, table)
    (block,) = blocks(1.0, 1)
    frame = block.tables[table]
    frame[frame["arm"] == "before"].to_parquet(path)
    with pytest.raises(StoreError, match=rf"002/{table}\.parquet was edited: it has no row of after"):
        across_runs.compare([run])


def test_a_block_that_was_taken_out_is_named(tmp_path: Path) -> None:
    run = Path(stored(tmp_path, "a"))
    (run / "blocks" / "001").rename(run / "elsewhere")
    with pytest.raises(StoreError, match="lacks trial 1"):
        across_runs.compare([str(run)])


# -- on the command line ----------------------------------------------------------------------------------


def test_outputs_that_differ_where_they_must_not_are_exit_code_1(tmp_path: Path) -> None:
    run = Path(stored(tmp_path, "a"))
    for block in blocks(1.0, 6, digest="other"):
        table_path(run, block.number, "requests").unlink()
        block.tables["requests"].to_parquet(table_path(run, block.number, "requests"))
    assert "OUTPUTS DIFFER" in bench("compare", str(run), code=1).out
