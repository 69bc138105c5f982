"""A comparison as a person reads it: a sentence, then the same parts always, for a terminal, markdown or csv.

Input is a `Comparison` and nothing else, so that a stored one prints the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from harness.analysis import plants
from harness.analysis.result import (
    Comparison,
    Counter,
    MetricRow,
    NoPrediction,
    Outputs,
    Prediction,
    Result,
    Settings,
    SweepResult,
    Warning,
)
from harness.analysis.words import conclusion, confidence, difference, floor, interval, verdict
from harness.common.formatting import number, percent, with_unit
from harness.metrics import definitions
from harness.report.page import Page, Table, csv_text
from harness.stats import paired, planning

DESCRIPTIVE = (
    "ttft_ms_p50",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "itl_token_ms_p50",
    "itl_token_ms_p99",
    "itl_chunk_ms_p50",
    "itl_chunk_ms_p99",
    "latency_ms_p50",
    "throughput_tok_s",
    "goodput_req_s",
    "submit_lag_ms_p99",
    "client_lag_ms_p99",
    "queue_wait_ms_p50",
    *definitions.MATCHED,
)
CONVENTIONS = (
    "change = after/before − 1: for times, negative is faster. Before and after are means over blocks "
    "(geometric where the change is in percent); interval: {confidence}%, t over blocks. Only the primary "
    "and the declared secondaries carry a verdict, all else is descriptive; `same` is not corrected for the "
    "number of metrics."
)
FAMILY = " Verdicts are at 5% over all comparisons of this run together (Holm); intervals are each by itself."
FLOOR = " Floor: what equal arms show on this machine (bench aa): a smaller change says nothing."


def remarks(comparison: Comparison) -> Iterator[str]:
    """Which part of the step changed, and what a planted delay, or an arm against itself, came to."""
    if comparison.after is None:
        return
    if (split := step_parts(comparison)) is not None:
        yield split
    found = planted(comparison)
    if found is not None:
        yield found
    row = comparison.decided
    if comparison.after == comparison.before and row is not None and row.sd is not None:
        blocks, alpha = comparison.blocks, 1 - comparison.confidence
        smallest = paired.as_change(planning.smallest_detectable(row.sd, blocks, alpha=alpha), "ratio")
        name = comparison.primary
        known = "" if row.floor is None else f"Noise floor of {name} over {blocks} blocks: {floor(row)}; "
        of_it = f"a true change of {smallest:.2%}" if known else f"A change of {name} by {smallest:.2%}"
        yield f"{known}{of_it} would be detected in 4 of 5 such runs of {blocks} blocks."


def step_parts(comparison: Comparison) -> str | None:
    """The change of the decode step, and which part of it is the host's and which the device's; None without
    step records."""
    rows = [comparison.metrics.get(name) for name in definitions.MATCHED]
    if any(row is None or row.change is None for row in rows):
        return None
    step, host, device = (f"{difference(row)} {interval(row)}".rstrip() for row in rows if row is not None)
    return (
        f"Decode step {step}: exposed host time {host} of the step ({definitions.SAME_DEVICE}), "
        f"device time {device} ({definitions.SAME_HOST})."
    )


def planted(comparison: Comparison) -> str | None:
    """What became of a planted delay; None where none was."""
    assert comparison.after is not None
    place, size = comparison.after.options.get("plant_at"), plants.achieved(comparison)
    if place is None:
        return None
    if size is None:
        return f"Planted at the {place}: the engine counted no delay, so none can be seen."
    name = comparison.primary
    row = comparison.metrics[name]
    expected = plants.expected(size, row.better)
    found = f"{name} changed by {percent(row.change)}"
    if row.ci_low is None or row.ci_high is None:
        return f"Planted at the {place}: {percent(size)} of a step; {found}; one block can't show it."
    verdict = "seen" if plants.seen(comparison) else "not seen"
    inside = "holds" if row.ci_low <= expected <= row.ci_high else "does not hold"
    return (
        f"Planted at the {place}: {percent(size)} of a step; {found} {interval(row)}, {row.verdict}, and "
        f"the interval {inside} {percent(expected)}: {verdict}."
    )


def stopped(result: Result | SweepResult) -> str:
    """Why the run ended where it did."""
    return f"Stopped: {result.stopped_because}."


def changed_settings(one: Settings, other: Settings | None) -> str:
    """What differs between the arms, "before h2d=pageable, after h2d=pinned"; all toggles of one alone, or of
    two that are equal."""
    if other is None or other == one:
        toggles = one.toggles
        which = "before" if other is None else "both"
        return f"{which}: " + (", ".join(f"{name}={each}" for name, each in toggles.items()) or "no toggles")
    before, after = flat(one), flat(other)
    names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    absent = {"ref": "as installed"}
    sides = (
        ", ".join(f"{name}={side.get(name, absent.get(name, 'none'))}" for name in names)
        for side in (before, after)
    )
    return "before: {}; after: {}".format(*sides)


def flat(settings: Settings) -> dict[str, Any]:
    """The settings of an arm by the names of the command line."""
    env = {f"env.{name}": value for name, value in settings.env.items()}
    python = {"python": settings.python} if settings.python else {}
    ref = settings.ref
    code = {"ref": f"{ref.name} ({ref.commit[:10]})"} if ref else {}
    plain = {"engine": settings.engine, **settings.toggles, **settings.options}
    return {**plain, **python, **env, **code}


# ---------------------------------------------------------------------------------------------------------
# Its tables


def parts(comparison: Comparison) -> Iterator[Table]:
    """The tables of a comparison, in the order in which they are read."""
    yield metric_table(comparison)
    yield from _failures_table(comparison)
    if comparison.after is not None:
        yield _outputs_table(comparison.outputs)
    yield from _sides_table("Mechanism", comparison.mechanism, alone=comparison.after is None)
    limit = {
        name: Counter(before=each.before, after=each.after, unit=comparison.metrics[name].unit)
        for name, each in comparison.limit.items()
    }
    predicted = comparison.prediction
    note = "" if predicted is None else prediction_line(predicted)
    yield from _sides_table("Limit", limit, alone=comparison.after is None, note=note)


def _outputs_table(outputs: Outputs) -> Table:
    names = ["compared", "identical", "distinct"]
    note = (
        "identical: requests with the same tokens in both arms, by digest; "
        "distinct: how many different outputs the before arm gave"
    )
    if outputs.near_ties is not None:
        names.append("near_ties")
        note += (
            "; near_ties: requests that part where the model finds both tokens equally likely, up to rounding"
        )
    return Table(
        "Outputs", tuple(names), (tuple(str(getattr(outputs, name)) for name in names),), note, tuple(names)
    )


CAUSES = 3  # of failed requests, in the table


def _failures_table(comparison: Comparison) -> Iterator[Table]:
    """Requests that failed, by arm, with their first causes; nothing where none did."""
    found = comparison.failures
    if not any(side.failed for side in found.values()):
        return
    rows = []
    for arm, side in found.items():
        causes = list(side.causes.items())
        said = [f"{count} × {' '.join(cause.split())}" for cause, count in causes[:CAUSES]]
        said += [f"and {len(causes) - CAUSES} other causes"] if len(causes) > CAUSES else []
        rows.append((arm, str(side.failed), str(side.requests), "; ".join(said)))
    note = "A request that failed is in no other metric; none was sent twice."
    yield Table("Failed requests", ("", "failed", "of", "first causes"), tuple(rows), note, ("failed", "of"))


def prediction_line(predicted: Prediction | NoPrediction) -> str:
    """What the toggle should have given by the before arm's records, beside what it gave."""
    if isinstance(predicted, NoPrediction):
        return f"No prediction: {predicted.none}."
    name, change = predicted.metric, percent(predicted.change)
    said = f"Predicted from the before arm alone: {name} {change} {_predicted_interval(predicted)}".rstrip()
    if predicted.measured is not None:
        points = percent(predicted.error).removesuffix("%")
        said += f"; measured {percent(predicted.measured)}, so the prediction is off by {points} points"
    return (
        f"{said}. Model: {predicted.model}, harness/analysis/prediction.py; "
        f"calibrated: {predicted.calibration}."
    )


