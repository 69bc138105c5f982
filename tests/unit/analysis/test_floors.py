"""The noise floor: kept by circumstances, found again, and called foreign or stale where it is."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.analysis.noise_floor import with_floor
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import until_decided
from overlap_bench.harness.store.files import write_json
from overlap_bench.harness.store.manifest import Manifest
from tests.support.made_blocks import manifest, result, shown, warned

BLOCKS = 6


def stored_floor(folder: Path) -> noise_floor.Floor:
    """The only floor in the folder."""
    (path,) = folder.iterdir()
    return msgspec.json.decode(path.read_bytes(), type=noise_floor.Floor)


def aa(**changes: Any) -> Manifest:
    plan = manifest(against_itself=True)
    arms = (plan.design.arms[0], msgspec.structs.replace(plan.design.arms[0], name="after"))
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
    return msgspec.structs.replace(plan, **changes)


def kept(folder: Path, plan: Manifest) -> Result:
    """An A/A run's result, its floor kept in `folder`."""
    return with_floor(result(1.0, plan, noise=0.005), plan, folder)


def edited(folder: Path, **changes: Any) -> None:
    write_json(next(folder.iterdir()), msgspec.structs.replace(stored_floor(folder), **changes))


def later(**changes: Any) -> Manifest:
    return msgspec.structs.replace(manifest(), **changes)


def redesigned(plan: Manifest, **changes: Any) -> Manifest:
    design: Design = msgspec.structs.replace(plan.design, **changes)
    order = [block % 2 == 0 for block in range(design.blocks)]
    return msgspec.structs.replace(plan, design=design, after_first=order)


def test_an_aa_run_keeps_its_floor_and_shows_it(tmp_path: Path) -> None:
    (only,) = kept(tmp_path, aa()).comparisons
    row = only.metrics["tpot_ms_p50"]
    assert row.floor == pytest.approx(paired.as_change(paired.half_width(row.sd, BLOCKS), "ratio"))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("e-tiny-gpt2-6-blocks-")
    spread = stored_floor(tmp_path).metrics["tpot_ms_p50"]
    assert spread.floor == row.floor < spread.detectable
    text = shown(msgspec.structs.replace(result(), comparisons=[only]), 100)
    assert "Noise floor of tpot_ms_p50 over 6 trials: ±" in text
    assert "would be detected in 4 of 5" in text
    bare = msgspec.structs.replace(row, floor=None)
    unknown = msgspec.structs.replace(only, metrics={**only.metrics, "tpot_ms_p50": bare})
    text = shown(msgspec.structs.replace(result(), comparisons=[unknown]), 100)
    assert "Noise floor" not in text
    assert "would be detected in 4 of 5" in text


def test_an_aa_run_that_stops_early_shows_the_floor_that_is_shown_beside_it_later(tmp_path: Path) -> None:
    plan = redesigned(aa(), blocks=8, until=until_decided(8))
    (only,) = kept(tmp_path, plan).comparisons
    row = only.metrics["tpot_ms_p50"]
    again = noise_floor.beside_known(result(1.0, plan, noise=0.005), plan, tmp_path)
    assert row == again.comparisons[0].metrics["tpot_ms_p50"]
    spread = stored_floor(tmp_path).metrics["tpot_ms_p50"]
    assert spread.floor == paired.as_change(paired.half_width(row.sd, 8), "ratio") < row.floor


