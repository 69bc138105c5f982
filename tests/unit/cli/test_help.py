"""The help: short at first, whole where it is asked for, and made of the texts as they were written."""

import re

import pytest

from overlap_bench.harness.cli import app
from tests.support.in_process import bench

MEASURING = ("run", "aa", "gate", "factorial", "sweep", "profile", "sensitivity", "bisect", "eval")


def help_of(monkeypatch: pytest.MonkeyPatch, *words: str, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return bench(*words).out


def test_bench_has_a_line_for_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(monkeypatch, "--help", columns=80).splitlines()
    for name, (_, said) in app.COMMANDS.items():
        listed = any(re.search(rf"{name} +{re.escape(said)}", line) for line in lines)
        assert listed == (name not in app.OLD_NAMES), name


@pytest.mark.parametrize("command", MEASURING)
def test_what_measures_shows_its_first_options_on_a_page_or_two(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    told = help_of(monkeypatch, command, "--help", columns=100)
    assert len(told.splitlines()) <= 80
    for option in ("--engine", "--model", "--help-all"):
        assert option in told
    assert "--prefill-max-tokens" not in told


@pytest.mark.parametrize("command", app.COMMANDS)
def test_every_option_is_told_as_it_was_written(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    built = app.built(command)
    asked = "--help-all" if command in MEASURING else "--help"
    told = " ".join(help_of(monkeypatch, command, asked, columns=500).split())
    for each in built.params:
        for word in (*each.opts, *each.secondary_opts):
            assert word in told or not word.startswith("-"), word
        assert each.help in told
