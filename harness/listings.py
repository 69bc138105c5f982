"""What `bench variants`, `bench engines` and `bench doctor` print, for a rich console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engines import api
from harness.settings import spelled
from harness.variants import Variant

if TYPE_CHECKING:
    from harness.doctor import Finding


def variants(found: Mapping[str, Variant]) -> RenderableType:
    """One row per variant."""
    table = _table("variant", "what it changes", "source", "expected")
    for name, each in found.items():
        expected = "\n".join(f"{device}: {verdict}" for device, verdict in each.expect.items())
        table.add_row(name, each.title, each.source, expected)
    return Group(table, Text("bench variants NAME shows one in full; bench run --variant NAME measures it"))


def variant(each: Variant, engines: Mapping[str, api.EngineSpec]) -> RenderableType:
    """Everything about one: settings of both arms, what its toggles do, workload, claim, expectations."""
    facts = _table("", "")
    facts.show_header = False
    facts.add_row("changes", each.title)
    facts.add_row("source", each.source)
    facts.add_row("claim", each.claim)
    spec = api.pick(each.engine, engines, "engine")
    for name in each.changes:
        facts.add_row(name, spec.toggle(name).changes)
    facts.add_row("before", spelled(each.before))
    facts.add_row("after", spelled(each.after))
    if each.workload:
        facts.add_row("workload", spelled(each.workload))
    if each.options:
        facts.add_row("options", spelled(each.options))
    for device, verdict in each.expect.items():
        facts.add_row(f"expected on {device}", verdict)
    return Group(Text(each.name, style="bold"), facts)


def engines(found: Mapping[str, api.EngineSpec]) -> Iterator[RenderableType]:
    """Each engine with its toggles."""
    for spec in found.values():
        yield Text(f"{spec.name}: {spec.summary}" + (f" (needs {spec.needs})" if spec.needs else ""))
        if spec.toggles:
            table = _table("toggle", "choices, the before first", "changes", "source")
            for toggle in spec.toggles:
                table.add_row(toggle.name, ", ".join(toggle.choices), toggle.changes, toggle.source)
            yield table
        if spec.settings:
            table = _table("setting", "default", "what it says")
            for setting in spec.settings:
                table.add_row(setting.name, setting.default, setting.says)
            yield table


def checkup(findings: Sequence[Finding]) -> RenderableType:
    """One line per finding, with a remedy where something would spoil a measurement."""
    table = _table("", "", "found", "remedy")
    for each in findings:
        mark = Text("ok", style="green") if each.fine else Text("warn", style="yellow")
        table.add_row(mark, each.what, each.found, each.remedy)
    return table


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
