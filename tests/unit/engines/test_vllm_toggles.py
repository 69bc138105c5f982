"""vLLM's argued changes as toggles, where there is no vLLM: what each declares, and what our own sides do."""

import gc
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from overlap_bench.engines.api import BadSetting, EngineError, EngineOptions
from overlap_bench.engines.fits import differing, digest
from overlap_bench.engines.vllm import SPEC, engine, fits, toggles
from overlap_bench.engines.vllm.toggles import CHANGES, detokenizer
from overlap_bench.engines.vllm.toggles.block_hasher import full
from overlap_bench.engines.vllm.toggles.block_map import Nested
from overlap_bench.engines.vllm.toggles.change import INSTALLED, PUT
from overlap_bench.engines.vllm.toggles.flat_logprobs import check_in_force
from overlap_bench.engines.vllm.toggles.free_list import one_by_one
from overlap_bench.engines.vllm.toggles.remove_all import filtered
from overlap_bench.engines.vllm.toggles.slots import has_room
from tests.support.refusals import refusal

BY_NAME = {change.toggle.name: change for change in CHANGES}


@pytest.fixture
def environment() -> Iterator[None]:
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that has nothing but a version."""
    module: Any = ModuleType("vllm")
    module.__version__ = "0.11.0"
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("name", ["async_scheduling", *BY_NAME])
def test_each_says_where_it_reads_from_and_which_side_is_ours(name: str) -> None:
    toggle = SPEC.toggle(name)
    module = import_module(toggle.module)
    said = " ".join((module.__doc__ or "").split())
    assert bool(toggle.rewritten) == ("our rewriting" in said)
    if name in BY_NAME:
        change = BY_NAME[name]
        for by_choice in (change.put, change.arguments, change.sampling, change.variables):
            assert set(by_choice) <= set(toggle.choices)
        assert not toggle.rewritten or toggle.rewritten in toggle.choices
        assert toggle.optional


def test_an_arm_that_names_none_is_as_installed(environment: None) -> None:
    assert not set(SPEC.check({})) & set(BY_NAME)
    assert SPEC.check({"block_map": "nested"})["block_map"] == "nested"
    with pytest.raises(BadSetting, match="flat_logprobs applies only with logprobs="):
        SPEC.check({"flat_logprobs": "on"})
    with pytest.raises(BadSetting, match="output_chunk applies only with multiprocessing=on"):
        SPEC.check({"output_chunk": "128", "multiprocessing": "off"})
    toggles.tell(SPEC.check({}))
    assert toggles.told() == {}
    toggles.put()  # of nothing: vLLM loads it in every process


def test_what_is_switched_goes_to_each_process_and_to_vllms_own_flags(environment: None) -> None:
    settings = {"heap": "frozen", "output_chunk": "all", "logprobs": "0", "flat_logprobs": "on"}
    toggles.tell(settings | {"block_hash": "sha256_cbor", "async_scheduling": "on"})
    assert toggles.told() == settings | {"block_hash": "sha256_cbor"}
    assert os.environ[PUT].count("=") == 5
    assert os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] == "1000000"
    assert toggles.sampling(settings) == {"logprobs": 0, "flat_logprobs": True}
    assert toggles.arguments({"block_hash": "sha256_cbor"}) == {"prefix_caching_hash_algo": "sha256_cbor"}


def test_what_this_vllm_lacks_is_named(vllm: None) -> None:
    for change in CHANGES:
        cached = change.prefix_cache is not False
        for choice in change.toggle.choices:
            settings = {change.toggle.name: choice}
            if choice in change.packages and find_spec(change.packages[choice]) is None:
                with pytest.raises(BadSetting, match=f"needs {choice}: .* -m pip install {choice}"):
                    toggles.check(settings, prefix_cache=True, recorder=True)
            elif choice == INSTALLED or not change.needs:
                toggles.check(settings, prefix_cache=cached, recorder=True)
            else:
                with pytest.raises(BadSetting) as caught:
                    toggles.check(settings, prefix_cache=cached, recorder=True)
                said = str(caught.value)
                assert said.startswith(f"{change.toggle.name}={choice} does not fit vLLM 0.11.0")
                assert all(f"{module}.{name}" in said for module, name, _ in change.needs)
                assert "\n" not in said


def test_a_choice_that_changes_nothing_beside_other_options_is_refused() -> None:
    for name in ("block_map", "block_hasher", "block_hash"):
        choice = BY_NAME[name].toggle.choices[0]
        with pytest.raises(BadSetting, match="without a prefix cache: give --prefix-cache"):
            toggles.check({name: choice}, prefix_cache=False, recorder=True)
    with pytest.raises(BadSetting, match="slots=decode-path changes nothing with a prefix cache: give --no"):
        toggles.check({"slots": "decode-path"}, prefix_cache=True, recorder=True)
    for name, other in (("remove_all", "update"), ("empty_blocks", "slots")):
        with pytest.raises(BadSetting, match=f"{name}=installed changes nothing beside {other}=decode-path"):
            toggles.check({name: INSTALLED, other: "decode-path"}, prefix_cache=False, recorder=True)
    with pytest.raises(BadSetting, match="leave recorder on"):
        toggles.check({"heap": "frozen"}, prefix_cache=False, recorder=False)


def test_a_side_that_is_not_in_force_ends_the_engine(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(cached_block_hash_to_block=Nested())),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
    )
    scheduler.vllm_config = SimpleNamespace(speculative_config=None, use_v2_model_runner=False)
    toggles.check_in_force({"block_map": "nested", "block_hash": "sha256"}, scheduler)
    toggles.check_in_force({"spec": "off", "runner": "v1"}, scheduler)
    for settings, found in (
        ({"block_map": INSTALLED}, "runs with nested"),
        ({"block_hash": "xxhash"}, "runs with sha256"),
        ({"heap": "frozen"}, "runs with collected"),
        ({"spec": "ngram"}, "runs with off"),
        ({"runner": "v2"}, "runs with v1"),
    ):
        with pytest.raises(EngineError, match=found):
            toggles.check_in_force(settings, scheduler)
        toggles.check_in_force(settings)  # not asked where outputs are processed


def test_an_output_shows_its_log_probabilities() -> None:
    check_in_force({"logprobs": "0", "flat_logprobs": "off"}, [{}])
    check_in_force({"logprobs": "none"}, None)
    check_in_force({}, None)
    for settings, logprobs, said in (
        ({"logprobs": "0", "flat_logprobs": "on"}, [{}], "flat_logprobs=on is not in force: .* are a list"),
        ({"logprobs": "0", "flat_logprobs": "off"}, None, "logprobs=0 is not in force: an output has none"),
        ({"logprobs": "none"}, [{}], "logprobs=none is not in force: an output has some"),
    ):
        with pytest.raises(EngineError, match=said):
            check_in_force(settings, logprobs)


def test_a_detokenizer_is_in_force_where_a_request_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it was asked for alone: some tokenizers have no fast one."""

    class SlowIncrementalDetokenizer:
        pass

    class IncrementalDetokenizer:
        @classmethod
        def from_new_request(cls, tokenizer: object, request: object) -> object:
            return SlowIncrementalDetokenizer()

    module: Any = ModuleType("vllm.v1.engine.detokenizer")
    module.IncrementalDetokenizer = IncrementalDetokenizer
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.detokenizer", module)
    monkeypatch.setattr(sys.modules["vllm.v1.engine"], "detokenizer", module, raising=False)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0", raising=False)
    monkeypatch.setattr(detokenizer, "_made", set())
    change = BY_NAME["detokenizer"]
    change.put["fast"]()
    assert change.shown(None) == "none"
    assert isinstance(IncrementalDetokenizer.from_new_request(None, None), SlowIncrementalDetokenizer)
    with pytest.raises(EngineError, match=r"detokenizer=fast is not in force: .* runs with slow"):
        toggles.check_in_force({"detokenizer": "fast"})


