"""What a toggle should give, from the before arm's records alone: the "expected reduction" of vLLM's RFC
6913, done on each step. Removing X from a step of T gives X/T only where X is exposed, and nothing else takes
its place.

Each model turns the decode intervals of one boot (`Before`) into what they would take with the toggle on
(`After`). The change is mean after / mean before - 1, one value per block, with a t interval over blocks,
widened in quadrature by the standard error of what was calibrated apart (calibration.json); it is set beside
that of round_step_ms.

All models assume the same batches in both arms, a device that takes as long for a step as before (less
`rested` where it no longer stands still before one), and nobody else on the cores.

The aftermath. A step that sends a message wakes the client and the sending thread, which then take the host's
core from the phases behind it (0.05 to 0.3 ms on two cores). The last token of each chunk is the token of
such a step. So the time by which the device idles longer behind a message than behind none, output aside, is
the message's aftermath, and goes where the message goes. Where every step sends, it is calibrated apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import NormalDist

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from overlap_bench.harness.analysis.result import MetricRow, NoPrediction, Prediction
from overlap_bench.harness.common.formatting import percent
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.metrics.attribution import attribute
from overlap_bench.harness.metrics.definitions import OF_PAIRS
from overlap_bench.harness.metrics.steps import tokens_each
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block

Floats = NDArray[np.float64]
METRIC = "round_step_ms"
FEWEST = 20  # with fewer decode intervals without a message, its aftermath can't be told from chance


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A mean over blocks and its standard error, us."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's device, client and process boundary. Lists have one entry per batch size, ascending;
    between sizes it is interpolated, beyond either end the value of that end holds."""

    source: str
    device: str  # its kind
    machine: Machine
    batches: list[int]
    turnaround_us: list[Measured]  # device idle between two queued steps
    rested_us: list[Measured]  # how much longer a program takes on a device that stood still before it
    hand_over_us: list[Measured]  # giving a step's tokens to the output process
    aftermath_us: list[Measured]  # what a message of that many chunks costs the host after sending it

    def at(self, batch: float, values: list[Measured]) -> Measured:
        """One of the lists at a batch size."""
        mean, error = (
            float(np.interp(batch, self.batches, [getattr(each, part) for each in values]))
            for part in ("mean", "error")
        )
        return Measured(mean, error)


def load_calibration() -> Calibration:
    """calibration.json, made by experiments/validation/calibration.py."""
    text = files("overlap_bench.harness.analysis").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(text, type=Calibration)


