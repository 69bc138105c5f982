"""A finished run as one file for people: a web page that needs nothing else, or markdown for a pull request.

Every number of the run comes from its result by report/sections.py, or from
a figure of overlap_bench.plots; nothing is computed here. What a run says of itself is text, never markup.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from overlap_bench.engines import api
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.analysis.frames import Run, load
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.sensitivity import Sensitivity
from overlap_bench.harness.analysis.stored import check_two
from overlap_bench.harness.common.formatting import blocks_of, minutes_of
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.report import figures, formats, sections, sensitivity_tables, tables
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.page import inline_svg
from overlap_bench.harness.report.page import Page, Table, markdown_page, markdown_table, rendered
from overlap_bench.harness.store.files import WriteFailed, write_text
from overlap_bench.harness.store.manifest import NOT_RECORDED, Imported
from overlap_bench.harness.workload.arrivals import ARRIVALS
from overlap_bench.harness.workload.workload import Workload

PAGE = "report.html"  # in the folder of its run
CAPTION = (
    "What a step takes longer, by what a phase was delayed by. On the grey line all of a delay is felt; what "
    "lies below it is hidden. Points: means over trials, of each size; lines: what was fitted."
)
# Inches: of the pictures that lead, two of which stand side by side, and of the second drawing of each other
# one, for narrow screens.
NARROW = 3.7
ALWAYS = ("arrival", "num_requests", "max_new_tokens", "pretok")  # of the workload
MODEL = ("name", "dtype", "parameters", "vocabulary", "context", "kv_bytes_per_token")  # no paths
Draw = Callable[..., Figure]  # takes a width
PHASES = "Host phases"
LEADING: dict[str, Draw] = {"Trial by trial": figures.trial_changes, PHASES: figures.phases}
OTHERS: dict[str, Draw] = {
    "Changes": figures.changes,
    "Latencies": figures.latency_cdfs,
    "Over time": figures.itl_over_time,
}
OF_TWO = ("Trial by trial", "Changes")  # arms: not drawn of one alone
# Of the verdicts, how the page colours them; the word stands there too.
TONES = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad", "same": "calm"}


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure as SVG, or what it is missing for. Without a `wide` one, `narrow` is for all screens."""

    title: str
    wide: str = ""
    narrow: str = ""
    missing: str = ""


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a finished run, or of a sensitivity, to `out`, .html or .md, or into its folder;
    where it lies. Raises BadSetting for another ending or a run of several arms or where that can't be
    written, and StoreError for a folder that can't be read or a run that is not finished."""
    path = folder / PAGE if out is None else out
    form = path.suffix.lower()
    if form not in (".html", ".md"):
        raise api.BadSetting(f"a report is a web page or markdown: end {path} in .html or .md")
    if (folder / sensitivity.FILE).exists():
        found = sensitivity.read(folder)
        text = sensitivity_page(found) if form == ".html" else _as_text(formats.to_markdown(found))
    else:
        run = load(folder)
        check_two(folder, run.manifest)
        text = to_html(run) if form == ".html" else to_markdown(run)
    try:
        write_text(path, text)
    except WriteFailed as error:  # nothing was measured that could be lost
        raise api.BadSetting(f"{error}; give another place with -o {PAGE}") from error
    return path


def to_html(run: Run) -> str:
    """The page: verdict, tables, figures, mechanism, limit, method, environment. It has no script and asks
    for nothing from any network."""
    (comparison,) = run.result.comparisons
    return rendered(
        "report.html.jinja",
        title=f"{comparison.variant}: {run.result.run}",
        page=sections.page(run.result, comparison),
        tone=_tone(comparison),
        everything=tables.metric_table(comparison, every=True),
        leading=_pictures(run, comparison, leads=True),
        pictures=_pictures(run, comparison, leads=False),
        method=method(run),
        environment=environment_of(run),
        settings=settings_of(comparison),
    )


def sensitivity_page(found: Sensitivity) -> str:
    draw = partial(figures.sensitivity, found)
    picture = drawn("What delays cost", draw) if found.phases else Picture("")
    return page_of_tables(found.run, sensitivity_tables.page(found), picture, CAPTION)


def page_of_tables(
    title: str, page: Page, picture: Picture = Picture(""), caption: str = "", tone: str = "open"
) -> str:
    return rendered("page.html.jinja", title=title, page=page, picture=picture, caption=caption, tone=tone)


def to_markdown(run: Run) -> str:
    """The verdict, its tables and warnings, then method and environment, folded away."""
    (comparison,) = run.result.comparisons
    found = markdown_page(sections.page(run.result, comparison))
    besides = (method(run), environment_of(run), settings_of(comparison))
    folded = "\n".join(line for table in besides for line in markdown_table(table))
    summary = "<details><summary>Method and environment</summary>"
    return "\n".join([_as_text(found), summary, "", _as_text(folded), "</details>", ""])


def _as_text(markdown: str) -> str:
    """Without tags and links: names, settings and errors come from the run."""
    return html.escape(markdown, quote=False).replace("](", "]\\(")


def _tone(comparison: Comparison) -> str:
    if comparison.outputs.unexplained:
        return "bad"
    return TONES.get((comparison.verdict and comparison.verdict.word) or "", "open")


def _pictures(run: Run, comparison: Comparison, leads: bool) -> list[Picture]:
    """Pictures of the first screen, below the verdict, or all others."""
    chosen = [
        (title, draw)
        for title, draw in (LEADING if leads else OTHERS).items()
        if comparison.after is not None or title not in OF_TWO
    ]
    where = "" if comparison.sliced is None else ", in rounds"
    return [drawn(title + where * (title == PHASES), partial(draw, run), leads) for title, draw in chosen]


