"""Figures of real runs: axes with units, arms told apart without colour, bars from zero, numbers as in the
result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import harness
from engines import api
from harness import comparison, plots, store
from harness.plots import style
from harness.stored_run import Run
from tests.test_across_runs import stored
from tests.test_stored_run import REFERENCE
from tests.test_tables import block, manifest, side

FIGURES: dict[str, Callable[[Run, float], Figure]] = {
    "changes": lambda run, width: plots.changes(run.result["comparisons"][0], width),
    "block_changes": lambda run, width: plots.block_changes(run, width=width),
    "latency_cdfs": plots.latency_cdfs,
    "itl_over_time": plots.itl_over_time,
    "phases": lambda run, width: plots.phases(run.result["comparisons"][0], width),
}
UNITS = ("(%)", "(ms)", "(ms, log scale)", "us, mean", "block")


@pytest.fixture(scope="module")
def real() -> Run:
    return harness.load(REFERENCE / "copy-done")


@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_names_and_units(real: Run, name: str) -> None:
    for width in (style.WIDTH, 3.7):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a layout that does not fit, a glyph that is missing
            figure = FIGURES[name](real, width)
            figure.canvas.draw()
        assert isinstance(figure, Figure)
        assert figure.get_figwidth() == width
        labels = [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]
        assert labels
        labels += [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
        assert all(any(unit in label for unit in UNITS) for label in labels), labels
    assert matplotlib.pyplot.get_fignums() == []  # none is held by pyplot


def test_log_axes_say_so(real: Run) -> None:
    for axes in plots.latency_cdfs(real).axes:
        assert (axes.get_xscale() == "log") == ("log scale" in axes.get_xlabel())
    gaps = plots.latency_cdfs(harness.load(REFERENCE / "pinned-h2d")).axes[2]
    assert gaps.get_xscale() == "log"


def test_bars_start_at_zero_and_are_as_long_as_the_result_says(real: Run) -> None:
    (found,) = real.result["comparisons"]
    figure = plots.phases(found)
    for axes in figure.axes:
        assert axes.get_xlim()[0] == 0
        names = [label.get_text() for label in axes.get_yticklabels()]
        lengths = [bar.get_width() for bar in axes.patches]
        rows = [found["metrics"][f"phase_{name.replace('.', '_')}_us"] for name in names]
        assert lengths == [*(row["before"] for row in rows), *(row["after"] for row in rows)]


def test_the_arms_differ_without_colour() -> None:
    before, after = style.ARMS["before"], style.ARMS["after"]
    for part in ("face", "line", "marker", "hatch"):
        assert getattr(before, part) != getattr(after, part)


def test_intervals_are_those_of_the_result(real: Run) -> None:
    (found,) = real.result["comparisons"]
    axes = plots.changes(found).axes[0]
    names = [label.get_text().removesuffix(" ↑") for label in axes.get_yticklabels()]
    assert names[0] == found["primary"]
    drawn = [bars.get_segments()[0][:, 0] for line in axes.containers for bars in line.lines[2]]
    expected = [
        (100 * found["metrics"][name]["ci_low"], 100 * found["metrics"][name]["ci_high"]) for name in names
    ]
    assert np.allclose(drawn, expected)


def test_the_mean_of_the_blocks_is_the_change(real: Run) -> None:
    (found,) = real.result["comparisons"]
    axes = plots.block_changes(real).axes[0]
    points = [value for line in axes.lines if line.get_marker() in "^v" for value in line.get_ydata()]
    assert len(points) == 6
    mean = np.expm1(np.mean(np.log1p(np.array(points) / 100)))
    assert mean == pytest.approx(found["metrics"]["tpot_ms_p50"]["change"])
    in_unit = plots.block_changes(real, "exposed_host_us")
    assert in_unit.axes[0].get_ylabel() == "change (us)"


def test_a_curve_reaches_its_largest_sample(real: Run) -> None:
    axes = plots.latency_cdfs(real).axes[0]
    for arm, line in zip(
        real.arms, (each for each in axes.lines if each.get_label() in real.arms), strict=True
    ):
        samples = real.requests.loc[real.requests["arm"] == arm, "ttft_ms"]
        assert line.get_xdata()[[0, -1]].tolist() == [samples.min(), samples.max()]
        assert line.get_ydata()[-1] == 1


def test_what_a_run_has_not_got_is_one_line(real: Run, tmp_path: Path) -> None:
    alone = harness.load(stored(tmp_path, "a", plan=manifest(2, arms=1)))
    (one_arm,) = alone.result["comparisons"]
    bare = {key: side(4)[key] for key in ("requests", "rounds")}
    (unrecorded,) = comparison.result(
        manifest(2), [block(number, {"before": bare, "after": bare}) for number in range(2)]
    )["comparisons"]
    for draw, reason in (
        (lambda: plots.changes(one_arm), "it has one arm"),
        (lambda: plots.block_changes(alone), "one arm, so no block has a change"),
        (lambda: plots.phases(unrecorded), "has no step records, so no phases"),
        (
            lambda: plots.block_changes(real, "tpot_ms_p5"),
            "unknown metric of this run 'tpot_ms_p5'; did you mean tpot_ms_p",
        ),
    ):
        with pytest.raises(api.BadSetting, match=reason):
            draw()
    for draw in (plots.latency_cdfs, plots.itl_over_time):
        assert len(draw(alone).axes) >= 2
    assert len(plots.phases(one_arm).axes[0].patches) > 0


def test_an_engine_that_does_not_stamp_tokens_has_itl_by_chunk(tmp_path: Path) -> None:
    folder = Path(stored(tmp_path, "a", plan=manifest(1)))
    path = store.table_path(folder, 0, "requests")
    frame = pd.read_parquet(path)
    frame["token_ns"] = [np.empty(0, dtype=np.int64) for _ in range(len(frame))]
    frame.to_parquet(path)
    run = harness.load(folder)
    assert "ITL by chunk" in plots.latency_cdfs(run).axes[2].get_xlabel()
    with pytest.raises(api.BadSetting, match="has no ITL by token"):
        plots.itl_over_time(run)


def test_one_block_has_points_and_no_interval(tmp_path: Path) -> None:
    run = harness.load(stored(tmp_path, "a", 0.9, plan=manifest(1)))
    (found,) = run.result["comparisons"]
    assert "no interval" in plots.changes(found).axes[0].get_title(loc="left")
    labels = [text.get_text() for text in plots.block_changes(run).legends[0].get_texts()]
    assert not any("interval" in label for label in labels)


def test_names_from_a_run_are_not_taken_for_mathematics(tmp_path: Path) -> None:
    run = harness.load(stored(tmp_path, "a", 0.9, plan=manifest(2)))
    (found,) = run.result["comparisons"]
    found = found | {"metrics": {"$x$_ms": found["metrics"]["tpot_ms_p50"]}, "primary": "$x$_ms"}
    label = plots.changes(found).axes[0].get_yticklabels()[0]
    assert label.get_text() == "$x$_ms"
    assert not label.get_parse_math()
