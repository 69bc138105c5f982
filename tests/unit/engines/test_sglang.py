"""What of SGLang on a clock needs no SGLang, and does not differ by its release."""

from types import SimpleNamespace
from typing import Any

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.sglang import SPEC, engine
from overlap_bench.engines.sglang.models import known
from overlap_bench.engines.sglang_044 import engine as engine_044
from overlap_bench.engines.sglang_base import engine as shared
from overlap_bench.engines.sglang_base.folder import ARCHITECTURES

RELEASES = {"sglang": engine, "sglang-0.4": engine_044}


def install(monkeypatch: pytest.MonkeyPatch, found: str | None, needed: tuple[str, ...] = ()) -> None:
    """An interpreter with this SGLang, or none, for which the rest that it needs is there, but for these."""

    def version(name: str) -> str:
        if found is None:
            raise shared.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(shared, "version", version)
    for each in RELEASES.values():
        monkeypatch.setattr(each, "NEEDED", needed)


@pytest.mark.parametrize(
    ("name", "found", "options", "toggles", "says"),
    [
        ("sglang", None, {}, {}, "sglang needs sglang 0.5.23, .* has none.*engines/sglang/README.md"),
        ("sglang", "0.4.4", {}, {}, "has 0.4.4"),
        ("sglang-0.4", "0.5.23", {}, {}, "needs sglang 0.4.4, .* has 0.5.23.*engines/sglang_044/README.md"),
        ("sglang", "0.5.23", {"pace": ""}, {}, "engine sglang runs on a device that is a clock: --pace 10ms"),
        ("sglang-0.4", "0.4.4", {"pace": ""}, {}, "engine sglang-0.4 runs on a device that is a clock"),
        ("sglang", "0.5.23", {"device": "cuda"}, {}, "the clock alone"),
        ("sglang", "0.5.23", {"scoring": True}, {}, "has no scoring"),
        ("sglang", "0.5.23", {"block_size": 64}, {}, "has no block_size"),  # a block of SGLang's is a token
        ("sglang", "0.5.23", {"max_batch_size": 257}, {}, "captures graphs for at most 256 requests"),
        ("sglang-0.4", "0.4.4", {"max_batch_size": 161}, {}, "captures graphs for at most 160 requests"),
        ("sglang", "0.5.23", {}, {"schedule": "overlapped"}, "overlap"),
    ],
)
def test_what_can_not_work_is_refused(
    name: str,
    found: str | None,
    options: dict[str, Any],
    toggles: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, found)
    with pytest.raises(api.BadSetting, match=says):
        RELEASES[name].build(api.EngineOptions(**{"pace": "10ms"} | options), toggles)


def test_what_an_interpreter_lacks_and_what_its_environment_says_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "0.4.4", needed=("torch", "no_such_thing", "nor_this"))
    with pytest.raises(api.BadSetting, match="has no no_such_thing, no nor_this, which"):
        engine_044.build(api.EngineOptions(pace="10ms"), {})
    install(monkeypatch, "0.4.4")
    monkeypatch.setenv("BENCH_SGLANG_GIL", "hold")
    with pytest.raises(api.BadSetting, match="BENCH_SGLANG_GIL is held or released, not 'hold'"):
        engine_044.build(api.EngineOptions(pace="10ms"), {})


def test_sglang_finds_the_architecture_of_each_preset() -> None:
    named = {each.__name__ for each in known.EntryClass}
    assert named >= {ARCHITECTURES[preset.model_type] for preset in PRESETS.values()}


def test_what_sglang_refuses_of_its_arguments_is_the_user_s_to_change() -> None:
    class Refused(shared.SglangEngine):
        def open(self) -> None:
            raise ValueError("context_length (1032) is greater than 1024")

    made = Refused(api.EngineOptions(pace="10ms", max_context=1024), {})
    with pytest.raises(api.BadSetting, match=r"1032.*max_context=1024 and 8 more"):
        made.open_or_say_why()


def test_a_request_that_its_slots_can_not_hold_is_an_error_and_not_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "0.5.23")
    made = engine.build(api.EngineOptions(pace="10ms", num_blocks=8, max_batch_size=256), {})
    assert made.toggles == SPEC.check({})
    said: list[api.Event] = []
    made.events = SimpleNamespace(send=said.extend)
    made.submit(api.Request(id=1, prompt=[1] * 80, max_new_tokens=41))
    (error,) = said
    assert isinstance(error, api.Error)
    assert error.message == "SGLang: 80 tokens and 41 more, of 120 at most"
