"""What there is, and a run as one file: `bench variants`, `engines`, `devices`, `doctor`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from engines import api
from harness.cli.options import (
    OUTPUT,
    Debug,
    option,
)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[
        Path, option(OUTPUT, "File to write: .html, or .md for a pull request (report.html).", "-o", "--out")
    ] = Path("report.html"),
    debug: Debug = False,
) -> None:
    """Write what a run found as one file: a web page that needs nothing else, or markdown."""
    from harness.report import html as reports

    reports.write(run, out)
    sys.stdout.write(f"{out}\n")


def variants(
    name: Annotated[str | None, typer.Argument(help="One variant, in full.", show_default=False)] = None,
) -> None:
    """The named before/after pairs: what each changes, its source, and what to expect where."""
    from harness.cli import listings
    from harness.common.consoles import Console
    from harness.plan.variants import load_variants

    found, console = load_variants(), Console(highlight=False)
    if name is None:
        console.print(listings.variants(found, console.width))
    else:
        chosen = api.pick(name, found, "variant")
        console.print(listings.variant(chosen, api.find_engines(), console.width))


def engines(
    name: Annotated[str | None, typer.Argument(help="One engine instead of all.", show_default=False)] = None,
) -> None:
    """Every installed engine, or one, and its toggles."""
    from harness.cli import listings
    from harness.common.consoles import Console

    found = api.find_engines()
    chosen = found if name is None else {name: api.pick(name, found, "engine")}
    console = Console(highlight=False)
    console.print(*listings.engines(chosen, console.width), sep="\n")


def devices() -> None:
    """What an engine can run on, and the profiles that --pace knows."""
    from harness.cli import listings
    from harness.common.consoles import Console

    console = Console(highlight=False)
    console.print(*listings.devices(api.profiles(), console.width), sep="\n")


def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from harness.cli import listings
    from harness.common.consoles import Console
    from harness.studies import doctor as checks

    console = Console(highlight=False)
    console.print(listings.checkup(checks.examine(), console.width))