def _predicted_interval(predicted: Prediction) -> str:
    if predicted.ci_low is None:
        return ""
    return f"[{percent(predicted.ci_low)}, {percent(predicted.ci_high)}]"


def metric_table(comparison: Comparison) -> Table:
    """Before and after of the primary, what else carries a verdict, a chosen few, and phases that differ."""
    return _metrics_table(comparison, [name for name in chosen(comparison) if name in comparison.metrics])


def every_metric(comparison: Comparison) -> Table:
    """The same for all that was measured."""
    return replace(_metrics_table(comparison, list(comparison.metrics)), title="Every metric")


def _metrics_table(comparison: Comparison, names: Sequence[str]) -> Table:
    found = comparison.metrics
    if comparison.after is None:
        values = ((name, with_unit(found[name].before, found[name].unit)) for name in names)
        return Table("One arm", ("metric", "before"), tuple(values), "arithmetic means over blocks")
    known = any(found[name].floor is not None for name in names)
    rows = tuple(
        (
            name,
            number(found[name].before),
            number(found[name].after),
            difference(found[name]),
            interval(found[name]),
            *([floor(found[name])] if known else []),
            verdict(found[name], name == comparison.primary),
        )
        for name in names
    )
    columns = ("metric", "before", "after", "change", "interval", *(["floor"] if known else []), "verdict")
    note = CONVENTIONS.format(confidence=confidence(comparison)) + (FLOOR if known else "")
    if comparison.decided is not None and comparison.decided.p_adjusted is not None:
        note += FAMILY
    return Table("Before and after", columns, rows, note)


