"""When a comparison by turns is believed, and when it is not."""

import msgspec
import numpy as np
import pandas as pd
import pytest

from overlap_bench.harness.analysis import comparison, turns, words
from overlap_bench.harness.analysis.experiment_result import Finished, _claim, _of_described
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.values import block_values, counted, reason_to_stop, so_far
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.metrics.definitions import DRAINED, PAIRS, SLICED, SLICED_SAME_DEVICE, UNDISTURBED
from overlap_bench.harness.plan.experiment_file import Claim, Quantity
from overlap_bench.harness.report import tables
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import until_decided
from overlap_bench.harness.store.tables import Block
from tests.support import made_blocks
from tests.support.made_blocks import MS, block, manifest, side, warned

DESIGN = manifest(primary=SLICED).design
BLOCKS = 6


def blocks(in_turns: float, drained: float, in_rounds: float, spread: float = 0.001) -> list[Values]:
    """By block, with these changes; what scatters is the after arm."""
    names = (SLICED, DRAINED, turns.OF_ROUNDS)
    found: list[Values] = []
    for number in range(BLOCKS):
        luck = 1 + spread * (-1) ** number
        after = [2.0 * (1 + change) * luck for change in (in_turns, drained, in_rounds)]
        # Each metric has a luck of its own, or all would agree to the last digit.
        after = [value * (1 + spread * ((number + place) % 3 - 1)) for place, value in enumerate(after)]
        found.append({"before": dict.fromkeys(names, 2.0), "after": dict(zip(names, after, strict=True))})
    return found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ((-0.03, -0.03, -0.03), None),
        ((-0.03, -0.03, -0.08), None),  # by how much is another matter
        ((0.0, 0.0, 0.005), None),
        ((-0.10, -0.01, -0.10), "an arm leaves work undone at the end of its turn"),
        ((-0.03, -0.03, 0.02), "turns and rounds disagree: the step changed by −3.0% ["),
        ((0.0, 0.0, 0.05), "turns and rounds disagree: the step changed by "),
    ],
)
def test_turns_decide_nothing_where_their_end_or_the_rounds_contradict_them(
    changes: tuple[float, float, float], why: str | None
) -> None:
    found = turns.disagreement(DESIGN, blocks(*changes), 0.05)
    assert found is None if why is None else found is not None and found.startswith(why)
    assert found is None or found.count("; ") == 2  # what happened; what it may mean; what to try


@pytest.mark.parametrize(
    ("change", "calm", "told"),
    [
        (-0.12, 0.5, False),
        (-0.12, 0.1, True),  # others used the cores nearly all the time, and it may be of them
        (0.0, 0.1, True),
        (0.9, 0.1, True),
        (1.4, 0.1, False),  # no neighbour makes a step so much longer
        (-0.6, 0.1, False),
    ],
)
def test_beside_others_nothing_is_decided_that_they_may_have_made(
    change: float, calm: float, told: bool
) -> None:
    found = blocks(change, change, change)
    found[2] = {
        arm: {**values, UNDISTURBED: calm, PAIRS: 200} for arm, values in found[2].items()
    }  # one block
    why = turns.disagreement(DESIGN, found, 0.05)
    assert (why is not None) == told
    assert why is None or why.startswith("other processes used the cores in 90% of a trial's turns; ")
    assert why is None or why.count("; ") == 2


def beside_others(calm: int, change: float) -> list[Values]:
    """Trials without a change, and one more beside which other work used the cores."""
    found = (blocks(0.0, 0.0, 0.0) * 3)[: calm + 1]
    found = [{arm: dict(values) for arm, values in each.items()} for each in found]
    for values in found[1].values():
        values.update({UNDISTURBED: 0.1, PAIRS: 200})
    found[1]["after"][SLICED] *= 1 + change
    return found


@pytest.mark.parametrize("calm", [5, 6, 8])
@pytest.mark.parametrize("change", [0.0, 3.0])
def test_disturbed_trials_are_left_out_where_six_others_decide(calm: int, change: float) -> None:
    found = beside_others(calm, change)
    places = counted(DESIGN, found, [SLICED])
    assert places == [place for place in range(calm + 1) if place != 1 or calm < 6]
    assert counted(DESIGN, found, [turns.OF_ROUNDS]) == [*range(calm + 1)]
    why = turns.disagreement(DESIGN, [found[each] for each in places], 0.05)
    assert (why or "").startswith("other processes used the cores in 90%") == (calm < 6)
    shown = so_far(DESIGN, found)
    without = so_far(DESIGN, [each for place, each in enumerate(found) if place != 1])
    assert (shown == without) == (calm >= 6)


