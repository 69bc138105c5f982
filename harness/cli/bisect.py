"""Find the commit that changed a metric: `bench bisect`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from overlap_bench.engines import api
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.options import (
    OF_A_PAIR,
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    Trust,
    admitting,
    argument,
    measuring,
    option,
)
from overlap_bench.harness.cli.printing import NO_CULPRIT, Format, say
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.plan.request import Request

BISECT = "Bisect"


@partial(measuring, without=OF_A_PAIR)
def bisect(
    request: Request,
    folder: Annotated[Path | None, argument("A bisection to show again.", metavar="[BISECTION]")] = None,
    good: Annotated[str | None, option(BISECT, "Git ref before the change.", metavar="REF")] = None,
    bad: Annotated[str | None, option(BISECT, "Git ref since the change.", metavar="REF")] = None,
    history: Annotated[
        Path | None,
        option(BISECT, "Take both, and the metric, from this file of bench gate --history."),
    ] = None,
    metric: Annotated[str | None, option(BISECT, "Metric that changed (the primary of a gate).")] = None,
    max_minutes: Annotated[float | None, option(BISECT, "Start no trial that would end later (60).")] = None,
    overlay: Annotated[
        list[str] | None,
        option(BISECT, "Files that a build left in your checkout, for every commit.", metavar="PATTERN"),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a bisection to go on with.")] = None,
    trust: Trust = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Find which commit made a metric a few per cent worse, or better. Good and bad are measured first: do
    they differ, and how long will it take? Then each trial measures one commit more beside them, the one that
    is expected to tell most, until one is the culprit with 95% probability. Exit code 0: a commit is named;
    3: none is."""
    given = good is not None or bad is not None or history is not None or metric is not None or overlay
    if (folder or resume) and (given or not request.nothing):
        raise api.BadSetting(f"{folder or resume} says what is bisected: leave the other options out")
    if folder and (resume or trust or max_minutes is not None):
        raise api.BadSetting(f"{folder} is shown as it is; to go on with it: --resume {folder}")
    if max_minutes is not None and not 0 < max_minutes < float("inf"):
        raise api.BadSetting(f"--max-minutes must be above 0, not {max_minutes:g}")

    from overlap_bench.harness.report import bisection_tables
    from overlap_bench.harness.studies import bisect as study

    if folder is not None:
        found = study.read(folder)
    else:
        admit = admitting(trust, resume)
        if resume is not None:
            stored = study.resumed(resume, admit)
        else:
            if history is not None:
                if good is not None or bad is not None:
                    raise api.BadSetting("--history says what is good and bad: leave --good and --bad out")
                metric, good, bad = study.span_of(history, metric and of_today(metric))
            if good is None or bad is None:
                raise api.BadSetting("say between which commits: --good REF --bad REF, or --history FILE")
            request = msgspec.structs.replace(request, overlay=tuple(overlay or ()))
            resume, stored = study.begin(request, good, bad, metric and of_today(metric), out)
        found = study.measure(resume, stored, max_minutes or study.MINUTES, say)
        say(f"the page is {bisection_tables.write(resume, found)}")
    printing.show(found, format)
    raise typer.Exit(0 if found.verdict == "found" else NO_CULPRIT)