def test_a_rewriting_is_refused_where_what_it_was_written_after_reads_otherwise(
    vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toggles, "missing", lambda taken: [])
    like = {name: each for name, change in BY_NAME.items() for each in change.like}
    assert like.keys() == {"block_hasher", "slots", "update"}
    for name, where in like.items():
        toggle, cached = BY_NAME[name].toggle, BY_NAME[name].prefix_cache is not False
        with pytest.raises(BadSetting) as caught:
            toggles.check({name: toggle.rewritten}, prefix_cache=cached, recorder=True)
        assert str(caught.value).startswith(f"{name}={toggle.rewritten} does not fit vLLM 0.11.0: ")
        assert str(caught.value).endswith(f"here another one is {where}")
        toggles.check({name: INSTALLED}, prefix_cache=cached, recorder=True)
    here = f"{full.__module__}:full"
    assert differing({here: "0" * 16}) == [here]
    assert differing({here: digest(full.__module__, "full"), "gone:name": "1"}) == ["gone:name"]


def test_a_vllm_that_no_arm_fits_is_told_what_it_lacks(vllm: None) -> None:
    said = refusal(fits.check)
    assert said.startswith("vLLM 0.11.0 does not fit, 0.32.0 was tried: it has no vllm.engine.arg_utils.")
    assert all(f"{module}.{name}" in said for module, name, _ in fits.TAKEN)


