"""What a pace says of a program's time."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import pace as paces
from overlap_bench.engines.api import BadFile, BadSetting
from overlap_bench.engines.pace import Ledger, Pace, Size, make_pace, probe, profiles, settle

MS = 1_000_000


def decode(batch: int, context: int = 0) -> Size:
    return Size("decode", batch, batch, context)


def prefill(tokens: int, batch: int = 1) -> Size:
    return Size("prefill", batch, tokens, tokens)


def test_one_time_is_every_programs() -> None:
    pace = make_pace("10ms")
    assert pace.ns(decode(1)) == pace.ns(decode(64, 512)) == pace.ns(prefill(900)) == 10 * MS
    assert (pace.name, pace.text) == ("10ms", "10ms")


@given(batch=st.integers(1, 1024), context=st.integers(1, 4096), tokens=st.integers(1, 8192))
def test_terms_add_up(batch: int, context: int, tokens: int) -> None:
    pace = make_pace("decode=10ms+0.05ms*batch + 2ns*batch*context,prefill=1.5ms+80us*tokens")
    assert pace.ns(decode(batch, context)) == 10 * MS + 50_000 * batch + 2 * batch * context
    assert pace.ns(prefill(tokens)) == 1_500_000 + 80_000 * tokens


@given(
    points=st.dictionaries(st.integers(1, 2000), st.integers(1, 10_000), min_size=1, max_size=6),
    batch=st.integers(1, 3000),
)
def test_a_table_goes_through_its_points_and_is_level_outside(points: dict[int, int], batch: int) -> None:
    rising = sorted(points.items())
    text = " ".join(f"{at}:{us}us" for at, us in rising)
    pace = make_pace(f"decode=batch[{text}],prefill=1ms")
    for at, us in rising:
        assert pace.ns(decode(at)) == us * 1000
    assert min(points.values()) * 1000 <= pace.ns(decode(batch)) <= max(points.values()) * 1000
    assert pace.ns(decode(3001)) == rising[-1][1] * 1000
    assert pace.ns(decode(0)) == rising[0][1] * 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "there is no pace 'h100': one of"),
        ("10", "needs times as 10ms"),
        ("10 ms", "needs times as 10ms"),
        ("-1ms", "there is no pace"),
        ("nanms", "there is no pace"),
        ("1e9ms", "needs times as 10ms"),
        ("61s", "60s at most"),
        ("decode=10ms", "needs decode=… and prefill=…"),
        ("decode=10ms,prefil=1ms", "needs decode=… and prefill=…"),
        ("decode=10ms,prefill=", "needs times"),
        ("decode=10ms,prefill=1ms,decode=1ms", "needs decode=… and prefill=…"),
        ("decode=10ms*tokens,prefill=1ms", "decode knows batch and context, not 'tokens'"),
        ("decode=1ms,prefill=10ms*context", "prefill knows batch and tokens, not 'context'"),
        ("decode=batch[],prefill=1ms", "needs rising points"),
        ("decode=batch[2:1ms 1:2ms],prefill=1ms", "needs rising points"),
        ("decode=batch[1:1ms 1:2ms],prefill=1ms", "needs rising points"),
        ("decode=batch[x:1ms],prefill=1ms", "needs rising points"),
        ("decode=width[1:1ms],prefill=1ms", "needs times"),
        ("decode=10ms+,prefill=1ms", "needs times"),
        ("10ms*0", "stretched 0.001 to 1000 times"),
        ("10ms*1001", "stretched 0.001 to 1000 times"),
        ("10ms*1e3", "knows batch and context, not '1e3'"),
        ("h100*2", "there is no pace 'h100': one of"),
        ("llama3-8b-h100*k", "k of the pace 'llama3-8b-h100*k' is measured before a run"),
        ("10ms,launch=5", "needs times as 10ms"),
        ("10ms,launch=5us,launch=6us", "once each"),
        ("10ms,start=5us", "has decode, prefill, name and launch, replay, copy, pin, wake, not 'start'"),
        ("10ms,name=a b", "name has letters"),
        ("none/such.toml", "none/such.toml: "),
    ],
)
def test_what_is_no_pace_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(message)) as caught:
        make_pace(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, b"\xff", b"a = ", b"a = 1", b"[a]\nsummary = 1", b"a = " + b"[" * 100_000]
)
def test_profiles_that_cannot_be_understood_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "profiles.toml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("overlap_bench.engines.pace.PROFILES", path)
    profiles.cache_clear()
    try:
        with pytest.raises(BadFile, match=r"profiles\.toml"):
            make_pace("llama3-8b-h100")
    finally:
        profiles.cache_clear()


@pytest.mark.parametrize("name", profiles())
def test_a_profile_is_a_pace_with_a_source(name: str) -> None:
    profile, pace = profiles()[name], make_pace(name)
    assert pace.name == name
    assert pace.text == profile.text
    for batch in (1, 8, 64, 1024):
        assert MS <= pace.ns(decode(batch, 512)) <= 400 * MS
    assert pace.ns(prefill(2048)) >= pace.ns(prefill(16)) > 0
    assert profile.source
    assert not {",", "="} & set(name)


def test_a_step_that_decodes_and_prefills_reads_the_weights_once() -> None:
    pace = make_pace("decode=6ms+0.1ms*batch,prefill=9ms+10us*tokens")
    assert pace.ns_of([decode(8)]) == pace.ns(decode(8))
    assert pace.ns_of([decode(8), prefill(64)]) == 9 * MS + 8 * 100_000 + 64 * 10_000
    assert pace.ns_of([]) == 0


def test_a_program_of_several_steps_takes_the_time_of_all() -> None:
    pace = make_pace("decode=6ms+0.1ms*batch,prefill=9ms")
    assert pace.ns(Size("decode", 8, 8, 0, times=4)) == 4 * pace.ns(decode(8))


@given(factor=st.decimals("0.001", "1000", places=3), batch=st.integers(1, 256))
def test_a_stretched_pace_takes_a_multiple_of_its_time_and_of_its_ledger(factor: object, batch: int) -> None:
    text = "decode=1ms+10us*batch,prefill=80us*tokens,launch=5us,replay=20us"
    plain, stretched = make_pace(text), make_pace(f"{text}*{factor}")
    by = float(str(factor))
    assert stretched.ns(decode(batch)) == pytest.approx(by * plain.ns(decode(batch)), abs=1)
    assert stretched.ns_of([decode(1), prefill(9)]) == pytest.approx(
        by * plain.ns_of([decode(1), prefill(9)]), abs=3
    )
    assert plain.ledger == Ledger(launch_ns=5000, replay_ns=20_000)
    assert stretched.ledger == plain.ledger.times(by)
    assert stretched.ledger.replay_ns == pytest.approx(by * 20_000, abs=1)
    assert make_pace(stretched.text) == stretched


@pytest.mark.parametrize(
    ("text", "name"),
    [("10ms", "10ms*2.5"), ("llama3-8b-h100", "llama3-8b-h100*2.5"), ("10ms,name=x", "x*2.5")],
)
def test_k_is_a_number_once_it_is_settled(monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> None:
    monkeypatch.setattr(paces, "_here", lambda python: 2.5 * profiles()["llama3-8b-h100"].host_ns)
    assert make_pace(settle(f"{text}*k")).name == name
    assert [settle(f"{text}*{k}").rpartition("*")[2] for k in ("k/2", "2k", "k/2.5")] == ["1.25", "5", "1"]
    for settled in (text, f"{text}*2.5"):
        assert settle(settled) == settled


@pytest.mark.parametrize("text", ["llama3-8b-h100", "decode=1ms,prefill=2ms,launch=4us,wake=10us,name=x"])
def test_a_ledger_can_count_twice_or_not_at_all(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(paces, "_here", lambda python: 2.5 * profiles()["llama3-8b-h100"].host_ns)
    plain = make_pace(text)
    for times in (0.0, 2.0, 0.5):
        other = make_pace(f"{text},ledger={times:g}")
        assert other.ledger == plain.ledger.times(times)
        assert (other.decode, other.name) == (plain.decode, f"{plain.name},ledger={times:g}")
        assert make_pace(other.text).ledger == other.ledger
    settled = make_pace(settle(f"{text},ledger=2*k"))
    assert settled.ledger == plain.ledger.times(2 * 2.5)
    assert settled.name.endswith(",ledger=2*2.5")


@pytest.mark.parametrize("text", ["10ms*k/0", "10ms*0k", "10ms*9999k", "10ms*k/99999", "*k", "k", "h100*k"])
def test_a_k_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(paces, "_here", lambda python: profiles()["llama3-8b-h100"].host_ns)
    with pytest.raises(BadSetting, match=r"stretched|there is no pace"):
        settle(text)


RECORDED = """
[my-card]
summary = "A model on a card"
decode = "batch[1:7ms 64:9ms]+1ns*batch*context"
prefill = "tokens[16:8ms 2048:70ms]"
source = "recorded"
host_ns = 1000
host = "its host"

