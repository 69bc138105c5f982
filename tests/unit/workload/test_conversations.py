"""Prompts from ShareGPT conversations: what is asked, what is skipped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.api import BadSetting
from engines.overlap.presets import TOKENIZER_FILE
from harness.workload.check import check
from harness.workload.plan import plan, skipped
from harness.workload.prompts import load_tokenizer
from harness.workload.workload import Workload

TOKENIZER = str(TOKENIZER_FILE)
CONTEXT = 512
SENTENCE = "The current thread waits until the other one is done with its work. "


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def asked(folder: Path, *conversations: object, **options: object) -> Workload:
    number = len(list(folder.iterdir()))  # a file is read once, so each needs a name of its own
    path = folder / f"sharegpt-{number}.json"
    path.write_text(json.dumps(conversations))
    workload = Workload(prompts=str(path), **{"max_new_tokens": None, "num_requests": 6, **options})  # type: ignore[arg-type]
    check(workload)
    return workload


USUAL = conversation(("human", SENTENCE), ("gpt", SENTENCE * 2), ("human", "And then?"), ("gpt", "Nothing."))
AFTER_A_SYSTEM_TURN = conversation(
    ("system", "Be kind."), ("human", "Another " + SENTENCE), ("gpt", SENTENCE)
)
SHORT_PROMPT = conversation(("human", "Hi"), ("gpt", SENTENCE))
SHORT_ANSWER = conversation(("human", SENTENCE), ("gpt", "Ok"))
UNANSWERED = conversation(("human", SENTENCE))
LONG_PROMPT = conversation(("human", SENTENCE * 90), ("gpt", SENTENCE))
LONG_TOGETHER = conversation(("human", SENTENCE * 15), ("gpt", SENTENCE * 25))
NOBODY = conversation(("gpt", SENTENCE))
ALL = (USUAL, AFTER_A_SYSTEM_TURN, SHORT_PROMPT, SHORT_ANSWER, UNANSWERED, LONG_PROMPT, LONG_TOGETHER, NOBODY)


def test_the_first_human_turn_is_asked_for_as_many_tokens_as_its_answer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    ids = [tokenizer.encode(text).ids for text in (SENTENCE, "Another " + SENTENCE)]
    answers = [len(tokenizer.encode(text).ids) for text in (SENTENCE * 2, SENTENCE)]
    planned = plan(asked(tmp_path, *ALL), 1, TOKENIZER, CONTEXT)
    found = [(each.prompt, each.max_new_tokens) for each in planned]
    assert sorted(found[:2]) == sorted(zip(ids, answers, strict=True))
    assert found == found[:2] * 3  # in turn, from the start again
    assert skipped(asked(tmp_path, *ALL), 1, TOKENIZER, CONTEXT) == {"short": 3, "long": 2}


def test_an_output_length_that_is_given_is_never_too_short(tmp_path: Path) -> None:
    workload = asked(tmp_path, SHORT_ANSWER, UNANSWERED, LONG_PROMPT, max_new_tokens=2)
    planned = plan(workload, 1, TOKENIZER, CONTEXT)
    assert {each.max_new_tokens for each in planned} == {2}
    assert skipped(workload, 1, TOKENIZER, CONTEXT) == {"long": 1}


def test_what_is_skipped_stops_when_there_is_enough(tmp_path: Path) -> None:
    workload = asked(tmp_path, *[USUAL] * 20, num_requests=3)
    assert skipped(workload, 1, TOKENIZER, CONTEXT) == {}
    assert len(plan(workload, 1, TOKENIZER, CONTEXT)) == 3


def test_the_seed_shuffles_conversations(tmp_path: Path) -> None:
    many = [conversation(("human", f"{number} {SENTENCE}"), ("gpt", SENTENCE)) for number in range(30)]
    workload = asked(tmp_path, *many)
    first, again, other = (
        [each.prompt for each in plan(workload, seed, TOKENIZER, CONTEXT)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_conversations_can_be_asked_as_text_cut_and_behind_unique_words(tmp_path: Path) -> None:
    texts = [each.prompt for each in plan(asked(tmp_path, *ALL, pretok=False), 1, TOKENIZER, CONTEXT)]
    assert set(texts) == {SENTENCE, "Another " + SENTENCE}
    cut = plan(asked(tmp_path, *ALL, input_tokens=20, max_new_tokens=4), 1, TOKENIZER, CONTEXT)
    assert {len(each.prompt) for each in cut} == {20}
    unique = plan(asked(tmp_path, USUAL, LONG_PROMPT, unique_prompts=True), 1, TOKENIZER, CONTEXT)
    assert len({each.prompt[0] for each in unique}) == 6
    assert len({tuple(each.prompt[-5:]) for each in unique}) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "as ShareGPT: "),
        ('{"conversations": []}', "as ShareGPT: Expected `array`, got `object`"),
        ('[{"conversations": [{"from": "human"}]}]', "missing required field `value`"),
        ("[]", "no human says anything in its 0 conversations"),
    ],
)
def test_what_is_no_sharegpt_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(BadSetting) as caught:
        check(Workload(prompts=str(path), max_new_tokens=None))
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_nothing_to_ask_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="has 0 of 3 conversations needed: 2 are too short, 1 too long"):
        plan(asked(tmp_path, SHORT_PROMPT, SHORT_ANSWER, LONG_PROMPT), 1, TOKENIZER, CONTEXT)


def test_answers_cannot_be_counted_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        BadSetting, match="max_new_tokens as in the conversations needs the engine's tokenizer"
    ):
        plan(asked(tmp_path, *ALL, pretok=False), 1, "", CONTEXT)
    planned = plan(asked(tmp_path, *ALL, pretok=False, max_new_tokens=4), 1, "", CONTEXT)
    assert len({each.prompt for each in planned}) > 2  # nothing is filtered: that is left to the engine


def test_outputs_of_no_length_are_refused() -> None:
    with pytest.raises(BadSetting, match="max_new_tokens is needed"):
        check(Workload(max_new_tokens=None))
