"""From what was asked for (a variant, flags, key=value changes) to the arms of a design.

Everything wrong with the request raises BadSetting with one line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.metrics.definitions import (
    IN_TURNS,
    MATCHED,
    OF_PAIRS,
    SLICED,
    phase_in_turns,
    phase_metric,
)
from overlap_bench.harness.plan.design import ONE_SIDED, Arm, Design, Factorial, Gate, started_by
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.variants import Variant
from overlap_bench.harness.stats import stopping as early
from overlap_bench.harness.stats.stopping import Until
from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload.arrivals import ARRIVALS, TIMING_OPTIONS
from overlap_bench.harness.workload.plan import NOT_WITH_TRACE, checked, with_enough_requests
from overlap_bench.harness.workload.prompts import ENGLISH, OPENINGS, are_conversations
from overlap_bench.harness.workload.workload import LENGTHS, Workload

T = TypeVar("T", bound=msgspec.Struct)
DEVICES = ("auto", "cuda", "emulated")
DTYPES = ("float32", "bfloat16", "float16")
STAGINGS = ("copy", "sync")
# The default is roseinfer's streaming workload, with a prompt for each request: as it stands on a GPU; on the
# emulated device a quarter of the requests at a quarter of the interval, half the tokens, so that there too
# the last request comes before the first one ends. Many short rounds, in turn with the other arm's, rather
# than a few long ones: what disturbs a small machine comes in bursts of a second, and so meets both arms.
SCALED: dict[str, dict[str, object]] = {
    "cuda": {"num_requests": 64, "max_new_tokens": 128, "interval_ms": 20.0},
    "emulated": {"num_requests": 16, "max_new_tokens": 64, "interval_ms": 5.0},
}
ROUNDS = {"cuda": 2, "emulated": 10, "paced": 4}  # a paced round is longer, and steadier
# A gate spends its time on blocks, and ends with the first that is clear. So does a run that has minutes, and
# more so, where boots are cheap: what a block's change scatters by from boot to boot is as much as for pairs
# of eight segments, or several times that (three_minutes), and against it only more blocks help. With eight
# segments and two rounds a minute had two to five blocks here, and intervals of so few are wide. Where boots
# are long, three segments would save little more of a block, and its pairs scatter more.
SEGMENTS = {"unpaced": 16, "paced": 5, "gate": 8, "minutes": 3, "minutes, long boots": 8}
ROUNDS_BESIDE_TURNS = {"unpaced": 3, "paced": 2, "minutes": 1, "minutes, long boots": 1}
AIM_S = 80.0  # from the first boot to the last block: imports before and the result after take some of 90 s
FEWEST_TURNS = 2  # of the longest output: the first one takes its prompt in
MOST_IN_TIME = 100  # blocks, where minutes end the run
# Steps of a turn that no interval ends with. A serial loop begins a turn with an idle device, and so does
# every step of it; one that overlaps has its pipeline filled by the second.
LEAD = {"serial": 1, "overlapping": 2}
PACED_MODEL = "micro-gpt2"  # computes well before the emulated device's time is up
OBJECTIVES = {"ttft": "ttft", "tpot": "tpot", "latency": "latency", "e2el": "latency"}
PLACES = ("device", "host")  # of a planted delay
PLANTED = ("plant_at", "plant_ns")  # engine options that only a planted delay sets
SWITCH = {"on": True, "off": False}
LOWEST = {
    "max_batch_size": 1,
    "prefill_max_batch_size": 1,
    "prefill_max_tokens": 1,
    "chunk_tokens": 1,
    "stream_interval": 1,
    "block_size": 1,
    "num_blocks": 2,  # one takes the padding
    "max_context": 2,
    "tokenize_workers": 0,
}


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


def spelled(values: Mapping[str, object]) -> str:
    """ "concurrency=8 variant=overlap"."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def make_arm(
    engines: Mapping[str, api.EngineSpec],
    name: str,
    engine: str,
    options: Mapping[str, object],
    toggles: Mapping[str, str],
    changes: Mapping[str, str],
    measures_k: str | None = None,
) -> Arm:
    """One arm from its engine, options and toggles, with `changes` (a toggle, an engine option, `engine`,
    `python`, `patch`, `env.NAME`) made to it. `measures_k`: the interpreter that measures a pace's k (this
    one); it is started at once, so never one that a file names which nobody has trusted yet."""
    spec = api.pick(changes.get("engine", engine), engines, "engine")
    types = types_of(api.EngineOptions)
    options_by_name = {field: kind for field, kind in types.items() if field not in PLANTED}
    own = [each.name for each in (*spec.toggles, *spec.settings)]
    known = dict.fromkeys([*options_by_name, "python", "engine", "patch", *own])
    new_toggles, new_options = dict(toggles), dict(options)
    env: dict[str, str] = {}
    for key, value in changes.items():
        if key.startswith("env."):
            if key == "env.":
                raise api.BadSetting(f"env.NAME needs the name of a variable, not '{key}={value}'")
            if key.endswith("API_KEY"):
                raise api.BadSetting(f"{key} would be stored with the run: export it instead")
            env[key.removeprefix("env.")] = value
            continue
        api.pick(key, known, "setting")
        if key in own:
            new_toggles[key] = value
        elif key in options_by_name:
            new_options[key] = parse_typed(key, value, options_by_name[key])
    if new_options.get("pace"):
        new_toggles |= {name: choice for name, choice in spec.paced_toggles.items() if name not in changes}
    full = spec.check(new_toggles)
    if spec.setting("url") is not None:
        _check_server(name, full)
    made = make_options(spec, new_options, measures_k)
    spec.check_model(made.model)
    patch = None
    if "patch" in changes:
        from overlap_bench.harness.plan.patch import patch_of

        patch = patch_of(changes["patch"], spec, changes.get("python"), full)
    return Arm(
        name=name,
        engine=spec.name,
        options=made,
        toggles=full,
        python=changes.get("python"),
        env=env,
        patch=patch,
        # A pace is the device's own time, where an engine records one.
        device_holds="" if made.pace and spec.device_holds is not None else spec.device_holds,
    )


