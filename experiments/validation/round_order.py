"""How much of a machine's changing speed the order of the rounds leaves between two equal arms.

    python -m experiments.validation.round_order [SECONDS]    400 by default

For so long, one core does the same computation over and over (about 8 ms each), and another is kept half
busy, as the host's is in a run. Two arms are then laid over the record: they take turns in rounds of a given
length, 35 ms apart, for 10 s, as in a block; the effect that is found between them should be 0. The blocks
begin at every second of the record. `alternating`: first, second, first, second; `turned`: every other pair
of rounds the other way; `drawn`: each pair by a coin.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.common import command_line
from experiments.common.record import write_result

Floats = NDArray[np.float64]
BLOCK_S, GAP_S, GRID_S = 10.0, 0.035, 0.01
LENGTHS_S = (0.9, 0.45, 0.3, 0.2, 0.1)  # the default workload's rounds take 0.3 to 0.5 s
HALF_BUSY = """
import time
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.001: pass
    time.sleep(0.001)
"""
# Of so many pairs of rounds: 1 where the second arm goes first.
Order = Callable[[np.random.Generator, int], NDArray[np.int64]]
ORDERS: dict[str, Order] = {
    "alternating": lambda random, pairs: np.zeros(pairs, dtype=np.int64),
    "turned": lambda random, pairs: np.arange(pairs) % 2,
    "drawn": lambda random, pairs: random.integers(0, 2, pairs),
}


def record(seconds: float) -> Floats:
    """The log of how long the computation took, at every GRID_S, its mean subtracted."""
    usable = os.sched_getaffinity(0)
    host, *_, device = sorted(usable)
    torch.set_num_threads(1)
    layers, state = [torch.randn(512, 512) for _ in range(48)], torch.randn(16, 512)
    began, took = [], []
    busy = subprocess.Popen(["taskset", "-c", str(host), sys.executable, "-c", HALF_BUSY])
    try:
        os.sched_setaffinity(0, {device})
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            values = state
            for layer in layers:
                values = torch.relu(values @ layer) * 0.05
            began.append(now)
            took.append(time.perf_counter() - now)
    finally:
        busy.kill()
        busy.wait()
    os.sched_setaffinity(0, usable)
    times = np.array(began) - began[0]
    speeds = np.interp(np.arange(0.0, times[-1], GRID_S), times, np.log(took))
    return np.asarray(speeds - speeds.mean())


def left_between(speeds: Floats, length_s: float, order: Order) -> float:
    """RMS over blocks of the difference between the arms' mean logs."""
    random, summed = np.random.default_rng(0), np.concatenate([[0.0], speeds.cumsum()])
    pairs = int(BLOCK_S / (2 * (length_s + GAP_S)))
    found = []
    for start in np.arange(0.0, len(speeds) * GRID_S - BLOCK_S, 1.0):
        turned = order(random, pairs)
        begins = start + np.arange(2 * pairs) * (length_s + GAP_S)
        low, high = (np.round(at / GRID_S).astype(int) for at in (begins, begins + length_s))
        first, second = ((summed[high] - summed[low]) / (high - low)).reshape(-1, 2).T
        found.append(float(np.mean(np.where(turned, first - second, second - first))))
    return float(np.sqrt(np.mean(np.square(found))))


def main() -> None:
    speeds = record(command_line.wanted(__file__, __doc__, "SECONDS", 400))
    found = {
        length: {name: left_between(speeds, length, order) for name, order in ORDERS.items()}
        for length in LENGTHS_S
    }
    near = found[LENGTHS_S[1]]
    write_result(
        __file__,
        title=f"A core whose speed has an SD of {speeds.std():.1%}, and two equal arms on it: rounds that "
        f"alternate leave {near['alternating']:.2%} between them, in turned order {near['turned']:.2%}",
        header=["length of a round", *ORDERS],
        rows=[
            [f"{length:g} s", *(f"{value:.2%}" for value in of_length.values())]
            for length, of_length in found.items()
        ],
        data={f"{length:g}": of_length for length, of_length in found.items()},
    )


if __name__ == "__main__":
    main()
