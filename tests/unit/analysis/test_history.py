"""Gates of many nights together."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, gate, history
from overlap_bench.harness.analysis.history import Remembered
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.plan.design import Ref
from overlap_bench.harness.report import gate_tables
from overlap_bench.harness.stats.change_points import SHORTEST
from overlap_bench.harness.store.files import read_json_lines, write_json_lines
from overlap_bench.harness.store.manifest import Manifest
from tests.support.made_blocks import blocks, described, manifest

TPOT, RATE = "tpot_ms_p50", "throughput_tok_s"


def night(number: int, change: float, name: str = TPOT, **more: Any) -> Remembered:
    plain = Remembered(
        schema_version=1,
        run=f"run-{number}",
        created=f"2026-10-{number % 28 + 1:02}T03:17:00+00:00",
        setting="s",
        base="b" * 40,
        head=f"{number:040x}",
        machine="a cpu",
        verdict="pass",
        changes={name: change},
    )
    return msgspec.structs.replace(plain, **more)


def together(gates: Sequence[Remembered]) -> history.History:
    return history.history_of(gates, gates[-1])


def nights(count: int, since: int, change: float, name: str = TPOT) -> list[Remembered]:
    """So many, which scatter by 0.3%, at another level since one of them."""
    scattered = np.random.default_rng(6).normal(0, 0.003, count)
    return [night(k, float(each + change * (k >= since)), name) for k, each in enumerate(scattered)]


def test_a_change_that_each_gate_let_pass_is_found_with_its_commits() -> None:
    found = together(nights(40, 28, 0.012))
    (moved,) = found.moved
    assert (found.base, found.gates) == ("b" * 40, 40)
    assert (moved.last, moved.first) == (f"{27:040x}", f"{28:040x}")
    assert moved.ci_low < 0.012 < moved.ci_high
    assert moved.worse
    assert moved.gates == 12
    assert found.scatter[TPOT] == pytest.approx(0.003, rel=0.3)


def test_what_is_to_be_bisected_is_the_latest_change_for_the_worse_and_two_gates_around_it() -> None:
    gates = nights(40, 28, 0.012)
    assert history.span(gates) == (TPOT, f"{25:040x}", f"{30:040x}")
    assert history.span(nights(40, 28, -0.012)) is None
    assert history.span([]) is None
    twice = [msgspec.structs.replace(each, changes={**each.changes, RATE: 0.03 * (k < 15)}) for k, each in
             enumerate(gates)]  # fmt: skip
    assert history.span(twice) == (TPOT, f"{25:040x}", f"{30:040x}")
    assert history.span(twice[:29]) == (RATE, f"{12:040x}", f"{17:040x}")
    assert history.span(twice, RATE) == (RATE, f"{12:040x}", f"{17:040x}")  # where one is asked for
    assert history.span(twice, "ttft_ms_p50") is None


def test_what_is_worse_depends_on_the_metric() -> None:
    (slower,) = together(nights(40, 20, -0.02, RATE)).moved
    (faster,) = together(nights(40, 20, -0.02)).moved
    assert slower.worse
    assert not faster.worse


@pytest.mark.parametrize("other", [{"setting": "t"}, {"base": "c" * 40}])
def test_gates_of_another_setting_or_base_are_another_history(other: dict[str, str]) -> None:
    gates = [msgspec.structs.replace(each, **other) for each in nights(40, 20, 0.02)[20:]]
    found = together([*nights(40, 20, 0.02)[:20], *gates])
    assert (found.gates, found.moved) == (20, [])


def test_each_night_measures_another_k_and_the_history_is_one() -> None:
    def setting(pace: str) -> str:
        plan = manifest()
        options = msgspec.structs.replace(plan.design.arms[0].options, pace=pace)
        arms = tuple(msgspec.structs.replace(arm, options=options) for arm in plan.design.arms)
        device = msgspec.structs.replace(described(), device={"kind": f"paced: {pace}", "name": "x"})
        return history._setting(
            msgspec.structs.replace(
                plan,
                design=msgspec.structs.replace(plan.design, arms=arms),
                descriptions=dict.fromkeys(plan.descriptions, device),
            )
        )

    assert setting("llama3-8b-h100*2.31") == setting("llama3-8b-h100*2.29")
    assert setting("llama3-8b-h100*2.31") != setting("10ms")
    for other in ("1.15", "4.62"):  # k/2 and 2k
        assert setting("llama3-8b-h100*2.31") != setting(f"llama3-8b-h100*{other}")
    assert setting("decode=1ms,prefill=80us*tokens") != setting("decode=1ms,prefill=80us")


def test_a_change_that_came_with_other_machines_says_so() -> None:
    gates = nights(40, 20, 0.02)
    moved = [msgspec.structs.replace(each, machine="another") for each in gates[20:]]
    assert not together(gates).moved[0].other_machines
    assert together([*gates[:20], *moved]).moved[0].other_machines


def test_a_change_for_the_worse_is_new_once() -> None:
    gates = nights(60, 30, 0.012)
    new = [count for count in range(1, 61) if history.found_now(gates[:count], gates[count - 1])]
    assert len(new) == 1
    assert 30 < new[0] < 40
    better = nights(60, 30, -0.012)
    assert not [count for count in range(1, 61) if history.found_now(better[:count], better[count - 1])]


def test_two_gates_a_night_of_a_metric_each_are_each_new_once() -> None:
    both = zip(nights(45, 20, 0.012), nights(45, 0, 0, RATE), strict=True)
    gates = [
        msgspec.structs.replace(gate, run=f"{gate.run}-{place}")
        for pair in both
        for place, gate in enumerate(pair)
    ]
    new = [count for count in range(1, len(gates) + 1) if history.found_now(gates[:count], gates[count - 1])]
    assert len(new) == 1
    assert history.span(gates) is not None
    assert history.history_of(gates, gates[-1]).gates == 45  # those of its metric
    # One metric first, then another: its change is the latest, though more gates came after it.
    early = nights(32, 25, 0.03)
    late = [night(100 + k, each.changes[TPOT], RATE) for k, each in enumerate(nights(68, 48, -0.03))]
    assert (history.span([*early, *late]) or "")[0] == RATE


def test_a_gate_that_is_judged_again_replaces_what_it_was() -> None:
    gates = nights(3, 0, 0)
    again = msgspec.structs.replace(gates[1], verdict="fail")
    assert history.added(gates, again) == [gates[0], again, gates[2]]
    by_another = msgspec.structs.replace(gates[1], changes={RATE: 0.01})
    kept = history.added(gates, by_another)[1]
    assert kept.changes == {**gates[1].changes, RATE: 0.01}  # its first metric has its night still


def test_nights_that_are_judged_again_stay_where_they_were_in_the_history() -> None:
    gates = nights(24, 10, 0.02)
    (moved,) = history.history_of(gates, gates[-1]).moved
    for each in gates[:9]:
        gates = history.added(gates, msgspec.structs.replace(each, verdict="pass"))
        assert history.history_of(gates, each).moved == [moved]
    assert history.span(gates) is not None
    assert not history.found_now(gates, gates[3]), "the others show it without this one"


def test_a_change_that_this_gate_alone_shows_is_new_however_often_it_is_judged() -> None:
    gates = nights(45, 20, 0.012)
    (count,) = [each for each in range(1, 46) if history.found_now(gates[:each], gates[each - 1])]
    again = msgspec.structs.replace(gates[count - 1], verdict="pass")
    assert history.found_now(history.added(gates[:count], again), again)


def test_a_history_that_an_earlier_version_began_goes_on() -> None:
    """By another digest of the same setting it would begin anew. A new option makes one: say so then."""
    assert history._setting(manifest()) == "20bddf5db3e6f248"


def test_a_history_is_read_as_it_was_written_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gates.jsonl"
    assert read_json_lines(path, Remembered) == []
    write_json_lines(path, nights(3, 0, 0))
    assert read_json_lines(path, Remembered) == nights(3, 0, 0)
    path.write_text(path.read_text().replace('"run":"run-1"', '"run":1'))
    with pytest.raises(api.BadFile, match=r"line 2 of .*gates\.jsonl is damaged"):
        read_json_lines(path, Remembered)


# -- of a run ---------------------------------------------------------------------------------------------


def gated(refs: Sequence[str | None] = ("b" * 40, "h" * 40), **workload: Any) -> tuple[Result, Manifest]:
    plan = manifest()
    arms = tuple(
        msgspec.structs.replace(
            arm, ref=None if commit is None else Ref(repository="r", name="x", commit=commit)
        )
        for arm, commit in zip(plan.design.arms, refs, strict=True)
    )
    asked = msgspec.structs.replace(plan.design.workload, **workload)
    plan = msgspec.structs.replace(
        plan, design=msgspec.structs.replace(plan.design, arms=arms, workload=asked)
    )
    made = comparison.result(plan, blocks(1.01, 6))
    values = {TPOT: {"before": [5.0] * 6, "after": [5.05, 5.04, 5.06, 5.05, 5.05, 5.04]}}
    judged = gate.judge(values, [TPOT], 0.02, 0.05)
    found = gate.result_of(judged, 0.02, 0.05, made.comparisons[0], False, "pass")
    return msgspec.structs.replace(made, gate=found), plan


def test_a_gate_is_remembered_by_its_commits_and_its_change() -> None:
    kept = history.remembered(*gated())
    assert (kept.base, kept.head, kept.verdict) == ("b" * 40, "h" * 40, "pass")
    assert kept.changes[TPOT] == pytest.approx(0.0097, abs=0.001)
    assert kept.machine == "a cpu"
    same = history.remembered(*gated(("b" * 40, "k" * 40)))
    assert same.setting == kept.setting
    assert history.remembered(*gated(max_new_tokens=7)).setting != kept.setting


def test_other_limits_or_another_after_arm_are_another_history() -> None:
    plan = manifest()
    before, after = plan.design.arms
    smaller = msgspec.structs.replace(after, options=msgspec.structs.replace(after.options, max_batch_size=8))
    elsewhere = msgspec.structs.replace(after, python="/other/python")
    designs = [
        msgspec.structs.replace(plan.design, **changed)
        for changed in (
            {},
            {"goodput": {"ttft": 200.0}},
            {"goodput": {"ttft": 100.0}},
            {"arms": (before, smaller)},
            {"arms": (before, elsewhere)},
        )
    ]
    settings = [history._setting(msgspec.structs.replace(plan, design=each)) for each in designs]
    assert len({*settings}) == len(designs)


def test_a_gate_without_commits_has_no_place_in_a_history() -> None:
    with pytest.raises(api.BadSetting, match="give --base-ref"):
        history.remembered(*gated(("b" * 40, None)))


def test_a_summary_shows_what_moved_or_that_it_is_too_early_to_say() -> None:
    result, _ = gated()

    def told(gates: list[Remembered]) -> str:
        return gate_tables.to_markdown(msgspec.structs.replace(result, history=together(gates)))

    assert f"fewer than {SHORTEST} say nothing" in told(nights(SHORTEST - 1, 0, 0))
    steady = told(nights(30, 0, 0))
    assert f"No change point in 30 gates against bbbbbbbbbb. SD within a level: {TPOT} 0." in steady
    moved = told(nights(40, 28, 0.012))
    assert re.search(rf"\| {TPOT} \| \+1\.\d% \| \[.*\] \| worse \| 0+ \| 0+ \(2026-10-01\) \| 12 \|", moved)
    assert "No change point" not in moved


def test_what_is_doubted_does_not_pass_and_says_why() -> None:
    result, _ = gated()
    doubted = gate.doubted(result.gate, ["it moved"])
    assert doubted.verdict == "undecided"
    said = gate_tables.conclusion(msgspec.structs.replace(result, gate=doubted))
    assert said.startswith("Gate: UNDECIDED. pinned-h2d: it moved; no metric regressed by more than 2%")
    assert gate.doubted(result.gate, []) == result.gate
