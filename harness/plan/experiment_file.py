"""The sources' claims, plan/claims/*.toml: what a source reported, what is run for it, what is shown.

Data, not code, and strict: an unknown key, an arm that does not exist or a metric that is not measured gives
a one-line error that offers the nearest name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.common.text_files import read_text
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import MARGIN, Arm, Design, check_split
from overlap_bench.harness.plan.settings import DEVICES, convert_workload, make_arm, turns_of, with_gaps
from overlap_bench.harness.plan.variants import Variant, load_variants
from overlap_bench.harness.workload.plan import check as check_workload
from overlap_bench.harness.workload.workload import DEFAULT, Workload

FEWEST_BLOCKS = 4  # under which an interval is too wide to lay beside any claim
DEVICE_KINDS = tuple(each for each in DEVICES if each != "auto")
OWN_METRIC = "metric"  # in a column: the metric that its row names
US = {"us": 1.0, "ms": 1e3, "s": 1e6}  # by the unit of a time
SUBMIT_WALL = "submit_wall_s"  # from the start of a round's first send to the end of its last
OF_TURNS = (
    *definitions.IN_TURNS,
    definitions.SLICED_MEAN,
    definitions.DRAINED,
    *definitions.PHASES_IN_TURNS,
)
DECODE_STEP = "round_step_ms_mean"  # metrics.steps.round_step_ms_mean: the whole that phases are shares of
EXTRA = {SUBMIT_WALL: "s", DECODE_STEP: "ms"}

Values = dict[str, str | int | float | bool | None]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Who said what, and of which hardware."""

    name: str
    link: str = ""
    hardware: str = ""
    reported: list[str] = []


class ArmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a named variant, or an engine; then the changes to it."""

    variant: str = ""  # "copy-done:before"
    engine: str = ""
    toggles: dict[str, str] = {}
    options: Values = {}


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """What the emulated device does in place of what the source did."""

    rounds: int | None = None
    options: Values = {}
    workloads: dict[str, Values] = {}
    why: str = ""


class Boots(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of boots: each arm on each workload, which take turns within a boot. A workload has the options
    of the command line, and `idle_stops`: so many stop strings that no output matches, work for the host."""

    arms: dict[str, ArmSettings]
    workloads: dict[str, Values]
    options: Values = {}
    blocks: int = 6
    rounds: int = 2
    segments: int = 0  # of each workload, in which the arms take turns: its decode steps at one batch
    margin: float = MARGIN  # the first claim must be beyond it, or exactly what it says could be called same
    primary: str = "tpot_ms_p50"
    emulated: Scaled = Scaled()


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of an arm: one of KINDS."""

    KINDS: ClassVar[tuple[str, ...]] = ("value", "percentiles", "change", "share")
    arm: str = ""
    before: str = ""
    value: str = ""  # of this metric
    percentiles: list[str] = []  # of the row's metric
    change: str = ""  # of this metric, from `before` to `arm`
    share: str = ""  # how much of the time `of` this one is
    of: str = ""

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in self.KINDS if getattr(self, kind)]

    @property
    def metrics(self) -> list[str]:
        """What it is made from."""
        names = [*self.percentiles, self.value, self.change]
        return [*filter(None, names), *([self.share, self.of] if self.share else [])]


class Claim(Quantity, frozen=True, kw_only=True):
    """Something that a source says, and the change or the share that is measured of it; `reported` is the
    source's number, as a fraction."""

    says: str
    boots: str
    workload: str
    reported: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a table, once for each workload; what it names, its columns need not."""

    label: str
    arm: str = ""
    before: str = ""
    metric: str = ""
    reported: str = ""  # what the source has there


class Column(Quantity, frozen=True, kw_only=True):
    """A quantity of each row, or something else of it: one of KINDS."""

    KINDS: ClassVar[tuple[str, ...]] = (*Quantity.KINDS, "option", "outputs", "reported")
    title: str
    option: str = ""  # of the workload
    outputs: bool = False  # how many are equal
    reported: bool = False  # the row's

    def of_row(self, row: Row) -> Column:
        """The column with the row's arms, and with its metric by name."""
        distributed = f"{row.metric}_p50" in definitions.METRICS
        levels = [f"{row.metric}_{each}" if distributed else row.metric for each in self.percentiles]
        own = f"{row.metric}_p50" if distributed else row.metric
        return msgspec.structs.replace(
            self,
            arm=self.arm or row.arm,
            before=self.before or row.before,
            change=own if self.change == OWN_METRIC else self.change,
            percentiles=list(dict.fromkeys(levels)),
        )


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A table of some boots, on all their workloads."""

    title: str
    boots: str
    columns: list[Column]
    rows: list[Row] = msgspec.field(default_factory=lambda: [Row(label="")])
    note: str = ""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
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


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment as it is measured. `kind`: of the device; "emulated" is scaled."""

    experiment: Experiment
    kind: str
    adjusted: Adjusted = Adjusted()
    signature: str = ""  # of all its designs, where they were asked for here; see store/trust.py

    def designs(self) -> dict[str, dict[str, Design]]:
        """By boots and workload; those of one boots differ in their workload alone. No file that they name is
        read, so their workloads are not checked. Raises BadSetting."""
        engines, variants = api.find_engines(), load_variants()
        found: dict[str, dict[str, Design]] = {}
        for name, boots in self.experiment.boots.items():
            if not boots.arms or not boots.workloads:
                raise api.BadSetting(f"{name} needs an arm and a workload")
            scaled = boots.emulated if self.kind == "emulated" else Scaled()
            for each in scaled.workloads:
                api.pick(each, boots.workloads, f"workload of {name}")
            options = {**boots.options, **scaled.options, "device": self.adjusted.device}
            blocks, rounds = self._extent(boots, self.adjusted)
            arms = tuple(_arm(engines, variants, *arm, options) for arm in boots.arms.items())
            if self.kind == "cuda":
                arms = tuple(with_gaps(arm, engines[arm.engine]) for arm in arms)
            same = Design(
                name="",
                arms=arms,
                workload=DEFAULT,
                blocks=blocks,
                rounds=rounds,
                margin=boots.margin,
                primary=boots.primary,
                seed=self.adjusted.seed,
            )
            if boots.segments:
                turns = turns_of(arms, engines)
                same = msgspec.structs.replace(same, segments=boots.segments, **turns)
            same.check()
            still = [a.name for a in arms if not engines[a.engine].takes_turns]
            if boots.segments and still:
                raise api.BadSetting(f"{name} has interleaved_rounds, and {still[0]}'s engine takes no turns")
            if blocks < FEWEST_BLOCKS:
                raise api.BadSetting(f"an experiment needs at least {FEWEST_BLOCKS} trials, not {blocks}")
            found[name] = {
                each: msgspec.structs.replace(
                    same,
                    name=f"{self.experiment.name}-{each}",
                    workload=_workload({**values, **scaled.workloads.get(each, {})}),
                )
                for each, values in boots.workloads.items()
            }
        return found

    def every_design(self) -> list[Design]:
        return [design for of_workload in self.designs().values() for design in of_workload.values()]

    def _extent(self, boots: Boots, adjusted: Adjusted) -> tuple[int, int]:
        """Blocks, and rounds of a boot."""
        scaled = boots.emulated.rounds if self.kind == "emulated" else None
        rounds = next(each for each in (adjusted.rounds, scaled, boots.rounds) if each is not None)
        return boots.blocks if adjusted.blocks is None else adjusted.blocks, rounds

    def extents(self) -> list[str]:
        """How much is measured, one line for each boots, and where that is not what the file says."""
        lines = []
        for name, boots in self.experiment.boots.items():
            (blocks, rounds), planned = self._extent(boots, self.adjusted), self._extent(boots, Adjusted())
            line = f"{name}: {blocks} trials of {rounds} round{'s' if rounds != 1 else ''}"
            if (blocks, rounds) != planned:
                line += f", asked for in place of the experiment's {planned[0]} of {planned[1]}"
            if boots.segments:
                line += f"; {boots.segments} interleaved rounds"
            lines.append(line)
        return lines

    def scaling(self) -> list[str]:
        """How the emulated device's runs differ from the source's, one line for each boots; rounds that the
        command line asks for are in `extents`."""
        lines = []
        for name, boots in self.experiment.boots.items() if self.kind == "emulated" else ():
            scaled = boots.emulated
            changes = [(f"{each}: ", boots.workloads[each], new) for each, new in scaled.workloads.items()]
            changed = [
                f"{where}{key} {old.get(key, 'default')} → {value}"
                for where, old, new in [*changes, ("", boots.options, scaled.options)]
                for key, value in new.items()
            ]
            if scaled.rounds is not None and self.adjusted.rounds is None:
                changed.append(f"rounds {boots.rounds} → {scaled.rounds}")
            if changed:
                why = f" ({scaled.why})" if scaled.why else ""
                lines.append(f"{name}, scaled for the emulated device: {'; '.join(changed)}{why}")
        return lines


