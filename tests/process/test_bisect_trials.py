"""`bench bisect` from its first trial to its answer, with trials that are drawn."""

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import bisection
from overlap_bench.harness.analysis.bisection import Change, ends_of
from overlap_bench.harness.report import bisection_tables, formats
from overlap_bench.harness.report.figures import commits
from overlap_bench.harness.stats.bisection import Trial
from overlap_bench.harness.stats.distributions import t_quantile
from overlap_bench.harness.store import bisection as store
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.store.tables import finished_blocks
from overlap_bench.harness.studies import bisect as study
from tests.support import simulated_bisection
from tests.support.repositories import fingerprint
from tests.support.simulated_bisection import ASKED, BUILT, Killed, Simulated


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_bisection.repository(tmp_path_factory.mktemp("repository"))


def stepping(count: int, place: int, effect: float = 0.02) -> list[float]:
    return [effect * (each >= place) for each in range(count + 1)]


def resumed(simulated: Simulated, folder: Path) -> study.Bisected:
    stored = study.resumed(folder, lambda *_: True)
    return simulated.measure(folder, stored)


def test_the_commit_is_found_and_what_is_left_tells_it(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(16, 11))
    folder, stored = simulated.begin()
    before = fingerprint(repository / ".git")
    found = simulated.measure(folder, stored)
    assert fingerprint(repository / ".git") == before
    assert found.verdict == "found"
    assert found.culprit == simulated.commits[10]
    assert found.posterior >= 0.95
    assert found.ci_low < 0.02 < (found.ci_high or 0)
    assert found.trials == len(finished_blocks(folder)) < 16
    assert found.foretold.trials[0] - 2 <= found.trials <= found.foretold.trials[2] + 2
    assert found.minutes == pytest.approx(found.foretold.minutes[1], rel=0.2)
    assert len(simulated.warmed) == len(set(simulated.warmed))  # a first boot each
    assert simulated.read(folder) == found
    page = bisection_tables.write(folder, found, {})
    assert page.read_text().count("<svg") == 2
    assert '<header class="bad">' in page.read_text()
    unseen = msgspec.structs.replace(found, verdict="undecided")
    assert "came and went among the commits that were not" in bisection_tables.page(unseen).lines[-1]
    text = (folder / "bisect.md").read_text()
    assert text.startswith(f"**{found.culprit[:10]} “commit-11” made it slower: decode_step_ms +")
    with pytest.raises(StoreError, match="is a bisection: bench bisect"):
        read_manifest(folder)


def test_equal_ends_end_it(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, [0.0] * 9)
    found = simulated.measure(*simulated.begin())
    assert (found.verdict, found.culprit, found.changes) == ("nothing to find", None, [])
    assert not simulated.warmed
    assert bisection_tables.page(found).conclusion.startswith(
        "Nothing to find: decode_step_ms of commit-0 and"
    )


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ([0, 0, 0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02], "It changed in two steps, both in one direction."),
        ([0, 0, 0, 0.03, 0.03, 0.03, 0.03, 0.03, 0.01], "It changed, and a part of that went back with the"),
        (
            [0, 0, 0, -0.03, -0.03, -0.03, -0.03, -0.03, -0.02],
            "It changed, and a part of that went back with",
        ),
        ([0, 0.02, 0.02, 0, 0, 0, 0.02, 0.02, 0.02], "A change came and went again; the third one is of its"),
    ],
)
def test_several_changes_are_told_as_such(
    repository: Path, tmp_path: Path, levels: list[float], told: str
) -> None:
    simulated = Simulated(repository, tmp_path, levels, sd=0.001)
    found = simulated.measure(*simulated.begin())
    steps = [place for place in range(1, len(levels)) if levels[place] != levels[place - 1]]
    assert found.verdict == "found"
    assert [each.first for each in found.changes] == [simulated.commits[place - 1] for place in steps]
    assert found.culprit == max(found.changes, key=lambda each: abs(each.effect)).first
    for place, each in zip(steps, found.changes, strict=True):
        size = (1 + levels[place]) / (1 + levels[place - 1]) - 1
        assert each.ci_low < size < each.ci_high
    page = bisection_tables.page(found)
    assert page.conclusion.startswith(f"{len(steps)} commits changed decode_step_ms: ")
    assert told in " ".join(page.lines)
    assert page.tables[0].title == "Changes"
    plain = json.loads(formats.to_json(found))
    assert (plain["headline"], plain["verdict"]) == (page.conclusion, "found")
    assert {"good", "bad", "effect", "commits", "culprit", "posterior"} <= plain.keys()
    assert len(formats.to_csv(found).splitlines()) == len(levels)
    assert "<svg" in bisection_tables.to_html(found)


