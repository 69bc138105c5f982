"""What of today's SGLang on a clock needs no SGLang."""

from types import SimpleNamespace
from typing import Any

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.sglang import SPEC, engine
from overlap_bench.engines.sglang.models import known
from overlap_bench.engines.sglang_base import engine as shared
from overlap_bench.engines.sglang_base.folder import ARCHITECTURES


@pytest.mark.parametrize(
    ("found", "options", "toggles", "says"),
    [
        (
            None,
            {"pace": "10ms"},
            {},
            "sglang needs sglang 0.5.23, .* has none.*engines/sglang/README.md",
        ),
        ("0.4.4", {"pace": "10ms"}, {}, "has 0.4.4"),
        ("0.5.23", {}, {}, "engine sglang runs on a device that is a clock: --pace 10ms"),
        ("0.5.23", {"pace": "10ms", "device": "cuda"}, {}, "the clock alone"),
        ("0.5.23", {"pace": "10ms", "scoring": True}, {}, "has no scoring"),
        ("0.5.23", {"pace": "10ms"}, {"schedule": "overlapped"}, "overlap"),
    ],
)
def test_what_can_not_work_is_refused(
    found: str | None,
    options: dict[str, Any],
    toggles: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise shared.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(shared, "version", version)
    monkeypatch.setattr(engine, "NEEDED", ())
    with pytest.raises(api.BadSetting, match=says):
        engine.build(api.EngineOptions(**options), toggles)


def test_each_batch_that_is_asked_for_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "version", lambda name: "0.5.23")
    monkeypatch.setattr(engine, "NEEDED", ())
    assert engine.build(api.EngineOptions(pace="10ms", max_batch_size=256), {}).toggles == SPEC.check({})
    with pytest.raises(api.BadSetting, match="captures graphs for at most 256 requests"):
        engine.build(api.EngineOptions(pace="10ms", max_batch_size=257), {})


def test_sglang_finds_the_architecture_of_each_preset() -> None:
    named = {each.__name__ for each in known.EntryClass}
    assert named >= {ARCHITECTURES[preset.model_type] for preset in PRESETS.values()}


def test_what_sglang_refuses_of_its_arguments_is_the_user_s_to_change() -> None:
    class Refused(shared.SglangEngine):
        def open(self) -> None:
            raise ValueError("context_length (1032) is greater than 1024")

    engine = Refused(api.EngineOptions(pace="10ms", max_context=1024), {})
    with pytest.raises(api.BadSetting, match=r"1032.*max_context=1024 and 8 more"):
        engine.open_or_say_why()


def test_blocks_of_another_size_are_refused_as_sglangs_have_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: "0.5.23")
    monkeypatch.setattr(engine, "NEEDED", ())
    with pytest.raises(api.BadSetting, match="has no block_size"):
        engine.build(api.EngineOptions(pace="10ms", block_size=64), {})


def test_a_request_that_its_slots_can_not_hold_is_an_error_and_not_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: "0.5.23")
    monkeypatch.setattr(engine, "NEEDED", ())
    made = engine.build(api.EngineOptions(pace="10ms", num_blocks=8), {})
    said: list[api.Event] = []
    made.events = SimpleNamespace(send=said.extend)
    made.submit(api.Request(id=1, prompt=[1] * 80, max_new_tokens=41))
    (error,) = said
    assert isinstance(error, api.Error)
    assert error.message == "SGLang: 80 tokens and 41 more, of 120 at most"