def _arm(
    engines: Mapping[str, api.EngineSpec],
    variants: Mapping[str, Variant],
    name: str,
    settings: ArmSettings,
    options: Values,
) -> Arm:
    if bool(settings.variant) == bool(settings.engine):
        raise api.BadSetting(f'arm {name} needs a variant such as "copy-done:before", or an engine')
    engine, base, toggles = settings.engine, Values(), dict[str, str]()
    if settings.variant:
        chosen, _, side = settings.variant.partition(":")
        variant: Variant = api.pick(chosen, variants, "variant", "bench variants")
        sides = {
            "before": (variant.before, variant.before_options),
            "after": (variant.after, variant.after_options),
        }
        toggles, of_side = api.pick(side, sides, f"side of {chosen}")
        engine, base = variant.engine, {**variant.options, **of_side}
    options = {**base, **options, **settings.options}
    return make_arm(engines, name, engine, options, toggles, settings.toggles)


def _workload(values: Values) -> Workload:
    """`idle_stops` become texts that open with a character which a preset could emit only byte by byte, so
    that no output ends by them."""
    count = values.pop("idle_stops", 0)
    if not isinstance(count, int) or count < 0:
        raise api.BadSetting(f"idle_stops must be a number of stop strings, not {count!r}")
    stops = {"stop": [f"␄{index:05d}" for index in range(count)]} if count else {}
    return convert_workload({**values, **stops})


# ---------------------------------------------------------------------------------------------------------
# Reading and checking


def folder() -> Path:
    """Where the committed ones lie: beside the package, in a checkout and where it is installed."""
    return Path(__file__).with_name("claims")


def names() -> list[str]:
    """The names of the committed experiments."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def is_own(name: str) -> bool:
    """Whether that is the file of an experiment of somebody's own, and not the name of a committed one."""
    return name.endswith(".toml")


def find(name: str) -> Path:
    """The file of a committed experiment, or of one's own. Raises BadSetting."""
    if is_own(name):
        return Path(name)
    known = {each: folder() / f"{each}.toml" for each in names()}
    path: Path = api.pick(name, known, "experiment")
    return path


# Of boots: what a file calls them, by what a stored experiment does, and older files too.
STORED = {"trials": "blocks", "interleaved_rounds": "segments"}


def _name_as_stored(plain: dict[str, Any]) -> None:
    every = plain.get("boots")
    for boots in every.values() if isinstance(every, dict) else ():
        for name in STORED.keys() & set(boots if isinstance(boots, dict) else ()):
            if STORED[name] in boots:
                raise api.BadSetting(f"{STORED[name]} is the old name of {name}: leave it out")
            boots[STORED[name]] = boots.pop(name)


def read(path: Path) -> Experiment:
    """An experiment from its file. Raises BadFile, one line, where it can't be understood."""
    text = of_today(read_text(path))
    try:
        plain = {"name": path.stem, **tomllib.loads(text)}
        _name_as_stored(plain)
        _check_keys(plain, msgspec.inspect.type_info(Experiment))
        return msgspec.convert(plain, type=Experiment)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise api.BadFile(f"{path} is not TOML: {error}") from error
    except (api.BadSetting, msgspec.ValidationError) as error:
        raise api.BadFile(f"{path}: {error}") from error


def _check_keys(value: object, kind: msgspec.inspect.Type) -> None:
    """Raises BadSetting at the first key that its table does not know; other faults are msgspec's to find."""
    match kind, value:
        case msgspec.inspect.StructType(fields=fields), dict():
            known = {field.encode_name: field.type for field in fields}
            named = known | {name: known[old] for name, old in STORED.items() if old in known}
            for key, inner in value.items():
                _check_keys(inner, api.pick(key, named, "key"))
        case msgspec.inspect.DictType(value_type=inner_kind), dict():
            for inner in value.values():
                _check_keys(inner, inner_kind)
        case msgspec.inspect.ListType(item_type=inner_kind), list():
            for inner in value:
                _check_keys(inner, inner_kind)


def settled(experiment: Experiment) -> Experiment:
    """The same with each pace as it is on this host now: by a k that is measured anew, --resume would go on
    with another one. Raises BadSetting."""

    def of(options: Values) -> Values:
        pace = options.get("pace")
        return {**options, "pace": api.settle(pace)} if isinstance(pace, str) and pace else options

    def of_boots(boots: Boots) -> Boots:
        arms = {
            name: msgspec.structs.replace(arm, options=of(arm.options)) for name, arm in boots.arms.items()
        }
        scaled = msgspec.structs.replace(boots.emulated, options=of(boots.emulated.options))
        return msgspec.structs.replace(boots, arms=arms, options=of(boots.options), emulated=scaled)

    boots = {name: of_boots(each) for name, each in experiment.boots.items()}
    return msgspec.structs.replace(experiment, boots=boots)


