"""What engines/variants.toml may hold: bases, variants that build on them, and one line for what is wrong."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.plan import variants
from overlap_bench.harness.plan.variants import Variant
from tests.support.refusals import refusal

BASES = """[base]
slow = { schedule = "serial", h2d = "pageable" }
quick = { base = "slow", schedule = "overlap", gil = "default" }
"""
KNOWN = 'title = "t"\nsource = "s"\nclaim = "c"\n'


def read(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Variant]:
    file = SimpleNamespace(joinpath=lambda name: SimpleNamespace(read_text=lambda encoding: text))
    monkeypatch.setattr(variants, "files", lambda package: file)
    return variants.load_variants()


def test_both_arms_start_from_the_base_and_what_it_builds_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'{BASES}[mine]\n{KNOWN}base = "quick"\nbefore.h2d = "pinned"\nafter.gil = "fast-switch"\n'
    mine = read(monkeypatch, text)["mine"]
    assert mine.before == {"schedule": "overlap", "h2d": "pinned", "gil": "default"}
    assert mine.after == {"schedule": "overlap", "h2d": "pageable", "gil": "fast-switch"}
    assert set(mine.changes) == {"h2d", "gil"}


def test_a_claim_without_a_variant_says_what_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        f'[mine]\n{KNOWN}[unmeasured]\nyours = {{ title = "t", source = "s", claim = "c", needs = "a card" }}'
    )
    assert set(read(monkeypatch, text)) == {"mine"}
    assert {name: each.needs for name, each in variants.load_unmeasured().items()} == {"yours": "a card"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[unmeasured]\nyours = { title = "t" }', "[unmeasured]: Object missing required field `source`"),
        (
            f'[mine]\n{KNOWN}[unmeasured]\nmine = {{ title = "t", source = "s", claim = "c", needs = "n" }}',
            "[unmeasured]: 'mine' is a variant, so it can be measured",
        ),
    ],
)
def test_what_is_wrong_with_such_a_claim_is_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    read(monkeypatch, text)
    said = refusal(variants.load_unmeasured, BadFile)
    assert said.startswith(f"engines/variants.toml, {message}")
    assert "\n" not in said


def test_a_variant_needs_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = read(monkeypatch, f'[mine]\n{KNOWN}engine = "e"\nbefore = {{}}\nafter.h2d = "pinned"\n')["mine"]
    assert (mine.engine, mine.before, mine.after, mine.changes) == ("e", {}, {"h2d": "pinned"}, ["h2d"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{BASES}[mine]\n{KNOWN}base = "quik"\n', "[mine]: unknown base 'quik'; did you mean quick?"),
        (
            f'[base]\na = {{ base = "b" }}\nb = {{ base = "a" }}\n[mine]\n{KNOWN}base = "a"\n',
            "[mine]: its bases go in a circle: a -> b -> a",
        ),
        (
            f'[base]\na = {{ base = "b" }}\n[mine]\n{KNOWN}base = "a"\n',
            "[mine]: unknown base 'b'; available: a",
        ),
        ("[base]\na = { graph = 1 }\n", '[base] holds NAME = { toggle = "choice" }: Expected `str`, got'),
        ('[mine]\ntitle = "t"\n', "[mine]: it lacks source, claim"),
        (f"[mine]\n{KNOWN}befor = {{}}\n", "[mine]: Object contains unknown field `befor`"),
        ("mine = 3", "'mine' stands outside of a table [NAME]"),
        ("[mine", "can't be read: "),
    ],
)
def test_what_is_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    said = refusal(lambda: read(monkeypatch, text), BadFile)
    assert said.startswith("engines/variants.toml")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("content", [b"\xff", b"a = [", b"a = " + b"[" * 100_000, b'a = "x"'])
def test_a_file_that_can_not_be_understood_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "variants.toml").write_bytes(content)
    monkeypatch.setattr(variants, "files", lambda _: tmp_path)
    with pytest.raises(BadFile, match=r"^engines/variants\.toml"):
        variants.load_variants()
