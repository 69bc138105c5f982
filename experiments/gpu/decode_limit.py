"""How far a decode step is from what the device could do.

    python -m experiments.gpu.decode_limit [MODEL ...] [--out FOLDER]

A boot per model and dtype, all afters on (overlap, inline launch, packed, captured), batches in turn: prompts
of PROMPT tokens, NEW new ones, a warm-up first, then ROUNDS rounds, each with replays of its last step behind
it. Four times per step, each over the steps of the last bucket, as means over the rounds:

- floor: the bytes a step must move (each weight once, the keys and values of each token of the context once)
  over the bandwidth of a large copy on the device, read and written bytes counted. On CUDA only: a CPU's
  caches hold tiny models. An embedding table that is not the output layer's is read by rows, and left out.
- bare: the same captured program launched back to back, nothing else; from start to start.
- device: the program as the engine runs it, by events inside it (on the emulated device by its own clock).
- step: from start to start in the engine. Less the device's part, that is the exposed host time; busy is the
  device's share of it.

The program alone is compared too, by medians, in pairs of a round and its replays: so much does it cost the
device what the engine does beside it. One pair would say nothing: a machine drifts by more between the two.
The interval is over the rounds of one boot, and says nothing of the next one.

MODEL is a preset or a folder; `gpt2:bfloat16` asks for a dtype. On the emulated device tiny-gpt2.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.engine import OverlapEngine
from overlap_bench.harness.stats import paired
from tests.support.in_process_engine import Collected

AFTERS = {
    "schedule": "overlap",
    "launch": "inline",
    "h2d": "packed",
    "d2h": "event",
    "graph": "on",
}
BATCHES = (1, 8, 64)
PROMPT, NEW = 200, 184  # the last 128 steps have one bucket of blocks: contexts of 257 to 384 tokens
EDGE = 8  # steps left out at each end of them
REPLAYS = 100
ROUNDS = 8
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Steady:
    """Programs in steady decode, ms."""

    device: float  # mean
    median: float  # of the same
    interval: float  # mean, from start to start


def steady(work: np.ndarray, steps: set[int] | None = None) -> Steady:
    """The steady part of int64 rows (kind, step, start, end), ns: those of these steps alone."""
    rows = work[work[:, 0] == 0]
    if steps is not None:
        rows = rows[np.isin(rows[:, 1], list(steps))]
    rows = rows[np.argsort(rows[:, 2])][EDGE:-EDGE]
    starts = rows[:, 2]
    device = rows[:-1, 3] - starts[:-1]
    return Steady(
        float(device.mean()) / 1e6,
        float(np.median(device)) / 1e6,
        float(starts[-1] - starts[0]) / (len(rows) - 1) / 1e6,
    )


def watched(device: Device) -> dict[int, tuple[Any, ...]]:
    """By step, the program that was launched and its arguments, from now on."""
    seen: dict[int, tuple[Any, ...]] = {}
    launch = device.launch

    def launch_and_tell(program: str, *arguments: int, stream: Any, step: int) -> None:
        seen[step] = (program, *arguments)
        launch(program, *arguments, stream=stream, step=step)

    device.launch = launch_and_tell  # type: ignore[method-assign]
    return seen


def serve(engine: OverlapEngine, sink: Collected, batch: int) -> np.ndarray:
    """The device's work in one round."""
    sink.events.clear()
    sink.ended = 0
    engine.begin_round()
    for row in range(batch):
        prompt = [(row * 131 + place * 17) % 4000 + 1 for place in range(PROMPT)]
        engine.submit(api.Request(row, prompt, NEW))
    engine.run(lambda _: sink.ended < batch)
    record = engine.collect()
    assert record.device_work is not None
    return np.frombuffer(record.device_work.data, dtype=np.int64).reshape(-1, 4)


def replayed(device: Device, program: str, *arguments: int) -> Steady:
    """Back to back, on what the last step left in the buffers."""
    device.begin_round()
    stream, before = device.stream("forward"), None
    for number in range(REPLAYS):
        device.launch(program, *arguments, stream=stream, step=number)
        recorded = device.record(stream)
        if before is not None:
            device.synchronize(before)  # one is queued while one runs; times are read two launches later
        before = recorded
    work = device.work()
    assert not device.counters.get("work_rows_lost")
    return steady(work)


