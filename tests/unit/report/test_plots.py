"""Figures of real runs: axes with units, arms told apart without colour, bars from zero, numbers as in the
result."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec.structs import replace

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.decision import ONE_BOOT
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Axis, Comparison, MetricRow, PointResult, Result
from overlap_bench.harness.analysis.sweep import Sweep
from overlap_bench.harness.metrics import requests
from overlap_bench.harness.report import figures
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store import tables
from tests.support.made_blocks import block, manifest, result, side
from tests.support.made_runs import (
    factorial_blocks,
    factorial_found,
    planned_factorial,
    stored,
    stored_sweep,
)
from tests.support.places import REFERENCE

FIGURES: dict[str, Callable[[Run, float], Figure]] = {
    "changes": figures.changes,
    "trial_changes": lambda run, width: figures.trial_changes(run, width=width),
    "latency_cdfs": figures.latency_cdfs,
    "itl_over_time": figures.itl_over_time,
    "phases": figures.phases,
}
UNITS = ("(%)", "(ms)", "(ms, log scale)", "us, mean", "trial")


@pytest.fixture(scope="module")
def real() -> Run:
    return overlap_bench.load(REFERENCE / "runs" / "overlap")


def found_by(result: Result) -> Run:
    """A loaded run that found this, whatever it was made of."""
    run = Run(Path(result.run), manifest(1), {}, pd.DataFrame(), ())
    run.__dict__["result"] = result
    return run


def of_comparison(found: Comparison) -> Run:
    return found_by(replace(FOUND, comparisons=[found]))


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


def test_an_engine_that_does_not_stamp_tokens_has_itl_by_chunk(tmp_path: Path) -> None:
    folder = Path(stored(tmp_path, "a", plan=manifest(1)))
    path = tables.table_path(folder, 0, "requests")
    frame = pd.read_parquet(path)
    frame["token_ns"] = [np.empty(0, dtype=np.int64) for _ in range(len(frame))]
    frame.to_parquet(path)
    run = overlap_bench.load(folder)
    assert "ITL by chunk" in figures.latency_cdfs(run).axes[2].get_xlabel()
    with pytest.raises(api.BadSetting, match="has no ITL by token"):
        figures.itl_over_time(run)


def test_names_from_a_run_are_not_taken_for_mathematics(tmp_path: Path) -> None:
    run = overlap_bench.load(stored(tmp_path, "a", 0.9, plan=manifest(2)))
    (found,) = run.result.comparisons
    found = replace(found, metrics={"$x$_ms": found.metrics["tpot_ms_p50"]}, primary="$x$_ms")
    label = figures.changes(of_comparison(found)).axes[0].get_yticklabels()[0]
    assert label.get_text() == "$x$_ms"
    assert not label.get_parse_math()


# -- factorials, sweeps, A/A ------------------------------------------------------------------------------


FOUND = result(plan=manifest(1))
PLAIN = FOUND.comparisons[0]


@pytest.fixture(scope="module")
def factored() -> Run:
    return found_by(factorial_found())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return overlap_bench.load_sweep(stored_sweep(tmp_path_factory.mktemp("swept") / "a-sweep"))


def with_points(swept: Sweep, points: list[PointResult], **more: list[Axis]) -> Sweep:
    """A sweep that found something else."""
    return dataclasses.replace(swept, result=replace(swept.result, comparisons=points, **more))


def a_a(seed: int, blocks: int, noise: float, **more: float) -> Run:
    """A run of an arm against itself."""
    values = np.random.default_rng(seed).normal(0, noise, (2, blocks))
    effect = paired.effect(*np.exp(values).tolist())
    row = MetricRow.of_metric("tpot_ms_p50", [1.0], effect)
    metrics = {"tpot_ms_p50": row}
    return of_comparison(
        replace(PLAIN, variant="aa", after=PLAIN.before, blocks=blocks, metrics=metrics, **more)
    )


def drawn(draw: Callable[[float], Figure]) -> Figure:
    """The figure in both widths, without a warning."""
    for width in (3.7, style.WIDTH):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = draw(width)
            figure.canvas.draw()
        assert figure.get_figwidth() == width
    return figure


def test_effects_are_those_of_the_result(factored: Run) -> None:
    axes = drawn(lambda width: figures.effects(factored, width=width)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "h2d", "output", "h2d × output", "all, against none",
    ]  # fmt: skip
    assert axes.get_xlabel() == "change of tpot_ms_p50 (%)"
    found = factored.result.factorial.metrics["tpot_ms_p50"]
    marks = sorted(line[0].get_xdata()[0] for line in axes.containers)
    rows = [*found.effects, *found.alone.values(), *found.with_others.values(), found.together]
    assert marks == pytest.approx(sorted(100 * row.change for row in rows))
    ends = sorted(tuple(bars.lines[2][0].get_segments()[0][:, 0]) for bars in axes.containers)
    expected = sorted((100 * row.ci_low, 100 * row.ci_high) for row in rows)
    assert np.allclose(ends, expected)
    assert len({line[0].get_marker() for line in axes.containers}) == 4  # told apart without colour


def legend_of(axes: Axes) -> list[str]:
    (legend,) = axes.figure.legends
    return [text.get_text() for text in legend.get_texts()]


def filled(axes: Axes) -> list[bool]:
    """Whether each mark with an interval is filled, from the first drawn to the last."""
    return [line[0].get_markerfacecolor() != "white" for line in axes.containers if len(line[0].get_xdata())]


def test_only_what_carries_a_verdict_is_filled_and_decides(factored: Run) -> None:
    axes = figures.effects(factored).axes[0]
    assert filled(axes) == [True, False, False] * 2 + [True, False]  # a pair, and all against none
    assert "on average over the settings of the others (decides)" in legend_of(axes)
    axes = figures.effects(factored, "latency_ms_p50").axes[0]
    assert not any(filled(axes))
    assert not any("decides" in each for each in legend_of(axes))
    plan = planned_factorial("h2d,output,gc", blocks=2)
    tpot = {arm.name: 4.0 + number for number, arm in enumerate(plan.design.arms)}
    result = comparison.result(plan, factorial_blocks(plan, tpot))
    axes = drawn(lambda width: figures.effects(found_by(result), width=width)).axes[0]
    assert filled(axes)[-3:] == [True, False, False]  # a pair, all three, and all against none
    assert "on average over the settings of the others, no verdict" in legend_of(axes)


def test_what_was_left_out_has_no_mark() -> None:
    plan = planned_factorial("schedule,output=inline:deferred")
    tpot = {"before": 4.0, "schedule": 3.6, "output": 3.8}
    result = comparison.result(plan, factorial_blocks(plan, tpot))
    axes = drawn(lambda width: figures.effects(found_by(result), width=width)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["schedule*", "output*"]
    assert len(axes.containers) == 4  # alone and on average
    assert "*: taking schedule × output as zero" in legend_of(axes)


def test_levels_of_a_sweep_start_at_zero_and_log_axes_say_so(swept: Sweep) -> None:
    axes = drawn(lambda width: figures.against(swept, width=width)).axes[0]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "tpot_ms_p50 (ms)"
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "concurrency, log scale"
    lines = {line.get_label(): line for line in axes.lines}
    for arm in ("before", "after"):
        rows = [each.metrics["tpot_ms_p50"].of(arm) for each in swept.result.comparisons]
        assert lines[arm].get_xydata().tolist() == [[1, rows[0]], [8, rows[1]]]
    assert lines["before"].get_marker() != lines["after"].get_marker()


def test_a_frontier_has_a_point_for_each_value_of_the_axis(swept: Sweep) -> None:
    axes = drawn(lambda width: figures.frontier(swept, width=width)).axes[0]
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("throughput_tok_s (tok/s)", "tpot_ms_p50 (ms)")
    assert [text.get_text() for text in axes.texts] == ["1", "8"]
    after = next(line for line in axes.lines if line.get_label() == "after")
    row = swept.result.comparisons[1].metrics
    assert after.get_xydata()[1].tolist() == [row["throughput_tok_s"].after, row["tpot_ms_p50"].after]


def test_gains_have_the_intervals_of_the_result(swept: Sweep) -> None:
    axes = drawn(lambda width: figures.gains(swept, width=width)).axes[0]
    assert axes.get_ylabel() == "change of tpot_ms_p50 (%)"
    rows = [each.metrics["tpot_ms_p50"] for each in swept.result.comparisons]
    bars = [each for each in axes.containers if len(each[0].get_xdata())]
    drawn_ends = [each.lines[2][0].get_segments()[0][:, 1] for each in bars]
    assert np.allclose(drawn_ends, [(100 * row.ci_low, 100 * row.ci_high) for row in rows])
    assert legend_of(axes) == ["margin, ±1%", "change, 95% interval", "called a change"]
    assert filled(axes) == [True, True]


def test_a_gain_that_is_undecided_for_whatever_reason_is_hollow(swept: Sweep) -> None:
    words = (str(ONE_BOOT), "undecided", "same", None, "slower", "worse")
    points = []
    for place, word in enumerate(words):
        first = swept.result.comparisons[0]
        row = replace(first.metrics["tpot_ms_p50"], verdict=word)
        points.append(replace(first, at={"concurrency": str(place)}, metrics={"tpot_ms_p50": row}))
    axes = figures.gains(with_points(swept, points)).axes[0]
    assert filled(axes) == [False, False, False, False, True, True]


def test_other_axes_are_panels(swept: Sweep) -> None:
    comparisons = [
        replace(each, at={**each.at, "variant": name})
        for name in ("one", "other")
        for each in swept.result.comparisons
    ]
    axes = [*swept.result.axes, Axis(name="variant", values=["one", "other"])]
    result = with_points(swept, comparisons, axes=axes)
    for draw in (figures.against, figures.frontier, figures.gains):
        titles = [panel.get_title(loc="left") for panel in draw(result).axes]
        assert titles == ["one", "other"]


def test_a_funnel_holds_nineteen_of_twenty() -> None:
    runs = [a_a(seed, 4 + 4 * (seed % 3), 0.005 * (1 + seed % 2)) for seed in range(400)]
    figure = drawn(lambda width: figures.funnel(runs[:24], width=width))
    axes = figure.axes[0]
    assert axes.get_xlabel() == "half-width of the 95% interval (%)"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"4 trials", "8 trials", "12 trials"} <= set(names)
    outside = int(figures.funnel(runs).axes[0].get_title(loc="left").split(": ")[1].split(" ")[0])
    assert 8 <= outside <= 34
    rows = [each.result.comparisons[0].metrics["tpot_ms_p50"] for each in runs]
    assert outside == sum(not row.ci_low <= 0 <= row.ci_high for row in rows)


def test_what_these_plots_cannot_draw_is_one_line(factored: Run, swept: Sweep) -> None:
    letters = with_points(
        swept,
        [replace(each, at={"x": "a"}) for each in swept.result.comparisons],
        axes=[Axis(name="x", values=["a"])],
    )
    plain = of_comparison(PLAIN)
    for draw, reason in (
        (lambda: figures.effects(plain), "is not a factorial, so it has no effects"),
        (lambda: figures.effects(factored, "tpot_ms_p5"), "did you mean tpot_ms_p"),
        (lambda: figures.gains(letters), "has no axis of numbers to draw along"),
        (lambda: figures.against(swept, "tpot_ms_p5"), "did you mean tpot_ms_p"),
        (lambda: figures.against(swept, axis="concurency"), "did you mean concurrency?"),
        (lambda: figures.against(swept, "goodput_req_s"), "was measured at no point"),
        (lambda: figures.funnel([plain]), "is not an A/A: a funnel takes runs of bench aa"),
        (lambda: figures.funnel([]), "there is no run of bench aa with an interval"),
        (
            lambda: figures.funnel([a_a(1, 8, 0.01), a_a(2, 8, 0.01, confidence=0.9975)]),
            "aa could stop early, its intervals are of 99.75%: a funnel takes runs of a fixed number",
        ),
    ):
        with pytest.raises(api.BadSetting, match=reason.replace("?", r"\?")):
            draw()


@pytest.mark.parametrize("name", figures.__all__)
def test_what_a_plot_is_drawn_of_is_said_where_it_gets_something_else(
    name: str, real: Run, swept: Sweep
) -> None:
    draw, of_sweep = getattr(figures, name), name in ("against", "frontier", "gains")
    wanted = "a run, from overlap_bench.load(FOLDER)"
    if of_sweep:
        wanted = "a sweep, from overlap_bench.load_sweep(FOLDER)"
    elif name == "sensitivity":
        wanted = "a sensitivity, from overlap_bench.load_sensitivity(FOLDER)"
    other = real if of_sweep else swept
    for given in ("results/a-run", PLAIN, other):
        with pytest.raises(api.BadSetting) as caught:
            draw([given] if name == "funnel" else given)
        assert str(caught.value) == f"this draws {wanted}, not a {type(given).__name__}"
