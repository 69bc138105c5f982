"""vLLM's steps as records: what its scheduler says goes in as its SchedulerOutput has it."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from enum import Enum, auto
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overlap_bench.engines.api import RoundRecord
from overlap_bench.engines.paced.device import Program
from overlap_bench.engines.steps import processed
from overlap_bench.engines.tracing import SETTLED
from overlap_bench.engines.vllm.steps import Steps, finish_begun
from overlap_bench.harness.run.records import beside_frame, broken, steps_frame


def scheduled(
    new: tuple[str, ...] = (),
    old: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
    drafts: dict[str, list[int]] | None = None,
    parts: dict[str, int] | None = None,
) -> Any:
    """A step with these requests: `new` with prompts of 16 tokens, and `old` by their tokens so far; of
    `parts` so many tokens are computed anew."""
    old, drafts = old or {}, drafts or {}
    tokens = dict.fromkeys(new, 16) | {name: 1 + len(drafts.get(name, ())) for name in old} | (parts or {})
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=list(new),
        scheduled_spec_decode_tokens=drafts,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(old), num_output_tokens=list(old.values()), resumed_req_ids=set(resumed)
        ),
    )


def steps_of(record: RoundRecord) -> array[int]:
    return array("q", record.steps.data)


def test_a_step_is_a_prefill_a_decode_or_both() -> None:
    steps = Steps()
    outputs = (
        scheduled(new=("a", "b")),
        scheduled(old={"a": 1, "b": 1}),
        scheduled(new=("c",), old={"a": 2}),
        scheduled(old={"d": 0}),  # the second part of a long prompt
        scheduled(old={"a": 3, "b": 3}, resumed=("b",)),  # its KV is computed anew
        scheduled(old={"a": 4, "b": 3}, parts={"b": 9}),  # and has a second part
        scheduled(old={"a": 5, "b": 4}, drafts={"a": [7, 8]}),
    )
    for number, output in enumerate(outputs):
        steps.made(output, 10 * number, 10 * number + 1)
        steps.finished(0, 10 * number + 5, 10 * number + 6)
    frame = steps_frame(steps.record())
    assert list(frame["kind"]) == ["prefill", "decode", "mixed", "prefill", "mixed", "mixed", "decode"]
    assert list(frame["batch"]) == [2, 2, 2, 1, 2, 2, 2]
    assert list(frame["tokens"]) == [32, 2, 17, 1, 2, 10, 4]


def test_a_step_is_said_once_and_its_delay_spent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step ahead, a turn's first call finishes no step: nothing new is said then."""
    monkeypatch.setattr("overlap_bench.engines.delay.spin", lambda ns: ns)
    steps = Steps()
    steps.put_delay("output", 1_000_000)
    steps.said()
    for number in range(2):
        steps.made(scheduled(old={"a": 1}), 10 * number, 10 * number + 1)
        steps.finished(0, 10 * number + 5, 10 * number + 6)
        steps.said()
        steps.said()
    assert steps.put_delay("", 0) == 2_000_000


def test_a_paced_device_says_when_a_step_ran_and_what_the_host_did_for_it() -> None:
    steps = Steps()
    program = Program(
        prepare_ns=111, launch_ns=120, launched_ns=125, begin_ns=122, end_ns=145, wait_ns=126, woke_ns=147
    )
    steps.made(scheduled(old={"a": 1}), 100, 110)
    steps.finished(0, 150, 160, program)
    record = steps.record()
    assert broken(record, 0, 1 << 62) == ""
    (row,) = steps_frame(record).to_dict("records")
    assert (row["device_start_ns"], row["device_end_ns"]) == (122, 145)
    assert (row["metadata.start"], row["metadata.end"]) == (111, 120)
    assert (row["launch.start"], row["launch.end"]) == (120, 125)
    assert (row["wait.copy_done.start"], row["wait.copy_done.end"]) == (126, 147)


