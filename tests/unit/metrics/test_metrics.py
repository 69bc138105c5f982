"""Metrics against cases worked out by hand, one for each convention, and properties that must hold."""

import math

import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.metrics import block, definitions, digests
from overlap_bench.harness.metrics.requests import gaps_ms, mean_decoding
from overlap_bench.harness.run import load_generator, records
from overlap_bench.harness.run.messages import RunRound
from overlap_bench.harness.workload.plan import Planned
from tests.support.made_blocks import blocks, manifest, shown

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
        "queued_ns": 110,
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
    return block.of_boot(pd.DataFrame(requests), NOTHING, rounds((100, 300)), NOTHING)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("submit_lag_ms_mean", 3.0),
        ("add_request_ms_mean", 1.0),
        ("tokenize_ms_mean", 2.0),
        ("queue_wait_ms_mean", 4.0),
        ("to_queue_ms_mean", 3.0),
        ("in_queue_ms_mean", 1.0),
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
        found = {statistic: values[f"{name}_{statistic}"] for statistic in definitions.STATISTICS}
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
    expect("itl_token_ms", [gap for each in served for gap in np.diff(each["token_ns"])])
    expect("latency_ms", [each["finished_ns"] - each["sent_ns"] for each in served])


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good = request()  # TTFT 17, TPOT 11, latency 62
    slow_start = request(sent_ns=90)  # TTFT 30, latency 75
    single = request(completion_tokens=1, chunk_ns=[115], token_ns=[114], finished_ns=115)  # no TPOT
    failed = request(completion_tokens=-1, chunk_ns=[], token_ns=[], error="too long")

    def goodput(**objectives: float) -> float:
        frame = pd.DataFrame([good, slow_start, single, failed])
        return block.of_boot(frame, NOTHING, rounds((100, 300)), NOTHING, objectives)["goodput_req_s"] * 0.2

    assert goodput(ttft=1000) == pytest.approx(3)
    assert goodput(ttft=17) == pytest.approx(2)  # at most: 17 is met
    assert goodput(ttft=16.9) == pytest.approx(1)
    assert goodput(tpot=5) == pytest.approx(1)  # one token has no TPOT, and meets any
    assert goodput(latency=62) == pytest.approx(2)
    assert goodput(ttft=1000, latency=62, tpot=5) == pytest.approx(1)
    assert goodput(latency=1) == 0
    assert math.isnan(measured(good)["goodput_req_s"])


def test_a_single_token_or_chunk_has_no_tpot() -> None:
    token = request(completion_tokens=1, chunk_ns=[120], token_ns=[118])
    for single in (token, request(chunk_ns=[120]), request(chunk_ns=[120, 120])):
        assert math.isnan(measured(single)["tpot_ms_p50"])
        assert measured(single, request())["tpot_ms_p50"] == pytest.approx(11)


def test_a_request_sent_early_has_no_lag() -> None:
    assert measured(request(scheduled_ns=104))["submit_lag_ms_mean"] == 0


def test_what_an_engine_does_not_say_is_not_a_sample() -> None:
    silent = request() | {"accepted_ns": -1, "tokenized_ns": -1, "admitted_ns": -1, "token_ns": []}
    values = measured(silent)
    for name in ("tokenize_ms_p50", "queue_wait_ms_p50", "prefill_first_ms_p50", "itl_token_ms_p50"):
        assert math.isnan(values[name])
    older = request()
    del older["queued_ns"]  # as runs stored it before there was such a stamp
    assert math.isnan(measured(older)["in_queue_ms_p50"])
    assert measured(older)["queue_wait_ms_p50"] == pytest.approx(4)
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
    values = block.of_boot(table, NOTHING, rounds((100, 300), (1000, 1300)), NOTHING)
    assert values["throughput_tok_s"] == pytest.approx(15 / 0.5)
    assert values["throughput_total_tok_s"] == pytest.approx(24 / 0.5)
    assert values["throughput_req_s"] == pytest.approx(3 / 0.5)


