"""The built-in engine through the whole harness, and all that a round's row holds."""

import json
from itertools import pairwise
from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.store.tables import read_block
from tests.support.clockwork import installed
from tests.support.in_process import done, ended

OVERLAP = ("--engine", "overlap", "--device", "emulated", "--trials", "1", "--max-batch-size", "4")


def test_text_tokenized_by_workers_in_a_closed_loop_and_all_that_a_round_records(tmp_path: Path) -> None:
    """One request at a time: an engine that is not woken by a finished tokenization would never serve it."""
    environment = installed(tmp_path)
    asked = ("--no-pretok", "--tokenize-workers", "2", "--prompts", "english", "--unique-prompts")
    asked += ("--arrival", "closed", "--concurrency", "1", "--num-requests", "6", "--prompt-repeats", "2")
    asked += ("--max-new-tokens", "uniform:3:12", "--goodput", "ttft:60000", "--format", "json")
    stdout = done(environment, tmp_path, "run", *OVERLAP, *asked)
    found = json.loads(stdout)["comparisons"][0]["metrics"]
    assert found["goodput_req_s"]["before"] == found["throughput_req_s"]["before"]
    assert found["tokenize_ms_p50"]["before"] > 0

    (folder,) = (tmp_path / "results").iterdir()
    design = read_manifest(folder).design
    assert design.goodput == {"ttft": 60000}
    assert design.arms[0].options.tokenize_workers == 2
    tables = read_block(folder, 0)
    requests, rounds = tables["requests"], tables["rounds"]
    assert requests["error"].eq("").all()
    assert requests.groupby("round")["prompt_tokens"].nunique().gt(1).all()
    assert requests["completion_tokens"].between(3, 12).all()
    stamps = ["scheduled_ns", "sent_ns", *api.STAMPS, "finished_ns"]
    for before, after in pairwise(stamps):
        assert (requests[before] < requests[after]).all()

    roles = ("engine", "device", "load_generator", "harness")
    for reading in ("cpu_ms", "switches_voluntary", "switches_forced"):
        assert {f"{reading}.{role}" for role in roles} <= set(rounds.columns)
    assert {"load_1m", "steal_share", "others_share", "seed", "position"} <= set(rounds.columns)
    assert (rounds["host_cpu_us_per_step"] > 0).all()
    assert (rounds["memory.device_peak"] > 0).all()
    assert (rounds["memory.pinned_peak"] > 0).all()
    assert (rounds["counter.h2d_pageable_copies"] > 0).all()


def test_a_trace_that_does_not_fit_is_refused_at_the_first_boot(tmp_path: Path) -> None:
    """The warm-up, a quarter of the requests, would fit."""
    trace = tmp_path / "trace.csv"
    rows = ["Timestamp,Request tokens,Response tokens", *["1,8,2"] * 7, "1,800,200"]
    trace.write_text("\n".join(rows))
    asked = ("--arrival", "trace", "--trace", str(trace))
    stderr = ended(installed(tmp_path), tmp_path, "run", *OVERLAP, *asked, code=2).err
    assert "up to 1000 tokens, input and output, and the context holds 512: trace_scale=0.51" in stderr
    assert "done" not in stderr
    assert not list((tmp_path / "results").iterdir())
