"""What people argue about in vLLM's host code, one file each, its before and its after side by side.

Of two kinds. Both sides are vLLM's own, by a flag or by two ways that it has: `async_scheduling`,
`flat_logprobs`, `block_hash`, `detokenizer`, `env_cache`, `heap`, `output_chunk`, `runner`, `spec`. Or one
side is our own rewriting of what a pull request describes, as no release at hand has it: `block_map`,
`block_hasher`, `empty_blocks`, `free_list`, `remove_all`, `slots`, `update`; each verdict says so, and is
none on that pull request. What a pull request itself changes is measured by `--after patch=FILE`
(../README.md).

A toggle that an arm does not name leaves vLLM as it is installed. One that vLLM does not take is refused by
name: before anything boots where vLLM lacks what it hangs on, or where what our own side was written after
reads otherwise now; and at the first request or output where the other side is in force after all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.fits import differing, missing
from overlap_bench.engines.vllm import fits
from overlap_bench.engines.vllm.toggles import (
    block_hash,
    block_hasher,
    block_map,
    detokenizer,
    empty_blocks,
    env_cache,
    flat_logprobs,
    free_list,
    heap,
    output_chunk,
    remove_all,
    runner,
    slots,
    spec,
    update,
)
from overlap_bench.engines.vllm.toggles.change import INSTALLED, PUT, Change

CHANGES: tuple[Change, ...] = (
    *flat_logprobs.CHANGES,
    block_hash.CHANGE,
    block_hasher.CHANGE,
    block_map.CHANGE,
    detokenizer.CHANGE,
    empty_blocks.CHANGE,
    env_cache.CHANGE,
    free_list.CHANGE,
    heap.CHANGE,
    output_chunk.CHANGE,
    remove_all.CHANGE,
    runner.CHANGE,
    slots.CHANGE,
    spec.CHANGE,
    update.CHANGE,
)

Settings = Mapping[str, str]


def switched(settings: Settings) -> Iterator[tuple[Change, str]]:
    """What an arm names of it, with its choice."""
    for change in CHANGES:
        if change.toggle.name in settings:
            yield change, settings[change.toggle.name]


def tell(settings: Settings) -> None:
    """Have the processes of vLLM, this one and those that it starts, take these choices."""
    found = [*switched(settings)]
    for change, choice in found:
        os.environ |= change.variables.get(choice, {})
    os.environ[PUT] = " ".join(f"{change.toggle.name}={choice}" for change, choice in found)


def check(settings: Settings, *, prefix_cache: bool, recorder: bool) -> None:
    """Raises BadSetting for a choice that means nothing beside these options, or that this vLLM does not
    take."""
    for change, choice in switched(settings):
        name = f"{change.toggle.name}={choice}"
        if change.prefix_cache is not None and change.prefix_cache != prefix_cache:
            there, flag = ("with", "--no-prefix-cache") if prefix_cache else ("without", "--prefix-cache")
            raise BadSetting(f"{name} changes nothing {there} a prefix cache: give {flag}")
        for other, its in change.instead.items():
            if settings.get(other) == its:
                raise BadSetting(
                    f"{name} changes nothing beside {other}={its}, which does its work: leave one out"
                )
        if change.in_core and change.shown is not None and not recorder:
            raise BadSetting(f"{name} is seen to be in force where steps are recorded: leave recorder on")
        package = change.packages.get(choice)
        if package is not None and find_spec(package) is None:
            raise BadSetting(f"{name} needs {package}: {sys.executable} -m pip install {package}")
        if choice != INSTALLED and (lacking := missing(change.needs)):
            raise BadSetting(
                f"{name} does not fit vLLM {fits.version()}, and was written for {fits.TRIED}: it has no "
                f"{', no '.join(lacking)}"
            )
        if choice == change.toggle.rewritten and (changed := differing(change.like)):
            raise BadSetting(
                f"{name} does not fit vLLM {fits.version()}: it is our own rewriting, after the code of "
                f"{fits.TRIED}, and here another one is {' and '.join(changed)}"
            )


def arguments(settings: Settings) -> dict[str, Any]:
    """What vLLM's engine is asked for by these choices."""
    return _merged(change.arguments.get(choice, {}) for change, choice in switched(settings))


def sampling(settings: Settings) -> dict[str, Any]:
    """What vLLM's SamplingParams are asked for by these choices."""
    return _merged(change.sampling.get(choice, {}) for change, choice in switched(settings))


def _merged(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in parts for name, value in each.items()}


def told() -> dict[str, str]:
    """The choices that this process was told of."""
    return dict(each.split("=") for each in os.environ.get(PUT, "").split())


def put() -> None:
    """The entry point of vllm.general_plugins."""
    for change, choice in switched(told()):
        change.put.get(choice, lambda: None)()


def check_in_force(settings: Settings, scheduler: Any = None) -> None:
    """Raises EngineError where a choice is not the one that vLLM shows, as far as it shows here: in its core
    with the `scheduler`, without one where outputs are processed."""
    for change, choice in switched(settings):
        if change.shown is None or change.in_core != (scheduler is not None):
            continue
        if (found := change.shown(scheduler)) != choice:
            raise EngineError(
                f"{change.toggle.name}={choice} is not in force: vLLM {fits.version()} runs with {found}"
            )