[my-card.ledger]
launch = "3us"
replay = "15.5us"
source = "recorded"

[my-card.facts]
card = "NVIDIA H100"
"""


def test_a_recorded_file_is_a_pace_and_stands_whole_in_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "card.toml"
    path.write_text(RECORDED)
    monkeypatch.setattr(paces, "_here", lambda python: 3000.0)
    pace = make_pace(str(path))
    settled = settle(f"{path}*k")
    path.unlink()
    again = make_pace(settled)
    assert (again.name, again.stretch) == ("my-card*3", 3.0)
    assert again.ns(decode(64, 100)) == 3 * (9 * MS + 6400)
    assert again.ns(prefill(16)) == 24 * MS
    assert again.ledger == Ledger(launch_ns=9000, replay_ns=46_500) == pace.ledger.times(3)
    assert msgspec.json.decode(msgspec.json.encode(again), type=Pace) == again


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"3us"', '"3"', "needs times"),
        ("launch", "start", "a ledger knows launch, replay, copy, pin, wake, not 'start'"),
        ('host = "its host"', "", "host and host_ns go together"),
        ("host_ns = 1000", "host_ns = 0", "host_ns of 0"),
        ("host_ns = 1000", "", "host and host_ns go together"),
        ('decode = "batch', 'decade = "batch', "unknown: decade"),
        ('summary = "A model on a card"', "", "summary"),
        ("[my-card.facts]", "[another]", "card.toml"),
        ("[my-card]", "my-card", "card.toml"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(RECORDED.replace(old, new))
    with pytest.raises(BadSetting, match=r"card\.toml|needs times") as caught:
        make_pace(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_probe_takes_some_time() -> None:
    assert probe() > 0
