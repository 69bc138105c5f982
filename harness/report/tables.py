"""What there is to say of a comparison, each as a line or as a table; sections.py has their order.

Input is a `Comparison` and nothing else, so that a stored one prints the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap_bench.engines import api
from overlap_bench.harness.analysis import mechanism
from overlap_bench.harness.analysis.outputs import why_weak
from overlap_bench.harness.analysis.result import (
    Comparison,
    Counter,
    Failures,
    MetricRow,
    NodeRow,
    Nodes,
    NoPrediction,
    Outputs,
    Prediction,
    Result,
    Settings,
    SweepResult,
)
from overlap_bench.harness.analysis.words import (
    confidence,
    difference,
    floor,
    interval,
    per_step,
    verdict,
)
from overlap_bench.harness.common.formatting import number, percent, with_unit
from overlap_bench.harness.common.names import FIELDS
from overlap_bench.harness.metrics import definitions, slices
from overlap_bench.harness.report.page import PER_STEP, Table, csv_of, tabulated
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store.manifest import listed

CONVENTIONS = (
    "change = after/before − 1: for times, negative is faster. Before and after are means over trials "
    "(geometric where the change is in percent); interval: {confidence}%, t over trials. Only the primary "
    "and the declared secondaries carry a verdict, all else is descriptive; `same` is not corrected for the "
    "number of metrics."
)
CAUSES = 3  # of failed requests, in the table
FAMILY = " Verdicts are at 5% over all comparisons of this run together (Holm); intervals are each by itself."
BOTH = " Of runs without a change, at most 5% call one of the primary, and 5% one of the secondaries."
# Settings of engines by which a step is prepared while the device computes one.
AHEAD = (("schedule", "overlap"), ("async_scheduling", "on"))
MECHANISM = "What the engine counted: whether the change did what it claims to do."
LIMIT = (
    "In rounds. device_busy: share of the time in which programs ran on the device, copies not counted "
    "(on a card, prefills count with the gaps between their kernels). "
    "exposed_host_us: step interval − device time of that step: host work that overlap failed to hide, and "
    "the device's own gap between two programs. round_step_ms_same_device and round_step_ms_same_host in the "
    "table above split the change of the decode step into exposed host time and device time."
)
FLOOR = " Floor: what equal arms show on this machine (bench aa): a smaller change says nothing."
# What TTFT is made of, in order. An engine that doesn't say when it queued a request has one wait for two.
STAGES = {
    "tokenize_ms_mean": "tokenizing",
    "to_queue_ms_mean": "on its way to the scheduler",
    "in_queue_ms_mean": "waiting in the scheduler's queue",
    "queue_wait_ms_mean": "waiting for a place in a batch",
    "prefill_first_ms_mean": "prefill, to the first token",
}
OF_A_REQUEST = {
    "submit_lag_ms_mean": "due, but not sent yet",
    **STAGES,
    "ttft_ms_mean": "TTFT, from the send to the first token's arrival",
    "latency_ms_mean": "latency, from the send to the end",
}
REQUEST_TIMES = (
    "In ms, means over requests and trials, of rounds; described, not judged. TTFT holds the engine's stages "
    "and the way there and back; a late send comes before it."
)


def detectable(comparison: Comparison) -> str | None:
    """The change that an arm against itself could have shown; None of different arms."""
    row, blocks, name = comparison.decided, comparison.blocks, comparison.primary
    if comparison.after != comparison.before or row is None or row.sd is None or row.change is None:
        return None  # a metric that was 0 has no change in percent

    from overlap_bench.harness.stats import planning

    # Where nodes disagree, the SD is that of nodes, and counts so many.
    found = planning.smallest_detectable(row.sd, row.counted or blocks, alpha=1 - comparison.confidence)
    smallest = paired.as_change(found, "ratio")
    if row.floor is None:
        said = f"A change of {name} by {smallest:.2%}"
    else:
        said = f"Noise floor of {name} over {blocks} trials: {floor(row)}; a true change of {smallest:.2%}"
    return f"{said} would be detected in 4 of 5 such runs of {blocks} trials."


def changed_code(comparison: Comparison) -> str | None:
    """What the code of the arms differs by, and what of it ran; None where they run one installation."""
    found = comparison.changed_code
    if found is None:
        return None
    many = f"{found.functions:,}" if found.functions else "no"
    differ = "1 function differs" if found.functions == 1 else f"{many} functions differ"
    if not (found.functions or found.other) and found.unwatched:
        differ = "what differs is not known"
    told = {
        "Ran in a round": found.in_rounds,
        "Ran only as the engine booted": found.at_boot,
        "Never ran": found.never,
        "Compiled, so not seen to run": found.unseen,
        "Other files that differ": found.other,
        "Of these, loaded or opened": found.used,
        "Not compared function by function, and in two versions": found.besides,
        "Not all could be seen": [found.unwatched] if found.unwatched else [],
    }
    parts = [f"{what}: {listed(names)}." for what, names in told.items() if names]
    of = f" of {', '.join(found.packages)}" if found.packages else ""
    return " ".join([f"Changed code{of}: {differ}.", *parts])


def overlaid(comparison: Comparison) -> str | None:
    """The files that no ref has and both arms ran; None where there are none."""
    if comparison.after is None or not comparison.overlaid:
        return None
    files = [f"{each.file} ({each.sha256[:10]})" for each in comparison.overlaid]
    return f"Both arms have these files of the checkout, which no ref has: {', '.join(files)}."


def in_turns(comparison: Comparison) -> str | None:
    """What was measured in turns, and what in rounds; None where no turns were taken."""
    sliced = comparison.sliced
    if sliced is None:
        return None
    alone = "" if sliced.kept > 0.995 else f"; {1 - sliced.kept:.0%} of the turns have no partner"
    return (
        f"The decode step was measured in turns: the arms alternated every {sliced.steps} steps of the same "
        f"requests, and turns of the same steps are compared ({sliced.pairs:,} pairs, batch "
        f"{sliced.batch:.3g}{alone}). All else was measured in rounds: one arm at a time ran the whole "
        "workload, so it scatters more."
        f"{beside_others(comparison)}"
    )


def beside_others(comparison: Comparison) -> str:
    """What turns say while other processes used the cores, and which decide; "" where those are few."""
    sliced, row = comparison.sliced, comparison.metrics.get(definitions.SLICED)
    if sliced is None or sliced.undisturbed is None or sliced.disturbed is None or row is None:
        return ""
    share = sliced.undisturbed / sliced.pairs
    if share < slices.ENOUGH:
        return f" Other processes used the cores in {1 - share:.0%} of the pairs: too many, so all count."
    said = f"{difference(row)} {interval(row)}".rstrip()  # one trial has no interval
    return (
        f" Undisturbed turns ({share:.0%}): {said}; while other processes used the cores: "
        f"{percent(sliced.disturbed)}."
    )


def scatter(comparison: Comparison) -> str | None:
    """Which of both would make the interval narrower: more interleaved rounds, or more trials. None where it
    is not known."""
    sliced = comparison.sliced
    if sliced is None or sliced.within is None or sliced.between is None:
        return None
    return (
        f"The change varies by {sliced.within:.2%} (SD) within a trial: more --interleaved-rounds average "
        f"that out. It varies by {sliced.between:.2%} from trial to trial: more --trials average that out."
    )


def step_parts(comparison: Comparison) -> str | None:
    """The change of the decode step, and which part of it is the host's and which the device's; None without
    step records."""
    for names, where in ((definitions.IN_TURNS, "turns"), (definitions.MATCHED, "rounds")):
        rows = [comparison.metrics[name] for name in names if name in comparison.metrics]
        if len(rows) == len(names) and all(row.change is not None for row in rows):
            host, device = (f"{difference(row)} {interval(row)}".rstrip() for row in rows[1:])
            return (
                f"The decode step's {difference(rows[0])} in {where} is {host} from host time that the "
                f"device does not hide ({names[1]}: the step, had the device taken as long in both), and "
                f"{device} from device time ({names[2]}).{_ahead(comparison)}"
            )
    return None


def _ahead(comparison: Comparison) -> str:
    """What these parts do not tell where an arm prepares a step while the device computes one (stats.md)."""
    arms = [arm for arm in (comparison.before, comparison.after) if arm is not None]
    if not any(arm.toggles.get(name) == choice for arm in arms for name, choice in AHEAD):
        return ""
    return (
        " An arm prepares steps ahead of the device: where its host is the slower of the two, device time "
        "that is saved shows as more host time."
    )


def outputs_line(comparison: Comparison) -> str | None:
    """Whether the arms gave the same tokens; and, apart from that, how many outputs there were to tell apart,
    and whether these are too few. None of one arm alone."""
    outputs = comparison.outputs
    if comparison.after is None:
        return None
    if not outputs.compared:
        return f"Outputs: none could be compared{f': {outputs.weak}' if outputs.weak else ''}."
    ties = f", {outputs.near_ties} of the others near-ties" if outputs.near_ties else ""
    among = ""
    if outputs.distinct is not None:
        among = f" ({outputs.distinct} distinct text{'s' if outputs.distinct != 1 else ''})"
    counts = f"{outputs.identical} of {outputs.compared} identical in both arms{ties}{among}"
    return " ".join([f"Outputs: {counts}.", *weak_check(outputs)])


def weak_check(outputs: Outputs) -> list[str]:
    """Why equal outputs show little; nothing where they show much."""
    weak = outputs.weak or why_weak(outputs)
    return [f"A weak check: {weak}."] if weak else []


def planted(comparison: Comparison) -> str | None:
    """What became of a planted delay; None where none was."""
    place = None if comparison.after is None else comparison.after.options.get("plant_at")
    if place is None or comparison.after is None or comparison.after.options.get("plant_ns") == 0:
        return None
    size = mechanism.planted_share(comparison)
    if size is None and f"injected_{place}_ns" in comparison.mechanism:
        return None  # it was counted, and of which step it is a share is not known, as across runs
    if size is None:
        return f"Injected delay at the {place}: the engine counted none, so none can be seen."
    row = comparison.metrics[comparison.primary]
    expected = mechanism.expected_change(size, row.better)
    change = f"{comparison.primary} changed by {percent(row.change)}"
    found = f"Injected delay at the {place}: {percent(size)} of a step; {change}"
    if not mechanism.differ_by_plant_alone(comparison):
        return f"{found}, by the arms' other differences, too; bench aa shows whether a delay is seen."
    if row.ci_low is None or row.ci_high is None:
        return f"{found}; one trial can't show it."
    inside = "holds" if row.ci_low <= expected <= row.ci_high else "does not hold"
    if row.verdict is None:
        return (
            f"{found} {interval(row)}, {comparison.verdict or 'no verdict'}; it {inside} {percent(expected)}."
        )
    verdict = "seen" if mechanism.plant_seen(comparison) else "not seen"
    return (
        f"{found} {interval(row)}, {row.verdict}, and the interval {inside} {percent(expected)}: {verdict}."
    )


def stopped(result: Result | SweepResult) -> str:
    return f"Stopped: {result.stopped_because}."


def changed_settings(one: Settings, other: Settings | None) -> str:
    """What differs between the arms, and the toggles that they share, "before: h2d=pageable; after:
    h2d=pinned; both: schedule=serial"; all toggles of one alone, or of two that are equal."""
    if other is None or other == one:
        toggles = one.toggles
        which = "before" if other is None else "both"
        return f"{which}: " + (", ".join(f"{name}={each}" for name, each in toggles.items()) or "no toggles")
    before, after = flat(one), flat(other)
    names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    spec = api.find_engines().get(one.engine)
    optional = [each.name for each in ([] if spec is None else spec.toggles) if each.optional]
    absent = dict.fromkeys(["ref", *optional], "as installed")
    sides = (
        ", ".join(f"{name}={side.get(name, absent.get(name, 'none'))}" for name in names)
        for side in (before, after)
    )
    shared = [f"{name}={each}" for name, each in one.toggles.items() if other.toggles.get(name) == each]
    both = f"; both: {', '.join(shared)}" if shared else ""
    return "before: {}; after: {}".format(*sides) + both


