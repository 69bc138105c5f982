"""What of SGLang 0.4.4 on a clock needs no SGLang."""

import json
import sys
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, get_native_id
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer

from overlap_bench.engines import api
from overlap_bench.engines.pace import Size, make_pace
from overlap_bench.engines.paced.device import Program
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.requests import reason_of
from overlap_bench.engines.sglang_044 import SPEC, engine
from overlap_bench.engines.sglang_044.card import Card, _blocking, counted, lengths
from overlap_bench.engines.sglang_044.toggles.sync import POLICIES, TOGGLE
from overlap_bench.engines.sglang_base import absent, answer, folder
from overlap_bench.engines.steps import DECODE, Steps


class Client:
    """SGLang's, as far as the waits go."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.output_queue: SimpleQueue[str] = SimpleQueue()
        self.output_queue.put("ids")
        self.launch_done = SimpleNamespace(wait=lambda: self.waited.append("launch"))


def released(client: Any, bid: int) -> Any:
    ids = client.output_queue.get()
    client.launch_done.wait()
    return ids, bid


@pytest.mark.parametrize(
    ("choice", "before", "after"),
    [
        ("launch-and-copy", ["launch"], ["launch"]),
        ("copy-then-launch", [], ["launch"]),
        ("copy-done", [], []),
    ],
)
def test_what_is_waited_for_before_and_after_a_step_is_processed(
    choice: str, before: list[str], after: list[str]
) -> None:
    client, policy = Client(), POLICIES[choice]
    assert policy.resolve(released, client, 7) == ("ids", 7)
    assert client.waited == before
    if policy.processed is not None:
        policy.processed(client)
    assert client.waited == after


def test_each_choice_has_its_policy_and_means_nothing_without_overlap() -> None:
    assert set(POLICIES) == set(TOGGLE.choices)
    assert TOGGLE.unmet("copy-done", {"schedule": "normal"})
    assert "sync" not in SPEC.check({})


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [absent.Finder(engine.ABSENT), *sys.meta_path])
    monkeypatch.setattr(absent, "_sealed", [])
    kept = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(kept)


@pytest.mark.usefixtures("without")
def test_an_absent_package_can_be_inherited_from_and_decorate_until_steps_begin() -> None:
    quantization = import_module("vllm.model_executor.layers.quantization.kv_cache")
    kind = type("Mine", (quantization.BaseKVCacheMethod,), {})
    assert not isinstance(3, quantization.BaseKVCacheMethod)
    assert quantization.register("name")(kind) is kind
    assert quantization.scalar_types.uint4b8
    assert import_module("vllm")._custom_ops
    absent.seal()
    for use in (
        lambda: quantization.another,
        lambda: quantization.BaseKVCacheMethod.scale,
        kind,
        lambda: import_module("sgl_kernel"),
    ):
        with pytest.raises(api.EngineError, match="an empty module stands in"):
            use()


def make_card(pace: str) -> Card:
    card = Card(make_pace(pace))
    card.serving = True
    return card


def test_who_launches_and_reads_a_value_back_waits_for_all_that_was_launched() -> None:
    card = make_card("200ms")
    waited: list[int] = []
    read = _blocking(card, torch.Tensor.item)
    card.begin("decode")
    card.program.sizes = [Size("decode", 1, 1, 8)]
    card.prepared()
    card.forward()
    with patch.object(card, "wait", lambda end_ns, program: waited.append(end_ns)):
        other = Thread(target=read, args=(torch.tensor(3),))
        other.start()
        other.join()
    assert waited == []  # another thread's stream is idle
    launched = card.program
    card.begin("decode")  # the next one is planned: it reads lengths back
    assert read(torch.tensor(3)) == 3
    assert perf_counter_ns() >= launched.end_ns
    assert card.program.prepare_ns >= launched.end_ns


def test_what_prepares_a_step_is_paid_for_before_the_step_is_launched() -> None:
    card = make_card("decode=1ms,prefill=1ms,launch=2ms")
    counts = card.counts["decode"]
    card.begin("decode")
    card.program.sizes = [Size("decode", 1, 1, 8)]
    counts.looked, counts.operations = 1, 2
    began = perf_counter_ns()
    card.prepared()
    card.forward()
    assert card.program.begin_ns - began >= 4_000_000


def test_lengths_of_requests_follow_from_their_pages() -> None:
    starts = torch.tensor([0, 3, 3 + 5], dtype=torch.int32)
    assert lengths(starts, torch.ones(2, dtype=torch.int32), 1).tolist() == [3, 5]
    assert counted(3, "cpu").tolist() == [0, 1, 2]


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_a_preset_becomes_a_folder_without_weights(preset: str, tmp_path: Path) -> None:
    folder.save(PRESETS[preset], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == PRESETS[preset].model_type
    assert config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == PRESETS[preset].config["vocab_size"]
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(named["eos_token"]) == 0


def make_active(stop: list[str], tmp_path: Path) -> tuple[answer.Active, Tokenizer]:
    folder.save(PRESETS["tiny-llama"], tmp_path)
    request = api.Request(5, [7, 8], 20, stop=stop)
    return answer.Active(request, [7, 8], 1, 2), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def texts(events: list[Any]) -> str:
    return "".join(each.text for each in events if isinstance(each, api.Chunk))


@pytest.mark.parametrize("sizes", [[1, 2, 2, 1], [2, 1], [1, 1, 3, 1], [8, 8, 1], [1, 1, 1]])
def test_behind_a_message_of_several_tokens_none_has_a_stamp(sizes: list[int], tmp_path: Path) -> None:
    """Else the load generator takes the request for failed: no stamp says which token it is of."""
    active, tokenizer = make_active([], tmp_path)
    count, stamped = 0, True
    for size in sizes:
        count += size
        stamped = stamped and size == 1
        (chunk,) = active.events([9] * count, count, None, tokenizer)
        assert len(chunk.token_ids) == size
        assert len(chunk.token_ns) == (size if stamped else 0)


def test_messages_of_any_number_of_tokens_become_chunks_that_hold_each_once(tmp_path: Path) -> None:
    active, tokenizer = make_active([], tmp_path)
    ids = tokenizer.encode("Some words that go on, one by one, to an end").ids
    events = active.events(ids[:1], 1, None, tokenizer)
    events += active.events(ids[:1], 1, None, tokenizer)  # SGLang says again what it said
    events += active.events([7, 8, *ids[:4]], 4, None, tokenizer)
    events += active.events([8, *ids], len(ids), {"type": "length", "length": 20}, tokenizer)
    assert [token for each in events[:-1] for token in each.token_ids] == ids
    assert texts(events).strip() == "Some words that go on, one by one, to an end"
    assert (events[-1].reason, events[-1].completion_tokens, events[-1].prompt_tokens) == (
        "length",
        len(ids),
        2,
    )


def test_no_part_of_a_stop_string_is_said(tmp_path: Path) -> None:
    active, tokenizer = make_active(["by one"], tmp_path)
    ids = tokenizer.encode("Some words that go on, one by one, to an end").ids
    events: list[Any] = []
    for upto in range(1, len(ids) + 1):
        ended = "by one" in tokenizer.decode(ids[:upto])
        finished = {"type": "stop", "matched": "by one"} if ended else None
        events += active.events(ids[:upto], upto, finished, tokenizer)
        if ended:
            break
    assert texts(events).strip() == "Some words that go on, one"
    assert events[-1].reason == "stop"


def test_the_reason_tells_an_end_of_text_from_a_stop_string() -> None:
    said = [{"type": "stop", "matched": 0}, {"type": "stop", "matched": "x"}, {"type": "abort"}]
    assert [reason_of(each["type"], each.get("matched")) for each in said] == ["eos", "stop", "cancelled"]


def test_a_profile_tells_the_forward_thread_from_the_scheduler_s() -> None:
    steps = Steps()
    steps.begin_profile(1)
    steps.launching = 77
    steps.add(DECODE, 1, 1, 10, 12)
    steps.finished(0, 30, 31, Program(12, launch_ns=14, launched_ns=15, begin_ns=14, end_ns=29))
    steps.also("wait.launch_done", 32, 33)
    profile = steps.record().profile
    (host,) = profile.hosts
    assert host.threads == {77: "forward", get_native_id(): "scheduler"}
    rows = memoryview(host.data).cast("q").tolist()
    ran = {host.names[rows[at + 1]]: host.threads[rows[at]] for at in range(0, len(rows), 5)}
    assert {phase for phase, thread in ran.items() if thread == "forward"} == {"metadata", "launch"}
    assert {"schedule", "append", "wait.launch_done"} <= ran.keys()