def test_a_result_says_which_trials_it_leaves_out() -> None:
    plan, measured = manifest(blocks=7, primary=SLICED), made_blocks.blocks(1.0, 7)
    found = comparison.comparison(plan, measured, beside_others(6, 3.0))
    assert found.verdict is not None
    assert (found.blocks, found.left_out, found.verdict.word) == (6, [1], "same")
    assert any(text.startswith("disturbed trials: in 1 of 7 trials, ") for text in warned(found))


@pytest.mark.parametrize("primary", [SLICED, "tpot_ms_p50"])
def test_no_metric_of_turns_is_judged_where_turns_are_not_believed_and_others_are(primary: str) -> None:
    names = (SLICED, SLICED_SAME_DEVICE, "tpot_ms_p50")
    others = tuple(name for name in names if name != primary)
    plan = manifest(blocks=6, primary=primary, secondaries=others)
    measured = [
        {arm: {**of, SLICED_SAME_DEVICE: of[SLICED], "tpot_ms_p50": of[SLICED]} for arm, of in each.items()}
        for each in beside_others(5, 0.0)
    ]
    for each in measured:
        each["after"] |= {name: 1.1 * each["after"][name] for name in names}
    found = comparison.comparison(plan, made_blocks.blocks(1.0, 6), measured)
    judged = {name: found.metrics[name].verdict for name in names}
    assert judged == {SLICED: "undecided", SLICED_SAME_DEVICE: "undecided", "tpot_ms_p50": "slower"}
    assert found.verdict.word == judged[primary]
    of_turns = ", ".join(name for name in others if name != "tpot_ms_p50")
    told = f"{of_turns} undecided" if primary == "tpot_ms_p50" else "undecided"
    assert any(line.startswith(f"{told}: other processes used") for line in warned(found))


def test_a_run_that_may_stop_goes_on_while_turns_are_not_believed() -> None:
    design = manifest(blocks=20, primary=SLICED, until=until_decided(20)).design
    clear = [{arm: dict(of) for arm, of in each.items()} for each in blocks(0.1, 0.1, 0.1) * 2]
    assert (reason_to_stop(design, clear[:6]) or "").startswith("decided at 6 of at most 20 trials")
    for values in clear[2].values():
        values.update({UNDISTURBED: 0.1, PAIRS: 200})
    assert reason_to_stop(design, clear[:6]) is None
    look = next(each for each in design.until.looks if each > 6)
    more = (clear * 2)[:look]
    assert (reason_to_stop(design, more) or "").startswith(f"decided at {look} of at most 20 trials")


def test_a_verdict_is_taken_back_by_what_is_sure_and_not_by_what_one_run_in_twenty_shows() -> None:
    """Two such tests are made of every run, and of a gate's after three blocks."""
    spread = 0.012

    def low(in_rounds: float, alpha: float) -> float:
        sides = [
            [each[arm][turns.OF_ROUNDS] for each in blocks(-0.05, -0.05, in_rounds, spread)]
            for arm in ("before", "after")
        ]
        return paired.effect(*sides, "ratio", alpha).low or 0.0

    likely, sure = -low(0.0, 0.05), -low(0.0, 0.01)
    between = (likely + sure) / 2
    assert low(between, 0.01) < 0 < low(between, 0.05)  # slower, where turns say faster: at 5%, not at 1%
    assert turns.disagreement(DESIGN, blocks(-0.05, -0.05, between, spread), 0.05) is None
    assert turns.disagreement(DESIGN, blocks(-0.05, -0.05, 1.2 * sure, spread), 0.05) is not None


def test_what_is_not_measured_contradicts_nothing() -> None:
    without = [
        {arm: {SLICED: values[SLICED]} for arm, values in each.items()} for each in blocks(-0.1, 0.0, 0.1)
    ]
    assert turns.disagreement(DESIGN, without, 0.05) is None
    assert turns.disagreement(DESIGN, blocks(-0.1, 0.0, 0.1)[:1], 0.05) is None


