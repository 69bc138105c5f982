"""What TTFT is made of."""

from msgspec.structs import replace

from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.report.tables import request_times
from tests.support.made_blocks import manifest, result

QUEUE, PREFILL, TTFT = "waiting for a place in a batch", "prefill, to the first token", "TTFT, from the send"


def rows(found: Comparison) -> dict[str, tuple[str, ...]]:
    table = request_times(found)
    assert table is not None
    assert all(len(row) == len(table.columns) for row in table.rows)
    return {row[0].partition(" to the first token's")[0]: row[1:] for row in table.rows}


def test_a_longer_ttft_is_told_by_its_stages() -> None:
    """Requests of the after arm wait longer, and are prefilled as before."""
    (only,) = result(1.0, wait_ms=0.1).comparisons
    found = rows(only)
    assert list(found) == ["due, but not sent yet", QUEUE, PREFILL, TTFT, "latency, from the send to the end"]
    assert found[QUEUE][:3] == ("0.198", "0.748", "+0.55 ms")  # 0 to 1.1 ms longer
    assert found[PREFILL][0] == found[PREFILL][1] == "2.999"
    assert found[TTFT][:2] == ("3.2", "3.75")


def test_the_wait_of_an_engine_that_says_when_it_queued_a_request_is_told_in_two_parts() -> None:
    (only,) = result().comparisons
    wait = only.metrics["queue_wait_ms_mean"]
    split = {
        f"{name}_queue_ms_mean": replace(wait, before=each) for name, each in (("to", 0.15), ("in", 0.05))
    }
    found = rows(replace(only, metrics={**only.metrics, **split}))
    assert found["on its way to the scheduler"][0] == "0.15"
    assert found["waiting in the scheduler's queue"][0] == "0.05"
    assert QUEUE not in found


def test_one_arm_has_no_change_and_an_engine_without_stamps_no_stages() -> None:
    (alone,) = result(plan=manifest(2, arms=1)).comparisons
    assert rows(alone)[PREFILL] == ("2.999",)
    bare = {
        name: row for name, row in alone.metrics.items() if name.startswith(("ttft", "latency", "submit"))
    }
    assert request_times(replace(alone, metrics=bare)) is None