def _check_server(arm: str, settings: Mapping[str, str]) -> None:
    """An engine that is the client of a server must be told where that is, in exactly one way."""
    url, command = settings.get("url"), settings.get("cmd")
    if url and command:
        raise api.BadSetting(
            f"{arm}: cmd and url exclude each other: cmd starts a server, url names a running one"
        )
    if command and "{port}" not in command:
        raise api.BadSetting(f"{arm}: cmd needs {{port}} where the server's port goes: '... --port {{port}}'")
    if command:
        try:
            shlex.split(command)
        except ValueError as error:
            raise api.BadSetting(f"{arm}: cmd={command}: {str(error).lower()}") from None
    if not url and not command:
        raise api.BadSetting(
            f"{arm}: which server? --{arm} url=http://HOST:PORT, or --{arm} cmd='COMMAND --port {{port}}'"
        )


def make_options(
    spec: api.EngineSpec, values: Mapping[str, object], measures_k: str | None = None
) -> api.EngineOptions:
    if values.get("pace"):
        if spec.paced is None:
            raise api.BadSetting(f"engine {spec.name} has no device with a pace: leave pace out")
        if values.get("device") == "auto":
            values = {name: value for name, value in values.items() if name != "device"}
        values = {**spec.paced, **values}
    values = {**spec.defaults, **values}
    options = _convert(values, api.EngineOptions, "engine option")
    for name, value, known in (
        ("device", options.device, DEVICES),
        ("dtype", options.dtype, DTYPES),
        ("staging", options.staging, STAGINGS),
    ):
        api.pick(value, dict.fromkeys(known), name)
    if options.pace:
        options = msgspec.structs.replace(options, pace=api.settle(options.pace, measures_k))
        if options.device == "cuda":
            raise api.BadSetting("pace is for the emulated device only: a card has its own; leave it out")
    for name, lowest in LOWEST.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise api.BadSetting(f"{name} must be at least {lowest}, not {value}")
    return options


def convert_workload(values: Mapping[str, object]) -> Workload:
    """The workload by its options' names, not checked. A length that is a number may be text."""
    plain = {
        name: int(value)
        if name in LENGTHS and isinstance(value, int | str) and lengths.is_number(value)
        else value
        for name, value in values.items()
    }
    return _convert(plain, Workload, "workload option")


