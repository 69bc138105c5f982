"""Metrics of turns: what two arms that run a few steps each, one at a time, say of each other's decode step.

A slice is what was recorded of one turn. Slices of two arms are a pair where both are the same turn of the
same segment and ran the same steps: as many, of the same batch, tokens and context. What disturbs the machine
for longer than a turn meets both, and cancels in their ratio.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES
from overlap_bench.harness.metrics.arrays import Floats
from overlap_bench.harness.metrics.attribution import PARTS
from overlap_bench.harness.metrics.definitions import (
    DRAINED,
    IN_TURNS,
    NS_PER_MS,
    NS_PER_US,
    SLICED_MEAN,
    UNDISTURBED,
    phase_in_turns,
)

TRIMMED = 0.2  # of the pairs, at each end: a rare stall of tens of ms must not decide
HELD = 0.05  # of a turn: CPU time of processes that are not the run's, from which on it is disturbed
ENOUGH = 0.2  # the share of undisturbed pairs from which on they alone decide
FEWEST_PAIRS = 10  # and how many they have to be
KEPT = 0.9  # the share of pairs that must be left, or the rest may be a biased choice
SAME = ["round", "turn", "first_step", "steps", "batch", "tokens"]
BESIDE = ("parked_ns", "parked_cpu_ns", "others_ns", "delayed_ns")  # of a turn, as its host saw them
PART = "part."  # begins the columns of where the interval goes
PHASE = "phase."  # begins those of what each phase took


def of_turns(
    steps: pd.DataFrame, turns: pd.DataFrame, lead: int, parts: pd.DataFrame | None = None
) -> pd.DataFrame:
    """One row per turn of a segment, from records.steps_frame and records.turns_frame. `parts`:
    attribution.of_each_step of the same steps.

    turn; first_step (from the segment's first); steps; batch (of the first; -1 where not all are decode
    steps); tokens (of all); interval_ns (mean time from device end to device end, behind the
    first `lead` steps, which fill the pipeline; -1 where there is none); device_ns (mean, of the steps that
    these intervals end with; -1 where it is not known); turn_ns (from taking the baton until all was
    finished, by the number of steps); parked_ns and parked_cpu_ns (before it, all processes of the engine
    together); others_ns and delayed_ns (in the turn, as of api.TurnTable); with `parts`, one column behind
    PART for each, a mean over the steps of interval_ns, to which they add up; and one column behind PHASE for
    each phase that the engine has, ns, a mean over those of the same steps that have it. An engine that
    records no device work ends a step when its tokens are on the host; its steps have no parts.
    """
    ordered = steps.sort_values("step")
    ends, device = ordered["device_end_ns"].to_numpy(), ordered["device_ns"].to_numpy()
    if (ends < 0).all():  # an engine that does not know its device
        ends = ordered["append.start"].to_numpy()
    numbers, batches, tokens = (ordered[name].to_numpy() for name in ("step", "batch", "tokens"))
    decode = (ordered["kind"] == "decode").to_numpy()
    known = parts is not None and len(parts) > 0
    shares = parts.reindex(numbers)[list(PARTS)].to_numpy() if parts is not None and known else None
    spent = _phases(ordered)
    rows = []
    for turn, had in enumerate(turns.itertuples()):
        taken, drained = had.taken_ns, had.drained_ns
        mine = np.flatnonzero((ends > taken) & (ends <= drained))
        if not len(mine):
            continue
        inner = mine[lead:]
        between = ends[mine[-1]] - ends[mine[lead - 1]] if len(inner) else -1
        rows.append(
            {
                "turn": turn,
                "first_step": int(numbers[mine[0]] - numbers[0]),
                "steps": len(mine),
                "batch": int(batches[mine[0]]) if decode[mine].all() else -1,
                "tokens": int(tokens[mine].sum()),
                "interval_ns": round(between / max(1, len(inner))),
                "device_ns": round(device[inner].mean()) if len(inner) else -1,
                "turn_ns": round((drained - taken) / len(mine)),
                **{name: getattr(had, name) for name in BESIDE},
            }
        )
        rows[-1] |= {name: _mean(ns[inner]) for name, ns in spent.items()}
        if shares is not None:
            means = shares[inner].mean(axis=0) if len(inner) else [-1.0] * len(PARTS)
            rows[-1] |= dict(zip(PART_COLUMNS, means, strict=True))
    return pd.DataFrame(rows, columns=[*COLUMNS, *spent, *(PART_COLUMNS if shares is not None else ())])


def _phases(ordered: pd.DataFrame) -> dict[str, Floats]:
    """What each phase took in each step, ns, by its column; NaN in a step without it."""
    found = {}
    for phase in PHASES:
        if not {f"{phase}.start", f"{phase}.end"} <= set(ordered):
            continue
        start, end = ordered[f"{phase}.start"].to_numpy(), ordered[f"{phase}.end"].to_numpy()
        there = (start >= 0) & (end >= 0)
        if there.any():
            found[f"{PHASE}{phase}"] = np.where(there, end - start, np.nan)
    return found


def _mean(values: Floats) -> float:
    """The mean of the values that are known; NaN where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