def test_ends_that_may_differ_by_more_than_the_margin_are_told_as_such(
    repository: Path, tmp_path: Path
) -> None:
    simulated = Simulated(repository, tmp_path, [0.0] * 3, sd=0.04)
    page = bisection_tables.page(simulated.measure(*simulated.begin()))
    assert page.conclusion.startswith("Nothing to find")
    assert "is not excluded; a quieter machine would tell more" in " ".join(page.lines)


def test_code_that_never_ran_can_not_have_changed_anything(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(4, 2), unused=True)
    with pytest.raises(api.BadSetting, match=r"good and bad can't differ here: .*engine.py: step"):
        simulated.measure(*simulated.begin())


def test_only_trials_of_good_and_bad_alone_say_whether_they_differ(repository: Path, tmp_path: Path) -> None:
    _, stored = Simulated(repository, tmp_path, stepping(4, 2)).begin()
    alone = [Trial(0, each) for each in (0.02, 0.021, 0.019, 0.02)]
    beside = [Trial(2, each) for each in (0.5, -0.5)]
    assert ends_of(stored, [*alone, *beside]) == ends_of(stored, alone)


def test_a_change_for_the_better_is_found_too(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(4, 2, -0.03))
    found = simulated.measure(*simulated.begin())
    assert found.culprit == simulated.commits[1]
    assert "made it faster: decode_step_ms −" in bisection_tables.page(found).conclusion
    assert '<header class="good">' in bisection_tables.to_html(found)
    falls = msgspec.structs.replace(found, metric="throughput_tok_s", better="higher")
    assert "made it worse: throughput_tok_s −" in bisection_tables.page(falls).conclusion


def test_commits_that_can_not_be_measured_are_skipped_and_told(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(16, 11), broken=[8], hanging=[3, 4], failing=[12])
    found = simulated.measure(*simulated.begin())
    assert found.culprit == simulated.commits[10]
    told = {each.commit: each.skipped for each in found.commits if each.skipped}
    assert told[simulated.commits[7]] == "it has no scheduler"
    assert told.get(simulated.commits[11]) in (None, "a request failed")
    hung = "it did not start within 3600 s; its log: its.log"
    assert {told.get(simulated.commits[place - 1], hung) for place in (3, 4)} == {hung}
    assert any("is skipped, it can't be measured: it has no scheduler" in line for line in simulated.said)
    page = bisection_tables.page(found)
    assert any("was skipped" in line for line in page.warnings)
    assert simulated.warmed.count(simulated.commits[7]) == 1  # and is not tried again


def test_beside_a_skipped_commit_it_says_between_which_it_can_not_tell(
    repository: Path, tmp_path: Path
) -> None:
    simulated = Simulated(repository, tmp_path, stepping(16, 8), broken=[8])
    found = simulated.measure(*simulated.begin())
    assert (found.verdict, found.culprit) == ("undecided", None)
    (change,) = found.changes
    assert (change.first, change.last) == (simulated.commits[7], simulated.commits[8])
    assert change.posterior > 0.95
    page = bisection_tables.page(found)
    assert "one of the 2 commits from" in page.conclusion
    assert "Commits that were skipped stand beside it" in page.lines[-1]
    named = {row[0] for row in page.tables[0].rows}
    assert {each.commit[:10] for each in found.commits if each.posterior > 0.02} <= named


def test_what_fails_in_good_or_bad_ends_it(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(8, 4), failing=[0])
    folder, stored = simulated.begin()
    with pytest.raises(api.EngineError, match="a request failed"):
        simulated.measure(folder, stored)
    assert not folder.exists()


@pytest.mark.parametrize(("what", "now"), [("rebuilt", "'2'"), ("built", "None")])
def test_a_build_in_between_ends_it_and_a_commit_is_not_skipped_for_it(
    repository: Path, tmp_path: Path, what: str, now: str
) -> None:
    """One that changed the file, or removed it: no commit's tree has it."""
    simulated = Simulated(repository, tmp_path, stepping(8, 4))
    setattr(simulated, what, range(1, 8))
    folder, stored = simulated.begin()
    with pytest.raises(StoreError, match=f"others than good and bad got: {BUILT} was '1', is {now}") as ended:
        simulated.measure(folder, stored)
    assert f"give --resume {folder}, or bisect anew" in str(ended.value)
    assert not simulated.warmed
    assert finished_blocks(folder)
    assert not store.read(folder).skipped
    setattr(simulated, what, ())  # brought back
    assert resumed(simulated, folder).culprit == simulated.commits[3]


