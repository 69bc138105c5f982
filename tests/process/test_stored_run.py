"""A stored run from Python: its frames are what COLUMNS says, and its numbers are the command line's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import overlap_bench
from overlap_bench.harness.analysis import frames
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.common import names
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.requests import gaps_ms
from overlap_bench.harness.store.files import StoreError
from tests.support.in_process import bench
from tests.support.made_blocks import manifest
from tests.support.made_runs import stored
from tests.support.places import REFERENCE

RUNS = REFERENCE / "runs"


@pytest.fixture(scope="session")
def whole() -> frames.Run:
    """A real run that the repository holds with all its blocks."""
    return overlap_bench.load(RUNS / "overlap")


def documented(name: str, columns: dict[str, frames.Column]) -> frames.Column | None:
    return columns.get(name) or next(
        (column for start, column in columns.items() if start[-1] in "._" and name.startswith(start)), None
    )


def dtype(column: pd.Series) -> str:
    if pd.api.types.is_integer_dtype(column) or pd.api.types.is_float_dtype(column):
        return str(column.dtype)
    return "text" if all(isinstance(value, str) for value in column) else f"list of {column.iloc[0].dtype}"


@pytest.mark.parametrize("table", ["requests", "steps", "rounds", "work"])
def test_every_column_is_documented(whole: frames.Run, table: str) -> None:
    frame, columns = getattr(whole, table), frames.COLUMNS[table]
    assert tuple(frame.columns[:3]) == ("trial", "arm", "round")
    for column in frame:
        found = documented(column, columns)
        assert found is not None, f"{table}.{column}"
        assert dtype(frame[column]) == found.dtype.replace("list", "list of int64"), f"{table}.{column}"


def test_the_frames_give_the_metrics(whole: frames.Run) -> None:
    one = whole.requests[(whole.requests["trial"] == 3) & (whole.requests["arm"] == "after")]
    steps = whole.steps[(whole.steps["trial"] == 3) & (whole.steps["arm"] == "after")]
    gaps = gaps_ms(one["token_ns"])
    values = whole.values.set_index(["trial", "arm"]).loc[(3, "after")]
    assert np.percentile(one["ttft_ms"], 99) == values["ttft_ms_p99"]
    assert one["tpot_ms"].median() == values["tpot_ms_p50"]
    assert np.percentile(gaps, 95) == values["itl_token_ms_p95"]
    assert len(gaps) == int((one["completion_tokens"] - 1).sum())
    assert steps["exposed_host_us"].mean() == pytest.approx(values["exposed_host_us"])
    assert steps["interval_us"].median() / 1e3 == pytest.approx(values["step_ms"])
    decode = steps[steps["kind"] == "decode"]
    assert decode["phase_h2d_us"].mean() == pytest.approx(values["phase_h2d_us"])
    assert set(values.index) == set(definitions.METRICS)


def test_compare_is_the_commands_json() -> None:
    folder = RUNS / "overlap"
    for runs in ((folder,), (f"{folder}:after", f"{folder}:before")):
        printed = json.loads(bench("compare", *map(str, runs), "--format", "json").out)
        assert to_plain(overlap_bench.compare(*runs)).items() <= printed.items()
    assert printed["comparisons"][0]["metrics"]["tpot_ms_p50"]["verdict"] == "slower"  # the other way round
    assert overlap_bench.compare(frames.load(folder)) == overlap_bench.compare(folder)


def test_a_run_whose_choices_are_no_more_is_not_measured_again(tmp_path: Path) -> None:
    text = (RUNS / "copy-done" / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"copy-done"', '"copied-done"'))
    said = bench("rerun", str(tmp_path), "--trust", code=2).err
    assert "unknown choice of sync 'copied-done'; did you mean copy-done?" in said


def test_the_result_is_what_the_run_printed(whole: frames.Run) -> None:
    summary = json.loads(names.of_today((whole.folder / "summary.json").read_text()))
    found = to_plain(whole.result)
    assert found["run"] == summary["run"]

    def to_12_digits(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The last ones depend on numpy's version."""
        return {
            name: {
                key: f"{value:.12g}" if isinstance(value, float) else value
                for key, value in row.items()
                if key not in ("counted", "unit")  # younger, too; and a share had none
            }
            for name, row in rows.items()
        }

    measured, printed = (each["comparisons"][0]["metrics"] for each in (found, summary))
    younger = {definitions.SAME_DEVICE, definitions.SAME_HOST, "mean_concurrency"}  # than the run
    assert measured.keys() - printed.keys() == younger
    assert to_12_digits({name: measured[name] for name in printed}) == to_12_digits(printed)


def test_a_request_that_failed_has_no_times(tmp_path: Path) -> None:
    run = Path(stored(tmp_path, "a", plan=manifest(1), count=1))
    path = run / "blocks" / "000" / "requests.parquet"
    frame = pd.read_parquet(path)
    frame.loc[0, "error"] = "gone"
    frame.to_parquet(path)
    requests = overlap_bench.load(run).requests
    assert requests["ttft_ms"].isna().sum() == 1
    assert np.isnan(requests.loc[requests["error"] == "gone", "latency_ms"]).all()


def test_an_engine_without_step_records_has_frames_without_rows(tmp_path: Path) -> None:
    run = Path(stored(tmp_path, "a", plan=manifest(1), count=1))
    for table in ("steps", "work"):
        (run / "blocks" / "000" / f"{table}.parquet").unlink()
    loaded = overlap_bench.load(run)
    assert len(loaded.steps) == len(loaded.work) == 0
    assert {"kind", "phase_h2d_us", "interval_us"} <= set(loaded.steps.columns)
    assert np.isnan(loaded.values["step_ms"]).all()


def test_an_engine_that_records_no_device_work_is_compared_without_device_busy(tmp_path: Path) -> None:
    run = Path(stored(tmp_path, "a"))
    for work in run.glob("blocks/*/work.parquet"):
        work.unlink()
    (found,) = overlap_bench.compare(run).comparisons
    assert "device_busy" not in found.metrics
    assert "exposed_host_us" in found.metrics


def test_an_unfinished_run_has_frames_and_no_result(tmp_path: Path) -> None:
    run = overlap_bench.load(stored(tmp_path, "a", count=2))
    assert len(run.rounds) == 4
    with pytest.raises(StoreError, match=r"is not finished: 2 of 6 trials.*peeking"):
        _ = run.result


def test_the_package_is_light_until_it_is_used() -> None:
    code = "import sys, overlap_bench; overlap_bench.load; overlap_bench.compare\n"
    code += "print(sorted({'numpy', 'pandas', 'matplotlib', 'jinja2', 'scipy'} & set(sys.modules)))\n"
    code += "overlap_bench.plots; print('matplotlib' in sys.modules); overlap_bench.lode"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\nTrue\n"
    assert done.stderr.endswith("AttributeError: module 'overlap_bench' has no attribute 'lode'\n")
