"""The experiments of experiments/*.toml: what a source reported, what is run to see it, and what is shown.

Data, not code, and strict: an unknown key, an arm that does not exist or a metric that is not measured gives
a one-line error that offers the nearest name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import harness
from engines import api
from harness import metrics
from harness.design import Arm, Design
from harness.settings import DEVICES, make_arm, make_workload
from harness.variants import Variant
from harness.workload import Workload

COLUMN_KINDS = ("option", "value", "percentiles", "change", "share", "outputs", "reported")
FEWEST_BLOCKS = 4  # under which an interval is too wide to lay beside any claim
KINDS = tuple(each for each in DEVICES if each != "auto")
SIDES = ("before", "after")
TIMES = ("us", "ms", "s")
OWN_METRIC = "metric"  # in a column: the metric that its row names

Values = dict[str, str | int | float | bool | None]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who said what, and of which hardware."""

    name: str
    link: str = ""
    hardware: str = ""
    reported: list[str] = []


class ArmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An arm: one side of a named variant ("copy-done:before"), or an engine with toggles; then the
    changes to it."""

    variant: str = ""
    engine: str = ""
    toggles: dict[str, str] = {}
    options: Values = {}


class Scaled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the emulated device does in place of what the source did."""

    rounds: int | None = None
    options: Values = {}
    workloads: dict[str, Values] = {}
    why: str = ""


class Boots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of boots: each arm on each workload. The workloads take turns within a boot.

    A workload has the options of the command line, and `idle_stops`: that many stop strings that no output
    ever matches, which is work for the host at each token. `margin`: the largest change that counts as none,
    as a fraction; the first claim must be beyond it, or exactly what is claimed could be called same.
    """

    arms: dict[str, ArmSettings]
    workloads: dict[str, Values]
    options: Values = {}
    blocks: int = 6
    rounds: int = 2
    margin: float = 0.01
    primary: str = "tpot_ms_p50"
    emulated: Scaled = Scaled()


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a table, once for each workload: an arm, and the one it is compared with; or a metric.
    `reported`: what the source has there."""

    label: str
    arm: str = ""
    before: str = ""
    metric: str = ""
    reported: str = ""


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of: an `option` of the workload; the `value` of a metric; the `percentiles` of the row's metric;
    its `change` from `before` to the arm; a `share`, metric of metric; `outputs`, how many are equal;
    `reported`, the row's. Arms are the row's where the column names none."""

    title: str
    option: str = ""
    value: str = ""
    percentiles: list[str] = []
    change: str = ""
    share: str = ""
    of: str = ""
    outputs: bool = False
    reported: bool = False
    arm: str = ""
    before: str = ""

    @property
    def kinds(self) -> list[str]:
        """Which of these it is; a valid column is exactly one."""
        return [kind for kind in COLUMN_KINDS if getattr(self, kind)]


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of some boots; without `workloads`, of all that they have."""

    title: str
    boots: str
    columns: list[Column]
    rows: list[Row] = msgspec.field(default_factory=lambda: [Row(label="")])
    workloads: list[str] = []
    note: str = ""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a source says, and what is measured of it: a change of a metric from `before` to `arm`,
    or the share of a metric `of` another. `reported` is that number, as a fraction."""

    says: str
    boots: str
    workload: str
    arm: str
    before: str = ""
    change: str = ""
    share: str = ""
    of: str = ""
    reported: float | None = None


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. The first claim is what the experiment is about: it alone gets a verdict."""

    name: str
    title: str
    question: str
    sources: list[Source]
    boots: dict[str, Boots]
    claims: list[Claim]
    tables: list[Layout]
    notes: list[str] = []
    follow_up: list[str] = []


class Adjusted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for in place of what the file says."""

    device: str = "auto"
    blocks: int | None = None
    rounds: int | None = None
    seed: int = 0


# ---------------------------------------------------------------------------------------------------------
# Reading


def folder() -> Path:
    """Where the committed ones lie: beside the package, in a checkout and where it is installed."""
    return Path(harness.__file__).resolve().parent.parent / "experiments"


def names() -> list[str]:
    """Of the committed experiments."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def find(name: str) -> Path:
    """The file of a committed experiment, or of one's own where `name` ends in .toml. Raises BadSetting."""
    if name.endswith(".toml"):
        return Path(name)
    known = {each: folder() / f"{each}.toml" for each in names()}
    path: Path = api.pick(name, known, "experiment")
    return path


def read(path: Path) -> Experiment:
    """An experiment from its file. Raises BadSetting, one line, where it can't be understood."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise api.BadSetting(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise api.BadSetting(f"{path} is not TOML: {error}") from error
    plain = {"name": path.stem, **content}
    try:
        _check_keys(plain, msgspec.inspect.type_info(Experiment))
        experiment = msgspec.convert(plain, type=Experiment)
    except (api.BadSetting, msgspec.ValidationError) as error:
        raise api.BadSetting(f"{path}: {error}") from error
    return experiment


def _check_keys(value: Any, kind: msgspec.inspect.Type) -> None:
    """Raises BadSetting at the first key that its table does not know; other faults are msgspec's to find."""
    match kind:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            for key, inner in value.items():
                _check_keys(inner, api.pick(key, known, "key"))
        case msgspec.inspect.DictType(value_type=inner_kind) if isinstance(value, dict):
            for inner in value.values():
                _check_keys(inner, inner_kind)
        case msgspec.inspect.ListType(item_type=inner_kind) if isinstance(value, list):
            for inner in value:
                _check_keys(inner, inner_kind)


