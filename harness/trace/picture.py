"""A few steps before above the same few steps after: host and device lanes, one time scale.

Each panel starts where the device starts one of its steps; a line marks every such start, with the time from
the one before. Boxes are ranges, as wide as they took. White paper, and colours that stay apart in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.trace.timeline import DEVICE, LOAD, PHASE, Range, Timeline, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 3
WIDTH, LANE, ABOVE = 13.0, 0.46, 1.05  # inches: of the picture, of a lane, of a panel's title and axis
MARGIN = 0.18  # of a panel's time, left of its first step: what the host does ahead of it
NAME_WIDTH = 0.0088  # of the panel's time that a letter takes, below which a box has no name
HAIRLINE = 0.0006  # of the panel's time: what is shorter is drawn as wide, or it would be invisible

COLOURS = {
    "recv": "#c7b9e6",
    "schedule": "#8e6bbf",
    "metadata": "#e78ac3",
    "h2d": "#f0a202",
    "launch": "#d1495b",
    "wait.launch_done": "#ececec",
    "wait.copy_done": "#ececec",
    "append": "#66a182",
    "output": "#2e6f4e",
    "send": "#444444",
    "d2h": "#7a5c00",
    "decode": "#5b8fc7",
    "prefill": "#1f4e79",
    "program": "#5b8fc7",
}
DARK = {"schedule", "launch", "output", "prefill", "d2h"}  # that want white letters
OTHER = "#b0b0b0"


class Shown(msgspec.Struct, frozen=True):
    """One panel: a timeline, what is said of it, and where it starts."""

    timeline: Timeline
    title: str
    start_ns: int
    steps: tuple[int, ...]


def draw(panels: Sequence[tuple[Timeline, str]], heading: str, files: Sequence[Path]) -> None:
    """Draw timelines, each with its title, below each other into each of `files` (.png, .svg). Raises
    ValueError where one has no program of the device."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [_chosen(timeline, title) for timeline, title in panels]
    span = max(_end(each) - each.start_ns for each in shown)
    lanes = [_lanes(each, span) for each in shown]
    heights = [ABOVE + LANE * len(each) for each in lanes]
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(
            len(shown), figsize=(WIDTH, sum(heights) + 0.75), height_ratios=heights, squeeze=False
        )
        for axis, each, own in zip(axes[:, 0], shown, lanes, strict=True):
            _draw_panel(axis, each, own, span)
        axes[-1, 0].set_xlabel("ms from the start of a step on the device; the same scale in each panel")
        names = [name for name in COLOURS if any(_has(each, name, span) for each in shown)]
        figure.legend(
            handles=[_patch(name) for name in names],
            loc="lower center",
            ncols=len(names),
            frameon=False,
            handlelength=1.1,
            columnspacing=1.2,
        )
        figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1), h_pad=1.2)
        for file in files:
            figure.savefig(file, dpi=110, facecolor="white")
        pyplot.close(figure)


def _chosen(timeline: Timeline, title: str) -> Shown:
    """STEPS steps from the middle of the window, and where the device starts the first of them."""
    starts = _step_starts(timeline)
    if not starts:
        raise ValueError(f"the device did nothing in the window of {timeline.arm}")
    steps = sorted(starts)
    first = max(0, (len(steps) - STEPS) // 2)
    chosen = tuple(steps[first : first + STEPS + 1])  # one more, where the last one ends
    return Shown(timeline, title, starts[chosen[0]], chosen)


def _step_starts(timeline: Timeline) -> dict[int, int]:
    """When the device starts the program of each step."""
    starts: dict[int, int] = {}
    for each in timeline.ranges:
        track = timeline.tracks[each.track]
        if track.category == DEVICE and each.name not in ("h2d", "d2h"):
            step = int(each.facts["step"])
            starts[step] = min(starts.get(step, each.start_ns), each.start_ns)
    return starts


def _end(shown: Shown) -> int:
    """Where the last of its steps ends: the next one starts, or its own program ends."""
    if len(shown.steps) > STEPS:
        return _step_starts(shown.timeline)[shown.steps[STEPS]]
    return max(each.end_ns for each in shown.timeline.ranges if each.facts.get("step") in shown.steps)


def _lanes(shown: Shown, span: int) -> list[tuple[Track, list[Range]]]:
    """Tracks that have something to show, host above device, with their ranges; outer ones first."""
    first, last = shown.start_ns - round(MARGIN * span), shown.start_ns + span
    lanes: list[tuple[Track, list[Range]]] = []
    for index, track in enumerate(shown.timeline.tracks):
        own = [
            each
            for each in shown.timeline.ranges
            if each.track == index and each.start_ns < last and each.end_ns > first
        ]
        if own and track.category != LOAD:
            lanes.append((track, sorted(own, key=lambda each: (each.start_ns, -each.end_ns))))
    order = {PHASE: 0, DEVICE: 1}
    return sorted(lanes, key=lambda lane: order[lane[0].category])


def _has(shown: Shown, name: str, span: int) -> bool:
    return any(each.name == name for _, own in _lanes(shown, span) for each in own)


def _patch(name: str) -> object:
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS[name], edgecolor="#555555", linewidth=0.4, label=name)