def test_a_commit_that_has_a_built_file_itself_is_skipped(repository: Path, tmp_path: Path) -> None:
    (tmp_path / BUILT).touch()
    simulated = Simulated(repository, tmp_path, stepping(8, 5), built=[4])
    simulated.measure(*simulated.begin())
    said = f"is skipped, it can't be measured: it has {BUILT} itself, which good and bad got by --overlay"
    assert any(said in line for line in simulated.said)
    assert simulated.commits[3] not in simulated.warmed


def test_trials_without_a_value_do_not_count(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(8, 4), nothing=[1, 5, 6])
    found = simulated.measure(*simulated.begin())
    assert found.culprit == simulated.commits[3]
    assert found.unusable == 3
    assert any("no value" in line for line in simulated.said)


def test_how_many_trials_other_work_disturbed_is_told(repository: Path, tmp_path: Path) -> None:
    _, stored = Simulated(repository, tmp_path, stepping(8, 4)).begin()
    trials = [Trial(0, 0.1 + 0.001 * number, calm=number > 1) for number in range(6)]
    found = bisection.result(stored, trials, "lower")
    assert found.disturbed == 2
    assert any("in 2 of 6 trials, other processes" in each for each in bisection_tables.page(found).warnings)


def test_a_trial_is_kept_though_an_engine_fails_while_it_stops(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(8, 4), unstopped=[4, 6])
    folder, stored = simulated.begin()
    found = simulated.measure(folder, stored)
    assert found.culprit == simulated.commits[3]
    assert found.trials == len(finished_blocks(folder))
    assert not [each for each in found.commits if each.skipped]


def test_time_that_is_up_leaves_it_undecided_and_more_goes_on(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(16, 11))
    folder, stored = simulated.begin()
    found = simulated.measure(folder, stored, minutes=1.4)  # good and bad's trials, and two more
    assert found.verdict == "undecided"
    assert bisection_tables.page(found).lines[-1] == "--resume goes on where it ended."
    assert "time is up: a trial takes 21 s, and 82 s are gone" in simulated.said
    assert any("more than --max-minutes 1.4" in line for line in simulated.said)
    kept = finished_blocks(folder)
    spent = found.minutes
    found = resumed(simulated, folder)
    assert found.culprit == simulated.commits[10]
    assert found.minutes > spent + 0.5
    assert finished_blocks(folder)[: len(kept)] == kept


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_twenty_moments_nothing_is_lost(repository: Path, tmp_path: Path, seed: int) -> None:
    """Before and after each file that it writes, between good and bad's trials and a commit's."""
    kills = random.Random(seed).sample(range(90), 5)
    simulated = Simulated(repository, tmp_path, stepping(32, 21), broken=[16], kills=kills)
    folder, stored = simulated.begin()
    kept: list[int] = []
    for _ in range(len(kills) + 1):
        try:
            found = simulated.measure(folder, stored)
            break
        except Killed:
            assert finished_blocks(folder)[: len(kept)] == kept
            kept = finished_blocks(folder)
            assert kept == [*range(len(kept))]
            stored = study.resumed(folder, lambda *_: True)
    assert found.culprit == simulated.commits[20]
    assert found.trials == len(finished_blocks(folder))
    assert not list(folder.rglob("*.partial*"))


def test_only_what_was_begun_here_is_gone_on_with(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(4, 2))
    folder, stored = simulated.begin()
    store.write(folder, msgspec.structs.replace(stored, commits=stored.commits[1:]))
    with pytest.raises(api.BadSetting, match="if it may do all this, give --trust"):
        study.resumed(folder, lambda *what: study.trust.admit(*what, trusted=False, say=lambda line: None))


def test_a_commit_whose_trials_have_no_value_is_skipped_after_three(repository: Path, tmp_path: Path) -> None:
    """The search would choose it again and again: without a value nothing is learnt of it."""
    simulated = Simulated(repository, tmp_path, stepping(16, 11), worthless=[8])
    found = simulated.measure(*simulated.begin())
    assert found.culprit == simulated.commits[10]
    assert found.unusable == 3
    told = {each.commit: each.skipped for each in found.commits if each.skipped}
    assert "have no value of" in told[simulated.commits[7]]


