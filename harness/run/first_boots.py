"""The first boots of a run, one per arm, whose times are thrown away: first boots are slow. They tell what
the engines are, what of the changed code runs, how long a delay of a share of a step is, and how long a
trial, and with it the run, will take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics.requests import mean_decoding
from overlap_bench.harness.metrics.steps import decode_intervals
from overlap_bench.harness.plan.design import Design, round_seed, started_by
from overlap_bench.harness.run import trial
from overlap_bench.harness.run.events import (
    BlockBegun,
    BlockDone,
    Event,
    Foreseen,
    Observer,
    RoundBegun,
    Said,
)
from overlap_bench.harness.run.hosts import Trees
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import Manifest, without_places

if TYPE_CHECKING:
    from overlap_bench.harness.run.watch import Watch
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np

from overlap_bench.harness.common.formatting import blocks_of, duration, minutes_of
from overlap_bench.harness.workload.arrivals import ARRIVALS, NS_PER_S
from overlap_bench.harness.workload.workload import Workload


def measure(
    session: Session, trees: Trees, manifests: Sequence[Manifest], left: int, observe: Observer
) -> list[Manifest]:
    """Boot and throw away; the manifests, made whole by what the boots told."""
    design, before = manifests[0].design, manifests[0].design.arms[0].name
    began = time.monotonic()
    starts: list[tuple[int, float]] = []  # of the rounds

    def heard(event: Event) -> None:
        if isinstance(event, RoundBegun):
            starts.append((event.index, time.monotonic()))
        observe(event)

    observe(BlockBegun(-1, left))
    watch = session.watch(design) if may_run_different_code(design) else None
    booted = session.boot(design.arms_with_plant(None), observe, watch)
    manifests = [described(each, booted) for each in manifests]
    up = time.monotonic()
    seen = {} if watch is None else _watched(session, trees, manifests, booted, watch, observe)
    once = session.asked_s + time.monotonic() - up  # which no later trial pays again
    measured = trial.serve(session, manifests, -1, booted, heard)
    ended = time.monotonic()
    plant_ns = manifests[0].plant_ns
    if design.plant is not None and plant_ns is None:
        plant_ns = planted_ns(design.plant, before, measured[0]["steps"])
    batches = [
        mean_batch(before, tables)
        if trial.needs_batch(each.design) and each.segment_batch is None
        else each.segment_batch
        for each, tables in zip(manifests, measured, strict=True)
    ]
    trial.shut(session, booted, observe)
    observe(BlockDone(-1, time.monotonic() - began))
    ends = [*(at for _, at in starts[1:]), ended]
    rounds = [(index, end - at) for (index, at), end in zip(starts, ends, strict=True)]
    boots = time.monotonic() - began - once - sum(seconds for _, seconds in rounds)
    cost = costs(design, trial.warmup(design.workload), boots, rounds, measured[0]["requests"])
    rest = None if design.aim_s is None else design.aim_s - (time.monotonic() - began)
    manifests = [
        msgspec.structs.replace(
            each,
            plant_ns=plant_ns,
            segment_batch=batch,
            design=each.design if rest is None else sized(each.design, cost, rest),
            **seen,
        )
        for each, batch in zip(manifests, batches, strict=True)
    ]
    observe(Foreseen(block_seconds(manifests[0].design, cost), manifests[0].design))
    return manifests


def may_run_different_code(design: Design) -> bool:
    """Whether the arms differ by refs, patches, interpreters, or paths to import from."""
    if len(design.arms) != 2 or design.against_itself or any(arm.is_remote for arm in design.arms):
        return False
    before, after = (
        (arm.ref, arm.patch, started_by(arm.python, arm.toggles), arm.env.get("PYTHONPATH"))
        for arm in design.arms
    )
    return before != after


def _watched(
    session: Session,
    trees: Trees,
    manifests: Sequence[Manifest],
    booted: Mapping[str, Booted],
    watch: Watch,
    observe: Observer,
) -> dict[str, Any]:
    """What was seen to run in a whole round of each arm, after which nothing is watched any more. Raises
    BadSetting where an arm ran files that are not of its ref."""
    from overlap_bench.harness.run import foreign
    from overlap_bench.harness.run.watch import OVER, SERVING

    context = trial.least_context([each.description for each in booted.values()])
    watch.phase(SERVING)
    for one in (each.design for each in manifests):
        for each in booted.values():
            observe(RoundBegun(-1, each.arm.name, -1))
            asked, _ = trial.planned(one.workload, round_seed(one.seed, -1, 0), each, context)
            session.begin(each)
            session.load(each, asked, one.workload.concurrency, one.workload.interval_ns, observe)
            session.collect(each)
    watch.phase(OVER)
    seen = watch.seen()
    foreign.check(manifests[0].design, trees, seen)
    found = watch.changed_code(seen, {name: each.pids for name, each in booted.items()})
    if not found.counts:
        observe(Said(f"there will be no verdict: {found.never_ran}"))
    for manifest in manifests:
        if manifest.overlaid and manifest.overlaid != trees.overlaid:
            raise StoreError(f"{manifest.run} began with other files of --overlay: start a fresh run")
    return {"changed_code": found, "overlaid": trees.overlaid}


def described(manifest: Manifest, booted: Mapping[str, Booted]) -> Manifest:
    """The manifest with what the engines say of themselves. Raises BadSetting where the arms run on
    different kinds of device, StoreError where a resumed run, or another node, would go on with another
    engine."""
    found = {name: each.description for name, each in booted.items()}
    kinds = sorted({each.device["kind"] for each in found.values()})
    if len(kinds) > 1:
        names = " and ".join(arm.name for arm in manifest.design.arms)
        raise api.BadSetting(f"{names} run on different devices ({', '.join(kinds)}): never compared")
    if manifest.design.segments and (still := [name for name, each in found.items() if not each.takes_turns]):
        raise api.BadSetting(
            f"{still[0]} can't take turns: what its command started serves from elsewhere, as from a "
            "container; --interleaved-rounds 0 compares by rounds"
        )
    for name, old in manifest.descriptions.items():
        if name in found and (other := difference(_identity(old), _identity(found[name]))):
            raise StoreError(
                f"{manifest.run} began with another engine in {name}: {other}; a run is of one engine on one "
                "kind of device, so start a fresh one"
            )
    stored = {name: without_places(each) for name, each in found.items()}
    return msgspec.structs.replace(manifest, descriptions=stored)


def _identity(described: api.Description) -> dict[str, Any]:
    """What the settings do not pin: a server may have another model, a virtual environment other versions."""
    device, model = described.device, described.model
    return {
        "device": {"kind": device["kind"], "name": device["name"]},
        "model": model.get("name"),
        "versions": described.versions,
    }


def planted_ns(share: float, arm: str, steps: pd.DataFrame) -> int:
    """`share` of an arm's mean step interval (metrics.decode_intervals). Raises BadSetting where the arm has
    no step records."""
    if not len(steps) or not (steps["arm"] == arm).any():
        raise api.BadSetting(f"--inject-delay is sized by the steps of {arm}, and its engine records none")
    intervals = decode_intervals(steps[steps["arm"] == arm])["interval_ns"]
    if not len(intervals):
        raise api.BadSetting(
            "--inject-delay is sized by decode steps, and there are none; raise --max-new-tokens"
        )
    return round(share * float(intervals.mean()))


def mean_batch(arm: str, tables: Mapping[str, pd.DataFrame]) -> int:
    """Requests in a decode step of an arm, rounded; as its client sees them where it records no steps in
    rounds."""
    steps, requests = (
        table[table["arm"] == arm] if len(table) else table for table in (tables["steps"], tables["requests"])
    )
    decodes = steps[steps["kind"] == "decode"] if len(steps) else steps
    mean = float(decodes["batch"].mean()) if len(steps) else mean_decoding(requests)
    if not mean > 0:
        raise api.BadSetting(
            f"{arm} ran no decode step, so there is none to measure in turns; give --interleaved-rounds 0"
        )
    return max(1, round(mean))


FEWEST_SEGMENTS = 3  # of a boot: one in three has the longer turns (trial.steps_of_turn)
USUAL = 6  # blocks of a run of a fixed number
SPARE = 1.25  # of the time that is asked for instead: the next boots may be slower


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a block take, of all arms together."""

    boots: float  # and their ends, with the warm-up rounds
    round: float
    segment: float


