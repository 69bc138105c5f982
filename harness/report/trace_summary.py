"""A trace, or two, in ten lines: what takes longest or changed most, device by device and per step, and where
the devices stood still; of a profile, the host's phases too. Input is a `TraceResult`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from overlap_bench.harness.common.formatting import number, percent, signed
from overlap_bench.harness.report.page import Table
from overlap_bench.harness.trace.gaps import Gap
from overlap_bench.harness.trace.result import ProfileResult, Source, TraceResult

NAME_WIDTH = 70  # of a name in a table, longer ones lose their middle
# Lines of each kind, ten in all. The ranges of a profile are the phases of a step, and few; those of another
# trace may be every operator.
OF_DEVICES, OF_KERNELS, OF_CALLS, OF_GAPS = 3, 3, 2, 2
OF_PHASES = 10


@dataclass(frozen=True, slots=True)
class Line:
    """`before` and `after`: us, of a step where both traces mark their steps, else in all."""

    what: str
    device: str
    before: float | None
    after: float | None

    def weight(self, compared: bool) -> float:
        """What the most important line has most of: it changed most, or takes most."""
        before, after = self.before or 0.0, self.after or 0.0
        return abs(after - before) if compared else max(before, after)


def summary(result: TraceResult) -> Table:
    sources = [each for each in (result.before, result.after) if each is not None]
    steps = [each.steps for each in sources if each.steps]
    per_step = len(steps) == len(sources)
    phases = _of_part(result, "ranges", per_step) if isinstance(result, ProfileResult) else ()
    lines = [
        *_largest(_of_devices(result, per_step), OF_DEVICES, result.compared),
        *_largest(_of_part(result, "kernels", per_step), OF_KERNELS, result.compared),
        *_largest(_of_part(result, "calls", per_step), OF_CALLS, result.compared),
        *_largest(phases, OF_PHASES, result.compared),
        *_largest(_of_gaps(result), OF_GAPS, result.compared),
    ]
    counted = " and ".join(f"{count:,}" for count in steps)
    whole = f"us per step, of {counted} steps" if per_step else "us in all, for no steps are marked"
    title = f"What {'changed' if result.compared else 'takes'} most, {whole}"
    sides = ("us",) if result.after is None else ("before", "after")
    columns = ("", "device", *sides, *(("change",) if result.compared else ()))
    rows = tuple(_cells(each)[: len(columns)] for each in lines)
    note = "A gap is one, not per step. All tables: --all; every row: --format json."
    return Table(title, columns, rows, note, numbers=columns[2:])


def gap_table(result: TraceResult) -> Table:
    sides = {"before": result.before, "after": result.after}
    rows = tuple(
        (*((side,) if result.after else ()), gap.device, number(gap.at_ms), number(gap.length_us), gap.host)
        for side, source in sides.items()
        if source is not None
        for gap in source.gaps
    )
    columns = (*(("trace",) if result.after else ()), "device", "at_ms", "us", "host")
    note = "When a device had nothing to do, longest first, and what the thread did that launched next."
    return Table("Longest gaps", columns, rows, note, numbers=("at_ms", "us"))


def _largest(lines: Iterable[Line], most: int, compared: bool) -> list[Line]:
    return sorted(lines, key=lambda line: line.weight(compared), reverse=True)[:most]


def _cells(line: Line) -> tuple[str, ...]:
    """All that can be said of it, the change last."""
    change = ""
    if line.before is not None and line.after is not None:
        share = f", {percent(line.after / line.before - 1)}" if line.before else ""
        change = signed(line.after - line.before) + share
    return shortened(line.what), line.device, number(line.before), number(line.after), change


def _of_devices(result: TraceResult, per_step: bool) -> Iterator[Line]:
    for row in result.parts["devices"].rows:
        for measure, what in (("busy_ms", "busy"), ("idle_ms", "idle")):
            value = row.values[measure]
            sides = _sides(result, value.before, value.after, per_step)
            yield Line(what, row.key[0], *sides)


def _of_part(result: TraceResult, part: str, per_step: bool) -> Iterator[Line]:
    for row in result.parts[part].rows:
        value = row.values["total_ms"]
        device = row.key[0] if row.key[1:] else ""
        yield Line(row.key[-1], device, *_sides(result, value.before, value.after, per_step))


def _sides(
    result: TraceResult, before: float | None, after: float | None, per_step: bool
) -> tuple[float | None, float | None]:
    """us from ms, of a step where that is asked."""

    def of(source: Source | None, ms: float | None) -> float | None:
        if source is None or ms is None:
            return None
        return 1e3 * ms / (source.steps or 1 if per_step else 1)

    return of(result.before, before), of(result.after, after)


def _of_gaps(result: TraceResult) -> Iterator[Line]:
    """The longest gap of each device on each side, and what the host did in the longer one."""
    longest = [_longest(source) for source in (result.before, result.after) if source is not None]
    for device in dict.fromkeys(device for side in longest for device in side):
        found = [side.get(device) for side in longest]
        host = max((gap for gap in found if gap is not None), key=lambda gap: gap.length_us).host
        lengths = [None if gap is None else gap.length_us for gap in found]
        yield Line(f"longest gap, host: {host}", device, lengths[0], lengths[1] if lengths[1:] else None)


def _longest(source: Source) -> dict[str, Gap]:
    found: dict[str, Gap] = {}
    for gap in source.gaps:
        found.setdefault(gap.device, gap)
    return found


def shortened(name: str) -> str:
    """A name that fits: its beginning and its end."""
    if len(name) <= NAME_WIDTH:
        return name
    half = (NAME_WIDTH - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
