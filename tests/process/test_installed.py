"""What is installed: its commands in an empty folder, and its short names beside a project that has these."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from overlap_bench.harness.cli.app import COMMANDS
from tests.support.places import FIXTURES, ROOT

# What a wheel holds, without the wheel: setuptools of before 70.1 make none by themselves.
INSTALL = """
import runpy, sys

room, site = sys.argv[1:]
build = ["egg_info", "--egg-base", room, "build", "--build-base", room]
packages = ["install_lib", "--no-compile", "--install-dir", site]
sys.argv = ["setup.py", "-q", *build, *packages, "install_egg_info", "--install-dir", site]
runpy.run_path("setup.py")
"""
COMMAND_LINES = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from overlap_bench_command import main

ended = []
for words in json.load(sys.stdin):
    run = next(Path().glob("results/*-mine-*"), "")
    sys.argv = ["bench", *(word.format(run=run) for word in words)]
    streams = [io.TextIOWrapper(io.BytesIO()) for _ in range(2)]
    try:
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            main()
    except SystemExit as end:
        ended.append([end.code, *(each.detach().getvalue().decode() for each in streams)])
from engines.mine import STEP_US  # the project's, whose folder lies in front
from overlap_bench import __file__ as ours
print(json.dumps([ours, ended]))
"""
RUN = "--trials 1 --rounds 1 --num-requests 4 --max-new-tokens 4"
PROJECT = {
    "engines/__init__.py": "",
    "engines/mine.py": "STEP_US = 2000\n",
    "harness.py": "WRITE_US = 100\n",
    "mine.py": """
from dataclasses import replace

import paced_engine
from engines.mine import STEP_US
from harness import WRITE_US
from overlap_bench import Engine

paced_engine.STEP_US, paced_engine.WRITE_US = STEP_US, WRITE_US
SPEC = replace(paced_engine.SPEC, name="mine", build="mine:build")
LATE = replace(paced_engine.SPEC, name="late", build="early:build")


def build(options, toggles):
    assert issubclass(paced_engine.PacedEngine, Engine)
    return paced_engine.PacedEngine(options, toggles)
""",
    "early.py": "from engines.api import EngineSpec\n",  # written before overlap_bench was there
    "mine-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1\n",
    "mine-1.dist-info/entry_points.txt": """
[bench.engines]
mine = mine:SPEC
late = mine:LATE
early = early:SPEC
""",
}
TRACE = [
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start, "dur": 60, "args": {}}
    for start in (100, 200, 300)
]


