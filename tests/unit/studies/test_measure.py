"""What decides, block by block, whether a run goes on."""

import time
from fnmatch import fnmatch
from typing import Any

import pandas as pd
import pytest
from msgspec.structs import replace

from overlap_bench.engines import api
from overlap_bench.harness.analysis.comparison import in_time
from overlap_bench.harness.analysis.values import block_values, enough
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Design, Gate
from overlap_bench.harness.run import forecast
from overlap_bench.harness.run.forecast import Clock, Costs, NoTime, block_seconds, costs, sized
from overlap_bench.harness.run.messages import BlockDone
from overlap_bench.harness.run.trial import warmup
from overlap_bench.harness.stats.stopping import until_clear, until_decided
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.workload.workload import Workload
from tests.support.made_blocks import blocks, manifest


def untold(design: Design) -> list[Values]:
    """The values of a first trial without times at which prompts were tokenized."""
    (first,) = blocks(0.9, 1)
    asked = first.tables["requests"].assign(tokenized_ns=-1)
    return [block_values(design, Block(0, {**first.tables, "requests": asked}))]


@pytest.mark.parametrize(
    "asked",
    [
        {"primary": "tokenize_ms_p50"},
        {"secondaries": ("tokenize_ms_p50",), "gate": Gate(max_regression=0.02, levels=(0.05,))},
    ],
    ids=["primary", "gate"],
)
def test_what_the_first_block_cannot_give_is_not_waited_for_in_the_others(asked: dict[str, Any]) -> None:
    design = manifest(**asked).design
    with pytest.raises(api.EngineError, match="tokenize_ms_p50 has no value in trial 0 of before"):
        enough(design, untold(design))


def test_a_fixed_number_of_blocks_is_run_whatever_they_say() -> None:
    design = manifest(2).design
    values = [block_values(design, each) for each in blocks(0.5, 2)]
    assert [enough(design, values[:done]) for done in (1, 2)] == [False, False]


@pytest.mark.parametrize(
    ("seconds", "minutes", "wanted"),
    [
        ([0, 10, 10, 10, 10], 0.5, 3),
        ([5, 25, 10, 10, 10], 1.0, 2),  # another one may take as long as the longest
        ([30, 10, 10, 10], 1.0, 3),  # and the first boots, which take long, are had once
        ([0, 100, 10], 1.0, 1),  # one there is, however long it took
        ([5, 10, 10, 10, 10], None, 4),
    ],
)
def test_a_run_ends_when_another_block_as_long_as_the_longest_would_not_fit(
    seconds: list[float], minutes: float | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "AROUND_S", 0.0)
    ticks = iter([sum(seconds[:done]) for done in range(len(seconds) + 1)])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    design = manifest(max_minutes=minutes).design
    clock, done = Clock(design, 0, lambda event: None), 0
    clock.hear(BlockDone(-1, seconds[0]))
    for _ in seconds[1:]:
        clock.block_done()
        done += 1
        if clock.is_up():
            break
    assert done == wanted


def test_of_its_minutes_bench_keeps_some_seconds_for_its_own_start_and_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The six minutes for a pull request to vLLM (engines/vllm/README.md) took 361 s without them."""
    assert forecast.for_trials(6.0) == 348
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    clock = Clock(manifest(max_minutes=1.0).design, 0, lambda event: None)
    assert clock.forecast(28.0)[0] == 2
    with pytest.raises(NoTime):  # 58 s would be within the minute
        clock.forecast(29.0)
    monkeypatch.setattr(time, "monotonic", lambda: 29.0)
    clock.block_done()
    assert clock.is_up()


def test_the_first_boots_of_a_resumed_run_are_not_taken_for_a_part_of_its_next_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has already is read first, and takes no time to speak of."""
    clock = clock_after(0.1, monkeypatch, manifest(max_minutes=1.0).design, kept=1)
    clock.block_done()  # the one that it has
    monkeypatch.setattr(time, "monotonic", lambda: 25.0)
    clock.hear(BlockDone(-1, 24.9))
    monkeypatch.setattr(time, "monotonic", lambda: 35.0)
    clock.block_done()
    assert not clock.is_up()  # the next one takes 10 s, not 35


def test_a_run_that_was_resumed_does_not_say_that_it_took_its_minutes_once() -> None:
    plan = manifest(6, max_minutes=3.0)
    once = replace(plan, blocks_in_time=6)
    assert in_time(once, 6) == "6 trials, as many as fit into 3 minutes"
    again = replace(once, resumed_after=[4])
    assert in_time(again, 6) == (
        "6 trials, as many as fit into 3 minutes (and 3 minutes more for each time it was resumed)"
    )