# ---------------------------------------------------------------------------------------------------------
# What it comes to on a device

Engines = Mapping[str, api.EngineSpec]
Variants = Mapping[str, Variant]


def designs(
    experiment: Experiment, kind: str, adjusted: Adjusted, engines: Engines, variants: Variants
) -> dict[str, dict[str, Design]]:
    """By boots and workload, what will be measured; designs of the same boots differ in their workload
    alone. `kind`: "emulated", which scales it, or another device. Raises BadSetting."""
    found: dict[str, dict[str, Design]] = {}
    for name, boots in experiment.boots.items():
        scaled = boots.emulated if kind == "emulated" else Scaled()
        blocks, rounds = _extent(boots, kind, adjusted)
        options = {**boots.options, **scaled.options, "device": adjusted.device}
        arms = tuple(
            _arm(each, settings, options, engines, variants) for each, settings in boots.arms.items()
        )
        for each in scaled.workloads:
            api.pick(each, boots.workloads, f"workload of {name}")
        found[name] = {
            workload: Design(
                name=f"{experiment.name}-{workload}",
                arms=arms,
                workload=_workload({**values, **scaled.workloads.get(workload, {})}),
                blocks=blocks,
                rounds=rounds,
                margin=boots.margin,
                primary=boots.primary,
                seed=adjusted.seed,
            )
            for workload, values in boots.workloads.items()
        }
    return found


def _arm(
    name: str, settings: ArmSettings, options: Mapping[str, Any], engines: Engines, variants: Variants
) -> Arm:
    if bool(settings.variant) == bool(settings.engine):
        raise api.BadSetting(f'arm {name} needs a variant such as "copy-done:before", or an engine')
    engine, of_variant, toggles = settings.engine, {}, {}
    if settings.variant:
        chosen, _, side = settings.variant.partition(":")
        variant: Variant = api.pick(chosen, variants, "variant")
        sides = dict(zip(SIDES, (variant.before, variant.after), strict=True))
        engine, toggles = variant.engine, api.pick(side, sides, f"side of {chosen}")
        of_variant = variant.options
    return make_arm(
        engines, name, engine, {**of_variant, **options, **settings.options}, toggles, settings.toggles
    )


def _workload(values: Mapping[str, Any]) -> Workload:
    """`idle_stops` become texts that open with a character which a preset could emit only byte by byte, so
    that no output ends by them."""
    plain = dict(values)
    count = plain.pop("idle_stops", 0)
    if not isinstance(count, int) or count < 0:
        raise api.BadSetting(f"idle_stops must be a number of stop strings, not {count!r}")
    if count:
        plain["stop"] = [f"␄{index:05d}" for index in range(count)]
    return make_workload(plain)


def _extent(boots: Boots, kind: str, adjusted: Adjusted) -> tuple[int, int]:
    """Blocks, and rounds of a boot, on a device of that kind."""
    scaled = boots.emulated.rounds if kind == "emulated" else None
    return adjusted.blocks or boots.blocks, adjusted.rounds or scaled or boots.rounds


def extents(experiment: Experiment, kind: str, adjusted: Adjusted) -> list[str]:
    """How much is measured, one line for each boots, and where that is not what the file says."""
    lines = []
    for name, boots in experiment.boots.items():
        blocks, rounds = _extent(boots, kind, adjusted)
        line = f"{name}: {blocks} blocks of {rounds} round{'s' if rounds != 1 else ''}"
        planned = _extent(boots, kind, Adjusted())
        if (blocks, rounds) != planned:
            line += f", asked for in place of the experiment's {planned[0]} of {planned[1]}"
        lines.append(line)
    return lines


def scaling(experiment: Experiment, adjusted: Adjusted) -> list[str]:
    """How the emulated device's runs differ from the source's, one line each; rounds that the command line
    asks for are in `extents`."""
    lines = []
    for name, boots in experiment.boots.items():
        scaled = boots.emulated
        changed = [
            f"{workload}: {key} {_before(values, key)} → {value}"
            for workload, changes in scaled.workloads.items()
            for values in (boots.workloads[workload],)
            for key, value in changes.items()
        ]
        changed += [f"{key} {_before(boots.options, key)} → {new}" for key, new in scaled.options.items()]
        if scaled.rounds is not None and adjusted.rounds is None:
            changed.append(f"rounds {boots.rounds} → {scaled.rounds}")
        if changed:
            why = f" ({scaled.why})" if scaled.why else ""
            lines.append(f"{name}, scaled for the emulated device: {'; '.join(changed)}{why}")
    return lines


def _before(values: Mapping[str, Any], key: str) -> Any:
    return values.get(key, "default")


# ---------------------------------------------------------------------------------------------------------
# Checking