def flat(settings: Settings) -> dict[str, Any]:
    """The settings of an arm by the names of the command line."""
    options = {FIELDS.get(name, name): value for name, value in settings.options.items()}
    found = {"engine": settings.engine, **settings.toggles, **options}
    if settings.python:
        found["python"] = settings.python
    found |= {f"env.{name}": value for name, value in settings.env.items()}
    if settings.ref:
        found["ref"] = f"{settings.ref.name} ({settings.ref.commit[:10]})"
    if settings.patch:
        found["patch"] = settings.patch.shown
    return found


def nodes_table(comparison: Comparison) -> Table | None:
    """The primary on each node of a cluster, and whether they agree."""
    nodes = comparison.nodes
    if nodes is None:
        return None
    columns: dict[str, Callable[[tuple[str, NodeRow]], str]] = {
        "node": lambda row: row[0] or "without a cluster",
        "trials": lambda row: str(row[1].blocks),
        "change": lambda row: difference(row[1]),
        "interval": lambda row: interval(row[1]),
    }
    title, rows = f"{comparison.primary} by node", nodes.changes.items()
    return tabulated(title, rows, columns, agreement(nodes), ("trials", "change"))


def agreement(nodes: Nodes) -> str:
    """What the test of the nodes said, and what it could have seen."""
    if nodes.p is None or nodes.power is None:
        return "One trial on each node: the interval includes what nodes differ by."

    from overlap_bench.harness.stats.nodes import LEVEL

    found = "disagree, and each counts once" if nodes.unit == "node" else "are not seen to disagree"
    return (
        f"The nodes {found} (p = {nodes.p:.3f}, at a level of {LEVEL:.0%}). If nodes differed by an SD as "
        f"large as the margin, {nodes.power:.0%} of such runs would find it."
    )