def clock_after(seconds: float, monkeypatch: pytest.MonkeyPatch, design: Design, kept: int = 0) -> Clock:
    """One that began so long ago, with all its minutes for trials."""
    monkeypatch.setattr(forecast, "AROUND_S", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    clock = Clock(design, kept, lambda event: None)
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    return clock


@pytest.mark.parametrize(
    ("minutes", "kept", "asked", "blocks", "said"),
    [
        (3.0, 0, {}, 2, "2 trials fit into 3 minutes; 6, the usual number, take --max-minutes 8.8"),
        (
            10.0,
            0,
            {},
            9,
            "the first boots took 60 s, a trial will take about 60 s: 9 trials fit into 10 minutes",
        ),
        (60.0, 0, {"blocks": 4}, 4, ": all 4 trials fit into 60 minutes"),
        (1.5, 1, {}, 1, "1 trial fits into 1.5 minutes; 6, the usual number, take --max-minutes 7.5"),
        (2.0, 0, {"arms": 1}, 1, "1 trial fits into 2 minutes"),
    ],
)
def test_how_many_blocks_fit_is_said_beforehand(
    minutes: float, kept: int, asked: dict[str, Any], blocks: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = manifest(**{"blocks": 100, "max_minutes": minutes, **asked}).design
    found, told = clock_after(60.0, monkeypatch, design, kept).forecast(60.0)
    assert found == blocks
    assert said in told


@pytest.mark.parametrize(
    ("minutes", "asked", "said"),
    [
        (2.4, {}, "1 trial fits into 2.4 minutes, and a verdict needs 2: * give it --max-minutes 3.8"),
        (0.5, {}, "0 trials fit into 0.5 minutes, and a verdict needs 2: * give it --max-minutes 3.8"),
        (
            3.0,
            {"until": until_clear()},
            "2 trials fit into 3 minutes, and a verdict needs 3: * --max-minutes 5",
        ),
        (5.0, {"until": until_decided(8)}, "4 trials fit into 5 minutes, and a verdict needs 6: * 8.8"),
        (
            1.0,
            {"arms": 1},
            "0 trials fit into 1 minute, and there has to be one: * give it --max-minutes 2.5",
        ),
    ],
)
def test_a_time_in_which_no_verdict_is_possible_is_refused_with_one_in_which_it_is(
    minutes: float, asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = manifest(**{"blocks": 100, "max_minutes": minutes, **asked}).design
    with pytest.raises(NoTime) as refused:
        clock_after(60.0, monkeypatch, design).forecast(60.0)
    assert fnmatch(str(refused.value), said)
    enough = replace(design, max_minutes=float(str(refused.value).rpartition(" ")[2]))
    assert clock_after(60.0, monkeypatch, enough).forecast(60.0)[0] >= design.fewest_judged


REQUESTS = pd.DataFrame(
    {"arm": ["before", "before", "after"], "sent_ns": [0, 0, 0], "finished_ns": [1e9, 3e9, 1e9]}
)
NO_REQUESTS = pd.DataFrame()


@pytest.mark.parametrize(
    ("workload", "rounds", "requests", "seconds"),
    [
        # Boots of 10 s, a warm-up of 1 s an arm, two rounds of 4 s and three segments, of 2 and 1 s.
        (Workload(), [(-1, 1.0), (-1, 1.0), (0, 4.0), (0, 4.0)], REQUESTS, 10 + 2 + 2 * 8 + 3 * 3),
        # 64 requests, 8 at a time, of which 16 warmed up: rounds are four times as long, a segment half.
        (
            Workload(arrival="closed", concurrency=8),
            [(-1, 1.0), (-1, 1.0)],
            NO_REQUESTS,
            10 + 2 + 2 * 8 + 3 * 1,
        ),
        # One request every 20 ms: the 48 others come within 0.96 s.
        (Workload(), [(-1, 1.0), (-1, 1.0)], NO_REQUESTS, 10 + 2 + 2 * (2 + 2 * 0.96) + 3 * 2),
        (Workload(arrival="burst"), [(-1, 1.0), (-1, 1.0)], NO_REQUESTS, 10 + 2 + 2 * 2 + 3 * 2),
    ],
)
def test_what_a_block_takes_follows_from_the_discarded_one(
    workload: Workload, rounds: list[tuple[int, float]], requests: pd.DataFrame, seconds: float
) -> None:
    design = manifest(workload=workload, rounds=2, warmup_rounds=1, segments=3).design
    each = costs(design, warmup(workload), 10.0, rounds, requests)
    assert block_seconds(design, each) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("left_s", "segments", "rounds"),
    [
        (600.0, 16, 3),  # as many as there are without a limit
        (6 * (10 + 2 + 9.5), 9, 1),  # turns first: they decide
        (6 * (10 + 16 + 4.5), 16, 2),
        (0.0, 3, 1),
    ],
)
def test_segments_and_rounds_are_as_many_as_fit_and_never_too_few(
    left_s: float, segments: int, rounds: int
) -> None:
    design = replace(manifest().design, blocks=6, segments=16, rounds=3, aim_s=80.0)
    found = sized(design, Costs(boots=10.0, round=2.0, segment=1.0), left_s)
    assert (found.segments, found.rounds, found.aim_s) == (segments, rounds, None)
    assert replace(found, segments=16, rounds=3, aim_s=80.0) == design