COLUMNS = (
    "turn", "first_step", "steps", "batch", "tokens", "interval_ns", "device_ns", "turn_ns", *BESIDE,
)  # fmt: skip
PART_COLUMNS = tuple(f"{PART}{name}" for name in PARTS)


def decode_slices(slices: pd.DataFrame) -> pd.DataFrame:
    """The slices of whole turns of decode steps."""
    whole = slices["steps"] == slices.groupby("round")["steps"].transform("max")
    return slices[whole & (slices["batch"] > 0) & (slices["interval_ns"] >= 0)]


def pair(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """One row per pair of decode_slices, with the columns of both, `_before` and `_after`."""
    return before.merge(after, on=SAME, suffixes=("_before", "_after"))


def kept(pairs: pd.DataFrame, *arms: pd.DataFrame) -> float:
    """The share of decode_slices that have a partner, of the arm that has more; NaN where there is none."""
    possible = max(map(len, arms))
    return len(pairs) / possible if possible else np.nan


def undisturbed(turns: pd.DataFrame) -> pd.DataFrame:
    """The decode_slices, or pairs of them, beside which nothing else used the cores, in either turn of a
    pair. The rule looks at nothing which a change of an engine can move. All, where the machine does not
    tell."""
    turn_ns = ("turn_ns", "turn_ns_before", "turn_ns_after")
    calm = np.ones(len(turns), bool)
    for name in filter(turns.columns.__contains__, turn_ns):
        others = name.replace("turn_ns", "others_ns")
        if others in turns:  # not of older runs
            calm &= (turns[others] <= HELD * turns[name] * turns["steps"]).to_numpy()
    return turns[calm]


def deciding(turns: pd.DataFrame) -> pd.DataFrame:
    """The undisturbed ones; all, where these are too few."""
    calm = undisturbed(turns)
    return calm if len(calm) >= max(FEWEST_PAIRS, ENOUGH * len(turns)) else turns


def calm_enough(turns: pd.DataFrame, before: str, after: str) -> bool:
    """Whether enough pairs of these two arms' turns are undisturbed; where there are none, nothing is."""
    pairs = pair(*(decode_slices(turns[turns["arm"] == name]) for name in (before, after)))
    return len(undisturbed(pairs)) >= max(min(FEWEST_PAIRS, len(pairs)), ENOUGH * len(pairs))


def step_sliced(before: pd.DataFrame, *others: pd.DataFrame) -> tuple[dict[str, float], ...]:
    """The decode step of each arm in turns, ms: IN_TURNS, SLICED_MEAN and DRAINED. NaN where
    too few pairs are left.

    decode_step_ms              of the first arm, the trimmed mean (of logarithms) of its slices' intervals;
                                of another, that times the trimmed mean (of logarithms) of the ratios of its
                                pairs with the first. So the change between two arms is that of their pairs.
    decode_step_ms_host         the first arm's, and what the arm's own exposed host time (interval - device)
                                adds to it: trimmed mean over pairs, as a share of the first arm's interval
    decode_step_ms_device       the rest of the change: as shares of the first arm's step, both add up to it
    decode_step_ms_untrimmed    of the first arm, the plain mean of its slices' intervals; of another, that
                                times the ratio of both means over their pairs. A rare long step is in it
    decode_step_ms_drained      see `drained`
    decode_phase_..._us         a phase, us: as decode_step_ms, with its own time in place of the interval
    turns_undisturbed           the share of pairs in which nothing else used the cores. Where they are enough
                                (`deciding`), all that is of pairs is of these
    """
    own, *theirs = map(decode_slices, (before, *others))
    paired = [pair(own, each) for each in theirs]
    if not all(kept(pairs, own, each) >= KEPT for pairs, each in zip(paired, theirs, strict=True)):
        return tuple(dict.fromkeys((*IN_TURNS, SLICED_MEAN, DRAINED), np.nan) for _ in (before, *others))
    shares = [len(undisturbed(pairs)) / len(pairs) for pairs in paired]
    own, *theirs = map(deciding, (own, *theirs))
    first = _middle(own["interval_ns"]) / NS_PER_MS
    mean = float(own["interval_ns"].mean()) / NS_PER_MS
    found = [{**dict.fromkeys(IN_TURNS, first), SLICED_MEAN: mean, UNDISTURBED: min(shares)}]
    for pairs, calm in zip(map(deciding, paired), shares, strict=True):
        ratio = _middle(pairs["interval_ns_after"] / pairs["interval_ns_before"])
        exposed = pairs["interval_ns_after"] - pairs["device_ns_after"]
        more = exposed - (pairs["interval_ns_before"] - pairs["device_ns_before"])
        known = (pairs[["device_ns_before", "device_ns_after"]] >= 0).all(axis=None)
        host = trimmed(more / pairs["interval_ns_before"]) if known else np.nan
        parts = (ratio, 1 + host, ratio - host)
        of_mean = float(pairs["interval_ns_after"].mean() / pairs["interval_ns_before"].mean())
        found.append(
            {
                **{name: first * share for name, share in zip(IN_TURNS, parts, strict=True)},
                SLICED_MEAN: mean * of_mean,
                UNDISTURBED: calm,
            }
        )
    for whole, values in zip((own, *theirs), found, strict=True):
        values[DRAINED] = drained(whole)
    for phase in PHASES:
        middle = phase_us(own, phase)
        found[0][phase_in_turns(phase)] = middle
        for pairs, values in zip(map(deciding, paired), found[1:], strict=True):
            values[phase_in_turns(phase)] = middle * _ratio(pairs, f"{PHASE}{phase}")
    return tuple(found)


def phase_us(whole: pd.DataFrame, phase: str) -> float:
    """What a phase took in a step, us: the trimmed mean over turns; NaN where none has it."""
    took = whole[f"{PHASE}{phase}"].dropna() if f"{PHASE}{phase}" in whole else ()
    return trimmed(took) / NS_PER_US if len(took) else np.nan


def _ratio(pairs: pd.DataFrame, column: str) -> float:
    """After by before, over the pairs that have both; NaN where none has."""
    before, after = f"{column}_before", f"{column}_after"
    if not {before, after} <= set(pairs):
        return np.nan
    known = pairs[(pairs[before] > 0) & (pairs[after] > 0)]
    return _middle(known[after] / known[before]) if len(known) else np.nan


def parts_of_step(
    before: pd.DataFrame, after: pd.DataFrame, every: bool
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Where a decode step goes in turns, ns: each of PARTS in both arms, means over the same pairs, so that
    they add up to the step. Over every pair, as decode_step_ms_untrimmed, or without TRIMMED of them at each
    end of the change, much as decode_step_ms. None where too few pairs are left, or nothing is known of
    parts."""
    whole = [decode_slices(each) for each in (before, after)]
    pairs = pair(*whole)
    if not kept(pairs, *whole) >= KEPT:
        return None
    pairs = deciding(pairs)
    columns = [[f"{name}_{side}" for name in PART_COLUMNS] for side in ("before", "after")]
    if not set(columns[0] + columns[1]) <= set(pairs):
        return None
    if not every:
        order = np.argsort(pairs["interval_ns_after"] / pairs["interval_ns_before"])
        cut = int(TRIMMED * len(pairs))
        pairs = pairs.iloc[order[cut : len(pairs) - cut]]
    first, second = (dict(zip(PARTS, pairs[names].mean(skipna=False), strict=True)) for names in columns)
    return None if np.isnan([*first.values(), *second.values()]).any() else (first, second)


def error_of_pairs(pairs: pd.DataFrame) -> float:
    """The standard error of one block's change, from the scatter of its pairs. Neighbouring pairs are
    taken as independent."""
    return error_of_trimmed(np.log(pairs["interval_ns_after"] / pairs["interval_ns_before"]))


def error_of_trimmed(values: pd.Series) -> float:
    """The standard error of `trimmed`, by the winsorized SD (Tukey & McLaughlin, Sankhya 1963); NaN of fewer
    than two values that are left."""
    ordered = np.sort(values.to_numpy())
    cut = int(TRIMMED * len(ordered))
    if len(ordered) - 2 * cut < 2:
        return np.nan
    winsorized = np.clip(ordered, ordered[cut], ordered[len(ordered) - cut - 1])
    return float(winsorized.std(ddof=1) / ((1 - 2 * cut / len(ordered)) * len(ordered) ** 0.5))


def drained(whole: pd.DataFrame) -> float:
    """What a step more takes, ms, counted until everything is finished: the difference of a long turn and a
    short one, by the number of steps between them. What a turn costs besides, filling and draining, is in
    both; what a step leaves to be done at the end of its turn is not. NaN without turns of two lengths.
    `whole`: decode_slices."""
    took = (whole["turn_ns"] * whole["steps"]).groupby(whole["steps"]).agg(trimmed)
    if len(took) < 2:
        return np.nan
    short, long = took.index.min(), took.index.max()
    return float((took[long] - took[short]) / (long - short)) / NS_PER_MS


def _middle(values: pd.Series) -> float:
    """Trimmed geometric mean."""
    return float(np.exp(trimmed(np.log(values))))


def trimmed(values: pd.Series | Floats) -> float:
    """Mean without TRIMMED of the values at each end."""
    ordered = np.sort(np.asarray(values))
    cut = int(TRIMMED * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def busy_while_parked(slices: pd.DataFrame) -> float:
    """The share of a core that an arm used while it was parked. It slowed the other arm alone."""
    parked = slices["parked_ns"].sum()
    return float(slices["parked_cpu_ns"].sum() / parked) if parked else 0.0
