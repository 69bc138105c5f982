"""The overlap engine, put together from its parts and its toggles' choices."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tokenizers import Tokenizer

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.output import OutputProcessor
from overlap_bench.engines.overlap import device_plan
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.forward import Forward
from overlap_bench.engines.overlap.loop import Loop
from overlap_bench.engines.overlap.plant import Plant
from overlap_bench.engines.overlap.ranks import OtherRanks
from overlap_bench.engines.overlap.recorder import make_recorder
from overlap_bench.engines.overlap.scheduler import Scheduler
from overlap_bench.engines.overlap.toggles import (
    accept,
    chunk,
    d2h,
    graph,
    h2d,
    launch,
    output,
    prefill,
    sync,
    tables,
)
from overlap_bench.engines.presets import load_tokenizer


def assemble(
    options: api.EngineOptions,
    toggles: dict[str, str],
    config: ModelConfig,
    device: Device,
    ranks: OtherRanks | None,
    events: api.EventSink,
    counters: Counter[str],
) -> tuple[Loop, Forward, dict[str, Any], Tokenizer]:
    """Load the model onto the device, and put the loop together around it. Beside the loop: what launches its
    steps, what the model says of itself, and its tokenizer."""
    place = None if ranks is None else (0, ranks.count, ranks.store)
    facts = device.load(device_plan.module(config, place))
    tokenizer = load_tokenizer(options.model, facts["vocabulary"])
    graph.PREPARE[toggles["graph"]](device, config.decode_programs, config.decode_shapes)
    if ranks is not None:
        ranks.wait_until_up()

    stream = device.stream("forward")
    plant = Plant(options.plant_at, options.plant_ns, device, stream, counters)
    plant.prepare()
    metadata, slots = device_plan.metadata(config, device), config.max_batch_size + 1
    launching: launch.Launch
    copies_in = h2d.CHOICES[toggles["h2d"]](device, stream, metadata, counters, lambda: launching.check())
    copies_out = d2h.CHOICES[toggles["d2h"]](device, device.buffer("sampled_ids"), counters)
    recorder = make_recorder(options.recorder)
    forward = Forward(device, copies_in, copies_out, recorder, options.chaos, plant)
    launching = launch.CHOICES[toggles["launch"]](forward, counters)
    loop = Loop(
        scheduler=Scheduler(
            config,
            tables.CHOICES[toggles["tables"]](slots, config.block_buckets[-1], counters),
            compose=chunk.COMPOSE[toggles["chunk"]],
            goes_on=accept.POLICIES[toggles.get("accept", "host")],
        ),
        h2d=copies_in,
        d2h=copies_out,
        launch=launching,
        before_launch=prefill.POLICIES[toggles.get("prefill", "overlap")],
        wait_and_process=sync.POLICIES[toggles.get("sync", "copy-done")],
        output=output.choose(
            toggles["output"],
            lambda tell: OutputProcessor(tokenizer, options.stream_interval, events, tell),
            events.address,
            options.model,
            facts["vocabulary"],
            options.stream_interval,
            counters,
        ),
        recorder=recorder,
        counters=counters,
        eos=frozenset(facts["eos"]),
        plant=plant,
        ranks=ranks,
    )
    return loop, forward, facts, tokenizer