def chosen(comparison: Comparison) -> list[str]:
    """Names of the metrics to print, each once."""
    found = comparison.metrics
    judged = [name for name, row in found.items() if row.verdict is not None]
    phases = [name for name, row in found.items() if name.startswith("phase_") and row.excludes_zero]
    chosen = [
        each for each in DESCRIPTIVE if not (each.startswith("itl_chunk") and "itl_token_ms_p50" in found)
    ]
    return list(dict.fromkeys([comparison.primary, *judged, *chosen, *phases]))


def _sides_table(title: str, sides: Mapping[str, Counter], alone: bool, note: str = "") -> Iterator[Table]:
    if not sides:
        return
    columns = ("", "before", "unit") if alone else ("", "before", "after", "unit")
    rows = tuple(
        (name, *(number(row.of(side)) for side in ("before", "after")[: 1 if alone else 2]), row.unit)
        for name, row in sides.items()
        if row.before or row.after  # a counter that stayed at zero says nothing
    )
    if rows:
        yield Table(title, columns, rows, note)


# ---------------------------------------------------------------------------------------------------------
# Where it is said


def texts(warnings: Sequence[Warning]) -> list[str]:
    return [each.text for each in warnings]


def pages(result: Result) -> Iterator[Page]:
    """One for each comparison."""
    for each in result.comparisons:
        lines = (changed_settings(each.before, each.after), stopped(result), *remarks(each))
        yield Page(conclusion(result.device, each), lines, tuple(parts(each)), texts(each.warnings))


def to_csv(result: Result) -> str:
    """One line per metric, every one that was measured, unrounded."""
    lines = [
        (result.run, result.device, comparison.variant, name, *msgspec.structs.astuple(row))
        for comparison in result.comparisons
        for name, row in comparison.metrics.items()
    ]
    return csv_text(("run", "device", "variant", "metric", *MetricRow.__struct_fields__), lines)
