"""What combines, and what a wrong setting is answered with."""

import pytest

from overlap_bench.engines.api import BadSetting, find_engines, pick
from overlap_bench.engines.overlap import SPEC
from tests.support.refusals import refusal


def test_the_overlap_engine_is_found_by_its_entry_point():
    assert find_engines()["overlap"] is SPEC


def test_what_is_left_out_gets_the_first_choice_that_means_something():
    assert SPEC.check({"schedule": "serial"}) == {
        "schedule": "serial",
        "launch": "inline",
        "h2d": "pageable",
        "d2h": "blocking",
        "output": "inline",
        "graph": "off",
        "tables": "full",
        "chunk": "off",
        "steps": "1",
        "spec": "off",
        "gc": "default",
    }
    overlap = SPEC.check({"schedule": "overlap"})
    assert overlap["launch"] == "thread"
    assert overlap["sync"] == "launch-and-copy"
    assert overlap["d2h"] == "event"
    assert (overlap["prefill"], overlap["gil"]) == ("overlap", "default")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "serial", "sync": "copy-done"}, "sync applies only with schedule"),
        ({"schedule": "serial", "launch": "thread"}, "launch=thread applies only with"),
        ({"schedule": "overlap", "d2h": "blocking"}, "d2h=blocking applies only with"),
        ({"schedule": "serial", "d2h": "thread"}, "d2h=thread applies only with schedule=overlap"),
        ({"schedule": "overlap", "output": "deferred"}, "output=deferred applies only"),
        ({"schedule": "overlap", "launch": "inline", "sync": "copy-done"}, "sync applies only"),
        ({"schedule": "serial", "prefill": "consecutive-sync"}, "prefill applies only with schedule"),
        ({"schedule": "overlap", "launch": "inline", "gil": "fast-switch"}, "gil applies only with"),
        ({"schedule": "serial", "share": "ring"}, "share applies only with ranks=2 or 3 or "),
        ({"shedule": "serial"}, "unknown toggle 'shedule'; did you mean schedule?"),
        ({"h2d": "pined"}, "unknown choice of h2d 'pined'; did you mean pinned?"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_with_the_reason(settings, message):
    assert refusal(lambda: SPEC.check(settings)).startswith(message)


def test_settings_have_the_order_of_declaration_however_they_are_given():
    given = {"accept": "device", "spec": "ngram", "gil": "fast-switch", "launch": "thread"}
    checked = SPEC.check(given | {"schedule": "overlap", "ranks": "2"})
    assert list(checked) == [*(toggle.name for toggle in SPEC.toggles), "ranks"]


def test_every_setting_is_valid_and_none_is_listed_twice():
    every = SPEC.every_setting()
    assert all(SPEC.check(settings) == settings for settings in every)
    assert len({tuple(settings.items()) for settings in every}) == len(every)


def test_a_name_like_no_other_is_answered_with_the_list():
    with pytest.raises(BadSetting, match="unknown engine 'zzz'; available: overlap"):
        pick("zzz", {"overlap": 1}, "engine")
    with pytest.raises(BadSetting, match="unknown variant 'nope'; available: copy-done"):
        pick("nope", {"copy-done": 1}, "variant")


def test_the_beginning_of_names_is_answered_with_all_that_begin_so():
    names = dict.fromkeys(("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p99"))
    with pytest.raises(BadSetting, match=r"unknown metric 'tpot'; did you mean tpot_ms_p50 or tpot_ms_p99\?"):
        pick("tpot", names, "metric")
