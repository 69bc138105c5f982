"""Files of prompts: what is asked of each form, what is skipped, and what is refused."""

import json
from pathlib import Path

import pytest

from overlap_bench.engines.api import BadFile, BadSetting
from overlap_bench.engines.presets import TOKENIZER_FILE
from overlap_bench.harness.workload import prompt_files
from overlap_bench.harness.workload.plan import check, plan, skipped
from overlap_bench.harness.workload.prompts import load_tokenizer
from overlap_bench.harness.workload.workload import Workload
from tests.support.refusals import refusal

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


def test_unique_words_that_leave_no_conversation_any_room_end_the_search(tmp_path: Path) -> None:
    """Leads have different lengths: with a short one a conversation may still fit, and with no other."""
    workload = asked(tmp_path, USUAL, num_requests=16, unique_prompts=True, max_new_tokens=20)
    with pytest.raises(BadSetting, match=r"has [1-9] of 16 .*: 0 are too short, 1 too long"):
        plan(workload, 1, TOKENIZER, 46)
    assert len(plan(workload, 1, TOKENIZER, 50)) == 16


MESSAGES = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
PARTS = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
IMAGE = '[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]'


def read(folder: Path, content: str | bytes, name: str = "a file") -> list[tuple[str, str | None]]:
    """Prompts and replies of a new file."""
    path = folder / str(len(list(folder.iterdir()))) / name  # a file is read once
    path.parent.mkdir()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(each.prompt, each.reply) for each in prompt_files.read(str(path)).asked]


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ('{"prompt": "a"}\n\r\n{"prompt": "b"}\r\n\n', ["a", "b"]),
        ('\ufeff{"text": "a", "id": 7, "score": NaN}', ["a"]),
        ('{"question": "a", "answer": "b"}', ["a"]),
        ('{"question": "a", "context": "It is."}', ["a\n\nIt is."]),
        ('[{"instruction": "a", "input": "1", "output": "x"}, {"instruction": "b", "input": ""}]',
         ["a\n\n1", "b"]),
        ('["a",\n  "b\\nc"]', ["a", "b\nc"]),
        ('"a"\n"b"', ["a", "b"]),
        ('{\n  "prompt": "a"\n}', ["a"]),
        ('{"prompt": ""}\n{"prompt": "b", "text": null}', ["b"]),
        # Text is not made JSON by a bracket or a quotation mark.
        ('{name}, how are you?\n{ not json }\n[INST] hi [/INST]', ["{name}, how are you?", "{ not json }",
         "[INST] hi [/INST]"]),
        ('{"a": 1} is what?\n[1] who?\n"Hello," she said.\n"To be"\n"or not',
         ['{"a": 1} is what?', "[1] who?", '"Hello," she said.', '"To be"', '"or not']),
        ("one\r\rtwo\r\n", ["one", "two"]),
        ("\ufeffone\n\ufefftwo\n\ufeff\n", ["one", "two"]),
        ("\ufeffone\r\ntwo \u00e9".encode("utf-16-le"), ["one", "two \u00e9"]),
        ("\ufeffone".encode("utf-16-be"), ["one"]),
        ('\ufeff{"prompt": "\u00e9"}\r\n'.encode("utf-16-le"), ["\u00e9"]),
    ],
)  # fmt: skip
def test_texts_are_asked_in_their_order(tmp_path: Path, content: str | bytes, prompts: list[str]) -> None:
    assert read(tmp_path, content) == [(each, None) for each in prompts]


@pytest.mark.parametrize(
    ("content", "conversations"),
    [
        (json.dumps(USUAL) + "\n" + json.dumps(NOBODY), [(SENTENCE, SENTENCE * 2)]),
        (f"{MESSAGES}\n{MESSAGES}", [("a", "b")] * 2),
        (f"[{MESSAGES}]", [("a", "b")]),
        (MESSAGES.replace("messages", "prompt"), [("a", "b")]),
        (MESSAGES.replace("messages", "conversations").replace("user", "User"), [("a", "b")]),
        (MESSAGES.replace('"a"', PARTS), [("a\nb", "b")]),
        (MESSAGES.replace('"b"', 'null, "tool_calls": []'), [("a", "")]),
        ('[{"role": "user", "content": "a"}]\n[{"role": "user", "content": "b"}]', [("a", ""), ("b", "")]),
        (f'{{"prompt": "a", {MESSAGES[1:]}', [("a", "b")]),
    ],
)
def test_of_conversations_the_first_thing_that_the_human_said(
    tmp_path: Path, content: str, conversations: list[tuple[str, str]]
) -> None:
    assert read(tmp_path, content) == conversations


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c"}', "line 2 is not JSON: Expecting ',' delimiter"),
        ('{"prompt": "is "a" b"}', "line 1 is not JSON: "),
        ("{'prompt': 'a'}", "line 1 is not JSON: "),
        ('[\n  {"prompt": "a"},\n  {"prompt": "b"}\n', "line 1 is not JSON: "),
        ('{\n  "prompt": "a"\n}\n{\n  "prompt": "b"\n}', "line 1 is not JSON: "),
        ('Explain this:\n{"a": 1}', 'written {"prompt": "..."}'),
        ('{"id": 1, "url": "x"}', 'none of the keys prompt, text, question, instruction, conversations, '),
        ('{"id": 1, "url": "x"}', 'it has ["id", "url"]'),
        ('{"data": [{"prompt": "a"}]}', 'it has ["data"]'),
        ('{"role": "user", "content": "a"}\n{"role": "user", "content": "b"}', 'it has ["role", "content"]'),
        ('{"text": "a", "prompt": "b"}', "which is asked, prompt or text"),
        ('{"prompt": 5}', "its prompt is 5, which is no text"),
        ('{"prompt": [1, 2]}', "1 is no turn with from and value, or role and content"),
        ('{"prompt": null}', "nobody asks anything"),
        ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        ("[1, 2]", "item 1 is 1, which is no prompt"),
        ('{"prompt": "a"}\n42', "line 2 is 42, which is no prompt"),
        (f'"a"\n{MESSAGES}', "holds texts and conversations"),
        (MESSAGES.replace('"a"', IMAGE), "only text can be asked, and {\"type\": \"image_url\""),
        ('{"conversations": "x"}', '"x" is no list of turns'),
        (json.dumps(NOBODY), "nobody asks anything"),
        ("", "it is empty"),
        ("one".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        (b"caf\xe9", "line 1 is not UTF-8 text"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_and_never_asked(
    tmp_path: Path, content: str | bytes, complaint: str
) -> None:
    said = refusal(lambda: read(tmp_path, content), BadFile)
    assert complaint in said
    assert str(tmp_path) in said


@pytest.mark.parametrize(("name", "complaint"), [("a.jsonl", "line 1 is not JSON"), ("a.csv", "is a table")])
def test_a_name_that_promises_something_else_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(BadFile, match=complaint):
        read(tmp_path, "prompt,answer\na,b", name)


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
