"""What `bench variants`, `engines`, `devices` and `doctor` print, for a rich console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overlap_bench.engines import api
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.plan.variants import Variant
from overlap_bench.harness.report.page import room_for

if TYPE_CHECKING:
    from overlap_bench.harness.studies.doctor import Finding


def variants(found: Mapping[str, Variant], engine: str) -> RenderableType:
    """What each of one engine changes, by which toggles, and who said so; which other engines have some."""
    shown = {name: each for name, each in found.items() if each.engine == engine}
    lines = Table.grid(padding=(0, 2))
    lines.add_column(max_width=max(map(len, shown), default=0))
    lines.add_column()
    for name, each in shown.items():
        changed = ", ".join([*each.changes, *each.before_options])
        lines.add_row(
            Text.assemble((name, "bold"), "\n", (changed, "dim")),
            Text.assemble(each.title, "\n", (f"from {each.source}", "dim")),
        )
    more = (
        "\nBelow a name: its toggles. bench variants NAME shows all, with its code; bench run --variant NAME "
        "measures it"
    )
    for other in sorted({each.engine for each in found.values()} - {engine}):
        more += f"\nbench variants --engine {other} lists those of {other}"
    return Group(lines, Text(more))


def variant(each: Variant, engines: Mapping[str, api.EngineSpec], width: int) -> RenderableType:
    """Everything about one, for a terminal of `width` columns: settings of both arms, what its toggles do,
    workload, claim, expectations. Raises BadSetting where its settings mean nothing."""
    spec = api.pick(each.engine, engines, "engine")
    before, after = spec.check(each.before), spec.check(each.after)
    facts = [("changes", each.title), ("source", each.source), ("claim", each.claim)]
    toggles = [spec.toggle(name) for name in each.changes]
    facts += [(toggle.name, toggle.changes) for toggle in toggles]
    if code := [f"{toggle.module.replace('.', '/')}.py" for toggle in toggles if toggle.module]:
        facts.append(("code", ", ".join(code)))
    for toggle in toggles:
        if toggle.rewritten:
            said = f"{toggle.name}={toggle.rewritten}; its verdict is none on {toggle.source} itself"
            facts.append(("our rewriting", said))
    facts.append(("before", spelled({**before, **each.before_options})))
    facts.append(("after", spelled({**after, **each.after_options})))
    if each.workload:
        facts.append(("workload", spelled(each.workload)))
    if each.options:
        facts.append(("options", spelled(each.options)))
    if each.phase:
        facts.append(("its own phase", each.phase))
    if each.secondaries:
        facts.append(("also judged", ", ".join(each.secondaries)))
    facts += [(f"expected on {device}", verdict) for device, verdict in each.expect.items()]
    return Group(Text(each.name, style="bold"), _table(("", ""), facts, width))


def engines(found: Mapping[str, api.EngineSpec]) -> Iterator[RenderableType]:
    """Each engine with its toggles and settings."""
    for spec in found.values():
        yield Text(f"{spec.name}: {spec.summary}" + (f" (needs {spec.needs})" if spec.needs else ""))
        if spec.toggles:
            yield Text("\nToggles, the before first", style="bold")
            yield _entries({each.name: _told(each) for each in spec.toggles})
        if spec.settings:
            yield Text("\nSettings", style="bold")
            yield _entries(
                {
                    each.name: Text(each.summary + (f" ({each.default})" if each.default else ""))
                    for each in spec.settings
                }
            )
        yield Text("")


def _told(toggle: api.Toggle) -> Text:
    said = (f"; from {toggle.source}", "dim")
    return Text.assemble(", ".join(toggle.choices), "\n", toggle.changes, said)


def devices(profiles: Mapping[str, api.PaceProfile]) -> Iterator[RenderableType]:
    """Each device, and the emulated one's profiles: paragraphs, as sources are sentences."""
    yield Text("cuda: a card, by torch.cuda (--device cuda, or auto where there is one)")
    yield Text("emulated: a second process that computes on a core of its own (--device emulated)")
    yield Text("emulated, paced: the same, and its programs take as long as --pace says: 10ms,")
    yield Text("decode=10ms+0.05ms*batch,prefill=80us*tokens, a file of bench pace record, or one of")
    for name, each in profiles.items():
        yield Text(f"\n{name}", style="bold")
        for line in (each.summary, f"decode {each.decode}, prefill {each.prefill}", each.source):
            yield Padding(Text(line), (0, 0, 0, 2))
    assumed: dict[str, list[str]] = {}
    for name, each in profiles.items():
        assumed.setdefault(_driver_and_host(each), []).append(name)
    for said, names in assumed.items():
        yield Text(
            f"\nDriver and host of {'all of them' if len(assumed) == 1 else ', '.join(names)}", style="bold"
        )
        yield Padding(Text(said), (0, 0, 0, 2))


def _driver_and_host(each: api.PaceProfile) -> str:
    """The ledger, and what k is relative to, with this machine's k."""
    guessed = {name: " (assumed)" if name in each.assumed else "" for name in ("ledger", "host")}
    k = f"{api.host_k(each.host_ns):.2f}"
    return (
        f"A driver's calls{guessed['ledger']}: {each.ledger.text.replace(',', ', ')}. {each.ledger_source}\n"
        f"Host{guessed['host']}: {each.host}\n"
        f"k = {k}: Python takes {k} times as long here, measured now. --pace NAME*k stretches a device's "
        "times by it"
    )


def checkup(findings: Sequence[Finding], width: int) -> RenderableType:
    """One line per finding, with a remedy where something would spoil a measurement, for a terminal of
    `width` columns."""
    fine, spoils = Text("ok", style="green"), Text("warn", style="yellow")
    rows = [(fine if each.fine else spoils, each.what, each.found, each.remedy) for each in findings]
    return _table(("", "", "found", "remedy"), rows, width)


def _entries(found: Mapping[str, Text]) -> RenderableType:
    """Names, and beside each what is told of it, in lines under each other: in columns of their own, none
    would have the room."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column()
    for name, told in found.items():
        lines.add_row(Text(name, style="bold"), told)
    return lines


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
