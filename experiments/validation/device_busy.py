"""How busy the emulated device is in steady decode, and what is left to hide.

    python -m experiments.validation.device_busy

tiny-gpt2, fp32, closed batch of 1, 8 and 32, 128 tokens each, three boots per setting, in turn. Busy is the
union of executing programs over wall time; a device that waits for a command is idle; copies are not busy.
The first and last eight steps of a round are left out.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from experiments.common import command_line
from experiments.common.record import write_result
from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.engine import OverlapEngine
from tests.support.in_process_engine import Collected

SETTINGS = {
    "all befores": {"schedule": "serial", "h2d": "pageable", "d2h": "blocking", "graph": "on"},
    "serial, other afters": {"schedule": "serial", "h2d": "packed", "d2h": "event", "graph": "on"},
    "overlap, forward thread": {
        "schedule": "overlap",
        "launch": "thread",
        "sync": "copy-done",
        "h2d": "packed",
        "graph": "on",
    },
    "all afters": {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"},
}
BATCHES = (1, 8, 32)
BOOTS = 3
TOKENS = 128
EDGE = 8


def busy(work: np.ndarray) -> tuple[float, float]:
    """(busy fraction, mean gap between programs in microseconds) of int64 rows (kind, step, start, end)."""
    programs = work[work[:, 0] == 0]
    steps = np.unique(programs[:, 1])
    steady = programs[(programs[:, 1] > steps[EDGE]) & (programs[:, 1] < steps[-EDGE])]
    steady = steady[np.argsort(steady[:, 2])]
    executing = (steady[:, 3] - steady[:, 2]).sum()
    wall = steady[-1, 3] - steady[0, 2]
    return executing / wall, (wall - executing) / (len(steady) - 1) / 1e3


def serve(engine: OverlapEngine, sink: Collected, batch: int) -> np.ndarray:
    """The device's work in one round."""
    sink.events.clear()
    sink.ended = 0
    engine.begin_round()
    for row in range(batch):
        engine.submit(api.Request(row, [row + 5, 6, 7], TOKENS))
    engine.run(lambda _: sink.ended < batch)
    record = engine.collect()
    assert record.device_work is not None
    return np.frombuffer(record.device_work.data, dtype=np.int64).reshape(-1, 4)


def one_boot(settings: dict[str, str]) -> dict[int, tuple[float, float]]:
    engine, sink = OverlapEngine(api.EngineOptions(device="emulated"), SPEC.check(settings)), Collected()
    engine.start(sink)
    found = {}
    for batch in BATCHES:
        serve(engine, sink, batch)  # warms up
        found[batch] = busy(serve(engine, sink, batch))
    engine.stop()
    return found


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    boots: dict[str, list[dict[int, tuple[float, float]]]] = {name: [] for name in SETTINGS}
    for _ in range(BOOTS):
        for name, settings in SETTINGS.items():
            boots[name].append(one_boot(settings))
    rows = []
    for name, found in boots.items():
        cells = [name]
        for batch in BATCHES:
            fraction, gap = (median(each[batch][part] for each in found) for part in (0, 1))
            cells.append(f"{fraction:.1%} ({gap:.0f} us)")
        rows.append(cells)
    write_result(
        __file__,
        title="Device busy in steady decode, and the mean gap between two programs; median of three boots",
        header=["setting", *(f"batch {batch}" for batch in BATCHES)],
        rows=rows,
        data={
            name: [{str(b): v for b, v in each.items()} for each in found] for name, found in boots.items()
        },
    )


if __name__ == "__main__":
    main()
