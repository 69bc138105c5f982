"""An engine's host work beside a device's pace: what a decode step takes, for many paces in one boot.

    python -m experiments.validation.paced_step vllm|sglang PYTHON FOLDER [--trials 3] [--minutes 60]

PYTHON is an interpreter that has the engine. A trial boots it twice, one step at a time and one step ahead
(vLLM's async scheduling, SGLang's overlap), scheduler and host in one process. At each batch the pace changes
every few steps, in an order that is drawn anew for each cycle: 0 (the host's work alone), and from a quarter
of that work to four times as much. Each boot is kept in FOLDER as it ends, and a call goes on with what is
missing until its minutes are over.

One at a time, a step should take the host's work and the device's together, but for what the host still
launches (the sampler, copies) once the graph is replayed: that runs beside the device. One ahead, it should
take the larger of the two; the lines below the first table say whether it does, within 1%, where the two are
apart. The second table has what each phase takes where the device takes twice as long as the host. Each step
is held against the host's work of the same cycle, which takes 0.1 to 2 s: a ratio is the trimmed mean of a
boot's cycles, and the median of trials is shown.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

from experiments.common.command_line import ROOT, parser

BATCHES = (1, 16, 64, 256)
SHARES = (0.0, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of the host's work: the device's
ALONE, TWICE = "share 0.0", "share 2.0"
CYCLES = 24
STEPS = 12  # of each pace in a cycle
AT_ONCE = 64  # paces of the same requests, whose context ends
SETTLED = 4  # of them that do not count: what is in flight, and how warm the caches are, is the last pace's
PHASES = ("schedule", "metadata", "launch", "append", "output")
MODES = ("off", "on")  # one step at a time, one step ahead
TOGGLES = {
    "vllm": {mode: {"async_scheduling": mode, "multiprocessing": "off"} for mode in MODES},
    "sglang": {"off": {"schedule": "normal"}, "on": {"schedule": "overlap"}},
}
APART = (0.7, 1.4)  # host/device: up to the one, from the other on, overlap hides the smaller whole
WITHIN = 0.01
HOST = "host"  # the boot that finds the host's work by batch, all its paces 0


@dataclass
class Sink:
    """Takes events, and counts requests that ended."""

    address: str = ""
    ended: int = 0

    def send(self, events: Sequence[Any]) -> None:
        self.ended += sum(type(each).__name__ == "Finish" for each in events)


def child(name: str, mode: str, seed: int, host_us: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Every setting in one boot of the engine, in this interpreter. `host_us`: the host's work by batch, or
    {}."""
    from overlap_bench.engines import api
    from overlap_bench.engines.pace import Size, make_pace

    options = api.EngineOptions(
        model="llama3-8b",
        dtype="bfloat16",
        max_context=2048,
        max_batch_size=256,
        pace="0ns",
        stream_interval=1,
    )
    package = f"overlap_bench.engines.{name}"
    spec = import_module(package).SPEC
    toggles = spec.check({**spec.paced_toggles, **TOGGLES[name][mode]})
    engine: Any = import_module(f"{package}.engine").build(options, toggles)
    sink = Sink()
    engine.start(sink)
    device = import_module(f"{package}.paced").own_device() if name == "vllm" else engine._card

    def run(batch: int, paces: Sequence[str]) -> list[dict[str, int]]:
        """The records of decode steps of a batch, the pace another one every STEPS steps."""
        sink.ended = passed = 0
        engine.begin_round()
        for row in range(batch):
            prompt = [300 + (row * 37 + at * 11) % 3000 for at in range(32)]
            engine.submit(api.Request(row, prompt, STEPS * len(paces) + 2))

        def pump(timeout: float | None) -> bool:
            nonlocal passed
            turn, passed = divmod(passed, STEPS)[0], passed + 1
            device.pace = made[paces[min(turn, len(paces) - 1)]]
            return sink.ended < batch

        engine.run(pump)
        found = engine.collect()
        values, width = array("q", found.steps.data), len(found.steps.columns)
        starts = range(0, len(values), width)
        rows = [dict(zip(found.steps.columns, values[at : at + width], strict=True)) for at in starts]
        work = array("q", found.device_work.data)
        spans = {work[at + 1]: work[at + 2 : at + 4] for at in range(0, len(work), 4)}
        decodes = [{**row, "begin": spans[row["step"]][0], "end": spans[row["step"]][1]} for row in rows]
        return [row for row in decodes if row["kind"] == 1 and row["batch"] == batch]

    drawn = random.Random(seed)
    for batch in BATCHES:
        host_ns = 1e3 * host_us.get(str(batch), 0)
        texts = {f"share {share}": f"decode={round(share * host_ns)}ns,prefill=100us" for share in SHARES}
        made = {name: make_pace(text) for name, text in texts.items()}
        run(batch, [ALONE])  # kernels compile
        order = shuffled(list(texts), drawn)
        rows = [row for at in range(0, len(order), AT_ONCE) for row in run(batch, order[at : at + AT_ONCE])]
        for name in texts:
            device_ns = made[name].ns_of([Size("decode", batch, batch, 0)])
            cycles = list(kept_of(rows, device_ns))
            yield {
                "batch": batch,
                "name": name,
                "device_us": device_ns / 1e3,
                "step_us": [fmean(gap for gap, _ in each) for each in cycles],
                "phases": {
                    phase: [
                        fmean((row[f"{phase}.end"] - row[f"{phase}.start"]) / 1e3 for _, row in each)
                        for each in cycles
                    ]
                    for phase in PHASES
                },
                "late": [device.clock.lateness.mean_ns / 1e3, device.clock.lateness.p99_ns / 1e3],
            }
    engine.stop()


