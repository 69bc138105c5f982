"""`bench sensitivity`: known delays in each phase of a step, in turns beside turns without them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.analysis.sensitivity import ABSENT, Sensitivity
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import Arm, Design, segment_seed
from overlap_bench.harness.plan.settings import turns_of
from overlap_bench.harness.run import records
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.run.trial import of_segment, planned
from overlap_bench.harness.stats.knee import fit
from overlap_bench.harness.store.files import SCHEMA_VERSION, write_json
from overlap_bench.harness.store.manifest import whole_or_none

BATCH = 16  # of a step, where the workload does not say
# Sizes of delays, by the length of a step: of a first look; where nothing is hidden; and above a slack, below
# which one is a share of it. A slope is told by its ends: a longer delay costs less time than more turns.
COARSE, SERIAL, ABOVE = (0.05, 0.3, 0.7, 1.1, 1.5), (0.03, 0.1, 0.5, 1.0), (0.1, 0.4, 1.0)
BELOW = 0.7
NO_SLACK = 0.05  # of a step
COARSE_REPEATS, REPEATS = 3, 8  # of each phase and size
FEWEST_TRIALS = 2
FEWEST_TURNS = 4  # of a segment, the first of which takes the prompts in
NS_PER_US = 1e3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """`sizes`: ns by phase, none where a step's length is not known yet."""

    arm: Arm
    design: Design
    phases: tuple[str, ...]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def measure(
    design: Design, wanted: Sequence[str], saves: dict[str, float], out: Path, say: Say
) -> Sensitivity:
    """Measure in a new folder under `out`. Raises BadSetting, RunFailed; what is not finished leaves no
    folder."""
    arm = design.arms[0]
    spec = api.find_engines()[arm.engine]
    if not spec.phases:
        raise api.BadSetting(f"engine {spec.name} names no phases in which its steps can be delayed")
    for phase in [*wanted, *saves]:
        api.pick(phase, dict.fromkeys(spec.phases), f"phase of {spec.name}")
    if wanted and (others := [each for each in saves if each not in wanted]):
        raise api.BadSetting(f"--saves {others[0]} needs --phase {others[0]}, as other phases are asked for")
    if design.blocks < FEWEST_TRIALS:
        raise api.BadSetting(f"an interval needs at least {FEWEST_TRIALS} trials, not {design.blocks}")
    if not arm.options.recorder:
        raise api.BadSetting("what a delay costs is read from step records, and recorder=off keeps none")
    turns = turns_of([arm], api.find_engines())
    least = FEWEST_TURNS * turns["turn_steps"]
    if (design.workload.most_new_tokens or least) < least:
        raise api.BadSetting(
            f"an interleaved round needs {FEWEST_TURNS} turns: --max-new-tokens of {least} or more"
        )
    workload = of_segment(design.workload, design.workload.concurrency or BATCH)
    plan = Plan(
        arm, msgspec.structs.replace(design, workload=workload, **turns), tuple(wanted) or spec.phases
    )
    with whole_or_none(out, f"sensitivity-{arm.engine}") as (folder, _):
        say(f"writing to {folder}")
        found = sensitivity.with_savings(_measure(plan, folder.name, say), saves)
        write_json(folder / sensitivity.FILE, found)
        return found


def parse_savings(texts: Sequence[str]) -> dict[str, float]:
    """ "schedule=13us" texts as us by phase. Raises BadSetting."""
    found = {}
    for text in texts:
        phase, equals, time = text.partition("=")
        number = re.fullmatch(r"(\d+\.?\d*|\.\d+)(us|ms)", time)
        if not equals or number is None:
            raise api.BadSetting(f"--saves needs PHASE=TIME such as schedule=13us, not '{text}'")
        if phase in found:
            raise api.BadSetting(f"--saves names {phase} twice")
        found[phase] = float(number[1]) * (1e3 if number[2] == "ms" else 1)
    return found


