"""What a run will do, as plain data: arms, blocks, order, seeds.

What is asked follows from `seed`, so that runs can ask the same. The order of the arms follows from a lot
that is each run's own: runs that shared one order would all have the same part of a position effect in their
change, and a fresh run would confirm what an earlier one owed to its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from itertools import combinations
from typing import Literal

import msgspec

from engines import api
from harness.workload import Workload

MAX_SECONDARIES = 5
DRAWN_TOGETHER = 6  # blocks whose orders are drawn together, so that both are among them
ALPHA = 0.05  # two-sided, of each interval and verdict of a fixed number of blocks


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """A commit whose code an arm runs, in place of what is installed."""

    repository: str  # its folder
    name: str  # as it was asked for: "origin/main"
    commit: str


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: an engine with its settings, under a given interpreter."""

    name: str  # "before", "after"; where there are more, whatever tells them apart
    engine: str
    options: api.EngineOptions
    toggles: dict[str, str]
    python: str | None = None  # interpreter to start it with; None: the harness's own
    env: dict[str, str] = {}
    ref: Ref | None = None  # None: what is installed
    known: tuple[str, ...] | None = (
        None  # of an imported arm: the options that are known; None: all are in force
    )

    @property
    def stays(self) -> bool:
        """Whether it is a server at an address, which runs before and after: it has one boot, whatever is
        asked of it."""
        return "url" in self.toggles


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """A toggle that a factorial varies, with two of its choices."""

    toggle: str
    before: str
    after: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a factorial that means nothing, and why."""

    name: str  # as its arm would be called
    reason: str


class Factorial(msgspec.Struct, frozen=True, kw_only=True):
    """That the arms of a design are the settings of some factors; what is made of it: factorial.py."""

    factors: tuple[Factor, ...]
    left_out: tuple[LeftOut, ...] = ()


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that may stop a run before its last block; how it is made and why it is safe: stopping.py."""

    rule: Literal["decided", "precise"]
    looks: tuple[int, ...]  # numbers of blocks at which the rule looks, ascending
    levels: tuple[float, ...]  # two-sided, of the test at each look; its interval has 1 - level
    precision: float | None = None  # of "precise": the half-width that is enough, as a fraction


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """How much worse the after arm may be in the primary and in each secondary; see gate.py."""

    max_regression: float  # a fraction
    levels: tuple[float, ...]  # one-sided, of the bounds at each look; a single one without looks


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """A run, decided before its first block: what is compared, on what, how often, and by which metric."""

    name: str  # the variant's, or the engine's where there is none
    arms: tuple[Arm, ...]  # one; the before and the after; or several, each compared with the first
    workload: Workload
    blocks: int = 6  # with `until`: at most
    until: Until | None = None  # None: all the blocks, whatever they say
    against_itself: bool = False  # both arms are one setting: what they differ by is noise
    plant: float | None = None  # delay put into each step of the after arm, as a share of the before's step
    plant_at: str = "device"  # one of the engines' `plants`
    gate: Gate | None = None
    factorial: Factorial | None = None
    rounds: int = 2  # measured rounds of a boot, in turn with the other arm's; pooled
    warmup_rounds: int = 1
    margin: float = 0.01  # the largest change that counts as none, as a fraction
    primary: str = "tpot_ms_p50"
    secondaries: tuple[str, ...] = ()
    seed: int = 0
    goodput: dict[str, float] = {}  # ms by "ttft", "tpot", "latency": what a good request stays within

    def alpha(self, blocks: int) -> float:
        """The two-sided level of intervals and verdicts made of the first `blocks` blocks: that of the last
        look that they have reached, or of the first look before that."""
        if self.until is None:
            return ALPHA
        reached = [
            level for look, level in zip(self.until.looks, self.until.levels, strict=True) if look <= blocks
        ]
        return reached[-1] if reached else self.until.levels[0]

    def check(self) -> None:
        """Raises BadSetting where this can't be run as it stands."""
        for flag, count, least in (
            ("--blocks", self.blocks, 1),
            ("--rounds", self.rounds, 1),
            ("--warmup-rounds", self.warmup_rounds, 0),
        ):
            if count < least:
                raise api.BadSetting(f"{flag} must be at least {least}, not {count}")
        if any(arm.stays for arm in self.arms) and (self.blocks > 1 or self.until is not None):
            raise api.BadSetting(
                "a server at a url is one boot, however often it is asked, and rounds within a boot are not "
                "blocks; leave --blocks out, or start a server per boot with cmd="
            )
        if self.until is not None and len(self.arms) != 2:
            raise api.BadSetting(
                f"a run that may stop early needs two arms; with {len(self.arms)}, give --blocks"
            )
        if not 0 < self.margin < 1:
            raise api.BadSetting(f"--margin must be above 0% and below 100%, not {100 * self.margin:.4g}%")
        if len(self.secondaries) > MAX_SECONDARIES:
            raise api.BadSetting(f"at most {MAX_SECONDARIES} --secondary, not {len(self.secondaries)}")
        if self.primary in self.secondaries or len(set(self.secondaries)) < len(self.secondaries):
            raise api.BadSetting("a metric is named twice among --primary and --secondary")
        if self.plant is not None:
            self._check_plant(self.plant)
        for left, right in combinations(self.arms, 2):
            if left.name == right.name:
                raise api.BadSetting(f"two arms have the name {left.name}")
            if _settings(left) == _settings(right) and not self.against_itself and self.plant is None:
                raise api.BadSetting(
                    f"{left.name} and {right.name} are the same settings; change one with --before or "
                    "--after, or measure an arm against itself with bench aa"
                )

    def _check_plant(self, share: float) -> None:
        if not 0 <= share < 1:
            raise api.BadSetting(f"--plant must be at least 0% and below 100%, not {100 * share:.4g}%")
        if len(self.arms) != 2:
            raise api.BadSetting("--plant delays the after arm, and there is none; bench aa has one")
        if not self.arms[0].options.recorder:
            raise api.BadSetting("--plant is sized by the before arm's steps, and its recorder is off")

    def arms_with_plant(self, ns: int | None) -> tuple[Arm, ...]:
        """The arms as they are booted, once it is known how long the planted delay is (None: not yet). Both
        have the hook, so that the delay is all that differs."""
        if self.plant is None:
            return self.arms
        delays = (0, ns or 0)
        return tuple(
            msgspec.structs.replace(
                arm,
                options=msgspec.structs.replace(arm.options, plant_at=self.plant_at, plant_ns=delay),
            )
            for arm, delay in zip(self.arms, delays, strict=True)
        )

    def sides(self, by_arm: Mapping[str, float]) -> dict[str, float | None]:
        """The value of the before and of the after arm; None where there is none."""
        after = by_arm.get(self.arms[1].name) if len(self.arms) == 2 else None
        return {"before": by_arm.get(self.arms[0].name), "after": after}


