"""Whatever a file or a command line holds, `bench` ends as documented, with a line that says why."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from overlap_bench.harness.cli import app, printing
from overlap_bench.harness.common import machine
from overlap_bench.harness.serve import mock
from overlap_bench.harness.studies.evaluation import evaluate
from overlap_bench.harness.workload.arrivals import ARRIVALS
from tests.support.places import ROOT

REFERENCE = ROOT / "results" / "reference"
DOCUMENTED = {0, 1, 2, 3, 4, 129, 130, 143}
LONGEST_LINE = 2000  # characters of an error
COMMAND: Any = app.Bench()
FEW = settings(
    max_examples=30,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a case is short as it is, and a failing one is slow to shrink
    database=None,
)


class Starting(BaseException):
    """A process would be started here, or a server would serve for ever."""


class Held(subprocess.Popen[Any]):
    """In place of Popen: git alone may run, for it looks and does nothing."""

    def __init__(self, args: Any, *given: Any, **named: Any) -> None:
        if Path(os.fsdecode(args if isinstance(args, str) else args[0])).name != "git":
            self.returncode = self._child_created = None  # what its destructor looks at
            raise Starting
        super().__init__(args, *given, **named)


def starting(*_: object, **__: object) -> NoReturn:
    raise Starting


@pytest.fixture(scope="module", autouse=True)
def nothing_starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder some levels below one that goes with it: "../.." is still inside."""
    folder = tmp_path_factory.mktemp("fuzz") / "a" / "b" / "c"
    folder.mkdir(parents=True)
    asked_once = ((app, "built"), (metadata, "entry_points"), (machine, "code"), (machine, "fingerprint"))
    with pytest.MonkeyPatch.context() as patched, chdir(folder):
        patched.setattr(subprocess, "Popen", Held)
        patched.setattr(mock, "run", starting)
        patched.setattr(evaluate, "evaluate", starting)  # lm-eval takes seconds to import
        for module, name in asked_once:
            patched.setattr(module, name, cache(getattr(module, name)))
        yield


def end_of(*words: str) -> str:
    """How one command ended, in a word or two. Fails where that is not as documented."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["bench", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            printing.run(COMMAND)
        except Starting:
            return "would start"
        except SystemExit as end:
            code = int(end.code or 0)
    said = err.getvalue()
    last = (said.strip().splitlines() or [""])[-1]
    assert "Traceback (most recent call last)" not in said
    assert not re.search(r"unexpected (\w+): ", said), said
    assert code in DOCUMENTED, said
    assert code not in (2, 4) or last.startswith("bench: ") or "Usage: " in out.getvalue() + said, (
        code,
        said,
    )
    assert len(last) <= LONGEST_LINE
    return f"exit {code}"


# ---------------------------------------------------------------------------------------------------------
# Files

NUMBERS = (0, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e300, float("inf"), float("nan"), True, None)
STRINGS = ("", "\x1b[2J", "\ufeff", "\ud800", "é", "NaN", "-inf", "٣", "[red", "../..", "a" * 5000)
CONTAINERS: tuple[Any, ...] = ([], {}, [[]], [None], {"": None}, [0] * 100)
ODD = st.sampled_from((*NUMBERS, *STRINGS, *CONTAINERS)) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=8,
)


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut, doubled, flipped, filled: what a disk, a network or a person leaves of a file."""
    data = bytearray(content)
    for _ in range(draw(st.sampled_from((1, 1, 2, 8)))):
        at = draw(st.integers(0, len(data)))
        more = draw(st.binary(max_size=16))
        end = at + draw(st.sampled_from((0, len(more), len(data))))
        data[at:end] = draw(st.sampled_from((b"", more, bytes(data[at : at + 200]))))
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """One value somewhere in it is another, twice there, or gone. One document, or one a line."""
    try:
        documents = [json.loads(content)]
    except ValueError:
        documents = [json.loads(line) for line in content.splitlines() if line.strip()]
    inside: Any = documents
    key: Any = draw(st.integers(0, len(documents) - 1))
    while isinstance(inside[key], list | dict) and inside[key] and draw(st.integers(0, 9)):
        inside = inside[key]
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
    if draw(st.integers(0, 3)):
        inside[key] = draw(ODD)
    elif inside is not documents:
        del inside[key]
    return b"\n".join(json.dumps(each).encode() for each in documents)


