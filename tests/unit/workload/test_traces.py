"""Replayed traces: what is read, what prompts are made of it, and what is refused."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.presets import TOKENIZER_FILE
from overlap_bench.harness.workload import traces
from overlap_bench.harness.workload.plan import check, plan, skipped
from overlap_bench.harness.workload.prompts import load_tokenizer
from overlap_bench.harness.workload.traces import Entry, Trace
from overlap_bench.harness.workload.workload import Workload
from tests.support.refusals import refusal

TOKENIZER = str(TOKENIZER_FILE)
CONTEXT = 512
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,47,18,65,Conversation log
45.5,GPT-4,108,0,108,Conversation log
118,GPT-4,41,27,68,API log
118,ChatGPT,9,4,13,API log
"""


def mooncake(at: float, tokens: int, output: int, *hash_ids: int) -> str:
    return json.dumps(
        {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": list(hash_ids)}
    )


def written(folder: Path, lines: Iterable[str], name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def replayed(path: str, **options: object) -> Workload:
    workload = Workload(arrival="trace", trace=path, max_new_tokens=None, **options)  # type: ignore[arg-type]
    check(workload)
    return workload


# ---------------------------------------------------------------------------------------------------------
# Mooncake

THREE = (
    mooncake(27482, 1200, 40, 0, 7, 8),
    "",
    mooncake(30535, 1100, 20, 0, 7, 9),
    mooncake(30535, 512, 10, 5),
)


def test_a_mooncake_trace_is_replayed_as_recorded(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    planned = plan(replayed(path), 0, TOKENIZER, 2000)
    assert [each.offset_ns for each in planned] == [0, 3_053_000_000, 3_053_000_000]
    assert [len(each.prompt) for each in planned] == [1200, 1100, 512]
    assert [each.max_new_tokens for each in planned] == [40, 20, 10]
    assert skipped(replayed(path), 0, TOKENIZER, 2000) == {"failed": 0}


def test_equal_hash_ids_share_their_block_and_others_nothing(tmp_path: Path) -> None:
    first, second, third = (
        each.prompt for each in plan(replayed(written(tmp_path, THREE)), 0, TOKENIZER, 2000)
    )
    assert first[:1024] == second[:1024]
    for one, other, start in ((first, second, 1024), (first, third, 0)):
        pairs = list(zip(one[start:], other[start:], strict=False))
        assert sum(left == right for left, right in pairs) < len(pairs) / 10  # chance, in 4096 tokens


def test_other_rounds_share_nothing_with_this_one(tmp_path: Path) -> None:
    workload = replayed(written(tmp_path, THREE))
    one, other = (plan(workload, seed, TOKENIZER, 2000)[0].prompt for seed in (1, 2))
    assert sum(left == right for left, right in zip(one, other, strict=True)) < 20
    assert one == plan(workload, 1, TOKENIZER, 2000)[0].prompt


def test_prompts_of_a_trace_hold_no_special_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert special
    path = written(tmp_path, [mooncake(0, 512 * 40, 1, *range(40))])
    (only,) = plan(replayed(path), 0, TOKENIZER, 10**6)
    assert not special & set(only.prompt)
    assert len(set(only.prompt)) > 3900  # of 4095


@given(
    st.lists(st.integers(1, 4000), min_size=2, max_size=5),
    st.floats(0.002, 1),
    st.integers(0, 5),
)
def test_scaling_keeps_lengths_and_shared_prefixes(tokens: list[int], scale: float, shared: int) -> None:
    entries = []
    for index, length in enumerate(tokens):
        blocks = -(-length // 512)
        entries.append(Entry(0.0, length, 1, tuple(
            block if block < shared else 1000 * (index + 1) + block for block in range(blocks))))  # fmt: skip
    trace = Trace(tuple(entries), 0)
    prompts = traces.prompts(trace, scale, 1, range(1, 50_000))
    for entry, prompt in zip(entries, prompts, strict=True):
        assert len(prompt) == traces.scaled(entry.input_tokens, scale)
    for one, other in pairwise(prompts):
        same = min(len(one), len(other), round(shared * 512 * scale))
        assert one[:same] == other[:same]
        assert one[same : same + 3] != other[same : same + 3] or min(len(one), len(other)) <= same + 1


def test_a_rate_stretches_the_trace(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(at, 8, 2, at) for at in (1000, 1500, 3000, 5000)])
    planned = plan(replayed(path, rate=30.0), 0, TOKENIZER, CONTEXT)
    assert [each.offset_ns for each in planned] == [0, 12_500_000, 50_000_000, 100_000_000]  # 3 gaps, 30/s


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(0, 8, 2, 1), mooncake(1, 8, 2, 1), "no json at all"])
    assert len(plan(replayed(path, num_requests=2), 0, TOKENIZER, CONTEXT)) == 2


def test_a_trace_that_is_shorter_than_asked_ends_early(tmp_path: Path) -> None:
    assert len(plan(replayed(written(tmp_path, THREE), num_requests=50), 0, TOKENIZER, 2000)) == 3


def test_a_trace_beyond_the_context_is_refused_with_a_scale_that_fits(tmp_path: Path) -> None:
    path = written(tmp_path, [mooncake(0, 6758, 500, *range(14)), mooncake(3, 20, 2, 99)])
    with pytest.raises(BadSetting, match=r"up to 7258 tokens, .* holds 512: trace_scale=0\.07 ") as caught:
        plan(replayed(path), 0, TOKENIZER, CONTEXT)
    assert "\n" not in str(caught.value)
    first, second = plan(replayed(path, trace_scale=0.07), 0, TOKENIZER, CONTEXT)
    assert (len(first.prompt), first.max_new_tokens) == (473, 35)
    assert (len(second.prompt), second.max_new_tokens) == (1, 1)


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 5000)), min_size=1, max_size=6),
    st.integers(8, 4096),
)
def test_the_scale_that_is_offered_fits(sizes: list[tuple[int, int]], context: int) -> None:
    trace = Trace(tuple(Entry(0.0, tokens, output) for tokens, output in sizes), 0)
    try:
        traces.check_fit(trace, 1.0, context)
    except BadSetting as refusal:
        traces.check_fit(trace, float(str(refusal).split("trace_scale=")[1].split()[0]), context)


