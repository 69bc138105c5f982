"""`bench` in this process: as a person runs it, up to where something would be started."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil

from experiments.fuzzing.case import Broken
from harness.cli import app, exit_codes
from harness.cli.app import Bench
from harness.common import machine
from harness.report import figures, html  # noqa: F401 - seconds, which are no case's
from harness.serve import mock, server
from harness.serve.listening import bind
from harness.studies.evaluation import evaluate

DOCUMENTED = {0, 1, 2, 3, 4, 129, 130, 143}
LONGEST_LINE = 2000  # characters of an error
ALLOWED = "git"  # what may be started: it looks, and does nothing
COMMAND: Any = Bench()


class Starting(BaseException):
    """Here a process would be started, or a server would serve for ever."""


class Held(subprocess.Popen[Any]):
    """In place of Popen."""

    def __init__(self, args: Any, *given: Any, **named: Any) -> None:
        program = args if isinstance(args, str) else args[0]
        if Path(os.fsdecode(program)).name != ALLOWED:
            self.returncode = self._child_created = None  # what its destructor looks at
            raise Starting
        super().__init__(args, *given, **named)


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` None: it was about to start something."""

    code: int | None
    out: str
    err: str


@contextmanager
def nothing_starts() -> Iterator[None]:
    """What would be asked of this machine, or built, again and again is asked and built once."""

    def served(_: object, host: str, port: int, *rest: object) -> NoReturn:
        with bind(host, port):
            raise Starting

    def starting(*_: object) -> NoReturn:
        raise Starting

    with ExitStack() as stack:
        for each in (
            patch.object(subprocess, "Popen", Held),
            patch.object(mock, "run", served),
            patch.object(server, "serve", served),
            patch.object(evaluate, "evaluate", starting),  # lm-eval takes seconds to import
            patch.object(app, "built", cache(app.built)),
            patch.object(metadata, "entry_points", cache(metadata.entry_points)),
            patch.object(machine, "code", cache(machine.code)),
            patch.object(machine, "versions", cache(machine.versions)),
            patch.object(machine, "fingerprint", cache(machine.fingerprint)),
        ):
            stack.enter_context(each)
        yield


def bench(words: Sequence[str]) -> Ended:
    """One command to its end."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["bench", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            exit_codes.run(COMMAND)
        except Starting:
            code = None
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def judged(ended: Ended) -> str:
    """How it ended, in a word or two. Raises Broken where that is not as documented."""
    lines = ended.err.strip().splitlines()
    said = lines[-1] if lines else ""
    if "Traceback (most recent call last)" in ended.err:
        raise Broken("traceback", ended.err[-500:])
    if found := re.search(r"unexpected (\w+): .*", ended.err):
        raise Broken(f"unexpected {found[1]}", found[0][:500])
    if ended.code is None:
        return "would start"
    if ended.code not in DOCUMENTED:
        raise Broken("exit code", f"{ended.code}: {said[:500]}")
    if ended.code in (2, 4) and not said.startswith("bench: ") and "Usage: " not in ended.out + ended.err:
        raise Broken("no word", f"exit {ended.code}, and stderr ends with {said[:200]!r}")
    if len(said) > LONGEST_LINE:
        raise Broken("long line", f"{len(said)} characters: {said[:200]}")
    if "memory is used up" in said:
        raise Broken("memory", said[:500])
    return f"exit {ended.code}"


def rss() -> int:
    found: int = psutil.Process().memory_info().rss
    return found
