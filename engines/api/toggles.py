"""Toggles and settings: declarations only, so that a command line can list and check them without loading an
engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Toggle:
    """One optimization: its named choices, the before first.

    `requires` says what combines: for a choice (or "*", the whole toggle) the choices of other toggles
    without which it means nothing.
    """

    name: str
    choices: tuple[str, ...]
    changes: str
    source: str
    requires: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    counters: tuple[str, ...] = ()
    after: str = ""  # of `choices`, where the after is not the last of them
    # Left out of an arm that does not name it: the engine is then as it is installed.
    optional: bool = False
    # Of `choices`: our own rewriting of what `source` describes. What is found of it is no verdict on that.
    rewritten: str = ""
    phases: tuple[str, ...] = ()  # of a step: all that it changes is how long these take
    module: str = ""  # that has its choices side by side: its __name__, for who wants to read them

    @property
    def ends(self) -> tuple[str, str]:
        """Its before and its after."""
        return self.choices[0], self.after or self.choices[-1]

    def unmet(self, choice: str, settings: Settings) -> str | None:
        """Why `choice` means nothing under `settings`, or None where it means something."""
        for key in ("*", choice):
            for other, allowed in self.requires.get(key, {}).items():
                if settings.get(other) not in allowed:
                    subject = self.name if key == "*" else f"{self.name}={choice}"
                    there = f"{other}={settings[other]}" if other in settings else f"no {other} at all"
                    wanted = " or ".join(allowed)
                    return f"{subject} applies only with {other}={wanted}, not with {there}"
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """What else an engine is told, as free text, such as an address. It is given among the toggles of an
    arm. `default` "": it may be left out."""

    name: str
    summary: str
    default: str = ""
