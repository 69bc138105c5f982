"""From the toggles that `bench factorial` is to vary to the arms of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Design, Factor, Factorial, LeftOut
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import complete, make_arm, parse_changes
from overlap_bench.harness.stats import contrasts
from overlap_bench.harness.stats.distributions import Floats

DEFAULT_ENGINE = "overlap"
FEWEST, MOST = 2, 5  # toggles: 2^5 are 32 arms, each with a boot in every block
NONE = "before"  # the arm with every toggle at its before


def make_factorial(
    request: Request,
    toggles: str,
    engines: Mapping[str, api.EngineSpec],
    guess_device: Callable[[], str],
) -> Design:
    """The design with an arm for each setting of `toggles` ("h2d,sync=launch-and-copy:copy-done") that means
    something. Raises BadSetting for a request that is wrong, or that leaves some toggle nothing to vary."""
    engine = request.engine or DEFAULT_ENGINE
    spec: api.EngineSpec = api.pick(engine, engines, "engine")
    factors = parse_factors(toggles, spec)
    changes = parse_changes(request.both, "--set")
    for factor in factors:
        if factor.toggle in changes:
            raise api.BadSetting(f"{factor.toggle} is varied: leave it out of --set")
    given = {toggle.name: changes.pop(toggle.name) for toggle in spec.toggles if toggle.name in changes}
    for name, choice in given.items():
        api.pick(choice, dict.fromkeys(spec.toggle(name).choices), f"choice of {name}")
    chosen = base(spec, given, factors)
    arms: list[Arm] = []
    left_out: list[LeftOut] = []
    for setting in settings(factors):
        name = name_of(setting, factors)
        reason = meaningless(spec, {**chosen, **setting})
        if reason is None:
            asked = {**changes, **given, **setting}  # what a pace brings with it leaves these alone
            python = changes.get("python")
            arms.append(make_arm(engines, name, engine, request.options, chosen, asked, python))
        else:
            left_out.append(LeftOut(name=name, reason=reason))
    check_varied(factors, arms, left_out)
    planned = Factorial(factors=factors, left_out=tuple(left_out))
    name = "-".join(["factorial", *(factor.toggle for factor in factors)])
    return complete(request, engines, name, tuple(arms), {}, guess_device, planned)


def parse_factors(text: str, spec: api.EngineSpec) -> tuple[Factor, ...]:
    """ "h2d,sync=launch-and-copy:copy-done": toggles, each varied between the two choices named, else
    between its own before and after. Raises BadSetting."""
    factors: list[Factor] = []
    for part in text.split(","):
        name, equals, named = part.strip().partition("=")
        toggle = spec.toggle(name)
        before, after = toggle.ends
        if equals:
            before, colon, after = named.partition(":")
            if not colon:
                raise api.BadSetting(f"--toggles needs {name}=BEFORE:AFTER, not '{part.strip()}'")
            for choice in (before, after):
                api.pick(choice, dict.fromkeys(toggle.choices), f"choice of {name}")
        if before == after:
            raise api.BadSetting(f"{name} needs two choices to vary, not {before} twice")
        if name in (factor.toggle for factor in factors):
            raise api.BadSetting(f"--toggles names {name} twice")
        factors.append(Factor(toggle=name, before=before, after=after))
    if not FEWEST <= len(factors) <= MOST:
        one = "; for one there is bench run" if len(factors) < FEWEST else ""
        raise api.BadSetting(f"--toggles takes {FEWEST} to {MOST} toggles, not {len(factors)}{one}")
    return tuple(factors)


def settings(factors: Sequence[Factor]) -> list[dict[str, str]]:
    """All 2^k, in the standard order: all before, then the first toggle changes the fastest."""
    choices = [(factor.before, factor.after) for factor in reversed(factors)]
    names = [factor.toggle for factor in factors]
    return [dict(zip(names, reversed(each), strict=True)) for each in product(*choices)]


def name_of(setting: Mapping[str, str], factors: Sequence[Factor]) -> str:
    """The toggles that are at their after, "h2d+output"; NONE where none is."""
    return "+".join(each.toggle for each in factors if setting[each.toggle] == each.after) or NONE


def base(spec: api.EngineSpec, given: api.Settings, factors: Sequence[Factor]) -> dict[str, str]:
    """`given`, and choices for the toggles that the factors' toggles require: the combination with which the
    most settings mean something, the first where several tie. All other toggles keep their first choice, or
    the first that all of the settings allow."""
    varied = {factor.toggle for factor in factors}
    needed = _required(spec, varied) - varied - set(given)
    free = [toggle for toggle in spec.toggles if toggle.name in needed]
    candidates = [
        {**given, **dict(zip((toggle.name for toggle in free), choices, strict=True))}
        for choices in product(*(toggle.choices for toggle in free))
    ]
    every = settings(factors)
    chosen = max(
        candidates,
        key=lambda chosen: sum(meaningless(spec, {**chosen, **setting}) is None for setting in every),
    )
    return _same_in_all(
        spec, chosen, [setting for setting in every if not meaningless(spec, {**chosen, **setting})]
    )


def _same_in_all(
    spec: api.EngineSpec, chosen: Mapping[str, str], valid: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """`chosen`, and for each toggle that would take another choice by itself in some of the valid settings
    the first that all of them allow: else it would vary with them, and its effect be counted as theirs."""
    found = dict(chosen)
    for toggle in spec.toggles:
        filled = [spec.check({**found, **setting}) for setting in valid]
        own = toggle.name in found or any(toggle.name in setting for setting in valid)
        if own or len({each.get(toggle.name) for each in filled}) < 2:
            continue
        for choice in toggle.choices:
            with_it = {**found, toggle.name: choice}
            if not any(meaningless(spec, {**with_it, **setting}) for setting in valid):
                found = with_it
                break
    return found


def _required(spec: api.EngineSpec, names: set[str]) -> set[str]:
    """The toggles that these require, and those that they require in turn."""
    found = {
        other for name in names for needs in spec.toggle(name).requires.values() for other in needs
    } - names
    return found | _required(spec, names | found) if found else set()


def meaningless(spec: api.EngineSpec, setting: api.Settings) -> str | None:
    """Why a setting means nothing; None where it means something."""
    try:
        spec.check(setting)
    except api.BadSetting as error:
        return str(error)
    return None


def check_varied(factors: Sequence[Factor], arms: Sequence[Arm], left_out: Sequence[LeftOut]) -> None:
    """Raises BadSetting where the settings that are left can't tell the main effects apart."""
    for factor in factors:
        kept = {arm.toggles[factor.toggle] for arm in arms}
        for choice in (factor.before, factor.after):
            if choice not in kept:
                raise api.BadSetting(f"no valid setting has {factor.toggle}={choice}: {left_out[0].reason}")
    names = [factor.toggle for factor in factors]
    aliased = contrasts.plan(names, levels(factors, arms)).aliased
    for name in names:
        if (name,) in aliased:
            others = " and ".join(other for (other,) in (each for each in aliased[name,] if len(each) == 1))
            raise api.BadSetting(
                f"{name} and {others} can't be told apart: of their settings, {len(left_out)} are invalid, "
                f"such as {left_out[0].name} ({left_out[0].reason})"
            )


def levels(factors: Sequence[Factor], arms: Sequence[Arm]) -> Floats:
    """-1 for the before and +1 for the after: float64 [arms, factors]."""
    return np.array(
        [[1.0 if arm.toggles[each.toggle] == each.after else -1.0 for each in factors] for arm in arms]
    )
