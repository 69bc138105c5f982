"""What `bench sensitivity` found, as a person reads it."""

from __future__ import annotations

from collections.abc import Callable

from overlap_bench.harness.analysis.sensitivity import Phase, Saving, Sensitivity
from overlap_bench.harness.report.page import Page, Table, csv_text, tabulated

NOTE = (
    "Slope: us that a step takes longer for each us added to the phase beyond the slack; up to the slack, "
    "the device hides it. At most gained: how much shorter a step could be without the phase. Intervals: "
    "95%, t over trials. Delays show what slowing down costs; a gain is inferred from that, and ends at the "
    "phase's own time."
)


def page(found: Sensitivity) -> Page:
    tables = [phase_table(found), *([saving_table(found)] if found.savings else [])]
    first = found.phases[0] if found.phases else None
    if first is None:
        headline = f"{found.engine}: no phase of a step could be delayed."
    elif first.gain_most:
        headline = (
            f"{found.engine}: of the host's phases {first.phase} costs a step most, at most "
            f"{first.gain_most:,.0f} of its {found.step_us:,.0f} us."
        )
    else:
        headline = (
            f"{found.engine}: all host phases are hidden; none would make a step of {found.step_us:,.0f} us "
            "shorter."
        )
    lines = (
        f"{found.model} on the {found.device} device, batch {found.batch}, {found.trials} trials; "
        + ", ".join(f"{name}={choice}" for name, choice in found.toggles.items()),
    )
    return Page(
        headline,
        (*lines, *found.notes),
        tuple(tables),
        [f"{name}: {why}" for name, why in found.left_out.items()],
    )


def phase_table(found: Sensitivity) -> Table:
    columns: dict[str, Callable[[Phase], str]] = {
        "phase": lambda each: each.phase,
        "us": lambda each: f"{each.us:,.0f}",
        "slope": lambda each: f"{each.slope:.2f} [{each.slope_low:.2f}, {each.slope_high:.2f}]".replace(
            "-", "−"
        ),
        "slack, us": slack,
        "at most gained, us": lambda each: f"{each.gain_most:,.0f}",
    }
    return tabulated("What a microsecond more costs", found.phases, columns, NOTE, tuple(columns)[1:])


def slack(each: Phase) -> str:
    if each.slack_us is None or each.slack_high is None:
        return f"over {each.slack_low:,.0f}"
    if each.slack_high < each.points[0][0]:  # no delay was short enough to lie within it
        return f"under {each.points[0][0]:,.0f}"
    return f"{each.slack_us:,.0f} [{each.slack_low:,.0f}, {each.slack_high:,.0f}]"


def saving_table(found: Sensitivity) -> Table:
    columns: dict[str, Callable[[Saving], str]] = {
        "phase": lambda each: each.phase,
        "shorter by, us": lambda each: f"{each.us:g}",
        "a step feels, us": lambda each: f"{each.gain_us:.1f} [{each.gain_low:.1f}, {each.gain_high:.1f}]",
        "of a step": lambda each: f"{each.gain_us / found.step_us:.2%}",
    }
    return tabulated("What it would give", found.savings, columns, "", tuple(columns)[1:])


def to_csv(found: Sensitivity) -> str:
    about = (found.run, found.engine, found.device, found.batch)
    names = [name for name in Phase.__struct_fields__ if name != "points"]
    lines = [(*about, *(getattr(each, name) for name in names)) for each in found.phases]
    return csv_text(("run", "engine", "device", "batch", *names), lines)
