"""`bench bisect`: which commit changed a metric, from two refs to the trials that tell.

Good and bad come first, interleaved, until it is known whether they differ; then each trial has a commit
between them beside the two. A commit's first boot is thrown away, as a run's first boots are; one that does
not boot, or fails twice in a trial, is skipped. What is on disk after each trial is all that --resume needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from math import expm1
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import history
from overlap_bench.harness.analysis.bisection import Bisected, ends_of, known_of, result, trial_of, trials_of
from overlap_bench.harness.analysis.values import THROUGHPUTS
from overlap_bench.harness.common.formatting import between as ranged
from overlap_bench.harness.common.formatting import duration, percent
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import DEFAULT_LIMIT, Design, check_gated, check_metrics, orders
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run import overlay, trial, worktrees
from overlap_bench.harness.run.hosts import Trees, engines_of
from overlap_bench.harness.run.messages import Booting, Event, Foreseen, Said
from overlap_bench.harness.run.session import Session
from overlap_bench.harness.stats import bisection
from overlap_bench.harness.stats.bisection import Posterior, Trial
from overlap_bench.harness.stats.distributions import Floats
from overlap_bench.harness.store import bisection as store
from overlap_bench.harness.store import trust
from overlap_bench.harness.store.bisection import BAD, GOOD, Bisection, Commit, Foretold
from overlap_bench.harness.store.files import StoreError, WriteFailed, read_json_lines
from overlap_bench.harness.store.manifest import check_resume, create, described_here, discard, held
from overlap_bench.harness.store.tables import Block, finished_blocks, write_block
from overlap_bench.harness.store.trust import Admit
from overlap_bench.harness.workload.arrivals import ARRIVALS

MINUTES = 60.0  # unless others are asked for
TRIALS = 500  # at most: days
PATIENCE = 10  # times as long as the first boots took: a commit that has not booted by then hangs
LEAST_PATIENCE_S = 60.0
TRIES = 2  # of a trial, before its commit is skipped
VALUELESS = 3  # trials of a commit without a value, before it is skipped
IN_A_ROW = 3  # commits that fail one after the other: it may not be theirs
# Of a trial of good and bad, what one with a commit beside them takes, and that commit's first boot; until
# they were seen.
OF_THREE, OF_A_FIRST_BOOT = 1.5, 0.6

Say = Callable[[str], None]


def span_of(path: Path, metric: str | None = None) -> tuple[str, str, str]:
    """The metric of which a gate's history shows the latest change for the worse, or that one, and the
    commits between which it lies. Raises BadSetting where it shows none, and StoreError."""
    found = history.span(read_json_lines(path, history.Remembered), metric)
    if found is None:
        of = "" if metric is None else f" of {metric}"
        raise api.BadSetting(f"{path} shows no change for the worse{of}: give --good and --bad")
    return found


def begin(request: Request, good: str, bad: str, metric: str | None, out: Path) -> tuple[Path, Bisection]:
    """A new folder under `out` with what is to be bisected. Raises BadSetting."""
    for pattern in request.overlay:
        overlay.check(pattern)
    refs = worktrees.resolve(good, Path.cwd()), worktrees.resolve(bad, Path.cwd())
    commits = worktrees.between(*refs)
    asked = {**request.design, **({} if metric is None else {"primary": metric})}
    request = msgspec.structs.replace(request, refs=refs, design={**asked, "max_minutes": MINUTES})
    design = make_design(request, engines_of(refs), load_variants(), guess_device)
    check_gated([design.primary], DEFAULT_LIMIT)
    check_metrics(design)
    if design.primary in THROUGHPUTS and ARRIVALS[design.workload.arrival].open_loop:
        raise api.BadSetting(
            f"{design.primary} is the load that is offered, as long as the engine keeps up: bisect another "
            "--metric, or --arrival closed"
        )
    name = f"bisect-{design.arms[0].engine}"
    arms = tuple(
        msgspec.structs.replace(arm, name=called)
        for arm, called in zip(design.arms, (GOOD, BAD), strict=True)
    )
    design = msgspec.structs.replace(design, name=name, arms=arms, blocks=TRIALS, max_minutes=None)
    now = datetime.now().astimezone()
    folder = create(out, name, now)
    manifest = described_here(design, folder.name, now, lot=folder.name)
    found = tuple(Commit(commit=commit, subject=subject) for commit, subject in commits)
    stored = Bisection(manifest=manifest, commits=found)
    signature = trust.signature(_designs(stored))
    stored = msgspec.structs.replace(stored, manifest=msgspec.structs.replace(manifest, signature=signature))
    store.write(folder, stored)
    return folder, stored


def resumed(folder: Path, admit: Admit) -> Bisection:
    """A stored one, to be gone on with here. Raises StoreError where the commit of bench, the machine or the
    versions are others, and as `admit` does."""
    stored = store.read(folder)
    admit(folder, _designs(stored), stored.manifest.signature)
    now = described_here(
        stored.manifest.design, stored.manifest.run, datetime.now().astimezone(), stored.manifest.run
    )
    check_resume(stored.manifest, now)
    return stored


def _designs(stored: Bisection) -> list[Design]:
    return [stored.design(place) for place in range(len(stored.commits))]


def read(folder: Path) -> Bisected:
    """What a stored one says so far. Raises StoreError."""
    stored = store.read(folder)
    return _result(stored, trials_of(folder, stored))


def measure(folder: Path, stored: Bisection, minutes: float, say: Say) -> Bisected:
    """Measure until the commit is found, there is nothing to find, or time is up. Raises as measure.trials
    does: what fails in good or bad, or in commit after commit, ends it; every trial is kept."""
    with held(folder):
        search = _Search(folder, stored, trials_of(folder, stored), minutes, say)
        try:
            search.run()
        except BaseException as error:
            kept = len(finished_blocks(folder))
            if not kept:
                discard(folder)
            elif not isinstance(error, StoreError):
                error.add_note(f"{kept} trials are kept, go on with bench bisect --resume {folder}")
            raise
        return _result(search.stored, search.trials)


def _result(stored: Bisection, trials: Sequence[Trial | None]) -> Bisected:
    return result(stored, trials, definitions.METRICS[stored.manifest.design.primary].better)


@dataclass
class _Search:
    """One that is under way: what is on disk, and what this process knows besides."""

    folder: Path
    stored: Bisection
    trials: list[Trial | None]
    minutes: float
    say: Say
    began: float = 0.0
    last: float = 0.0  # when the time spent was last counted
    foreseen_s: float = 0.0  # of a trial of good and bad
    pairs_s: list[float] = field(default_factory=list)  # what they took
    first_boots_s: float = 0.0
    trio_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)  # of commits' first boots
    warmed: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    doubtful: bool = False  # whether so many failed in a row that good and bad must be seen to run first
    doubted: set[int] = field(default_factory=set)  # commits that failed while good and bad did run
    valueless: dict[int, int] = field(default_factory=dict)  # trials without a value, by commit

    def __post_init__(self) -> None:
        self.began = self.last = time.monotonic()

    def run(self) -> None:
        good, bad = (arm.ref for arm in self.stored.manifest.design.arms)
        assert good is not None
        assert bad is not None
        count = len(self.stored.commits)
        commits = f"{count} commit{'s' * (count != 1)}"
        self.say(f"writing to {self.folder}")
        self.say(f"{commits} after {good.name} ({good.commit[:10]}) up to {bad.name} ({bad.commit[:10]})")
        if self._following() is None:
            return
        with overlay.checked_out(self.stored.manifest.design) as trees, ExitStack() as more:
            places = {**trees.places}  # a session looks into it at each boot
            with Session(places) as session:
                self._first_boots(session, trees)
                failed = self._measure_all(session, places, more)
            while failed is not None:  # whatever an engine left when it failed is gone with its session
                with Session(places) as session:
                    failed = self._measure_all(session, places, more)

    def _first_boots(self, session: Session, trees: Trees) -> None:
        began = time.monotonic()
        (manifest,) = trial.first_boots(session, trees, [self.stored.manifest], TRIALS, self._heard)
        if manifest.changed_code is not None and not manifest.changed_code.counts:
            raise api.BadSetting(
                f"good and bad can't differ here: {manifest.changed_code.never_ran}; ask for what runs it"
            )
        self.first_boots_s = time.monotonic() - began
        self._keep(manifest=manifest)

    def _heard(self, event: Event) -> None:
        match event:
            case Said(line):
                self.say(line)
            case Foreseen(seconds, _):
                self.foreseen_s = seconds
            case Booting(arms, seconds, log) if not {*arms} & {GOOD, BAD}:
                if seconds > max(LEAST_PATIENCE_S, PATIENCE * self.first_boots_s):
                    raise api.EngineError(f"it did not start within {seconds:.0f} s; its log: {log}")

    def _measure_all(self, session: Session, places: dict[str, Path], trees: ExitStack) -> int | None:
        """Trial after trial, to the end: None. Or up to a commit that failed: its place."""
        while (place := 0 if self.doubtful else self._following()) is not None:
            try:
                if place not in self.warmed and place:
                    self._warm_up(session, place, places, trees)
                self._measure(session, place)
            except (api.EngineError, api.BadSetting) as error:
                if not place or isinstance(error, WriteFailed | StoreError):
                    raise
                self._failed(place, error)
                return place
            if self.doubtful:  # it is theirs, or was of a moment: each is tried once more
                self.doubted |= self.failures.keys()
                self.doubtful = False
            self.failures.clear()
        return None

    def _warm_up(self, session: Session, place: int, places: dict[str, Path], trees: ExitStack) -> None:
        began, arm = time.monotonic(), self.stored.arm(place)
        if arm.name not in places:
            tree = trees.enter_context(overlay.checked_out(self.stored.manifest.design, [arm]))
            self._check_overlaid(tree, tree.places[arm.name])
            places |= tree.places
        trial.warm_up(session, self.stored.manifest.design, arm, self._heard)
        self.warmed.add(place)
        self.warm_s.append(time.monotonic() - began)

    def _check_overlaid(self, trees: Trees, tree: Path) -> None:
        """Raises BadSetting for a commit that has such a file itself, and StoreError where another is laid
        over it than over good and bad: a build may have changed it since."""
        ours, its = (
            {each.file: each.sha256 for each in laid}
            for laid in (self.stored.manifest.overlaid, trees.overlaid)
        )
        if own := [file for file in ours.keys() - its.keys() if (tree / file).exists()]:
            raise api.BadSetting(f"it has {min(own)} itself, which good and bad got by --overlay")
        if other := difference(ours, its):
            raise StoreError(
                f"the files of --overlay are others than good and bad got: {other}; your checkout may have "
                f"been built again: bring them back and give --resume {self.folder}, or bisect anew"
            )

    def _measure(self, session: Session, place: int) -> None:
        began, number = time.monotonic(), len(self.trials)
        design = self.stored.design(place)
        arms = len(design.arms)
        drawn = [orders(self.stored.manifest.run, each, arms) for each in range(number + 1)]
        manifest = msgspec.structs.replace(self.stored.manifest, design=design, orders=drawn)

        def write(measured: Sequence[Mapping[str, pd.DataFrame]]) -> None:
            write_block(self.folder, number, measured[0])
            self.trials.append(trial_of(self.stored, Block(number, measured[0])))

        trial.measure(session, [manifest], number, self._heard, write)
        (self.trio_s if place else self.pairs_s).append(time.monotonic() - began)
        self._keep()
        self._tell(place, self.trials[-1])
        if place and self.trials[-1] is None:
            self.valueless[place] = self.valueless.get(place, 0) + 1
            if self.valueless[place] == VALUELESS:  # the next trial would be its own again
                self._skip(place, f"{VALUELESS} of its trials have no value of {design.primary}")

    def _failed(self, place: int, error: Exception) -> None:
        """Skip a commit whose first boot failed, or whose trial did so twice."""
        self.failures[place] = self.failures.get(place, 0) + 1
        if place in self.warmed and self.failures[place] < TRIES:
            self.say(f"a trial failed, and is tried again: {error}")
            return
        in_a_row = len(self.failures) == IN_A_ROW
        beside = self.failures.keys() & self.warmed  # each boots alone, and not beside good and bad
        if in_a_row and (beside or not self.failures.keys() <= self.doubted):
            self._take_back()
            if beside:
                raise error
            self.doubtful = True
            self.say(
                f"{IN_A_ROW} commits failed one after the other: good and bad are measured once more first"
            )
            return
        self._skip(place, " ".join(str(error).split()))
        if in_a_row:
            self.failures.clear()

    def _take_back(self) -> None:
        """Skip none of those in doubt any more: this, or --resume, is to try them again."""
        if self.failures:
            theirs = {self.stored.commits[each - 1].commit for each in self.failures}
            skipped = {name: why for name, why in self.stored.skipped.items() if name not in theirs}
            self._keep(skipped=skipped)

    def _skip(self, place: int, reason: str) -> None:
        commit = self.stored.commits[place - 1]
        self.say(f"{commit.short} is skipped, it can't be measured: {reason}")
        self._keep(skipped={**self.stored.skipped, commit.commit: reason})

    def _keep(self, **changed: object) -> None:
        now = time.monotonic()
        spent = self.stored.spent_s + now - self.last
        self.stored, self.last = msgspec.structs.replace(self.stored, spent_s=spent, **changed), now
        store.write(self.folder, self.stored)

    @property
    def pair_s(self) -> float:
        return float(np.mean(self.pairs_s)) if self.pairs_s else self.foreseen_s

    # -- what comes next -----------------------------------------------------------------------------------

    def _following(self) -> int | None:
        """The commit of the next trial, 0 for none beside good and bad; None at the end."""
        usable = [each for each in self.trials if each is not None]
        differ = ends_of(self.stored, usable).verdict
        if differ == "equal" or len(self.trials) >= TRIALS:
            return None
        place: int | None = 0
        if differ == "different":
            known = known_of(self.stored, usable)
            assert known is not None
            if self.stored.foretold is None:
                self._foretell(usable)
            skipped = self.stored.left_out
            place = bisection.following(known, self._costs(), skipped)
            if known.found(skipped) or place is None:
                return None
        costs = self._costs()[place] if place else self.pair_s / 60
        gone = (time.monotonic() - self.began) / 60
        if gone + costs > self.minutes:
            self.say(f"time is up: a trial takes {duration(60 * costs)}, and {duration(60 * gone)} are gone")
            return None
        return place

    def _costs(self) -> Floats:
        """Minutes of a trial, by commit."""
        trio = float(np.mean(self.trio_s)) if self.trio_s else OF_THREE * self.pair_s
        warm = float(np.mean(self.warm_s)) if self.warm_s else OF_A_FIRST_BOOT * self.pair_s
        count = len(self.stored.commits) + 1
        costs = np.full(count, max(trio, 1.0) / 60)
        costs[[each for each in range(count) if each not in self.warmed]] += warm / 60
        return costs

    def _foretell(self, trials: Sequence[Trial]) -> None:
        rows = bisection.forecast(trials, len(self.stored.commits))
        trio, warm = OF_THREE * self.pair_s / 60, OF_A_FIRST_BOOT * self.pair_s / 60
        spent = (self.stored.spent_s + time.monotonic() - self.last) / 60
        shares = (0.1, 0.5, 0.9)
        counts = np.quantile(rows[:, 0], shares) + len(self.trials)
        minutes = np.quantile(rows @ [trio, warm], shares) + spent
        low, middle, high = (round(float(each), 1) for each in minutes)
        few, usual, many = (round(float(each)) for each in counts)
        foretold = Foretold(trials=(few, usual, many), minutes=(low, middle, high))
        self._keep(foretold=foretold)
        ends = ends_of(self.stored, trials)
        self.say(
            f"good and bad differ: {percent(expm1(ends.mean))} [{percent(expm1(ends.low))}, "
            f"{percent(expm1(ends.high))}], SD {ends.sd:.2%} from trial to trial. To find the commit it will "
            f"take about {usual} trials in all ({few} to {many}), {duration(60 * middle)} "
            f"({ranged(duration(60 * low), duration(60 * high))})"
        )
        if middle > self.minutes:
            self.say(f"that is more than --max-minutes {self.minutes:g}; --resume {self.folder} goes on")

    # -- what is said --------------------------------------------------------------------------------------

    def _tell(self, place: int, trial: Trial | None) -> None:
        which = self.stored.commits[place - 1].short if place else "good and bad"
        number = f"trial {len(self.trials)}: {which}"
        if trial is None:
            self.say(f"{number}: no value, as where too few turns have a partner; it does not count")
            return
        change = trial.change if place else trial.effect
        said = f"{number} {percent(expm1(change))}"
        known = known_of(self.stored, [each for each in self.trials if each is not None])
        if place and known is not None:
            said += f"; likeliest {self._likeliest(known)}"
        self.say(said)

    def _likeliest(self, known: Posterior) -> str:
        gaps = []
        for first, last in known.best:
            names = [self.stored.commits[each - 1].short for each in (first, last)]
            gaps.append(names[0] if first == last else f"{last - first + 1} commits up to {names[1]}")
        return f"{' and '.join(gaps)}, {known.claim:.0%}"