def failures_table(comparison: Comparison) -> Table | None:
    """Requests that failed, by arm, with their first causes; None where none did."""

    def causes(side: Failures) -> str:
        said = [f"{count} × {' '.join(cause.split())}" for cause, count in side.causes.items()]
        more = [f"and {len(said) - CAUSES} other causes"] if len(said) > CAUSES else []
        return "; ".join(said[:CAUSES] + more)

    arms = comparison.failures.items()
    if not any(side.failed for _, side in arms):
        return None
    rows = tuple((arm, str(side.failed), str(side.requests), causes(side)) for arm, side in arms)
    note = "A request that failed is in no other metric; none was sent twice."
    return Table("Failed requests", ("", "failed", "of", "first causes"), rows, note, ("failed", "of"))


def prediction_line(predicted: Prediction | NoPrediction) -> str:
    """What the toggle should have given by the before arm's records, beside what it gave."""
    if isinstance(predicted, NoPrediction):
        return f"No prediction: {predicted.none}."
    said = f"Predicted from the before arm's rounds: {predicted.metric} {percent(predicted.change)}"
    if predicted.ci_low is not None:
        said += f" [{percent(predicted.ci_low)}, {percent(predicted.ci_high)}]"
    if predicted.measured is not None:
        points = percent(predicted.error).removesuffix("%")
        said += (
            f"; measured there: {percent(predicted.measured)}, so the prediction is off by {points} points"
        )
    remark = f" {predicted.remark}." if predicted.remark else ""
    return (
        f"{said}.{remark} Model: {predicted.model}, harness/analysis/prediction.py; "
        f"calibrated: {predicted.calibration}."
    )


