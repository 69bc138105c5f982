"""What of a results folder is a measurement of a claim, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import api
from harness.analysis.catalogue import NOT_MEASURED, Entry, measured_by
from harness.analysis.result import to_plain
from harness.plan.variants import load_unmeasured, load_variants
from harness.store.files import StoreError, write_summary
from harness.store.manifest import Manifest, write_manifest
from harness.studies.catalogue import catalogue_of
from tests.support.made_blocks import manifest, result

VARIANTS = load_variants()
MACHINE = {"cpu": "a cpu", "cores": 2, "kernel": "6", "memory_gib": 8, "gpus": []}
ROW = {"unit": "ms", "better": "lower", "before": 10.7, "change": -0.064, "ci_low": -0.074, "ci_high": -0.053}


def planned(name: str, after: dict[str, Any] | None = None, **design: Any) -> Manifest:
    """A run of that variant; `after`: what its after arm has besides."""
    plan, variant = manifest(**design), VARIANTS[name]
    before, changed = (
        msgspec.structs.replace(arm, **{"engine": variant.engine, "toggles": toggles, **more})
        for arm, toggles, more in zip(
            plan.design.arms, (variant.before, variant.after), ({}, after or {}), strict=True
        )
    )
    return msgspec.structs.replace(
        plan, design=msgspec.structs.replace(plan.design, arms=(before, changed), primary="tpot_ms_p50")
    )


def finished(folder: Path, plan: Manifest) -> None:
    write_manifest(folder, plan)
    write_summary(folder, to_plain(result(0.9, plan)))


def measured(folder: Path) -> list[Entry]:
    return [each for each in catalogue_of(folder).entries if each.change is not None]


def written(folder: Path, name: str, data: list[Any]) -> None:
    (folder / name).write_text(json.dumps({"title": "t", "machine": MACHINE, "data": data}))


def test_a_run_of_a_variant_stands_beside_its_claim(tmp_path: Path) -> None:
    finished(tmp_path / "deep" / "mine", planned("pinned-h2d"))
    (entry,) = measured(tmp_path)
    assert (entry.claim, entry.source) == ("pinned-h2d", VARIANTS["pinned-h2d"].source)
    assert entry.change == pytest.approx(-0.1, abs=0.01)
    assert (entry.metric, entry.verdict, entry.batch) == ("tpot_ms_p50", "faster", 4)
    assert (entry.device, entry.machine, entry.found_in) == ("emulated", "a cpu", "deep/mine")


def test_every_claim_is_there_whether_or_not_anything_is_measured_and_those_without_a_variant_come_last(
    tmp_path: Path,
) -> None:
    entries = catalogue_of(tmp_path).entries
    assert [each.claim for each in entries] == [*VARIANTS, *load_unmeasured()]
    assert {each.verdict for each in entries[: len(VARIANTS)]} == {NOT_MEASURED}
    assert all(each.verdict.startswith(f"{NOT_MEASURED}: ") for each in entries[len(VARIANTS) :])
    assert [each.claim for each in catalogue_of(tmp_path, "overlap").entries] == ["overlap"]


@pytest.mark.parametrize(
    "plan",
    [
        planned("pinned-h2d", after={"options": api.EngineOptions(stream_interval=1)}),
        planned("pinned-h2d", after={"env": {"OMP_NUM_THREADS": "1"}}),
        planned("pinned-h2d", after={"toggles": VARIANTS["pinned-h2d"].before}),
        planned("pinned-h2d", after={"toggles": {**VARIANTS["pinned-h2d"].after, "gc": "frozen"}}),
        planned("pinned-h2d", after={"engine": "mine"}),
        planned("pinned-h2d", plant=0.03),
    ],
    ids=[
        "another option",
        "another environment",
        "equal arms",
        "one toggle more",
        "other engines",
        "planted",
    ],
)
def test_a_run_that_changes_something_else_measures_no_claim(tmp_path: Path, plan: Manifest) -> None:
    finished(tmp_path / "run", plan)
    assert measured(tmp_path) == []


@pytest.mark.parametrize("name", ["async-output", "offload-output"])
def test_of_two_claims_with_one_change_the_one_with_the_nearer_settings_is_meant(name: str) -> None:
    """An older run need not have every toggle of today."""
    before, after = (
        {toggle: choice for toggle, choice in side.items() if toggle != "gc"}
        for side in (VARIANTS[name].before, VARIANTS[name].after)
    )
    assert measured_by(VARIANTS, "overlap", before, after) == VARIANTS[name]


def test_repeated_runs_and_the_step_map_are_read_and_points_without_a_known_speed_left_out(
    tmp_path: Path,
) -> None:
    sliced = {"steps": 4, "batch": 16.0, "pairs": 9, "kept": 1.0}
    row = {**ROW, "verdict": "faster"}
    run = {"variant": "overlap", "device": "paced, 10 ms", "metrics": {"step_ms_sliced": row}}
    written(tmp_path, "sliced_variants.json", [{**run, "sliced": sliced}, {**run, "variant": "of yesterday"}])
    rounds = {"primary": "tpot_ms_mean", "metrics": {"tpot_ms_mean": {**row, "change": 0.2}}}
    written(tmp_path, "todays_variants.json", [{"variant": "overlap", "device": "unpaced", **rounds}])
    point = {"variant": "overlap", "pace": "20ms", "batch": 16, "change": -0.03, "low": -0.04, "high": -0.02}
    points = [
        {**point, "overrun": 0.0},
        {**point, "overrun": 0.02},
        {**point, "overrun": 0.0, "batch": 64},
    ]
    written(tmp_path, "step_map.json", [{"points": points}])
    first, in_rounds, second = measured(tmp_path)
    assert (first.device, first.step_ms, first.batch) == ("emulated, paced: 10ms", 10.7, 16)
    assert (first.change, first.verdict) == (-0.064, "faster")
    assert (in_rounds.device, in_rounds.metric, in_rounds.batch) == ("emulated", "tpot_ms_mean", None)
    assert (second.device, second.step_ms, second.verdict) == ("emulated, paced: 20ms", 20, "descriptive")


@pytest.mark.parametrize("content", ["{", '{"machine": {}, "data": []}', "[" * 100_000, "\udcff"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "step_map.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(StoreError, match=r"step_map\.json is damaged or was edited: ") as caught:
        catalogue_of(tmp_path)
    assert "\n" not in str(caught.value)
