"""A delay that is planted: it is there, as long as asked, and changes no output; and whether it was seen."""

from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.plant import CALIBRATION_CYCLES, TAG, SpinKernel
from overlap_bench.harness.analysis import mechanism
from overlap_bench.harness.analysis.result import Comparison, Counter, MetricRow, Settings
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.report import tables
from overlap_bench.harness.run.trial import planted_ns, rounds_of
from overlap_bench.harness.workload.workload import Workload
from tests.support.in_process_engine import serve, some_requests
from tests.support.made_blocks import manifest, result
from tests.support.refusals import refusal

NS = 300_000
SETTINGS = [
    {"schedule": "overlap", "launch": "thread", "graph": "on"},
    {"schedule": "serial", "graph": "off"},
]


def device_work(record: api.RoundRecord) -> np.ndarray:
    return np.frombuffer(record.device_work.data, np.int64).reshape(-1, 4)


# -- in the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("toggles", SETTINGS, ids=["overlap", "serial"])
def test_a_device_delay_is_work_of_each_step(device: Device, toggles: dict[str, str]) -> None:
    requests = some_requests(4)
    plain, _, without = serve(device, toggles, requests)
    delayed, _, record = serve(device, toggles, requests, plant_at="device", plant_ns=NS)
    assert delayed == plain
    assert record.counters["planted_device_ns"] >= record.steps.rows * NS
    assert "planted_device_ns" not in without.counters
    programs = device_work(record)
    programs = programs[programs[:, 0] == 0]
    assert 0 <= programs[:, 1].min() <= programs[:, 1].max() < TAG
    longest = pd.Series(programs[:, 3] - programs[:, 2]).groupby(programs[:, 1]).max()
    assert (longest >= NS).all()


@pytest.mark.parametrize("toggles", SETTINGS, ids=["overlap", "serial"])
def test_a_host_delay_is_computed_in_each_step(device: Device, toggles: dict[str, str]) -> None:
    requests = some_requests(3)
    plain, _, _ = serve(device, toggles, requests)
    delayed, _, record = serve(device, toggles, requests, plant_at="host", plant_ns=NS)
    assert delayed == plain
    assert record.counters["planted_host_ns"] >= record.steps.rows * NS


def test_a_hook_without_a_delay_is_counted_too(device: Device) -> None:
    _, _, record = serve(device, SETTINGS[0], some_requests(2), plant_at="device", plant_ns=0)
    assert record.counters["planted_device_ns"] > 0


# -- in the design ----------------------------------------------------------------------------------------


def arm(name: str, **options: Any) -> Arm:
    return Arm(name=name, engine="overlap", options=api.EngineOptions(**options), toggles={})


def design(**changes: Any) -> Design:
    arms = changes.pop("arms", (arm("before"), arm("after")))
    return Design(name="x", arms=arms, workload=Workload(), plant=0.03, **changes)


def test_both_arms_have_the_hook_and_only_the_after_arm_the_delay() -> None:
    before, after = (each.options for each in design().arms_with_plant(1234))
    assert (before.plant_at, before.plant_ns) == ("device", 0)
    assert (after.plant_at, after.plant_ns) == ("device", 1234)
    assert [each.options.plant_ns for each in design().arms_with_plant(None)] == [0, 0]
    plain = Design(name="x", arms=(arm("before"),), workload=Workload())
    assert plain.arms_with_plant(None) == plain.arms


def test_equal_arms_may_be_compared_where_one_is_delayed() -> None:
    design().check()
    with pytest.raises(api.BadSetting, match="same settings"):
        msgspec.structs.replace(design(), plant=None).check()
    msgspec.structs.replace(design(), plant=None, against_itself=True).check()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plant": 1.0}, "--inject-delay must be at least 0% and below 100%"),
        ({"plant": -0.1}, "--inject-delay must be at least 0% and below 100%"),
        ({"arms": (arm("before"),)}, "bench aa has one"),
        ({"arms": (arm("before", recorder=False), arm("after"))}, "its recorder is off"),
    ],
)
def test_what_cannot_be_planted_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(api.BadSetting, match=reason):
        msgspec.structs.replace(design(), **changes).check()