def test_commits_that_failed_for_another_reason_are_tried_again(repository: Path, tmp_path: Path) -> None:
    """Three in a row: something else was wrong, such as memory that another process held."""
    simulated = Simulated(repository, tmp_path, stepping(16, 4), failing=range(1, 16))
    folder, stored = simulated.begin()
    with pytest.raises(api.EngineError, match="a request failed") as failed:
        simulated.measure(folder, stored)
    assert failed.value.__notes__ == [f"4 trials are kept, go on with bench bisect --resume {folder}"]
    assert not store.read(folder).skipped
    simulated.failing = ()
    assert resumed(simulated, folder).culprit == simulated.commits[3]


@pytest.mark.parametrize("count", [3, 5])
def test_neighbours_that_can_not_boot_are_skipped_once_good_and_bad_were_seen_to(
    repository: Path, tmp_path: Path, count: int
) -> None:
    """A stretch of broken commits is common; each is tried twice, with good and bad in between."""
    broken = range(9, 9 + count)
    simulated = Simulated(repository, tmp_path, stepping(20, 16), broken=broken)
    found = simulated.measure(*simulated.begin())
    assert found.culprit == simulated.commits[15]
    told = {each.commit for each in found.commits if each.skipped}
    assert {simulated.commits[place - 1] for place in broken[:3]} <= told


def test_where_good_does_not_run_any_more_either_nothing_is_skipped(repository: Path, tmp_path: Path) -> None:
    simulated = Simulated(repository, tmp_path, stepping(16, 4), broken=range(1, 16))
    folder, stored = simulated.begin()
    measure = simulated._one_block

    def one_block(session: Any, manifests: Any, number: int, *more: Any) -> Any:
        if any("good and bad are measured once more" in each for each in simulated.said):
            raise api.EngineError("the disk is full")
        return measure(session, manifests, number, *more)

    simulated._one_block = one_block  # type: ignore[method-assign]
    with pytest.raises(api.EngineError, match="the disk is full"):
        simulated.measure(folder, stored)
    assert not store.read(folder).skipped


def test_the_load_that_is_offered_is_not_bisected(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    asked = msgspec.structs.replace(ASKED, workload={"arrival": "fixed", "interval_ms": 100.0})
    with pytest.raises(api.BadSetting, match="throughput_tok_s is the load that is offered"):
        study.begin(asked, "commit-0", "commit-8", "throughput_tok_s", tmp_path)


def test_the_interval_of_a_change_knows_that_two_numbers_of_a_trial_share_a_boot(
    repository: Path, tmp_path: Path
) -> None:
    """A trial of a commit behind the change: its own and bad's, against the same boot of good. Taken for
    independent, intervals of 95% held the change in 91 to 93% of 20,000 simulated runs."""
    _, stored = Simulated(repository, tmp_path, stepping(8, 4)).begin()
    noise = [0.002 * (-1) ** number for number in range(14)]
    alone = [Trial(0, 0.1 + each) for each in noise[:6]]
    before = [Trial(3, 0.1 + each, each) for each in noise[6:8]]
    behind = [Trial(4, 0.1 + each, 0.1 + each) for each in noise[8:]]
    trials = [*alone, *before, *behind]
    (found,) = bisection.result(stored, trials, "lower").changes
    assert (found.first, found.last) == (stored.commits[3].commit, stored.commits[3].commit)
    shared = (14 + 2 * 6) / (14 + 6) ** 2  # in place of 1 / (14 + 6)
    half = t_quantile(0.975, 13) * np.std([each.effect for each in trials], ddof=1) * shared**0.5
    assert math.log1p(found.ci_high) - math.log1p(found.effect) == pytest.approx(half)


def test_the_figure_multiplies_changes_as_its_headline_does(repository: Path, tmp_path: Path) -> None:
    """A doubling and then a quarter less end at +50%, and not at +75%."""
    _, stored = Simulated(repository, tmp_path, stepping(8, 4)).begin()
    found = bisection.result(stored, [Trial(0, 0.4 + 0.001 * number) for number in range(6)], "lower")
    both = [
        Change(
            first=each.commit, last=each.commit, posterior=1.0, effect=effect, ci_low=effect, ci_high=effect
        )
        for each, effect in zip(found.commits[1:3], (1.0, -0.25), strict=True)
    ]
    above, _ = commits.bisection(msgspec.structs.replace(found, changes=both)).axes
    line = max(above.lines, key=lambda each: len(each.get_ydata()))
    assert line.get_ydata()[-1] == pytest.approx(50)