NOTHING = Measured(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Before:
    """The decode intervals of one boot, us, one entry each."""

    interval: Floats
    device: Floats
    output: Floats  # exposed
    host: Floats  # all that the scheduler's thread does from one wait for ids to the next
    chunks: NDArray[np.int64]  # in the message that the output in this interval sent; 0: it sent none
    batch: float  # mean
    tokens: float = 1.0  # that a step gives each request, mean

    @property
    def idle(self) -> Floats:
        return self.interval - self.device

    def aftermath(self, calibration: Calibration | None) -> Measured:
        """What messages take, us of a mean interval. Where the records tell it, its error is 0 here, being in
        the spread over blocks already."""
        sent = self.chunks > 0
        if not sent.any():
            return NOTHING
        if (~sent).sum() >= FEWEST:
            rest = self.idle - self.output
            return Measured(float((rest[sent].mean() - rest[~sent].mean()) * sent.mean()), 0.0)
        if calibration is None:
            return NOTHING
        of_one = calibration.at(float(self.chunks[sent].mean()), calibration.aftermath_us)
        return Measured(of_one.mean * float(sent.mean()), of_one.error * float(sent.mean()))


@dataclass(frozen=True, slots=True)
class After:
    """What a model makes of one boot: mean interval, us, and the standard error of its calibrated part."""

    interval: float
    error: float


Model = Callable[[Before, Calibration | None], After]


def overlap(before: Before, calibration: Calibration | None) -> After:
    """schedule serial → overlap: all host work is done while the device executes, and a step takes whatever
    takes longer: the device with its turnaround, or the host. A host-bound step is not made up for by the
    next one."""
    turnaround, rested = NOTHING, NOTHING
    if calibration is not None:
        turnaround = calibration.at(before.batch, calibration.turnaround_us)
        rested = calibration.at(before.batch, calibration.rested_us)
    device = before.device - rested.mean + turnaround.mean
    return After(
        float(np.maximum(device, before.host).mean()), float(np.hypot(turnaround.error, rested.error))
    )


def deferred_output(before: Before, calibration: Calibration | None) -> After:
    """output inline → deferred, on one thread: output and its aftermath move behind the next launch. What
    of the output outlasts the device there still shows."""
    longer = np.maximum(0.0, before.output - before.device).mean()
    return _without_output(before, float(longer), 0.0, calibration)


def async_output(before: Before, calibration: Calibration | None) -> After:
    """output inline → process, on one thread: what stays of output is handing the tokens over."""
    hand_over = NOTHING if calibration is None else calibration.at(before.batch, calibration.hand_over_us)
    return _without_output(before, hand_over.mean, hand_over.error, calibration)


def _without_output(before: Before, left: float, error: float, calibration: Calibration | None) -> After:
    aftermath = before.aftermath(calibration)
    saved = float(before.output.mean()) + aftermath.mean - left
    return After(float(before.interval.mean()) - saved, float(np.hypot(error, aftermath.error)))


# Which toggles change, from what to what, and the model; `model_of` says what else the settings need.
MODELS: dict[frozenset[tuple[str, str, str]], Model] = {
    frozenset({("schedule", "serial", "overlap"), ("prefill", "", "overlap")}): overlap,
    frozenset({("output", "inline", "deferred")}): deferred_output,
    frozenset({("output", "inline", "process")}): async_output,
}


def model_of(before: Arm, after: Arm) -> Model | str:
    """The model of what differs between two arms, or why there is none."""
    if before.engine != "overlap" or after.engine != "overlap":
        return "the models know the steps of the engine `overlap` only"
    if (before.options, before.python, before.env, before.ref, before.patch) != (
        after.options, after.python, after.env, after.ref, after.patch,
    ):  # fmt: skip
        return "the arms differ in more than their toggles"
    names = dict.fromkeys([*before.toggles, *after.toggles])
    changes = tuple(
        (name, before.toggles.get(name, ""), after.toggles.get(name, ""))
        for name in names
        if before.toggles.get(name) != after.toggles.get(name)
    )
    if not changes:
        return "the arms are equal"
    found = MODELS.get(frozenset(changes))
    if found is None:
        changed = ", ".join(f"{name} {old or 'none'} → {new or 'none'}" for name, old, new in changes)
        return f"no model of {changed}"
    if before.toggles.get("schedule") != "serial":
        return "the models know the waits of a serial before only"
    if found is overlap and after.toggles.get("launch") != "inline":
        return "no model of a forward thread"
    if found is overlap and before.toggles.get("output") != "inline":
        return "no model of overlap with output elsewhere"
    return found


def predict(
    manifest: Manifest, blocks: Sequence[Block], rows: Mapping[str, MetricRow]
) -> Prediction | NoPrediction:
    """The prediction of a run with two arms, as it stands in a result; `rows`: its metrics by name."""
    measured, decided = rows.get(METRIC), rows.get(manifest.design.primary)
    design = manifest.design
    model = model_of(*design.arms)
    if isinstance(model, str):
        return NoPrediction(none=model)
    if design.plant is not None:
        return NoPrediction(none="the after arm has an injected delay")
    described = manifest.descriptions.get(design.arms[0].name)
    calibration = load_calibration()
    fits = described is not None and described.device["kind"] == calibration.device
    intervals, found = [], []
    for block in blocks:
        boot = before_of(block, design.arms[0])
        if boot is None:
            return NoPrediction(none="the before arm has no step records of steady decode in some trial")
        if boot.tokens != 1:
            return NoPrediction(none="the models know steps that give each request one token")
        intervals.append(float(boot.interval.mean()))
        found.append(model(boot, calibration if fits else None))
    alpha = design.alpha(len(blocks))
    predicted = [after.interval for after in found]
    if not all(0 < each < math.inf for each in (*intervals, *predicted)):
        return NoPrediction(none="the before arm has steps that take no time, or none that can be")
    effect = paired.effect(intervals, predicted, "ratio", alpha)
    assert effect.change is not None
    low, high = widened(effect, max(after.error for after in found), alpha)
    change = None if measured is None else measured.change
    return Prediction(
        metric=METRIC,
        model=model.__name__,
        change=effect.change,
        ci_low=low,
        ci_high=high,
        measured=change,
        error=None if change is None else effect.change - change,
        calibration=calibrated(calibration, manifest) if fits else "nothing was calibrated for this device",
        remark=not_of(design.primary, None if decided is None else decided.change),
    )


def not_of(primary: str, change: float | None) -> str:
    """Why a prediction is of another metric than the run's first line; "" where it is not."""
    if primary == METRIC or change is None:
        return ""
    if primary in OF_PAIRS:
        why = "is of turns, without arrivals and messages to predict from"
    else:
        why = f"is of {primary}, which is more than a decode step"
    return f"The first line's {percent(change)} {why}"


def calibrated(calibration: Calibration, manifest: Manifest) -> str:
    """Where the calibrated part comes from: a machine like this one, or another, told by what differs."""
    there, here = calibration.machine, manifest.measured_on
    if msgspec.structs.replace(there, kernel=here.kernel) == here:
        other = "" if there == here else f" under another kernel ({there.kernel})"
        return f"{calibration.source}, on a machine like this one{other}"
    told = {
        "cpu": there.cpu,
        "cores": f"{there.cores} cores",
        "memory_gib": f"{there.memory_gib} GiB",
        "gpus": ", ".join(there.gpus) or "no GPU",
        "kernel": f"kernel {there.kernel}",
    }
    differing = [said for name, said in told.items() if getattr(there, name) != getattr(here, name)]
    return f"{calibration.source}, on another machine ({', '.join(differing)})"


def widened(effect: paired.Effect, error: float, alpha: float) -> tuple[float | None, float | None]:
    """The interval over blocks with the calibration's standard error (us) in quadrature. One block has no
    interval."""
    if effect.low is None or effect.high is None or effect.change is None:
        return None, None
    apart = NormalDist().inv_cdf(1 - alpha / 2) * error / effect.before
    return (
        effect.change - float(np.hypot(effect.change - effect.low, apart)),
        effect.change + float(np.hypot(effect.high - effect.change, apart)),
    )


def before_of(block: Block, arm: Arm) -> Before | None:
    """The decode intervals of an arm's boot; None where it has none."""
    steps, work, requests = (block.of(arm.name, name) for name in ("steps", "work", "requests"))
    if not len(steps):
        return None
    steps = steps.sort_values(["round", "step"]).reset_index(drop=True)
    parts = attribute(steps, work, arm.toggles.get("launch") == "thread")
    if not len(parts):
        return None
    rows = parts.index.to_numpy()
    waits = [steps[f"wait.copy_done.{edge}"].to_numpy() for edge in ("start", "end")]
    return Before(
        interval=parts["interval_ns"].to_numpy() / 1e3,
        device=parts["device"].to_numpy() / 1e3,
        output=parts["output"].to_numpy() / 1e3,
        host=(waits[0][rows] - waits[1][rows - 1]) / 1e3,
        chunks=sent_chunks(steps, requests)[rows - 1],
        batch=float(parts["batch"].mean()),
        tokens=float(tokens_each(steps)[rows].mean()),
    )


def sent_chunks(steps: pd.DataFrame, requests: pd.DataFrame) -> NDArray[np.int64]:
    """How many chunks each step's output sent, int64 (steps,): those whose last token came in its append."""
    last = [np.empty(0, np.int64)]
    for stamps, counts in zip(requests["token_ns"], requests["chunk_tokens"], strict=True):
        ends = np.cumsum(np.asarray(counts, np.int64))
        last.append(np.asarray(stamps, np.int64)[ends[ends <= len(stamps)] - 1])
    stamps = np.sort(np.concatenate(last))
    starts, ends = steps["append.start"].to_numpy(), steps["append.end"].to_numpy()
    found: NDArray[np.int64] = np.searchsorted(stamps, ends, side="right") - np.searchsorted(stamps, starts)
    return found
