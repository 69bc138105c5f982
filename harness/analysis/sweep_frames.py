"""A stored sweep as one works with it in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pandas as pd

from harness.analysis import frames
from harness.analysis import sweep as sweep_
from harness.analysis.frames import Run
from harness.analysis.result import MetricRow, SweepResult
from harness.store import sweep


@dataclass(frozen=True)  # no slots: frames are kept
class Sweep:
    """The finished points of a sweep. In the frames each axis is a column, of numbers where all its values
    are numbers."""

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
        """One row per point and metric: the axes, run, kind of device, metric, unit, better, before, after,
        change, delta, ci_low, ci_high, sd, p, p_adjusted, verdict, floor, as in a comparison."""
        rows = [
            {"device": each.device, **each.at, "run": each.run, "metric": name, **msgspec.structs.asdict(row)}
            for each in self.result.comparisons
            for name, row in each.metrics.items()
        ]
        return self._numbered(pd.DataFrame(rows)[[*self._about, "metric", *MetricRow.__struct_fields__]])

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
        numbers: Mapping[str, pd.Series] = {
            axis: pd.to_numeric(frame[axis]) for axis in self.axes if numeric(frame[axis])
        }
        return frame.assign(**numbers)


def numeric(values: pd.Series) -> bool:
    """Whether all of these texts are numbers."""
    return bool(pd.to_numeric(values, errors="coerce").notna().all())


def load(folder: str | Path) -> Sweep:
    """A stored sweep, finished or not. Raises StoreError."""
    path = Path(folder)
    return Sweep(path, sweep.read(path), sweep_.result(path)[0])