def costs(
    design: Design,
    warmup: Workload,
    boots: float,
    rounds: Sequence[tuple[int, float]],
    requests: pd.DataFrame,
) -> Costs:
    """The costs of a block whose boots and ends take `boots` seconds. `rounds`: index and seconds of those
    that were thrown away, of every arm, below zero those that asked `warmup`; `requests`: of the others."""
    warm = sum(seconds for index, seconds in rounds if index < 0)
    whole = sum(seconds for index, seconds in rounds if index >= 0)
    if not whole:  # this is rather too little: whoever has time for less than that has none
        more = waves(design.workload) / waves(warmup)
        whole = more * warm + len(design.arms) * (span(design.workload) - span(warmup))
    if len(requests):  # a segment takes as long as each arm's requests, one arm after the other
        took = (requests["finished_ns"] - requests["sent_ns"]).groupby(requests["arm"]).mean()
        segment = float(took.sum()) / NS_PER_S
    else:
        segment = warm / waves(warmup)
    return Costs(boots + design.warmup_rounds * warm, whole, segment)


def block_seconds(design: Design, each: Costs) -> float:
    """What a block takes."""
    return each.boots + design.rounds * each.round + design.segments * each.segment


def sized(design: Design, each: Costs, left_s: float) -> Design:
    """The design with as many segments, then rounds, of a boot as let all its blocks end within `left_s`
    seconds: no more than it has, and never fewer than three segments and one round."""
    spare = left_s / design.blocks - each.boots
    segments = _between(FEWEST_SEGMENTS, (spare - each.round) / each.segment, design.segments)
    rounds = _between(1, (spare - segments * each.segment) / each.round, design.rounds)
    return msgspec.structs.replace(design, segments=segments, rounds=rounds, aim_s=None)


