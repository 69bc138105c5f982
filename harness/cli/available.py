"""What there is, and on which machine: `bench variants`, `engines`, `devices`, `doctor`."""

from __future__ import annotations

from typing import Annotated

from engines import api
from harness.cli.options import argument


def variants(name: Annotated[str | None, argument("One variant, in full.")] = None) -> None:
    """The named before/after pairs: what each changes and its source; of one, also what to expect where."""
    from harness.cli import listings
    from harness.common.consoles import Console
    from harness.plan.variants import load_variants

    found, screen = load_variants(), Console()
    if name is None:
        screen.print(listings.variants(found))
    else:
        chosen = api.pick(name, found, "variant")
        screen.print(listings.variant(chosen, api.find_engines(), screen.width))


def engines(name: Annotated[str | None, argument("One engine instead of all.")] = None) -> None:
    """Every installed engine, or one, and its toggles."""
    from harness.cli import listings
    from harness.common.consoles import Console

    found, screen = api.find_engines(), Console()
    chosen = found if name is None else {name: api.pick(name, found, "engine")}
    screen.print(*listings.engines(chosen), sep="\n")


def devices() -> None:
    """What an engine can run on, and the profiles that --pace knows."""
    from harness.cli import listings
    from harness.common.consoles import Console

    Console().print(*listings.devices(api.profiles()), sep="\n")


def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from harness.cli import listings
    from harness.cli.options import RESULTS
    from harness.common.consoles import Console
    from harness.studies import doctor as checks

    screen = Console()
    screen.print(listings.checkup(checks.examine(RESULTS), screen.width))