def _settings(arm: Arm) -> Arm:
    return msgspec.structs.replace(arm, name="")


def orders(lot: str, block: int, arms: int) -> list[int]:
    """The arms of `block` by number, in the order in which they run: each order is as likely as any other,
    and independent of other blocks and of runs with another lot.

    With one exception: six blocks (0 to 5, 6 to 11, ...) in which some arm always ran before the first arm,
    or always after it, are drawn again. With two arms, one run in 32 would draw that, and could not tell a
    position effect from the change. The first of many arms then runs at an end more often than in the middle,
    at both ends alike: with four arms by 1%, with sixteen by 11%. Orders that are balanced further resonate
    with periodic noise: one of each order in every two blocks gives 14% false alarms, where this gives 5 to
    6% (stats.md).
    """
    place, attempt = block % DRAWN_TOGETHER, 0
    while True:
        group = [
            sorted(range(arms), key=partial(_draw, lot, "order", block - place + number, attempt))
            for number in range(DRAWN_TOGETHER)
        ]
        ahead = [{order.index(arm) < order.index(0) for order in group} for arm in range(1, arms)]
        if all(len(found) == 2 for found in ahead):
            return group[place]
        attempt += 1


def workload_order(seed: int, block: int, index: int, workloads: int) -> list[int]:
    """The workloads that share a boot, by number, in the order in which they have their turn in one round:
    each order is as likely as any other, so that none always runs behind the same one."""
    return sorted(range(workloads), key=lambda workload: _draw(seed, "workload", block, index, workload))


def round_seed(seed: int, block: int, index: int) -> int:
    """Seed of one round's prompts and arrivals; both arms of a block get the same. Warm-up rounds are
    numbered below zero, and block -1 is the discarded one."""
    return _draw(seed, "round", block, index)


def _draw(*parts: object) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