def bandwidth() -> float:
    """Bytes read and written per second by a large copy on the card; best of ten."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(10):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * COPY_BYTES / (start.elapsed_time(end) / 1e3))
    return best


def weight_bytes(model: dict[str, Any], name: str, item: int) -> int:
    """What a step reads of the weights."""
    from transformers import AutoConfig

    from overlap_bench.engines.presets import PRESETS

    preset = PRESETS.get(name)
    config = (
        AutoConfig.for_model(preset.model_type, **preset.config)
        if preset is not None
        else AutoConfig.from_pretrained(name)
    )
    by_rows = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return int(model["parameters"] - by_rows) * item


def one_boot(name: str, dtype: str, kind: str) -> list[dict[str, Any]]:
    options = api.EngineOptions(
        model=name,
        dtype=dtype,
        device=kind,
        max_batch_size=max(BATCHES),
        prefill_max_tokens=PROMPT * max(BATCHES),
    )
    engine, sink = OverlapEngine(options, SPEC.check(AFTERS)), Collected()
    described = engine.start(sink)
    try:
        device = engine._device
        assert device is not None
        launches = watched(device)
        item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        speed = bandwidth() if device.kind == "cuda" else None
        found = []
        for batch in BATCHES:
            serve(engine, sink, batch)
            pairs = []
            for _ in range(ROUNDS):
                launches.clear()
                work = serve(engine, sink, batch)
                last = launches[max(launches)]
                of_last = {step for step, launched in launches.items() if launched == last}
                pairs.append((steady(work, of_last), replayed(device, *last)))
            context = PROMPT + NEW - len(of_last) / 2
            moved = weight_bytes(described.model, name, item)
            moved += int(batch * context * int(described.model["kv_bytes_per_token"]))
            step = float(np.mean([each.interval for each, _ in pairs]))
            executing = float(np.mean([each.device for each, _ in pairs]))
            beside = paired.effect([bare.median for _, bare in pairs], [each.median for each, _ in pairs])
            found.append(
                {
                    "model": Path(name).name,
                    "dtype": dtype,
                    "batch": batch,
                    "program": last,
                    "bytes": moved,
                    "floor_ms": moved / speed * 1e3 if speed else None,
                    "bandwidth": speed,
                    "bare_ms": float(np.mean([bare.interval for _, bare in pairs])),
                    "device_ms": executing,
                    "step_ms": step,
                    "busy": executing / step,
                    "exposed_us": 1e3 * (step - executing),
                    "beside": [beside.change, beside.low, beside.high],
                }
            )
            print(found[-1], file=sys.stderr)
        return found
    finally:
        engine.stop()


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL[:DTYPE]")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    default = ["gpt2:bfloat16", "gpt2:float32"] if cuda else ["tiny-gpt2:float32"]
    found = []
    for asked in given.models or default:
        name, _, dtype = asked.partition(":")
        found += one_boot(name, dtype or "float32", "cuda" if cuda else "emulated")
    write_result(
        __file__,
        title="A decode step against the device's own limits, ms: "
        + (torch.cuda.get_device_name() if cuda else "emulated device"),
        header=[
            "model",
            "batch",
            "floor",
            "bare replay",
            "device",
            "step",
            "busy",
            "exposed host",
            "program in the engine, over replayed",
        ],
        rows=[
            [
                f"{row['model']}, {row['dtype']}",
                str(row["batch"]),
                f"{row['floor_ms']:.3f}" if row["floor_ms"] is not None else "",
                *(f"{row[name]:.3f}" for name in ("bare_ms", "device_ms", "step_ms")),
                f"{row['busy']:.1%}",
                f"{row['exposed_us']:.0f} us",
                "{:+.1%} [{:+.1%}, {:+.1%}]".format(*row["beside"]),
            ]
            for row in found
        ],
        data=found,
        folder=given.out,
    )


if __name__ == "__main__":
    main()