def workload_values(
    defaults: Mapping[str, object], of_variant: Mapping[str, object], asked: Mapping[str, object]
) -> dict[str, object]:
    """What is asked, before what the variant brings, before the defaults. An arrival that replaces
    the default's or the variant's drops those of its timing options that it does not use itself; data that
    says how long outputs are needs no default. Where no prompts are named, each request has another one: of
    equal ones, equal outputs would show little."""
    if asked.get("arrival") == "trace":  # which says itself what a variant says of each request
        of_variant = {name: value for name, value in of_variant.items() if name not in NOT_WITH_TRACE}
    values = {**defaults, **of_variant, **asked}
    if values.get("arrival") != "trace" and values.keys().isdisjoint(("prompt", "prompts")):
        values["prompts"] = OPENINGS if values.get("input_tokens") is None else ENGLISH
    used = api.pick(str(values.get("arrival", "fixed")), ARRIVALS, "arrival").options
    kept = {*used, *asked, *(of_variant if "arrival" not in asked else ())}
    for name in TIMING_OPTIONS:
        if name not in kept:
            values.pop(name, None)
    lengths_in_data = values.get("arrival") == "trace" or (
        are_conversations(values.get("prompts")) and "input_tokens" not in values
    )
    if lengths_in_data and "max_new_tokens" not in {**of_variant, **asked}:
        values["max_new_tokens"] = None
    return values


def types_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The type of each field, by its name."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _convert(values: Mapping[str, object], kind: type[T], what: str) -> T:
    known = types_of(kind)
    for name in values:
        api.pick(name, known, what)
    try:
        return msgspec.convert(dict(values), type=kind)
    except msgspec.ValidationError as error:
        raise api.BadSetting(f"{what}: {error}") from error


def parse_typed(key: str, text: str, kind: Any) -> Any:
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    try:
        return msgspec.convert(SWITCH.get(text, text) if bare is bool else text, type=bare, strict=False)
    except msgspec.ValidationError as error:
        raise api.BadSetting(f"{key}={text}: {error}") from error


def parse_fraction(text: str, flag: str) -> float:
    """ "1%" or "0.01" as 0.01."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise api.BadSetting(f"{flag} needs a share such as 1% or 0.01, not '{text}'") from None
    if share >= 1 and not text.endswith("%"):
        raise api.BadSetting(f"{flag} {text} would be {100 * share:g}%; {share:g}% is written {share:g}%")
    return share


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """ "ttft:200" texts as ms by metric: what a good request stays within. vLLM's "e2el" is the latency."""
    objectives: dict[str, float] = {}
    for text in texts:
        name, colon, limit = text.partition(":")
        metric = api.pick(name, OBJECTIVES, "metric of --goodput") if colon else ""
        try:
            objective = float(limit)
        except ValueError:
            raise api.BadSetting(f"--goodput needs METRIC:MS such as ttft:200, not '{text}'") from None
        if not 0 < objective < float("inf"):
            raise api.BadSetting(f"--goodput {text}: the milliseconds must be above 0")
        if metric in objectives:
            raise api.BadSetting(f"--goodput {metric} is given twice")
        objectives[metric] = objective
    return objectives


