"""What there is, and on which machine: `bench variants`, `engines`, `devices`, `doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from overlap_bench.engines import api
from overlap_bench.harness.cli.options import OUTPUT, argument, option
from overlap_bench.harness.cli.printing import Format

CLAIMS = "With --claims"


def variants(
    name: Annotated[str | None, argument("One variant, in full.")] = None,
    engine: Annotated[
        str | None, option(OUTPUT, "Whose variants, where none is named (overlap).", "--engine")
    ] = None,
    claims: Annotated[
        bool, option(OUTPUT, "Each claim beside what was measured of it, in one table.", "--claims")
    ] = False,
    results: Annotated[
        Path | None, option(CLAIMS, "Folder that holds what was measured (results/reference).")
    ] = None,
    format: Annotated[Format | None, option(CLAIMS, "table, markdown, json or csv (table).")] = None,
    out: Annotated[
        Path | None, option(CLAIMS, "Write a web page whose columns sort, .html.", "-o", "--out")
    ] = None,
) -> None:
    """The named before/after pairs: what each changes and its source; of one, also what to expect where."""
    from overlap_bench.harness.plan.variants import load_variants

    found = load_variants()
    if name is not None:
        api.pick(name, found, "variant", "bench variants")
    if engine is not None and (claims or name is not None):
        raise api.BadSetting("--engine chooses what is listed: leave it out with a name, and with --claims")
    if claims:
        _show_claims(name, results, format, out)
        return
    if (results, format, out) != (None, None, None):
        raise api.BadSetting("--results, --format and -o apply only with --claims")
    from overlap_bench.harness.cli import listings
    from overlap_bench.harness.common.consoles import Console

    screen = Console()
    if name is None:
        asked: api.EngineSpec = api.pick(engine or "overlap", api.find_engines(), "engine")
        screen.print(listings.variants(found, asked.name))
    else:
        screen.print(listings.variant(found[name], api.find_engines(), screen.width))


def _show_claims(name: str | None, results: Path | None, format: Format | None, out: Path | None) -> None:
    from overlap_bench.harness.cli import printing
    from overlap_bench.harness.report import catalogue_tables
    from overlap_bench.harness.studies import catalogue

    if out is not None and (format is not None or out.suffix.lower() != ".html"):
        raise api.BadSetting("-o takes a web page: end it in .html, and leave --format out")
    if results is not None and not results.is_dir():
        raise api.BadSetting(f"{results} is no folder with results")
    found = catalogue.catalogue_of(results, name)
    if out is None:
        printing.show(found, format or Format.TABLE)
    else:
        catalogue_tables.write(found, out)
        sys.stdout.write(f"{out}\n")


def engines(name: Annotated[str | None, argument("One engine instead of all.")] = None) -> None:
    """Every installed engine, or one, and its toggles."""
    from overlap_bench.harness.cli import listings
    from overlap_bench.harness.common.consoles import Console

    found, screen = api.find_engines(), Console()
    chosen = found if name is None else {name: api.pick(name, found, "engine")}
    screen.print(*listings.engines(chosen), sep="\n")


def devices() -> None:
    """What an engine can run on, and the profiles that --pace knows."""
    from overlap_bench.harness.cli import listings
    from overlap_bench.harness.common.consoles import Console

    Console().print(*listings.devices(api.profiles()), sep="\n")


def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from overlap_bench.harness.cli import listings
    from overlap_bench.harness.cli.options import RESULTS
    from overlap_bench.harness.common.consoles import Console
    from overlap_bench.harness.studies import doctor as checks

    screen = Console()
    screen.print(listings.checkup(checks.examine(RESULTS), screen.width))
