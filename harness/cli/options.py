"""The options that commands share. What a measurement can be told is declared once, in the structs that hold
it (Request, Workload, EngineOptions, Design): a field with a description is an option, and that is its help.
Most are an experimenter's: `--help` shows those marked as first, `--help-all` every one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgspec
import typer

from overlap_bench.engines import api
from overlap_bench.harness.cli.printing import Format, say
from overlap_bench.harness.common import names
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.request import GateRequest, Request
from overlap_bench.harness.plan.settings import parse_fraction, parse_goodput
from overlap_bench.harness.store.trust import Admit, admit
from overlap_bench.harness.workload.workload import LENGTHS, Workload

if TYPE_CHECKING:
    from overlap_bench.harness.studies.measure import Source

WORKLOAD, ENGINE, DESIGN, OUTPUT = "Workload", "Engine, both arms", "Design", "Output"
CLUSTER = "Cluster"
GENERAL = ("variant", "engine", "both", "before", "after")  # of a Request, under no title
# The options of the command line, in the order of the help.
PARTS: dict[type[msgspec.Struct], str] = {
    Request: DESIGN,
    Workload: WORKLOAD,
    api.EngineOptions: ENGINE,
    Design: DESIGN,
}
PANELS: dict[type[msgspec.Struct], str] = {**PARTS, GateRequest: "Gate"}


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option under the title `panel` of the help; `text` itself states the default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def argument(text: str, **more: Any) -> Any:
    return typer.Argument(help=text, show_default=False, **more)


Out = Annotated[Path, option(OUTPUT, "Folder that gets the run's folder (results).")]
Form = Annotated[Format, option(OUTPUT, "table, markdown, json or csv (table).")]
Debug = Annotated[bool, option(OUTPUT, "Print a traceback with an error.", "--debug")]
Trust = Annotated[
    bool,
    option(OUTPUT, "Go on with a folder that this machine has not signed, whatever it lists.", "--trust"),
]
Whole = Annotated[
    bool, option(OUTPUT, "Print more than a screen: further metrics, all counters and warnings.", "--all")
]
Cluster = Annotated[
    str | None,
    option(
        CLUSTER,
        "Measure on the nodes of this Ray cluster: its address, auto, or local.",
        "--ray",
        metavar="ADDRESS",
    ),
]
NodesAtOnce = Annotated[int | None, option(CLUSTER, "Trials under way at once (one on each node).")]
RESULTS = Path("results")


@cache
def declared(kind: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """The options that a struct declares: each field with a description, None where it is not given; hidden
    where the field is not marked as one of the first."""
    found = []
    for field in msgspec.structs.fields(kind):
        if get_origin(field.type) is not Annotated:
            continue
        bare, meta = get_args(field.type)
        more = dict(meta.extra or {})
        flags = [more["flag"]] if "flag" in more else []
        typed: Any = str if more.get("share") else _typed(bare)
        if typed is bool:
            name = field.name.replace("_", "-")
            can_be_off = kind in (Workload, api.EngineOptions) and field.name != "unique_prompts"
            flags = [f"--{name}/--no-{name}" if can_be_off else f"--{name}"]
        metavar = "LENGTH" if field.name in LENGTHS else more.get("metavar")
        panel = None if kind is Request and field.name in GENERAL else PANELS[kind]
        told = option(panel, meta.description, *flags, metavar=metavar, hidden="first" not in more)
        annotation = Annotated[typed | None, told]
        found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return tuple(found)


def _typed(bare: Any) -> Any:
    """The type of an option on the command line: texts for lengths and limits, lists for what repeats."""
    if get_origin(bare) in (list, tuple, dict):
        return list[str]
    if isinstance(bare, UnionType):
        choices = [each for each in get_args(bare) if each is not type(None)]
        return choices[0] if len(choices) == 1 else str
    return bare


def request_of(values: Mapping[str, object]) -> Request:
    parts = {kind: given(kind, values) for kind in PARTS}
    return Request(
        **parts[Request], workload=parts[Workload], options=parts[api.EngineOptions], design=parts[Design]
    )


def given(kind: type[msgspec.Struct], values: Mapping[str, object]) -> dict[str, Any]:
    """What the options of `declared` were given, those alone."""
    return {
        field.name: _value(field, values[field.name])
        for field in msgspec.structs.fields(kind)
        if get_origin(field.type) is Annotated and values.get(field.name) not in (None, [])
    }


def _value(field: msgspec.structs.FieldInfo, value: Any) -> Any:
    bare, meta = get_args(field.type)
    more = meta.extra or {}
    if more.get("share"):
        return parse_fraction(value, more.get("flag", "--" + field.name.replace("_", "-")))
    if field.name == "goodput":
        return parse_goodput(value)
    if more.get("metavar") == "METRIC":
        value = names.of_today(value) if isinstance(value, str) else list(map(names.of_today, value))
    return tuple(value) if get_origin(bare) is tuple else value


# Options that mean nothing to some commands. What decides a comparison: a profile decides nothing.
OF_A_VERDICT = (
    "blocks", "until_decided", "until_precision", "max_blocks", "max_minutes", "plant", "plant_at", "rounds",
    "margin", "primary", "secondaries", "goodput", "segments",
)  # fmt: skip
# What means nothing to delays in one engine.
OF_A_LINE = (*(each for each in OF_A_VERDICT if each != "blocks"), "before", "after")
# What needs a before and an after: a factorial's toggles say what differs, and its block count is fixed.
OF_TWO_ARMS = (
    "variant", "before", "after", "until_decided", "until_precision", "max_blocks", "plant", "plant_at",
    "secondaries",
)  # fmt: skip
# What means nothing to a search among commits: its arms are refs, its metric is one, and it ends by itself.
OF_A_PAIR = (
    *(each for each in OF_A_VERDICT if each not in ("rounds", "margin", "goodput", "segments")),
    "variant", "before", "after",
)  # fmt: skip
# What only a measurement needs: an evaluation asks tasks, and times nothing.
OF_A_MEASUREMENT = (
    *OF_A_VERDICT, *(each.name for each in declared(Workload)), "warmup_rounds", "seed", "tokenize_workers",
)  # fmt: skip


def _show_all(context: typer.Context, asked: bool) -> None:
    """Print the help with every option of the command, and end."""
    if asked:
        for each in context.command.params:
            each.hidden = False  # type: ignore[attr-defined]
        context.get_help()
        raise typer.Exit()


HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        option(
            None,
            "Show all options, the rarer ones too.",
            "--help-all",
            is_eager=True,
            callback=_show_all,
        ),
    ],
)


def measuring(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """`command(request, ...)` with `request` replaced by the options that make one, ahead of its own options
    and `without` those that mean nothing to it. Another struct of options is replaced in the same way."""
    _, *own = signature(command, eval_str=True).parameters.values()
    options = [each for kind in PARTS for each in declared(kind) if each.name not in without]
    more = {each.name: each.annotation for each in own if each.annotation in PANELS}

    @wraps(command)
    def with_options(**values: Any) -> None:
        del values[HELP_ALL.name]
        request = request_of({each.name: values.pop(each.name) for each in options})
        for name, kind in more.items():
            values[name] = kind(**given(kind, {each.name: values.pop(each.name) for each in declared(kind)}))
        with interruptible():
            command(request, **values)

    after = [one for each in own for one in (declared(more[each.name]) if each.name in more else (each,))]
    joined = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*options, *after, HELP_ALL)]
    with_options.__signature__ = Signature(joined)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in joined}
    return with_options


def source_of(cluster: str | None, nodes_at_once: int | None, trusted: bool = False) -> Source:
    """What measures the trials: this machine, or the nodes of a cluster."""
    check_cluster(cluster, nodes_at_once, trusted)
    if cluster is None:
        from overlap_bench.harness.studies.measure import trials

        return trials

    from overlap_bench.harness.run.cluster import driver

    return partial(driver.measure, address=cluster, nodes_at_once=nodes_at_once)


def check_cluster(cluster: str | None, nodes_at_once: int | None, trusted: bool) -> None:
    """Raises BadSetting for what can't be asked of one."""
    if nodes_at_once is not None and (cluster is None or nodes_at_once < 1):
        raise api.BadSetting("--nodes-at-once is a number of nodes, at least 1, of a cluster: --ray")
    if cluster is not None and trusted:
        # What is withheld from it here (store/trust.py) lies in the environment of each node.
        raise api.BadSetting(
            "--trust goes with this machine: nodes can't keep their keys from a stranger's run"
        )


def admitting(trusted: bool, stored: Path | None) -> Admit:
    """What is asked before a stored run says what is started."""
    if trusted and stored is None:
        raise api.BadSetting("--trust is for what a folder or a file says: what you ask for here needs none")
    return partial(admit, trusted=trusted, say=say)
