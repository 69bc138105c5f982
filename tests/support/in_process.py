"""`bench` in the test's own process: seconds less than in one of its own."""

import io
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from overlap_bench.harness.cli import app
from overlap_bench.harness.common.processes import below
from tests.support.bench_command import last_line


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a `bench` run in this process."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


def ended(environment: Mapping[str, str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    """What `start(environment, folder, *arguments).end()` gives, of a `bench` run in this process: in that
    folder and that environment, its path for modules included. No process of it is left."""
    before = below()
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), newline="") for _ in range(2))
    with (
        patch.dict(os.environ, environment, clear=True),
        pytest.MonkeyPatch.context() as here,
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        for place in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
            if place:
                here.syspath_prepend(place)
        here.chdir(folder)
        here.setattr(tempfile, "tempdir", None)  # TMPDIR is read once
        code = bench(here, *arguments)
    assert below() <= before
    return code, *(_written(each) for each in (stdout, stderr))


def done(environment: Mapping[str, str], folder: Path, *arguments: str) -> str:
    """The stdout of a `bench` run that went well."""
    code, stdout, stderr = ended(environment, folder, *arguments)
    assert code == 0, stderr
    return stdout


def refused(environment: Mapping[str, str], folder: Path, *arguments: str, code: int = 2) -> str:
    """The last line of a `bench` run that printed no result and ended so."""
    found, stdout, stderr = ended(environment, folder, *arguments)
    assert (found, stdout) == (code, ""), stderr
    assert last_line(stderr).startswith("bench: ")
    return last_line(stderr)


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