def test_the_model_has_what_lies_between_the_two_calls_of_the_scheduler() -> None:
    steps = Steps()
    steps.made(scheduled(old={"a": 1}), 100, 110)
    steps.finished(0, 150, 160)
    steps.said()
    record = steps.record()
    assert broken(record, 0, 1 << 62) == ""
    (row,) = steps_frame(record).to_dict("records")
    assert (row["schedule.start"], row["schedule.end"]) == (100, 110)
    assert (row["device_start_ns"], row["device_end_ns"], row["device_ns"]) == (110, 150, 40)
    assert (row["append.start"], row["append.end"]) == (150, 160)
    assert row["output.start"] == 160
    assert row["output.end"] > 160


def test_a_step_that_was_scheduled_ahead_began_when_the_one_before_it_had_ended() -> None:
    steps = Steps()
    steps.made(scheduled(old={"a": 1}), 0, 10)
    steps.made(scheduled(old={"a": 2}), 20, 30)
    steps.finished(0, 100, 110)
    steps.made(scheduled(old={"a": 3}), 120, 130)
    steps.finished(1, 200, 210)
    steps.finished(0, 300, 310)
    frame = steps_frame(steps.record())
    assert list(frame["device_start_ns"]) == [10, 100, 200]
    assert list(frame["device_end_ns"]) == [100, 200, 300]
    assert list(frame["dropped"]) == [0, 1, 0]


def test_a_call_that_schedules_nothing_is_no_step() -> None:
    steps = Steps()
    steps.made(scheduled(old={"a": 1}), 0, 10)
    steps.made(scheduled(), 20, 30)
    steps.finished(0, 100, 110)
    steps.finished(0, 120, 120)
    steps.said()
    assert list(steps_frame(steps.record())["step"]) == [0]


def test_drafts_count_and_so_do_the_tokens_that_a_step_gives() -> None:
    steps = Steps()
    drafts = {"a": [-1] * 3, "b": [-1] * 3, "c": [-1]}  # c is a prompt's last token, and only filled up
    given = SimpleNamespace(sampled_token_ids=[[5, 6, 7], [8], []], req_id_to_index={"a": 0, "b": 1, "c": 2})
    for _ in range(2):
        steps.made(scheduled(old={"a": 1, "b": 1, "c": 0}), 0, 1)
        steps.verified(drafts, given)
        steps.finished(0, 5, 6, given=4)
    record = steps.record()
    assert record.counters == {"draft_tokens": 14, "accepted_drafts": 4}
    assert list(steps_frame(record)["given"]) == [4, 4]
    steps.clear()
    assert not steps.record().counters


def test_a_round_has_what_its_own_steps_asked_of_the_driver() -> None:
    steps, asked = Steps(), Counter(decode_launches=40, prefill_replays=33)
    steps.ledger = lambda: Counter(asked)
    steps.clear()
    asked["decode_launches"] += 14
    assert steps.record().counters == {"decode_launches": 14}
    steps.clear()
    assert not steps.record().counters


def test_preemptions_count_for_the_step_whose_scheduling_needed_them() -> None:
    steps = Steps()
    steps.preempted = 2
    for number in range(2):
        steps.made(scheduled(old={"a": 1}), 10 * number, 10 * number + 1)
        steps.finished(0, 10 * number + 5, 10 * number + 6)
    assert list(steps_frame(steps.record())["preempted"]) == [2, 0]


def test_a_round_forgets_the_one_before_it() -> None:
    steps = Steps()
    for _ in range(3):
        steps.clear()
        steps.made(scheduled(old={"a": 1}), 0, 1)
        steps.finished(0, 5, 6)
        assert list(steps_frame(steps.record())["step"]) == [0]


def profiled(decodes: int, window: int) -> Steps:
    """A profiled round: a prefill, then decodes, step n from 100 n to 100 n + 60; one output each."""
    steps = Steps()
    steps.begin_profile(window)
    for number in range(1 + decodes):
        steps.made(scheduled(old={"a": number}), 100 * number, 100 * number + 10)
        steps.finished(0, 100 * number + 50, 100 * number + 60, outputs=7 + number)
    return steps