def test_a_stamp_that_is_not_known_makes_no_gap() -> None:
    stamps = pd.Series([np.array([1, -1, 9]), np.array([2, 5, -1, 8, 9]), np.array([4])], dtype=object)
    assert gaps_ms(stamps * MS).tolist() == [3, 1]
    assert gaps_ms(pd.Series([np.empty(0, np.int64)], dtype=object)).size == 0


def test_a_row_is_all_that_a_metric_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made, compared, printed and in the frames of a run, and nothing else has to know of it."""
    longest = definitions.Metric(
        "longest_prompt", "tokens", shown=True, of_boot=lambda boot: boot.requests["prompt_tokens"].max()
    )
    monkeypatch.setitem(definitions.METRICS, longest.name, longest)
    assert measured(request(prompt_tokens=7), request())[longest.name] == 7
    found = comparison.result(manifest(), blocks(0.9))
    assert found.comparisons[0].metrics[longest.name].change == 0
    assert longest.name in shown(found, 120)


def test_peak_concurrency_counts_a_successor_once() -> None:
    one = request(sent_ns=0, finished_ns=10)
    after = request(sent_ns=10, finished_ns=20)
    beside = request(sent_ns=15, finished_ns=30)
    assert measured(one, after)["peak_concurrency"] == 1
    assert measured(one, after, beside)["peak_concurrency"] == 2


def test_mean_concurrency_is_the_time_in_flight_over_that_of_the_rounds() -> None:
    """As SGLang's bench_serving has it: the sum of latencies over the duration."""
    apart, beside = request(sent_ns=100, finished_ns=150), request(sent_ns=200, finished_ns=300)
    failed = request(sent_ns=100, finished_ns=300, error="gone")
    assert measured(apart, beside, beside, failed)["mean_concurrency"] == pytest.approx((50 + 2 * 100) / 200)
    assert math.isnan(measured(failed)["mean_concurrency"])
    assert math.isnan(measured(apart, beside | {"finished_ns": -1})["mean_concurrency"])  # of an import


# ---------------------------------------------------------------------------------------------------------
# Records


def test_the_stamps_of_an_engine_that_is_a_client_stand_in_place_of_the_load_generators() -> None:
    order = RunRound(targets=[""], plan=[Planned(4, 0, "Hello", 3, False)], concurrency=1, interval_ns=0)
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
    assert served["digest"] == digests.of_text(["ab", "c"])
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
    order = RunRound(targets=[""], plan=planned, concurrency=None, interval_ns=0)
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
        "queued_ns": -1,
        "admitted_ns": 57,
        "finished_ns": 70,
        "reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "digest": digests.of_tokens([7, 8, 9]),
        "error": "",
    }
    assert served["chunk_ns"].tolist() == [60, 70]
    assert served["chunk_lag_ns"].tolist() == [-1, -1]
    assert served["chunk_tokens"].tolist() == [1, 2]
    assert served["token_ns"].tolist() == [58, 65, 68]
    assert (failed["error"], failed["reason"], failed["finished_ns"]) == ("too long", "", 60)
    assert failed["token_ns"].tolist() == []
    assert failed["accepted_ns"] == failed["completion_tokens"] == -1


def test_the_batch_that_a_client_sees_is_that_of_requests_between_their_first_and_last_chunk() -> None:
    frame = pd.DataFrame(
        [
            request(chunk_ns=[100, 130, 160]),
            request(chunk_ns=[120, 140]),
            request(chunk_ns=[200, 210]),  # alone; nobody decodes from 160 to 200
        ]
    )
    # one from 100 to 120, two from 120 to 140, one from 140 to 160 and from 200 to 210
    assert mean_decoding(frame) == pytest.approx((20 + 40 + 20 + 10) / 70)
    assert math.isnan(mean_decoding(pd.DataFrame([request(chunk_ns=[120])])))
