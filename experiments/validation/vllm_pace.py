"""vLLM's host work beside a device's pace: what a decode step takes, for many paces in one boot.

    python -m experiments.validation.vllm_pace PYTHON [TRIALS]     vLLM's interpreter; 3 trials by default

A trial boots vLLM twice, with async scheduling off and on, core and host in one process. At each batch the
pace changes every few steps, in an order that is drawn anew for each cycle: 0 (the host's work alone), and
from a quarter of that work to four times as much.

Where async scheduling is off, a step should take the host's work and the device's together, but for what the
host still launches (the sampler, copies) once the graph is replayed: that runs beside the device. Where it is
on, it should take the larger of the two. The second table has Llama 3 8B on an H100 (engines/profiles.toml),
device times stretched by k/2, k, 2k and 4k, in the same cycles; the third what each phase takes at k. Ratios
are of one trial each, the median of them is shown.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

BATCHES = (1, 16, 64, 128, 256)
SHARES = (0.0, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of the host's work: the device's
PROFILE = "llama3-8b-h100"
STRETCHED = ("k/2", "k", "2k", "4k")
CYCLES = 8
STEPS = 12  # of each pace in a cycle
SETTLED = 4  # of them that do not count: what is in flight, and how warm the caches are, is the last pace's
PHASES = ("schedule", "metadata", "launch", "append", "output")
MODES = ("off", "on")


@dataclass
class Sink:
    """Takes events, and counts requests that ended."""

    address: str = ""
    ended: int = 0

    def send(self, events: Sequence[Any]) -> None:
        self.ended += sum(type(each).__name__ == "Finish" for each in events)


def child(scheduling: str, seed: int, host_us: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Every setting in one boot of vLLM, in this interpreter. `host_us`: the host's work by batch, or {}."""
    from overlap_bench.engines import api
    from overlap_bench.engines.pace import Size, make_pace, settle
    from overlap_bench.engines.vllm import SPEC, paced
    from overlap_bench.engines.vllm.engine import build

    options = api.EngineOptions(
        model="llama3-8b",
        dtype="bfloat16",
        max_context=1024,
        max_batch_size=256,
        pace="0ns",
        stream_interval=1,
    )
    toggles = {"async_scheduling": scheduling, "multiprocessing": "off", **SPEC.paced_toggles}
    engine: Any = build(options, SPEC.check(toggles))
    sink = Sink()
    engine.start(sink)
    device: Any = paced.own_device()

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
        texts |= {by: settle(f"{PROFILE}*{by}") for by in STRETCHED}
        made = {name: make_pace(text) for name, text in texts.items()}
        run(batch, ["share 0.0"])  # kernels compile
        order = [name for _ in range(CYCLES) for name in drawn.sample(list(texts), len(texts))]
        rows = run(batch, order)
        for name in texts:
            device_ns = made[name].ns_of([Size("decode", batch, batch, 0)])
            runs: list[dict[str, int]] = []  # of this pace, one after another
            gaps, kept = [], []
            for row in rows:
                if row["end"] - row["begin"] != device_ns:
                    runs = []
                    continue
                runs.append(row)
                if len(runs) > SETTLED:
                    gaps.append((row["end"] - runs[-2]["end"]) / 1e3)
                    kept.append(row)
            yield {
                "batch": batch,
                "name": name,
                "device_us": device_ns / 1e3,
                "step_us": trimmed(gaps),
                "phases": {
                    each: trimmed([(row[f"{each}.end"] - row[f"{each}.start"]) / 1e3 for row in kept])
                    for each in PHASES
                },
                "late": [device.clock.lateness.mean_ns / 1e3, device.clock.lateness.p99_ns / 1e3],
            }
    engine.stop()


def trimmed(values: Sequence[float]) -> float:
    """The mean without the tenth at either end."""
    kept = sorted(values)
    cut = len(kept) // 10
    return fmean(kept[cut : len(kept) - cut or None])


def boot(python: str, scheduling: str, seed: int, host_us: dict[str, float]) -> list[dict[str, Any]]:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [
            python,
            "-m",
            "experiments.validation.vllm_pace",
            "--child",
            scheduling,
            str(seed),
            json.dumps(host_us),
        ],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        encoding="utf-8",
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


Found = dict[tuple[int, str, int, str], dict[str, Any]]  # by trial, scheduling, batch, pace


def between(values: Sequence[float]) -> str:
    return f"{median(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"


def report(found: Found) -> None:
    trials = sorted({trial for trial, *_ in found})
    rows = []
    for batch in BATCHES:
        for share in SHARES[1:]:
            name = f"share {share}"
            of_sum, of_larger, device_us, host_us = [], [], 0.0, []
            for trial in trials:
                alone, step = (found[trial, "off", batch, each] for each in ("share 0.0", name))
                device_us, beside = step["device_us"], alone["phases"]["launch"]
                host_us.append(alone["step_us"])
                of_sum.append(step["step_us"] / (alone["step_us"] - beside + max(beside, device_us)) - 1)
                alone, step = (found[trial, "on", batch, each] for each in ("share 0.0", name))
                of_larger.append(step["step_us"] / max(alone["step_us"], device_us) - 1)
            host = median(host_us)
            rows.append(
                [
                    *(str(batch), f"{host:,.0f}", f"{device_us:,.0f}", f"{host / device_us:.2f}"),
                    *(between(of_sum), between(of_larger)),
                ]
            )
    table(["batch", "host, us", "device, us", "host/device", "off: of the sum", "on: of the larger"], rows)

    rows = []
    for batch in BATCHES:
        row = [str(batch)]
        for by in STRETCHED:
            changes = [
                found[trial, "on", batch, by]["step_us"] / found[trial, "off", batch, by]["step_us"] - 1
                for trial in trials
            ]
            row += [f"{found[trials[0], 'off', batch, by]['device_us'] / 1e3:.2f}", between(changes)]
        rows.append(row)
    table(
        ["batch", *(each for by in STRETCHED for each in (f"{by}: device, ms", "step, on against off"))], rows
    )

    rows = []
    for batch in BATCHES:
        for mode in MODES:
            phases = [found[trial, mode, batch, "k"]["phases"] for trial in trials]
            rows.append([str(batch), mode, *(f"{median(p[each] for p in phases):,.0f}" for each in PHASES)])
    table(["batch", "async", *(f"{each}, us" for each in PHASES)], rows)
    late = [each["late"] for each in found.values()]
    print(
        f"waits ended late by {fmean(each[0] for each in late):.1f} us on average, "
        f"p99 {median(each[1] for each in late):.0f} us"
    )


def main() -> None:
    if sys.argv[1] == "--child":
        for row in child(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])):
            print(json.dumps(row), flush=True)
        os._exit(0)
    python, trials = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    began = perf_counter_ns()
    first = boot(python, "off", 0, {})  # all paces are 0: the host's work
    host_us = {
        str(batch): median(
            each["step_us"] for each in first if each["batch"] == batch and "share" in each["name"]
        )
        for batch in BATCHES
    }
    found = {
        (trial, mode, each["batch"], each["name"]): each
        for trial in range(trials)
        for mode in (MODES if trial % 2 else MODES[::-1])
        for each in boot(python, mode, trial, host_us)
    }
    report(found)
    print(f"{trials} trials, {(perf_counter_ns() - began) / 60e9:.0f} min")


if __name__ == "__main__":
    main()
