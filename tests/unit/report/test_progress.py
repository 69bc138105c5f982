"""What stderr says while a run goes on."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from overlap_bench.harness.cli.progress import MUCH_STOLEN, Display, on_stderr, question
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run.messages import (
    BlockBegun,
    BlockDone,
    Booting,
    Event,
    Foreseen,
    NodeDone,
    Progress,
    RoundBegun,
    Said,
    SegmentBegun,
    SoFar,
)
from tests.support.made_blocks import manifest

DESIGN = manifest().design


class Shown:
    """What a display of these events says, draws, and prints where nothing can be drawn."""

    def __init__(self, *events: Event, design: Design = DESIGN) -> None:
        self.said, self.drawn, self.plain = list[str](), list[str](), list[str]()
        self.display = Display(design, self.said.append, self.drawn.append, self.plain.append)
        self.go_on(*events)

    def go_on(self, *events: Event) -> str:
        """What is drawn after these."""
        for each in events:
            self.display(each)
        return self.drawn[-1] if self.drawn else ""


@pytest.mark.parametrize(
    ("stolen", "told"),
    [(MUCH_STOLEN, []), (0.42, ["trial 1 of 6: 42% of the CPU time went to other virtual machines"])],
)
def test_a_block_in_which_much_was_stolen_says_so_while_one_can_still_stop(
    stolen: float, told: list[str]
) -> None:
    shown = Shown(BlockBegun(0, left=6), BlockDone(0, 12.0, stolen))
    assert shown.said == told
    assert shown.plain == ["trial 1 of 6 done in 12 s, 60 s left"]


def test_time_left_is_shared_by_the_nodes_that_are_at_work() -> None:
    shown = Shown(
        NodeDone(3, "one", 12.0, stolen=0.0, left=4, at_work=2),
        NodeDone(0, "two", 12.0, stolen=0.3, left=3, at_work=0),  # the other ones died
    )
    assert shown.plain == [
        "trial 4 of 6 done on one in 12 s, 24 s left",
        "trial 1 of 6 done on two in 12 s, 36 s left",
    ]
    assert shown.said == ["trial 1 of 6: 30% of the CPU time went to other virtual machines"]


def test_a_run_with_minutes_says_no_more_time_than_they_leave() -> None:
    timed = replace(DESIGN, blocks=100, max_minutes=1.0)
    shown = Shown(BlockBegun(0, left=100), BlockDone(0, 12.0), design=timed)
    found = re.fullmatch(r"trial 1 of at most 100 done in 12 s, at most (\d+) s left", shown.plain[0])
    assert int(found[1]) <= 60  # and not 99 blocks' 1,188


def test_what_an_engine_says_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A bracket is no markup, which would swallow it, or end the run."""
    said = "[/pytorch/pair.cc:534] Connection closed by peer; [enforce fail at alloc.cc:9]"
    with on_stderr(Path("results[old]"), manifest().design) as heard:
        heard(Said(said))
    shown = capsys.readouterr().err
    assert said in shown
    assert "results[old]" in shown


def test_that_every_arm_serves_is_told_once_and_only_of_boots_that_do_not_count() -> None:
    def round_of(block: int, arm: str, tpot_ms: float | None) -> tuple[Event, Event]:
        return RoundBegun(block, arm, block), Progress(finished=3, total=32, tpot_ms=tpot_ms)

    looks = (("before", None), ("before", 3.4), ("after", 3.3), ("after", 3.2))
    first = Shown(BlockBegun(-1, left=6), *(event for each in looks for event in round_of(-1, *each)))
    assert first.said == ["a first look, at boots that do not count: TPOT p50 before 3.40 ms, after 3.30 ms"]
    counted = (*round_of(0, "before", 3.0), *round_of(0, "after", 3.0))
    assert Shown(BlockBegun(-1, left=6), BlockDone(-1, 9.0), *counted).said == []


def test_the_time_left_is_told_before_the_first_block_is_done() -> None:
    shown = Shown(Foreseen(12.0, replace(DESIGN, segments=7, rounds=1)))
    assert shown.go_on(BlockBegun(0, left=6)) == "trial 1 of 6: booting, 72 s left"
    assert shown.go_on(SegmentBegun(0, 1)).startswith("trial 1 of 6: interleaved round 2 of 7")
    added = "trial 1 of 6: interleaved round 2 more, as other processes use the cores"
    assert shown.go_on(SegmentBegun(0, 8)).startswith(added)


def test_requests_are_counted_in_rounds_and_not_in_turns() -> None:
    shown = Shown(BlockBegun(0, left=6), design=replace(DESIGN, segments=8))
    finished = Progress(finished=3, total=32, tpot_ms=None)
    assert shown.go_on(RoundBegun(0, "after", 0), finished).endswith("3 of 32 requests")
    in_turns = shown.go_on(SegmentBegun(0, 1), finished)
    assert in_turns.startswith("trial 1 of 6: interleaved round 2 of ")
    assert "requests" not in in_turns
    assert shown.go_on(RoundBegun(1, "before", 0), finished).endswith("3 of 32 requests")


def test_a_run_begins_with_what_is_compared_and_who_claims_it() -> None:
    said = question(replace(DESIGN, name="pinned-h2d"))
    assert said.startswith("pinned-h2d: ")
    assert "roseinfer" in said
    assert question(replace(DESIGN, name="a pair of my own")) is None


def test_what_is_seen_so_far_is_shown_and_called_no_verdict() -> None:
    shown = Shown(SoFar(2, "tpot_ms_p50 −3.0% [−5.0%, −1.0%]"), BlockBegun(2, left=4))
    assert shown.plain == ["after 2 trials, no verdict yet: tpot_ms_p50 −3.0% [−5.0%, −1.0%]"]
    assert shown.drawn == ["trial 3 of 6: booting | so far, no verdict yet: tpot_ms_p50 −3.0% [−5.0%, −1.0%]"]


def test_a_long_boot_says_what_boots_how_long_it_took_and_where_its_log_is() -> None:
    """Where nothing can be drawn, lines become rarer the longer it takes."""
    boots = (Booting(("after",), float(seconds), Path("host-2.log")) for seconds in range(5, 145, 5))
    shown = Shown(BlockBegun(0, left=6), *boots)
    assert shown.drawn[-1] == "trial 1 of 6: booting after, 140 s; its log: host-2.log"
    assert shown.plain == [f"booting after, {seconds} s; its log: host-2.log" for seconds in (10, 20, 40, 80)]
    shown.go_on(BlockBegun(1, left=5), Booting(("after",), 10.0, Path("host-4.log")))
    assert shown.plain[-1] == "booting after, 10 s; its log: host-4.log"