BARE = api.EngineSpec(name="bare", summary="", toggles=(), build="x:y")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"engine": "bare", "plant": 0.03}, "engine bare can delay no step at the device"),
        ({"engine": "overlap", "plant": 0.03, "plant_at": "hots"}, "did you mean host?"),
        ({"engine": "overlap", "plant_at": "host"}, "only with --inject-delay"),
        ({"engine": "overlap", "both": ["plant_ns=5"]}, "unknown setting 'plant_ns'"),
        ({"engine": "overlap", "after": ["h2d=pinned"]}, "an arm against itself has no --after"),
    ],
)
def test_a_wrong_request_has_one_reason(asked: dict[str, Any], reason: str) -> None:
    wanted, engines = Request(**asked, against_itself=True), {"overlap": SPEC, "bare": BARE}
    assert reason in refusal(lambda: make_design(wanted, engines, {}, lambda: "emulated"))


def test_an_arm_against_itself() -> None:
    asked = Request(variant="overlap", plant=0.05, plant_at="host", against_itself=True)
    made = make_design(asked, {"overlap": SPEC}, load_variants(), lambda: "emulated")
    before, after = made.arms
    assert msgspec.structs.replace(after, name="before") == before
    assert (made.name, made.against_itself, made.plant, made.plant_at) == ("aa-overlap", True, 0.05, "host")
    assert before.toggles["schedule"] == "serial"


# -- its size ---------------------------------------------------------------------------------------------


def steps(arm_name: str, interval_ns: int) -> pd.DataFrame:
    ends = 1000 + interval_ns * np.arange(5)
    return pd.DataFrame(
        {
            "arm": arm_name,
            "round": 0,
            "step": range(5),
            "kind": ["prefill", *["decode"] * 4],
            "batch": 4,
            "device_end_ns": ends,
            "device_ns": 1,
        }
    )


def test_the_size_is_a_share_of_the_before_arms_step() -> None:
    both = pd.concat([steps("before", 4_000_000), steps("after", 8_000_000)])
    assert planted_ns(0.03, "before", both) == 120_000


def test_a_share_of_a_step_of_several_tokens_is_refused() -> None:
    """A delay is one of a whole step, and a step's time is that of one token of each request."""
    several = steps("before", 4_000_000).assign(given=32, dropped=0)
    with pytest.raises(api.BadSetting, match="those of before give more"):
        planted_ns(0.03, "before", several)


def test_without_steps_there_is_no_size() -> None:
    with pytest.raises(api.BadSetting, match="its engine records none"):
        planted_ns(0.03, "before", pd.DataFrame())
    with pytest.raises(api.BadSetting, match="raise --max-new-tokens"):
        planted_ns(0.03, "before", steps("before", 5)[:1])


def test_the_discarded_boot_runs_a_whole_round_to_size_by() -> None:
    plain = msgspec.structs.replace(design(), plant=None)
    closed = msgspec.structs.replace(plain, segments=3, workload=Workload(arrival="closed", concurrency=4))
    open_loop = msgspec.structs.replace(closed, workload=Workload(arrival="poisson", rate=4.0))
    assert list(rounds_of([design()], -1)) == [-1, 0]
    assert list(rounds_of([plain], -1)) == [-1]
    assert list(rounds_of([closed], -1)) == [-1]
    assert list(rounds_of([closed, open_loop], -1)) == [-1, 0]  # whichever workload comes first


# -- whether it was seen ----------------------------------------------------------------------------------


PLAIN = result(plan=manifest(1)).comparisons[0]


def found(
    low: float | None, high: float | None, verdict: str | None, better: str = "lower", **more: Any
) -> Comparison:
    row = MetricRow(
        unit="ms", better=better, change=0.029, delta=1.0, ci_low=low, ci_high=high, verdict=verdict
    )
    share = Counter(before=0.001, after=0.031, unit="of a step of before")
    changes = {"primary": "x", "metrics": {"x": row}, "mechanism": {"injected_share": share}, **more}
    return msgspec.structs.replace(PLAIN, **changes)


