"""`bench eval`: the engine answers lm-eval as transformers would, and what is said of two arms is right."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks import manager
from scipy import optimize

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.presets import TOKENIZER_FILE
from overlap_bench.harness.analysis import accuracy
from overlap_bench.harness.analysis.accuracy import Agreement, Answers, Evaluation, Likelihood
from overlap_bench.harness.analysis.plain import from_plain
from overlap_bench.harness.analysis.result import Settings
from overlap_bench.harness.report import evaluation_tables, page
from overlap_bench.harness.run.scoring import Answer
from overlap_bench.harness.store.files import EVALUATION_FILE, StoreError
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.studies.evaluation import evaluate, model
from overlap_bench.harness.studies.evaluation.tasks.made_arithmetic import questions
from tests.support.bench_command import last_line
from tests.support.clockwork import installed
from tests.support.in_process import bench, done
from tests.support.in_process_engine import reference_model, serve
from tests.support.made_blocks import described

# -- the engine as a model of lm-eval ---------------------------------------------------------------------


class InProcess:
    """Client's part of a model: an engine in this process, booted for each batch of questions."""

    def __init__(self, device: Any, settings: dict[str, str], **options: Any) -> None:
        self._device, self._settings, self._options = device, SPEC.check(settings), options
        self.description = SimpleNamespace(
            model={"tokenizer": str(TOKENIZER_FILE), "eos": 0, "context": options.get("max_context", 512)}
        )

    def ask(self, requests: list[api.Request]) -> list[Answer]:
        numbered = [msgspec.structs.replace(each, id=place) for place, each in enumerate(requests)]
        _, events, _ = serve(self._device, self._settings, numbered, scoring=True, **self._options)
        found: dict[int, Answer] = {}
        texts = dict.fromkeys(range(len(requests)), "")
        for event in events:
            if isinstance(event, api.Chunk):
                texts[event.id] += event.text
            elif isinstance(event, api.Finish):
                found[event.id] = Answer(texts[event.id], (), event)
            else:
                raise AssertionError(event.message)
        return [found[place] for place in range(len(requests))]


OVERLAP = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}


@pytest.fixture
def engine(device) -> model.EngineModel:
    return model.EngineModel(InProcess(device, OVERLAP, max_context=64))  # type: ignore[arg-type]


def likelihood(context: list[int], continuation: list[int]) -> float:
    """By transformers."""
    with torch.inference_mode():
        logits = reference_model("tiny-gpt2")(torch.tensor([[*context, *continuation]])).logits[0]
    shares = logits[len(context) - 1 : -1].log_softmax(-1)
    return float(shares.gather(-1, torch.tensor(continuation)[:, None]).sum())


