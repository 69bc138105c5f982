"""Engines by name: what each declares of itself, and how it is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from overlap_bench.engines.api.toggles import Setting, Settings, Toggle
from overlap_bench.engines.errors import BadSetting


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine is found (entry-point group `bench.engines`) before anything heavy is imported.

    `build` names "module:function", called in the host as build(options, toggles) -> Engine, under the
    interpreter of the arm.
    """

    name: str
    summary: str
    toggles: tuple[Toggle, ...]
    build: str
    needs: str = ""  # what must be installed, for `bench engines`
    plants: tuple[str, ...] = ()  # where it can delay each step by a known time: "device", "host"
    phases: tuple[str, ...] = ()  # of a step, in which it can be delayed (bench sensitivity)
    scores: bool = False  # whether EngineOptions.scoring means something to it
    samples: bool = False  # whether EngineOptions.sampling does
    # Whether it can stop after any step and go on with the next as if nothing had been: it calls pump(0)
    # once between two steps, pump(None) only where it has no request, and `drain` leaves nothing undone.
    takes_turns: bool = False
    turn_steps: int = 4  # of a turn: more where it begins and ends with steps that count for nothing
    # Choices of toggles by which a step is launched before the one before it is finished.
    overlapping: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Toggles that decide which tokens a step computes, or how many it gives: no step of one choice is the
    # same as one of another, so turns of such arms have no pairs.
    composing: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    # This engine's own defaults for EngineOptions, where they differ.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    presets: Collection[str] = ()  # models that it knows by name, besides folders and those of the hub
    asks_text: bool = False  # prompts go to it as text unless --pretok is asked: it may name no tokenizer
    # Whether it sizes itself by the memory of a card that it finds free. It would count as its own what
    # starts beside it, and two arms would get caches of two sizes (vLLM issue 55827); so one starts after the
    # other, but for arms that have said, by preflight or once booted, that their device is a "cpu".
    starts_alone: bool = False
    # EngineOptions that a pace brings with it where they are not set; None: it has no device with a pace.
    paced: Mapping[str, Any] | None = None
    # Choices of toggles that a pace brings with it, in the place of a variant's that nobody asked for.
    paced_toggles: Mapping[str, str] = field(default_factory=dict)
    # Whether it is worth asking what can't work here before the first arm boots: boots take long.
    preflight: bool = False
    boots_long: bool = False  # as a server does: with minutes, its blocks are then longer than others
    # Python packages that it is about, besides that of `build`: where two arms have them in two versions,
    # `bench` tells which of the functions that differ ran.
    packages: tuple[str, ...] = ()
    # What the device times of its steps hold besides the device's own work, in words for a reader; "" where
    # they hold nothing else, and None where it records none. With anything but "", a step has no part that is
    # the host's alone, and none is shown or judged.
    device_holds: str | None = ""
    # By toggle, choices with which the host launches a step kernel by kernel: on a card the device time of a
    # step, between two events, then also holds the gaps in which the card waits for the host.
    eager: Mapping[str, Collection[str]] = field(default_factory=dict)

    def toggle(self, name: str) -> Toggle:
        """The toggle of that name; BadSetting offers the nearest one."""
        toggle: Toggle = pick(name, {toggle.name: toggle for toggle in self.toggles}, "toggle")
        return toggle

    def setting(self, name: str) -> Setting | None:
        return next((setting for setting in self.settings if setting.name == name), None)

    def check(self, settings: Settings) -> dict[str, str]:
        """Full, valid settings from partial ones, in the order of declaration: toggles that mean something
        and were left out get their first choice that means something, unless they are optional. Raises
        BadSetting with the reason."""
        for name, choice in settings.items():
            if self.setting(name) is None:
                toggle = self.toggle(name)
                pick(choice, {each: each for each in toggle.choices}, f"choice of {name}")
        full = dict(settings)
        for toggle in self.toggles:  # in the order of declaration: later ones may depend on earlier ones
            if toggle.name in full or toggle.optional:
                continue
            possible = [choice for choice in toggle.choices if toggle.unmet(choice, full) is None]
            if possible:
                full[toggle.name] = possible[0]
        for setting in self.settings:
            if setting.default:
                full.setdefault(setting.name, setting.default)
        for name, choice in full.items():
            reason = None if self.setting(name) else self.toggle(name).unmet(choice, full)
            if reason is not None:
                raise BadSetting(reason)
        declared = [each.name for each in self.toggles] + [each.name for each in self.settings]
        return {name: full[name] for name in declared if name in full}

    def check_model(self, name: str) -> None:
        """BadSetting where a model of that name can only be a preset misspelt."""
        if self.presets:
            check_preset(name, self.presets)

    def every_setting(self) -> list[dict[str, str]]:
        """Every full setting that means something, without optional toggles."""
        partial: list[dict[str, str]] = [{}]
        for toggle in self.toggles:
            if toggle.optional:
                continue
            grown = []
            for settings in partial:
                possible = [choice for choice in toggle.choices if toggle.unmet(choice, settings) is None]
                grown += [settings | {toggle.name: choice} for choice in possible] or [settings]
            partial = grown
        return partial