def _measure(plan: Plan, run: str, say: Say) -> Sensitivity:
    trials: list[pd.DataFrame] = []
    with Session() as session:
        for trial in range(plan.design.blocks):
            say(f"trial {trial + 1} of {plan.design.blocks}: booting")
            (booted,) = session.boot([plan.arm]).values()
            if not trial:
                sized = _sized(session, plan, booted, say)
                absent = dict.fromkeys((each for each in plan.phases if each not in sized.phases), ABSENT)
                plan = sized
            trials.append(_trial(session, plan, booted, trial, REPEATS))
            session.shut([booted])
    quiet = pd.concat(trials)
    step_us = slices.trimmed(quiet.loc[quiet["phase"] == "", "interval_ns"]) / NS_PER_US
    found, left_out = sensitivity.phases(trials, plan.phases, step_us)
    return Sensitivity(
        schema_version=SCHEMA_VERSION,
        run=run,
        engine=plan.arm.engine,
        device=booted.description.device["kind"],
        model=str(booted.description.model["name"]),
        toggles=plan.arm.toggles,
        options=sensitivity.what_counts(plan.arm),
        batch=plan.design.workload.num_requests,
        step_us=step_us,
        trials=len(trials),
        phases=found,
        left_out=absent | left_out,
        notes=sensitivity.of_others(found),
    )


def _sized(session: Session, plan: Plan, booted: Booted, say: Say) -> Plan:
    """The plan of the phases that there are, with sizes of delays, below, near and above the slack that each
    seems to have: by a first look, of which nothing counts, and which warms the engine up."""
    for _ in range(2):
        undelayed = _segment(session, plan, booted, 0, [("", 0)])
    step_ns = slices.trimmed(slices.decode_slices(undelayed)["interval_ns"])
    batch, took = plan.design.workload.num_requests, f"{step_ns / NS_PER_US:,.0f} us"
    say(f"a step takes {took} at batch {batch}; a first look at how much of a delay is hidden")
    there = tuple(name for name in plan.phases if undelayed[f"us.{name}"].notna().any())
    if not there:
        raise api.BadSetting(f"{plan.arm.engine} has no phase {' or '.join(plan.phases)} with these settings")
    plan = replace(plan, phases=there, sizes=dict.fromkeys(there, _shares(COARSE, step_ns)))
    look = _trial(session, plan, booted, -1, COARSE_REPEATS)
    sizes = {}
    for phase in plan.phases:
        points = sensitivity.points_of(look, phase)
        slack = None if points is None else fit(*points).slack
        if slack is None:  # beyond all of them, or nothing can be told
            sizes[phase] = _shares(COARSE, step_ns)
        elif (slack_ns := slack * NS_PER_US) < NO_SLACK * step_ns:
            sizes[phase] = _shares(SERIAL, step_ns)
        else:
            above = (round(slack_ns) + size for size in _shares(ABOVE, step_ns))
            sizes[phase] = (round(BELOW * slack_ns), *above)
    return replace(plan, sizes=sizes)


def _shares(shares: Sequence[float], step_ns: float) -> tuple[int, ...]:
    return tuple(round(share * step_ns) for share in shares)


def _trial(session: Session, plan: Plan, booted: Booted, trial: int, repeats: int) -> pd.DataFrame:
    """All its turns: each phase and size so often, in an order that is drawn."""
    drawn = random.Random(f"{plan.design.seed}/{trial}")
    cells = [(phase, size) for phase in plan.phases for size in plan.sizes[phase]]
    delays = [each for _ in range(repeats) for each in drawn.sample(cells, len(cells))]
    turns = max(3, (plan.design.workload.most_new_tokens or 0) // plan.design.turn_steps)
    _segment(session, plan, booted, 0, [("", 0)])  # warms up
    found = []
    for start in range(0, len(delays), turns // 2):
        some = delays[start : start + turns // 2]
        asked = [("", 0), *(turn for each in some for turn in (each, ("", 0)))]
        found.append(_segment(session, plan, booted, 1 + start, asked))
    return sensitivity.with_costs(pd.concat(found, ignore_index=True))


def _segment(
    session: Session, plan: Plan, booted: Booted, segment: int, delays: list[tuple[str, int]]
) -> pd.DataFrame:
    """One set of requests: decode turns, with what each was to be delayed by, and what it cost."""
    design = plan.design
    context = int(booted.description.model["context"])
    asked, _ = planned(design.workload, segment_seed(design.seed, 0, segment), booted, context)
    session.begin(booted)
    done = session.take_turns([booted], asked, design.turn_steps, lambda progress: None, delays)
    if failed := next(filter(None, done.data.errors), ""):
        raise api.EngineError(f"a request failed: {failed}")
    record, table = session.collect_turns(booted)
    return sensitivity.of_segment(
        records.steps_frame(record),
        records.turns_frame(table),
        records.beside_frame(record),
        design.turn_lead,
        delays,
        plan.phases,
        segment,
    )
