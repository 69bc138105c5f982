"""What of a results folder is a measurement of a claim, and what is none."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import catalogue
from overlap_bench.harness.analysis.catalogue import NOT_MEASURED, Entry
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.plan.variants import load_unmeasured, load_variants, measured_by
from overlap_bench.harness.report import catalogue_tables
from overlap_bench.harness.store.files import EXPERIMENT_FILE, SCHEMA_VERSION, write_json, write_summary
from overlap_bench.harness.store.manifest import Manifest, write_manifest
from overlap_bench.harness.store.tables import write_block
from overlap_bench.harness.studies.catalogue import catalogue_of
from overlap_bench.harness.studies.experiment import Kept
from tests.support.made_blocks import blocks, manifest, result

VARIANTS = load_variants()


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
    write_summary(folder, to_stored(result(0.9, plan)))


def measured(folder: Path) -> list[Entry]:
    return [each for each in catalogue_of(folder).entries if each.change is not None]


def test_a_run_of_a_variant_stands_beside_its_claim(tmp_path: Path) -> None:
    finished(tmp_path / "deep" / "mine", planned("pinned-h2d"))
    (entry,) = measured(tmp_path)
    assert (entry.claim, entry.source) == ("pinned-h2d", VARIANTS["pinned-h2d"].source)
    assert entry.change == pytest.approx(-0.1, abs=0.01)
    assert (entry.metric, entry.verdict, entry.batch) == ("tpot_ms_p50", "faster", 4)
    assert (entry.device, entry.machine, entry.found_in) == ("emulated", "a cpu", "deep/mine")


def test_what_is_found_of_our_own_rewriting_is_no_verdict_on_the_source(tmp_path: Path) -> None:
    finished(tmp_path / "mine", planned("vllm-update"))
    (entry,) = measured(tmp_path)
    assert (entry.claim, entry.verdict) == (
        "vllm-update",
        "faster; our rewriting, none on the source's own code",
    )


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


def test_an_experiment_of_ones_own_is_read_from_its_runs_and_one_that_is_not_finished_is_left_out(
    tmp_path: Path,
) -> None:
    """It has no summary: only what is kept in this project has."""
    experiment = {
        "name": "e", "title": "", "question": "", "sources": [], "tables": [],
        "boots": {"b": {"arms": {}, "workloads": {"w": {}}}},
        "claims": [
            {
                "says": "", "boots": "b", "workload": "w", "before": "before", "arm": "after",
                "change": "tpot_ms_p50",
            }
        ],
    }  # fmt: skip
    about = {"experiment": experiment, "kind": "emulated", "schema_version": SCHEMA_VERSION, "created": ""}
    kept = msgspec.convert(about, Kept)
    (tmp_path / "mine").mkdir()
    write_json(tmp_path / "mine" / EXPERIMENT_FILE, kept)
    assert measured(tmp_path) == []
    (run,) = kept.runs(tmp_path / "mine").values()
    plan = planned("pinned-h2d")
    write_manifest(run, plan)
    for each in blocks(0.9):
        assert measured(tmp_path) == []  # interrupted after some trials: no result, and no fault
        write_block(run, each.number, dict(each.tables))
    (entry,) = measured(tmp_path)
    assert (entry.claim, entry.found_in) == ("pinned-h2d", "mine")
    assert entry.change == pytest.approx(-0.1, abs=0.01)


def test_a_step_is_that_of_the_arm_that_a_claim_starts_from() -> None:
    (found,) = result(0.5, planned("pinned-h2d")).comparisons
    first, second = (catalogue.regime_of_arm([found], arm)["step_ms"] for arm in (0, 1))
    assert second == pytest.approx(first / 2, rel=0.01)


def test_the_machine_is_the_one_that_measured(tmp_path: Path) -> None:
    plan = planned("pinned-h2d")
    node = msgspec.structs.replace(plan.machine, cpu="the node's cpu")
    finished(tmp_path / "run", msgspec.structs.replace(plan, nodes={"a": node}))
    (entry,) = measured(tmp_path)
    assert entry.machine == "the node's cpu"


def test_variants_that_differ_by_an_option_are_recognised() -> None:
    for name in ("vllm-prefix-caching", "vllm-stream-interval"):
        variant = VARIANTS[name]
        options = {**variant.options, **variant.before_options}, {**variant.options, **variant.after_options}
        found = measured_by(VARIANTS, "vllm", variant.before, variant.after, options)
        assert found.name == name
        more = {**options[1], "max_batch_size": 7}
        assert measured_by(VARIANTS, "vllm", variant.before, variant.after, (options[0], more)) is None
    pinned = VARIANTS["pinned-h2d"]
    both = ({"stream_interval": 1}, {"stream_interval": 8})
    assert measured_by(VARIANTS, "overlap", pinned.before, pinned.after, both) is None


def test_an_interval_of_another_level_says_so(tmp_path: Path) -> None:
    plan = planned("pinned-h2d")
    write_manifest(tmp_path / "early", plan)
    found = result(0.9, plan)
    early = [msgspec.structs.replace(each, confidence=0.9975) for each in found.comparisons]
    write_summary(tmp_path / "early", to_stored(msgspec.structs.replace(found, comparisons=early)))
    (entry,) = measured(tmp_path)
    assert entry.confidence == 0.9975
    assert catalogue_tables.MEASURED["measured"](entry).endswith("] at 99.75%")
    usual = msgspec.structs.replace(entry, confidence=0.95)
    assert catalogue_tables.MEASURED["measured"](usual).endswith("%]")
