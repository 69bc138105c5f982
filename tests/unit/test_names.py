"""What stored files call by older names is read by those of today."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.harness.analysis.plain import from_plain, to_plain
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.common import names
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.experiment_file import EXTRA
from overlap_bench.harness.store.files import SCHEMA_VERSION, read_json
from overlap_bench.harness.store.trust import signature
from tests.support import made_blocks

TODAY = {*definitions.BETWEEN_ARMS}


@pytest.mark.parametrize("name", sorted(TODAY))
def test_each_metric_between_arms_has_an_older_name_that_is_read_as_its_own(name: str) -> None:
    older = names.as_before(name)
    assert older != name
    assert older not in definitions.METRICS
    assert names.of_today(older) == name
    assert names.of_today(name) == name


def test_no_name_means_two_things() -> None:
    """Neither of today, nor one of before that is a metric of today: files with it would be read wrongly."""
    assert not EXTRA.keys() & definitions.METRICS.keys()
    assert not names.METRICS.keys() & {*EXTRA, *definitions.METRICS}
    assert len({*names.FIRST.values()}) == len(names.FIRST)
    assert len({*names.SECOND.values()}) == len(names.SECOND)


def test_no_other_metric_is_renamed() -> None:
    for name in definitions.METRICS.keys() - TODAY:
        assert names.of_today(name) == names.as_before(name) == name


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("decided by step_ms_sliced_mean.", "decided by decode_step_ms_untrimmed."),
        ("too few blocks: 3; --blocks 6 gives", "too few trials: 3; --trials 6 gives"),
        ("--max-blocks 8", "--max-trials 8"),
        ("num_blocks=8 of block_size 16", "num_blocks=8 of block_size 16"),
        ("undecided: slices and rounds disagree: in", "undecided: turns and rounds disagree: in"),
        (
            "ways: 8 blocks of 2 rounds; 3 segments in turns",
            "ways: 8 trials of 2 rounds; 3 interleaved rounds",
        ),
        ("phase_wait_copy_done_us_sliced, planted_share", "decode_phase_wait_copy_done_us, injected_share"),
        ("decode_step_ms_host, round_step_ms_device", "decode_step_ms_same_device, round_step_ms_same_host"),
    ],
)
def test_a_stored_sentence_is_told_in_the_words_of_today(stored: str, shown: str) -> None:
    assert names.sentence_of_today(stored) == shown


@pytest.mark.parametrize(("schema", "name"), [(1, "step_ms_same_device"), (2, "round_step_ms_host")])
def test_a_file_of_an_older_schema_is_read_by_the_names_of_today(
    tmp_path: Path, schema: int, name: str
) -> None:
    path = tmp_path / "summary.json"
    path.write_text(f'{{"schema_version": {schema}, "metrics": {{"{name}": 3.0}}}}')
    found: dict[str, Any] = read_json(path, dict[str, Any], "a run")
    assert found == {"schema_version": schema, "metrics": {"round_step_ms_same_device": 3.0}}
    assert SCHEMA_VERSION == 3


def test_a_result_by_its_older_fields_is_the_same_result() -> None:
    (found,) = made_blocks.result().comparisons
    plain = to_plain(found)
    older = {"trials": "blocks", "interleaved": "sliced"}
    before = {older.get(name, name): value for name, value in plain.items()}
    before["warnings"] = [text.replace("trial", "block") for text in plain["warnings"]]
    assert from_plain(before, Comparison) == from_plain(plain, Comparison)


def test_a_design_is_signed_by_the_names_that_older_runs_signed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    design = made_blocks.manifest().design
    today, older = (
        msgspec.structs.replace(design, primary=name) for name in ("decode_step_ms", "step_ms_sliced")
    )
    assert signature([today]) == signature([older])