def make_design(
    request: Request,
    engines: Mapping[str, api.EngineSpec],
    variants: Mapping[str, Variant],
    guess_device: Callable[[], str],
) -> Design:
    """The design that was asked for, checked. `guess_device` says what "auto" will probably mean: it only
    scales the default workload."""
    if request.variant is None and request.engine is None:
        raise api.BadSetting("say what to run: --variant NAME (bench variants lists them) or --engine NAME")
    if request.variant is not None and request.engine is not None:
        raise api.BadSetting("--variant brings its engine: give --variant or --engine, not both")
    if request.variant is None:
        pair = Variant(name="", title="", source="", claim="", engine=request.engine or "")
    else:
        pair = api.pick(request.variant, variants, "variant", "bench variants")
    starts, of_sides = (pair.before, pair.after), (pair.before_options, pair.after_options)
    both, before = parse_changes(request.both, "--set"), parse_changes(request.before, "--before")
    after = parse_changes(request.after, "--after")
    if request.against_itself and after:
        raise api.BadSetting("an arm against itself has no --after; change it with --set")
    if request.refs is not None and request.variant is not None:
        raise api.BadSetting("a variant has two settings: with --base-ref give --engine, and --set for both")
    sides = {"before": before}
    if request.variant is not None or after or request.refs is not None:
        sides["after"] = after
    measures_k = {**both, **before}.get("python") or _interpreter_in({**both, **before}.get("cmd"))
    arms = tuple(
        make_arm(
            engines,
            name,
            pair.engine,
            {**pair.options, **side, **request.options},
            start,
            {**both, **changes},
            measures_k,  # of both arms: there is one device
        )
        for (name, changes), start, side in zip(sides.items(), starts, of_sides, strict=False)
    )
    if request.against_itself:
        arms = (arms[0], msgspec.structs.replace(arms[0], name="after"))
    if request.refs is not None:
        if patched := [arm.name for arm in arms if arm.patch is not None]:
            raise api.BadSetting(
                f"{patched[0]} has a ref and a patch: commit the change, or leave out the ref"
            )
        arms = tuple(
            msgspec.structs.replace(arm, ref=ref) for arm, ref in zip(arms, request.refs, strict=True)
        )
    name = pair.name or arms[0].engine
    return complete(
        request,
        engines,
        f"aa-{name}" if request.against_itself else name,
        arms,
        pair.workload,
        guess_device,
        secondaries=_secondaries(request, pair),
        usual="" if _is_changed(request) else pair.primary,
    )


def _interpreter_in(command: str | None) -> str | None:
    """The interpreter in a server's command; None where it has none, or none can be told."""
    with suppress(ValueError):  # an open quote, which is refused elsewhere
        runs = started_by(None, {} if command is None else {"cmd": command})[0]
        return runs if runs is not None and "python" in Path(runs).name else None
    return None


def _is_changed(request: Request) -> bool:
    """Whether arms were changed: a variant's metrics are about the variant as it stands. Which interpreter
    both run under is no part of it."""
    both = [change for change in request.both if not change.startswith("python=")]
    return bool(both or request.before or request.after)


def _secondaries(request: Request, variant: Variant) -> tuple[str, ...]:
    """What a variant's claim is judged by besides the primary: as the variant stands, since a change of its
    arms can make nonsense of it; its phase also as both arms are set anew. Nothing in a gate, which is about
    its own metrics alone."""
    if request.max_regression is not None:
        return ()
    own = [phase_metric(variant.phase)] if variant.phase and not (request.before or request.after) else []
    names = [*own, *([] if _is_changed(request) else variant.secondaries)]
    return tuple(name for name in names if name != request.design.get("primary"))


