"""Workloads: what is refused, what is planned, and that a plan depends on its seed alone."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from overlap_bench.engines.api import BadSetting
from overlap_bench.harness.store.files import digest
from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload.arrivals import UNTIMED
from overlap_bench.harness.workload.lengths import stream
from overlap_bench.harness.workload.plan import check, plan
from overlap_bench.harness.workload.prompts import english
from overlap_bench.harness.workload.workload import Workload
from tests.support.refusals import refusal


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE small enough that words are several tokens, and cuts fall inside of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(english()[:300], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, not 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be at least 1, not -3"),
        ({"input_tokens": 0}, "input_tokens must be at least 1, not 0"),
        ({"max_new_tokens": 1 << 70}, "max_new_tokens must fit into 32 bits, not be 1180591620717411303424"),
        ({"input_tokens": "uniform:1:1e99"}, "input_tokens must fit into 32 bits, not be uniform:1:1e99"),
        ({"prompt": "\udcff"}, "prompt is not UTF-8 text"),
        ({"stop": ["a", "\udcff"]}, "stop is not UTF-8 text"),
        ({"interval_ms": 0.0}, "interval_ms must be above 0, not 0"),
        ({"interval_ms": float("nan")}, "interval_ms must be above 0, not nan"),
        ({"arrival": "closd"}, "unknown arrival 'closd'; did you mean closed?"),
        ({"arrival_schedule": "relativ"}, "did you mean relative?"),
        ({"arrival": "closed"}, "arrival=closed needs a concurrency"),
        ({"arrival": "closed", "concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"concurrency": 4}, "concurrency applies only with arrival=closed, not fixed"),
        ({"arrival": "burst", "interval_ms": 5.0}, "interval_ms applies only with arrival=fixed"),
        ({"arrival": "closed", "concurrency": 1, "arrival_schedule": "relative"}, "only with arrival=fixed"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": ""}, "no prompt"),
        ({"prompt": "Hi", "prompts": "english"}, "prompt and prompts exclude each other"),
        ({"prompts": "/no/such/file"}, "cannot read /no/such/file: No such file or directory"),
        ({"prompt_repeats": 0}, "prompt_repeats must be at least 1, not 0"),
        ({"prompt_repeats": 65}, "prompt_repeats=65 is more than num_requests=64"),
        (
            {"prompt_repeats": 4},
            "prompt_repeats=4 of 64 requests needs 16 different prompts, and there are 1; give more, or ask "
            "for unique prompts",
        ),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or above, not -0.1"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be 0 (all) or above, not -1"),
        (
            {"temperature": 1.0, "top_k": 1 << 31},
            "top_k must fit into 32 bits, not be 2147483648; 0 samples from all",
        ),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be above 0 and at most 1 (all), not 1.1"),
        ({"stop": ["END", ""]}, "a stop string is empty: it would end every request at once"),
        ({"top_k": 5}, "top_k and top_p apply only with a temperature above 0"),
    ],
)
def test_what_is_no_workload_is_refused_in_one_line(options: dict[str, object], complaint: str) -> None:
    assert complaint in refusal(lambda: check(Workload(**options)))


def test_requests_take_the_lines_of_a_file_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(
        "one\n\n  two\r\nthree \u2028 \x0c or four\n"
    )  # what lies inside of a line is no end of it
    workload = Workload(prompts=str(path), num_requests=5, pretok=False, max_new_tokens=9, stop_on_eos=True)
    check(workload)
    planned = plan(workload, 0, "", 64)
    assert [each.prompt for each in planned] == ["one", "two", "three \u2028 \x0c or four", "one", "two"]
    assert [each.id for each in planned] == [0, 1, 2, 3, 4]
    assert {(each.max_new_tokens, each.stop_on_eos) for each in planned} == {(9, True)}


@pytest.mark.parametrize(
    ("workload", "offsets"),
    [
        (Workload(num_requests=3, pretok=False), [0, 20_000_000, 40_000_000]),
        (Workload(num_requests=3, pretok=False, interval_ms=0.5), [0, 500_000, 1_000_000]),
        (Workload(num_requests=3, pretok=False, arrival_schedule="relative"), [0, UNTIMED, UNTIMED]),
        (Workload(num_requests=3, pretok=False, arrival="burst"), [0, 0, 0]),
        (Workload(num_requests=3, pretok=False, arrival="closed", concurrency=2), [UNTIMED] * 3),
    ],
)
def test_due_times(workload: Workload, offsets: list[int]) -> None:
    check(workload)
    assert [each.offset_ns for each in plan(workload, 0, "", 64)] == offsets


@pytest.mark.parametrize("options", [{}, {"prompts": "english"}])
@pytest.mark.parametrize("pretok", [True, False])
@pytest.mark.parametrize("length", [1, 17, 300])
def test_input_tokens_are_exact(
    tokenizer_path: str, options: dict[str, str], pretok: bool, length: int
) -> None:
    tokenizer = Tokenizer.from_file(tokenizer_path)
    workload = Workload(input_tokens=length, pretok=pretok, num_requests=20, **options)  # type: ignore[arg-type]
    for each in plan(workload, 3, tokenizer_path, 512):
        ids = tokenizer.encode(each.prompt).ids if isinstance(each.prompt, str) else each.prompt
        assert len(ids) == length


def test_a_prompt_that_leaves_no_room_for_its_output_is_refused(tokenizer_path: str) -> None:
    assert plan(Workload(input_tokens=384), 0, tokenizer_path, 512)
    with pytest.raises(BadSetting, match=r"prompt of 385 tokens .* context of 512 tokens leaves 384"):
        plan(Workload(input_tokens=385), 0, tokenizer_path, 512)


def test_each_request_is_sampled_with_a_seed_of_its_own_that_the_round_decides() -> None:
    workload = Workload(pretok=False, num_requests=40, temperature=0.7, top_k=5, top_p=0.9)
    check(workload)
    first, again, other = (plan(workload, seed, "", 512) for seed in (1, 1, 2))
    assert {(each.temperature, each.top_k, each.top_p) for each in first} == {(0.7, 5, 0.9)}
    assert first == again
    seeds = [each.seed for each in [*first, *other]]
    assert len(set(seeds)) == 80
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_tokens_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="pretok needs the engine's tokenizer"):
        plan(Workload(), 0, "", 512)
    for option, value in (("input_tokens", 4), ("unique_prompts", True)):
        with pytest.raises(BadSetting, match=f"{option} needs the engine's tokenizer"):
            plan(Workload(pretok=False, **{option: value}), 0, "", 512)
    missing = str(tmp_path / "tokenizer.json")
    with pytest.raises(BadSetting, match=r"cannot read the tokenizer .*tokenizer\.json"):
        plan(Workload(), 0, missing, 512)
    long = tmp_path / "long.json"
    long.write_text(f'{{"version": "1.0", "truncation": null, "padding": ["{"1" * 5000}"]}}')
    # The library repeats what is wrong.
    assert len(refusal(lambda: plan(Workload(), 0, str(long), 512))) < 1500


def test_a_run_can_tell_whether_its_files_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one")
    assert Workload(prompts=str(path)).files == (str(path),)
    assert Workload(arrival="trace", trace="x").files == ("x",)
    assert Workload(prompts="english").files == Workload().files == ()
    first = digest(str(path))
    assert first == digest(str(path))
    path.write_text("two")
    assert first != digest(str(path))
    with pytest.raises(BadSetting, match="cannot read /no/such/file: No such file or directory"):
        digest("/no/such/file")


# ---------------------------------------------------------------------------------------------------------
# Repeated and unique prompts, lengths that are drawn


def test_each_prompt_is_asked_as_often_as_it_says(tokenizer_path: str) -> None:
    workload = Workload(prompts="english", prompt_repeats=4, num_requests=20, max_new_tokens=8)
    check(workload)
    prompts = [tuple(each.prompt) for each in plan(workload, 1, tokenizer_path, 512)]
    assert len(set(prompts)) == 5
    assert prompts == prompts[:5] * 4  # as far from each other as can be: the first may be done by then


@pytest.mark.parametrize("pretok", [True, False])
@pytest.mark.parametrize("options", [{}, {"prompts": "english"}, {"input_tokens": "uniform:1:40"}])
def test_unique_prompts_share_not_even_their_first_token(
    tokenizer_path: str, options: dict[str, str], pretok: bool
) -> None:
    workload = Workload(unique_prompts=True, pretok=pretok, num_requests=40, **options)  # type: ignore[arg-type]
    check(workload)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    ids = [
        tokenizer.encode(each.prompt).ids if isinstance(each.prompt, str) else each.prompt
        for each in plan(workload, 1, tokenizer_path, 512)
    ]
    assert len({each[0] for each in ids}) == 40
    if "input_tokens" not in options:
        other_round = plan(workload, 2, tokenizer_path, 512)
        # Two rounds may open with the same word, of a few tokens; never with the same page of the cache.
        assert not {tuple(each[:16]) for each in ids} & {tuple(each.prompt[:16]) for each in other_round}


@pytest.mark.parametrize("pretok", [True, False])
def test_lengths_that_are_drawn_are_met_exactly(tokenizer_path: str, pretok: bool) -> None:
    options = {"input_tokens": "uniform:5:60", "max_new_tokens": "normal:20:5", "num_requests": 200}
    workload = Workload(pretok=pretok, prompts="english", **options)  # type: ignore[arg-type]
    check(workload)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    planned = plan(workload, 1, tokenizer_path, 512)
    drawn = [
        len(tokenizer.encode(each.prompt).ids if isinstance(each.prompt, str) else each.prompt)
        for each in planned
    ]
    assert drawn == lengths.parse("uniform:5:60", "").draw(200, stream(1, "input_tokens"))
    outputs = [each.max_new_tokens for each in planned]
    assert outputs == lengths.parse("normal:20:5", "").draw(200, stream(1, "max_new_tokens"))
    assert len(set(drawn)) > 40
    assert abs(np.corrcoef(drawn, outputs)[0, 1]) < 0.3


def test_a_distribution_must_fit_the_context_with_its_longest(tokenizer_path: str) -> None:
    fitting = Workload(input_tokens="uniform:1:412", max_new_tokens="uniform:1:100")
    assert plan(fitting, 0, tokenizer_path, 512)
    with pytest.raises(BadSetting, match=r"413 tokens .* leaves 412 beside max_new_tokens=uniform:1:100"):
        plan(msgspec.structs.replace(fitting, input_tokens="uniform:1:413"), 0, tokenizer_path, 512)
    with pytest.raises(BadSetting, match="leaves 0 beside max_new_tokens=600"):
        plan(Workload(max_new_tokens=600), 0, tokenizer_path, 512)


def test_more_unique_prompts_than_words_are_refused(tokenizer_path: str) -> None:
    with pytest.raises(BadSetting, match="unique prompts, not for 9000; ask for fewer"):
        plan(Workload(unique_prompts=True, num_requests=9000), 0, tokenizer_path, 512)
