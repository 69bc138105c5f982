"""What engines say before anything boots: that an arm can't run as it is set. Boots take long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from engines import api
from engines.preflight import REFUSED
from harness.plan.design import Arm
from harness.run.events import Said
from harness.run.hosts import SIDE_BY_SIDE, RunFailed, environment, spec_of

PREFLIGHT_S = 600  # for an engine to say what can't work; it may import for a minute


def ask(arms: Sequence[Arm], say: Callable[[Said], object]) -> None:
    """Ask each arm once whose engine has something to say, some of them at once: each imports for seconds.
    Raises BadSetting where one says that it can't run as set, RunFailed where it fails or hangs."""
    asked: list[Arm] = []
    for arm in arms:
        alike = (msgspec.structs.replace(arm, name=each.name) == each for each in asked)
        if spec_of(arm).preflight and not any(alike):
            asked.append(arm)
    for first in range(0, len(asked), SIDE_BY_SIDE):
        several = asked[first : first + SIDE_BY_SIDE]
        names = " and ".join(arm.name for arm in several)
        say(Said(f"asking whether {names} can run here, before anything boots"))
        check(several)


def check(arms: Sequence[Arm]) -> None:
    """Ask these at once."""
    with ExitStack() as stack:
        asked = []
        for arm in arms:
            process = stack.enter_context(_asked(arm))
            stack.callback(process.kill)
            asked.append(process)
        for arm, process in zip(arms, asked, strict=True):
            _check_answer(arm, process)


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
        [arm.python or sys.executable, "-m", "engines.preflight", msgspec.json.encode(config).decode()],
        env=environment(arm.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _check_answer(arm: Arm, process: subprocess.Popen[str]) -> None:
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
