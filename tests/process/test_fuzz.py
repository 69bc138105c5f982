"""A few hundred cases of each kind of bad input; experiments/validation/fuzz.py has a hundred thousand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from experiments.fuzzing import files, in_process, mutations
from experiments.fuzzing.case import Broken, Target, TooLong, within
from experiments.fuzzing.in_process import Ended, judged
from experiments.validation import fuzz
from harness.common.machine import Code

CASES = {"serve": 200, "mock": 300, "files": 200, "commands": 200}


@pytest.mark.parametrize("name", CASES)
def test_no_bad_input_is_a_fault(name: str) -> None:
    assert fuzz.measure(name, CASES[name], None).failures == []


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended(4, "", "bench: unexpected KeyError: 'a'; --debug shows where\n"), "unexpected KeyError"),
        (Ended(2, "", "Traceback (most recent call last):\n"), "traceback"),
        (Ended(7, "", "bench: what\n"), "exit code"),
        (Ended(2, "", ""), "no word"),
        (Ended(2, "", f"bench: {'a' * 5000}\n"), "long line"),
    ],
)
def test_an_end_that_is_not_documented_is_a_fault(ended: Ended, kind: str) -> None:
    with pytest.raises(Broken) as broken:
        judged(ended)
    assert broken.value.kind == kind


def test_what_never_ends_is_a_fault() -> None:
    with pytest.raises(TooLong), within(0.05):
        time.sleep(fuzz.LIMIT_S)


def test_nothing_is_started() -> None:
    with in_process.nothing_starts():
        assert in_process.bench(["run", "--engine", "overlap", "--blocks", "1"]).code is None


READ = ("weights", "profiles", "doctor", "compare beside a floor", "tokenizer")


def test_what_is_changed_was_read_before_it_was() -> None:
    """Else all that is tried are ways to be refused."""
    with files.opened() as target:
        base = target.attempt.args[0]  # type: ignore[attr-defined]
        for reader in files.readers():
            if reader.name in READ or reader.name.startswith("gate --"):
                content = (base / reader.files[0]).read_bytes()
                ended = target.attempt(files.Damaged(reader, reader.files[0], content))
                assert "refused" not in ended, reader
                assert "exit 2" not in ended, reader


@contextmanager
def counting() -> Iterator[Target[int]]:
    """Fails at every seventh case."""
    made: list[int] = []

    def make(random: Random) -> int:
        made.append(len(made))
        return made[-1]

    def attempt(case: int) -> str:
        if case % 7 == 6:
            raise Broken("seventh", str(case))
        return "fine"

    yield Target(make, attempt, settle=lambda: None, rss=lambda: 1)


def test_a_case_is_made_of_its_number_alone_and_not_of_those_before_it() -> None:
    content = json.dumps({"a": [1, {"b": [2, 3]}], "c": {"d": None}}).encode()
    once, again = ([mutations.in_json(content, Random(number)) for number in range(400)] for _ in range(2))
    assert once == again


def test_a_target_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fuzz.TARGETS, "counting", counting)
    state = tmp_path / "counting.json"
    assert fuzz.measure("counting", 6, state).broken == {}
    found = fuzz.measure("counting", 13, state)
    assert (found.cases, found.ended["fine"], found.broken["seventh"]) == (13, 12, 1)
    monkeypatch.setattr(fuzz, "code", lambda: Code(commit="another", changes=""))
    assert fuzz.measure("counting", 7, state).cases == 7