def test_a_name_that_ends_our_own_imports_is_told_too(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "overlap_bench.engines.vllm.in_process", None)
    with pytest.raises(BadSetting, match=r"the vLLM of .* does not fit, 0.32.0 was tried: .*in_process"):
        engine.build(
            EngineOptions(pace="10ms"),
            {"multiprocessing": "off", "enforce_eager": "off", "chunked_prefill": "on"},
        )


# -- our own sides ------------------------------------------------------------------------------------------


def test_the_nested_map_finds_what_it_was_given() -> None:
    blocks = [SimpleNamespace(block_id=number) for number in range(3)]
    found = Nested()
    assert found.get_one_block("a") is None
    assert not found.contain("a", 0)
    found.insert("a", blocks[0])
    found.insert("a", blocks[1])
    found.insert("b", blocks[2])
    assert len(found) == 2
    assert found.get_one_block("a") is blocks[0]
    assert found.contain("a", 1)
    assert found.pop("a", 2) is None
    assert found.pop("a", 0) is blocks[0]
    assert found.get_one_block("a") is blocks[1]
    assert found.pop("a", 1) is blocks[1]
    assert found.pop("a", 1) is None
    assert len(found) == 1


def test_blocks_are_taken_in_the_same_order_and_as_many() -> None:
    queue = SimpleNamespace(left=[1, 2, 3])
    queue.popleft = lambda: queue.left.pop(0)
    assert (one_by_one(queue, 2), queue.left) == ([1, 2], [3])
    assert one_by_one(queue, 0) == []


def test_those_that_have_ended_are_left_out() -> None:
    running = [1, 2, 3]
    assert filtered(running, set()) is running
    assert filtered(running, {2}) == [1, 3]
    assert filtered(running, {1, 2, 3}) == []


@pytest.mark.parametrize("tokens", [0, 15, 16, 31, 32, 47])
def test_a_block_is_hashed_once_it_is_full_and_by_vllms_own(tokens: int) -> None:
    features = [SimpleNamespace(mm_position=SimpleNamespace(offset=0, length=4))]
    request = SimpleNamespace(block_hashes=["first"], num_tokens=tokens, mm_features=features)

    def installed(each: Any) -> list[str]:
        return [f"{number}" for number in range(len(each.block_hashes), each.num_tokens // 16)]

    assert full(16, installed)(request) == installed(request)


def test_a_decode_has_room_but_where_its_block_is_full_or_more_is_asked() -> None:
    kinds = {"FullAttentionSpec": type("FullAttentionSpec", (), {"block_size": 16, "sliding_window": None})}
    kinds["MambaSpec"] = type("MambaSpec", (), {"block_size": 16})

    def manager(*specs: str, caching: bool = False) -> Any:
        groups = [SimpleNamespace(kv_cache_spec=kinds[each]()) for each in specs]
        config = SimpleNamespace(kv_cache_groups=groups)
        return SimpleNamespace(enable_caching=caching, kv_cache_config=config)

    plain, asked = manager("FullAttentionSpec"), {"num_lookahead_tokens": 0}
    for computed, room in ((1, True), (15, True), (16, False), (17, True), (32, False), (0, False)):
        assert has_room(plain, SimpleNamespace(num_computed_tokens=computed), 1, asked) == room
    decode = SimpleNamespace(num_computed_tokens=17)
    assert not has_room(plain, decode, 2, asked)
    assert not has_room(plain, decode, 1, {"num_lookahead_tokens": 3})
    assert not has_room(plain, decode, 1, {**asked, "new_computed_blocks": None})
    for other in (manager("MambaSpec"), manager("FullAttentionSpec", "MambaSpec"),
                  manager("FullAttentionSpec", caching=True)):  # fmt: skip
        assert not has_room(other, decode, 1, asked)