def _draw_panel(axis: Axes, shown: Shown, lanes: Sequence[tuple[Track, list[Range]]], span: int) -> None:
    ms = span / 1e6
    axis.set_xlim(-MARGIN * ms, ms * 1.005)
    axis.set_ylim(len(lanes) - 0.4, -0.95)
    axis.set_yticks(range(len(lanes)), [_lane_name(track) for track, _ in lanes])
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_title(shown.title, loc="left", fontsize=10, pad=4)
    for row, (track, own) in enumerate(lanes):
        axis.axhspan(row - 0.38, row + 0.38, color="#f6f6f6" if track.category == PHASE else "#eef3f8", lw=0)
        for each in own:
            _draw_range(axis, row, each, shown, ms)
    _draw_steps(axis, shown, len(lanes))
    _draw_arrows(axis, shown, [track for track, _ in lanes])


def _lane_name(track: Track) -> str:
    if track.category == DEVICE:
        return f"{track.process}\n{track.thread}"
    return track.thread if track.process == "engine" else track.process


def _draw_range(axis: Axes, row: int, each: Range, shown: Shown, ms: float) -> None:
    left = (each.start_ns - shown.start_ns) / 1e6
    width = max((each.end_ns - each.start_ns) / 1e6, HAIRLINE * ms)
    waits = each.name.startswith("wait.")
    axis.barh(
        row,
        width,
        left=left,
        height=0.42 if waits else 0.7,
        color=COLOURS.get(each.name, OTHER),
        edgecolor="#999999" if waits else "#333333",
        linewidth=0.4,
        hatch="////" if waits else None,
        zorder=2 if waits else 3,
    )
    seen_left, seen_right = max(left, -MARGIN * ms), min(left + width, ms)
    for text in _names(each):
        if len(text) * NAME_WIDTH * ms * (1 + MARGIN) < seen_right - seen_left:
            axis.text(
                (seen_left + seen_right) / 2,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if each.name in DARK else "black",
                zorder=5,
                bbox={"facecolor": COLOURS[each.name], "edgecolor": "none", "pad": 0.6} if waits else None,
            )
            break


def _names(each: Range) -> tuple[str, ...]:
    """What may stand in its box, the longest first."""
    step = each.facts.get("step", "")
    short = each.name.removeprefix("wait.")
    if "batch" in each.facts:
        return (f"{each.name}, step {step}, batch {each.facts['batch']}", f"step {step}", str(step))
    return (f"{each.name} {step}", each.name, short)


def _draw_steps(axis: Axes, shown: Shown, lanes: int) -> None:
    """A line where the device starts a step, and what lies between two of them."""
    starts = _step_starts(shown.timeline)
    at = [(starts[step] - shown.start_ns) / 1e6 for step in shown.steps]
    for each in at:
        axis.vlines(each, -0.5, lanes - 0.5, color="#1f4e79", linewidth=0.8, linestyle=(0, (4, 2)), zorder=4)
    for left, right in pairwise(at):
        axis.annotate(
            "",
            (left, -0.62),
            (right, -0.62),
            arrowprops={"arrowstyle": "<->", "color": "#1f4e79", "lw": 0.8, "shrinkA": 0, "shrinkB": 0},
        )
        axis.text(
            (left + right) / 2,
            -0.62,
            f" {right - left:.2f} ms ",
            ha="center",
            va="center",
            fontsize=8,
            color="#1f4e79",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def _draw_arrows(axis: Axes, shown: Shown, tracks: Sequence[Track]) -> None:
    """Of the steps that are shown: from launch to program, from the ids to whoever waits for them."""
    rows: Mapping[Track, int] = {track: row for row, track in enumerate(tracks)}
    timeline = shown.timeline
    for arrow in timeline.arrows:
        start, end = timeline.tracks[arrow.from_track], timeline.tracks[arrow.to_track]
        if arrow.step not in shown.steps or start not in rows or end not in rows:
            continue
        down = rows[end] > rows[start]
        axis.annotate(
            "",
            ((arrow.to_ns - shown.start_ns) / 1e6, rows[end] + (-0.36 if down else 0.36)),
            ((arrow.from_ns - shown.start_ns) / 1e6, rows[start] + (0.36 if down else -0.36)),
            arrowprops={"arrowstyle": "-|>", "color": "#222222", "lw": 0.7, "mutation_scale": 7},
            annotation_clip=True,
            zorder=6,
        )