def complete(
    request: Request,
    engines: Mapping[str, api.EngineSpec],
    name: str,
    arms: tuple[Arm, ...],
    of_variant: Mapping[str, object],
    guess_device: Callable[[], str],
    factorial: Factorial | None = None,
    secondaries: tuple[str, ...] = (),
    usual: str = "",
) -> Design:
    """The design of these arms, checked: with the workload (`of_variant`: what a variant brings), the blocks
    and the rules that were asked for, or else `secondaries` and the `usual` primary (what a variant says; ""
    where it does not)."""
    device = arms[0].options.device
    scale = guess_device() if device == "auto" else device
    defaults = dict(SCALED[scale])
    if any(engines[arm.engine].asks_text for arm in arms) and request.workload.get("arrival") != "trace":
        defaults["pretok"] = False
    workload = convert_workload(workload_values(defaults, of_variant, request.workload))
    workload = checked(with_enough_requests(workload, request.workload))
    if workload.most_new_tokens == 1:
        secondaries = ()  # a variant's are of decode steps, and there is none
    if workload.temperature > 0:  # the engine must know before it captures its programs
        for flag, texts in (
            ("--set", request.both),
            ("--before", request.before),
            ("--after", request.after),
        ):
            wanted = parse_changes(texts, flag).get("sampling")
            if wanted is not None and not parse_typed("sampling", wanted, bool):
                raise api.BadSetting(f"{flag} sampling={wanted}: --temperature needs it on; leave one out")
        arms = tuple(
            msgspec.structs.replace(arm, options=msgspec.structs.replace(arm.options, sampling=True))
            for arm in arms
        )
    if scale == "cuda":
        arms = tuple(with_gaps(arm, engines[arm.engine]) for arm in arms)
    planned: dict[str, Any] = {
        "rounds": ROUNDS["paced" if arms[0].options.pace else scale],
        "secondaries": secondaries,
        **({"blocks": 1} if any(arm.is_remote for arm in arms) else {}),
        **({"primary": usual} if usual and usual not in OF_PAIRS else {}),
        **request.design,
    }
    planned |= turns(arms, workload, planned, request, engines, usual or SLICED)
    planned |= stopping(arms, request)
    planned |= delay(arms, request, engines)
    long = any(engines[arm.engine].boots_long for arm in arms)
    if scale != "cuda" and not long and _is_usual(arms, planned, request):
        planned["aim_s"] = AIM_S
    if request.max_regression is not None:
        planned["gate"] = make_gate(request.max_regression, planned.get("until"))
    if workload.pretok and any(arm.options.tokenize_workers for arm in arms):
        raise api.BadSetting("tokenize_workers applies only with --no-pretok: ids need no tokenizing")
    design = Design(
        name=name,
        arms=arms,
        factorial=factorial,
        workload=workload,
        against_itself=request.against_itself,
        overlay=request.overlay,
        **planned,
    )
    design.check()
    return design


def with_gaps(arm: Arm, spec: api.EngineSpec) -> Arm:
    """The arm of a card, with what its device times hold besides the device's work."""
    gaps = any(arm.toggles.get(name) in choices for name, choices in spec.eager.items())
    if not gaps or arm.device_holds != "":
        return arm
    return msgspec.structs.replace(arm, device_holds="the gaps between kernels that are launched one by one")


def turns(
    arms: Sequence[Arm],
    workload: Workload,
    planned: Mapping[str, Any],
    request: Request,
    engines: Mapping[str, api.EngineSpec],
    usual: str,
) -> dict[str, object]:
    """What a design has so that arms take turns, and it is decided by them, where every arm can and says what
    its steps take. A metric of requests that was asked for, or is the `usual` one here, is measured by rounds
    alone. `planned`: what it has besides."""
    asked, primary = request.design.get("segments"), request.design.get("primary", usual)
    able = all(engines[arm.engine].takes_turns and arm.options.recorder and not arm.is_remote for arm in arms)
    wanted = asked or request.design.get("primary") in OF_PAIRS
    unlike = composed_otherwise(arms, engines)
    if unlike and wanted:
        raise api.BadSetting(
            f"{primary} and --interleaved-rounds compare equal steps, and arms that differ in {unlike} have "
            "none: --primary tpot_ms_mean is what their requests see"
        )
    sizes = turns_of(arms, engines)
    most = workload.most_new_tokens
    if most is not None and most < FEWEST_TURNS * sizes["turn_steps"]:
        if wanted and most > 1 and able:
            raise api.BadSetting(
                f"{primary} and --interleaved-rounds compare turns of {sizes['turn_steps']} steps, and "
                f"outputs of {most} tokens are too short for them: raise --max-new-tokens, or give "
                "--interleaved-rounds 0"
            )
        able = False
    if len(arms) < 2 or not able:
        if wanted:
            raise api.BadSetting(
                f"{primary} and --interleaved-rounds need two arms, or more, whose engines take turns and "
                "record steps; a server at an address does not"
            )
        return {}
    if unlike or asked == 0 or (asked is None and primary not in OF_PAIRS):
        return {}
    speed = "paced" if arms[0].options.pace else "unpaced"
    gate = request.max_regression is not None
    use = speed
    if planned.get("max_minutes") is not None and not gate:
        long = any(engines[arm.engine].boots_long for arm in arms)
        use = "minutes, long boots" if long else "minutes"
    # A variant's secondaries are of the same step.
    of_turns = dict(zip(MATCHED, IN_TURNS, strict=True))
    of_turns |= {phase_metric(phase): phase_in_turns(phase) for phase in api.PHASES}
    secondaries = (of_turns.get(name, name) for name in planned["secondaries"])
    by_turns: dict[str, object] = {
        "secondaries": tuple(name for name in secondaries if name != primary),
        "segments": SEGMENTS["gate" if gate and speed == "unpaced" else use],
        "rounds": ROUNDS_BESIDE_TURNS[use],
    }
    return {**by_turns, **request.design, "primary": primary, **sizes}


