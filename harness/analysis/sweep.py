"""What a sweep found, from the runs in its folder: its result, and the sweep as one works with it in
Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pandas as pd

from overlap_bench.harness.analysis import frames
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.outputs import outputs_differ
from overlap_bench.harness.analysis.result import Axis, MetricRow, PointResult, SweepResult
from overlap_bench.harness.analysis.stored import result as result_of
from overlap_bench.harness.analysis.stored import so_far
from overlap_bench.harness.analysis.values import NoValue
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.store import sweep
from overlap_bench.harness.store.files import SCHEMA_VERSION, StoreError


def result(folder: Path) -> tuple[SweepResult, bool]:
    """A comparison for each point that is finished, or has two blocks, and whether outputs differ that must
    not. Raises StoreError where there is none."""
    planned = sweep.read(folder)
    stored = list(sweep.runs_in(folder))
    points: list[PointResult] = []
    differ = False
    done = 0
    left_out: list[str] = []
    for point in planned.points:
        found = sweep.run_of(point, stored)
        if found is None:
            continue
        finished = sweep.is_done(found[0])
        try:
            summary = result_of(*found) if finished else so_far(*found)
        except NoValue as error:
            left_out.append(f"{spelled(point.at)} is left out: {error}")
            continue
        if summary is None:
            continue
        done += finished
        differ = differ or (finished and outputs_differ(found[1], summary))
        points += [
            PointResult(
                **msgspec.structs.asdict(each),
                at=point.at,
                run=found[1].run,
                device=summary.device,
                requests=point.design.workload.num_requests,
            )
            for each in summary.comparisons
        ]
    if not points:
        why = "".join(f"{each}; " for each in left_out)
        raise StoreError(f"{folder} has no finished point: {why}go on with bench sweep --resume {folder}")
    most, goes_on = len(planned.points), len({each.run for each in points}) - done
    also = f"; {goes_on} shown as far as measured, without a verdict" if goes_on else ""
    found_in = SweepResult(
        schema_version=SCHEMA_VERSION,
        run=planned.sweep,
        device=", ".join(sorted({each.device for each in points})),
        stopped_because="; ".join(
            [f"all {most} points done" if done == most else f"{done} of {most} points done{also}", *left_out]
        ),
        axes=[Axis(name=axis.name, values=list(axis.values)) for axis in planned.axes],
        comparisons=points,
    )
    return found_in, differ


@dataclass(frozen=True)  # no slots: frames are kept
class Sweep:
    """The points of a sweep that are finished, or have two blocks. In the frames each axis is a column, of
    numbers where all its values are numbers."""

    folder: Path
    planned: sweep.Sweep
    result: SweepResult  # what `bench sweep --format json` prints

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.planned.axes)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The run of each finished point, in the order of `result.comparisons`."""
        return tuple(frames.load(self.folder / each.run) for each in self.result.comparisons)

    @cached_property
    def changes(self) -> pd.DataFrame:
        """One row per point and metric: the axes, run, kind of device, metric, confidence, unit, better,
        before, after, change, delta, ci_low, ci_high, sd, p, p_adjusted, verdict, floor, as in a
        comparison."""
        rows = [
            {
                "device": each.device,
                **each.at,
                "run": each.run,
                "metric": name,
                "confidence": each.confidence,
                **msgspec.structs.asdict(row),
            }
            for each in self.result.comparisons
            for name, row in each.metrics.items()
        ]
        return self._numbered(
            pd.DataFrame(rows)[[*self._about, "metric", "confidence", *MetricRow.__struct_fields__]]
        )

    @cached_property
    def values(self) -> pd.DataFrame:
        """Run.values of every point: the axes, run, kind of device, block, arm, and a float64 column per
        metric."""
        parts = [
            run.values.assign(**{"run": each.run, "device": each.device, **each.at})
            for run, each in zip(self.runs, self.result.comparisons, strict=True)
        ]
        joined = pd.concat(parts, ignore_index=True)
        others = (name for name in joined if name not in self._about)
        return self._numbered(joined[[*self._about, *others]])

    @property
    def _about(self) -> list[str]:
        """Columns that say which point a row is of; `device` may be an axis."""
        return list(dict.fromkeys([*self.axes, "run", "device"]))

    def _numbered(self, frame: pd.DataFrame) -> pd.DataFrame:
        numbers = {axis: pd.to_numeric(frame[axis], errors="coerce") for axis in self.axes}
        return frame.assign(**{axis: each for axis, each in numbers.items() if each.notna().all()})


def load(folder: str | Path) -> Sweep:
    """A stored sweep, finished or not. Raises StoreError."""
    path = Path(folder)
    return Sweep(path, sweep.read(path), result(path)[0])
