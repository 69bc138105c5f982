"""What `bench variants`, `engines`, `devices` and `doctor` print, for a rich console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engines import api
from harness.plan.settings import spelled
from harness.plan.variants import Variant
from harness.report.page import room_for

if TYPE_CHECKING:
    from harness.studies.doctor import Finding


def variants(found: Mapping[str, Variant]) -> RenderableType:
    """What each changes and who said so, under each other: side by side, neither would have the room."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column()
    for name, each in found.items():
        said = Text.assemble(each.title, "\n", (f"from {each.source}", "dim"))
        lines.add_row(Text(name, style="bold"), said)
    more = "\nbench variants NAME shows one in full; bench run --variant NAME measures it"
    return Group(lines, Text(more))


def variant(each: Variant, engines: Mapping[str, api.EngineSpec], width: int) -> RenderableType:
    """Everything about one, for a terminal of `width` columns: settings of both arms, what its toggles do,
    workload, claim, expectations. Raises BadSetting where its settings mean nothing."""
    spec = api.pick(each.engine, engines, "engine")
    before, after = spec.check(each.before), spec.check(each.after)
    facts = [("changes", each.title), ("source", each.source), ("claim", each.claim)]
    facts += [(name, spec.toggle(name).changes) for name in each.changes]
    facts += [("before", spelled(before)), ("after", spelled(after))]
    if each.workload:
        facts.append(("workload", spelled(each.workload)))
    if each.options:
        facts.append(("options", spelled(each.options)))
    if each.secondaries:
        facts.append(("also judged", ", ".join(each.secondaries)))
    facts += [(f"expected on {device}", verdict) for device, verdict in each.expect.items()]
    return Group(Text(each.name, style="bold"), _table(("", ""), facts, width))


def engines(found: Mapping[str, api.EngineSpec], width: int) -> Iterator[RenderableType]:
    """Each engine with its toggles, for a terminal of `width` columns; so below."""
    for spec in found.values():
        yield Text(f"{spec.name}: {spec.summary}" + (f" (needs {spec.needs})" if spec.needs else ""))
        if spec.toggles:
            rows = [(each.name, ", ".join(each.choices), each.changes, each.source) for each in spec.toggles]
            yield _table(("toggle", "choices, the before first", "changes", "source"), rows, width)
        if spec.settings:
            settings = [(each.name, each.default, each.summary) for each in spec.settings]
            yield _table(("setting", "default", "meaning"), settings, width)


def devices(profiles: Mapping[str, api.PaceProfile]) -> Iterator[RenderableType]:
    """Each device, and the emulated one's profiles: paragraphs, as sources are sentences."""
    yield Text("cuda: a card, by torch.cuda (--device cuda, or auto where there is one)")
    yield Text("emulated: a second process that computes on a core of its own (--device emulated)")
    yield Text("emulated, paced: the same, and its programs take as long as --pace says: 10ms,")
    yield Text("decode=10ms+0.05ms*batch,prefill=80us*tokens, or one of")
    for name, each in profiles.items():
        yield Text(f"\n{name}", style="bold")
        for line in (each.summary, f"decode {each.decode}, prefill {each.prefill}", each.source):
            yield Padding(Text(line), (0, 0, 0, 2))


def checkup(findings: Sequence[Finding], width: int) -> RenderableType:
    """One line per finding, with a remedy where something would spoil a measurement."""
    fine, spoils = Text("ok", style="green"), Text("warn", style="yellow")
    rows = [(fine if each.fine else spoils, each.what, each.found, each.remedy) for each in findings]
    return _table(("", "", "found", "remedy"), rows, width)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    from rich.box import SIMPLE_HEAD

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    cells = [[str(cell) for cell in row] for row in rows]
    room = room_for(columns, cells, width) or [None] * len(columns)
    for column, its_room in zip(columns, room, strict=True):
        table.add_column(column, overflow="fold", width=its_room)
    for row in rows:
        table.add_row(*row)
    return table