def metric_table(comparison: Comparison, every: bool = False) -> Table:
    """Before and after of the primary, what else carries a verdict, a chosen few, and phases that differ; or
    of every metric that was measured."""
    found = comparison.metrics
    rows = [(name, found[name]) for name in (found if every else chosen(comparison)) if name in found]
    columns: dict[str, Callable[[tuple[str, MetricRow]], str]] = {"metric": lambda row: row[0]}
    if comparison.after is None:
        columns["before"] = lambda row: with_unit(row[1].before, row[1].unit)
        title = "Every metric" if every else "One arm"
        return tabulated(title, rows, columns, "arithmetic means over trials")
    columns |= {
        "before": lambda row: number(row[1].before),
        "after": lambda row: number(row[1].after),
        "change": lambda row: difference(row[1]),
    }
    if any(definitions.of_a_step(name) for name, _ in rows):
        columns[PER_STEP] = lambda row: per_step(row[0], row[1].before, row[1].after)
    columns["interval"] = lambda row: interval(row[1])
    note = CONVENTIONS.format(confidence=confidence(comparison.confidence)) + of_rounds(comparison)
    if any(row.floor is not None for _, row in rows):
        columns["floor"] = lambda row: floor(row[1])
        note += FLOOR
    columns["verdict"] = lambda row: verdict(row[1], row[0] == comparison.primary)
    if comparison.decided is not None and comparison.decided.p_adjusted is not None:
        note += FAMILY
    elif any(row.verdict is not None for name, row in rows if name != comparison.primary):
        note += BOTH
    return tabulated("Every metric" if every else "Before and after", rows, columns, note)


