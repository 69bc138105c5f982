"""What a sweep found, from the runs in its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.analysis.outputs import outputs_differ
from harness.analysis.result import Axis, PointResult, SweepResult
from harness.analysis.stored import result as result_of
from harness.store.files import SCHEMA_VERSION, StoreError
from harness.store.sweep import is_done, read, run_of, runs_in


def result(folder: Path) -> tuple[SweepResult, bool]:
    """A comparison for each finished point, and whether outputs differ that must not. Raises StoreError where
    nothing is finished."""
    planned = read(folder)
    stored = list(runs_in(folder))
    points: list[PointResult] = []
    differ = False
    for point in planned.points:
        found = run_of(point, stored)
        if found is None or not is_done(found[0]):
            continue
        summary = result_of(*found)
        differ = differ or outputs_differ(found[1], summary)
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
        raise StoreError(f"{folder} has no finished point; go on with bench sweep --resume {folder}")
    done, most = len({each.run for each in points}), len(planned.points)
    found_in = SweepResult(
        schema_version=SCHEMA_VERSION,
        run=planned.sweep,
        device=", ".join(sorted({each.device for each in points})),
        stopped_because=f"all {most} points done" if done == most else f"{done} of {most} points done",
        axes=[Axis(name=axis.name, values=list(axis.values)) for axis in planned.axes],
        comparisons=points,
    )
    return found_in, differ