BY_FORMAT: dict[str, Callable[[bytes], st.SearchStrategy[bytes]]] = {
    ".json": damaged_json,
    ".jsonl": damaged_json,
}


@dataclass(frozen=True, slots=True)
class Read:
    """A file of a folder, and the commands that read it: FOLDER and FILE in a word stand for those."""

    folder: Path  # copied, and the file in it changed
    file: str
    commands: tuple[tuple[str, ...], ...]


RUN = REFERENCE / "runs" / "pinned-h2d-turns"
IMPORTS = ROOT / "tests" / "fixtures" / "imports"
OF_RUN = (
    ("compare", "FOLDER"),
    ("rerun", "FOLDER", "--trust"),
    ("report", "FOLDER", "-o", "r.md"),
)
QUICK = ("--num-requests", "4", "--trials", "1")
PROMPTS = (("run", "--engine", "overlap", "--prompts", "FILE", *QUICK),)
TRACE = (("run", "--engine", "overlap", "--arrival", "trace", "--trace", "FILE", *QUICK),)
OF_KERNEL = {"correlation": 5, "device": 0, "stream": 7}
CHROME = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "host"}},
    {"ph": "X", "name": "step", "cat": "phase", "ts": 0.0, "dur": 9.0, "pid": 1, "tid": 1},
    {"ph": "X", "name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 1.0, "dur": 1.0, "pid": 1, "tid": 1}
    | {"args": {"correlation": 5}},
    {
        "ph": "X",
        "name": "gemm",
        "cat": "kernel",
        "ts": 3.0,
        "dur": 4.0,
        "pid": 2,
        "tid": 7,
        "args": OF_KERNEL,
    },
    {"ph": "s", "name": "launch", "cat": "ac2g", "id": 5, "ts": 1.0, "pid": 1, "tid": 1},
    {"ph": "f", "bp": "e", "name": "launch", "cat": "ac2g", "id": 5, "ts": 3.0, "pid": 2, "tid": 7},
]
MADE = {
    "chrome.json": (json.dumps({"traceEvents": CHROME}), (("trace", "FILE", "--all"),)),
    "prompts.txt": ("How are you?\n\nWrite about rivers.\n", PROMPTS),
    "sharegpt.json": (
        json.dumps([{"conversations": [{"from": "human", "value": "How are you?"}]}] * 3),
        PROMPTS,
    ),
    "mooncake.jsonl": (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 3,
        TRACE,
    ),
    "burst.csv": ("Timestamp,Request tokens,Response tokens\n1,10,20\n2,10,20\n", TRACE),
}


@cache
def made() -> Path:
    """Files that nothing in the repository is an example of."""
    folder = Path.cwd() / "made"
    folder.mkdir()
    for name, (content, _) in MADE.items():
        (folder / name).write_text(content)
    return folder


def reads() -> Iterator[Read]:
    for file in ("manifest.json", "summary.json", "values.parquet"):
        yield Read(RUN, file, OF_RUN)
    for path in sorted(IMPORTS.glob("*.json*")):
        first = ":1" if path.suffix == ".jsonl" else ""  # of the results in it
        yield Read(IMPORTS, path.name, (("import", f"FILE{first}", "--out", "out"),))
    yield Read(ROOT / "tests" / "fixtures" / "nsys", "host_2022.sqlite", (("trace", "FILE", "--all"),))
    for name, (_, commands) in MADE.items():
        yield Read(Path(), name, commands)


def filled(words: Sequence[str], folder: Path, file: str) -> list[str]:
    return [word.replace("FOLDER", str(folder)).replace("FILE", str(folder / file)) for word in words]


