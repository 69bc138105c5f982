"""What people argue about in SGLang's host code, one file each, its before and its after side by side.

Of two kinds. Both sides are SGLang's own, by a flag: `ipc`, `sample`. Or one side is our own rewriting of
what a pull request describes, as no release at hand has it: `field_names`, `flag_scan`; each verdict says
so, and is none on that pull request. What a pull request itself changes is measured by `--after
patch=FILE` (../README.md).

A toggle that an arm does not name leaves SGLang as it is installed. One that it does not take ends the
arm: as it boots, where what our own side was written after reads otherwise; at its first step, where the
other side is in force after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.fits import differing
from overlap_bench.engines.sglang.toggles import field_names, flag_scan, ipc, sample
from overlap_bench.engines.sglang.toggles.change import Change

CHANGES: tuple[Change, ...] = (field_names.CHANGE, flag_scan.CHANGE, ipc.CHANGE, sample.CHANGE)

Settings = Mapping[str, str]


def switched(settings: Settings) -> Iterator[tuple[Change, str]]:
    """What an arm names of it, with its choice."""
    for change in CHANGES:
        if change.toggle.name in settings:
            yield change, settings[change.toggle.name]


def variables(settings: Settings) -> dict[str, str]:
    """SGLang's own flags by these choices, in the environment before it is imported."""
    found: dict[str, str] = {}
    for change, choice in switched(settings):
        found |= change.variables.get(choice, {})
    return found


def put(settings: Settings) -> None:
    """Have SGLang take these choices, before its scheduler is made. BadSetting where our own side does not
    fit what is installed."""
    for change, choice in switched(settings):
        if choice == change.toggle.rewritten and (changed := differing(change.like)):
            raise BadSetting(
                f"{change.toggle.name}={choice} does not fit: it is our own rewriting, and in this SGLang "
                f"(a patch, maybe) {' and '.join(changed)} is another one than it was written after"
            )
        change.put.get(choice, lambda: None)()


def check_in_force(settings: Settings, scheduler: Any, result: Any) -> None:
    """Raises EngineError where a choice is not the one that SGLang shows: its scheduler, or what that made of
    its first step."""
    for change, choice in switched(settings):
        if (found := change.shown(scheduler, result)) != choice:
            raise EngineError(f"{change.toggle.name}={choice} is not in force: SGLang runs with {found}")
