"""What stderr says while a run goes on."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from overlap_bench.harness.cli.progress import MUCH_STOLEN, Display, on_stderr, question
from overlap_bench.harness.run.messages import (
    BlockBegun,
    BlockDone,
    Booting,
    Foreseen,
    NodeDone,
    Progress,
    RoundBegun,
    Said,
    SegmentBegun,
    SoFar,
)
from tests.support.made_blocks import manifest


@pytest.mark.parametrize(
    ("stolen", "told"),
    [(MUCH_STOLEN, []), (0.42, ["trial 1 of 6: 42% of the CPU time went to other virtual machines"])],
)
def test_a_block_in_which_much_was_stolen_says_so_while_one_can_still_stop(
    stolen: float, told: list[str]
) -> None:
    said, plain = list[str](), list[str]()
    display = Display(manifest().design, said.append, plain=plain.append)
    display(BlockBegun(0, left=6))
    display(BlockDone(0, 12.0, stolen))
    assert said == told
    assert plain == ["trial 1 of 6 done in 12 s, 60 s left"]


def test_time_left_is_shared_by_the_nodes_that_are_at_work() -> None:
    plain = list[str]()
    display = Display(manifest().design, plain.append, plain=plain.append)
    display(NodeDone(3, "one", 12.0, stolen=0.0, left=4, at_work=2))
    display(NodeDone(0, "two", 12.0, stolen=0.3, left=3, at_work=0))  # the other ones died
    assert plain == [
        "trial 4 of 6 done on one in 12 s, 24 s left",
        "trial 1 of 6 done on two in 12 s, 36 s left",
        "trial 1 of 6: 30% of the CPU time went to other virtual machines",
    ]


def test_a_run_with_minutes_says_no_more_time_than_they_leave() -> None:
    plain = list[str]()
    timed = replace(manifest().design, blocks=100, max_minutes=1.0)
    display = Display(timed, plain.append, plain=plain.append)
    display(BlockBegun(0, left=100))
    display(BlockDone(0, 12.0))
    found = re.fullmatch(r"trial 1 of at most 100 done in 12 s, at most (\d+) s left", plain[0])
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
    said = list[str]()
    display = Display(manifest().design, said.append)
    display(BlockBegun(-1, left=6))
    for arm, tpot_ms in (("before", None), ("before", 3.4), ("after", 3.3), ("after", 3.2)):
        display(RoundBegun(-1, arm, -1))
        display(Progress(finished=3, total=32, tpot_ms=tpot_ms))
    assert said == ["a first look, at boots that do not count: TPOT p50 before 3.40 ms, after 3.30 ms"]
    other = Display(manifest().design, said.append)
    other(BlockBegun(-1, left=6))
    other(BlockDone(-1, 9.0))
    for arm in ("before", "after"):
        other(RoundBegun(0, arm, 0))
        other(Progress(finished=3, total=32, tpot_ms=3.0))
    assert len(said) == 1


def test_the_time_left_is_told_before_the_first_block_is_done() -> None:
    drawn = list[str]()
    display = Display(manifest().design, drawn.append, redraw=drawn.append)
    display(Foreseen(12.0, replace(manifest().design, segments=7, rounds=1)))
    display(BlockBegun(0, left=6))
    assert drawn[-1] == "trial 1 of 6: booting, 72 s left"
    display(SegmentBegun(0, 1))
    assert drawn[-1].startswith("trial 1 of 6: interleaved round 2 of 7")
    display(SegmentBegun(0, 8))
    assert drawn[-1].startswith("trial 1 of 6: interleaved round 2 more, as other processes use the cores")


def test_requests_are_counted_in_rounds_and_not_in_turns() -> None:
    drawn = list[str]()
    display = Display(replace(manifest().design, segments=8), drawn.append, redraw=drawn.append)
    display(BlockBegun(0, left=6))
    display(RoundBegun(0, "after", 0))
    display(Progress(finished=3, total=32, tpot_ms=None))
    assert drawn[-1].endswith("3 of 32 requests")
    display(SegmentBegun(0, 1))
    display(Progress(finished=0, total=32, tpot_ms=None))
    assert drawn[-1].startswith("trial 1 of 6: interleaved round 2 of ")
    assert "requests" not in drawn[-1]
    display(RoundBegun(1, "before", 0))
    display(Progress(finished=1, total=32, tpot_ms=None))
    assert drawn[-1].endswith("1 of 32 requests")


def test_a_run_begins_with_what_is_compared_and_who_claims_it() -> None:
    said = question(replace(manifest().design, name="pinned-h2d"))
    assert said.startswith("pinned-h2d: ")
    assert "roseinfer" in said
    assert question(replace(manifest().design, name="a pair of my own")) is None


def test_what_is_seen_so_far_is_shown_and_called_no_verdict() -> None:
    drawn, plain = list[str](), list[str]()
    display = Display(manifest().design, drawn.append, redraw=drawn.append, plain=plain.append)
    display(SoFar(2, "tpot_ms_p50 −3.0% [−5.0%, −1.0%]"))
    display(BlockBegun(2, left=4))
    assert plain == ["after 2 trials, no verdict yet: tpot_ms_p50 −3.0% [−5.0%, −1.0%]"]
    assert drawn == ["trial 3 of 6: booting | so far, no verdict yet: tpot_ms_p50 −3.0% [−5.0%, −1.0%]"]


def test_a_long_boot_says_what_boots_how_long_it_took_and_where_its_log_is() -> None:
    """Where nothing can be drawn, lines become rarer the longer it takes."""
    drawn, plain = list[str](), list[str]()
    display = Display(manifest().design, drawn.append, redraw=drawn.append, plain=plain.append)
    display(BlockBegun(0, left=6))
    for seconds in range(5, 145, 5):
        display(Booting(("after",), float(seconds), Path("host-2.log")))
    assert drawn[-1] == "trial 1 of 6: booting after, 140 s; its log: host-2.log"
    assert plain == [f"booting after, {seconds} s; its log: host-2.log" for seconds in (10, 20, 40, 80)]
    display(BlockBegun(1, left=5))
    display(Booting(("after",), 10.0, Path("host-4.log")))
    assert plain[-1] == "booting after, 10 s; its log: host-4.log"
