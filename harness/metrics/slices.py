"""Metrics of turns: what two arms that run a few steps each, one at a time, say of each other's decode step.

A slice is what was recorded of one turn. Slices of two arms are a pair where both are the same turn of the
same segment and ran the same steps: as many, of the same batch, tokens and context. What disturbs the machine
for longer than a turn meets both, and cancels in their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES
from overlap_bench.harness.common.intervals import Floats
from overlap_bench.harness.metrics.attribution import PARTS
from overlap_bench.harness.metrics.definitions import (
    METRICS,
    NS_PER_MS,
    NS_PER_US,
    PAIRS,
    PHASES_IN_TURNS,
    UNDISTURBED,
)
from overlap_bench.harness.metrics.steps import phase_ns

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
    shares = None if parts is None or parts.empty else parts.reindex(numbers)[list(PARTS)].to_numpy()
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
    """What each phase that the engine has took in each step, ns, by its column."""
    found = {f"{PHASE}{phase}": phase_ns(ordered, phase) for phase in PHASES}
    return {name: spent for name, spent in found.items() if not np.isnan(spent).all()}


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
    calm = np.ones(len(turns), bool)
    for side in ("", "_before", "_after"):
        others, turn_ns = f"others_ns{side}", f"turn_ns{side}"
        if {others, turn_ns} <= set(turns):  # older runs have no others_ns
            calm &= (turns[others] <= HELD * turns[turn_ns] * turns["steps"]).to_numpy()
    return turns[calm]


def deciding(turns: pd.DataFrame) -> pd.DataFrame:
    """The undisturbed ones; all, where these are too few."""
    calm = undisturbed(turns)
    return calm if are_enough(len(calm), len(turns)) else turns


def calm_enough(turns: pd.DataFrame, before: str, after: str) -> bool:
    """Whether enough pairs of these two arms' turns are undisturbed; where there are none, nothing is."""
    pairs = pair(*(decode_slices(turns[turns["arm"] == name]) for name in (before, after)))
    return are_enough(len(undisturbed(pairs)), len(pairs))


def are_enough(calm: int, pairs: int) -> bool:
    """Whether a block is decided by its undisturbed pairs, so many of all. Of few pairs all must be."""
    return calm >= max(min(FEWEST_PAIRS, pairs), ENOUGH * pairs)


@dataclass(frozen=True, slots=True)
class Turns:
    """The decode steps of an arm in turns, and of the first arm: what the metrics `of_turns` are made of."""

    first: pd.DataFrame  # decode_slices
    own: pd.DataFrame
    pairs: pd.DataFrame  # of both; of the first arm with itself

    @property
    def step(self) -> float:
        """The first arm's interval, ms: trimmed mean of logarithms."""
        return _middle(self.first["interval_ns"]) / NS_PER_MS

    @property
    def ratio(self) -> float:
        """By what a pair's intervals differ: trimmed mean of logarithms."""
        return _middle(self.pairs["interval_ns_after"] / self.pairs["interval_ns_before"])

    @property
    def host(self) -> float:
        """What the change of exposed host time (interval - device) adds: trimmed mean over pairs, as a share
        of the first arm's interval; NaN where device times are not known."""
        if self.own is self.first:
            return 0.0
        known = (self.pairs[["device_ns_before", "device_ns_after"]] >= 0).all(axis=None)
        after = self.pairs["interval_ns_after"] - self.pairs["device_ns_after"]
        more = after - (self.pairs["interval_ns_before"] - self.pairs["device_ns_before"])
        return trimmed(more / self.pairs["interval_ns_before"]) if known else np.nan

    @property
    def mean(self) -> float:
        """The first arm's interval, ms, times what a pair's differ by, each a plain mean."""
        ratio = self.pairs["interval_ns_after"].mean() / self.pairs["interval_ns_before"].mean()
        return float(self.first["interval_ns"].mean()) / NS_PER_MS * float(ratio)

    @property
    def drained(self) -> float:
        """What a step more takes, ms, counted until everything is finished: the difference of a long turn and
        a short one, by the number of steps between them. What a turn costs besides, filling and draining, is
        in both; what a step leaves to be done at the end of its turn is not. NaN without turns of two
        lengths."""
        took = (self.own["turn_ns"] * self.own["steps"]).groupby(self.own["steps"]).agg(trimmed)
        if len(took) < 2:
            return np.nan
        short, long = took.index.min(), took.index.max()
        return float((took[long] - took[short]) / (long - short)) / NS_PER_MS

    def phase_us(self, phase: str) -> float:
        """What a phase took in a step of the first arm, us, the trimmed mean over turns, times what it
        differs by in the pairs that have it in both; NaN where there are none."""
        before, after = (self.pairs.get(f"{PHASE}{phase}_{side}") for side in ("before", "after"))
        if before is None or after is None:
            return np.nan
        took, ratios = self.first[f"{PHASE}{phase}"].dropna(), (after / before)[(before > 0) & (after > 0)]
        return trimmed(took) / NS_PER_US * _middle(ratios) if len(took) and len(ratios) else np.nan


def step_sliced(before: pd.DataFrame, *others: pd.DataFrame) -> tuple[dict[str, float], ...]:
    """The metrics of each arm `of_turns`, UNDISTURBED and PAIRS. Where the undisturbed pairs are enough
    (`deciding`), all is made of these. NaN, and no phases, where too few pairs are left."""
    arms = [*map(decode_slices, (before, *others))]
    own, *theirs = arms
    paired = [pair(own, each) for each in theirs]
    made = {name: each.of_turns for name, each in METRICS.items() if each.of_turns}
    if not all(kept(pairs, own, each) >= KEPT for pairs, each in zip(paired, theirs, strict=True)):
        return tuple({name: np.nan for name in made if name not in PHASES_IN_TURNS} for _ in arms)
    shares = [(len(undisturbed(pairs)) / len(pairs), len(pairs)) for pairs in paired]
    first, *rest = map(deciding, arms)
    both = [pair(first, first), *map(deciding, paired)]
    turns = [Turns(first, each, pairs) for each, pairs in zip((first, *rest), both, strict=True)]
    return tuple(
        {**{name: make(each) for name, make in made.items()}, UNDISTURBED: share, PAIRS: pairs}
        for each, (share, pairs) in zip(turns, (min(shares), *shares), strict=True)
    )


def calm(values: Mapping[str, Mapping[str, float]]) -> float:
    """The share of pairs of turns in a block's values of arms, in which nothing else used the cores; 1 where
    it is not known."""
    return min(each.get(UNDISTURBED, 1.0) for each in values.values())


def believed(values: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether a block's values of arms are made of undisturbed pairs; also where nothing is known of them."""
    known = [(each[UNDISTURBED], round(each[PAIRS])) for each in values.values() if UNDISTURBED in each]
    return all(are_enough(round(share * pairs), pairs) for share, pairs in known)


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
