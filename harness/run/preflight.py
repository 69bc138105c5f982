"""What engines say before anything boots: that an arm can't run as it is set. Boots take long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.preflight import REFUSED
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run.hosts import SIDE_BY_SIDE, RunFailed, environment, spec_of
from overlap_bench.harness.run.messages import Said

PREFLIGHT = "overlap_bench.engines.preflight"
PREFLIGHT_S = 600  # for an engine to say what can't work; it may import for a minute


def ask(arms: Sequence[Arm], say: Callable[[Said], object]) -> dict[str, str]:
    """Ask each arm once whose engine has something to say, some of them at once: each imports for seconds.
    The kind of device that each would run on, by name. Raises BadSetting where one says that it can't run as
    set, RunFailed where it fails or hangs."""
    alike: dict[bytes, list[Arm]] = {}  # by all but their names; the first answers for them
    for arm in arms:
        if spec_of(arm).preflight:
            unnamed = msgspec.json.encode(msgspec.structs.replace(arm, name=""))
            alike.setdefault(unnamed, []).append(arm)
    kinds: dict[str, str] = {}
    groups = list(alike.values())
    for first in range(0, len(groups), SIDE_BY_SIDE):
        several = groups[first : first + SIDE_BY_SIDE]
        names = " and ".join(arms[0].name for arms in several)
        say(Said(f"asking whether {names} can run here, before anything boots"))
        for arms, kind in zip(several, check([arms[0] for arms in several]), strict=True):
            kinds |= {arm.name: kind for arm in arms}
    return kinds


def check(arms: Sequence[Arm]) -> list[str]:
    """Ask these at once; the kind of device of each."""
    with ExitStack() as stack:
        asked = []
        for arm in arms:
            process = stack.enter_context(_asked(arm))
            stack.callback(process.kill)
            asked.append(process)
        return [_answer(arm, process) for arm, process in zip(arms, asked, strict=True)]


def _asked(arm: Arm) -> subprocess.Popen[str]:
    config = api.HostConfig(
        name=arm.name,
        build=spec_of(arm).build,
        options=arm.options,
        toggles=arm.toggles,
        inbox="",
        replies="",
        events="",
    )
    return subprocess.Popen(
        [arm.python or sys.executable, "-m", PREFLIGHT, msgspec.json.encode(config).decode()],
        env=environment(arm.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )


def _answer(arm: Arm, process: subprocess.Popen[str]) -> str:
    try:
        answer, errors = process.communicate(timeout=PREFLIGHT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{arm.name} hangs before it boots: no answer for {PREFLIGHT_S} s") from None
    said = answer.strip().splitlines()
    if process.returncode == REFUSED and said:
        raise api.BadSetting(f"{arm.name} can't run: {said[-1]}")
    if process.returncode:
        last = (errors.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
        raise RunFailed(f"{arm.name} failed before it booted: {last}", errors)
    if not said:
        raise RunFailed(f"{arm.name} ended before it booted, and said nothing", errors)
    return said[-1]