def asked(*arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_log_likelihoods_equal_transformers(engine: model.EngineModel) -> None:
    pairs = [
        ("What is a list?", " A sequence"),
        ("1 + 1 =", " 2"),  # one token: scored by the last of the decode steps that its context ends with
        ("", "nothing came before"),
        ("a", " b"),
    ]
    found = engine.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        before = engine.tok_encode(context) or [0]
        after = engine.tok_encode(context + continuation)[len(engine.tok_encode(context)) :]
        assert logprob == pytest.approx(likelihood(before, after), abs=1e-3)
        assert not greedy
    assert [each.tokens for each in engine.answers.likelihoods][1] == 1


def test_an_answer_of_one_token_sees_decode_steps(engine: model.EngineModel) -> None:
    request = engine._forced(list(range(1, 21)), [30])
    assert len(request.prompt) == 20 - model.LEAD
    assert request.forced == [*range(21 - model.LEAD, 21), 30]


def test_a_context_that_is_too_long_is_cut_on_the_left_and_counted(engine: model.EngineModel) -> None:
    long, answer = list(range(1, 100)), [7, 8]
    request = engine._forced(long, answer)
    assert request.prompt + request.forced == [*long, *answer][-64:]
    assert engine.answers.cut == 1
    with pytest.raises(
        api.BadSetting, match=r"64 tokens at once, and max_context=64: give --set max_context"
    ):
        engine._forced([1], [2] * 64)


def test_rolling_likelihoods_score_each_token_once(engine: model.EngineModel) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 12
    ids = engine.tok_encode(text)
    assert len(ids) > 2 * 64
    (found,) = engine.loglikelihood_rolling([asked(text)])
    (scored,) = engine.answers.likelihoods
    assert scored.tokens == len(ids)
    assert found < 0
    short = "The quick brown fox"
    (found,) = engine.loglikelihood_rolling([asked(short)])
    assert found == pytest.approx(likelihood([0], engine.tok_encode(short)), abs=1e-3)


def test_generation_stops_where_the_task_says(engine: model.EngineModel) -> None:
    whole, *_ = engine.generate_until([asked("Hello", {"max_gen_toks": 20, "until": []})])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    (cut,) = engine.generate_until([asked("Hello", {"max_gen_toks": 20, "until": [stop, ""]})])
    assert cut == whole[: whole.index(stop)]
    assert engine.answers.texts == [whole, cut]
    with pytest.raises(api.BadSetting, match="asks for samples"):
        engine.generate_until([asked("Hello", {"do_sample": True})])


# -- what is said of two arms -----------------------------------------------------------------------------


@given(st.integers(1, 60), st.data())
def test_tangos_interval_holds_the_differences_that_the_score_test_does_not_reject(n, data):
    """Against the score statistic with its likelihood maximised numerically."""
    gained = data.draw(st.integers(0, n))
    lost = data.draw(st.integers(0, n - gained))
    low, high = accuracy.tango(gained, lost, n)
    estimate = (gained - lost) / n
    assert -1 <= low <= estimate <= high <= 1
    for delta in (low, high):
        if abs(delta) < 1 - 1e-6:
            assert abs(score(gained, lost, n, delta)) == pytest.approx(1.959964, abs=2e-3)


def score(gained: int, lost: int, n: int, delta: float) -> float:
    """(estimate - delta) over its standard error where the shares are the likeliest with that difference."""

    def surprise(share_lost: float) -> float:
        shares = (share_lost + delta, share_lost, 1 - 2 * share_lost - delta)
        counts = (gained, lost, n - gained - lost)
        return -sum(
            count * math.log(max(share, 1e-300)) for count, share in zip(counts, shares, strict=True) if count
        )

    least, most = max(0.0, -delta), (1 - delta) / 2
    found = optimize.minimize_scalar(
        surprise, bounds=(least, most), method="bounded", options={"xatol": 1e-12}
    )
    share = min((least, most, float(found.x)), key=surprise)
    return (gained - lost - n * delta) / math.sqrt(n * (2 * share + delta - delta * delta))


def test_a_row_says_what_changed_and_for_how_many_items():
    row = accuracy.row("t", "acc", [1, 1, 0, 0, 1], [1, 0, 1, 0, 1])
    assert (row.before, row.after, row.delta, row.differ) == (0.6, 0.6, 0.0, 2)
    assert row.p == 1
    row = accuracy.row("t", "f1", [0.5, 0.25, 1.0], [0.75, 0.5, 1.0])
    assert row.delta == pytest.approx(1 / 6)
    assert row.low < row.delta < row.high
    assert accuracy.row("t", "acc", [1, 0], None).after is None


def test_log_likelihoods_apart_are_counted_per_token():
    before = Answers([Likelihood(-10.0, False, 100), Likelihood(-10.0, True, 1)], ["a", "b"])
    after = Answers([Likelihood(-10.05, False, 100), Likelihood(-10.05, False, 1)], ["a", "c"])
    found = accuracy.agreement(before, after)
    assert (found.apart, found.greedy_differ, found.texts_differ) == (1, 1, 1)
    assert found.largest_difference == pytest.approx(0.05)
    nan = Answers([Likelihood(float("nan"), False, 1)])
    assert accuracy.agreement(nan, nan).apart == 1


def test_items_of_a_group_are_pooled():
    values = {("a", "acc"): {0: 1.0, 1: 0.0}, ("b", "acc"): {0: 1.0}}
    groups = {"g": ["h"], "h": ["a", "b"]}
    description: Any = None
    side = evaluate.Asked(values, groups, Answers(), description)
    found = evaluate.rows(["g"], side, side)
    assert [(row.task, row.items) for row in found] == [("g", 3), ("a", 2), ("b", 1)]
    assert found[0].before == pytest.approx(2 / 3)


def test_what_lm_eval_logs_of_an_item_as_its_perplexity_is_called_what_it_is():
    logged = {"filter": "none", "doc_id": 0, "metrics": ["perplexity", "acc"], "perplexity": -4.2, "acc": 1.0}
    found = evaluate._values({"lambada": [logged]})
    assert found == {("lambada", "loglikelihood"): {0: -4.2}, ("lambada", "acc"): {0: 1.0}}


def test_prompts_that_the_after_arm_alone_cut_are_told():
    def side(cut: int) -> evaluate.Asked:
        return evaluate.Asked({}, {}, Answers([Likelihood(-1, True, 1)] * 200, [], cut), described())

    warned = [str(each) for each in evaluate._warnings([side(0), side(150)])]
    assert any("cut=150" in each and "context=99" in each for each in warned)


# -- the task that ships ----------------------------------------------------------------------------------


def test_the_questions_that_ship_have_one_right_answer_among_four():
    made = questions()
    assert len(made) == 200
    assert made == questions()
    for each in made:
        choices = [int(choice) for choice in each["choices"]]
        assert len(set(choices)) == 4
        assert choices[each["answer"]] == eval(each["question"].removesuffix(" ="))
    places = [each["answer"] for each in made]
    assert all(30 < places.count(place) < 70 for place in range(4))


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval", "say what to run"),
        ("eval --variant copy-done --limit 0", "--limit must be at least 1, not 0"),
        ("eval --variant copy-done --num-fewshot -1", "--num-fewshot must be at least 0, not -1"),
        ("eval --variant copy-done --tasks ,", "--tasks needs names such as"),
        ("eval --variant copy-done --rate 3", "--rate"),
        (
            "eval --variant copy-done --tasks offline-arithmetics",
            "unknown task 'offline-arithmetics'; did you mean offline-arithmetic?",
        ),
    ],
)
def test_bad_input_is_one_line(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    # Of the thousands of tasks that lm-eval brings, which take ten seconds to read, some.
    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "arc" / "manager.py"))
    said = last_line(bench(*arguments.split(), code=2).err)
    assert said.startswith("bench: ")
    assert message in said
    assert not list(tmp_path.glob("results/*"))


