"""SGLang's argued changes as toggles, where there is no SGLang."""

import dataclasses
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.sglang import SPEC, toggles
from overlap_bench.engines.sglang.toggles import CHANGES
from overlap_bench.engines.sglang.toggles.change import INSTALLED
from overlap_bench.engines.sglang.toggles.field_names import FIELDS
from overlap_bench.engines.sglang.toggles.flag_scan import FLAGS, OnePass

BY_NAME = {change.toggle.name: change for change in CHANGES}


@pytest.mark.parametrize("name", BY_NAME)
def test_each_says_where_it_reads_from_and_which_side_is_ours(name: str) -> None:
    change, toggle = BY_NAME[name], SPEC.toggle(name)
    said = " ".join((import_module(toggle.module).__doc__ or "").split())
    assert bool(toggle.rewritten) == ("our rewriting" in said) == bool(change.like) == bool(change.put)
    assert set(change.put) == ({toggle.rewritten} if toggle.rewritten else set())
    assert set(change.variables) == (set() if toggle.rewritten else set(toggle.choices))
    assert toggle.optional
    assert set(re.findall(r"\d{5}", toggle.source)) <= set(re.findall(r"\d{5}", said))


def test_an_arm_that_names_none_is_as_installed() -> None:
    assert not set(SPEC.check({"schedule": "overlap"})) & set(BY_NAME)
    assert toggles.variables(SPEC.check({})) == {}
    toggles.put(SPEC.check({}))
    toggles.check_in_force(SPEC.check({}), None, None)
    for name in ("sample", "field_names"):
        for choice in BY_NAME[name].toggle.choices:
            assert SPEC.check({"schedule": "overlap", name: choice})[name] == choice
            with pytest.raises(BadSetting, match=f"{name} applies only with schedule=overlap"):
                SPEC.check({"schedule": "normal", name: choice})


def test_flags_are_sglangs_own() -> None:
    assert toggles.variables({"ipc": "msgpack", "sample": "at-once", "flag_scan": "one-pass"}) == {
        "SGLANG_USE_PICKLE_IPC": "0",
        "SGLANG_ENABLE_DELAY_SAMPLE": "0",
    }


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.toggle.rewritten])
def test_our_side_of_other_code_is_refused(name: str) -> None:
    """No SGLang is installed here, so its function is another one than ours was written after."""
    (where,) = BY_NAME[name].like
    with pytest.raises(BadSetting, match=rf"^{name}=.* does not fit.*our own rewriting.*{where} is another"):
        toggles.put({name: BY_NAME[name].toggle.rewritten})
    toggles.put({name: INSTALLED})


def test_a_side_that_is_not_in_force_ends_the_engine() -> None:
    class Released:
        def _stream_output_generation(self) -> None: ...

        def record_batch_in_overlap(self, batch: Any) -> None:
            dataclasses.fields(batch)

    scheduler = Released()
    scheduler.output_streamer = scheduler  # type: ignore[attr-defined]
    result = SimpleNamespace(delay_sample_func=None)
    installed = {"flag_scan": INSTALLED, "field_names": INSTALLED, "sample": "at-once"}
    toggles.check_in_force(installed, scheduler, result)
    for settings, found in (
        ({"flag_scan": "one-pass"}, INSTALLED),
        ({"field_names": "cached"}, INSTALLED),
        ({"sample": "delayed"}, "at-once"),
    ):
        with pytest.raises(EngineError, match=f"is not in force: SGLang runs with {found}"):
            toggles.check_in_force(settings, scheduler, result)


@pytest.mark.parametrize("asked", [(), (0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_one_pass_finds_what_four_find(asked: tuple[int, ...]) -> None:
    none: dict[str, Any] = dict.fromkeys(FLAGS, False)
    one = SimpleNamespace(**none | {FLAGS[number]: True for number in asked})
    plain = SimpleNamespace(**none)
    for requests, skipped in (
        ([plain, one, plain], None),
        ([plain, one, plain], plain),
        ([plain, one], one),
        ([], None),
    ):
        given = OnePass(requests, skipped)
        for flag in FLAGS:
            found = any(getattr(each, flag) for each in given if each is not skipped)
            assert found == any(getattr(each, flag) for each in requests if each is not skipped)
        assert list(given) == requests


def test_a_batch_has_the_same_fields_however_often_its_class_is_asked() -> None:
    @dataclasses.dataclass
    class Batch:
        first: int = 1
        second: str = ""

    assert FIELDS["cached"](Batch()) == FIELDS["cached"](Batch(2)) == FIELDS[INSTALLED](Batch())
