"""What a microsecond of host work in each phase of a step costs, from turns with known delays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.common.intervals import Floats
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.metrics.slices import trimmed
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.stats.knee import Knee, over_trials, points
from overlap_bench.harness.store.files import StoreError

FILE = "sensitivity.json"
NS_PER_US = 1e3
NO_SLACK = 0.005  # of a step: what is hidden of a delay that is felt at once, by the accuracy of the fit
SHORT = 0.05  # of a step: a delay that a phase which is felt is given
ABSENT = "no step of these settings has it"
FEWEST_SIZES = 3  # of which a trial must have turns, for a line through them


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """`us`: what it takes of a step by itself. `slope`: us that a step takes longer for each us more in this
    phase, beyond `slack_us`, up to which more is hidden; None where no delay went that far, and the slope is
    over all. `gain_most`: us that a step would be shorter without the phase, at most: what is hidden gains
    nothing."""

    phase: str
    us: float
    slope: float
    slope_low: float
    slope_high: float
    slack_us: float | None
    slack_low: float
    slack_high: float | None
    gain_most: float
    points: list[tuple[float, float]]  # delay and cost, us: of each size, the mean over trials


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What a step feels of a phase that gets shorter by `us` (--saves)."""

    phase: str
    us: float
    gain_us: float
    gain_low: float
    gain_high: float


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """Phases, those first that could give most. `left_out`: phases of which nothing can be said, with why."""

    schema_version: int
    run: str
    engine: str
    device: str
    model: str
    toggles: dict[str, str]
    batch: int
    step_us: float
    trials: int
    phases: list[Phase]
    options: dict[str, str] = {}  # of the arm, as what_counts; of an earlier version none
    savings: list[Saving] = []
    left_out: dict[str, str] = {}
    notes: list[str] = []


# Options that size an engine, and change no step of a batch that fits, and what is compared by itself.
SIZES = (
    "model", "device", "pace", "max_batch_size", "prefill_max_batch_size", "prefill_max_tokens",
    "max_context", "num_blocks", "seed", "chaos", "plant_at", "plant_ns", "tokenize_workers", "recorder",
)  # fmt: skip


def what_counts(arm: Arm) -> dict[str, str]:
    """Options of an arm that decide what a phase takes, in words."""
    return {name: str(each) for name, each in msgspec.to_builtins(arm.options).items() if name not in SIZES}


def read(folder: str | Path) -> Sensitivity:
    """Read the folder that `bench sensitivity` left. Raises StoreError."""
    path = Path(folder) / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sensitivity)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{path} is not what bench sensitivity leaves: {error}") from error


def of_segment(
    steps: pd.DataFrame,
    turns: pd.DataFrame,
    beside: pd.DataFrame,
    lead: int,
    delays: Sequence[tuple[str, int]],
    names: Sequence[str],
    segment: int = 0,
) -> pd.DataFrame:
    """Decode turns (slices.of_turns, of records' frames of the same names) with what each was to be delayed
    by: `phase`, `size_ns`; `delay_ns`, spent by the step; `felt_ns`, what the step took; `us.PHASE`, what
    each phase took of it.

    What another thread or process takes of a step is its busy time in a turn; where it has none in them, as
    texts come before, that of the whole segment. Where it is busy for longer than a step takes, steps wait
    for it in the end, once there is no more room for what it is handed: turns are too short for that, so that
    its time is then taken for the step's.
    """
    frame = slices.decode_slices(slices.of_turns(steps, turns, lead).assign(round=segment))
    frame = frame.set_index("turn", drop=False)
    asked = [delays[turn % len(delays)] for turn in frame["turn"]]
    frame["phase"], frame["size_ns"] = [name for name, _ in asked], [size for _, size in asked]
    frame["delay_ns"] = turns["delayed_ns"].reindex(frame.index) / frame["steps"]
    numbers = steps.sort_values("step").reset_index(drop=True)
    felt = frame["interval_ns"].astype(float)
    for name in names:
        if f"{name}.start" in numbers:
            spans = (numbers[f"{name}.end"] - numbers[f"{name}.start"]).where(numbers[f"{name}.start"] >= 0)
            means = [
                spans.iloc[first + lead : first + count].mean()
                for first, count in zip(frame["first_step"], frame["steps"], strict=True)
            ]
            frame[f"us.{name}"] = np.array(means, float) / NS_PER_US
        else:
            mine = beside[beside["phase"] == name]
            busy = _busy_ns(mine, turns).reindex(frame.index) / frame["steps"]
            others = mine[mine["start_ns"] < turns["taken_ns"].reindex(frame.index).min()]
            early = float((others["end_ns"] - others["start_ns"]).sum()) / max(1, len(steps))
            own = busy if busy[frame["phase"] == ""].any() else early
            frame[f"us.{name}"] = own / NS_PER_US if len(mine) else np.nan
            felt = felt.mask(frame["phase"] == name, np.maximum(felt, busy))
    return frame.assign(felt_ns=felt).reset_index(drop=True)