# ---------------------------------------------------------------------------------------------------------
# BurstGPT


def test_a_burstgpt_csv_is_replayed_without_its_failures(tmp_path: Path) -> None:
    workload = replayed(written(tmp_path, [BURST_GPT], "burst.csv"))
    planned = plan(workload, 0, TOKENIZER, CONTEXT)
    assert [each.offset_ns for each in planned] == [0, 113 * 10**9, 113 * 10**9]
    assert [(len(each.prompt), each.max_new_tokens) for each in planned] == [(47, 18), (41, 27), (9, 4)]
    assert len({tuple(each.prompt[:9]) for each in planned}) == 3
    assert skipped(workload, 0, TOKENIZER, CONTEXT) == {"failed": 1}


def test_burstgpt_as_json_lines_is_the_same(tmp_path: Path) -> None:
    header, *rows = BURST_GPT.strip().splitlines()
    names = header.split(",")
    lines = []
    for row in rows:
        at, model, tokens, output, *_ = row.split(",")
        lines.append(json.dumps(dict(zip(names, (float(at), model, int(tokens), int(output)), strict=False))))
    as_lines = plan(replayed(written(tmp_path, lines)), 0, TOKENIZER, CONTEXT)
    assert as_lines == plan(replayed(written(tmp_path, [BURST_GPT], "burst.csv")), 0, TOKENIZER, CONTEXT)