def check(experiment: Experiment) -> None:
    """Raises BadSetting where a part names something that does not exist, on any kind of device. Reads no
    file that a workload names: `check_workloads` does."""
    designs = [Plan(experiment=experiment, kind=kind).designs() for kind in DEVICE_KINDS]
    if not experiment.claims or not experiment.boots:
        raise api.BadSetting("an experiment needs boots, and a claim to lay beside what they find")
    for name in (each for key, boots in experiment.boots.items() for each in (key, *boots.workloads)):
        if "/" in name:
            raise api.BadSetting(f"{name!r} names a folder of the results, and must have no slash")
    known = units()
    for boots in experiment.boots.values():
        api.pick(boots.primary, definitions.METRICS, "metric")
    for claim in experiment.claims:
        boots = api.pick(claim.boots, experiment.boots, "boots")
        api.pick(claim.workload, boots.workloads, f"workload of {claim.boots}")
        if claim.kinds not in (["change"], ["share"]):
            raise api.BadSetting(f"a claim has a change or a share: {claim.says}")
        _check_metrics(claim, known)
        if claim.change == "goodput_req_s":
            raise api.BadSetting(f"{claim.change} needs limits, and a file gives none: put another metric")
        for each in designs:
            check_split(each[claim.boots][claim.workload], [claim.change])
        if claim.change in OF_TURNS and not boots.segments:
            raise api.BadSetting(
                f"{claim.change} is measured in turns: give {claim.boots} interleaved_rounds"
            )
        _check_arms(claim.boots, boots, claim.arm, *([claim.before] if claim.change else []))
    _check_first(experiment.claims[0], experiment)
    for table in experiment.tables:
        boots = api.pick(table.boots, experiment.boots, "boots")
        for row, column in product(table.rows, table.columns):
            here = column.of_row(row)
            if len(column.kinds) != 1:
                raise api.BadSetting(f"column {column.title} needs one of {', '.join(column.KINDS)}")
            if here.option:
                api.pick(here.option, dict.fromkeys(Workload.__struct_fields__), "workload option")
            elif not (here.reported or here.arm):
                raise api.BadSetting(f"column {column.title} names no arm, and nor does row '{row.label}'")
            _check_metrics(here, known)
            _check_arms(table.boots, boots, *filter(None, (here.arm, here.before)))


def check_workloads(experiment: Experiment) -> None:
    """Raises BadSetting where a workload can't be sent, on any kind of device; that reads its files."""
    for kind in DEVICE_KINDS:
        for design in Plan(experiment=experiment, kind=kind).every_design():
            check_workload(design.workload)


def _check_arms(name: str, boots: Boots, *arms: str) -> None:
    for arm in arms:
        api.pick(arm, boots.arms, f"arm of {name}")


def _check_metrics(quantity: Quantity, known: Mapping[str, str]) -> None:
    for name in quantity.metrics:
        if api.pick(name, known, "metric") not in US and quantity.share:
            raise api.BadSetting(f"{name} is not a time, so it can't be part of a share")


def _check_first(claim: Claim, experiment: Experiment) -> None:
    """Raises BadSetting unless a verdict on it could confirm what the source says."""
    metric = claim.change
    known = definitions.METRICS.get(metric)
    if metric and (known is None or known.can_be_zero or not known.better):
        raise api.BadSetting(
            f"{metric} can't carry a verdict, and the first claim gets one: put another first"
        )
    margin = experiment.boots[claim.boots].margin
    if metric and claim.reported is not None and abs(claim.reported) <= margin:
        raise api.BadSetting(
            f"the claim of {100 * claim.reported:+.3g}% lies within the margin of {claim.boots}, "
            f"{100 * margin:.3g}%, so exactly that could be called same: give {claim.boots} a smaller margin"
        )


def units() -> dict[str, str]:
    """The unit of what can be shown, by its name: every metric, EXTRA, the engines' counters per step."""
    toggles = [toggle for spec in api.find_engines().values() for toggle in spec.toggles]
    counters = [counter_as_shown(name) for toggle in toggles for name in toggle.counters]
    return {name: unit_of(name) for name in (*definitions.METRICS, *EXTRA, *counters)}


def counter_as_shown(name: str) -> str:
    """ "launch_lag_ns" is shown as launch_lag_us."""
    return f"{name.removesuffix('_ns')}_us" if name.endswith("_ns") else name


def unit_of(name: str) -> str:
    if name in definitions.METRICS:
        return definitions.METRICS[name].unit
    return EXTRA.get(name) or ("us" if name.endswith("_us") else "per step")
