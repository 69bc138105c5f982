"""A few steps before above the same few steps after: host and device lanes, one time scale.

A line marks where the device starts each step. The steps are those in a row that are nearest to the window's
median step. Right of them, larger, the host's part of one: from the end of a wait for ids to the end of the
launch behind it, the median of these. Boxes are ranges, as wide as they took; colours stay apart in grey.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlap_bench.harness.trace.timeline import COPIES, DEVICE, LOAD, PHASE, Range, Timeline, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 3
WIDTH, LANE, ABOVE = 14.0, 0.46, 1.05  # inches: of the picture, of a lane, of a panel's title and axis
PARTS = 2.4  # how wide the steps are, where the host's part is 1
AHEAD, AROUND = 0.06, 0.08  # of the steps' time, and of the host's part: so much more is shown at both ends
LETTER = 0.0050  # of the picture's width; a box too narrow for its name has none
HAIRLINE = 0.0005  # of the picture's width: a narrower box is drawn this wide, or it would be invisible

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
    "mixed": "#3b74a8",
    "prefill": "#1f4e79",
    "program": "#5b8fc7",
}
DARK = {"schedule", "launch", "output", "mixed", "prefill", "d2h"}  # that want white letters
OTHER, INK = "#b0b0b0", "#1f4e79"


class Extract(msgspec.Struct, frozen=True):
    """A part of a timeline, [first_ns, last_ns]; 0 of its axis is at zero_ns."""

    first_ns: int
    zero_ns: int
    last_ns: int

    def ms(self, ns: int) -> float:
        return (ns - self.zero_ns) / 1e6

    def widened(self, share: float, ns: int) -> Extract:
        """As long as `ns`, and a share of that more at both ends."""
        more = round(share * ns)
        return Extract(self.first_ns - more, self.zero_ns, self.first_ns + ns + more)

    def holds(self, each: Range) -> bool:
        return each.start_ns < self.last_ns and each.end_ns > self.first_ns


class Shown(msgspec.Struct, frozen=True):
    """What is shown of one timeline: `few` of its steps, and one step's part of the `host`."""

    timeline: Timeline
    title: str
    starts_ns: tuple[int, ...]  # of one step more than is shown, where the last one ends
    few: Extract
    host: Extract | None  # where no launch was recorded


Lane = tuple[Track, list[Range]]