def _is_usual(arms: Sequence[Arm], planned: Mapping[str, Any], request: Request) -> bool:
    """Whether nothing was said of how much to measure, so that what fits into AIM_S may decide."""
    asked = {"blocks", "rounds", "segments", "max_minutes"} & request.design.keys()
    return len(arms) == 2 and planned.get("segments", 0) > 0 and "until" not in planned and not asked


def composed_otherwise(arms: Sequence[Arm], engines: Mapping[str, api.EngineSpec]) -> str:
    """The first toggle by which the steps of these arms compute other tokens, or give other numbers of them;
    "" where there is none."""
    names = dict.fromkeys(name for arm in arms for name in engines[arm.engine].composing)
    return next((name for name in names if len({arm.toggles.get(name) for arm in arms}) > 1), "")


def turns_of(arms: Sequence[Arm], engines: Mapping[str, api.EngineSpec]) -> dict[str, int]:
    """`turn_steps` and `turn_lead` of a design whose arms take turns."""
    ahead = any(
        arm.toggles.get(name) in choices
        for arm in arms
        for name, choices in engines[arm.engine].overlapping.items()
    )
    steps = max(engines[arm.engine].turn_steps for arm in arms)
    return {"turn_steps": steps, "turn_lead": LEAD["overlapping" if ahead else "serial"]}


def stopping(arms: Sequence[Arm], request: Request) -> dict[str, object]:
    """`blocks` and `until` of a design, where the run may stop early. Calibrating takes up to seconds. Where
    nothing was said of when to stop, a gate stops once it is clear; with --max-minutes, time ends the run."""
    precision = request.until_precision
    if not request.until_decided and precision is None:
        if request.max_blocks is not None:
            raise api.BadSetting(
                "--max-trials applies only with --until-decided or --until-precision; "
                "a fixed run takes --trials"
            )
        if "blocks" in request.design or any(arm.is_remote for arm in arms):
            return {}
        if request.max_regression is not None and len(arms) == 2:
            return {"until": early.until_clear()}
        return {} if request.design.get("max_minutes") is None else {"blocks": MOST_IN_TIME}
    flag = "--until-decided" if request.until_decided else "--until-precision"
    if request.until_decided and precision is not None:
        raise api.BadSetting("--until-decided and --until-precision exclude each other: give one of them")
    if "blocks" in request.design:
        raise api.BadSetting(f"--trials is for a fixed run; with {flag} give --max-trials")
    most = early.DEFAULT_MOST if request.max_blocks is None else request.max_blocks
    until = early.until_decided(most) if precision is None else early.until_precise(precision, most)
    return {"blocks": most, "until": until}


def delay(arms: Sequence[Arm], request: Request, engines: Mapping[str, api.EngineSpec]) -> dict[str, object]:
    """`plant` and `plant_at` of a design, where a delay is planted and every engine has the hook."""
    if request.plant is None:
        if request.plant_at is not None:
            raise api.BadSetting("--inject-at applies only with --inject-delay, such as --inject-delay 3%")
        return {}
    place = request.plant_at or PLACES[0]
    api.pick(place, dict.fromkeys(PLACES), "--inject-at")
    for arm in arms:
        if place not in engines[arm.engine].plants:
            raise api.BadSetting(f"engine {arm.engine} can delay no step at the {place}")
    return {"plant": request.plant, "plant_at": place}


def make_gate(max_regression: float, until: Until | None) -> Gate:
    """The gate of a design, its bounds at 95% each over all looks."""
    if until is None:
        return Gate(max_regression=max_regression, levels=(ONE_SIDED,))
    two_sided = early.levels(until.looks, 2 * ONE_SIDED)
    return Gate(max_regression=max_regression, levels=tuple(each / 2 for each in two_sided))
