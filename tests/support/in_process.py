"""`bench` in the test's own process: seconds less than in one of its own."""

import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from overlap_bench.harness.cli import app
from overlap_bench.harness.common.processes import below
from tests.support.bench_command import last_line


class Printed(NamedTuple):
    code: int
    out: str
    err: str


def bench(*arguments: str, code: int | None = 0) -> Printed:
    """What a `bench` run in this process printed; it ended so, or as it liked (None)."""
    printed = _printed(arguments)
    assert code in (printed.code, None), printed.err
    return printed


def complaint(*arguments: str) -> str:
    """The only line of a `bench` run in this process that was asked for what is wrong."""
    printed = bench(*arguments, code=2)
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("bench: ")
    return printed.err.strip()


def ended(environment: Mapping[str, str], folder: Path, *arguments: str, code: int | None = 0) -> Printed:
    """As `bench`, in that folder and that environment, its path for modules included. No process of it is
    left."""
    before = below()
    with patch.dict(os.environ, environment, clear=True), pytest.MonkeyPatch.context() as here:
        for place in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
            if place:
                here.syspath_prepend(place)
        here.chdir(folder)
        here.setattr(tempfile, "tempdir", None)  # TMPDIR is read once
        printed = bench(*arguments, code=code)
    assert below() <= before
    return printed


def done(environment: Mapping[str, str], folder: Path, *arguments: str) -> str:
    """The stdout of a `bench` run that went well."""
    return ended(environment, folder, *arguments).out


def refused(environment: Mapping[str, str], folder: Path, *arguments: str, code: int = 2) -> str:
    """The last line of a `bench` run that printed no result and ended so."""
    printed = ended(environment, folder, *arguments, code=code)
    assert printed.out == ""
    assert last_line(printed.err).startswith("bench: ")
    return last_line(printed.err)


def _printed(arguments: Sequence[str]) -> Printed:
    out, err = (io.TextIOWrapper(io.BytesIO(), newline="") for _ in range(2))
    with (
        patch.object(sys, "argv", ["bench", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        app.main()
    code = end.value.code
    assert isinstance(code, int)
    for stream in (out, err):
        stream.seek(0)
    return Printed(code, out.read(), err.read())