def test_what_depends_on_the_toggles_alone_has_no_floor_from_another_run(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    (only,) = with_floor(result(0.9), later(), tmp_path).comparisons
    floor = {name: only.metrics[name].floor for name in definitions.MATCHED}
    assert floor["round_step_ms"] is not None
    assert floor["round_step_ms_same_device"] is floor["round_step_ms_same_host"] is None


def test_another_aa_run_of_the_same_replaces_it(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    kept(tmp_path, aa(run="again"))
    assert stored_floor(tmp_path).run == "again"


def test_a_later_run_shows_the_floor_beside_its_verdict(tmp_path: Path) -> None:
    floor = kept(tmp_path, aa()).comparisons[0].metrics["tpot_ms_p50"].floor
    found = with_floor(result(0.9), later(), tmp_path)
    (only,) = found.comparisons
    assert only.metrics["tpot_ms_p50"].floor == floor
    assert "noise floor" not in "\n".join(warned(only))
    assert "±" in shown(found, 120)
    for line in shown(found, 72).splitlines():
        assert "±" not in line or "floor" in line or "margin" in line  # stacked, it says what it is


def warnings(folder: Path, plan: Manifest, **more: Any) -> str:
    return "\n".join(warned(with_floor(result(0.9, plan, **more), plan, folder).comparisons[0]))


@pytest.mark.parametrize(
    ("plan", "kind", "reason"),
    [
        (
            later(machine=Machine(cpu="other", cores=8, kernel="6", memory_gib=8, gpus=[])),
            "foreign",
            "machine.cpu was 'a cpu', is 'other'",
        ),
        (
            redesigned(
                later(), workload=msgspec.structs.replace(manifest().design.workload, max_new_tokens=9)
            ),
            "foreign",
            "workload.max_new_tokens was 128, is 9",
        ),
        (redesigned(later(), goodput={"ttft": 5.0}), "foreign", "goodput.ttft was None, is 5.0"),
        (redesigned(later(), blocks=3), "foreign", "trials was 6, is 3"),
        (redesigned(later(), rounds=5), "foreign", "rounds was 2, is 5"),
        (later(created="2026-07-04T03:02:01+00:00"), "stale", "61 days old"),
        (later(versions={"torch": "3"}), "stale", "torch was None, is '3'"),
    ],
)
def test_a_foreign_or_stale_floor_is_named(tmp_path: Path, plan: Manifest, kind: str, reason: str) -> None:
    kept(tmp_path, aa())
    (said,) = (line for line in warnings(tmp_path, plan).splitlines() if "noise floor, measured on" in line)
    assert said.startswith(f"{kind} noise floor, measured on 2026-05-04 by a-run: ")
    assert reason in said


def test_a_floor_of_nearly_as_many_rounds_is_no_foreign_one(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    assert "noise floor" not in warnings(tmp_path, redesigned(later(), rounds=3))


def test_a_floor_of_a_paced_device_is_found_though_each_run_measures_another_k(tmp_path: Path) -> None:
    def paced(plan: Manifest, k: str) -> Manifest:
        pace = f"llama3-8b-h100*{k}"
        kind = f"paced: {pace}"
        arms = tuple(
            msgspec.structs.replace(arm, options=msgspec.structs.replace(arm.options, pace=pace))
            for arm in plan.design.arms
        )
        described = {
            name: msgspec.structs.replace(each, device={"kind": kind, "name": kind})
            for name, each in plan.descriptions.items()
        }
        design = msgspec.structs.replace(plan.design, arms=arms)
        return msgspec.structs.replace(plan, design=design, descriptions=described)

    kept(tmp_path, paced(aa(), "2.13"))
    for k, found in (("2.15", True), ("4.3", False)):
        plan = paced(later(), k)
        (only,) = with_floor(result(1.0, plan, noise=0.005), plan, tmp_path).comparisons
        assert (only.metrics["tpot_ms_p50"].floor is not None) is found
        assert not any("noise floor" in each.text for each in only.warnings)


@pytest.mark.parametrize("created", ["yesterday", "2026-05-04T03:02:01"])
def test_a_floor_that_does_not_say_when_it_was_measured_is_left_out(tmp_path: Path, created: str) -> None:
    kept(tmp_path, aa())
    edited(tmp_path, created=created)
    text = warnings(tmp_path, later())
    assert f"was edited: it was created '{created}'; it is left out; " in text
    assert "measured on" not in text


def test_the_nearest_floor_is_taken(tmp_path: Path) -> None:
    kept(tmp_path, aa(run="elsewhere", machine=Machine(cpu="o", cores=8, kernel="6", memory_gib=8, gpus=[])))
    kept(tmp_path, redesigned(aa(run="longer"), blocks=8))
    assert "by longer" in warnings(tmp_path, later())
    kept(tmp_path, aa(run="fitting"))
    assert "noise floor" not in warnings(tmp_path, later())


def test_a_floor_of_another_engine_or_model_is_none(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    edited(tmp_path, of=msgspec.structs.replace(stored_floor(tmp_path).of, kind="cuda"))
    (only,) = with_floor(result(0.9), later(), tmp_path).comparisons
    assert {row.floor for row in only.metrics.values()} == {None}


@pytest.mark.parametrize("content", [b"{", b'{"created": "\xff"}'])
def test_a_damaged_floor_costs_a_line_and_not_the_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert "x.json is damaged or was edited: " in warnings(tmp_path, later())


def test_a_change_within_the_floor_is_told(tmp_path: Path) -> None:
    plan = aa()
    with_floor(result(1.0, plan, noise=0.2), plan, tmp_path)
    assert "tpot_ms_p50 is called faster, but arms of equal code differ" in warnings(tmp_path, later())


def test_outputs_that_nobody_judged_stand_beside_those_of_equal_arms(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    (only,) = with_floor(result(0.9, digest="other"), later(), tmp_path).comparisons
    said = "outputs differ in 72 of 72 requests; arms of equal code differ here in 0 of 72 (bench aa)"
    assert said in "".join(warned(only))
    (same,) = with_floor(result(0.9), later(), tmp_path).comparisons
    assert not any("arms of equal code" in line for line in warned(same))


def test_a_planted_or_single_block_aa_keeps_no_floor(tmp_path: Path) -> None:
    kept(tmp_path, redesigned(aa(), plant=0.03))
    kept(tmp_path, redesigned(aa(), blocks=1))
    assert not list(tmp_path.iterdir())


def test_a_floor_of_rounds_says_nothing_of_turns(tmp_path: Path) -> None:
    kept(tmp_path, aa())
    assert noise_floor.find(tmp_path, later(), BLOCKS, 0.05).values
    in_turns = redesigned(manifest(), segments=16)
    assert noise_floor.find(tmp_path, in_turns, BLOCKS, 0.05) == noise_floor.Shown({}, ())


def test_a_floor_in_requests_a_second_is_none_of_a_change_in_percent(tmp_path: Path) -> None:
    """A goodput that was 0 in a trial of equal arms has such a floor."""
    kept(tmp_path, aa())
    metrics = stored_floor(tmp_path).metrics
    spread = msgspec.structs.replace(metrics["tpot_ms_p50"], scale="difference", sd=2.0, floor=3.1)
    edited(tmp_path, metrics=metrics | {"tpot_ms_p50": spread})
    (only,) = with_floor(result(0.9), later(), tmp_path).comparisons
    assert only.metrics["tpot_ms_p50"].floor is None
    assert only.metrics["ttft_ms_p50"].floor is not None