def check(experiment: Experiment, engines: Engines, variants: Variants) -> None:
    """Raises BadSetting where a part names something that does not exist, on any kind of device."""
    for kind in KINDS:
        for of_workload in designs(experiment, kind, Adjusted(device=kind), engines, variants).values():
            for design in of_workload.values():
                design.check()
    if not experiment.claims or not experiment.boots:
        raise api.BadSetting("an experiment needs boots, and a claim to lay beside what they find")
    known = quantity_names(engines)
    for boots in experiment.boots.values():
        if boots.blocks < FEWEST_BLOCKS:
            raise api.BadSetting(f"an experiment needs at least {FEWEST_BLOCKS} blocks, not {boots.blocks}")
        api.pick(boots.primary, metrics.METRICS, "metric")
    for claim in experiment.claims:
        _check_claim(claim, experiment, known)
    _check_first(experiment.claims[0], experiment)
    for table in experiment.tables:
        boots = api.pick(table.boots, experiment.boots, "boots")
        for workload in table.workloads:
            api.pick(workload, boots.workloads, f"workload of {table.boots}")
        for row in table.rows:
            for column in table.columns:
                _check_cell(row, column, boots, known)


def _check_claim(claim: Claim, experiment: Experiment, known: Mapping[str, str]) -> None:
    boots: Boots = api.pick(claim.boots, experiment.boots, "boots")
    api.pick(claim.workload, boots.workloads, f"workload of {claim.boots}")
    if bool(claim.change) == bool(claim.share):
        raise api.BadSetting(f"a claim has a change or a share: {claim.says}")
    for arm in (claim.arm, *([claim.before] if claim.change else [])):
        api.pick(arm, boots.arms, f"arm of {claim.boots}")
    if claim.change:
        api.pick(claim.change, known, "metric")
    else:
        _check_share(claim.share, claim.of, known)


def _check_first(claim: Claim, experiment: Experiment) -> None:
    """Raises BadSetting unless a verdict on it could confirm what the source says."""
    metric = claim.change
    if metric and (metric not in metrics.METRICS or metrics.METRICS[metric].can_be_zero):
        raise api.BadSetting(
            f"{metric} can't carry a verdict, and the first claim gets one: put another first"
        )
    margin = experiment.boots[claim.boots].margin
    if metric and claim.reported is not None and abs(claim.reported) <= margin:
        raise api.BadSetting(
            f"the claim of {100 * claim.reported:+.3g}% lies within the margin of {claim.boots}, "
            f"{100 * margin:.3g}%, so exactly that could be called same: give {claim.boots} a smaller margin"
        )


def _check_cell(row: Row, column: Column, boots: Boots, known: Mapping[str, str]) -> None:
    if len(column.kinds) != 1:
        raise api.BadSetting(f"column {column.title} needs one of {', '.join(COLUMN_KINDS)}")
    for arm in filter(None, (row.arm, row.before, column.arm, column.before)):
        api.pick(arm, boots.arms, "arm")
    if column.option:
        api.pick(column.option, dict.fromkeys(Workload.__struct_fields__), "workload option")
        return
    if column.reported:
        return
    if not (column.arm or row.arm):
        raise api.BadSetting(f"column {column.title} names no arm, and nor does row '{row.label}'")
    for metric in measured_in(row, column):
        api.pick(metric, known, "metric")
    if column.share:
        _check_share(column.share, column.of, known)


def _check_share(part: str, whole: str, known: Mapping[str, str]) -> None:
    for name in (part, whole):
        if api.pick(name, known, "metric") not in TIMES:
            raise api.BadSetting(f"{name} is not a time, so it can't be part of a share")


def measured_in(row: Row, column: Column) -> Iterator[str]:
    """The metrics that a cell is made from."""
    if column.percentiles:
        for each in column.percentiles if f"{row.metric}_p50" in metrics.METRICS else [""]:
            yield f"{row.metric}_{each}" if each else row.metric
    for name in (column.value, column.change, column.share, column.of):
        if name == OWN_METRIC:
            yield f"{row.metric}_p50" if f"{row.metric}_p50" in metrics.METRICS else row.metric
        elif name:
            yield name


SUBMIT_WALL = "submit_wall_s"  # from the start of a round's first send to the end of its last
DECODE_STEP = "decode_step_ms_mean"  # metrics.decode_step_ms_mean: the whole that phases are shares of
EXTRA = {SUBMIT_WALL: "s", DECODE_STEP: "ms"}


def quantity_names(engines: Engines) -> dict[str, str]:
    """What a cell can show, with its unit: every metric, EXTRA, and the engines' counters, per step; those in
    ns as us."""
    counters = [name for spec in engines.values() for toggle in spec.toggles for name in toggle.counters]
    units = {name: metric.unit for name, metric in metrics.METRICS.items()}
    return units | EXTRA | dict(map(counter_as_shown, counters))


def counter_as_shown(name: str) -> tuple[str, str]:
    """Name and unit of a counter: "launch_lag_ns" is shown as launch_lag_us."""
    return (f"{name.removesuffix('_ns')}_us", "us") if name.endswith("_ns") else (name, "per step")
