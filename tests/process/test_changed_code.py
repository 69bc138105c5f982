"""What the arms of a comparison ran of the code that they differ by, seen in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_bench.harness.report import tables
from overlap_bench.harness.run import watch, watcher
from overlap_bench.harness.run.watch import BOOTING, FOLDER, OVER, SERVING, Seen
from overlap_bench.harness.store.manifest import ChangedCode, read_manifest
from tests.support.bench_command import last_line, start
from tests.support.clockwork import installed
from tests.support.in_process import done, ended
from tests.support.made_blocks import manifest, result
from tests.support.places import ROOT
from tests.support.repositories import commit, git

EXAMPLE = ROOT / "examples" / "own_engine" / "paced_engine.py"
QUICK = (
    *("--engine", "paced", "--no-pretok", "--num-requests", "4", "--max-new-tokens", "8"),
    *(
        "--interval-ms",
        "1",
        "--rounds",
        "1",
        "--interleaved-rounds",
        "0",
        "--warmup-rounds",
        "0",
        "--format",
        "json",
    ),
)
MAP = """import array
class Map:
    def __init__(self):
        self.items = {}
    def insert(self, key):
        self.items[key] = key
"""

WATCHED = """
import asyncio, multiprocessing, os, subprocess, sys, threading, time
import work
from torch._dynamo import symbolic_convert

def phase(now):
    with open(os.path.join(os.environ["BENCH_WATCH"], "phase"), "r+b") as file:
        file.write(bytes([now]))

if __name__ == "__main__":
    stop = threading.Event()
    threads = [threading.Thread(target=each, args=(stop,)) for each in (work.loop, work.loop_in_asyncio)]
    for each in threads:
        each.start()
    work.both(), work.as_it_boots()
    while len(work.began) < 2:
        time.sleep(0.01)
    phase(1)
    work.both(), work.decorated(), work.Class().value
    symbolic_convert.Translator(work.inlined.__code__)
    symbolic_convert.Translator(work.inlined_too.__code__)
    with open(sys.argv[1]):
        pass
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=getattr(work, how))
        child.start()
        child.join()
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # as the emulated device gets it
    subprocess.run([sys.executable, "-c", "import work; work.run_by_another()"], env=path, check=True)
    work.passed.wait()
    work.passed_in_asyncio.wait()
    phase(2)
    work.never()
    stop.set()
    for each in threads:
        each.join()
"""
WORK = """
import asyncio, functools, threading, time
began, passed, passed_in_asyncio = [], threading.Event(), threading.Event()
def loop(stop):
    began.append(1)
    while not stop.is_set():
        time.sleep(0.001)
        if fork_is_over: passed.set()
def loop_in_asyncio(stop):
    asyncio.run(turning(stop))
async def turning(stop):
    began.append(1)
    while not stop.is_set():
        await asyncio.sleep(0.001)
        if fork_is_over: passed_in_asyncio.set()
def both(): pass
def as_it_boots(): pass
def never(): pass
def decorate(function):
    return functools.wraps(function)(lambda: function())
@decorate
def decorated():
    global fork_is_over
    fork_is_over = True
fork_is_over = False
class Class:
    @property
    def value(self): return [each for each in "ab"]
def fork(): pass
def spawn(): pass
def run_by_another(): pass
def inlined(): pass
def inlined_too(): pass
"""
TRACER = """
class Translator:
    def __init__(self, f_code): pass