@pytest.mark.parametrize("name", ["burst.txt", "burst.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_csv_is_known_by_its_content_whatever_stands_in_front(
    tmp_path: Path, encoding: str, name: str
) -> None:
    path = tmp_path / name
    path.write_text("\n" + BURST_GPT.replace("\n", "\r\n"), encoding=encoding, newline="")
    assert traces.read(str(path), 9) == traces.read(written(tmp_path, [BURST_GPT], "burst.csv"), 9)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_lines_are_known_by_their_content_whatever_stands_in_front(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "mooncake.csv"
    path.write_text("\n".join(["", *THREE]), encoding=encoding)
    assert traces.read(str(path), 9) == traces.read(written(tmp_path, THREE), 9)
    path = tmp_path / "other.csv"
    path.write_text("\n\n" + mooncake(0, 8, 2, 1) + "\nnone", encoding=encoding)
    with pytest.raises(BadSetting, match="line 4 is not a JSON object"):
        traces.read(str(path), 9)


# ---------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([mooncake(5, 8, 2, 1), mooncake(9, 8, 2, 1), mooncake(7, 8, 2, 1)], "3: time goes back, by 2 ms"),
        ([mooncake(5, 8, 2, 1), '{"timestamp": 6, "input'], "line 2 is not a JSON object: "),
        (["[1, 2]"], "line 1 is not a JSON object: "),
        (['{"timestamp": 6, "input_length": 8, "hash_ids": [1]}'], "missing required field `output_le"),
        (['{"timestamp": 6, "input_length": 8, "output_length": 2}'], "missing required field `hash_ids`"),
        ([mooncake(5, 0, 2)], "line 1: Expected `int` >= 1 - at `$.input_length`"),
        ([mooncake(5, 8, -2, 1)], "line 1: Expected `int` >= 1 - at `$.output_length`"),
        ([mooncake(5, 8, 2, -4)], "Expected `int` >= 0"),
        ([mooncake(5, 8, 10**40, 1)], "line 1: Expected `int` <= 9007199254740992 - at `$.output_length`"),
        ([f'{{"Timestamp": 6, "Request tokens": {10**400}, "Response tokens": 4}}'], "Expected `int` <= 9"),
        ([mooncake(5, 600, 2, 4)], "line 1: 1 hash_ids for 600 tokens; in blocks of 512 they need 2"),
        (['{"time": 6}'], "neither 'timestamp' (Mooncake) nor 'Timestamp' (BurstGPT)"),
        (['{"Timestamp": 6, "Request tokens": 4}'], "missing required field `Response tokens`"),
        (['{"Timestamp": 1e306, "Request tokens": 4, "Response tokens": 4}'], "1: its time is no finite"),
        ([""], "no requests in the trace"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_used_is_refused_by_its_line(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    path = written(tmp_path, lines)
    said = refusal(lambda: replayed(path))
    assert complaint in said
    assert path in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Timestamp,Request tokens\n5,3\n", "line 2: Object missing required field `Response tokens`"),
        ("Timestamp,Request tokens,Response tokens\n5,three,4\n", "line 2: Expected `int`, got `str`"),
        (f"Timestamp,Request tokens,Response tokens\n5,{10**400},4\n", "line 2: Expected `int` <= 9007199"),
        ("Timestamp,Request tokens,Response tokens\n5,3\n", "line 2: Expected `int`, got `null`"),
        ("Timestamp,Request tokens,Response tokens\n5,3,4,5,6\n", "line 2 has more fields than the header"),
        ("at,Request tokens,Response tokens\n5,3,4\n", "neither 'timestamp'"),
        ("Timestamp;Request tokens\n5;3\n", 'among its fields, ["Timestamp;Request tokens"]'),
        ("\n\nTimestamp,Request tokens,Response tokens\n5,three,4\n", "line 4: Expected `int`, got `str`"),
        ("Timestamp,Request tokens,Response tokens\n5,0,0\n", "no requests in the trace"),
    ],
)
def test_a_csv_that_cannot_be_used_is_refused_by_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(lambda: replayed(written(tmp_path, [text], "burst.csv")))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trace": None}, "arrival=trace needs a trace"),
        ({"trace": "/no/such/trace"}, "cannot read /no/such/trace: No such file or directory"),
        ({"max_new_tokens": 8}, "max_new_tokens does not apply to a trace"),
        ({"input_tokens": "uniform:1:2"}, "input_tokens does not apply to a trace"),
        ({"prompts": "english"}, "prompts does not apply to a trace"),
        ({"prompt": "Hi"}, "prompt does not apply to a trace"),
        ({"unique_prompts": True}, "unique_prompts does not apply to a trace"),
        ({"pretok": False}, "a trace has no text, only numbers of tokens: it needs pretok"),
        ({"trace_scale": 0.0}, "trace_scale must be above 0, not 0"),
        ({"arrival": "burst"}, "trace applies only with arrival=trace, not burst"),
        (
            {"rate": 3.0, "num_requests": 1},
            "rate does not apply here: all 1 of the trace",
        ),
    ],
)
def test_what_means_nothing_with_a_trace_is_refused(
    tmp_path: Path, options: dict[str, object], complaint: str
) -> None:
    given = {"arrival": "trace", "trace": written(tmp_path, THREE), "max_new_tokens": None, **options}
    assert complaint in refusal(lambda: check(Workload(**given)))
