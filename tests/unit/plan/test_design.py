"""Designs and the settings they are made from: order, seeds, merging, and one reason for each refusal."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import SPEC as OPENAI
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.presets import TOKENIZER_FILE
from overlap_bench.engines.transformers import SPEC as TRANSFORMERS
from overlap_bench.engines.vllm import SPEC as VLLM
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan import settings
from overlap_bench.harness.plan.design import Arm, Design, check_metrics, orders, round_seed
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_arm, make_design
from overlap_bench.harness.plan.variants import Variant, load_variants
from overlap_bench.harness.workload.plan import plan
from overlap_bench.harness.workload.workload import Workload
from tests.support.made_blocks import manifest
from tests.support.refusals import refusal
from tests.support.simulated_runs import drawn

ENGINES = {"overlap": SPEC}
PLAIN = {"schedule": "serial", "launch": "inline", "d2h": "blocking", "output": "inline", "graph": "on"}
PINNED = Variant(
    name="pinned",
    title="",
    source="",
    claim="",
    before={**PLAIN, "h2d": "pageable"},
    after={**PLAIN, "h2d": "pinned"},
    workload={"num_requests": 16},
    options={"stream_interval": 4},
)


CLOSED = msgspec.structs.replace(PINNED, workload={"arrival": "closed", "concurrency": 4})
JUDGED = msgspec.structs.replace(PINNED, secondaries=["round_step_ms_same_device"])
OF_A_PHASE = msgspec.structs.replace(PINNED, phase="wait.copy_done")
VARIANTS = {
    **load_variants(),
    "pinned": PINNED,
    "closed": CLOSED,
    "judged": JUDGED,
    "of a phase": OF_A_PHASE,
}


def made(engines: Mapping[str, api.EngineSpec] = ENGINES, **asked: Any) -> Design:
    return make_design(Request(**asked), engines, VARIANTS, lambda: "emulated")


def arm(name: str = "before", **toggles: str) -> Arm:
    return Arm(name=name, engine="overlap", options=api.EngineOptions(), toggles=toggles)


# -- chance -----------------------------------------------------------------------------------------------


def after_first(lot: str, blocks: int) -> list[bool]:
    return [orders(lot, block, 2) == [1, 0] for block in range(blocks)]


@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
def test_fewer_blocks_do_not_have_one_order_throughout_either(blocks: int) -> None:
    for lot in map(str, range(200)):
        drawn = {tuple(orders(lot, block, 2, blocks)) for block in range(blocks)}
        assert drawn == {(0, 1), (1, 0)}


def test_six_blocks_have_any_orders_but_one_throughout() -> None:
    """As in the simulation of the error rates: to leave out more of them resonates with periodic noise."""
    counts = Counter(tuple(after_first(str(lot), 6)) for lot in range(6200))
    simulated = {tuple(row) for row in drawn(np.random.default_rng(1), 6200, 6).tolist()}
    assert counts.keys() == simulated
    assert len(simulated) == 2**6 - 2
    assert max(counts.values()) < 150  # 100 on average
    assert min(counts.values()) > 60


def test_round_seeds_differ() -> None:
    seeds = {
        round_seed(seed, block, index) for seed in range(3) for block in range(-1, 20) for index in (-1, 0)
    }
    assert len(seeds) == 3 * 21 * 2


# -- merging ----------------------------------------------------------------------------------------------


def test_flags_come_after_the_variant_and_an_arms_own_changes_last() -> None:
    found = made(
        variant="pinned",
        both=["graph=off", "max_context=256"],
        before=["recorder=off", "env.X=1"],
        after=["h2d=packed", "python=/x/python", "max_context=128"],
        workload={"num_requests": 3, "max_new_tokens": 7},
        options={"stream_interval": 2},
        design={"blocks": 2},
    )
    before, after = found.arms
    assert before.toggles["graph"] == after.toggles["graph"] == "off"
    assert (before.options.recorder, after.options.recorder) == (False, True)
    assert (before.env, after.env) == ({"X": "1"}, {})
    assert (before.python, after.python) == (None, "/x/python")
    assert (before.options.max_context, after.options.max_context) == (256, 128)
    assert after.toggles["h2d"] == "packed"
    assert before.options.stream_interval == 2
    assert (found.workload.num_requests, found.workload.max_new_tokens, found.blocks) == (3, 7, 2)


def test_a_temperature_tells_both_engines_to_be_ready_for_it() -> None:
    assert {arm.options.sampling for arm in made(variant="pinned").arms} == {False}
    sampled = made(variant="pinned", workload={"temperature": 1.0})
    assert {arm.options.sampling for arm in sampled.arms} == {True}


def test_k_is_measured_once_and_stands_in_the_design_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([2.0 * api.profiles()["llama3-8b-h100"].host_ns])
    monkeypatch.setattr("overlap_bench.engines.pace._here", cache(lambda python: next(measured)))
    for options, both in (({"pace": "llama3-8b-h100*k"}, []), ({}, ["pace=llama3-8b-h100*k"])):
        found = made(variant="pinned", options=options, both=both)
        assert {arm.options.pace for arm in found.arms} == {"llama3-8b-h100*2"}


def test_two_interpreters_run_beside_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = api.profiles()["llama3-8b-h100"].host_ns
    monkeypatch.setattr("overlap_bench.engines.pace._here", {"/a": 2 * host, "/b": 3 * host}.get)
    both = {"before": ["python=/a"], "after": ["python=/b"]}
    found = made(engine="overlap", options={"pace": "llama3-8b-h100*k"}, **both)
    assert [arm.options.pace for arm in found.arms] == ["llama3-8b-h100*2"] * 2


def test_a_pace_brings_what_vllm_chooses_on_a_card() -> None:
    def toggles(**changes: str) -> dict[str, str]:
        found = make_arm({"vllm": VLLM}, "before", "vllm", {}, {"enforce_eager": "on"}, changes)
        return dict(found.toggles)

    assert toggles()["enforce_eager"] == "on"
    assert toggles(pace="10ms")["enforce_eager"] == "off"
    assert toggles(pace="10ms")["chunked_prefill"] == "on"
    assert toggles(pace="10ms", chunked_prefill="off")["chunked_prefill"] == "off"
    assert make_arm({"vllm": VLLM}, "before", "vllm", {"pace": "10ms"}, {}, {}).device_holds == ""
    served = make_arm({"openai": OPENAI}, "before", "openai", {"pace": "10ms"}, {"cmd": "serve {port}"}, {})
    assert served.device_holds is None  # a pace is not recorded of a server
    with pytest.raises(api.BadSetting, match=r"engine transformers has no device with a pace"):
        make_arm({"transformers": TRANSFORMERS}, "before", "transformers", {"pace": "10ms"}, {}, {})


def test_a_pace_brings_its_device_and_its_model() -> None:
    for model, asked in (
        ("micro-gpt2", {"options": {"pace": "10ms"}}),
        ("tiny-llama", {"both": ["pace=llama3-8b-h100"], "options": {"model": "tiny-llama"}}),
    ):
        arms = made(variant="pinned", **asked).arms
        assert {(arm.options.device, arm.options.model) for arm in arms} == {("emulated", model)}


def test_an_engine_alone_is_one_arm_of_first_choices() -> None:
    (only,) = made(engine="overlap", before=["h2d=pinned"]).arms
    assert only.toggles["h2d"] == "pinned"
    assert only.toggles["schedule"] == "serial"


def test_the_default_workload_is_scaled_to_the_device() -> None:
    on = {kind: made(variant="pinned", options={"device": kind}).workload for kind in ("cuda", "emulated")}
    assert (on["cuda"].max_new_tokens, on["emulated"].max_new_tokens) == (128, 64)


def test_another_way_of_arriving_replaces_the_variants_with_all_its_options() -> None:
    def workload(**asked: Any) -> Workload:
        return made(variant="closed", workload=asked).workload

    assert workload().concurrency == 4
    assert workload(arrival="poisson", rate=5.0).concurrency is None
    with pytest.raises(api.BadSetting, match="rate applies only with"):
        workload(rate=5.0)
    with pytest.raises(api.BadSetting, match="concurrency applies only with arrival=closed"):
        workload(arrival="poisson", rate=5.0, concurrency=4)


@pytest.mark.parametrize(
    ("asked", "prompts"),
    [
        ({}, "openings"),
        ({"unique_prompts": True}, "openings"),
        ({"pretok": False}, "openings"),
        ({"arrival": "closed", "concurrency": 4}, "openings"),
        ({"input_tokens": "128"}, "english"),
        ({"input_tokens": "uniform:16:128"}, "english"),
        ({"prompts": "english"}, "english"),
        ({"prompt": "Hello"}, None),
    ],
)
def test_each_request_has_a_prompt_of_its_own_unless_one_is_named(
    asked: dict[str, Any], prompts: str | None
) -> None:
    found = made(variant="pinned", workload=asked).workload
    assert found.prompts == prompts
    requests = plan(found, 0, "" if not found.pretok else str(TOKENIZER_FILE), 512)
    assert len({str(each.prompt) for each in requests}) == (1 if prompts is None else len(requests))


def test_a_variant_with_its_sources_prompt_keeps_it() -> None:
    asked = made(variant="pinned-h2d").workload
    assert (asked.prompt, asked.prompts) == ("Hello", None)
    assert made(variant="pinned-h2d", workload={"prompts": "english"}).workload.prompts == "english"


def test_data_that_says_how_long_outputs_are_gets_no_default(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n")
    found = made(variant="pinned", workload={"arrival": "trace", "trace": str(trace)})
    assert found.workload.max_new_tokens is None
    answers = tmp_path / "sharegpt.json"
    turns = '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'
    answers.write_text('[{"conversations": ' + turns + "}]")
    asked = {"prompts": str(answers)}
    assert made(variant="pinned", workload=asked).workload.max_new_tokens is None
    assert made(variant="pinned", workload=asked | {"max_new_tokens": "9"}).workload.max_new_tokens == 9
    assert made(variant="pinned", workload=asked | {"input_tokens": "9"}).workload.max_new_tokens == 64


def test_a_round_has_no_more_requests_than_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"  # a gate counts what failed in shares of them
    trace.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n2,2,3\n3,2,3\n")
    asked = {"arrival": "trace", "trace": str(trace)}
    assert made(variant="pinned", workload=asked).workload.num_requests == 3
    assert made(variant="pinned", workload=asked | {"num_requests": 2}).workload.num_requests == 2


def test_goodput_is_part_of_the_design() -> None:
    assert settings.parse_goodput(["ttft:200", "e2el:2000", "tpot:7.5"]) == {
        "ttft": 200,
        "latency": 2000,
        "tpot": 7.5,
    }
    found = made(variant="pinned", design={"goodput": {"ttft": 200.0}, "primary": "goodput_req_s"})
    check_metrics(found)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Design).goodput == {"ttft": 200.0}


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["ttf:200"], "unknown metric of --goodput 'ttf'; did you mean ttft?"),
        (["ttft"], "--goodput needs METRIC:MS such as ttft:200, not 'ttft'"),
        (["ttft:fast"], "not 'ttft:fast'"),
        (["ttft:-1"], "--goodput ttft:-1: the milliseconds must be above 0"),
        (["ttft:nan"], "must be above 0"),
        (["latency:5", "e2el:6"], "--goodput latency is given twice"),
    ],
)
def test_objectives_that_cannot_be_are_refused(texts: list[str], reason: str) -> None:
    assert reason in refusal(lambda: settings.parse_goodput(texts))


@pytest.mark.parametrize("name", sorted(load_variants()))
def test_every_named_variant_makes_a_design(name: str) -> None:
    found = made(api.find_engines(), variant=name)
    before, after = found.arms
    each = load_variants()[name]
    for arm, own in ((before, each.before_options), (after, each.after_options)):
        assert {option: getattr(arm.options, option) for option in own} == own
    assert dict(before.toggles) == each.before  # with its base, a variant has full settings
    assert dict(after.toggles) == each.after
    assert set(each.claimed) <= set(definitions.METRICS)
    devices = {"vllm": {"cuda"}, "sglang": {"paced"}, "sglang-0.4": {"paced"}}
    assert devices.get(each.engine, {"cuda", "emulated"}) <= set(each.expect)
    check_metrics(found)


def secondaries(variant: str = "judged", **asked: Any) -> tuple[str, ...]:
    return made(variant=variant, **asked).secondaries


@pytest.mark.parametrize(
    ("asked", "judged"),
    [
        ({}, ("decode_step_ms_same_device",)),
        ({"variant": "pinned"}, ()),
        ({"against_itself": True}, ("decode_step_ms_same_device",)),
        ({"design": {"secondaries": ("latency_ms_p50",)}}, ("latency_ms_p50",)),
        ({"design": {"primary": "ttft_ms_p50"}}, ("round_step_ms_same_device",)),
        ({"design": {"primary": "round_step_ms_same_device"}}, ()),  # never twice
        ({"workload": {"max_new_tokens": 1}, "design": {"primary": "ttft_ms_p50"}}, ()),
        ({"max_regression": 0.05}, ()),  # a gate is about its own metrics
        ({"both": ["python=/an/interpreter"]}, ("decode_step_ms_same_device",)),
        # It is not about that variant any more.
        ({"both": ["stream_interval=1"]}, ()),
        ({"before": ["graph=off"]}, ()),
        ({"after": ["graph=off"]}, ()),
    ],
)
def test_a_variant_says_what_else_is_judged_unless_it_is_said_on_the_command_line(
    asked: dict[str, Any], judged: tuple[str, ...]
) -> None:
    assert secondaries(**asked) == judged


def test_the_phase_that_a_variant_is_about_is_judged_too_by_turns_where_there_are_any() -> None:
    def judged(**asked: Any) -> tuple[str, ...]:
        return secondaries("of a phase", **asked)

    assert judged() == judged(both=["stream_interval=1"]) == ("decode_phase_wait_copy_done_us",)
    assert judged(design={"primary": "ttft_ms_p50"}) == ("phase_wait_copy_done_us",)
    assert judged(after=["graph=off"]) == ()  # it is not about that variant any more
    assert judged(max_regression=0.02) == ()


def test_a_claim_about_rare_stalls_is_judged_by_the_plain_mean_where_turns_are_taken() -> None:
    def primary(**asked: Any) -> str:
        return made(variant="gc-freeze", **asked).primary

    assert primary() == definitions.SLICED_MEAN
    assert primary(design={"segments": 0}) == "tpot_ms_p50"
    assert primary(options={"recorder": False}) == "tpot_ms_p50"
    assert primary(design={"primary": definitions.SLICED}) == definitions.SLICED
    assert primary(after=("gc=default",), before=("gc=frozen",)) == definitions.SLICED


@pytest.mark.parametrize(
    ("toggle", "choices"), [("steps", ("1", "8")), ("chunk", ("off", "on")), ("spec", ("off", "ngram"))]
)
def test_arms_whose_steps_compute_other_tokens_are_decided_by_what_requests_see(
    toggle: str, choices: tuple[str, str]
) -> None:
    before, after = ([f"{toggle}={choice}"] for choice in choices)
    common: dict[str, Any] = {"engine": "overlap", "before": before, "after": after}
    found = made(**common)
    assert found.segments == 0
    assert found.primary not in definitions.OF_PAIRS
    alike = made(engine="overlap", before=before, after=[*before, "h2d=packed"])
    assert alike.primary in definitions.OF_PAIRS
    with pytest.raises(api.BadSetting, match=f"arms that differ in {toggle} have none"):
        made(**common, design={"segments": 2})


MINUTES = {"max_minutes": 3.0}
PACED = {"pace": "10ms"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # Of which nothing is asked, its first boots size it.
        ({}, {"segments": 16, "aim_s": settings.AIM_S}),
        *(({"design": {each: 4}}, {each: 4, "aim_s": None}) for each in ("blocks", "rounds", "segments")),
        ({"options": {"device": "cuda"}}, {"aim_s": None}),
        ({"until_decided": True}, {"aim_s": None}),
        ({"options": PACED}, {"segments": 5, "rounds": 2}),
        ({"design": {"primary": "tpot_ms_p50"}}, {"rounds": 10}),
        ({"design": {"primary": "tpot_ms_p50"}, "options": PACED}, {"rounds": 4}),
        # With minutes it has no number of trials of its own, and more and shorter ones.
        ({"design": MINUTES}, {"blocks": settings.MOST_IN_TIME, "fewest": 3, "aim_s": None}),
        ({"design": MINUTES}, {"segments": 3, "rounds": 1}),
        ({"design": MINUTES, "options": PACED}, {"segments": 3, "rounds": 1}),
        ({"design": {**MINUTES, "blocks": 4}}, {"blocks": 4}),
        ({"design": {**MINUTES, "segments": 4, "rounds": 5}}, {"segments": 4, "rounds": 5}),
        # A gate stops once it is clear, unless it is told how many trials; with minutes it is as without, for
        # it may have the plan of one.
        ({"max_regression": 0.02}, {"fewest": 3, "segments": 8, "aim_s": None}),
        ({"max_regression": 0.02, "design": MINUTES}, {"segments": 8, "rounds": 3}),
        ({"max_regression": 0.01}, {"segments": 8}),
        ({"max_regression": 0.01, "options": PACED}, {"segments": 5}),
        ({"max_regression": 0.02, "design": {"blocks": 6}}, {"until": None}),
    ],
)
def test_how_long_a_run_is(asked: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    found = made(variant="pinned", **asked)
    assert {name: getattr(found, name) for name in expected} == expected


def test_only_host_changes_in_serial_loops_are_judged_at_equal_device_times() -> None:
    on_the_device = {"graph", "tables"}
    for each in load_variants().values():
        if "round_step_ms_same_device" in each.secondaries:
            assert not on_the_device & set(each.changes), each.name
            assert (each.before["schedule"], each.after["schedule"]) == ("serial", "serial"), each.name
    assert load_variants()["pinned-h2d"].secondaries == ["round_step_ms_same_device"]


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"variant": "pinned", "engine": "overlap"}, "not both"),
        ({"variant": "pinned", "refs": (None, None)}, "a variant has two settings: with --base-ref"),
        ({"variant": "pinned", "after": ["h2d"]}, "--after needs key=value, not 'h2d'"),
        ({"variant": "pinned", "after": ["h2d=pinned", "h2d=packed"]}, "--after h2d is given twice"),
        ({"variant": "pinned", "both": ["recorder=maybe"]}, "recorder=maybe"),
        ({"variant": "pinned", "both": ["max_context=many"]}, "max_context=many"),
        ({"variant": "pinned", "both": ["block_size=0"]}, "block_size must be at least 1, not 0"),
        ({"variant": "pinned", "both": ["num_blocks=0"]}, "num_blocks must be at least 2, not 0"),
        ({"variant": "pinned", "both": ["max_context=-5"]}, "max_context must be at least 2, not -5"),
        (
            {"variant": "pinned", "after": ["model=bert"]},
            "echo-gpt2, tiny-gpt2, tiny-gpt2-32, tiny-llama, gpt2, llama-1b (one of the hub is OWNER/NAME",
        ),
        ({"variant": "pinned", "options": {"pace": "h100"}}, "there is no pace 'h100': one of sglang-"),
        ({"variant": "pinned", "options": {"pace": "1ms", "device": "cuda"}}, "a card has its own"),
        ({"variant": "pinned", "after": ["pace=1ms"]}, "all arms need the same pace"),
        (
            {"variant": "pinned", "options": {"tokenize_workers": -1}},
            "tokenize_workers must be at least 0, not -1",
        ),
        (
            {"variant": "pinned", "design": {"blocks": 10**9}},
            "--trials must be at most 10,000, not 1000",
        ),
        ({"variant": "pinned", "design": {"rounds": 10**9}}, "--rounds must be at most 10,000"),
        (
            {"variant": "pinned", "workload": {"num_requests": 10**10}},
            "must be at most 1,000,000",
        ),
        (
            {"variant": "pinned", "workload": {"arrival": "poisson", "rate": 1e-300}},
            "requests, one every 1e+300 s, are not all due within a day",
        ),
        (
            {"variant": "pinned", "workload": {"arrival": "poisson", "rate": 9, "ramp_up": "1e-9"}},
            "are not all due within a day",
        ),
        ({"variant": "pinned", "workload": {"interval_ms": 1e9}}, "are not all due within a day"),
        ({"variant": "pinned", "workload": {"prompts": "/dev/zero"}}, "/dev/zero is a device"),
        (
            {"variant": "pinned", "workload": {"arrival": "trace", "trace": "/dev/zero"}},
            "/dev/zero is a device",
        ),
        ({"variant": "pinned", "both": ["env.=x"]}, "env.NAME needs the name of a variable"),
        ({"variant": "pinned", "design": {"margin": 1.5}}, "--margin must be above 0% and below 100%"),
        ({"variant": "pinned", "design": {"secondaries": tuple("abcdef")}}, "at most 5 --secondary"),
        ({"variant": "pinned", "design": {"secondaries": ("decode_step_ms",)}}, "named twice"),
    ],
)
def test_what_cannot_be_run_is_refused_with_one_reason(asked: Mapping[str, Any], reason: str) -> None:
    assert reason in refusal(lambda: made(**asked))


def test_a_model_of_the_hub_a_folder_and_what_a_server_calls_its_own_are_not_taken_for_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for model in ("Qwen/Qwen3-0.6B", "mine", "./mine", "/on/another/machine", str(tmp_path)):
        assert made(variant="pinned", options={"model": model}).arms[0].options.model == model
    asked = {"engine": "openai", "options": {"model": "gpt-9"}, "before": ["url=http://127.0.0.1:1"]}
    assert made(api.find_engines(), **asked).arms[0].options.model == "gpt-9"


def test_two_servers_of_our_own_take_turns_of_eight_steps_and_those_at_addresses_none() -> None:
    def planned(*arms: str, **design: Any) -> Design:
        engines = {"openai": OPENAI}
        return made(engines, engine="openai", before=[arms[0]], after=[arms[1]], design=design)

    own = planned("cmd=serve {port}", "cmd=serve --fast {port}")
    assert (own.primary, own.turn_steps, own.turn_lead) == ("decode_step_ms", 8, 2)
    assert own.segments > 0
    timed = planned("cmd=serve {port}", "cmd=serve --fast {port}", max_minutes=3.0)
    assert (own.segments, timed.segments, timed.rounds) == (16, 8, 1)  # their boots take long
    away = ("url=http://127.0.0.1:1", "url=http://127.0.0.1:2")
    assert planned(*away).segments == 0
    with pytest.raises(api.BadSetting, match="a server at an address does not"):
        planned(*away, segments=4)


def test_outputs_without_two_turns_are_compared_by_rounds() -> None:
    def planned(tokens: str, **design: Any) -> Design:
        return made(variant="pinned", workload={"max_new_tokens": tokens}, design=design)

    assert planned("8").segments > 0
    assert planned("7").segments == 0
    with pytest.raises(api.BadSetting, match="turns of 4 steps, and outputs of 7 tokens are too short"):
        planned("7", segments=4)


def test_metrics_of_steps_need_their_records() -> None:
    base = made(variant="pinned", after=["recorder=off"])
    check_metrics(base)
    for name in definitions.MATCHED:
        with pytest.raises(api.BadSetting, match=f"{name} is made from step records, and after has recorder"):
            check_metrics(msgspec.structs.replace(base, primary=name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"primary": "tpot_p50"}, "unknown metric 'tpot_p50'; did you mean tpot_ms_p50?"),
        ({"primary": "submit_lag_ms_p99"}, "can be zero"),
        ({"secondaries": ("peak_concurrency",)}, "neither lower nor higher is better"),
        ({"workload": Workload(max_new_tokens=1)}, "needs at least 2 output tokens"),
        (
            {"workload": Workload(max_new_tokens=1), "primary": "round_step_ms_same_device"},
            "needs at least 2 output tokens",
        ),
        (
            {"secondaries": (definitions.SLICED,)},
            "decode_step_ms is measured in turns, and this run takes none",
        ),
        ({"primary": "goodput_req_s"}, "goodput_req_s needs to know what is good: give --goodput"),
        ({"primary": "round_step_ms_same_device", "plant": 0.03}, "takes the device as equal in both arms"),
        ({"primary": definitions.SLICED_SAME_DEVICE, "plant": 0.03}, "takes the device as equal"),
        (
            {"primary": "round_step_ms_same_host", "plant": 0.03, "plant_at": "host"},
            "takes the host as equal in both arms",
        ),
    ],
)
def test_metrics_that_cannot_decide_are_refused(changes: Mapping[str, Any], reason: str) -> None:
    base = Design(name="x", arms=(arm(h2d="pageable"), arm("after", h2d="pinned")), workload=Workload())
    assert reason in refusal(lambda: check_metrics(msgspec.structs.replace(base, **changes)))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (VLLM, "its device time also holds the model runner's preparation of inputs"),
        (OPENAI, "it records none"),
        (TRANSFORMERS, "it records none"),
    ],
)
def test_no_part_of_a_step_is_the_hosts_where_device_times_hold_host_work(
    spec: api.EngineSpec, why: str
) -> None:
    server = {"url": "http://127.0.0.1:1"} if spec is OPENAI else {}
    arms = tuple(
        settings.make_arm({spec.name: spec}, name, spec.name, {}, {}, {**server, "env.X": name})
        for name in ("before", "after")
    )
    base = Design(name="x", arms=arms, workload=Workload(), segments=8)
    for name, whole in definitions.SPLIT.items():
        for declared in ({"primary": name}, {"secondaries": (name,)}):
            with pytest.raises(api.BadSetting, match=f"{name} takes .* {whole} is the whole step") as refused:
                check_metrics(msgspec.structs.replace(base, **declared))
            assert f"with engine {spec.name} {why}" in str(refused.value)
        check_metrics(msgspec.structs.replace(base, secondaries=(whole,)))


@pytest.mark.parametrize(("device", "splits"), [("cuda", False), ("emulated", True)])
def test_on_a_card_kernels_that_the_host_launches_one_by_one_hold_its_gaps(device: str, splits: bool) -> None:
    def of(variant: str) -> Design:
        return make_design(Request(variant=variant), ENGINES, VARIANTS, lambda: device)

    found = of("cuda-graph")
    assert [bool(arm.device_holds) for arm in found.arms] == [not splits, False]
    assert found.splits_steps == splits
    assert of("pinned-h2d").splits_steps


def test_fractions() -> None:
    assert [settings.parse_fraction(text, "--margin") for text in ("1%", "0.5%", "0.02")] == [
        0.01,
        0.005,
        0.02,
    ]
    with pytest.raises(api.BadSetting, match="--margin needs a share such as 1%"):
        settings.parse_fraction("much", "--margin")


def test_a_closed_loop_has_as_many_in_flight_as_it_says() -> None:
    def asked(**workload: Any) -> Workload:
        return made(variant="pinned", workload={"arrival": "closed", **workload}).workload

    assert asked(concurrency=500).num_requests == 1000
    assert asked(concurrency=2, num_requests=2).num_requests == 2
    with pytest.raises(api.BadSetting, match="num_requests=4 leaves some of 8 places empty"):
        asked(concurrency=8, num_requests=4)


def test_a_trace_takes_the_place_of_what_a_variant_says_of_each_request(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {at}, "input_length": 9, "output_length": 9, "hash_ids": [1]}}\n'
            for at in (0, 5)
        )
    )
    variants = load_variants()
    for name in ("dirty-rows", "gc-freeze"):
        asked = Request(variant=name, workload={"arrival": "trace", "trace": str(trace), "num_requests": 2})
        design = settings.make_design(asked, api.find_engines(), variants, lambda: "emulated")
        assert design.workload.input_tokens is None


def test_a_delay_belongs_to_its_arm_whichever_way_a_run_is_looked_at() -> None:
    plan = manifest(against_itself=True, plant=0.03)
    plan = msgspec.structs.replace(plan, plant_ns=900)
    for pair in (("before", "after"), ("after", "before")):
        arms = plan.pair(*pair).design.arms_with_plant(900)
        assert {arm.name: arm.options.plant_ns for arm in arms} == {"before": 0, "after": 900}


def test_k_is_measured_by_the_interpreter_in_a_servers_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def settle(pace: str, python: str | None) -> str:
        asked.append(python)
        return "10ms"

    monkeypatch.setattr(settings.api, "settle", settle)
    for command, python in (("A=1 /v/bin/python -m vllm", "/v/bin/python"), ("/v/bin/vllm serve m", None)):
        cmd = f"cmd={command} --port {{port}}"
        sides = {"before": (cmd,), "after": (cmd, "env.X=1")}
        request = Request(engine="openai", options={"pace": "llama3-8b-h100*k"}, **sides)
        make_design(request, {"openai": OPENAI}, {}, lambda: "emulated")
        assert asked == [python, python]
        asked.clear()