def draw(panels: Sequence[tuple[Timeline, str]], heading: str, files: Sequence[Path]) -> None:
    """Draw timelines, each with its title, below each other into each of `files` (.png, .svg). Raises
    ValueError where one has no program of the device."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [_chosen(timeline, title) for timeline, title in panels]
    few = max(each.few.last_ns - each.few.first_ns for each in shown)
    hosts = [each.host for each in shown if each.host is not None]
    host = max((each.last_ns - each.first_ns for each in hosts), default=few)
    wide = [
        (each.few.widened(AHEAD, few), *([each.host.widened(AROUND, host)] if each.host is not None else []))
        for each in shown
    ]
    lanes = [_lanes(each.timeline, extracts) for each, extracts in zip(shown, wide, strict=True)]
    heights = [ABOVE + LANE * len(each) for each in lanes]
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(
            len(shown),
            2,
            figsize=(WIDTH, sum(heights) + 0.75),
            height_ratios=heights,
            width_ratios=(PARTS, 1),
            squeeze=False,
        )
        for (left, right), each, extracts, own in zip(axes, shown, wide, lanes, strict=True):
            _draw_lanes(left, each.timeline, own, extracts[0], PARTS / (PARTS + 1))
            starts = [each.few.ms(ns) for ns in each.starts_ns]
            left.vlines(starts, -0.5, len(own) - 0.5, INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=4)
            for one, next_one in pairwise(starts):
                _draw_length(left, one, next_one)
            if each.host is None:
                right.text(0.5, 0.5, "no launch was recorded", ha="center", transform=right.transAxes)
            else:
                _draw_lanes(right, each.timeline, own, extracts[1], 1 / (PARTS + 1))
                _draw_length(right, 0, each.host.ms(each.host.last_ns))
            left.set_yticks(range(len(own)), [_lane_name(track) for track, _ in own])
            right.set_yticks([])
            left.set_title(each.title, loc="left", fontsize=10, pad=4)
            right.set_title("the host's part of a step", loc="left", fontsize=9, pad=4)
        axes[-1, 0].set_xlabel("ms from the start of a step on the device; one scale for all panels")
        axes[-1, 1].set_xlabel("ms from the end of a wait; one scale, larger")
        drawn = {each.name for own in lanes for _, ranges in own for each in ranges}
        names = [name for name in COLOURS if name in drawn]
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
            figure.savefig(file, dpi=100, facecolor="white")
        pyplot.close(figure)


def _chosen(timeline: Timeline, title: str) -> Shown:
    """What is typical of a timeline."""
    starts = _step_starts(timeline)
    steps = sorted(starts)
    if len(steps) < 2:
        raise ValueError(f"the device did nothing in the window of {timeline.arm}")
    count = min(STEPS, len(steps) - 1)
    runs = [steps[first : first + count + 1] for first in range(len(steps) - count)]
    median = statistics.median_low([starts[right] - starts[left] for left, right in pairwise(steps)])
    typical = min(
        runs,
        key=lambda run: sum(abs(starts[right] - starts[left] - median) for left, right in pairwise(run)),
    )
    few = Extract(starts[typical[0]], starts[typical[0]], starts[typical[-1]])
    at = tuple(starts[step] for step in typical)
    return Shown(timeline, title, at, few, _host_part(timeline))


def _host_part(timeline: Timeline) -> Extract | None:
    """From the end of a wait for a step's ids to the end of the launch of the step that is scheduled next."""
    launched = {each.facts["step"]: each.end_ns for each in timeline.ranges if each.name == "launch"}
    scheduled = sorted(
        (each.start_ns, each.facts["step"]) for each in timeline.ranges if each.name == "schedule"
    )
    waits = sorted(each.end_ns for each in timeline.ranges if each.name == "wait.copy_done")
    parts = []
    for wait, next_wait in pairwise([*waits, timeline.closed_ns]):
        step = next((step for start, step in scheduled if wait <= start < next_wait), None)
        if step in launched:
            parts.append((launched[step] - wait, wait))
    if not parts:
        return None
    length, start = sorted(parts)[(len(parts) - 1) // 2]
    return Extract(start, start, start + length)


def _step_starts(timeline: Timeline) -> dict[int, int]:
    """When the device starts the program of each step."""
    starts: dict[int, int] = {}
    for each in timeline.ranges:
        track = timeline.tracks[each.track]
        if track.category == DEVICE and each.name not in COPIES:
            step = int(each.facts["step"])
            starts[step] = min(starts.get(step, each.start_ns), each.start_ns)
    return starts


def _lanes(timeline: Timeline, extracts: Sequence[Extract]) -> list[Lane]:
    """Tracks that have something to show, host above device, with their ranges; outer ones first."""
    lanes: list[Lane] = []
    for index, track in enumerate(timeline.tracks):
        own = [
            each
            for each in timeline.ranges
            if each.track == index and any(extract.holds(each) for extract in extracts)
        ]
        if own and track.category != LOAD:
            lanes.append((track, sorted(own, key=lambda each: (each.start_ns, -each.end_ns))))
    order = {PHASE: 0, DEVICE: 1}
    return sorted(lanes, key=lambda lane: order[lane[0].category])


def _patch(name: str) -> object:
    from matplotlib.patches import Patch

    hatch = "////" if name.startswith("wait.") else None
    return Patch(facecolor=COLOURS[name], edgecolor="#777777", linewidth=0.4, label=name, hatch=hatch)


def _draw_lanes(
    axis: Axes, timeline: Timeline, lanes: Sequence[Lane], extract: Extract, share: float
) -> None:
    """One panel, as wide as `share` of the picture."""
    axis.set_xlim(extract.ms(extract.first_ns), extract.ms(extract.last_ns))
    axis.set_ylim(len(lanes) - 0.4, -0.95)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    for row, (track, own) in enumerate(lanes):
        axis.axhspan(row - 0.38, row + 0.38, color="#f6f6f6" if track.category == PHASE else "#eef3f8", lw=0)
        for each in own:
            if extract.holds(each):
                _draw_range(axis, row, each, extract, share)
    _draw_arrows(axis, timeline, [track for track, _ in lanes], extract)


def _lane_name(track: Track) -> str:
    if track.category == DEVICE:
        return f"{track.process}\n{track.thread}"
    return track.thread if track.process == "engine" else track.process


def _draw_range(axis: Axes, row: int, each: Range, extract: Extract, share: float) -> None:
    whole = extract.ms(extract.last_ns) - extract.ms(extract.first_ns)
    left = extract.ms(each.start_ns)
    width = max(extract.ms(each.end_ns) - left, HAIRLINE / share * whole)
    waits = each.name.startswith("wait.")
    fill = COLOURS.get(each.name, OTHER)
    axis.barh(
        row,
        width,
        left=left,
        height=0.42 if waits else 0.7,
        color=fill,
        edgecolor="#999999" if waits else "#333333",
        linewidth=0.4,
        hatch="////" if waits else None,
        zorder=2 if waits else 3,
    )
    seen_left = max(left, extract.ms(extract.first_ns))
    seen_right = min(left + width, extract.ms(extract.last_ns))
    for text in _names(each):
        if len(text) * LETTER / share * whole < seen_right - seen_left:
            axis.text(
                (seen_left + seen_right) / 2,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if each.name in DARK else "black",
                zorder=5,
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.6} if waits else None,
            )
            break