def test_where_an_engine_records_no_steps_in_rounds_its_clients_can_contradict_turns() -> None:
    def by_clients(in_rounds: float) -> list[Values]:
        found = []
        for each in blocks(-0.03, -0.03, in_rounds):
            arms = {arm: dict(values) for arm, values in each.items()}
            for values in arms.values():
                values[turns.OF_CLIENTS] = values.pop(turns.OF_ROUNDS)
            found.append(arms)
        return found

    assert turns.disagreement(DESIGN, by_clients(-0.03), 0.05) is None
    told = turns.disagreement(DESIGN, by_clients(0.02), 0.05)
    assert "in rounds (tpot_ms_p50); " in told
    assert told.endswith("judge by --primary tpot_ms_p50")


def test_a_change_of_another_size_in_rounds_is_told() -> None:
    (told,) = turns.of_size(DESIGN, blocks(-0.03, -0.03, -0.08), 0.05)
    assert "the whole workload), the step changed by −8" in told.text
    assert turns.of_size(DESIGN, blocks(-0.03, -0.03, -0.03), 0.05) == []
    noisy = blocks(-0.03, -0.03, -0.08, spread=0.1)
    assert turns.of_size(DESIGN, noisy, 0.05) == []


def slices_of(interval_ms: float) -> pd.DataFrame:
    """A table of turns of two lengths, with one interval throughout."""
    parts = []
    for segment, steps in enumerate((4, 4, 8)):
        turns_ = np.arange(10)
        parts.append(
            pd.DataFrame(
                {
                    "round": segment,
                    "turn": turns_,
                    "first_step": steps * turns_,
                    "steps": steps,
                    "batch": 4,
                    "tokens": 4 * steps,
                    "interval_ns": round(interval_ms * MS),
                    "device_ns": MS,
                    "turn_ns": round((interval_ms + 0.5 / steps) * MS),
                    "parked_ns": MS,
                    "parked_cpu_ns": 0,
                }
            )
        )
    return pd.concat(parts)


def made(in_turns: float, in_rounds: float) -> list[Block]:
    found = []
    for number in range(BLOCKS):
        luck = 1 + 0.001 * (-1) ** number
        sides = {"before": 4.0, "after": 4.0 * luck}
        arms = {}
        for name, step in sides.items():
            rounds, turns_ = (step * (1 + change * (name == "after")) for change in (in_rounds, in_turns))
            arms[name] = {**side(rounds), "slices": slices_of(turns_)}
        found.append(block(number, arms))
    return found


def found_by(in_turns: float, in_rounds: float) -> Comparison:
    return comparison.result(manifest(primary=SLICED, turn_steps=4), made(in_turns, in_rounds)).comparisons[0]


def test_a_result_by_turns_says_what_was_compared_and_where_the_change_is() -> None:
    found = found_by(-0.05, -0.05)
    assert found.decided.verdict == "faster"
    assert found.decided.change == pytest.approx(-0.05, abs=0.002)
    assert (found.sliced.pairs, found.sliced.kept, found.sliced.batch) == (30 * BLOCKS, 1.0, 4.0)
    assert found.sliced.within == pytest.approx(0.0, abs=1e-6)  # all pairs of a block are one
    assert found.sliced.between == pytest.approx(0.0011, rel=0.1)
    lines = [tables.in_turns(found) or "", tables.step_parts(found) or ""]
    assert "0.11% from trial to trial" in (tables.scatter(found) or "")
    assert any("and turns of the same steps are compared (" in line for line in lines)
    assert any("−5" in line and "decode_step_ms_same_device" in line for line in lines)


def test_turns_without_partners_are_counted_and_leave_unknown_how_trials_scatter() -> None:
    measured = made(-0.05, -0.05)
    every = measured[2].tables["slices"]
    measured[2].tables["slices"] = every[(every["arm"] == "before") | (every["turn"] < 5)]
    found = turns.sliced(DESIGN, measured)
    assert (found.kept, found.between) == (0.5, None)
    measured[2].tables["slices"] = every.assign(batch=-1)  # of other steps than decode steps
    assert turns.sliced(DESIGN, measured).kept == 0