"""


def test_every_process_tells_what_it_loads_and_which_functions_run_when(tmp_path: Path) -> None:
    """Also a loop that began as the engine booted, and goes on while requests are served."""
    for name, text in (("work.py", WORK), ("main.py", WATCHED), ("data.json", "{}")):
        (tmp_path / name).write_text(text)
    (tmp_path / "torch" / "_dynamo").mkdir(parents=True)  # as in a process that compiles by torch
    for name, text in (("__init__", ""), ("_dynamo/__init__", ""), ("_dynamo/symbolic_convert", TRACER)):
        (tmp_path / "torch" / f"{name}.py").write_text(text)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import colorsys; print('the hidden one')")
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "phase").write_bytes(bytes([BOOTING]))
    asked = {"code": [str(tmp_path / "work.py")], "data": [str(tmp_path / "data.json")], "endings": []}
    (folder / "asked.json").write_text(json.dumps(asked))
    path = os.pathsep.join((str(Path(watcher.__file__).parent), str(tmp_path / "site")))
    said = subprocess.run(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "data.json")],
        env={**os.environ, "PYTHONPATH": path, FOLDER: str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.count("the hidden one") >= 3  # in each process
    assert said.stderr == ""
    seen = Seen.read(folder)
    when = {name: phase for (_, name, _), phase in seen.code.items()}
    assert when["as_it_boots"] == BOOTING
    running = ("loop", "turning", "both", "decorated", "value", "fork", "spawn", "run_by_another")
    assert {each: when[each] for each in running} == dict.fromkeys(running, SERVING)
    assert not {"never"} & when.keys()
    assert OVER not in when.values()
    lines = WORK.splitlines()
    assert ("decorated", lines.index("@decorate") + 1) in {(name, line) for _, name, line in seen.code}
    assert len(seen.pids) == 5  # the forked one too, and the one that multiprocessing starts for itself
    assert {name for _, name, _ in seen.traced} == {"inlined", "inlined_too"}
    assert seen.data == {str(tmp_path / "data.json"): SERVING}
    assert seen.modules[str(tmp_path / "work.py")] == "work"
    assert any(name == "colorsys" for name in seen.modules.values())
    assert not any(str(Path(watcher.__file__).parent) in file for file in seen.modules)
    assert any("_multiprocessing" in file for file in seen.compiled)


def engine(imports: str) -> str:
    """The example, which imports something with its first request."""
    text = EXAMPLE.read_text()
    takes = "        self.running.append(Running(request, now()))\n"
    assert takes in text
    return text.replace(takes, f"{takes}        {imports}\n")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    values = installed(tmp_path_factory.mktemp("site"), paced="paced_engine:SPEC")
    return {**values, "TMPDIR": str(tmp_path_factory.mktemp("rooms"))}


def beside(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{folder}"}


def test_a_gate_on_a_change_that_no_request_runs_is_undecided_and_one_on_other_files_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The head changes a map that nobody asks. Both import what a build left in the checkout, with
    their first request."""
    repository = tmp_path / "repository"
    files = {".gitignore": "made.py\n", "paced_engine.py": engine("import fast_map, made; fast_map.Map()")}
    commit(repository, {**files, "fast_map.py": MAP}, "base")
    commit(repository, {"fast_map.py": MAP.replace("= key", "= (key,)")}, "head")
    (repository / "made.py").write_text("VERSION = 1")
    asked = ("gate", *QUICK, "--trials", "1", "--base-ref", "base", "--head-ref", "head")

    stderr = ended(beside(environment, repository), repository, *asked, code=2).err
    assert (
        f"files of the project that a build made and base does not have: {repository / 'made.py'}" in stderr
    )
    assert "--overlay 'made.py'" in last_line(stderr)

    stdout = ended(beside(environment, repository), repository, *asked, "--overlay", "made.py", code=3).out
    found = json.loads(stdout)
    (folder,) = (repository / "results").glob("*-paced-*")
    changed = read_manifest(folder).changed_code
    assert not changed.counts
    assert changed.never == ["fast_map.py: Map.insert"]
    assert found["gate"]["doubts"] == [
        "the code that differs ran in no round: fast_map.py: Map.insert",
    ]
    assert found["comparisons"][0]["changed_code"]["never"] == changed.never
    assert [each["file"] for each in found["comparisons"][0]["overlaid"]] == ["made.py"]

    # What the user did not commit, and Python finds in the checkout.
    git(repository, "rm", "--quiet", "--cached", "fast_map.py")
    git(repository, "commit", "--quiet", "-m", "without")
    of_head = (*asked[:-1], "HEAD", "--overlay", "made.py")
    stderr = ended(beside(environment, repository), repository, *of_head, code=2).err
    assert "after was to run the code of HEAD, and ran files of the project from elsewhere: " in stderr
    assert str(repository / "fast_map.py") in last_line(stderr)