@pytest.mark.parametrize("read", list(reads()), ids=lambda each: each.file)
@FEW
@given(data=st.data())
def test_no_damaged_file_is_a_fault(read: Read, data: st.DataObject) -> None:
    source = made() if read.folder == Path() else read.folder
    content = (source / read.file).read_bytes()
    by_format = BY_FORMAT.get(Path(read.file).suffix, damaged_bytes)
    damage = data.draw(st.sampled_from((by_format, damaged_bytes)))
    folder = Path("copy")
    shutil.rmtree(folder, ignore_errors=True)
    if read.folder == RUN:
        shutil.copytree(source, folder)
    folder.mkdir(exist_ok=True)
    (folder / read.file).write_bytes(data.draw(damage(content)))
    for words in read.commands:
        end_of(*filled(words, folder, read.file))


def test_what_is_damaged_was_read_before_it_was() -> None:
    """Else all that is tried are ways to be refused."""
    for read in reads():
        source = made() if read.folder == Path() else read.folder
        for words in read.commands:
            ended = end_of(*filled(words, source, read.file))
            assert ended in ("exit 0", "exit 3", "would start"), (read, words)


# ---------------------------------------------------------------------------------------------------------
# Command lines

SENSIBLE: dict[str, tuple[str, ...]] = {
    "variant": ("overlap", "pinned-h2d", "all"),
    "engine": ("overlap", "openai", "transformers", "vllm"),
    "both": ("h2d=pinned", "schedule=overlap", "env.X=1", "pace=10ms"),
    "before": ("h2d=pinned", "schedule=serial", "python=/bin/true", "url=http://127.0.0.1:9"),
    "after": ("h2d=packed", "schedule=overlap", "cmd=true", "env.A=b"),
    "arrival": tuple(ARRIVALS),
    "over": ("concurrency=1,4", "h2d=pageable,pinned", "variant=overlap,all"),
    "toggles": ("h2d,sync", "schedule,h2d,output"),
    "run": (str(RUN),),
    "runs": (str(RUN), f"{RUN}:before"),
    "files": (str(IMPORTS / "vllm.json"),),
    "name": ("gil", "overlap"),
    "base_ref": ("HEAD", "HEAD~1"),
    "format": ("table", "markdown", "json", "csv"),
}
VALUES = ("0", "1", "2", "6", "100", "0.5", "-1", "50%", "inf", "nan", "1e999", "٣", "1_000")
TEXTS = (
    "",
    " ",
    "a\nb",
    "é",
    "💥",
    "--",
    "=",
    "a=b",
    "%s",
    "{0}",
    "[red",
    "../..",
    "~nobody",
    "a" * 5000,
    "\udcff",
)
# A traceback, a page and a browser are what they are for; doctor looks around for seconds.
LEFT_OUT = ("debug", "help", "help_all", "opened")


@cache
def commands() -> list[tuple[tuple[str, ...], Any]]:
    """Each command's words, and what typer made of it."""

    def below(group: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, each in group.items():
            if hasattr(each, "commands"):
                yield from below(each.commands, (*path, name))
            elif name != "doctor":
                yield (*path, name), each

    return list(below({name: app.built(name) for name in app.COMMANDS}, ()))


@st.composite
def command_lines(draw: st.DrawFn) -> Sequence[str]:
    path, command = draw(st.sampled_from(commands()))
    words = list(path)
    options = [each for each in command.params if each.name not in LEFT_OUT]
    for option in draw(st.lists(st.sampled_from(options), max_size=6, unique_by=id)) if options else ():
        known = ("results", "a/b", "é") if option.name == "out" else SENSIBLE.get(option.name, VALUES)
        odd = () if option.name == "out" else TEXTS  # what is written to stays inside of the folder
        value = draw(st.sampled_from((*known, *known, *known, *odd)))
        if option.param_type_name == "argument":
            words.append(value)
        elif option.is_flag:
            words.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        else:
            words += [option.opts[0], value]
    return words


@settings(FEW, max_examples=200)
@given(words=command_lines())
def test_no_command_line_is_a_fault(words: Sequence[str]) -> None:
    end_of(*words)
