"""Figures of real runs: axes with units, arms told apart without colour, bars from zero, numbers as in the
result."""

import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.metrics import requests
from overlap_bench.harness.report import figures
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.store import tables
from tests.support.made_blocks import block, manifest, result, side
from tests.support.made_runs import stored
from tests.support.places import REFERENCE

FIGURES: dict[str, Callable[[Run, float], Figure]] = {
    "changes": figures.changes,
    "trial_changes": lambda run, width: figures.trial_changes(run, width=width),
    "latency_cdfs": figures.latency_cdfs,
    "itl_over_time": figures.itl_over_time,
    "phases": figures.phases,
}
FOUND = result(plan=manifest(1))
UNITS = ("(%)", "(ms)", "(ms, log scale)", "us, mean", "trial")


@pytest.fixture(scope="module")
def real() -> Run:
    return overlap_bench.load(REFERENCE / "runs" / "overlap")


def found_by(result: Result) -> Run:
    """A loaded run that found this, whatever it was made of."""
    run = Run(Path(result.run), manifest(1), (), pd.DataFrame(), ())
    run.__dict__["result"] = result
    return run


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


def test_a_long_tail_has_a_log_axis(real: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    even, stretched = np.linspace(4.0, 5.0, 50), np.append(np.linspace(4.0, 5.0, 50), 900.0)
    samples = {"ttft_ms": even, "tpot_ms": even, "itl_token_ms": stretched, "itl_chunk_ms": stretched}
    monkeypatch.setattr(requests, "distributions", lambda served: samples)
    scales = [axes.get_xscale() for axes in figures.latency_cdfs(real).axes]
    assert scales == ["linear", "linear", "log"]


def test_bars_start_at_zero_and_are_as_long_as_the_result_says(real: Run) -> None:
    (found,) = real.result.comparisons
    figure = figures.phases(real)
    for axes in figure.axes:
        assert axes.get_xlim()[0] == 0
        names = [label.get_text() for label in axes.get_yticklabels()]
        lengths = [bar.get_width() for bar in axes.patches]
        rows = [found.metrics[f"phase_{name.replace('.', '_')}_us"] for name in names]
        assert lengths == [*(row.before for row in rows), *(row.after for row in rows)]


def test_intervals_are_those_of_the_result(real: Run) -> None:
    (found,) = real.result.comparisons
    axes = figures.changes(real).axes[0]
    names = [label.get_text().removesuffix(" ↑") for label in axes.get_yticklabels()]
    assert names[0] == found.primary
    drawn = [bars.get_segments()[0][:, 0] for line in axes.containers for bars in line.lines[2]]
    expected = [(100 * found.metrics[name].ci_low, 100 * found.metrics[name].ci_high) for name in names]
    assert np.allclose(drawn, expected)


def test_the_mean_of_the_blocks_is_the_change(real: Run) -> None:
    (found,) = real.result.comparisons
    axes = figures.trial_changes(real).axes[0]
    points = [value for line in axes.lines if line.get_marker() in "^v" for value in line.get_ydata()]
    assert len(points) == 6
    mean = np.expm1(np.mean(np.log1p(np.array(points) / 100)))
    assert mean == pytest.approx(found.metrics["tpot_ms_p50"].change)
    in_unit = figures.trial_changes(real, "exposed_host_us")
    assert in_unit.axes[0].get_ylabel() == "change (us)"


def test_trials_that_are_left_out_are_no_points(real: Run) -> None:
    (found,) = real.result.comparisons
    loaded = overlap_bench.load(real.folder)
    fewer = replace(found, blocks=found.blocks - 2, left_out=[0, 3])
    loaded.__dict__["result"] = replace(real.result, comparisons=[fewer])
    axes = figures.trial_changes(loaded).axes[0]
    places = [place for line in axes.lines if line.get_marker() in "^v" for place in line.get_xdata()]
    assert sorted(places) == [1, 2, 4, 5]


def test_what_a_run_has_not_got_is_one_line(real: Run, tmp_path: Path) -> None:
    alone = overlap_bench.load(stored(tmp_path, "a", plan=manifest(2, arms=1)))
    bare = {key: side(4)[key] for key in ("requests", "rounds")}
    unrecorded = comparison.result(
        manifest(2), [block(number, {"before": bare, "after": bare}) for number in range(2)]
    )
    for draw, reason in (
        (lambda: figures.changes(alone), "it has one arm"),
        (lambda: figures.trial_changes(alone), "one arm, so no trial has a change"),
        (lambda: figures.phases(found_by(unrecorded)), "has no step records, so no phases"),
        (
            lambda: figures.trial_changes(real, "tpot_ms_p5"),
            "unknown metric of this run 'tpot_ms_p5'; did you mean tpot_ms_p",
        ),
    ):
        with pytest.raises(api.BadSetting, match=reason):
            draw()
    for draw in (figures.latency_cdfs, figures.itl_over_time):
        assert len(draw(alone).axes) >= 2
    assert len(figures.phases(alone).axes[0].patches) > 0


def without_stamps(folder: Path, arms: set[str]) -> Run:
    """A stored run of two trials, once the tokens of these arms have none."""
    for number in range(2):
        path = tables.table_path(folder, number, "requests")
        frame = pd.read_parquet(path)
        none = np.empty(0, dtype=np.int64)
        frame["token_ns"] = [
            none if arm in arms else own for arm, own in zip(frame["arm"], frame["token_ns"], strict=True)
        ]
        frame.to_parquet(path)
    return overlap_bench.load(folder)


def test_an_engine_that_does_not_stamp_tokens_has_itl_by_chunk(tmp_path: Path) -> None:
    run = without_stamps(Path(stored(tmp_path, "a", plan=manifest(2))), {"before", "after"})
    assert "ITL by chunk" in figures.latency_cdfs(run).axes[2].get_xlabel()
    with pytest.raises(api.BadSetting, match="has no ITL by token"):
        figures.itl_over_time(run)


def test_no_point_over_time_is_outside_of_the_picture(tmp_path: Path) -> None:
    """Where one arm's tokens have no stamps, the places of its rounds stay empty."""
    run = without_stamps(Path(stored(tmp_path, "a", plan=manifest(2))), {"before"})
    axes = figures.itl_over_time(run).axes[0]
    drawn = [x for line in axes.get_lines() for x in line.get_xdata()]
    assert max(drawn) < axes.get_xlim()[1]


def test_names_from_a_run_are_not_taken_for_mathematics(tmp_path: Path) -> None:
    run = overlap_bench.load(stored(tmp_path, "a", 0.9, plan=manifest(2)))
    (found,) = run.result.comparisons
    found = replace(found, metrics={"$x$_ms": found.metrics["tpot_ms_p50"]}, primary="$x$_ms")
    label = figures.changes(found_by(replace(FOUND, comparisons=[found]))).axes[0].get_yticklabels()[0]
    assert label.get_text() == "$x$_ms"
    assert not label.get_parse_math()


@pytest.mark.parametrize("name", figures.__all__)
def test_what_a_plot_is_drawn_of_is_said_where_it_gets_something_else(name: str) -> None:
    wanted = "a run, from overlap_bench.load(FOLDER)"
    if name == "sensitivity":
        wanted = "a sensitivity, from overlap_bench.load_sensitivity(FOLDER)"
    for given in ("results/a-run", FOUND.comparisons[0]):
        with pytest.raises(api.BadSetting) as caught:
            getattr(figures, name)(given)
        assert str(caught.value) == f"this draws {wanted}, not a {type(given).__name__}"
