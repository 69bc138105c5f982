"""Each warning is given where it applies, and nowhere else."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.arm_warnings import circumstances
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.values import block_seconds
from overlap_bench.harness.analysis.warnings import Severity, Warning
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.metrics.ranks import DEVICE
from overlap_bench.harness.plan.design import Patch
from overlap_bench.harness.stats.stopping import until_clear
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.workload.workload import Workload
from tests.support.made_blocks import MS, block, blocks, manifest, result, side, warned


def warnings(found: Result) -> str:
    return "\n".join(warned(found.comparisons[0]))


def on_device(blocks: int = 6, **device: str) -> Manifest:
    """A manifest of a run whose engines say that of their device."""
    plan = manifest(blocks)
    said = {
        name: msgspec.structs.replace(each, device={"name": "x", **device})
        for name, each in plan.descriptions.items()
    }
    return msgspec.structs.replace(plan, descriptions=said)


def test_warnings_that_apply_are_given() -> None:
    assert "emulated device" in warnings(result())
    assert "p99 of how late the client sent its requests is 3.00 ms" in warnings(result(lag_ms=3.0))
    assert "too few trials: 3" in warnings(result(plan=manifest(blocks=3)))
    clear = until_clear()  # a rule that looks at three blocks has enough of them
    assert "too few trials" not in warnings(result(plan=manifest(blocks=3, until=clear)))
    assert "by more than the change; --trials 6 gives both" in warnings(result(plan=manifest(blocks=1)))
    behind = warnings(result(wait_ms=20.0))  # of the after arm alone
    assert "to the last, requests of after waited " in behind
    assert "requests of before" not in behind
    quiet = warnings(result())
    stolen = blocks(0.9)
    for each in stolen:
        each.tables["rounds"][["steal_share", "others_share"]] = 0.2
        each.tables["rounds"]["loop_us"] = 150.0 if each.number else 210.0
    noisy = warnings(comparison.result(manifest(), stolen))
    assert "one fixed loop took 150 to 210 us between rounds" in noisy
    assert "noise: other virtual machines took up to 20.0% of the CPU time" in noisy
    assert "noise: other processes used up to 20.0%" in noisy
    for word in ("late sends", "too few", "not steady", "noise", "drift", "undecided"):
        assert word not in quiet


def test_replies_that_end_before_all_tokens_are_told_where_all_were_asked_for() -> None:
    measured = blocks(1.0)
    for each in measured:
        requests = each.tables["requests"]
        requests.loc[requests["arm"] == "after", "reason"] = "eos"
        requests.loc[requests["arm"] == "before", "reason"] = "stop"  # said, though none is missing
    served = sum((each.tables["requests"]["arm"] == "after").sum() for each in measured)
    asked = Workload(max_new_tokens=6)
    for each in measured:
        requests = each.tables["requests"]
        requests.loc[requests["arm"] == "before", "completion_tokens"] = 6
    told = warnings(comparison.result(manifest(workload=asked), measured))
    assert f"ended early: {served} of {served} replies of after are shorter than asked" in told
    assert "replies of before are shorter" not in told
    natural = manifest(workload=Workload(stop_on_eos=True, max_new_tokens=6))
    assert "ended early" not in warnings(comparison.result(natural, measured))


def test_k_is_shown_with_what_is_assumed_of_the_host() -> None:
    tenfold = "decode=10ms,prefill=1us*tokens"
    built_in, own = ("llama3-8b-h100", True), ("my-card", False)
    scaled = [(f"{name},ledger=2", assumed) for name, assumed in (built_in, own)]
    for name, assumed in (built_in, own, *scaled, (tenfold, True)):
        told = warnings(comparison.result(on_device(kind=f"emulated, paced: {name}*2.5"), blocks(1.0)))
        assert (
            "times come from --pace, multiplied by 2.5 "
            "(k, how many times as long this host takes as the GPU's host" in told
        )
        assert ("whose speed is assumed" in told) == assumed
    formula = "decode=10ms+0.05ms*batch,prefill=80us*tokens"
    told = warnings(comparison.result(on_device(kind=f"emulated, paced: {formula}"), blocks(1.0)))
    assert "device times come from --pace, host times" in told


def test_a_rewriting_of_ours_and_code_that_was_not_built_stand_below_the_verdict() -> None:
    def told(**after: Any) -> list[Warning]:
        plan = manifest()
        before, other = (msgspec.structs.replace(arm, engine="vllm", toggles={}) for arm in plan.design.arms)
        arms = (before, msgspec.structs.replace(other, **after))
        design = msgspec.structs.replace(plan.design, arms=arms)
        found = circumstances(msgspec.structs.replace(plan, design=design), blocks(1.0), {})
        return [each for each in found if each.kind in ("our_rewriting", "not_built")]

    (ours,) = told(toggles={"block_map": "nested"})
    assert ours.severity == Severity.QUALIFIES
    assert ours.text.startswith("block_map=nested (vLLM 24830): our rewriting of what the source describes")
    assert told(toggles={"block_map": "installed"}) == []
    assert told(toggles={"heap": "collected"}) == []  # both sides are vLLM's
    files = {"files": ("vllm/a.py",), "left_out": ("tests/a.py", "csrc/a.cu")}
    (not_built,) = told(patch=Patch(file="a.diff", text="", strip=1, **files))
    assert "after also changes compiled code, requirements or data: csrc/a.cu; " in not_built.text
    read = ("vllm/a.py", "vllm/configs/b.json", "vllm/README.md")
    (data,) = told(patch=Patch(file="a.diff", text="", strip=1, files=read))
    assert "requirements or data: vllm/configs/b.json; that was not built, or may not be" in data.text


def test_what_of_an_engine_is_not_its_own_stands_below_the_verdict() -> None:
    result = comparison.result(on_device(kind="paced: 10ms", replaced="the card"), blocks(1.0))
    (found,) = (each.warnings for each in result.comparisons)
    (told,) = (each for each in found if "stands in for" in each.text)
    assert told.text.startswith("no GPU: in before and after, a clock stands in for the card; ")
    assert told.leads
    assert any(each.text.startswith("paced: 10ms: device times come from --pace") for each in found)


def test_a_paced_device_and_programs_that_did_not_keep_their_pace_are_told() -> None:
    on_paced = on_device(kind="emulated, paced: 10ms")
    measured = blocks(1.0)

    def told(overruns: float) -> str:
        for each in measured:
            rounds = each.tables["rounds"]
            rounds["counter.paced_programs"] = 1000.0
            rounds["counter.paced_overruns"] = np.where(rounds["arm"] == "after", overruns, 0.0)
        return warnings(comparison.result(on_paced, measured))

    assert "emulated, paced: 10ms: device times come from --pace, host times from this" in told(10)
    assert "a CPU core plays" not in told(10)
    assert "pace not kept" not in told(10)
    assert "pace not kept: 1.1% of the programs of after took this machine longer" in told(11)


@pytest.mark.parametrize(
    ("overruns", "model", "batch", "devices", "severity", "advice"),
    [
        (
            340,
            "tiny-gpt2",
            4,
            1,
            Severity.OVERRULES,
            "try a longer pace or a smaller batch or --model micro-gpt2",
        ),
        (11, "micro-gpt2", 4, 1, Severity.QUALIFIES, "try a longer pace or a smaller batch"),
        (11, "micro-gpt2", 1, 1, Severity.QUALIFIES, "try a longer pace"),
        (
            340,
            "micro-gpt2",
            4,
            2,
            Severity.OVERRULES,
            "2 devices and the host want a core each, and this machine has 2 cores: try fewer ranks, or a "
            "machine with more",
        ),
    ],
)
def test_what_to_try_where_a_pace_is_not_kept_is_what_can_be_tried(
    overruns: int, model: str, batch: int, devices: int, severity: Severity, advice: str
) -> None:
    plan = manifest(blocks=2)
    arms = tuple(
        msgspec.structs.replace(arm, options=msgspec.structs.replace(arm.options, model=model))
        for arm in plan.design.arms
    )
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
    measured = blocks(1.0, 2)
    for each in measured:
        each.tables["steps"]["batch"] = batch
        for rank in range(1, devices):
            for name in DEVICE:
                each.tables["steps"][f"{name}.{rank}"] = each.tables["steps"][name]
        each.tables["rounds"]["counter.paced_programs"] = 1000.0
        each.tables["rounds"]["counter.paced_overruns"] = float(overruns)
    found = [
        each
        for each in comparison.result(plan, measured).comparisons[0].warnings
        if each.kind == "pace_not_kept"
    ]
    assert {each.severity for each in found} == {severity}
    assert [each.text.rpartition("; ")[2] for each in found] == [advice] * 2


def test_advice_fits_the_run() -> None:
    few = manifest(1, max_minutes=1.0)
    assert "a longer --max-minutes, or --trials 6, gives both" in warnings(result(plan=few))
    servers = on_device(kind="remote", blocks=1)
    itself = msgspec.structs.replace(servers.design, against_itself=True)
    assert "see by bench aa how often" in warnings(result(plan=servers))
    assert "bench aa" not in warnings(result(plan=msgspec.structs.replace(servers, design=itself)))
    assert "the length of the round; try a longer --interval-ms" in warnings(result(wait_ms=20.0))


@pytest.mark.parametrize(
    ("primary", "severity"), [("tpot_ms_p50", Severity.QUALIFIES), (SLICED, Severity.DESCRIBES)]
)
def test_what_is_wrong_with_rounds_alone_qualifies_no_verdict_of_turns(
    primary: str, severity: Severity
) -> None:
    told = circumstances(manifest(primary=primary), blocks(1.0, wait_ms=20.0), {})
    assert {each.severity for each in told if each.kind == "not_steady"} == {severity}


def test_a_gpu_that_nothing_is_known_of_is_told() -> None:
    unknown = "NVML tells nothing of the GPU of"
    on_card, measured = on_device(kind="cuda"), blocks(1.0)
    assert f"{unknown} before and after; " in warnings(comparison.result(on_card, measured))
    for each in measured:
        each.tables["rounds"].loc[each.tables["rounds"]["arm"] == "before", "gpu_clock_mhz"] = 1980.0
    assert f"{unknown} after; " in warnings(comparison.result(on_card, measured))
    for each in measured:
        each.tables["rounds"]["gpu_clock_mhz"] = 1980.0
    assert unknown not in warnings(comparison.result(on_card, measured))
    assert unknown not in warnings(result())


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (
            {"work_rows_lost": [0, 70_000], "steps_lost": [12, 0]},
            "records lost: up to 12 steps and 70,000 records of device work in a round",
        ),
        (
            {"requests_counted_by_chunks": [12.0, np.nan]},  # a counter of one arm
            "token count missing: for 72 requests the server gave no count",
        ),
        ({"replies_at_once": [3.0, np.nan]}, "not streamed: 18 of 24 replies of before came all at once"),
        (
            {"replies_at_once": [1.0, np.nan], "replies_in_bursts": [2.0, np.nan]},
            "bursts: 18 of 24 replies of before came in bursts of 4",
        ),
        (
            {"tokens_not_streamed": [60.0, np.nan], "requests_not_all_streamed": [2.0, np.nan]},
            "hidden tokens: in 12 requests the server counted 360 tokens (30 each) that it did not send",
        ),
        (
            {"requests_of_doubtful_count": [4.0, np.nan]},
            "token count too high: in 24 requests the server counts more tokens",
        ),
        ({"requests_counted_by_usage": [4.0, 4.0], "replies_at_once": [2.0, 2.0]}, ""),  # here and there
        (  # a proxy before one arm alone
            {"requests_counted_by_usage": [4.0, 4.0], "replies_at_once": [0.0, 4.0]},
            "not streamed: 24 of 24 replies of after came all at once",
        ),
        (
            {"requests_counted_by_usage": [4.0, 4.0], "replies_in_bursts": [4.0, 0.0]},
            "bursts: 24 of 24 replies of before came in bursts of 4",
        ),
    ],
)
def test_what_an_engine_counted_that_misleads_is_told(counted: dict[str, list[float]], said: str) -> None:
    measured = blocks(1.0)
    for each in measured:
        for name, values in {"requests_counted_by_usage": [4.0, np.nan], **counted}.items():
            each.tables["rounds"][f"counter.{name}"] = values
    found = warnings(comparison.result(manifest(), measured))
    assert said in found
    words = ("records lost", "streamed", "hidden tokens", "bursts", "token count")
    assert bool(said) == any(word in found for word in words)


def test_reads_that_are_late_by_a_good_part_of_a_gap_are_told_of() -> None:
    lagging = blocks(1.0)  # its gaps are of 4 ms
    for each, lag in ((lagging, 3 * MS), (punctual := blocks(1.0), MS)):
        for one in each:
            requests = one.tables["requests"]
            requests["chunk_lag_ns"] = [np.full(5, lag)] * len(requests)
    assert (
        "late reads (client lag): in some trial, p99 of how long a chunk lay unread is 3.00 ms"
        in warnings(comparison.result(manifest(), lagging))
    )
    assert "late reads" not in warnings(comparison.result(manifest(), punctual))
    squeezed = blocks(1.0)
    for one in squeezed:
        requests = one.tables["requests"]
        requests["chunk_ns"] = [
            each[0] + np.arange(5) if number == 0 else each
            for number, each in zip(requests["request"], requests["chunk_ns"], strict=True)
        ]
    told = warnings(comparison.result(manifest(), squeezed))
    assert re.search(
        r"bunched chunks: in (\d+) of (\d+) requests the chunks arrived in less than half", told
    ), told
    lagging[0].tables["rounds"]["counter.clock_moved_us"] = 2000
    assert "time of day: it was changed on this machine by 2 ms" in warnings(
        comparison.result(manifest(), lagging)
    )


@pytest.mark.parametrize(
    ("after_first", "said"),
    [
        ([True, False] * 3, "position effect: running second makes an arm's time differ by +2.0%"),
        ([True, False] * 3, "given the orders that were drawn, it adds "),
        ([True, False, False] * 2, "more than half the margin, so the verdict is weaker"),
    ],
)
def test_a_position_effect_weakens_by_what_the_orders_leave_of_it(after_first: list[bool], said: str) -> None:
    plan = msgspec.structs.replace(manifest(), after_first=after_first)
    biased = [
        block(
            number,
            {
                "before": side(4 * (1.02 if first else 1.0) * (1 + number * 1e-4)),
                "after": side(4 * (1.0 if first else 1.02)),
            },
        )
        for number, first in enumerate(plan.after_first)
    ]
    assert any(said in line for line in warned(comparison.result(plan, biased).comparisons[0]))


def test_what_was_skipped_is_told_once_for_both_arms() -> None:
    passed_over = {"skipped.short": 2, "skipped.long": 0, "skipped.failed": 5}
    skipping = [
        block(number, {arm: side(tpot) | {"rounds": side(tpot)["rounds"].assign(**passed_over)}
                       for arm, tpot in (("before", 4.0), ("after", 3.6))})
        for number in range(6)
    ]  # fmt: skip
    found = warnings(comparison.result(manifest(), skipping))
    assert "12 conversations under 4 tokens, 30 requests that failed" in found
    assert "too long" not in found
    assert "skipped" not in warnings(result())


def test_one_order_only_and_drift_are_told() -> None:
    plan = msgspec.structs.replace(manifest(), after_first=[True] * 6)
    assert "every trial ran its arms in the same order" in warnings(comparison.result(plan, blocks(0.9)))
    moving = [
        block(number, {"before": side(4 * 1.01**number), "after": side(3.6 * 1.01**number)})
        for number in range(6)
    ]
    assert "drift: the times of both arms changed by +5.1%" in warnings(comparison.result(manifest(), moving))


@pytest.mark.parametrize(
    ("noise", "apart_s", "said"),
    [
        (0.01, 20, "min on this machine, an 80% chance to show it)"),
        (0.05, 600, "would be needed, which is not feasible; look for what disturbs it"),
        (
            0.01,
            0,
            "raise false alarms (peeking); run again with --trials 7 to",
        ),  # nothing tells how long a block takes
    ],
)
def test_what_would_settle_an_undecided_run_is_told_in_time(noise: float, apart_s: int, said: str) -> None:
    measured = blocks(1.0, noise=noise)
    for each in measured:
        each.tables["rounds"]["started_ns"] = each.number * apart_s * 1000 * MS
    found = warnings(comparison.result(manifest(), measured))
    assert said in found
    assert ("on this machine" in found) == (apart_s > 0)


def test_a_pause_before_a_resumed_block_does_not_count_as_a_block() -> None:
    measured = blocks(1.0)
    for each in measured:
        each.tables["rounds"]["started_ns"] = (each.number * 20 + (each.number > 2) * 3600) * 1000 * MS
    assert block_seconds(measured) == 20
    assert block_seconds(measured[:1]) is None