def drawn(title: str, draw: Draw, leads: bool = False) -> Picture:
    """A figure for wide screens and for narrow ones, the same where it `leads`; or why it can't be drawn."""
    try:
        wide = "" if leads else inline_svg(draw(width=style.WIDTH), f"{title}, wide")
        return Picture(title, wide, inline_svg(draw(width=NARROW), f"{title}, narrow"))
    except api.BadSetting as error:
        return Picture(title, missing=str(error))


def method(run: Run) -> Table:
    """What was decided before the first block."""
    design = run.manifest.design
    compared = run.result.comparisons[0]
    blocks = compared.blocks + len(compared.left_out)
    if run.manifest.imported is not None:
        return _imported(run.manifest.imported, blocks)
    each = "for each arm" if any(arm.is_remote for arm in design.arms) else "a boot"
    rows = [
        ("trials", f"{blocks}, {_boots(design.arms)}"),
        ("rounds", f"{design.rounds} {each}, pooled, after {design.warmup_rounds} to warm up"),
    ]
    if len(design.arms) == 2:
        rows += [
            ("order", "drawn for each trial of this run"),
            ("decides", design.primary),
            ("also judged", ", ".join(design.secondaries) or "nothing"),
            ("margin", f"±{100 * design.margin:.3g}%, the largest change that counts as none"),
            ("stops", _stops(design)),
        ]
    if design.goodput:
        rows.append(("goodput", ", ".join(f"{name} ≤ {ms:g} ms" for name, ms in design.goodput.items())))
    if design.plant is not None:
        rows.append(("injected delay", f"{100 * design.plant:.3g}% of a step, at the {design.plant_at}"))
    rows += [(f"workload: {name}", value) for name, value in _asked(design.workload)]
    return Table("Method", ("", ""), tuple(rows), numbers=())


def _boots(arms: Sequence[Arm]) -> str:
    """What a block is made of. A server at an address was booted by somebody else, before the run."""
    there = [f"{arm.name}: a server that was running, and was not booted" for arm in arms if arm.is_remote]
    booted = [arm.name for arm in arms if not arm.is_remote]
    whose = " of each arm" if len(booted) == 2 else f" of {booted[0]}" if there and booted else ""
    fresh = [f"each one fresh boot{whose}; the first boots are discarded"] if booted else []
    return "; ".join([*fresh, *there])


def _imported(imported: Imported, blocks: int) -> Table:
    """All that is known of how another tool measured."""
    rows = [
        ("measured by", f"{imported.tool} {imported.version}".strip()),
        ("measured at", ", ".join(filter(None, imported.measured)) or NOT_RECORDED),
        ("trials", f"{blocks}, a file each"),
        *((f"workload: {name}", value) for name, value in imported.asked.items()),
    ]
    return Table("Method", ("", ""), tuple(rows), numbers=())


def _asked(workload: Workload) -> Iterator[tuple[str, str]]:
    """What is always of interest, what this kind of arrival looks at, and what differs from the default."""
    shown = {*ALWAYS, *ARRIVALS[workload.arrival].options}
    usual = msgspec.to_builtins(Workload())
    for name, value in msgspec.to_builtins(workload).items():
        if value != usual[name] or (name in shown and value is not None):
            yield name, _said(value)


def _stops(design: Design) -> str:
    bound = "" if design.max_minutes is None else f", or as many as fit into {minutes_of(design.max_minutes)}"
    if design.until is None:
        return f"after {blocks_of(design.blocks)}{bound}, whatever they say"
    looks = ", ".join(map(str, design.until.looks))
    wanted = "decided" if design.until.precision is None else f"±{100 * design.until.precision:.3g}%"
    return f"once {wanted}, with looks at {looks} trials{bound}, declared before the first"


def environment_of(run: Run) -> Table:
    manifest = run.manifest
    described = list(manifest.descriptions.values())
    machine, code = manifest.measured_on, manifest.code
    rows = [
        ("run", manifest.run),
        ("measured at" if manifest.imported is None else "imported at", manifest.created),
    ]
    if manifest.imported is None:
        cores = f"{machine.cores} cores, {machine.memory_gib} GiB"
        rows += [
            ("machine", f"{machine.cpu}, {cores}, kernel {machine.kernel}"),
            ("GPUs", ", ".join(machine.gpus) or "none"),
            ("commit", (code.commit or "unknown") + (" with changes on top" if code.dirty else "")),
        ]
    for what, facts in (
        ("device", [each.device for each in described]),
        ("model", [{name: each.model[name] for name in MODEL if each.model.get(name)} for each in described]),
        ("version", [manifest.versions]),
    ):
        for name in dict.fromkeys(name for each in facts for name in each):
            values = dict.fromkeys(_said(each[name]) for each in facts if name in each)
            rows.append((f"{what}: {name}", ", ".join(values)))  # of both arms, where they differ
    return Table("Environment", ("", ""), tuple(rows), numbers=())


def settings_of(comparison: Comparison) -> Table:
    """Every setting of the arms, those that differ first."""
    sides = [tables.flat(each) for each in (comparison.before, comparison.after) if each is not None]
    names = list(dict.fromkeys(name for side in sides for name in side))
    names.sort(key=lambda name: len({_said(side.get(name)) for side in sides}) == 1)
    rows = tuple((name, *(_said(side.get(name)) for side in sides)) for name in names)
    return Table("Settings", ("setting", "before", "after")[: 1 + len(sides)], rows, numbers=())


def _said(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "on" if value else "off"
        case list() | tuple():
            return ", ".join(map(str, value))
    return str(value)