def test_a_profiled_round_keeps_every_phase_and_a_window_of_steady_decode() -> None:
    profile = profiled(SETTLED + 5, 3).record().profile
    assert 0 < profile.opened_ns < profile.closed_ns
    (host,) = profile.hosts
    assert list(host.threads.values()) == ["scheduler"]
    rows = np.frombuffer(host.data, np.int64).reshape(host.rows, 5)
    assert [(host.names[name], step, end - start) for _, name, step, start, end in rows[:4].tolist()] == [
        ("schedule", 0, 10),
        ("append", 0, 10),
        ("schedule", 1, 10),
        ("append", 1, 10),
    ]
    steps = profiled(SETTLED + 1, 3)
    assert steps.record().profile.closed_ns == -1
    steps.clear()
    assert steps.record().profile is None, "of a round that is not profiled"


def test_outputs_processed_elsewhere_are_told_by_the_step_that_gave_them() -> None:
    steps = profiled(3, 1)
    spans = [(7, 61, 64), (8, 161, 164), (10, 361, 364)]  # step 2 gave none that anybody waits for
    found = processed(spans, steps_of(steps.record()), [7, 8, 8, 10])
    assert list(found) == [(0, 61, 64), (1, 161, 164), (3, 361, 364)]


def test_what_is_sent_on_another_thread_is_in_the_profile_and_its_time_counted() -> None:
    steps = profiled(3, 1)
    steps.sending(7)  # all that step 0 gave
    steps.sent(began := perf_counter_ns())
    record = steps.record()
    (host,) = record.profile.hosts
    rows = np.frombuffer(host.data, np.int64).reshape(host.rows, 5)
    (row,) = rows[rows[:, 1] == host.names.index("send")].tolist()
    assert row[2:4] == [0, began]
    assert record.counters["send_ns"] == row[4] - began > 0
    assert steps._sent == 7
    steps.clear()
    assert steps._sent == 7, "as its scheduler counts outputs: since boot"
    assert "send_ns" not in steps.record().counters


def test_what_is_sent_is_told_of_a_round_with_delays_and_is_delayed() -> None:
    steps = Steps()
    steps.sent(perf_counter_ns())
    assert steps.record().beside == []
    steps.put_delay("send", 1000)
    steps.sent(began := perf_counter_ns())
    (told,) = steps.record().beside
    (row,) = np.frombuffer(told.data, np.int64).reshape(told.rows, 5).tolist()
    assert told.names[row[1]] == "send"
    assert row[3] == began
    assert row[4] - began >= 1000
    assert list(beside_frame(steps.record())["phase"]) == ["send"]
    assert steps.put_delay("", 0) >= 1000
    steps.clear()
    assert steps.record().beside == []


class State(Enum):
    UNPAUSED = auto()
    PAUSED_ALL = auto()


class Ahead:
    """A core that schedules a step ahead: it waits for the oldest where it has two, or may schedule none."""

    def __init__(self) -> None:
        self.batch_queue: deque[int] | None = deque()
        self.scheduler = SimpleNamespace(set_pause_state=self.pause)
        self.state = State.UNPAUSED
        self.scheduled = 0

    def pause(self, state: State) -> None:
        self.state = state

    def step(self) -> None:
        if self.state is State.UNPAUSED:
            self.batch_queue.append(self.scheduled)
            self.scheduled += 1
            if len(self.batch_queue) < 2:
                return
        self.batch_queue.popleft()


def test_what_is_in_flight_at_the_end_of_a_turn_is_finished_and_nothing_new_is_begun() -> None:
    core = Ahead()
    for _ in range(3):
        core.step()
    assert core.batch_queue
    finish_begun(core, core.step, State)
    assert not core.batch_queue
    assert core.scheduled == 3
    core.step()
    assert core.scheduled == 4  # it goes on
    core.batch_queue = None  # as where it does not schedule ahead
    finish_begun(core, core.step, State)
    assert core.scheduled == 4