def pick(name: str, among: Mapping[str, Any], what: str, listed_by: str = "") -> Any:
    """`among[name]`, or a BadSetting that offers the names that begin with it, or the nearest one; else all
    of them, or the command that lists them."""
    if name in among:
        return among[name]
    from difflib import get_close_matches

    near = [each for each in among if name and each.startswith(name)]
    near = near or get_close_matches(name, among, n=1, cutoff=0.5)
    offer = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    others = f"{listed_by} lists them" if listed_by else f"available: {', '.join(among)}"
    hint = f"; did you mean {offer}?" if near else f"; {others}"
    raise BadSetting(f"unknown {what} '{name}'{hint}")


def check_preset(name: str, presets: Collection[str]) -> None:
    """BadSetting, with the nearest of `presets`, for a name that is no folder and without a slash: one of the
    hub is not taken by such a name, since a typo must not become a download."""
    if "/" in name or os.path.isdir(os.path.expanduser(name)):
        return
    try:
        pick(name, dict.fromkeys(presets), "model")
    except BadSetting as error:
        raise BadSetting(f"{error} (one of the hub is OWNER/NAME, a folder its path)") from None


OURS = "overlap_bench."  # begins what the names of our own modules were without


def find_engines() -> dict[str, EngineSpec]:
    """Every installed engine by name. One that can't be loaded, and a name that two modules claim, are left
    out with one warning, not an error: they may have no part in what is asked."""
    from importlib.metadata import entry_points  # brings all of email, which an engine's host has no use for

    found: dict[str, EngineSpec] = {}
    entries = entry_points(group="bench.engines")
    for name in sorted(entries.names):
        # One of ours may be there twice, by an installation from before its present name.
        claiming = sorted(entries.select(name=name), key=lambda each: each.value.startswith(OURS))
        named = {each.value.removeprefix(OURS): each for each in claiming}
        entry, *others = named.values()
        if others:
            claims = " and ".join(sorted(each.value for each in (entry, *others)))
            _tell_once(f"engine {name} is left out: {claims} claim the name")
            continue
        try:
            spec = entry.load()
            if not isinstance(spec, EngineSpec):
                raise TypeError(f"{entry.value} is not an EngineSpec but of type {type(spec).__name__}")
            if spec.name != entry.name:
                raise ValueError(f"{entry.value} calls itself {spec.name}; one name for both, please")
        except Exception as error:  # whatever a third party's module does when it is imported
            package = f" of {entry.dist.name}" if entry.dist is not None else ""
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ImportError):
                from overlap_bench.old_names import hint

                why += hint(error)
            _tell_once(f"engine {entry.name}{package} can't be loaded: {why}")
        else:
            found[entry.name] = spec
    return found


@cache
def _tell_once(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