def planted_at(place: str) -> Settings:
    return msgspec.structs.replace(
        PLAIN.before, options={**PLAIN.before.options, "plant_at": place, "plant_ns": 9}
    )


@pytest.mark.parametrize(
    ("comparison", "seen"),
    [
        (found(0.02, 0.04, "slower"), True),
        (found(0.031, 0.04, "slower"), False),  # a change, but not this one
        (found(-0.01, 0.04, "undecided"), False),
        (found(-0.04, -0.02, "worse", "higher"), True),  # a rate falls by 1 - 1/1.03
        (found(None, None, None), False),
        (found(0.02, 0.04, "slower", mechanism={}), False),
    ],
)
def test_seen_is_slower_by_what_was_planted(comparison: Comparison, seen: bool) -> None:
    assert mechanism.plant_seen(comparison) is seen


@pytest.mark.parametrize(("primary", "share"), [("decode_step_ms", 0.03), ("tpot_ms_p50", 0.02)])
def test_a_delay_is_a_share_of_the_step_that_is_compared(primary: str, share: float) -> None:
    asked = msgspec.structs.replace(design(), plant=0.02, primary=primary)
    before = asked.arms[0].name
    values = {"round_step_ms": {before: [3.0, 3.0]}, "decode_step_ms": {before: [2.0, 2.0]}}
    counters = {"injected_device_ns": Counter(before=0.0, after=60_000.0, unit="per step")}
    assert mechanism.planted(asked, counters, values)["injected_share"].after == pytest.approx(share)


def test_what_became_of_a_delay_is_said() -> None:
    comparison = found(0.02, 0.04, "slower", after=planted_at("device"))
    assert tables.planted(comparison) == (
        "Injected delay at the device: +3.0% of a step; x changed by +2.9% [+2.0%, +4.0%], slower, and the "
        "interval holds +3.0%: seen."
    )
    other = msgspec.structs.replace(planted_at("device"), toggles={"h2d": "something else"})
    said = tables.planted(found(0.02, 0.04, "slower", after=other)) or ""
    assert "seen." in said
    assert "by the arms' other differences, too; bench aa shows whether a delay is seen." in said
    comparison = found(-0.02, 0.04, "undecided", after=planted_at("device"))
    assert (tables.planted(comparison) or "").endswith("undecided, and the interval holds +3.0%: not seen.")


def test_a_delay_that_nobody_counted_is_told() -> None:
    """An older engine, as of another ref, may not know the hook."""
    comparison = found(0.02, 0.04, "slower", mechanism={}, after=planted_at("host"))
    assert tables.planted(comparison) == (
        "Injected delay at the host: the engine counted none, so none can be seen."
    )


def test_nothing_is_said_of_a_delay_where_the_second_arm_has_none_or_it_is_of_no_known_step() -> None:
    """A run that is looked at the other way round; arms of two runs."""
    other_way = msgspec.structs.replace(PLAIN.before, options={"plant_at": "device", "plant_ns": 0})
    assert tables.planted(found(0.02, 0.04, "slower", after=other_way)) is None
    counted = {"injected_device_ns": Counter(before=0.0, after=900.0, unit="ns")}
    assert tables.planted(found(0.02, 0.04, "slower", mechanism=counted, after=planted_at("device"))) is None


def test_the_hooks_own_price_is_not_part_of_the_delay() -> None:
    assert mechanism.planted_share(found(0, 1, None)) == pytest.approx(0.03)
    assert mechanism.planted_share(found(0, 1, None, mechanism={})) is None


def test_turns_with_another_process_on_the_card_are_not_taken_for_a_slow_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both arms calibrate beside each other: most spins take twice as long, and all of them alike."""
    took = cycle([2.0] * 10 + [1.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: "Event") -> float:
            return next(took)

    spun: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append, raising=False)
    SpinKernel()(3_000_000)  # ns; a calibration took 1 ms where the card was its own
    assert spun[-1] == 3 * CALIBRATION_CYCLES
