"""The scripts of experiments/: each says what it does, stands in the README, and imports no test."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.validation import boots

ROOT = command_line.ROOT
FOLDER = ROOT / "experiments"
SCRIPTS = [
    f"experiments.{kind}.{path.stem}"
    for kind in ("validation", "gpu")
    for path in sorted((FOLDER / kind).glob("[a-z]*.py"))
]


@pytest.mark.parametrize("module", SCRIPTS)
def test_help_names_the_command_and_measures_nothing(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of what is imported already
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m {module} ")
    assert f"\n    python -m {module}" in told  # from the docstring


def test_the_readme_has_each_script_once_and_no_other() -> None:
    listed, kind = [], ""
    for line in (FOLDER / "README.md").read_text().splitlines():
        if table := re.match(r"\| `python -m experiments\.(\w+)\.…`", line):
            kind = table[1]
        elif row := re.match(r"\| `(\w+)", line):
            listed.append(f"experiments.{kind}.{row[1]}")
    assert sorted(listed) == sorted(SCRIPTS)


def test_no_experiment_imports_from_the_tests() -> None:
    found = []
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            found += [(path.name, name) for name in names if name.split(".")[0] == "tests"]
    assert found == []


def test_a_result_is_named_after_its_script_and_names_the_command_that_makes_it_again(tmp_path: Path) -> None:
    script = str(FOLDER / "validation" / "deaths.py")
    write_result(script, title="A title", header=["one"], rows=[["1"]], data=[1], folder=tmp_path)
    assert "`python -m experiments.validation.deaths`" in (tmp_path / "deaths.md").read_text()
    assert (tmp_path / "deaths.json").exists()


def test_a_name_that_there_is_not_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "overlap", "overlop"])
    with pytest.raises(SystemExit) as ended:
        command_line.chosen(str(FOLDER / "validation" / "variants.py"), None, ("overlap", "copy-done"))
    assert ended.value.code == 2
    assert "error: no overlop; there are overlap, copy-done" in capsys.readouterr().err


def test_what_is_not_there_yet_is_measured_and_what_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def to_measure(*names: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["script", *names])
        return command_line.to_measure(script, None, ("one", "two", "three"), ("two",))

    script = str(FOLDER / "validation" / "boots.py")
    assert to_measure() == ["one", "three"]
    assert to_measure("two", "one") == ["one", "two"]


def test_vllm_without_an_interpreter_that_has_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_VLLM", raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "vLLM"])
    with pytest.raises(SystemExit, match="BENCH_VLLM names no interpreter that has vLLM"):
        boots.main()
