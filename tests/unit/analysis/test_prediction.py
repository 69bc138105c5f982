"""What a toggle should give, on records whose answer is known."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import prediction
from overlap_bench.harness.analysis.prediction import (
    Before,
    Calibration,
    Measured,
    load_calibration,
    model_of,
)
from overlap_bench.harness.analysis.result import NoPrediction, Prediction
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.report import tables
from overlap_bench.harness.store.tables import Block
from tests.support.made_blocks import manifest
from tests.unit.metrics.test_attribution import frame, one_step

SURE = Measured(0.0, 0.0)


def before(**columns: Any) -> Before:
    """30 steps of 1000 us, 800 of them on the device, 60 in exposed output, no message."""
    values: dict[str, Any] = {"interval": 1000.0, "device": 800.0, "output": 60.0, "host": 150.0} | columns
    chunks = np.asarray(values.pop("chunks", np.zeros(30)), np.int64)
    return Before(
        **{name: np.broadcast_to(np.asarray(value, float), 30).copy() for name, value in values.items()},
        chunks=chunks,
        batch=8.0,
    )


def calibration(**lists: list[Any]) -> Calibration:
    values: dict[str, Any] = {
        "turnaround_us": [SURE],
        "rested_us": [SURE],
        "hand_over_us": [SURE],
        "aftermath_us": [SURE],
    } | lists
    machine = Machine(cpu="a cpu", cores=2, kernel="6", memory_gib=8, gpus=[])
    return Calibration(source="a test", device="emulated", machine=machine, batches=[8], **values)


def arms(variant: str, **options: Any) -> tuple[Arm, Arm]:
    found = load_variants()[variant]
    first, second = (
        Arm(name=name, engine=found.engine, options=api.EngineOptions(**options, **own), toggles=toggles)
        for name, toggles, own in (
            ("before", found.before, found.before_options),
            ("after", found.after, found.after_options),
        )
    )
    return first, second


TURNED, RESTED = {"turnaround_us": [Measured(50.0, 2.0)]}, {"rested_us": [Measured(20.0, 3.0)]}


@pytest.mark.parametrize(
    ("model", "columns", "calibrated", "expected"),
    [
        (prediction.overlap, {}, None, (800, 0)),  # the device alone is left
        (prediction.overlap, {}, TURNED, (850, 2)),  # and its turnaround
        # Half of the steps have 900 us of host work in front of 800 on the device.
        (prediction.overlap, {"host": [900.0] * 15 + [100.0] * 15}, None, ((900 + 800) / 2, 0)),
        # A device that never stands still is as much faster as was calibrated.
        (prediction.overlap, {}, {**RESTED, "turnaround_us": [Measured(5.0, 4.0)]}, (785, 5)),
        (prediction.deferred_output, {}, RESTED, (940, 0)),  # there it goes on standing still
        (prediction.deferred_output, {}, None, (940, 0)),  # without its exposed part
        (prediction.deferred_output, {"output": 0.0}, None, (1000, 0)),
        # Output that takes longer than the device still shows.
        (
            prediction.deferred_output,
            {"interval": 1300.0, "device": 100.0, "output": 160.0},
            None,
            (1300 - 100, 0),
        ),
        (prediction.async_output, {}, {"hand_over_us": [Measured(15.0, 1.0)]}, (955, 1)),
    ],
)
def test_what_a_model_makes_of_a_boot(
    model: prediction.Model,
    columns: dict[str, Any],
    calibrated: dict[str, list[Any]] | None,
    expected: tuple[float, float],
) -> None:
    known = None if calibrated is None else calibration(**calibrated)
    assert model(before(**columns), known) == prediction.After(*expected)


def test_the_aftermath_of_a_message_goes_with_the_message() -> None:
    """Every third step sends, and stands still for 90 us more besides 30 more of output."""
    sends = np.arange(30) % 3 == 0
    known = before(
        interval=np.where(sends, 1120.0, 1000.0), output=np.where(sends, 90.0, 60.0), chunks=sends * 8
    )
    assert known.aftermath(None) == Measured(pytest.approx(30.0), 0.0)
    assert prediction.deferred_output(known, None).interval == pytest.approx(940)


def test_where_every_step_sends_the_aftermath_is_the_calibrated_one() -> None:
    every = before(chunks=np.full(30, 8))
    assert every.aftermath(None) == SURE
    assert every.aftermath(calibration(aftermath_us=[Measured(40.0, 3.0)])) == Measured(40.0, 3.0)


def test_steps_that_sent_are_found_by_the_tokens_of_their_chunks() -> None:
    steps = frame(
        *(
            one_step(number, (number, number), {"append": (100 * number + 10, 100 * number + 20)})
            for number in range(4)
        )
    )
    asked = pd.DataFrame(
        {
            "token_ns": [np.array([15, 115, 215, 315]) * 1000, np.array([115, 215]) * 1000],
            "chunk_tokens": [[1, 2, 1], [2]],
        }
    )
    assert prediction.sent_chunks(steps, asked).tolist() == [1, 0, 2, 1]


def test_a_calibration_is_interpolated_between_batches_and_held_beyond_them() -> None:
    known = msgspec.structs.replace(
        calibration(), batches=[1, 9], rested_us=[Measured(10.0, 1.0), Measured(50.0, 3.0)]
    )
    assert known.at(5, known.rested_us) == Measured(30.0, 2.0)
    assert known.at(99, known.rested_us) == Measured(50.0, 3.0)


def test_the_stored_calibration_can_be_read() -> None:
    known = load_calibration()
    assert known.device == "emulated"
    assert known.batches == sorted(known.batches)
    assert all(len(each) == len(known.batches) for each in (known.turnaround_us, known.aftermath_us))


@pytest.mark.parametrize(
    ("here", "where"),
    [
        ({}, "on a machine like this one"),
        ({"kernel": "7"}, "on a machine like this one under another kernel (6)"),
        ({"cores": 4, "kernel": "7"}, "on another machine (2 cores, kernel 6)"),
        ({"cpu": "another", "memory_gib": 16}, "on another machine (a cpu, 8 GiB)"),
        ({"gpus": ["H100"]}, "on another machine (no GPU)"),
    ],
)
def test_a_calibration_from_elsewhere_says_what_differs(here: dict[str, Any], where: str) -> None:
    machine = msgspec.structs.replace(calibration().machine, **here)
    plan = msgspec.structs.replace(manifest(), machine=machine)
    assert prediction.calibrated(calibration(), plan) == f"a test, {where}"


@pytest.mark.parametrize(
    ("primary", "said"),
    [
        ("round_step_ms", ""),
        ("decode_step_ms", "The first line's −12.7% is of turns"),
        ("tpot_ms_p50", "The first line's −12.7% is of tpot_ms_p50"),
    ],
)
def test_a_prediction_says_why_it_is_not_of_what_the_first_line_says(primary: str, said: str) -> None:
    found = Prediction(
        metric="round_step_ms", model="overlap", change=-0.14, ci_low=None, ci_high=None, measured=-0.094,
        error=-0.046, calibration="a test", remark=prediction.not_of(primary, -0.127),
    )  # fmt: skip
    line = tables.prediction_line(found)
    assert "round_step_ms −14.0%; measured there: −9.4%" in line
    assert ("first line" in line) == bool(said)
    assert said in line


@pytest.mark.parametrize("variant", ["overlap", "deferred-output", "async-output"])
def test_these_variants_have_a_model(variant: str) -> None:
    model = model_of(*arms(variant))
    assert not isinstance(model, str)
    assert model.__name__ == variant.replace("-", "_")


def test_every_other_variant_says_why_it_has_none() -> None:
    for name in load_variants().keys() - {"overlap", "deferred-output", "async-output"}:
        reason = model_of(*arms(name))
        assert isinstance(reason, str), name
        known = ("no model of", "the models know the steps of the engine")
        assert reason.startswith(known) or "serial before" in reason


def test_what_the_models_do_not_know_has_no_prediction() -> None:
    first, second = arms("overlap")
    other = msgspec.structs.replace(second, options=api.EngineOptions(block_size=32))
    assert model_of(first, other) == "the arms differ in more than their toggles"
    assert model_of(first, msgspec.structs.replace(first, name="after")) == "the arms are equal"
    threaded = msgspec.structs.replace(second, toggles={**second.toggles, "launch": "thread"})
    assert "launch inline → thread" in str(model_of(first, threaded))
    elsewhere = [
        msgspec.structs.replace(arm, toggles={**arm.toggles, "output": "process"}) for arm in (first, second)
    ]
    assert model_of(*elsewhere) == "no model of overlap with output elsewhere"


@pytest.mark.parametrize(
    ("boot", "why"),
    [
        (  # as in a file of steps that was edited
            before(interval=0.0, device=0.0),
            "the before arm has steps that take no time, or none that can be",
        ),
        (replace(before(), tokens=8.0), "the models know steps that give each request one token"),
    ],
)
def test_steps_that_no_model_knows_predict_nothing(
    monkeypatch: pytest.MonkeyPatch, boot: Before, why: str
) -> None:
    monkeypatch.setattr(prediction, "before_of", lambda *_: boot)
    made = manifest(blocks=2)
    made = msgspec.structs.replace(made, design=msgspec.structs.replace(made.design, arms=arms("overlap")))
    assert prediction.predict(made, [Block(0, {})] * 2, {}) == NoPrediction(none=why)