def test_an_evaluation_before_and_after_a_toggle(tmp_path: Path) -> None:
    words = "eval --variant copy-done --device emulated --limit 6 --format json --max-batch-size 8"
    stdout = done(installed(tmp_path), tmp_path, *words.split())
    result = json.loads(stdout)
    (row,) = result["tasks"]
    assert (row["task"], row["metric"], row["items"]) == ("offline-arithmetic", "acc", 6)
    assert row["before"] == row["after"]
    assert row["differ"] == 0
    assert result["answers"]["loglikelihoods"] == 24
    assert result["answers"]["apart"] == 0
    assert result["answers"]["largest_difference"] < 1e-4
    (folder,) = (tmp_path / "results").iterdir()
    kept = json.loads((folder / EVALUATION_FILE).read_text())
    assert kept["tasks"] == result["tasks"]
    assert set(kept["descriptions"]) == {"before", "after"}
    assert kept["descriptions"]["after"]["model"]["tokenizer"] == "engines.presets/tokenizer.json"
    with pytest.raises(StoreError, match="is an evaluation, not a run"):
        read_manifest(folder)
    text = page.markdown_page(evaluation_tables.page(from_plain(result, Evaluation)))
    assert "acc of offline-arithmetic" in text
    assert "0 of 24 log-likelihoods are apart" in text


def test_answers_that_differ_are_said_first_and_loudly():
    row = accuracy.row("t", "acc", [1.0, 0.0], [0.0, 0.0])
    settings = Settings(engine="overlap", options={}, toggles={}, python=None, env={}, ref=None)
    result = Evaluation(
        schema_version=1,
        run="r",
        device="emulated",
        variant="v",
        before=settings,
        after=settings,
        confidence=0.95,
        tasks=[row],
        answers=Agreement(
            loglikelihoods=8, apart=2, largest_difference=0.5, greedy_differ=0, texts=1, texts_differ=1
        ),
        warnings=[],
    )
    said = evaluation_tables.conclusion(result)
    assert "2 of 8 log-likelihoods ARE APART" in said
    assert "1 of 1 texts DIFFER" in said
    assert "of which 1 differ" in said
    said = evaluation_tables.conclusion(msgspec.structs.replace(result, tasks=[]))
    assert said.startswith("v: no item with a number. 2 of 8 log-likelihoods ARE APART")
