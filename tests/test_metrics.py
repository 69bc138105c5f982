"""Metrics against cases worked out by hand, one for each convention, and properties that must hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import api
from harness import load_generator, metrics, records
from harness.messages import RunRound
from harness.workload import Planned

MS = 1_000_000
NOTHING = pd.DataFrame()


def request(**columns: object) -> dict[str, object]:
    """A request of round 0; times in ms. By default: 5 tokens in chunks of 1, 2 and 2."""
    row: dict[str, object] = {
        "scheduled_ns": 100,
        "sent_ns": 103,
        "submitted_ns": 104,
        "accepted_ns": 105,
        "tokenized_ns": 107,
        "admitted_ns": 111,
        "chunk_ns": [120, 140, 164],
        "token_ns": [118, 128, 138, 150, 162],
        "finished_ns": 165,
    } | columns
    in_ns = {
        name: np.array(value, dtype=np.int64) * MS for name, value in row.items() if name.endswith("_ns")
    }
    return {
        "round": 0,
        "request": 0,
        "chunk_tokens": [1, 2, 2],
        "reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "digest": "",
        "error": "",
        **columns,
        **in_ns,
    }


def rounds(*spans: tuple[int, int]) -> pd.DataFrame:
    """Rounds from .. to, ms."""
    return pd.DataFrame(
        [
            {"round": number, "started_ns": start * MS, "ended_ns": end * MS}
            for number, (start, end) in enumerate(spans)
        ]
    )


def measured(*requests: dict[str, object]) -> dict[str, float]:
    return metrics.of_boot(pd.DataFrame(requests), NOTHING, rounds((100, 300)), NOTHING)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("submit_lag_ms_mean", 3.0),
        ("add_request_ms_mean", 1.0),
        ("tokenize_ms_mean", 2.0),
        ("queue_wait_ms_mean", 4.0),
        ("prefill_first_ms_mean", 7.0),  # 118 - 111
        ("ttft_ms_mean", 17.0),  # 120 - 103
        ("ttft_scheduled_ms_mean", 20.0),
        ("tpot_ms_mean", 11.0),  # (164 - 120) / 4: not to the end at 165, and not by chunks
        ("itl_chunk_ms_mean", 22.0),  # 20, 24
        ("itl_token_ms_mean", 11.0),  # 10, 10, 12, 12
        ("itl_token_ms_p50", 11.0),
        ("latency_ms_mean", 62.0),
    ],
)
def test_one_request_by_hand(name: str, milliseconds: float) -> None:
    assert measured(request())[name] == pytest.approx(milliseconds)


def test_both_conventions_by_their_formulas() -> None:
    """vLLM's and roseinfer's metrics of the same requests, each written out from its source: chunks of
    several tokens, a single token, a failure, a late send."""
    table = [
        request(),
        request(scheduled_ns=110, sent_ns=110, submitted_ns=112, accepted_ns=113, tokenized_ns=113,
                admitted_ns=120, chunk_ns=[131, 191], chunk_tokens=[1, 8], completion_tokens=9,
                token_ns=[130, 137, 145, 152, 160, 168, 175, 183, 190], finished_ns=191),
        request(scheduled_ns=120, sent_ns=125, submitted_ns=126, accepted_ns=127, tokenized_ns=130,
                admitted_ns=131, chunk_ns=[150], chunk_tokens=[1], token_ns=[149], completion_tokens=1,
                finished_ns=150),
        request(completion_tokens=-1, chunk_ns=[], token_ns=[], finished_ns=104, error="too long"),
    ]  # fmt: skip
    values = measured(*table)
    served = [{name: value / MS if name.endswith("_ns") else value for name, value in each.items()}
              for each in table if not each["error"]]  # fmt: skip

    def expect(name: str, samples: list[float]) -> None:
        found = {statistic: values[f"{name}_{statistic}"] for statistic in metrics.STATISTICS}
        levels = {f"p{level}": np.percentile(samples, level) for level in (50, 90, 95, 99)}
        assert found == pytest.approx({"mean": np.mean(samples), **levels})

    vllm_ttft = [each["chunk_ns"][0] - each["sent_ns"] for each in served]
    vllm_latency = [each["chunk_ns"][-1] - each["sent_ns"] for each in served]
    expect("ttft_ms", vllm_ttft)
    expect("tpot_ms", [(latency - ttft) / (each["completion_tokens"] - 1)
                       for latency, ttft, each in zip(vllm_latency, vllm_ttft, served, strict=True)
                       if each["completion_tokens"] > 1])  # fmt: skip
    expect("itl_chunk_ms", [gap for each in served for gap in np.diff(each["chunk_ns"])])

    expect("submit_lag_ms", [max(0, each["sent_ns"] - each["scheduled_ns"]) for each in served])
    expect("add_request_ms", [each["submitted_ns"] - each["sent_ns"] for each in served])
    expect("tokenize_ms", [each["tokenized_ns"] - each["accepted_ns"] for each in served])
    expect("queue_wait_ms", [each["admitted_ns"] - each["tokenized_ns"] for each in served])
    expect("prefill_first_ms", [each["token_ns"][0] - each["admitted_ns"] for each in served])
    expect("itl_token_ms", [gap for each in served for gap in np.diff(each["token_ns"])])
    expect("latency_ms", [each["finished_ns"] - each["sent_ns"] for each in served])
    expect("ttft_scheduled_ms", [each["chunk_ns"][0] - each["scheduled_ns"] for each in served])
    tokens = sum(each["completion_tokens"] for each in served)
    assert values["throughput_tok_s"] == pytest.approx(tokens / 0.2)
    assert values["throughput_req_s"] == pytest.approx(3 / 0.2)


def test_tpot_in_the_engine_and_at_the_client_are_two_things() -> None:
    """The last chunk of a stream comes late, the tokens did not: the client sees it, the engine does not."""
    late = request(chunk_ns=[120, 140, 204])
    values = measured(late)
    assert values["tpot_ms_mean"] == pytest.approx((204 - 120) / 4)
    assert values["itl_token_ms_mean"] == pytest.approx((162 - 118) / 4)  # roseinfer's TPOT of this request


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good = request()  # TTFT 17, TPOT 11, latency 62
    slow_start = request(sent_ns=90)  # TTFT 30, latency 75
    single = request(completion_tokens=1, chunk_ns=[115], token_ns=[114], finished_ns=115)  # no TPOT
    failed = request(completion_tokens=-1, chunk_ns=[], token_ns=[], error="too long")

    def goodput(**objectives: float) -> float:
        frame = pd.DataFrame([good, slow_start, single, failed])
        return metrics.of_boot(frame, NOTHING, rounds((100, 300)), NOTHING, objectives)["goodput_req_s"] * 0.2

    assert goodput(ttft=1000) == pytest.approx(3)
    assert goodput(ttft=17) == pytest.approx(2)  # at most: 17 is met
    assert goodput(ttft=16.9) == pytest.approx(1)
    assert goodput(tpot=5) == pytest.approx(1)  # one token has no TPOT, and meets any
    assert goodput(latency=62) == pytest.approx(2)
    assert goodput(ttft=1000, latency=62, tpot=5) == pytest.approx(1)
    assert goodput(latency=1) == 0
    assert math.isnan(measured(good)["goodput_req_s"])


def test_percentiles_are_linear() -> None:
    values = measured(*(request(finished_ns=103 + latency) for latency in (70, 80, 90, 100)))
    assert values["latency_ms_mean"] == pytest.approx(85)
    assert values["latency_ms_p50"] == pytest.approx(85)
    assert values["latency_ms_p90"] == pytest.approx(97)  # 2.7 steps of 10 from 70
    assert values["latency_ms_p99"] == pytest.approx(99.7)


def test_gaps_are_pooled_over_requests_not_averaged_per_request() -> None:
    many = request(token_ns=[0, 10, 20, 30, 40])
    values = measured(many, request(token_ns=[0, 100]))
    assert values["itl_token_ms_mean"] == pytest.approx((4 * 10 + 100) / 5)


def test_a_single_token_has_no_tpot() -> None:
    single = request(completion_tokens=1, chunk_ns=[120], token_ns=[118])
    assert math.isnan(measured(single)["tpot_ms_p50"])
    assert measured(single, request())["tpot_ms_p50"] == pytest.approx(11)


def test_a_request_sent_early_has_no_lag() -> None:
    assert measured(request(scheduled_ns=104))["submit_lag_ms_mean"] == 0


def test_what_an_engine_does_not_say_is_not_a_sample() -> None:
    silent = request() | {"accepted_ns": -1, "tokenized_ns": -1, "admitted_ns": -1, "token_ns": []}
    values = measured(silent)
    for name in ("tokenize_ms_p50", "queue_wait_ms_p50", "prefill_first_ms_p50", "itl_token_ms_p50"):
        assert math.isnan(values[name])
    assert values["ttft_ms_p50"] == pytest.approx(17)


def test_failures_are_counted_and_are_in_no_latency() -> None:
    failed = request(finished_ns=104, chunk_ns=[], token_ns=[], completion_tokens=-1, error="out of memory")
    values = measured(request(), failed)
    assert values["failed_requests"] == 1
    assert values["latency_ms_p50"] == pytest.approx(62)
    assert values["throughput_req_s"] == pytest.approx(1 / 0.2)
    nothing = measured(failed)
    assert math.isnan(nothing["ttft_ms_p50"])
    assert math.isnan(nothing["throughput_tok_s"])


def test_throughput_is_over_the_wall_time_of_all_rounds() -> None:
    table = pd.DataFrame([request(), request(round=1), request(round=1)])
    values = metrics.of_boot(table, NOTHING, rounds((100, 300), (1000, 1300)), NOTHING)
    assert values["throughput_tok_s"] == pytest.approx(15 / 0.5)
    assert values["throughput_total_tok_s"] == pytest.approx(24 / 0.5)
    assert values["throughput_req_s"] == pytest.approx(3 / 0.5)


def test_peak_concurrency_counts_a_successor_once() -> None:
    one = request(sent_ns=0, finished_ns=10)
    after = request(sent_ns=10, finished_ns=20)
    beside = request(sent_ns=15, finished_ns=30)
    assert measured(one, after)["peak_concurrency"] == 1
    assert measured(one, after, beside)["peak_concurrency"] == 2


@given(
    st.lists(st.lists(st.integers(0, 10_000), min_size=2, max_size=9), min_size=1, max_size=8),
    st.integers(2, 1000),
)
def test_times_scale_with_the_clock(gaps: list[list[int]], factor: int) -> None:
    def with_clock(scale: int) -> dict[str, float]:
        stamps = [np.cumsum([0, *each]) * scale for each in gaps]
        table = [request(chunk_ns=each, completion_tokens=len(each), sent_ns=0) for each in stamps]
        return measured(*table)

    slow, fast = with_clock(factor), with_clock(1)
    for name in ("tpot_ms_mean", "tpot_ms_p99", "ttft_ms_p50", "itl_chunk_ms_p95"):
        assert slow[name] == pytest.approx(factor * fast[name])


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_percentiles_are_ordered(latencies: list[int]) -> None:
    values = measured(*(request(finished_ns=103 + latency) for latency in latencies))
    ordered = [values[f"latency_ms_{statistic}"] for statistic in metrics.STATISTICS[1:]]
    assert ordered == sorted(ordered)


# ---------------------------------------------------------------------------------------------------------
# Steps

PREFILL, DECODE = 0, 1
Row = tuple[int, int, int, int, int]  # step, kind, batch, dropped, ms of host work


def record(rows: Sequence[Row], work: Sequence[tuple[int, int, int, int]]) -> api.RoundRecord:
    """Steps whose schedule phase takes the given ms, and device work (kind, step, start, end) in ms."""
    table = np.full((len(rows), len(api.STEP_COLUMNS)), -1, dtype=np.int64)
    column = {name: index for index, name in enumerate(api.STEP_COLUMNS)}
    for row, (step, kind, batch, dropped, host) in zip(table, rows, strict=True):
        row[[column[name] for name in ("step", "kind", "batch", "tokens", "dropped", "preempted")]] = (
            *(step, kind, batch, batch, dropped, 0),
        )
        row[[column["schedule.start"], column["schedule.end"]]] = (1000 * MS, (1000 + host) * MS)
    matrix = np.array(work, dtype=np.int64).reshape(-1, 4)
    matrix[:, 2:] *= MS
    return api.RoundRecord(
        steps=api.StepTable(list(api.STEP_COLUMNS), len(rows), table.tobytes()),
        device_work=api.DeviceWork(len(matrix), matrix.tobytes()),
    )


# A prefill, two decode steps back to back, a prefill, two decode steps with a hole of 2 ms between them;
# the last is two programs. Then a step that nobody wanted.
EXAMPLE = record(
    [
        (0, PREFILL, 2, 0, 9),
        (1, DECODE, 2, 0, 1),
        (2, DECODE, 2, 0, 1),
        (3, PREFILL, 1, 0, 9),
        (4, DECODE, 3, 0, 3),
        (5, DECODE, 3, 1, 3),
        (6, DECODE, 2, 2, 9),
    ],
    [
        (0, 0, 0, 20),
        (0, 1, 20, 30),
        (0, 2, 30, 40),
        (1, 3, 35, 39),  # a copy beside a program
        (0, 3, 50, 60),
        (0, 4, 60, 74),
        (0, 5, 76, 80),
        (0, 5, 81, 90),
        (2, 5, 90, 93),
        (0, 6, 95, 99),
    ],
)


def frames(source: api.RoundRecord, number: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    steps, device = records.steps_frame(source), records.device_frame(source)
    return steps.assign(round=number), device.assign(round=number)


def test_step_metrics_by_hand() -> None:
    steps, device = frames(EXAMPLE)
    values = metrics.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    # Pairs of decode steps: 1-2 (10 ms, all execution) and 4-5 (16 ms, 13 of them execution).
    assert values["step_ms"] == pytest.approx(13)
    # Every decode step, behind whatever: 1, 2, 4 and 5 took 10, 10, 14 and 16 ms.
    assert metrics.decode_step_ms_mean(steps) == pytest.approx(12.5)
    assert values["exposed_host_us"] == pytest.approx(1500)
    # From 20 (step 1 starts) to 90 (step 5 ends), idle 40-50, 74-76, 80-81.
    assert values["device_busy"] == pytest.approx((70 - 13) / 70)
    assert values["phase_schedule_us"] == pytest.approx(2000)  # decode steps only, dropped ones are none
    assert values["phase_wait_copy_done_us"] == 0


def test_rounds_do_not_run_into_each_other() -> None:
    first, second = (frames(record([(0, DECODE, 1, 0, 1)], [(0, 0, at, at + 1)]), at) for at in (0, 50))
    steps = pd.concat([first[0], second[0].assign(step=1)])
    assert metrics.decode_intervals(steps).empty
    assert metrics.device_busy(steps, pd.concat([first[1], second[1]])) == pytest.approx(1)


def test_no_interval_spans_a_step_that_was_not_recorded() -> None:
    stamps = [(0, 0, 0, 1), (0, 1, 1, 3), (0, 3, 6, 8)]
    steps, _ = frames(record([(number, DECODE, 1, 0, 1) for number in (0, 1, 3)], stamps))
    assert metrics.decode_intervals(steps)["interval_ns"].tolist() == [2 * MS]


def test_steps_without_a_recorder_or_a_device() -> None:
    for steps in (NOTHING, records.steps_frame(api.RoundRecord()).assign(round=0)):
        values = metrics.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), NOTHING)
        assert math.isnan(values["step_ms"])
        assert math.isnan(values["phase_launch_us"])
    steps, device = frames(record([(0, DECODE, 1, 0, 1), (1, DECODE, 1, 0, 1)], []))
    values = metrics.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    assert math.isnan(values["step_ms"])
    assert math.isnan(values["device_busy"])
    assert values["phase_schedule_us"] == pytest.approx(1000)


def test_every_metric_has_a_description_and_the_other_way_round() -> None:
    steps, device = frames(EXAMPLE)
    values = metrics.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    assert values.keys() | set(metrics.MATCHED) == metrics.METRICS.keys()
    assert all(name == metric.name for name, metric in metrics.METRICS.items())


def chain(*batches_and_ms: tuple[int, int]) -> pd.DataFrame:
    """Decode steps of the given batch sizes and lengths, back to back, after one that is in no interval."""
    rows: list[Row] = [(0, DECODE, 1, 0, 1)]
    work = [(0, 0, 0, 1)]
    for number, (batch, length) in enumerate(batches_and_ms, start=1):
        rows.append((number, DECODE, batch, 0, 1))
        work.append((0, number, work[-1][3], work[-1][3] + length))
    return frames(record(rows, work))[0]


def matched(*steps: pd.DataFrame) -> list[float]:
    return [each["step_ms_matched"] for each in metrics.steps_matched(*steps)]


def test_matching_undoes_a_change_of_mix() -> None:
    before = chain((8, 20), (8, 20), (8, 20), (4, 10), (2, 5))
    after = chain((4, 10), (4, 10), (4, 10), (8, 20), (16, 40))  # no faster at any batch size
    # Batch 2 and 16 are left out; batch 8 has weight 3, batch 4 weight 1.
    assert matched(before, after) == pytest.approx([17.5, 17.5])
    faster = chain((4, 9), (4, 9), (8, 16))
    assert matched(before, faster) == pytest.approx([17.5, (3 * 16 + 9) / 4])
    assert all(math.isnan(value) for value in matched(before, chain((64, 80))))


def gapped(*steps: tuple[int, int, int]) -> pd.DataFrame:
    """Decode steps of (batch, ms of host time exposed in front of it, ms on the device)."""
    rows: list[Row] = [(0, DECODE, 1, 0, 1)]
    work = [(0, 0, 0, 1)]
    for number, (batch, exposed, on_device) in enumerate(steps, start=1):
        rows.append((number, DECODE, batch, 0, 1))
        start = work[-1][3] + exposed
        work.append((0, number, start, start + on_device))
    return frames(record(rows, work))[0]


def test_a_step_with_one_part_held_by_hand() -> None:
    before, after = metrics.steps_matched(gapped((4, 5, 15), (4, 7, 15)), gapped((4, 3, 14), (4, 3, 12)))
    assert before == pytest.approx(dict.fromkeys(metrics.MATCHED, 21.0))  # 6 exposed, 15 on the device
    assert after == pytest.approx(
        {"step_ms_matched": 3 + 13, "step_ms_same_device": 3 + 15, "step_ms_same_host": 6 + 13}
    )


some_gapped = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=12
)


@given(st.lists(some_gapped, min_size=2, max_size=3))
def test_the_parts_of_a_change_add_up_to_it(arms: list[list[tuple[int, int, int]]]) -> None:
    first, *others = metrics.steps_matched(*(gapped(*steps) for steps in arms))
    whole, host, device = metrics.MATCHED
    for each in others:
        changes = {name: each[name] - first[name] for name in metrics.MATCHED}
        assert changes[host] + changes[device] == pytest.approx(changes[whole], abs=1e-9, nan_ok=True)
        assert list(first.values()) == pytest.approx([first[whole]] * 3, nan_ok=True)


def test_where_the_host_is_slower_and_computes_beside_the_device_the_parts_trade() -> None:
    """As stats.md warns: the host takes 100 ms a step in both arms, the device 90 and then 85."""
    before, after = metrics.steps_matched(gapped(*[(4, 10, 90)] * 3), gapped(*[(4, 15, 85)] * 3))
    changes = [after[name] / before[name] - 1 for name in metrics.MATCHED]
    assert changes == pytest.approx([0, 0.05, -0.05])


def test_a_device_that_is_slower_in_one_arm_is_not_in_the_step_at_equal_device_times() -> None:
    calm = [(2, 1, 10), (3, 2, 12), (2, 3, 10)]
    slow = [(batch, exposed, 2 * on_device) for batch, exposed, on_device in calm]
    before, after = metrics.steps_matched(gapped(*calm), gapped(*slow))
    assert after["step_ms_same_device"] == pytest.approx(before["step_ms_same_device"])
    assert after["step_ms_same_host"] == pytest.approx(after["step_ms_matched"])
    assert after["step_ms_matched"] > 1.8 * before["step_ms_matched"]


# ---------------------------------------------------------------------------------------------------------
# Records


@pytest.mark.parametrize(
    ("programs", "ran"),
    [
        ([(10, 14), (16, 20)], 8),  # with a hole between them
        ([(10, 14), (12, 18)], 8),  # side by side
        ([(10, 20), (12, 14), (18, 21)], 11),  # one within another
        ([(12, 14), (10, 20)], 10),  # recorded in another order
    ],
)
def test_the_device_time_of_a_step_counts_programs_that_run_side_by_side_once(
    programs: list[tuple[int, int]], ran: int
) -> None:
    work = [(0, 7, 2, 12), *((0, 8, start, end) for start, end in programs), (0, 9, 30, 31)]
    steps = records.steps_frame(record([(step, DECODE, 1, 0, 1) for step in (7, 8, 9)], work))
    assert steps["device_ns"].tolist() == [10 * MS, ran * MS, MS]  # each step by itself


def test_steps_frame_keeps_stamps_exact_and_joins_the_device() -> None:
    big = 2**62 // MS  # a stamp that a float cannot hold
    steps = records.steps_frame(record([(7, DECODE, 1, 0, 1), (8, DECODE, 1, 0, 1)], [(0, 8, big, big + 3)]))
    assert steps["device_start_ns"].tolist() == [-1, big * MS]
    assert steps["device_end_ns"].tolist() == [-1, (big + 3) * MS]
    assert steps["device_ns"].tolist() == [-1, 3 * MS]
    frame = records.steps_frame(EXAMPLE)
    assert frame["kind"].tolist() == ["prefill", "decode", "decode", "prefill", "decode", "decode", "dropped"]
    assert frame.drop(columns="kind").dtypes.eq("int64").all()
    assert frame["launch.start"].eq(-1).all()
    empty = records.steps_frame(api.RoundRecord())
    assert empty.columns.tolist() == frame.columns.tolist()
    assert empty.empty


def test_the_stamps_of_an_engine_that_is_a_client_stand_in_place_of_the_load_generators() -> None:
    order = RunRound(
        round_id=1, target="", plan=[Planned(4, 0, "Hello", 3, False)], concurrency=1, interval_ns=0
    )
    round_ = load_generator.Round(order, started_ns=50)
    round_.sent(50, 51, 52)
    chunks = [
        api.Chunk(4, [], "a", [], tokens=1, arrived_ns=80, lag_ns=2),
        api.Chunk(4, [], "bc", [], tokens=-1, arrived_ns=90, lag_ns=-1),
    ]
    end = api.Finish(4, "length", -1, 3, 55, -1, -1, sent_ns=60, submitted_ns=61, arrived_ns=95)
    round_.arrived(200, [*chunks, end])
    (served,) = records.requests_frame(load_generator.done(round_)).to_dict("records")
    assert [served[f"{name}_ns"] for name in ("sent", "submitted", "finished")] == [60, 61, 95]
    assert served["chunk_ns"].tolist() == [80, 90]
    assert served["chunk_tokens"].tolist() == [1, -1]
    assert served["chunk_lag_ns"].tolist() == [2, -1]
    assert served["digest"] == load_generator.text_digest(["ab", "c"])
    assert list(round_.free_since) == [95]  # its place was free when the end arrived, not when that was told


def test_client_lag_is_of_the_chunks_whose_arrival_is_known() -> None:
    lags = {"chunk_lag_ns": [1, 3, -1]}
    assert measured(request(**lags))["client_lag_ms_mean"] == 2.0
    assert math.isnan(measured(request())["client_lag_ms_mean"])


def test_a_server_that_counts_no_prompt_has_no_total_throughput() -> None:
    found = measured(request(prompt_tokens=-1))
    assert math.isnan(found["throughput_total_tok_s"])
    assert found["throughput_tok_s"] == 25.0


def test_requests_frame_is_what_the_round_saw() -> None:
    planned = [Planned(id, 0, "Hello", 3, False) for id in (4, 9)]
    order = RunRound(round_id=1, target="", plan=planned, concurrency=None, interval_ns=0)
    round_ = load_generator.Round(order, started_ns=50)
    round_.sent(50, 51, 52)
    round_.sent(50, 53, 54)
    round_.arrived(60, [api.Chunk(4, [7], "a", [58]), api.Error(9, "too long")])
    round_.arrived(70, [api.Chunk(4, [8, 9], "bc", [65, 68]), api.Finish(4, "length", 1, 3, 55, 56, 57)])
    assert round_.over
    done = load_generator.done(round_)
    assert (done.started_ns, done.ended_ns) == (50, 70)
    frame = records.requests_frame(done)
    served, failed = frame.to_dict("records")
    scalars = {name: value for name, value in served.items() if not isinstance(value, np.ndarray)}
    assert scalars == {
        "request": 4,
        "scheduled_ns": 50,
        "sent_ns": 51,
        "submitted_ns": 52,
        "accepted_ns": 55,
        "tokenized_ns": 56,
        "admitted_ns": 57,
        "finished_ns": 70,
        "reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "digest": load_generator.digest([7, 8, 9]),
        "error": "",
    }
    assert served["chunk_ns"].tolist() == [60, 70]
    assert served["chunk_lag_ns"].tolist() == [-1, -1]
    assert served["chunk_tokens"].tolist() == [1, 2]
    assert served["token_ns"].tolist() == [58, 65, 68]
    assert (failed["error"], failed["reason"], failed["finished_ns"]) == ("too long", "", 60)
    assert failed["token_ns"].tolist() == []
    assert failed["accepted_ns"] == failed["completion_tokens"] == -1
