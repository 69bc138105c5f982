"""Warnings are classes: one class is one warning, from where it applies to what is stored of it."""

import re
from collections.abc import Iterator
from itertools import product
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import pytest
from msgspec import ValidationError
from msgspec.structs import replace

from overlap_bench.harness.analysis import accuracy, across_warnings, arm_warnings, comparison, run_warnings
from overlap_bench.harness.analysis.plain import from_plain, to_plain, to_stored
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.run_warnings import Measured, OfRun
from overlap_bench.harness.analysis.verdict_warnings import OneTrial, SignFlip, WayOut
from overlap_bench.harness.analysis.warnings import Kind, Severity, Told, Warning, kinds, ranked
from overlap_bench.harness.report import sections
from overlap_bench.harness.store.manifest import Repeat
from tests.support.made_blocks import blocks, manifest, result


class FullMoon(OfRun, frozen=True):
    """All that it takes to add a warning."""

    shine: float
    usual = Severity.QUALIFIES
    says = "full moon: it shone with {shine:.0%}; engines may be restless; draw the curtains"

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.run == "moonlit":
            yield cls(0.98)


SAID = "full moon: it shone with 98%; engines may be restless; draw the curtains"


def only(**changes: Any) -> Comparison:
    (found,) = result(**changes).comparisons
    return found


def test_a_warning_is_added_by_one_class() -> None:
    found = only(plan=replace(manifest(), run="moonlit"))
    assert FullMoon(0.98) in found.warnings
    assert f"Warning: {SAID}" in list(sections.leading(found))
    kept = next(each for each in to_stored(found)["warnings"] if each["kind"] == "full_moon")
    assert kept == {"kind": "full_moon", "severity": Severity.QUALIFIES, "shine": 0.98, "text": SAID}
    assert SAID in to_plain(found)["warnings"]
    assert SAID not in to_plain(only())["warnings"]


def test_a_stored_warning_is_the_same_warning_and_is_ranked_as_it_was() -> None:
    told: list[Warning] = [
        FullMoon(0.5),
        run_warnings.LateSends(4.89).about("closed"),
        arm_warnings.PaceNotKept("after", 0.3, "try a longer pace", weight=Severity.OVERRULES),
        WayOut((8, 31), 0.01, 20.0),
        SignFlip((("h2d", 0.01), ("output", 0.2))),
        across_warnings.Different("machine", "cores was 2, is 4", weight=Severity.QUALIFIES),
        Told("of old"),
    ]
    found = replace(only(), warnings=ranked(told))
    again = from_plain(to_stored(found), Comparison)
    assert again.warnings == found.warnings
    assert [each.severity for each in again.warnings] == sorted(each.severity for each in told)
    assert again.warnings[0].text.startswith("pace not kept: 30.0% of the programs of after")
    assert "closed: late sends" in [each.text.partition(" (")[0] for each in again.warnings]
    assert next(sections.leading(again)).startswith("Warning: pace not kept")
    assert any("(about 2.7 to 10 min on this machine" in line for line in sections.leading(again))


def test_what_was_stored_as_sentences_or_by_a_newer_version_shows_what_it_showed() -> None:
    plain = to_stored(only())
    way_out = "undecided: 8 to 31 blocks would detect a change of 1%"
    newer = {"kind": "solar_wind", "severity": 0, "speed": 400, "text": "solar wind: it blew; stay in"}
    changed = {"kind": "late_sends", "severity": 3, "seconds": 1, "text": "late sends: by a second"}
    old = from_plain(plain | {"warnings": [way_out, "noise: of old", newer, changed]}, Comparison).warnings
    assert [each.text for each in old] == [
        "undecided: 8 to 31 trials would detect a change of 1%",
        "noise: of old",
        newer["text"],
        changed["text"],
    ]
    assert [each.settles for each in old] == [True, False, False, False]
    assert [each.severity for each in old] == [Severity.UNKNOWN, Severity.UNKNOWN, 0, 3]
    assert old[2].kind == "solar_wind"
    for damaged in (1, {"kind": "late_sends"}, {"kind": "late_sends", "text": 3, "severity": 9}, None):
        with pytest.raises(ValidationError):
            from_plain(plain | {"warnings": [damaged]}, Comparison)


def test_every_kind_has_a_name_of_its_own_and_a_sentence() -> None:
    concrete = [each for each in kinds() if each.says or each.sentence is not Kind.sentence]
    assert accuracy.Cut in concrete
    tags = [each.__struct_config__.tag for each in concrete]
    assert len(tags) == len(set(tags)) > 40
    unsaid = {each.__name__ for each in kinds()} - {each.__name__ for each in concrete}
    assert unsaid == {"OfRun", "OfVerdict"}
    for each in concrete:
        for name in re.findall(r"{(\w+)", each.says):
            assert name in each.__struct_fields__, each


def values(kind: Any) -> list[Any]:
    """A few values of a field of that type, each of which may make another sentence."""
    if kind is bool:
        return [False, True]
    if get_origin(kind) is tuple:
        each = [values(one)[0] for one in get_args(kind) if one is not ...]
        return [tuple(each)]
    if isinstance(kind, UnionType):
        return [value for one in get_args(kind) for value in values(one)]
    plain = {str: "what was said", int: 3, float: 0.5, NoneType: None}
    return [plain[kind] if kind in plain else Repeat(block=2, reason="its node died")]


def of_each_field(kind: type[Any]) -> Iterator[Warning]:
    fields = {name: each for name, each in get_type_hints(kind).items() if name in kind.__struct_fields__}
    own = {name: values(each) for name, each in fields.items() if name not in Kind.__struct_fields__}
    for chosen in product(*own.values()):
        yield kind(**dict(zip(own, chosen, strict=True)))


# Their sentence is a field of theirs, and made where what they are about is known.
MADE_ELSEWHERE = {"Told", "ToldUndecided", "FloorRemark", "Contradicted", "TurnsNotBelieved", "NotLikeOurs"}
WORDS = 60


@pytest.mark.parametrize("kind", [*kinds()], ids=lambda kind: kind.__name__)
def test_a_sentence_says_what_happened_what_it_may_mean_and_what_to_try(kind: type[Any]) -> None:
    if kind.__name__ in MADE_ELSEWHERE | {"OfRun", "OfVerdict"}:
        return
    for each in of_each_field(kind):
        assert [len(part) > 10 for part in each.text.split("; ")] == [True] * 3, each.text
        assert len(each.text.split()) <= WORDS, each.text


def test_one_trial_says_what_gives_a_verdict() -> None:
    found = comparison.result(manifest(1), blocks(0.9, 1)).comparisons[0]
    assert OneTrial("--trials 6") in found.warnings
