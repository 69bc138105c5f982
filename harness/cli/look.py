"""Look closely: `bench profile`, `trace`, `explain`, `report`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from overlap_bench.engines import api
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.options import (
    OF_A_LINE,
    OF_A_VERDICT,
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    argument,
    measuring,
    option,
)
from overlap_bench.harness.cli.printing import Format, say
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design

if TYPE_CHECKING:
    from overlap_bench.harness.trace.result import TraceResult

PROFILE = "Profile"
AllTables = Annotated[
    bool, option(OUTPUT, "Print every table, behind the summary (json and csv have all).", "--all")
]


class GraphTrace(StrEnum):
    GRAPH = "graph"
    NODE = "node"


@partial(measuring, without=OF_A_VERDICT)
def profile(
    request: Request,
    steps: Annotated[int | None, option(PROFILE, "Steps of the window (24).")] = None,
    nsys: Annotated[
        str | None, option(PROFILE, "Path of nsys, if it is not on PATH or there is no GPU.")
    ] = None,
    graph_trace: Annotated[
        GraphTrace | None,
        option(PROFILE, "nsys: a row per CUDA graph, or per node of it, which slows it down (graph)."),
    ] = None,
    out: Out = RESULTS,
    all_tables: AllTables = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Look closely at a short window of steady decode: a timeline of each arm, a picture, and with nsys its
    reports. Where time goes, not how much: profiled times are never compared."""
    from overlap_bench.harness.common.machine import guess_device
    from overlap_bench.harness.plan.variants import load_variants

    design = make_design(request, api.find_engines(), load_variants(), guess_device)

    from overlap_bench.harness.studies import profile as profiling

    profiling.check(steps)
    wanted = profiling.STEPS if steps is None else steps
    graph = (graph_trace or GraphTrace.GRAPH).value
    device = design.arms[0].options.device
    found = profiling.find_nsys(nsys, guess_device() if device == "auto" else device)
    if found is None and graph_trace is not None:
        raise api.BadSetting("--graph-trace applies only with nsys; give --nsys PATH")
    tool = None if found is None else profiling.Nsys(found, graph)
    traces, picture = profiling.profile(design, wanted, tool, out, say)
    _show(_read(traces, of_profile=True), all_tables, format)
    say(f"the picture is {picture}; the traces open in ui.perfetto.dev")


@partial(measuring, without=OF_A_LINE)
def sensitivity(
    request: Request,
    phases: Annotated[
        list[str] | None, option(PROFILE, "Phases to delay; once for each (all).", "--phase", metavar="PHASE")
    ] = None,
    saves: Annotated[
        list[str] | None,
        option(PROFILE, "What a step gains if PHASE takes so much less.", metavar="PHASE=13us"),
    ] = None,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Find where the next microsecond pays: how much longer a step gets for a known delay in each of its host
    phases. Of a variant, its before arm is measured. In a trial, one fresh engine takes turns with and
    without a delay."""
    from overlap_bench.harness.common.machine import guess_device
    from overlap_bench.harness.plan.variants import load_variants
    from overlap_bench.harness.studies import sensitivity as study

    if (arrival := request.workload.get("arrival", "closed")) not in ("closed", "burst"):
        raise api.BadSetting(
            f"--arrival {arrival}: steps of one batch are measured; give --concurrency in place of it"
        )
    design = make_design(request, api.find_engines(), load_variants(), guess_device)
    if len(design.arms) > 1:
        say(f"of {design.name}: its before arm")
    found = study.measure(design, phases or (), study.parse_savings(saves or ()), out, say)
    printing.show(found, format)

    from overlap_bench.harness.report.figures import delays

    picture = out / found.run / "sensitivity.png"
    delays.sensitivity(found).savefig(picture)
    say(f"the picture is {picture}")


def trace(
    files: Annotated[
        list[Path],
        argument(
            "SQLite export of nsys, or Chrome trace (.json, .json.gz); two: before and after.",
            metavar="FILE...",
        ),
    ],
    all_tables: AllTables = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Where the time goes in a trace: what takes most or changed most; with --all: busy and idle, ranges, API
    calls, copies, synchronizations, kernels, launches, gaps."""
    if len(files) > 2:
        raise api.BadSetting(f"trace takes one file, or two as before and after, not {len(files)}")
    _show(_read(files), all_tables, format)


def _show(found: TraceResult, all_tables: bool, format: Format) -> None:
    """Print it: for people its summary, unless all tables are asked for."""
    from overlap_bench.harness.trace.result import Brief

    brief = not all_tables and format in (Format.TABLE, Format.MARKDOWN)
    printing.show(Brief(found) if brief else found, format)


def _read(files: Sequence[Path], of_profile: bool = False) -> TraceResult:
    """What is in the trace of one arm, or of a before and an after."""
    from overlap_bench.harness.cli.progress import of_reading
    from overlap_bench.harness.trace import analysis, trace_file
    from overlap_bench.harness.trace.result import Analysed, result

    analysed: list[Analysed] = []
    with interruptible(), of_reading() as progress:
        for file in files:
            found = trace_file.read(file, progress)
            analysed.append((found, analysis.analyse(found, progress)))
    return result(analysed[0], analysed[1] if len(files) == 2 else None, of_profile)


def explain(
    run: Annotated[Path, argument("Folder of a finished run.")],
    sensitivity: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Folder of bench sensitivity on the before arm: adds the change that it predicts.",
            metavar="FOLDER",
        ),
    ] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Where the time of a decode step goes, what made late requests late, and what the toggle should have
    gained."""
    from overlap_bench.harness.analysis.explain import explain as explain_run

    printing.show(explain_run(run, sensitivity), format)


def report(
    run: Annotated[Path, argument("Folder of a finished run.")],
    out: Annotated[
        Path | None,
        option(OUTPUT, "File to write: .html, or .md for a pull request (RUN/report.html).", "-o", "--out"),
    ] = None,
    opened: Annotated[bool, option(OUTPUT, "Open it in a browser.", "--open")] = False,
    debug: Debug = False,
) -> None:
    """Write what a run found as one file: a web page that needs nothing else, or markdown."""
    from overlap_bench.harness.report import html as reports

    written = reports.write(run, out)
    sys.stdout.write(f"{written}\n")
    if opened and not _open(written):
        say("there is no browser, or no display to show it on: open the file where there is")


def _open(page: Path) -> bool:
    """Whether a browser shows it. Without a display it could only be one in this terminal, in the way."""
    import webbrowser

    displays = [name for name in ("DISPLAY", "WAYLAND_DISPLAY") if os.environ.get(name)]
    return bool(displays) and webbrowser.open(page.resolve().as_uri())