def of_rounds(comparison: Comparison) -> str:
    """Why other metrics change by another share than the step in turns; "" where there were none."""
    if comparison.sliced is None:
        return ""
    return " decode_... is of turns; all else is of rounds, with arrivals, prefills and the client in it."


def chosen(comparison: Comparison) -> list[str]:
    """Names of the metrics to print, each once."""
    found = comparison.metrics
    judged = [name for name, row in found.items() if row.verdict is not None]
    phases = [
        name
        for name, row in found.items()
        if name.startswith("phase_") and row.excludes_zero and f"decode_{name}" not in found
    ]
    shown = (name for name, each in definitions.METRICS.items() if each.shown)
    chosen = [each for each in shown if not (each.startswith("itl_chunk") and "itl_token_ms_p50" in found)]
    return list(dict.fromkeys([comparison.primary, *judged, *chosen, *phases]))


def request_times(comparison: Comparison) -> Table | None:
    """Where a request's time goes, from when it was due until its end: a row for each stage that took any
    time; None where the engine stamps none."""
    found = {name: row for name, row in comparison.metrics.items() if row.before or row.after}
    if "in_queue_ms_mean" in found:
        found.pop("queue_wait_ms_mean", None)
    if not found.keys() & STAGES.keys():
        return None
    rows = [(said, found[name]) for name, said in OF_A_REQUEST.items() if name in found]
    columns: dict[str, Callable[[tuple[str, MetricRow]], str]] = {
        "": lambda row: row[0],
        "before": lambda row: number(row[1].before),
    }
    if comparison.after is not None:
        columns |= {
            "after": lambda row: number(row[1].after),
            "change": lambda row: difference(row[1]),
            "interval": lambda row: interval(row[1]),
        }
    return tabulated("Where a request's time goes", rows, columns, REQUEST_TIMES)


def mechanism_table(comparison: Comparison) -> Table | None:
    return sides_table("Mechanism", comparison.mechanism, comparison, about=MECHANISM)


def limit_table(comparison: Comparison) -> Table | None:
    """What the device and the host left unused, before and after, and what was predicted from it."""
    predicted = comparison.prediction
    note = "" if predicted is None else prediction_line(predicted)
    return sides_table("Limit", limit(comparison), comparison, note, LIMIT)


def limit(comparison: Comparison) -> dict[str, Counter]:
    return {
        name: Counter(before=each.before, after=each.after, unit=definitions.METRICS[name].unit)
        for name, each in comparison.limit.items()
    }


def sides_table(
    title: str, sides: Mapping[str, Counter], comparison: Comparison, note: str = "", about: str = ""
) -> Table | None:
    """None where nothing was counted: a counter that stayed at zero says nothing."""
    rows = [(name, row) for name, row in sides.items() if row.before or row.after]
    columns: dict[str, Callable[[tuple[str, Counter]], str]] = {
        "": lambda row: row[0],
        "before": lambda row: number(row[1].before),
        "after": lambda row: number(row[1].after),
        "unit": lambda row: row[1].unit,
    }
    if comparison.after is None:
        del columns["after"]
    return tabulated(title, rows, columns, note, about=about) if rows else None


def to_csv(result: Result) -> str:
    """One line per metric, every one that was measured, unrounded."""
    rows = (
        ((result.run, result.device, comparison.variant, name, comparison.confidence), row)
        for comparison in result.comparisons
        for name, row in comparison.metrics.items()
    )
    return csv_of(("run", "device", "variant", "metric", "confidence"), MetricRow, rows)
