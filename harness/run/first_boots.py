"""The first boots of a run, one per arm, whose times are thrown away: first boots are slow. They tell what
the engines are, what of the changed code runs, how long a delay of a share of a step is, and how long a
trial will take."""

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
from overlap_bench.harness.plan.design import Design, started_by
from overlap_bench.harness.plan.orders import round_seed
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
from overlap_bench.harness.run.forecast import block_seconds, costs, sized
from overlap_bench.harness.run.hosts import Trees
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import Manifest, without_places

if TYPE_CHECKING:
    from overlap_bench.harness.run.watch import Watch


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