def _names(each: Range) -> tuple[str, ...]:
    """What may stand in its box, the longest first."""
    step = each.facts.get("step", "")
    short = each.name.removeprefix("wait.")
    if "batch" in each.facts:
        return (f"{each.name}, step {step}, batch {each.facts['batch']}", f"step {step}", str(step))
    return (f"{each.name} {step}", each.name, short)


def _draw_length(axis: Axes, left: float, right: float) -> None:
    """Above the lanes, from where to where, and how long that is."""
    axis.annotate(
        "",
        (left, -0.62),
        (right, -0.62),
        arrowprops={"arrowstyle": "<->", "color": INK, "lw": 0.8, "shrinkA": 0, "shrinkB": 0},
    )
    axis.text(
        (left + right) / 2,
        -0.62,
        f" {right - left:.2f} ms ",
        ha="center",
        va="center",
        fontsize=8,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )


def _draw_arrows(axis: Axes, timeline: Timeline, tracks: Sequence[Track], extract: Extract) -> None:
    """To programs, from ids to whoever waits for them, to the output process. Copies have none: too many."""
    rows: Mapping[Track, int] = {track: row for row, track in enumerate(tracks)}
    for arrow in timeline.arrows:
        start, end = timeline.tracks[arrow.from_track], timeline.tracks[arrow.to_track]
        if start not in rows or end not in rows or arrow.name in COPIES:
            continue
        if arrow.to_ns > extract.last_ns or arrow.from_ns < extract.first_ns:
            continue
        down = rows[end] > rows[start]
        axis.annotate(
            "",
            (extract.ms(arrow.to_ns), rows[end] + (-0.36 if down else 0.36)),
            (extract.ms(arrow.from_ns), rows[start] + (0.36 if down else -0.36)),
            arrowprops={"arrowstyle": "-|>", "color": "#222222", "lw": 0.7, "mutation_scale": 7},
            zorder=6,
        )
