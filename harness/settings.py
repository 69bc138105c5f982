"""From what was asked for (a variant, flags, key=value changes) to the arms of a design.

Everything wrong with the request raises BadSetting with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engines import api
from harness.design import Arm, Design
from harness.variants import Variant
from harness.workload import Workload

DEVICES = ("auto", "cuda", "emulated")
DTYPES = ("float32", "bfloat16", "float16")
STAGINGS = ("copy", "sync")
# The default is the seed's streaming workload: as it stands on a GPU, half of it on the emulated device.
SCALED = {
    "cuda": {"num_requests": 64, "max_new_tokens": 128},
    "emulated": {"num_requests": 32, "max_new_tokens": 64},
}
SWITCH = {"on": True, "off": False}
COUNTS = ("max_batch_size", "prefill_max_batch_size", "prefill_max_tokens", "stream_interval", "block_size")


def parse_changes(texts: Sequence[str], flag: str) -> dict[str, str]:
    """`key=value` texts as a dict; a key given twice is refused."""
    changes: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise api.BadSetting(f"{flag} needs key=value, not '{text}'")
        if key in changes:
            raise api.BadSetting(f"{flag} {key} is given twice")
        changes[key] = value
    return changes


def make_arms(
    engines: Mapping[str, api.EngineSpec],
    variant: Variant | None,
    engine: str,
    options: Mapping[str, Any],
    both: Mapping[str, str],
    before: Mapping[str, str],
    after: Mapping[str, str] | None,
) -> tuple[Arm, ...]:
    """The arms: the variant's settings (or the engine's first choices), then `options` (engine options from
    flags) and `both`, then each arm's own changes. `after` None and no variant: one arm alone."""
    chosen = variant.engine if variant is not None else engine
    shared = {**(variant.options if variant is not None else {}), **options}
    starts: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
        "before": (variant.before if variant is not None else {}, before)
    }
    if variant is not None or after is not None:
        starts["after"] = (variant.after if variant is not None else {}, after or {})
    return tuple(
        make_arm(engines, name, chosen, shared, toggles, {**both, **changes})
        for name, (toggles, changes) in starts.items()
    )


def make_arm(
    engines: Mapping[str, api.EngineSpec],
    name: str,
    engine: str,
    options: Mapping[str, Any],
    toggles: Mapping[str, str],
    changes: Mapping[str, str],
) -> Arm:
    """One arm from its engine, options and toggles, with `changes` (a toggle, an engine option, `engine`,
    `python`, `env.NAME`) made to it."""
    spec = api.pick(changes.get("engine", engine), engines, "engine")
    by_name: dict[str, str] = {toggle.name: "toggle" for toggle in spec.toggles}
    options_by_name = {field.name: field for field in msgspec.structs.fields(api.EngineOptions)}
    by_name = {**dict.fromkeys(options_by_name, "option"), "python": "python", "engine": "engine", **by_name}
    new_toggles, new_options = dict(toggles), dict(options)
    env: dict[str, str] = {}
    for key, value in changes.items():
        if key.startswith("env."):
            env[key.removeprefix("env.")] = value
            continue
        kind = api.pick(key, {each: (each, by_name[each]) for each in by_name}, "setting")[1]
        if kind == "toggle":
            new_toggles[key] = value
        elif kind == "option":
            new_options[key] = _parsed(key, value, options_by_name[key].type)
    return Arm(
        name=name,
        engine=spec.name,
        options=make_options(new_options),
        toggles=spec.check(new_toggles),
        python=changes.get("python"),
        env=env,
    )


def make_options(values: Mapping[str, Any]) -> api.EngineOptions:
    """Engine options from a mapping by their names."""
    options: api.EngineOptions = _convert(values, api.EngineOptions, "engine option")
    for name, value, known in (
        ("device", options.device, DEVICES),
        ("dtype", options.dtype, DTYPES),
        ("staging", options.staging, STAGINGS),
    ):
        api.pick(value, {each: each for each in known}, name)
    for name in COUNTS:
        if getattr(options, name) < 1:
            raise api.BadSetting(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}"
            )
    return options


def make_workload(values: Mapping[str, Any]) -> Workload:
    """The workload from a mapping by its options' names, checked."""
    workload: Workload = _convert(values, Workload, "workload option")
    workload.check()
    return workload


def _convert(values: Mapping[str, Any], kind: type, what: str) -> Any:
    names = {field.name: field.name for field in msgspec.structs.fields(kind)}
    for name in values:
        api.pick(name, names, what)
    try:
        return msgspec.convert(dict(values), type=kind)
    except msgspec.ValidationError as error:
        raise api.BadSetting(f"{what}: {error}") from error


def _parsed(key: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(SWITCH.get(text, text) if kind is bool else text, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise api.BadSetting(f"{key}={text}: {error}") from error


def parse_fraction(text: str, flag: str) -> float:
    """ "1%" or "0.01" as 0.01."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise api.BadSetting(f"{flag} needs a share such as 1% or 0.01, not '{text}'") from None


# ---------------------------------------------------------------------------------------------------------
# A whole request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `bench run` was asked for, as it was typed; the mappings hold only what was given."""

    variant: str | None = None
    engine: str | None = None
    both: Sequence[str] = ()  # key=value
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine, for both arms
    design: Mapping[str, Any] = field(default_factory=dict)  # blocks, rounds, margin, ...

    @property
    def nothing(self) -> bool:
        """Whether it is left to a stored run to say what to do."""
        return self == Asked()


def make_design(
    asked: Asked,
    engines: Mapping[str, api.EngineSpec],
    variants: Mapping[str, Variant],
    guess_device: Callable[[], str],
) -> Design:
    """The design that was asked for, checked. `guess_device` says what "auto" will probably mean: it only
    scales the default workload."""
    if asked.variant is None and asked.engine is None:
        raise api.BadSetting("say what to run: --variant NAME (bench variants lists them) or --engine NAME")
    if asked.variant is not None and asked.engine is not None:
        raise api.BadSetting("--variant brings its engine: give --variant or --engine, not both")
    variant = None if asked.variant is None else api.pick(asked.variant, variants, "variant")
    after = parse_changes(asked.after, "--after")
    arms = make_arms(
        engines,
        variant,
        asked.engine or "",
        asked.options,
        parse_changes(asked.both, "--set"),
        parse_changes(asked.before, "--before"),
        after if variant is not None or after else None,
    )
    device = arms[0].options.device
    defaults = SCALED[guess_device() if device == "auto" else device]
    of_variant = {} if variant is None else variant.workload
    workload = make_workload({**defaults, **of_variant, **asked.workload})
    if workload.temperature > 0:  # the engine must know before it captures its programs
        arms = tuple(
            msgspec.structs.replace(arm, options=msgspec.structs.replace(arm.options, sampling=True))
            for arm in arms
        )
    design = Design(
        name=arms[0].engine if variant is None else variant.name,
        arms=arms,
        workload=workload,
        **asked.design,
    )
    design.check()
    return design