def test_a_result_that_rounds_contradict_is_undecided_and_says_why() -> None:
    found = found_by(0.0, 0.05)
    assert found.decided.verdict == "undecided"
    assert any(text.startswith("undecided: turns and rounds disagree") for text in warned(found))
    assert "undecided: other measurements of this run contradict it" in words.conclusion("emulated", found)
    assert not any(
        "run again with --trials" in text for text in warned(found)
    )  # no number of blocks settles that


def test_a_claim_in_turns_is_a_change_between_its_own_two_arms() -> None:
    blocks = made(-0.05, -0.03)
    values = [block_values(DESIGN, each) for each in blocks]
    run = Finished(manifest(primary=SLICED, turn_steps=4), blocks, values)
    effect = run.effect(Quantity(change=SLICED, before="before", arm="after"))
    compared = found_by(-0.05, -0.03).metrics[SLICED]
    assert (effect.change, effect.low) == (compared.change, compared.ci_low)
    back = run.effect(Quantity(change=SLICED, before="after", arm="before"))
    assert back.change == pytest.approx(1 / 0.95 - 1, abs=0.002)  # not what the run's first arm is held to
    matched = run.effect(Quantity(change=turns.OF_ROUNDS, before="before", arm="after"))
    assert matched.change == pytest.approx(-0.03, abs=0.002)
    assert run.effect(Quantity(change=SLICED, before="before", arm="before")) is None


@pytest.fixture(scope="module")
def one_disturbed() -> Finished:
    """Twelve trials that are 5% faster, and one beside other work, four times as slow."""
    measured = [*made(-0.05, -0.05), *made(-0.05, -0.05), *made(3.0, -0.05)][: 2 * BLOCKS + 1]
    measured = [Block(number, each.tables) for number, each in enumerate(measured)]
    table = measured[-1].tables["slices"]
    measured[-1].tables["slices"] = table.assign(others_ns=table["turn_ns"] * table["steps"])
    plan = manifest(len(measured), primary=SLICED, turn_steps=4)
    return Finished(plan, measured, [block_values(plan.design, each) for each in measured])


def test_a_claim_in_turns_counts_the_trials_that_its_verdict_counts(one_disturbed: Finished) -> None:
    """One of them is left out, and so is its place in the order."""
    claim = Claim(says="", boots="b", workload="w", change=SLICED, before="before", arm="after")
    effect = one_disturbed.effect(claim)
    assert (effect.blocks, effect.change) == (2 * BLOCKS, pytest.approx(-0.05, abs=0.002))
    assert [each.number for each in one_disturbed.trials(claim)] == [*range(2 * BLOCKS)]
    (told,) = _of_described(claim, one_disturbed)  # as made: every other trial is slower
    assert (told.ran, told.weakens) == ("second", False)


def test_a_result_says_of_turns_what_the_trials_that_decide_say(one_disturbed: Finished) -> None:
    run = one_disturbed
    found = comparison.comparison(run.manifest, run.blocks, run.per_block)
    assert found.left_out == [2 * BLOCKS]
    assert found.sliced.pairs == found.sliced.undisturbed == 30 * 2 * BLOCKS
    assert found.sliced.between < 0.01


def test_a_later_claim_in_turns_is_doubted_as_the_first_one_is() -> None:
    """It has no verdict; that the source's number lies in its interval would be read as one."""
    measured = made(-0.05, 0.05)
    plan = manifest(primary=SLICED, turn_steps=4)
    run = Finished(plan, measured, [block_values(plan.design, each) for each in measured])
    named = {"says": "", "boots": "b", "workload": "w", "before": "before", "arm": "after", "reported": -0.05}
    found = _claim(Claim(change=SLICED, **named), run)
    assert found.finding == "not believed here"
    assert "turns and rounds disagree" in " ".join(
        each.text for each in _of_described(Claim(change=SLICED, **named), run)
    )
    assert _claim(Claim(change=turns.OF_ROUNDS, **named), run).finding == "the other way here"


def test_where_a_host_computes_ahead_the_parts_of_a_step_say_what_they_do_not_tell() -> None:
    """A faster device then looks like slower host work, where the host is the slower of the two."""
    found = found_by(-0.05, -0.05)
    assert "ahead of the device" not in (tables.step_parts(found) or "")
    for name, choice in (("schedule", "overlap"), ("async_scheduling", "on")):
        after = msgspec.structs.replace(found.after, toggles={name: choice})
        assert "ahead of the device" in tables.step_parts(msgspec.structs.replace(found, after=after))
