"""A trial: an arm each in a fresh process, all asked the same, in rounds and in turns; then they are gone.

The order of the arms is drawn for each trial, and each of its rounds has that order: the rounds of two arms
alternate, so that a machine whose speed changes within seconds treats both alike. Were every other round to
go the other way, two rounds of one arm would lie end to end, and more of those changes would stay between the
arms (results/reference/proofs/turns.md). The rounds of a boot are pooled.

While a round runs, this process sleeps: it wakes for the end, for a progress line (at most two a second),
or for a death.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.engines.machine import known
from overlap_bench.engines.processes import with_below
from overlap_bench.harness.common import processes
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics import divergences, slices
from overlap_bench.harness.metrics.attribution import of_each_step
from overlap_bench.harness.metrics.requests import mean_decoding
from overlap_bench.harness.metrics.steps import decode_intervals, tokens_each
from overlap_bench.harness.plan.design import (
    Arm,
    Design,
    of_one_model,
    round_seed,
    segment_seed,
    started_by,
    turn_order,
    workload_order,
)
from overlap_bench.harness.run import records
from overlap_bench.harness.run.forecast import block_seconds, costs, sized
from overlap_bench.harness.run.hosts import Trees
from overlap_bench.harness.run.messages import (
    BlockBegun,
    BlockDone,
    Event,
    Foreseen,
    Observer,
    RoundBegun,
    Said,
    SegmentBegun,
)
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import Manifest, without_places
from overlap_bench.harness.store.tables import TABLES, whole
from overlap_bench.harness.workload.plan import Planned, plan, skipped
from overlap_bench.harness.workload.workload import Workload

if TYPE_CHECKING:
    from overlap_bench.harness.run.watch import Watch

LONGER_TURNS = 3  # one segment in so many has turns of twice as many steps
MOST_SEGMENTS = 2  # times as many as planned, where others use the cores
WARMUP_SHARE = 4  # a warm-up round has this part of the requests: enough to touch every code path
Tables = dict[str, pd.DataFrame]


def measure(
    session: Session,
    manifests: Sequence[Manifest],
    number: int,
    observe: Observer,
    write: Callable[[Sequence[Tables]], None],
) -> list[Tables]:
    """The tables of one trial of each run: its arms booted in the order drawn for it, measured, shut down.
    `write` gets them first: an engine that fails while it stops costs no trial."""
    first, began = manifests[0], time.monotonic()
    arms = first.design.arms_with_plant(first.plant_ns)
    booted = session.boot([arms[each] for each in first.drawn[number]], observe)
    for each in manifests:
        described(each, booted)  # a card that is lost meanwhile leaves auto an emulated device, say
    measured = serve(session, manifests, number, booted, observe)
    write(measured)
    shut(session, booted, observe)
    observe(BlockDone(number, time.monotonic() - began, stolen(measured)))
    return measured


def first_boots(
    session: Session, trees: Trees, manifests: Sequence[Manifest], left: int, observe: Observer
) -> list[Manifest]:
    """Trial -1, one boot of each arm, whose times are thrown away: first boots are slow. The manifests, made
    whole by what it told: what the engines are, what of the changed code runs, how long a delay of a share of
    a step is, and how long a trial will take."""
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
    measured = serve(session, manifests, -1, booted, heard)
    ended = time.monotonic()
    plant_ns = manifests[0].plant_ns
    if design.plant is not None and plant_ns is None:
        plant_ns = planted_ns(design.plant, before, measured[0]["steps"])
    batches = [
        mean_batch(before, tables)
        if needs_batch(each.design) and each.segment_batch is None
        else each.segment_batch
        for each, tables in zip(manifests, measured, strict=True)
    ]
    shut(session, booted, observe)
    observe(BlockDone(-1, time.monotonic() - began))
    ends = [*(at for _, at in starts[1:]), ended]
    rounds = [(index, end - at) for (index, at), end in zip(starts, ends, strict=True)]
    boots = time.monotonic() - began - once - sum(seconds for _, seconds in rounds)
    cost = costs(design, warmup(design.workload), boots, rounds, measured[0]["requests"])
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

    context = least_context([each.description for each in booted.values()])
    watch.phase(SERVING)
    for one in (each.design for each in manifests):
        for each in booted.values():
            observe(RoundBegun(-1, each.arm.name, -1))
            asked, _ = planned(one.workload, round_seed(one.seed, -1, 0), each, context)
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
        began = manifest.changed_code
        if began is not None and began.digest not in ("", found.digest):
            raise StoreError(
                f"{manifest.run} began with other code: what its arms differ by was edited since; a verdict "
                "would be of both; bring it back, or start a fresh run"
            )
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
    own = steps[steps["arm"] == arm]
    if (tokens_each(own) != 1).any():  # the delay is one of a step, and a step's time that of a token
        raise api.BadSetting(
            f"--inject-delay is a share of a step that gives each request one token, and those of {arm} give "
            "more; leave steps and spec as they are"
        )
    intervals = decode_intervals(own)["interval_ns"]
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


def warm_up(session: Session, design: Design, arm: Arm, observe: Observer) -> None:
    """Boot an arm alone, have it serve a warm-up round, and stop it: the first boot of a tree is slow, and
    shows whether it can be measured."""
    booted = session.boot([arm], observe)
    context = least_context([each.description for each in booted.values()])
    _round(session, design, -1, -1, booted[arm.name], context, None, set(), observe)
    shut(session, booted, observe)


def shut(session: Session, booted: Mapping[str, Booted], observe: Observer) -> None:
    for name in session.shut(list(booted.values())):
        observe(Said(f"the engine of {name} did not stop within {processes.GRACE_S:g} s and was killed"))


def stolen(measured: Sequence[Mapping[str, pd.DataFrame]]) -> float:
    """The share of the CPU time that other virtual machines took, in the worst round."""
    return max(float(np.max(each["rounds"].get("steal_share", 0.0))) for each in measured)


def serve(
    session: Session,
    manifests: Sequence[Manifest],
    block: int,
    booted: Mapping[str, Booted],
    observe: Observer,
) -> list[Tables]:
    """What every arm did in its rounds on the workload of each run, in the order of this trial, and in turns;
    the tables of each run."""
    designs = [each.design for each in manifests]
    design = designs[0]
    parts: list[dict[str, list[pd.DataFrame]]] = [{name: [] for name in TABLES} for _ in designs]
    context = least_context([each.description for each in booted.values()])
    if block == -1:
        for each in booted.values():  # refuse now what does not fit the model, not after a warm-up that did
            for one in designs:
                planned(one.workload, round_seed(one.seed, block, 0), each, context)
    with ExitStack() as stack:
        gpus = {arm.name: _gpu(booted[arm.name], stack) for arm in design.arms}
        # Parked arms hold the card too, and so do the workers of a server.
        started = [pid for each in booted.values() for pid in each.pids.values()]
        own = set(known(with_below, started, started))
        for index in rounds_of(designs, block):
            for number in workload_order(design.seed, block, index, len(designs)):
                for position, arm in enumerate(arms_in_order(manifests[0], block)):
                    observe(RoundBegun(block, arm.name, index))
                    tables = _round(
                        session, designs[number], block, index, booted[arm.name], context,
                        gpus[arm.name], own, observe,
                    )  # fmt: skip
                    tables["rounds"]["position"] = position
                    for name, table in tables.items():
                        table.insert(0, "arm", arm.name)
                        table.insert(1, "round", index)
                        if index >= 0:
                            parts[number][name].append(table)
    for segment in count():
        if block < 0 or (segment >= design.segments and not _measure_more(design, segment, parts)):
            break
        for number in workload_order(design.seed, block, segment, len(designs)):
            parts[number]["slices"] += _segment(
                session, manifests[number], block, segment, booted, context, observe
            )
    return [_joined(one, each) for one, each in zip(designs, parts, strict=True)]


def _joined(design: Design, parts: Mapping[str, Sequence[pd.DataFrame]]) -> Tables:
    """A trial's tables from those of its rounds; without rows where all were warm-ups. Token ids are kept
    only where outputs of arms of one model and dtype differ."""
    tables = {name: pd.concat(each, ignore_index=True) for name, each in parts.items() if each}
    if "requests" in tables:
        tables["divergences"] = divergences.find(tables["requests"], of_one_model(design))
        tables["requests"] = tables["requests"].drop(columns="token_ids")
    return whole(tables)


def _round(
    session: Session, design: Design, block: int, index: int, booted: Booted, context: int,
    gpu: records.Gpu | None, own: set[int], observe: Observer,
) -> dict[str, pd.DataFrame]:  # fmt: skip
    workload = design.workload if index >= 0 else warmup(design.workload)
    seed = round_seed(design.seed, block, index)
    asked, passed_over = planned(workload, seed, booted, context)
    pids = {**booted.pids, **session.pids}
    session.begin(booted)
    start = records.read_counters(pids)
    done = session.load(booted, asked, workload.concurrency, workload.interval_ns, observe)
    card = {} if gpu is None else gpu.read(own)  # first: a card that is idle soon says nothing of its load
    row = records.counters_between(start, records.read_counters(pids)) | card
    record = session.collect(booted)
    if all(done.data.errors):
        raise api.EngineError(f"{booted.arm.name} served no request: {done.data.errors[0]}")
    steps = records.steps_frame(record)
    row |= {"seed": seed, "started_ns": done.started_ns, "ended_ns": done.ended_ns}
    row |= {f"skipped.{reason}": count for reason, count in passed_over.items()}
    row |= {f"memory.{name}": value for name, value in record.memory.items()}
    row |= {f"counter.{name}": value for name, value in record.counters.items()}
    if len(steps) and "cpu_ms.engine" in row:
        row["host_cpu_us_per_step"] = row["cpu_ms.engine"] * 1e3 / len(steps)
    return {
        "requests": records.requests_frame(done),
        "steps": steps,
        "rounds": pd.DataFrame([row]),
        "work": records.device_frame(record),
    }


def _measure_more(design: Design, segments: int, parts: Sequence[Mapping[str, list[pd.DataFrame]]]) -> bool:
    """Whether others used the cores in so many turns of a block that it needs more segments: no more than
    twice those that were planned. What the arms did has no part in it."""
    if not design.segments or segments >= MOST_SEGMENTS * design.segments:
        return False
    before, *after = (arm.name for arm in design.arms)
    for tables in parts:
        turns = pd.concat(tables["slices"], ignore_index=True)
        if len(turns) and any(not slices.calm_enough(turns, before, name) for name in after):
            return True
    return False


def _segment(
    session: Session, manifest: Manifest, block: int, segment: int, booted: Mapping[str, Booted],
    context: int, observe: Observer,
) -> list[pd.DataFrame]:  # fmt: skip
    """One set of requests, served by every arm in turns: the slices of each arm."""
    design = manifest.design
    turning = [booted[arm.name] for arm in arms_in_turns(manifest, block, segment)]
    workload = of_segment(design.workload, manifest.segment_batch)
    asked, _ = planned(workload, segment_seed(design.seed, block, segment), turning[0], context)
    observe(SegmentBegun(block, segment))
    for each in turning:
        session.begin(each)
    done = session.take_turns(turning, asked, steps_of_turn(design, segment), observe)
    if failed := next(filter(None, done.data.errors), ""):
        raise api.EngineError(
            f"a request failed while engines took turns: {failed}; --interleaved-rounds 0 compares by "
            "rounds, and counts one that fails"
        )
    found = []
    for each in turning:
        record, turns = session.collect_turns(each)
        steps = records.steps_frame(record)
        parts = of_each_step(steps, records.device_frame(record), each.arm.toggles.get("launch") == "thread")
        frame = slices.of_turns(steps, records.turns_frame(turns), design.turn_lead, parts)
        frame.insert(0, "arm", each.arm.name)
        frame.insert(1, "round", segment)
        found.append(frame)
    return found


def steps_of_turn(design: Design, segment: int) -> int:
    """Steps of a turn: twice as many in every third segment, so that what a turn costs besides is told from
    what its steps cost (metrics.slices.drained)."""
    return design.turn_steps * (2 if segment % LONGER_TURNS == LONGER_TURNS - 1 else 1)


def of_segment(workload: Workload, batch: int | None) -> Workload:
    """What a segment asks: the same requests, a batch of them at once. `batch`: where the workload has no
    fixed number of requests in flight. A closed loop of fewer requests than places never fills them."""
    together = batch
    if workload.arrival == "closed" and workload.concurrency is not None:
        together = min(workload.concurrency, workload.num_requests)
    assert together is not None
    return msgspec.structs.replace(
        workload, num_requests=together, arrival="burst", concurrency=None, rate=None, ramp_up=None
    )


def arms_in_order(manifest: Manifest, block: int) -> list[Arm]:
    """The arms as they run in each round of `block`, as they were drawn; nothing is for the discarded one."""
    arms = manifest.design.arms
    order = range(len(arms)) if block == -1 else manifest.drawn[block]
    return [arms[number] for number in order]


def arms_in_turns(manifest: Manifest, block: int, segment: int) -> list[Arm]:
    """The arms in the order of their turns. By when the run began, too: the runs of an experiment have the
    same names each time, and whatever one order does to an arm would come back with it."""
    arms, lot = manifest.design.arms, f"{manifest.created}/{manifest.run}"
    return [arms[number] for number in turn_order(lot, block, segment, len(arms))]


def rounds_of(designs: Sequence[Design], block: int) -> Iterator[int]:
    """Indices of a boot's rounds: warm-ups below zero, then the measured ones. The discarded boot has one
    warm-up, since the first round after a boot pays for what the machine, not the engine, has forgotten; and,
    where a planted delay or a segment is sized by its steps, a whole round: a shorter one would have other
    batches."""
    design = designs[0]
    if block == -1:
        yield from (-1, 0) if design.plant is not None or any(map(needs_batch, designs)) else (-1,)
        return
    yield from range(-design.warmup_rounds, design.rounds)


def needs_batch(design: Design) -> bool:
    """Whether the discarded block has to tell how many requests a segment has."""
    return design.segments > 0 and design.workload.arrival != "closed"


def warmup(workload: Workload) -> Workload:
    return msgspec.structs.replace(workload, num_requests=max(1, workload.num_requests // WARMUP_SHARE))


def least_context(descriptions: Iterable[api.Description]) -> int:
    """Tokens of the smallest context among the arms. A prompt that one arm has no room for is asked of none:
    what a workload skips moves all prompts behind it, and the arms would be asked different things."""
    return min(int(each.model["context"]) for each in descriptions)


def planned(
    workload: Workload, seed: int, booted: Booted, context: int
) -> tuple[list[Planned], dict[str, int]]:
    """What a round asks of an engine, in at most `context` tokens a request, and how much of its data it
    skips, by reason. Raises BadSetting where it does not fit."""
    tokenizer = str(booted.description.model.get("tokenizer", ""))
    return plan(workload, seed, tokenizer, context), skipped(workload, seed, tokenizer, context)


def _gpu(booted: Booted, stack: ExitStack) -> records.Gpu | None:
    """NVML's view of the card, where the engine runs on one. A run measures without it, and a caution says
    what is missing (analysis/warnings.py)."""
    if booted.description.device["kind"] != "cuda":
        return None
    gpu = known(records.Gpu, None, {**os.environ, **booted.arm.env})
    if gpu is not None:
        stack.callback(gpu.close)
    return gpu