def _between(least: int, wanted: float, most: int) -> int:
    return max(min(least, most), min(int(wanted), most))


def waves(workload: Workload) -> int:
    """How many requests of a closed loop follow each other; 1 where they come by themselves."""
    return ceil(workload.num_requests / (workload.concurrency or workload.num_requests))


def span(workload: Workload) -> float:
    """Seconds from the first request to the last, where that does not depend on the engine."""
    *_, last = ARRIVALS[workload.arrival].offsets(workload, np.random.default_rng(0))
    return max(0.0, last / NS_PER_S)


def announced(foreseen: Foreseen) -> str:
    """When the answer comes, of a run whose blocks are sized by its first boots."""
    design, each = foreseen.design, duration(foreseen.seconds)
    rounds = "1 ordinary round" if design.rounds == 1 else f"{design.rounds} ordinary rounds"
    return (
        f"{blocks_of(design.blocks)} of about {each}, each with {design.segments} interleaved and "
        f"{rounds}: done in about {duration(design.blocks * foreseen.seconds)}"
    )


class NoTime(api.BadSetting):
    """--max-minutes ends a run before a verdict is possible."""


class Clock:
    """Tells when a run has no time for another block: as long as the longest one so far. What the blocks
    found has no part in it, so this is no peeking. `kept`: blocks of it that there are already."""

    def __init__(self, design: Design, kept: int, observe: Observer) -> None:
        self._design, self._kept, self._observe = design, kept, observe
        self._began = self._last = time.monotonic()
        self._longest = 0.0
        self.foreseen: int | None = None  # how many blocks there will be

    def hear(self, event: Event) -> None:
        """Hand an event on; what it means for the end of the run is said with it."""
        if isinstance(event, BlockDone) and event.block < 0 and not self._longest:
            self._last = time.monotonic()  # no block has these boots again
        self._observe(event)
        if isinstance(event, Foreseen) and self._design.max_minutes is not None:
            self.foreseen, said = self.forecast(event.seconds)
            self._observe(Said(said))
        elif isinstance(event, Foreseen) and self._design.aim_s is not None:
            self._observe(Said(announced(event)))

    def forecast(self, seconds: float) -> tuple[int, str]:
        """How many blocks there will be, where each other one takes so many seconds; and that in words.
        Raises NoTime where a fresh run has no time for a verdict."""
        design, kept = self._design, self._kept
        assert design.max_minutes is not None
        gone, within = time.monotonic() - self._began, minutes_of(design.max_minutes)
        more = max(0, int((60 * design.max_minutes - gone) / seconds))
        blocks, least = min(design.blocks, kept + more), design.fewest_judged
        first = f"the first boots took {duration(gone)}, a trial will take about {duration(seconds)}"
        all_ = "all " if blocks == design.blocks > 1 else ""
        fit = f"{all_}{blocks_of(blocks)} fit{'s' * (blocks == 1)} into {within}"

        def asking(wanted: int) -> str:
            return f"--max-minutes {_up((gone + (wanted - kept) * seconds) * SPARE / 60):g}"

        if blocks < least and not kept:
            needs = f"a verdict needs {least}" if len(design.arms) > 1 else "there has to be one"
            raise NoTime(f"{fit}, and {needs}: {first}; give it {asking(least)}")
        few = (
            f"; {USUAL}, the usual number, take {asking(USUAL)}" if blocks < min(USUAL, design.blocks) else ""
        )
        return blocks, f"{first}: {fit}{few}"

    def block_done(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def is_up(self) -> bool:
        minutes = self._design.max_minutes
        return minutes is not None and self._last - self._began + self._longest > 60 * minutes


def _up(minutes: float) -> float:
    """Two significant digits of it, rounded up: what is asked for has to be enough."""
    digit = 10.0 ** (floor(log10(minutes)) - 1)
    return round(ceil(minutes / digit) * digit, 9)