def test_two_interpreters_are_told_what_their_packages_differ_by(
    environment: dict[str, str], tmp_path: Path
) -> None:
    options: list[str] = []
    for side in ("before", "after"):
        folder = tmp_path / side
        folder.mkdir()
        text = EXAMPLE.read_text()
        (folder / "paced_engine.py").write_text(
            text if side == "before" else text.replace("launched = now()", "launched = now() + 0")
        )
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        options += [f"--{side}", f"python={python}"]
    known = beside(environment, tmp_path / "before")
    stdout = done(known, tmp_path, "run", *QUICK, "--trials", "1", *options)
    found: dict[str, Any] = json.loads(stdout)["comparisons"][0]["changed_code"]
    assert found["in_rounds"] == ["paced_engine.py: PacedEngine.step"]
    assert not [*found["at_boot"], *found["never"], *found["other"]]


def test_a_run_whose_code_was_edited_since_is_not_gone_on_with(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "paced_engine.py").write_text(
            EXAMPLE.read_text().replace("launched = now()", f"launched = now() + {len(side) - 5}")
        )
    options = [f"--{side}=env.PYTHONPATH={tmp_path / side}" for side in ("before", "after")]
    known = beside(environment, tmp_path / "before")
    bench = start(known, tmp_path, "run", *QUICK, "--trials", "3", *options)
    bench.wait_for("trial 1 of 3 done")
    bench.interrupt()
    (folder,) = (tmp_path / "results").iterdir()
    file = tmp_path / "after" / "paced_engine.py"
    measured = file.read_text()
    file.write_text(measured.replace("now() + 0", "now() + 1"))
    said = last_line(ended(known, tmp_path, "run", "--resume", str(folder), code=2).err)
    assert "began with other code: what its arms differ by was edited since" in said
    file.write_text(measured)
    done(known, tmp_path, "run", "--resume", str(folder))


@pytest.mark.parametrize(
    ("lines", "python"),
    [
        ("#!{here}\n", True),
        ("#!/usr/bin/env -S python3\n", True),
        ('#!/bin/sh\n\'\'\'exec\' "{here}" "$0" "$@"\n', True),
        ('#!/bin/sh\nexec vllm "$@"\n', False),
        ("#!/usr/bin/env bash\n", False),
    ],
)
def test_a_script_names_its_python_or_nothing_is_started(tmp_path: Path, lines: str, python: bool) -> None:
    script = tmp_path / "serve"
    script.write_text(lines.format(here=sys.executable))
    script.chmod(0o755)
    found = watch._interpreter_of(str(script))
    assert (found is not None and Path(found).name.startswith("python")) == python


def test_a_program_that_is_no_python_is_not_started_to_look_for_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "serve"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    (plan,) = [each for each in manifest().design.arms if each.name == "before"]
    arm = msgspec.structs.replace(plan, toggles={"cmd": f"{script} --port {{port}}"})

    def started(*given: Any, **named: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(subprocess, "run", started)
    assert watch.located(arm, ["vllm"]) == {}


def test_where_nothing_could_be_compared_no_function_is_said_to_be_the_same() -> None:
    unknown = ChangedCode(
        functions=0,
        in_rounds=[],
        at_boot=[],
        never=[],
        unseen=[],
        other=[],
        used=[],
        unwatched="none",
    )
    (only,) = result().comparisons
    said = tables.changed_code(msgspec.structs.replace(only, changed_code=unknown)) or ""
    assert said == "Changed code: what differs is not known. Not all could be seen: none."