def written(where: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    return where


def python(code: str, *arguments: str, path: list[Path], cwd: Path, given: str = "") -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, input=given, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that this project was installed into, as from a zip of it: links in it became files."""
    pytest.importorskip("setuptools")
    room, site, unpacked = map(tmp_path_factory.mktemp, ("room", "site", "unpacked"))
    for name in ("engines", "harness", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (unpacked / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "overlap_bench", unpacked / "overlap_bench", symlinks=True)
    for link in [each for each in (unpacked / "overlap_bench").iterdir() if each.is_symlink()]:
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))
    code, _, errors = python(INSTALL, str(room), str(site), path=[], cwd=unpacked)
    assert code == 0, errors
    return site


def test_every_command_works_in_an_empty_folder_and_a_project_keeps_its_names(
    site: Path, tmp_path: Path
) -> None:
    project = written(tmp_path / "project", PROJECT)
    empty = written(tmp_path / "empty", {"trace.json": json.dumps(TRACE)})
    lines = [
        "variants",
        "variants overlap",
        "variants --claims",
        "variants --claims -o claims.html",
        "engines",
        "engines overlap",
        "devices",
        "doctor",
        "experiment list",
        *(f"experiment show {each.stem}" for each in (ROOT / "harness/plan/claims").glob("*.toml")),
        f"run --engine mine --before output=inline --after output=deferred {RUN}",
        f"run --engine late {RUN}",
        "compare {run}",
        "explain {run}",
        "report {run} -o report.html",
        "report {run} -o report.md",
        "gate {run}",
        "trace trace.json",
        f"import {FIXTURES}/imports/vllm.json",
        *(f"{name} --help" for name in COMMANDS),
    ]
    code, said, errors = python(
        COMMAND_LINES,
        path=[project, ROOT / "examples" / "own_engine", site],
        cwd=empty,
        given=json.dumps([line.split() for line in lines]),
    )
    assert code == 0, errors
    ours, ended = json.loads(said)
    assert Path(ours).is_relative_to(site)
    told = dict(zip(lines, ended, strict=True))

    failed, _, why = told.pop(f"run --engine late {RUN}")
    assert failed == 2
    assert f"No module named 'engines.api'; engines is {project}/engines/__init__.py here: " in why
    decided, *_ = told.pop("gate {run}")
    assert decided in (1, 3)  # one block
    assert {line: each for line, each in told.items() if each[0] != 0} == {}

    assert " claims, 0 of them measured" not in told["variants --claims"][1]  # what was measured ships too
    assert "roseinfer-pinned-h2d" in told["experiment list"][1]
    early = "engine early of mine can't be loaded: ModuleNotFoundError: No module named 'engines.api'; "
    assert sum(early in errors for _, _, errors in ended) == 1
    assert (empty / "report.html").stat().st_size > 10_000


def test_all_but_documents_is_installed(site: Path) -> None:
    def files(folder: Path) -> set[Path]:
        return {
            path.relative_to(folder)
            for name in ("engines", "harness")
            for path in (folder / name).rglob("*")
            if path.is_file() and path.suffix not in (".md", ".pyc")
        }

    assert files(site / "overlap_bench") == files(ROOT)
    assert {path.name for path in site.iterdir() if not path.name.endswith(("-info", "__pycache__"))} == {
        *("overlap_bench", "engines.py", "harness.py", "overlap_bench_command.py")
    }


def test_the_command_says_where_overlap_bench_is_somebody_elses(site: Path, tmp_path: Path) -> None:
    written(tmp_path, {"overlap_bench.py": ""})
    main = "from overlap_bench_command import main; main()"
    code, said, errors = python(main, "engines", path=[tmp_path, site], cwd=tmp_path)
    assert (code, said) == (2, "")
    assert errors == (
        f"bench: {tmp_path}/overlap_bench.py takes the place of overlap-bench's own package: "
        "give it another name, or leave its folder out of PYTHONPATH\n"
    )


# -- engines and harness, which are ours where nobody else has them ------------------------------------------

SAME = """
import sys
import engines.api.contract, harness.stats.paired, overlap_bench
from engines.api import Engine

assert Engine is overlap_bench.Engine
assert harness.load.__module__.endswith("harness")
for name in ("engines.api.contract", "harness.stats.paired"):
    assert sys.modules[name] is sys.modules[f"overlap_bench.{name}"]
"""
THEIRS = """
import overlap_bench.engines.api, overlap_bench.harness
from engines.mine import MODEL
from harness.tools.deep import TOOL
import engines, harness

assert (MODEL, TOOL) == ("model", "tool")
assert overlap_bench.Engine.__module__ == "overlap_bench.engines.api.contract"
assert str(engines.__path__[0]).startswith(sys.argv[1])
"""
DEEP = {"engines/mine.py": "MODEL = 'model'\n", "harness/tools/deep.py": "TOOL = 'tool'\n"}
INIT = {"engines/__init__.py": "from engines.mine import MODEL\n", "harness/__init__.py": ""}


LATE = """
sys.path.append(f"{sys.argv[1]}/late")
from engines.mine import MODEL

assert MODEL == "model"
"""


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "checkout"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("layout", ["packages", "folders", "broken", "none"])
def test_a_short_name_is_a_projects_and_else_ours(
    installed: bool, first: str, layout: str, site: Path, tmp_path: Path
) -> None:
    ours = site if installed else ROOT
    broken = {"engines/__init__.py": "import a_module_that_is_not_there\n"}
    late = {f"late/{name}": text for name, text in DEEP.items()}
    files = {"packages": {**DEEP, **INIT}, "folders": DEEP, "broken": {**DEEP, **broken}, "none": late}
    written(tmp_path, files[layout])
    path = [ours, tmp_path] if first == "ours" else [tmp_path, ours]
    code = {"none": SAME + LATE, "folders": SAME + THEIRS}.get(layout, f"import sys\n{THEIRS}")
    status, _, errors = python(code, str(tmp_path), path=path, cwd=tmp_path)
    if layout == "broken":
        assert "No module named 'a_module_that_is_not_there'" in errors
    else:
        assert status == 0, errors


def test_harness_still_runs_as_a_module(site: Path, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['bench', 'devices']; runpy.run_module('harness', run_name='__main__')"
    )
    for place in (site, ROOT):
        status, said, errors = python(code, path=[place], cwd=tmp_path)
        assert status == 0, errors
        assert said.startswith("cuda: ")