def shuffled(names: Sequence[str], drawn: random.Random) -> list[str]:
    """CYCLES times all of them, none twice in a row."""
    order: list[str] = []
    while len(order) < CYCLES * len(names):
        cycle = drawn.sample(names, len(names))
        if order[-1:] != cycle[:1]:
            order += cycle
    return order


def kept_of(rows: Sequence[dict[str, int]], device_ns: int) -> Iterator[list[tuple[float, dict[str, int]]]]:
    """Each cycle's steps of that pace but the first SETTLED, with what passed since the step before, us."""
    for is_its, steps in groupby(rows, key=lambda row: row["end"] - row["begin"] == device_ns):
        same = list(steps)
        if is_its and len(same) > SETTLED:
            counted = list(pairwise(same))[SETTLED - 1 :]
            yield [((row["end"] - earlier["end"]) / 1e3, row) for earlier, row in counted]


def trimmed(values: Sequence[float]) -> float:
    """The mean without the tenth at either end."""
    kept = sorted(values)
    cut = len(kept) // 10
    return fmean(kept[cut : len(kept) - cut or None])


def boot(name: str, python: str, mode: str, seed: int, host_us: Mapping[str, float]) -> list[dict[str, Any]]:
    command = [python, "-m", "experiments.validation.paced_step", "--child"]
    done = subprocess.run(
        [*command, name, mode, str(seed), json.dumps(host_us)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"{name}, {mode}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


Found = dict[tuple[int, str, int, str], dict[str, Any]]  # by trial, mode, batch, pace


def between(values: Sequence[float]) -> str:
    return f"{median(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"


@dataclass(frozen=True)
class Cell:
    """A batch and a share of the host's work, over trials: the step against what it should be, by mode."""

    batch: int
    host_us: float
    device_us: float
    against: dict[str, list[float]]

    @property
    def ratio(self) -> float:
        return self.host_us / self.device_us

    @property
    def is_apart(self) -> bool:
        return not APART[0] < self.ratio < APART[1]


def cell(found: Found, trials: Sequence[int], batch: int, share: float) -> Cell:
    against: dict[str, list[float]] = {mode: [] for mode in MODES}
    host_us, device_us = [], 0.0
    for trial in trials:
        for mode in MODES:
            alone, step = (found[trial, mode, batch, f"share {each}"] for each in (0.0, share))
            device_us = step["device_us"]
            ratios = [
                took / (max(host, device_us) if mode == "on" else host - beside + max(beside, device_us))
                for took, host, beside in zip(
                    step["step_us"], alone["step_us"], alone["phases"]["launch"], strict=False
                )
            ]
            against[mode].append(trimmed(ratios) - 1)
            if mode == "off":
                host_us.append(trimmed(alone["step_us"]))
    return Cell(batch, median(host_us), device_us, against)


def within(cells: Sequence[Cell], mode: str) -> str:
    """Whether steps are what they should be, where host and device are apart."""
    apart = [(median(each.against[mode]), each) for each in cells if each.is_apart]
    near = [off for off, _ in apart if abs(off) <= WITHIN]
    off, furthest = max(apart, key=lambda each: abs(each[0]))
    return (
        f"{mode}: within {WITHIN:.0%} in {len(near)} of {len(apart)} cells with host/device ≤ {APART[0]} or "
        f"≥ {APART[1]}; furthest {off:+.1%}, at batch {furthest.batch}, host/device {furthest.ratio:.2f}"
    )


def report(found: Found) -> None:
    trials = sorted({trial for trial, *_ in found})
    cells = [cell(found, trials, batch, share) for batch in BATCHES for share in SHARES[1:]]
    rows = [
        [
            *(str(each.batch), f"{each.host_us:,.0f}", f"{each.device_us:,.0f}", f"{each.ratio:.2f}"),
            *(between(each.against[mode]) for mode in MODES),
        ]
        for each in cells
    ]
    table(["batch", "host, us", "device, us", "host/device", "off: of the sum", "on: of the larger"], rows)
    print(*(within(cells, mode) for mode in MODES), "", sep="\n")

    rows = []
    for batch in BATCHES:
        for mode in MODES:
            phases = [found[trial, mode, batch, TWICE]["phases"] for trial in trials]
            us = (median(trimmed(boot[each]) for boot in phases) for each in PHASES)
            rows.append([str(batch), mode, *(f"{each:,.0f}" for each in us)])
    table(["batch", "ahead", *(f"{each}, us" for each in PHASES)], rows)
    late = [each["late"] for each in found.values()]
    print(
        f"waits ended late by {fmean(each[0] for each in late):.1f} us on average, "
        f"p99 {median(each[1] for each in late):.0f} us"
    )


def complete(boots: Mapping[str, list[dict[str, Any]]], trials: int) -> Found:
    """What the trials found whose boots are both there."""
    return {
        (trial, mode, row["batch"], row["name"]): row
        for trial in range(trials)
        if all(f"{trial} {mode}" in boots for mode in MODES)
        for mode in MODES
        for row in boots[f"{trial} {mode}"]
    }


def host_work(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By batch, us, of the boot whose paces were all 0: {} before it."""
    return {
        str(batch): median(trimmed(row["step_us"]) for row in rows if row["batch"] == batch)
        for batch in BATCHES
        if rows
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        engine, mode, seed, host_us = sys.argv[2:]
        for row in child(engine, mode, int(seed), json.loads(host_us)):
            print(json.dumps(row), flush=True)
        os._exit(0)  # an engine's threads may have no end
    asked = parser(__file__, __doc__)
    asked.add_argument("engine", choices=TOGGLES)
    asked.add_argument("python", metavar="PYTHON", help="interpreter that has it")
    asked.add_argument("folder", metavar="FOLDER", type=Path, help="where boots are kept")
    asked.add_argument("--trials", type=int, default=3, help="3 by default")
    asked.add_argument("--minutes", type=float, default=60, help="begin no boot after so many (60)")
    given = asked.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / f"{given.engine}.json"
    boots: dict[str, list[dict[str, Any]]] = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = [
        (f"{trial} {mode}", mode, trial)
        for trial in range(given.trials)
        for mode in (MODES if trial % 2 else MODES[::-1])
    ]
    began = monotonic()
    for name, mode, number in ((HOST, "off", 0), *wanted):
        if name in boots:
            continue
        if monotonic() - began > given.minutes * 60:
            break
        boots[name] = boot(given.engine, given.python, mode, number, host_work(boots.get(HOST, ())))
        kept.write_text(json.dumps(boots))
        print(f"{name}: after {(monotonic() - began) / 60:.1f} min", file=sys.stderr)
    if found := complete(boots, given.trials):
        report(found)
    else:
        print("no trial is complete yet: call again")


if __name__ == "__main__":
    main()
