"""A delay in a phase is spent by whoever does the phase, and stands in its record (`bench sensitivity`)."""

from itertools import cycle

import numpy as np

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC
from overlap_bench.harness.run import records
from tests.support.in_process_engine import column, serve

DELAY_NS = 3_000_000
STEPS = 24


def delayed(
    device: Device, phases: list[str], toggles: dict[str, str], prompt: str | list[int], **options: object
) -> tuple[dict[str, int], api.RoundRecord]:
    """What delays took in each phase, in turns of one step, and the record of that round."""
    order, spent = cycle(["", *phases]), dict.fromkeys(phases, 0)
    phase = ""

    def another(engine: api.Engine, events: list[api.Event]) -> None:
        nonlocal phase
        engine.drain()
        took = engine.delay("", 0)
        assert phase or not took
        if phase:
            spent[phase] += took
        phase = next(order)
        engine.delay(phase, DELAY_NS if phase else 0)

    asked = [api.Request(0, prompt, STEPS)]
    tokens, _, record = serve(device, SPEC.check(toggles), asked, meanwhile=another, **options)
    assert len(tokens[0]) == STEPS
    return spent, record


def test_the_threads_of_a_step_and_the_output_process_are_delayed(device: Device) -> None:
    phases = [each for each in SPEC.phases if each != "tokenize"]
    settings = {"schedule": "overlap", "launch": "thread", "output": "process"}
    spent, record = delayed(device, phases, settings, [1, 2, 3])
    assert all(took >= DELAY_NS for took in spent.values()), spent
    beside = records.beside_frame(record)
    assert set(beside["phase"]) == {"output-process"}
    assert (beside["end_ns"] - beside["start_ns"]).sum() >= spent["output-process"]
    for phase in set(phases) - {"output-process"}:
        starts, ends = (np.array(column(record, f"{phase}.{edge}")) for edge in ("start", "end"))
        assert (ends - starts).max() >= DELAY_NS


def test_the_tokenizers_threads_are_delayed_where_there_are_some(device: Device) -> None:
    phases = ["tokenize", "output-process"]
    settings = {"schedule": "serial", "output": "inline"}
    spent, record = delayed(device, phases, settings, "Hello", tokenize_workers=1)
    assert spent["tokenize"] >= DELAY_NS
    beside = records.beside_frame(record)
    assert set(beside["phase"]) == {"tokenize"}
    assert (beside["end_ns"] - beside["start_ns"]).sum() >= spent["tokenize"]

    spent, record = delayed(device, phases, settings, "Hello")
    assert not any(spent.values())
    assert not len(records.beside_frame(record))