def with_costs(turns: pd.DataFrame) -> pd.DataFrame:
    """The turns of a trial with `cost_ns`: what a step took longer than in the turns beside it that had no
    delay. Without the turns beside which something else used the cores, where enough are left."""
    kept = slices.deciding(turns)
    quiet = kept[kept["phase"] == ""].set_index(["round", "turn"])["interval_ns"]
    beside = [
        quiet.reindex(pd.MultiIndex.from_arrays([kept["round"], kept["turn"] + by])).to_numpy()
        for by in (-1, 1)
    ]
    costs = kept["felt_ns"].to_numpy() - pd.DataFrame(beside).mean().to_numpy()
    return kept.assign(cost_ns=np.where(kept["phase"] == "", np.nan, costs))


def _busy_ns(spans: pd.DataFrame, turns: pd.DataFrame) -> pd.Series:
    """How long what began in each turn took, by turn."""
    starts, took = spans["start_ns"].to_numpy(), (spans["end_ns"] - spans["start_ns"]).to_numpy()
    ends = zip(turns["taken_ns"], turns["drained_ns"], strict=True)
    busy = [float(took[(starts > taken) & (starts < drained)].sum()) for taken, drained in ends]
    return pd.Series(busy, turns.index)


def of_others(found: Sequence[Phase]) -> list[str]:
    """What to know of phases that are done beside the step."""
    names = [each.phase for each in found if each.phase not in api.PHASES]
    if not names:
        return []
    return [
        f"{' and '.join(names)}: done beside the step, by another thread or process. Turns are too short for "
        "a step to wait for it: once its own time in a turn is longer than a step, that time stands for the "
        "step's. So what it costs beyond its slack was not seen at the step."
    ]


def phases(
    trials: Sequence[pd.DataFrame], names: Sequence[str], step_us: float
) -> tuple[list[Phase], dict[str, str]]:
    """`trials`: turns of each. Delayed ones have `phase`, `size_ns` (asked for), `delay_ns` (spent, by the
    step) and `cost_ns` (beside their neighbours); others have the `us` of each phase."""
    found, left_out = [], dict[str, str]()
    for name in names:
        lines = [line for each in trials if (line := points_of(each, name)) is not None]
        if len(lines) < len(trials) or len({len(x) for x, *_ in lines}) > 1:
            left_out[name] = "its code did not run in a step, or nothing of it is recorded here"
            continue
        quiet = [each.loc[each["phase"] == "", f"us.{name}"].dropna() for each in trials]
        own = float(np.mean([trimmed(each) for each in quiet if len(each)]))
        means = np.mean([line[:2] for line in lines], axis=0)
        found.append(_phase(name, own, over_trials(lines), step_us, means))
    return sorted(found, key=lambda each: -each.gain_most), left_out


def points_of(turns: pd.DataFrame, phase: str) -> tuple[Floats, Floats, Floats] | None:
    """stats.knee.points of a phase, us; None where too little of it was delayed."""
    mine = turns[(turns["phase"] == phase) & turns["cost_ns"].notna() & (turns["delay_ns"] > 0)]
    if mine["size_ns"].nunique() < FEWEST_SIZES:
        return None
    delays, costs, sizes = (
        mine[name].to_numpy(float) / NS_PER_US for name in ("delay_ns", "cost_ns", "size_ns")
    )
    return points(delays, costs, sizes)


def _phase(name: str, us: float, knee: Knee, step_us: float, means: Floats) -> Phase:
    # Without a slack that any delay lay within, less of it is felt as more of it is. Of a phase that seemed
    # hidden at first no delay is short, and so none says that.
    shortest = min(float(means[0][0]), SHORT * step_us)
    felt = knee.slack is not None and knee.slack_low <= max(NO_SLACK * step_us, shortest)
    return Phase(
        phase=name,
        us=us,
        slope=knee.slope,
        slope_low=knee.slope_low,
        slope_high=knee.slope_high,
        slack_us=knee.slack,
        slack_low=knee.slack_low,
        slack_high=knee.slack_high,
        gain_most=max(0.0, knee.slope) * us if felt else 0.0,
        points=[(float(x), float(y)) for x, y in means.T],
    )


def saving(phase: Phase, us: float) -> Saving:
    """What is hidden gains nothing; else the phase's slope times what it gets shorter, all of it at most."""
    felt, us = 1.0 if phase.gain_most else 0.0, min(us, phase.us)
    return Saving(
        phase=phase.phase,
        us=us,
        gain_us=felt * phase.slope * us,
        gain_low=felt * phase.slope_low * us,
        gain_high=felt * phase.slope_high * us,
    )


def with_savings(found: Sensitivity, saves: Mapping[str, float]) -> Sensitivity:
    by_name = {each.phase: each for each in found.phases}
    savings = [saving(by_name[name], us) for name, us in saves.items() if name in by_name]
    return msgspec.structs.replace(found, savings=savings)
