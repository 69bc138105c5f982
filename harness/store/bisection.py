"""bisect.json, and the trials of a bisection: each a block of good, bad and, once these differ, a commit
between them, whose arm is named by it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_bench.harness.plan.design import Arm, Design, Ref
from overlap_bench.harness.store.files import BISECTION_FILE, SCHEMA_VERSION, read_json, write_json
from overlap_bench.harness.store.manifest import Manifest

GOOD, BAD = "good", "bad"  # arms
SHORT = 10  # characters of a commit


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    subject: str

    @property
    def short(self) -> str:
        return self.commit[:SHORT]


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """What the search was to take when it began, good and bad included: 10%, 50% and 90% of simulated ones
    took no more."""

    trials: tuple[int, int, int]
    minutes: tuple[float, float, float]


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """`commits` are those after good, bad the last. `manifest` is that of good and bad alone."""

    manifest: Manifest
    commits: tuple[Commit, ...]
    skipped: dict[str, str] = {}  # by commit: why it can't be measured
    foretold: Foretold | None = None
    spent_s: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def left_out(self) -> frozenset[int]:
        """The places of the skipped ones."""
        return frozenset(place for place, each in enumerate(self.commits, 1) if each.commit in self.skipped)

    def design(self, place: int) -> Design:
        """The design of a trial with the commit at that place, 1 the first after good; 0: of good and bad
        alone."""
        design = self.manifest.design
        return msgspec.structs.replace(design, arms=(*design.arms, self.arm(place))) if place else design

    def arm(self, place: int) -> Arm:
        bad, commit = self.manifest.design.arms[1], self.commits[place - 1]
        assert bad.ref is not None
        ref = Ref(repository=bad.ref.repository, name=commit.short, commit=commit.commit)
        return msgspec.structs.replace(bad, name=commit.short, ref=ref)


def read(folder: Path) -> Bisection:
    """Raises StoreError for a folder that is no bisection, or whose file is damaged or newer."""
    return read_json(folder / BISECTION_FILE, Bisection, "a bisection's folder")


def write(folder: Path, stored: Bisection) -> None:
    """Write or replace bisect.json, whole or not at all."""
    write_json(folder / BISECTION_FILE, stored)
