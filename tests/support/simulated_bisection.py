"""`bench bisect` without engines: its trials are drawn, from commits whose effects are known."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import bisection as analysis
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.run.hosts import Trees
from overlap_bench.harness.run.messages import Booting, Foreseen
from overlap_bench.harness.store.bisection import BAD, GOOD, Bisection
from overlap_bench.harness.store.manifest import ChangedCode, Overlaid
from overlap_bench.harness.store.tables import COLUMNS, whole
from overlap_bench.harness.studies import bisect as study
from tests.support.made_blocks import described
from tests.support.repositories import commit

COMMITS = 32  # after the first, in a repository that simulations share
BUILT = "engine.so"
ASKED = Request(engine="overlap", options={"pace": "3ms"})


class Killed(BaseException):
    """What stands for a kill -9: nothing of this project catches it by name."""


def repository(where: Path) -> Path:
    for place in range(COMMITS + 1):
        commit(where, {"engine.py": f"LEVEL = {place}\n"}, f"commit-{place}")
    return where


@dataclass
class Simulated:
    """`levels`: change against good of each commit, good first, the last is bad's. `broken`: places of
    commits that do not boot; `failing`: whose trials fail. `kills`: at which moments it is killed, counted
    over its whole life."""

    repository: Path
    folder: Path
    levels: Sequence[float]
    sd: float = 0.002
    broken: Sequence[int] = ()
    failing: Sequence[int] = ()
    nothing: Sequence[int] = ()  # numbers of trials without a value
    worthless: Sequence[int] = ()  # and places of commits whose trials have none
    hanging: Sequence[int] = ()  # places of commits that never come up
    rebuilt: Sequence[int] = ()  # places before whose boots the built file of --overlay was changed
    built: Sequence[int] = ()  # and of commits that have it themselves
    unused: bool = False  # whether no round runs what good and bad differ by
    unstopped: Sequence[int] = ()  # of trials after which an engine fails to stop
    kills: Sequence[int] = ()
    said: list[str] = field(default_factory=list)
    warmed: list[str] = field(default_factory=list)
    moments: Iterator[int] = field(default_factory=itertools.count)
    commits: list[str] = field(default_factory=list)  # after good
    now: float = 0.0  # s

    def begin(self) -> tuple[Path, Bisection]:
        """A fresh one."""
        with pytest.MonkeyPatch.context() as here:
            here.chdir(self.repository)
            last = f"commit-{len(self.levels) - 1}"
            folder, stored = study.begin(ASKED, "commit-0", last, None, self.folder / "out")
        self.commits = [each.commit for each in stored.commits]
        return folder, stored

    def read(self, folder: Path) -> analysis.Bisected:
        with pytest.MonkeyPatch.context() as here:
            here.setattr(analysis, "block_values", _values)
            return study.read(folder)

    def measure(self, folder: Path, stored: Bisection, minutes: float = 60.0) -> analysis.Bisected:
        with pytest.MonkeyPatch.context() as here:
            here.setattr(study, "time", SimpleNamespace(monotonic=lambda: self.now))
            here.setattr(study.bisection, "FORETOLD", 8)
            here.setattr(study, "Session", self._session)
            here.setattr(study.overlay, "checked_out", self._trees)
            here.setattr(study.trial, "first_boots", self._discarded)
            here.setattr(study.trial, "warm_up", self._warm_up)
            here.setattr(study.trial, "measure", self._one_block)
            here.setattr(analysis, "block_values", _values)
            if self.kills:  # who is killed tidies nothing up
                here.setattr(study, "discard", lambda folder: None)
            here.setattr(study, "write_block", self._between(study.write_block))
            here.setattr(study.store, "write", self._between(study.store.write))
            return study.measure(folder, stored, minutes, self.said.append)

    def _between(self, write: Any) -> Any:
        def killed(*arguments: Any) -> None:
            self._moment()
            write(*arguments)
            self._moment()

        return killed

    def _moment(self) -> None:
        if next(self.moments) in self.kills:
            raise Killed

    @contextmanager
    def _session(self, places: Mapping[str, Path]) -> Iterator[Any]:
        assert {GOOD, BAD} <= {*places}
        yield SimpleNamespace(places=places)

    @contextmanager
    def _trees(self, design: Any, arms: Any = None) -> Iterator[Any]:
        (place,) = (self._place(arm.ref.commit) for arm in arms) if arms else (0,)
        laid = Overlaid(file=BUILT, sha256="2" if place in self.rebuilt else "1")
        yield Trees(
            {arm.name: self.folder for arm in arms or design.arms}, [] if place in self.built else [laid]
        )

    def _discarded(self, session: Any, trees: Any, manifests: Any, left: int, observe: Any) -> Any:
        self._moment()
        observe(Foreseen(10.0, manifests[0].design))
        ran = {name: list[str]() for name in ("in_rounds", "at_boot", "unseen", "other", "used")}
        code = ChangedCode(functions=1, never=["engine.py: step"], counts=not self.unused, **ran)
        described_ = {GOOD: described(), BAD: described()}
        found = {"descriptions": described_, "changed_code": code, "overlaid": trees.overlaid}
        return [msgspec.structs.replace(manifests[0], **found)]

    def _warm_up(self, session: Any, design: Any, arm: Any, observe: Any) -> None:
        assert arm.name in session.places
        self.warmed.append(arm.ref.commit)
        self.now += 6.0
        if self._place(arm.ref.commit) in self.hanging:
            observe(Booting((arm.name,), 3600.0, Path("its.log")))
        if self._place(arm.ref.commit) in self.broken:
            raise api.EngineError("it has no scheduler")

    def _one_block(self, session: Any, manifests: Any, number: int, observe: Any, write: Any) -> None:
        (manifest,) = manifests
        arms = manifest.design.arms
        assert sorted(manifest.drawn[number]) == [*range(len(arms))]
        assert {arm.name for arm in arms} <= {*session.places}
        self._moment()
        places = [0, len(self.levels) - 1, *(self._place(arm.ref.commit) for arm in arms[2:])]
        if {*places} & {*self.failing}:
            raise api.EngineError("a request failed")
        random = np.random.default_rng([number, places[-1]])
        noise = self.sd / 2**0.5 * random.standard_normal(len(arms))
        values = 5 * np.exp(np.log1p([self.levels[place] for place in places]) + noise)
        if number in self.nothing or {*places} & {*self.worthless}:
            values[0] = np.nan
        stamps = {"started_ns": number, "ended_ns": number + 1}
        rows = [
            {"arm": arm.name, "round": 0, **stamps, "value": value}
            for arm, value in zip(arms, values, strict=True)
        ]
        requests = pd.DataFrame(columns=["arm", "round", *COLUMNS["requests"]])
        self.now += 5.0 * len(arms)
        write([whole({"rounds": pd.DataFrame(rows), "requests": requests})])
        if number in self.unstopped:
            raise api.EngineError("it failed while it stopped")

    def _place(self, commit: str) -> int:
        return self.commits.index(commit) + 1


def _values(design: Any, block: Any) -> dict[str, dict[str, float]]:
    rows = block.tables["rounds"]
    return {
        str(arm): {design.primary: float(value)}
        for arm, value in zip(rows["arm"], rows["value"], strict=True)
    }
