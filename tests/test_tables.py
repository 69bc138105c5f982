"""From stored blocks to what is printed: the JSON object, the sentence, the tables, the warnings."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from engines import api
from harness import comparison, listings, metrics, records, spelling, store, tables
from harness.comparison import Block
from harness.design import Arm, Design
from harness.machine import Code, Machine
from harness.store import Manifest
from harness.variants import load_variants
from harness.workload import Workload

TOP = {"schema_version", "run", "device", "stopped_because", "comparisons"}
COMPARISON = {
    "variant", "before", "after", "blocks", "confidence", "margin", "primary", "metrics", "outputs",
    "failures", "mechanism", "limit", "prediction", "warnings",
}  # fmt: skip
METRIC = {
    "unit", "better", "before", "after", "change", "delta", "ci_low", "ci_high", "sd", "p", "p_adjusted",
    "verdict", "floor",
}  # fmt: skip
REQUESTS = 12
MS = 1_000_000


def described(kind: str = "emulated") -> api.Description:
    return api.Description(
        engine="e",
        versions={},
        device={"kind": kind, "name": "x"},
        model={"name": "m", "vocabulary": 9, "context": 99},
        toggles={},
        deterministic=True,
        pids={},
    )


def manifest(blocks: int = 6, arms: int = 2, **design: Any) -> Manifest:
    both = (
        Arm(name="before", engine="e", options=api.EngineOptions(), toggles={"h2d": "pageable"}),
        Arm(name="after", engine="e", options=api.EngineOptions(), toggles={"h2d": "pinned"}),
    )
    planned = Design(name="pinned-h2d", arms=both[:arms], blocks=blocks, **{"workload": Workload(), **design})
    return Manifest(
        schema_version=store.SCHEMA_VERSION,
        run="a-run",
        created="2026-05-04T03:02:01+00:00",
        design=planned,
        after_first=[block % 2 == 0 for block in range(blocks)],
        machine=Machine(cpu="a cpu", cores=2, kernel="6", memory_gib=8, gpus=[]),
        code=Code(commit="abc", changes=""),
        versions={},
        descriptions={arm.name: described() for arm in planned.arms},
    )


def requests(tpot_ms: float, lag_ms: float = 0.1, digest: str = "d", wait_ms: float = 0.0) -> pd.DataFrame:
    """Requests of 5 tokens, one chunk each; `wait_ms` is added to the queue wait of each later request."""
    rows = []
    for index in range(REQUESTS):
        due = index * 20 * MS
        sent = due + round(lag_ms * MS)
        admitted = sent + round((0.2 + wait_ms * index) * MS)
        chunks = admitted + (3 * MS + np.arange(5) * tpot_ms * MS).astype(np.int64)
        rows.append(
            {
                "request": index,
                "scheduled_ns": due,
                "sent_ns": sent,
                "submitted_ns": sent + 1000,
                "accepted_ns": sent + 2000,
                "tokenized_ns": sent + 2000,
                "admitted_ns": admitted,
                "chunk_ns": chunks,
                "chunk_tokens": np.ones(5, dtype=np.int64),
                "token_ns": chunks - 1000,
                "finished_ns": int(chunks[-1]) + 1000,
                "reason": "length",
                "prompt_tokens": 1,
                "completion_tokens": 5,
                "digest": f"{digest}{index}",
                "error": "",
            }
        )
    return pd.DataFrame(rows)


def steps(interval_ms: float, count: int = 10) -> pd.DataFrame:
    rows = []
    for index in range(count):
        start = round(index * interval_ms * MS)
        row = {"step": index, "kind": "decode" if index else "prefill", "batch": 4, "tokens": 4, "dropped": 0}
        row |= {"preempted": 0, "device_start_ns": start, "device_end_ns": start + MS, "device_ns": MS}
        for phase in api.PHASES:
            row |= {f"{phase}.start": start, f"{phase}.end": start + 1000}
        rows.append(row)
    return pd.DataFrame(rows)


def block(number: int, arms: dict[str, dict[str, pd.DataFrame]]) -> Block:
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in store.TABLES}
    for arm, frames in arms.items():
        for name, frame in frames.items():
            parts[name].append(frame.assign(arm=arm, round=0))
    return Block(
        number,
        {
            name: pd.concat(each, ignore_index=True) if each else pd.DataFrame()
            for name, each in parts.items()
        },
    )


def side(tpot_ms: float, copies: int = 7, **more: Any) -> dict[str, pd.DataFrame]:
    asked = requests(tpot_ms, **more)
    made = steps(tpot_ms)
    row = {"counter.copies": copies * len(made), "load_1m": 0.1, "steal_share": 0.0, "others_share": 0.0}
    row |= {"started_ns": 0, "ended_ns": int(asked["finished_ns"].max())}
    work = made[["step", "device_start_ns", "device_end_ns"]].set_axis(["step", "start_ns", "end_ns"], axis=1)
    rounds = pd.DataFrame([row])
    return {"requests": asked, "steps": made, "rounds": rounds, "work": work.assign(kind="program")}


def blocks(factor: float, count: int = 6, noise: float = 0.001, **after: Any) -> list[Block]:
    """`count` blocks in which the after arm's TPOT is `factor` times the before arm's."""
    random = np.random.default_rng(1)
    pairs = np.exp(random.normal(0, noise, (count, 2)))
    return [
        block(number, {"before": side(4 * left), "after": side(4 * factor * right, **after)})
        for number, (left, right) in enumerate(pairs)
    ]


def result(factor: float = 0.9, plan: Manifest | None = None, **more: Any) -> dict[str, Any]:
    plan = plan or manifest()
    return comparison.result(plan, blocks(factor, plan.design.blocks, **more))


def shown(found: dict[str, Any], width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False).print(*tables.to_terminal(found, width), sep="\n")
    return text.getvalue()


# -- the JSON object --------------------------------------------------------------------------------------


def test_json_has_exactly_the_promised_keys() -> None:
    found = result()
    assert set(found) == TOP
    (only,) = found["comparisons"]
    assert set(only) == COMPARISON
    assert {frozenset(row) for row in only["metrics"].values()} == {frozenset(METRIC)}
    assert set(only["outputs"]) == {"compared", "identical", "near_ties"}
    assert found["device"] == "emulated"
    assert json.loads(msgspec.json.encode(found)) == found


def test_a_faster_after() -> None:
    only = result(0.9)["comparisons"][0]
    row = only["metrics"]["tpot_ms_p50"]
    assert row["verdict"] == "faster"
    assert row["change"] == pytest.approx(-0.1, abs=0.002)
    assert row["ci_low"] < row["change"] < row["ci_high"] < 0
    assert row["change"] == pytest.approx(row["after"] / row["before"] - 1)
    assert only["outputs"] == {"compared": 72, "identical": 72, "near_ties": None}
    assert only["mechanism"]["copies"] == {"unit": "per step", "before": 7, "after": 7}
    assert only["mechanism"]["mean_batch"]["before"] == 4
    assert set(only["limit"]) == {"device_busy", "exposed_host_us"}
    assert only["limit"]["exposed_host_us"]["before"] == pytest.approx(3000, rel=0.01)


def test_what_can_be_zero_has_a_delta_and_no_change() -> None:
    row = result(lag_ms=0.3)["comparisons"][0]["metrics"]["submit_lag_ms_p99"]
    assert row["change"] is None
    assert row["delta"] == pytest.approx(0.2)


def test_only_declared_metrics_carry_verdicts() -> None:
    found = result(plan=manifest(secondaries=("latency_ms_p50", "itl_token_ms_p50")))
    metrics_of = found["comparisons"][0]["metrics"]
    judged = {name for name, row in metrics_of.items() if row["verdict"] is not None}
    assert judged == {"tpot_ms_p50", "latency_ms_p50", "itl_token_ms_p50"}
    adjusted = {name for name, row in metrics_of.items() if row["p_adjusted"] is not None}
    assert adjusted == {"latency_ms_p50", "itl_token_ms_p50"}


def test_offered_load_gets_no_verdict() -> None:
    plan = manifest(secondaries=("throughput_req_s",))
    row = result(0.9, plan)["comparisons"][0]["metrics"]["throughput_req_s"]
    assert row["change"] is not None
    assert row["verdict"] is None


@pytest.mark.parametrize(
    "workload",
    [
        Workload(arrival="poisson", rate=50.0),
        Workload(arrival="gamma", rate=50.0, burstiness=0.5),
        Workload(arrival="trace", trace="x", max_new_tokens=None),
    ],
)
def test_offered_load_is_told_from_what_was_due(workload: Workload) -> None:
    plan = manifest(secondaries=("throughput_req_s",), workload=workload)
    assert result(0.9, plan)["comparisons"][0]["metrics"]["throughput_req_s"]["verdict"] is None
    closed = manifest(secondaries=("throughput_req_s",), workload=Workload(arrival="closed", concurrency=4))
    assert result(0.9, closed)["comparisons"][0]["metrics"]["throughput_req_s"]["verdict"] is not None


def test_goodput_is_made_from_the_objectives_of_the_design() -> None:
    plan = manifest(goodput={"tpot": 3.8}, secondaries=("goodput_req_s",))
    found = result(0.9, plan)
    row = found["comparisons"][0]["metrics"]["goodput_req_s"]
    assert row["before"] == 0  # 4 ms a token, in every block
    assert row["after"] > 0
    assert row["change"] is None
    assert row["verdict"] == "better"
    assert "goodput_req_s" in shown(found, 120)
    assert "goodput_req_s" not in result(0.9)["comparisons"][0]["metrics"]


def test_a_primary_that_is_zero_somewhere_is_told_in_its_unit() -> None:
    found = result(0.9, manifest(goodput={"tpot": 3.8}, primary="goodput_req_s"))
    only = found["comparisons"][0]
    sentence = tables.conclusion(found, only)
    assert "goodput_req_s changed by +" in sentence
    assert "req/s" in sentence
    assert "better" in sentence
    assert not any("blocks would detect" in line for line in only["warnings"])


def test_one_block_has_numbers_and_no_verdict() -> None:
    found = result(plan=manifest(blocks=1))
    row = found["comparisons"][0]["metrics"]["tpot_ms_p50"]
    assert row["change"] is not None
    assert {row[name] for name in ("ci_low", "ci_high", "sd", "p", "verdict")} == {None}
    assert "one block gives no verdict" in tables.conclusion(found, found["comparisons"][0])


def test_one_arm_alone() -> None:
    alone = [block(number, {"before": side(4)}) for number in range(2)]
    found = comparison.result(manifest(blocks=2, arms=1), alone)
    only = found["comparisons"][0]
    assert only["after"] is None
    row = only["metrics"]["tpot_ms_p50"]
    assert {name for name, value in row.items() if value is not None} == {"unit", "better", "before"}
    assert "tpot_ms_p50 is 4 ms over 2 blocks" in tables.conclusion(found, only)
    assert "One arm" in shown(found, 100)
    assert "| tpot_ms_p50 | 4 ms |" in tables.to_markdown(found)


def test_an_engine_without_step_records() -> None:
    bare = [
        block(
            number,
            {name: {key: side(4)[key] for key in ("requests", "rounds")} for name in ("before", "after")},
        )
        for number in range(2)
    ]
    only = comparison.result(manifest(blocks=2), bare)["comparisons"][0]
    assert only["limit"] == {}
    assert only["mechanism"]["copies"]["unit"] == "per round"
    assert "device_busy" not in only["metrics"]


def test_outputs_are_compared_by_request() -> None:
    found = result(digest="e")
    assert found["comparisons"][0]["outputs"] == {"compared": 72, "identical": 0, "near_ties": None}
    assert "OUTPUTS DIFFER in 72 of 72 requests" in tables.conclusion(found, found["comparisons"][0])


def test_requests_that_failed_in_both_arms_have_no_equal_outputs() -> None:
    measured = blocks(0.9)
    for each in measured:
        asked = each.tables["requests"]
        asked.loc[asked["request"] < 2, ["error", "digest"]] = ["no room", "nothing"]
        only_after = (asked["request"] == 2) & (asked["arm"] == "after")
        asked.loc[only_after, ["error", "digest"]] = ["no room", "nothing"]
    found = comparison.result(manifest(), measured)["comparisons"][0]
    assert found["outputs"] == {"compared": 60, "identical": 54, "near_ties": None}


def test_a_metric_that_one_block_lacks_is_compared_over_no_others() -> None:
    """A mean over other blocks on one side would compare different things."""
    measured = blocks(0.9)
    asked = measured[2].tables["requests"]
    asked.loc[asked["arm"] == "after", ["accepted_ns", "tokenized_ns"]] = -1
    rows = comparison.result(manifest(), measured)["comparisons"][0]["metrics"]
    assert rows["latency_ms_p50"]["after"] is not None
    assert rows["queue_wait_ms_p50"]["before"] is not None
    assert {rows["queue_wait_ms_p50"][name] for name in ("after", "change", "delta", "ci_low")} == {None}


# -- sentences and warnings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [
        (0.9, 0.001, "faster."),
        (1.1, 0.001, "slower."),
        (1.0, 0.0005, "same, within ±1%"),
        (0.995, 0.0002, "a change of −0.5"),
        (1.0, 0.05, "undecided, the interval holds 0 and reaches beyond ±1%"),
    ],
)
def test_the_conclusion_says_the_verdict(factor: float, noise: float, expected: str) -> None:
    found = result(factor, noise=noise)
    assert expected in tables.conclusion(found, found["comparisons"][0])


def warnings(found: dict[str, Any]) -> str:
    return "\n".join(found["comparisons"][0]["warnings"])


def test_warnings_that_apply_are_given() -> None:
    assert "emulated device" in warnings(result())
    assert "late sends (submit lag): requests were sent up to 3.00 ms late" in warnings(result(lag_ms=3.0))
    assert "too few blocks: 3" in warnings(result(plan=manifest(blocks=3)))
    assert "one block" in warnings(result(plan=manifest(blocks=1)))
    assert "blocks would detect a change of 1%" in warnings(result(1.0, noise=0.05))
    assert "not steady: the queue wait grew" in warnings(result(wait_ms=20.0))
    quiet = warnings(result())
    stolen = blocks(0.9)
    for each in stolen:
        each.tables["rounds"][["steal_share", "others_share"]] = 0.2
    noisy = warnings(comparison.result(manifest(), stolen))
    assert "up to 20.0% of the CPU time was taken by other virtual machines" in noisy
    assert "processes that are not the run's used up to 20.0%" in noisy
    for word in ("late sends", "too few", "not steady", "noise", "drift", "undecided"):
        assert word not in quiet


def test_reads_that_are_late_by_a_good_part_of_a_gap_are_told_of() -> None:
    lagging = blocks(1.0)  # its gaps are of 4 ms
    for each, lag in ((lagging, 3 * MS), (punctual := blocks(1.0), MS)):
        for one in each:
            requests = one.tables["requests"]
            requests["chunk_lag_ns"] = [np.full(5, lag)] * len(requests)
    assert "late reads (client lag): bytes lay unread for up to 3.00 ms (p99)" in warnings(
        comparison.result(manifest(), lagging)
    )
    assert "late reads" not in warnings(comparison.result(manifest(), punctual))
    lagging[0].tables["rounds"]["counter.clock_moved_us"] = 2000
    assert "the time of day was set by 2 ms" in warnings(comparison.result(manifest(), lagging))


def test_failed_requests_are_shown_with_their_first_causes() -> None:
    assert "Failed requests" not in tables.to_markdown(result())
    failing = blocks(1.0)
    after = failing[2].tables["requests"]
    mine = after.index[after["arm"] == "after"]
    for index, cause in zip(mine, ("HTTP 500", "timed out", "HTTP 500", "cut", "refused"), strict=False):
        after.loc[index, "error"] = cause
    found = comparison.result(manifest(), failing)
    asked = 6 * REQUESTS
    assert found["comparisons"][0]["failures"]["before"] == {"failed": 0, "requests": asked, "causes": {}}
    shown = tables.to_markdown(found)
    assert f"| after | 5 | {asked} | 2 × HTTP 500; 1 × timed out; 1 × cut; and 1 other causes |" in shown
    assert f"| before | 0 | {asked} |  |" in shown


def test_a_server_at_a_url_is_one_boot_and_undecided() -> None:
    arms = tuple(
        Arm(name=name, engine="e", options=api.EngineOptions(), toggles={"url": name})
        for name in ("before", "after")
    )
    plan = manifest(blocks=1)
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
    found = result(plan=plan)
    row = found["comparisons"][0]["metrics"]["tpot_ms_p50"]
    assert row["verdict"] == "undecided: one boot per side"
    assert "undecided: one boot per side." in tables.conclusion(found, found["comparisons"][0])


@pytest.mark.parametrize(
    ("after_first", "said"),
    [
        ([True, False] * 3, "position effect: the arm that ran second was at +2.0%"),
        ([True, False, False] * 2, "weakened by a position effect: the arm that ran second was at +2.0%"),
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
    assert any(
        line.startswith(said) for line in comparison.result(plan, biased)["comparisons"][0]["warnings"]
    )


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


def test_one_order_only_is_told() -> None:
    plan = msgspec.structs.replace(manifest(), after_first=[True] * 6)
    assert "every block ran in the same order" in warnings(comparison.result(plan, blocks(0.9)))


def test_drift_is_told() -> None:
    moving = [
        block(number, {"before": side(4 * 1.01**number), "after": side(3.6 * 1.01**number)})
        for number in range(6)
    ]
    assert "drift: both arms moved by +5.1%" in warnings(comparison.result(manifest(), moving))


# -- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 72, 89, 90, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = shown(result(0.9, manifest(secondaries=("latency_ms_p50",))), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Before and after", "Outputs", "Mechanism", "Limit", "Warnings", "tpot_ms_p50", "faster"):
        assert word in text


def test_sixty_columns_break_no_name() -> None:
    lines = shown(result(), 60).splitlines()
    for name in ("throughput_tok_s", "submit_lag_ms_p99", "itl_token_ms_p99"):
        assert any(name in line for line in lines)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_listing_breaks_no_name(width: int) -> None:
    found = load_variants()
    text = io.StringIO()
    Console(file=text, width=width).print(listings.variants(found, width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert {line.split()[0] for line in lines if line.strip()} >= set(found)
    if width == 80:
        assert {"interpreter", "bottleneck"} <= {word.strip(",:;") for line in lines for word in line.split()}


def test_the_primary_comes_first_and_judged_ones_next() -> None:
    only = result(plan=manifest(secondaries=("latency_ms_p50",)))["comparisons"][0]
    names = [row[0] for row in tables.metric_table(only).rows]
    assert names[:2] == ["tpot_ms_p50", "latency_ms_p50"]
    assert len(names) == len(set(names))


def test_markdown_is_a_table_of_even_rows() -> None:
    lines = [line for line in tables.to_markdown(result()).splitlines() if line.startswith("|")]
    widths: list[int] = [line.count("|") for line in lines]
    starts = [index for index, line in enumerate(lines) if set(line) <= set("|-: ")]
    for start, end in zip(starts, [*(each - 1 for each in starts[1:]), len(lines)], strict=True):
        assert len(set(widths[start - 1 : end])) == 1


def test_csv_has_every_metric_unrounded() -> None:
    found = result()
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(found))))
    of_metrics = found["comparisons"][0]["metrics"]
    assert {row["metric"] for row in rows} == set(of_metrics)
    tpot = next(row for row in rows if row["metric"] == "tpot_ms_p50")
    assert float(tpot["change"]) == of_metrics["tpot_ms_p50"]["change"]
    assert tpot["floor"] == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (12.3456, "12.35"), (3042.19, "3,042"), (1e-5, "1.00e-05"), (-0.5, "-0.5")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert spelling.number(value) == text


@pytest.mark.parametrize(
    ("delta", "low", "high", "text"),
    [
        (-1030.4, -2055.0, -3.121, ("−1,030 us", "[−2,055, −3.12]")),
        (999.7, 0.0421, 31_000.0, ("+1,000 us", "[+0.0421, +31,000]")),
    ],
)
def test_a_difference_of_thousands_is_written_out(
    delta: float, low: float, high: float, text: tuple[str, str]
) -> None:
    row = {"change": None, "delta": delta, "unit": "us", "ci_low": low, "ci_high": high}
    assert (spelling.difference(row), spelling.interval(row)) == text
    assert spelling.floor({**row, "floor": 1234.5}) == "±1,234"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(-0.0042, "−0.42%"), (0.0587, "+5.9%"), (9.42, "+942.0%"), (336.252, "+33,625%")],
)
def test_percents(fraction: float, text: str) -> None:
    assert spelling.percent(fraction) == text


def test_the_frames_here_have_the_columns_of_the_real_ones() -> None:
    done_columns: Sequence[str] = requests(4).columns
    empty = records.steps_frame(api.RoundRecord())
    assert set(steps(4).columns) == set(empty.columns)
    assert {"request", "digest", "error"} <= set(done_columns)
    assert "tpot_ms_p50" in metrics.METRICS
