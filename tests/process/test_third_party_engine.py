"""An engine of somebody else's: examples/own_engine, really installed, found, and measured."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_bench.engines import api
from tests.support.bench_command import start
from tests.support.clockwork import distribution
from tests.support.in_process import done
from tests.support.places import ROOT

PACKAGE = ROOT / "examples" / "own_engine"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which pip installed the package."""
    copy = tmp_path_factory.mktemp("source") / PACKAGE.name  # a build leaves things behind in its folder
    shutil.copytree(PACKAGE, copy)
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, *offline, "--target", str(site), str(copy)], check=True)
    path = (str(ROOT), str(site), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "120"}


def test_and_its_toggle_is_measured_like_any_other_with_its_counter_and_its_steps(
    environment: dict[str, str], tmp_path: Path
) -> None:
    arms = ("--engine", "paced", "--before", "output=inline", "--after", "output=deferred")
    asked = ("--trials", "1", "--rounds", "1", "--num-requests", "4", "--max-new-tokens", "4")
    stdout = done(environment, tmp_path, "run", *arms, *asked, "--format", "json")
    (comparison,) = json.loads(stdout)["comparisons"]
    assert "tpot_ms_p50" in comparison["metrics"]
    assert comparison["outputs"]["identical"] == 4
    mechanism = comparison["mechanism"]
    assert mechanism["deferred_writes"]["before"] == 0
    assert mechanism["deferred_writes"]["after"] > 0
    assert mechanism["decode_steps"]["before"] >= 4
    assert {"device_busy", "exposed_host_us"} <= comparison["limit"].keys()


def test_and_its_phase_is_delayed_to_see_what_that_costs(environment: dict[str, str], tmp_path: Path) -> None:
    asked = ("--no-pretok", "--trials", "2", "--max-new-tokens", "48", "--saves", "output=20us")
    stdout = done(environment, tmp_path, "sensitivity", "--engine", "paced", *asked, "--format", "json")
    found = json.loads(stdout)
    (phase,) = found["phases"]
    assert phase["phase"] == "output"
    assert phase["us"] >= 200  # paced_engine.WRITE_US
    assert phase["points"][-1][1] > phase["points"][0][1]  # a delay of more than half a step, and of less
    assert [each["phase"] for each in found["savings"]] == ["output"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("SPEC = 3", "TypeError: odd_engine:SPEC is not an EngineSpec but of type int"),
        (
            "from engines.api import EngineSpec\nSPEC = EngineSpec('even', '', (), 'x:y')",
            "ValueError: odd_engine:SPEC calls itself even; one name for both, please",
        ),
    ],
)
def test_an_entry_point_that_is_no_engine_of_its_name_is_told_of(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution(tmp_path, "odd", odd="odd_engine:SPEC")
    (tmp_path / "odd_engine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_engine", raising=False)
    found = api.find_engines()
    assert "overlap" in found
    assert "odd" not in found
    assert f"engine odd of odd can't be loaded: {why}\n" in capsys.readouterr().err


def test_a_name_that_two_modules_claim_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("one", "two", "two_again"):  # the last is the second, installed twice
        module = package.removesuffix("_again")
        distribution(tmp_path, package, shared=f"{module}:SPEC", **{module: f"{module}:SPEC"})
        (tmp_path / f"{module}.py").write_text(
            f"from engines.api import EngineSpec\nSPEC = EngineSpec('{module}', '', (), 'x:y')\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    found = api.find_engines()
    assert {"overlap", "one", "two"} <= found.keys()
    assert "shared" not in found
    told = capsys.readouterr().err
    assert told == "bench: engine shared is left out: one:SPEC and two:SPEC claim the name\n"


def test_one_that_can_not_be_loaded_is_told_of_and_takes_no_other_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    distribution(tmp_path / "site", "torn", torn="torn_engine:SPEC")
    (tmp_path / "site" / "torn_engine.py").write_text("def SPEC(:\n")
    path = os.pathsep.join((environment["PYTHONPATH"], str(tmp_path / "site")))
    code, listed, stderr = start({**environment, "PYTHONPATH": path}, tmp_path, "engines").end()
    assert code == 0, stderr
    assert "paced: one token" in listed
    assert stderr.startswith("bench: engine torn of torn can't be loaded: SyntaxError: ")
    assert len(stderr.splitlines()) == 1
