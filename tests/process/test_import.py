"""`bench import`: what other tools' files say is what the run says, what they lack is named, and nothing is
decided by it."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.analysis import across_runs, words
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.report import html as report
from overlap_bench.harness.report import tables
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.tables import read_block, table_path
from overlap_bench.harness.studies.imports import files
from overlap_bench.harness.studies.imports import run as importing
from tests.support.in_process import bench, complaint
from tests.support.made_blocks import warned
from tests.support.places import FIXTURES, REFERENCE

# Made by the tools' own code against a server of known timing: tests/fixtures/imports/README.md.
FIXTURES = FIXTURES / "imports"
VLLM, VLLM_DETAILED = FIXTURES / "vllm.json", FIXTURES / "vllm-detailed.json"
SGLANG, SGLANG_DETAILED = FIXTURES / "sglang.jsonl", FIXTURES / "sglang-detailed.jsonl"
SGLANG_OAI = FIXTURES / "sglang-oai-detailed.jsonl"
GUIDELLM = FIXTURES / "guidellm.json"
AIPERF, AIPERF_RECORDS = FIXTURES / "profile_export_aiperf.json", FIXTURES / "profile_export.jsonl"
EVERY = (VLLM, VLLM_DETAILED, f"{SGLANG}:1", SGLANG_DETAILED, SGLANG_OAI, GUIDELLM, AIPERF, AIPERF_RECORDS)
STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def bring(*names: object, to: Path, **more: Any) -> tuple[Path, Result]:
    asked = {"name": None, "engine": None, "fresh_boots": False, "goodput": {}, **more}
    return importing.bring([str(name) for name in names], to, **asked)


def values(result: Result) -> dict[str, float]:
    rows = result.comparisons[0].metrics
    return {name: row.before for name, row in rows.items() if row.before is not None}


def had(*names: object, to: Path, **more: Any) -> tuple[dict[str, float], str]:
    """The values of what was imported, and what is said beside them."""
    _, result = bring(*names, to=to, **more)
    return values(result), "\n".join(warned(result.comparisons[0]))


def document(path: Path, line: int = 0) -> dict[str, Any]:
    text = path.read_text()
    return dict(json.loads(text.splitlines()[line] if path.suffix == ".jsonl" else text))


def edited(folder: Path, path: Path, **values: object) -> Path:
    """The file's first result with other values; None takes a key away."""
    said = {name: value for name, value in (document(path) | values).items() if value is not None}
    new = folder / f"edited-{len(list(folder.iterdir()))}.json"
    new.write_text(json.dumps(said))
    return new


# -- the numbers are the tools' own -----------------------------------------------------------------------

ALL = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_chunk_ms", "e2el": "latency_ms"}
NAMES = {**ALL, "e2e_latency": "latency_ms"}
RATES = {
    "request_throughput": "throughput_req_s",
    "output_throughput": "throughput_tok_s",
    "total_token_throughput": "throughput_total_tok_s",
    "total_throughput": "throughput_total_tok_s",
}


@pytest.mark.parametrize(
    ("path", "line", "but"),
    [
        (VLLM, 0, ()),
        (VLLM_DETAILED, 0, ()),
        (SGLANG, 1, ("itl",)),  # its own endpoint, whose gaps it shares among tokens
        (SGLANG, 2, ()),  # OpenAI's
        (SGLANG_DETAILED, 0, ("itl", "tpot")),
        (SGLANG_OAI, 0, ("tpot", "e2e_latency")),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_what_a_tool_said_is_what_the_run_says(
    tmp_path: Path, path: Path, line: int, but: tuple[str, ...]
) -> None:
    """Every statistic that it printed, by its own names and by ours."""
    found, said = had(f"{path}:{line}" if line else path, to=tmp_path)
    told = document(path, max(0, line - 1))
    keys = {f"{each}_{name}_ms": f"{ours}_{STATISTICS[each]}" for each in STATISTICS
            for name, ours in NAMES.items() if name not in but}  # fmt: skip
    shared = {ours: theirs for theirs, ours in (keys | RATES).items() if told.get(theirs) is not None}
    assert {ours: found[ours] for ours in shared} == pytest.approx(
        {ours: told[theirs] for ours, theirs in shared.items()}, rel=1e-5
    )
    assert len(shared) > 6
    assert ("itl_chunk_ms_p50" not in found) == ("shared among the tokens" in said) == (line == 1)


def test_vllm_counts_those_that_failed_and_those_in_flight(tmp_path: Path) -> None:
    told = document(VLLM_DETAILED)
    (aggregates, _), (found, _) = (had(each, to=tmp_path) for each in (VLLM, VLLM_DETAILED))
    assert aggregates["failed_requests"] == document(VLLM)["failed"] > 0
    assert found["failed_requests"] == told["failed"] > 0
    assert "peak_concurrency" not in found, "when those that failed ended is not known"
    served = [number for number, error in enumerate(told["errors"]) if not error]
    lists = {name: value for name, value in told.items() if isinstance(value, list)}
    sound = {name: [value[number] for number in served] for name, value in lists.items()}
    found, _ = had(edited(tmp_path, VLLM_DETAILED, failed=0, **sound), to=tmp_path / "sound")
    # It counts whoever was in flight at any time within the same second.
    assert 1 < found["peak_concurrency"] <= told["max_concurrent_requests"]
    # As older versions save it.
    older, said = had(edited(tmp_path, VLLM_DETAILED, start_times=None), to=tmp_path / "older")
    assert not {"peak_concurrency"} & {*aggregates, *older}
    assert older["ttft_ms_mean"] == pytest.approx(told["mean_ttft_ms"], rel=1e-5)
    assert "when each request was sent" in said


def with_goodput(folder: Path, path: Path, goodput: object) -> Path:
    """The file as the tool saves it with `--goodput`."""
    return edited(folder, path, **{"goodput" if path == AIPERF else "request_goodput": goodput})


@pytest.mark.parametrize(
    ("path", "goodput"), [(VLLM, 3.5), (VLLM_DETAILED, 0.0), (AIPERF, {"unit": "requests/sec", "avg": 9.1})]
)
def test_a_tools_own_goodput_is_kept_and_its_limits_are_said_to_be_unknown(
    tmp_path: Path, path: Path, goodput: object
) -> None:
    found, said = had(with_goodput(tmp_path, path, goodput), to=tmp_path)
    assert found["goodput_req_s"] == (goodput["avg"] if isinstance(goodput, dict) else goodput)
    assert "the limits that its goodput was counted by" in said
    assert "goodput_req_s" not in had(path, to=tmp_path)[0]


def test_goodput_is_counted_by_given_limits_where_a_file_has_its_requests(tmp_path: Path) -> None:
    said = document(VLLM_DETAILED)
    served = sorted(ttft for ttft, error in zip(said["ttfts"], said["errors"], strict=True) if not error)
    limits = {"ttft": 1e3 * (served[4] + served[5]) / 2, "tpot": 1e3}  # five are good
    folder, result = bring(with_goodput(tmp_path, VLLM_DETAILED, 99.0), to=tmp_path, goodput=limits)
    assert values(result)["goodput_req_s"] == pytest.approx(5 / said["duration"])
    assert "its goodput was counted by" not in "\n".join(warned(result.comparisons[0]))
    assert overlap_bench.load(folder).manifest.design.goodput == limits
    asked = ("import", str(VLLM), "--goodput", "ttft:20", "--out", str(tmp_path))
    assert "does not say its requests one by one: leave --goodput out" in bench(*asked, code=2).err


def test_sglangs_chunks_are_had_back_from_the_gaps_that_it_shared(tmp_path: Path) -> None:
    folder, result = bring(SGLANG_DETAILED, to=tmp_path)
    found, said = values(result), document(SGLANG_DETAILED)
    served = overlap_bench.load(folder).requests.query("error == ''")
    assert {tuple(each) for each in served["chunk_tokens"]} == {(3, 3, 3, 3)}  # as the server sent them
    itls = [gap for gaps in said["itls"] for gap in gaps]
    assert found["itl_chunk_ms_mean"] == pytest.approx(3e3 * np.mean(itls), rel=1e-5)
    # Its TPOT goes on to [DONE]; ours ends with the last chunk.
    assert 0.8 * said["mean_tpot_ms"] < found["tpot_ms_mean"] < said["mean_tpot_ms"]
    assert "peak_concurrency" not in found


def test_sglang_without_a_stream_has_no_ttft(tmp_path: Path) -> None:
    whole = {"mean_itl_ms": 0.0, "mean_ttft_ms": document(SGLANG)["mean_e2e_latency_ms"]}
    _, result = bring(edited(tmp_path, SGLANG, **whole), to=tmp_path / "out")
    assert not any(name.startswith(("ttft", "tpot", "itl")) for name in values(result))
    assert result.comparisons[0].primary == "latency_ms_p50"
    assert "failed_requests" not in values(result)
    detailed = {**whole, "mean_ttft_ms": document(SGLANG_DETAILED)["mean_e2e_latency_ms"]}
    found, _ = had(edited(tmp_path, SGLANG_DETAILED, **detailed), to=tmp_path / "out")
    assert found["failed_requests"] == 2
    aggregates, said = had(f"{SGLANG}:1", to=tmp_path / "out")
    assert "failed_requests" not in aggregates
    assert "no failures" in said


def test_guidellm_says_what_it_said(tmp_path: Path) -> None:
    (told,) = document(GUIDELLM)["benchmarks"]
    found, _ = had(GUIDELLM, to=tmp_path)
    requests, said = told["requests"]["successful"], told["metrics"]
    timings = [each["info"]["timings"] for each in requests]
    lasted = max(each["request_end"] for each in timings) - min(each["request_start"] for each in timings)
    lags = [each["request_start"] - each["targeted_start"] for each in timings]
    expected = {
        "ttft_ms_mean": said["time_to_first_token_ms"]["successful"]["mean"],
        "latency_ms_mean": 1e3 * said["request_latency"]["successful"]["mean"],
        "tpot_ms_mean": np.mean([each["inter_token_latency_ms"] for each in requests]),  # not by tokens
        "throughput_req_s": len(requests) / lasted,
        "submit_lag_ms_p50": 1e3 * np.median(lags),
        "failed_requests": len(told["requests"]["errored"]),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert min(found["ttft_ms_p50"], found["tpot_ms_p50"], found["latency_ms_p50"]) > 0
    assert not any(name.startswith("itl") for name in found)  # it tells no chunk between first and last
    # Of a reply of two chunks it does: but a mean over such alone would stand for all.
    requests[0]["info"]["timings"]["token_iterations"] = 2
    short = tmp_path / "two-chunks.json"
    whole = document(GUIDELLM)
    whole["benchmarks"][0]["requests"]["successful"] = requests
    short.write_text(json.dumps(whole))
    assert not any(name.startswith("itl") for name in had(short, to=tmp_path / "short")[0])


def test_aiperfs_aggregates_and_its_requests_agree(tmp_path: Path) -> None:
    (aggregates, _), (requests, _) = (had(each, to=tmp_path) for each in (AIPERF, AIPERF_RECORDS))
    for name in ("ttft_ms", "itl_chunk_ms", "latency_ms", "tpot_ms"):
        for key in (f"{name}_{statistic}" for statistic in ("mean", "p50", "p90", "p99")):
            # Percentiles of few values depend on how one lies between two of them.
            assert requests[key] == pytest.approx(aggregates[key], rel=0.05), key
    for name in ("throughput_req_s", "throughput_tok_s"):
        # Its own rates divide by start_time to end_time, which begins before the first send.
        assert aggregates[name] < requests[name] == pytest.approx(aggregates[name], rel=0.02), name
    assert aggregates["ttft_ms_p50"] == pytest.approx(document(AIPERF)["time_to_first_token"]["p50"])
    assert requests["failed_requests"] == aggregates["failed_requests"] > 0


def test_aiperfs_model_and_load_are_what_it_says_they_are() -> None:
    read = files.read(str(AIPERF))
    assert (read.model, read.version) == ("m", "0.13.0")
    assert (read.asked["phases.concurrency"], read.asked["datasets.prompts.osl.mean"]) == ("3", "12.0")
    assert any("start_time to end_time" in line for line in read.differs)


# -- it is a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY, ids=lambda name: Path(str(name)).name)
def test_every_file_becomes_a_run_that_is_loaded_reported_and_compared(tmp_path: Path, name: object) -> None:
    folder, result = bring(name, to=tmp_path, engine="some-engine")
    other, _ = bring(name, to=tmp_path, engine="another")
    run = overlap_bench.load(folder)
    assert run.result == result
    html, text = report.to_html(run), report.to_markdown(run)
    for lack in run.manifest.imported.lacks:
        assert lack.split(":")[0] in text
    assert "first boots are discarded" not in html
    assert "max_batch_size" not in text  # an option that nobody knows of
    (comparison,) = across_runs.compare([str(folder), str(other)]).result.comparisons
    row = comparison.metrics[comparison.primary]
    assert (row.change, row.ci_low, row.verdict) == (pytest.approx(0, abs=1e-9), None, None)
    assert {each.verdict for each in comparison.metrics.values()} == {None}
    assert comparison.outputs.compared == 0
    said = "\n".join(warned(comparison))
    assert said.count("one file of one server process") == 2
    assert "no verdict: the arms were not interleaved" in words.conclusion("remote", comparison)
    assert "before: engine=some-engine; after: engine=another" in tables.changed_settings(
        comparison.before, comparison.after
    )


def test_files_of_fresh_boots_are_blocks_and_still_decide_nothing(tmp_path: Path) -> None:
    with pytest.raises(api.BadSetting, match=r"2 files are trials of one arm only.*--fresh-boots"):
        bring(VLLM_DETAILED, VLLM_DETAILED, to=tmp_path)
    folder, result = bring(VLLM_DETAILED, VLLM_DETAILED, to=tmp_path, fresh_boots=True)
    assert result.comparisons[0].blocks == 2
    (comparison,) = across_runs.compare(
        [str(folder), str(bring(VLLM_DETAILED, VLLM_DETAILED, to=tmp_path, fresh_boots=True)[0])]
    ).result.comparisons
    assert {each.verdict for each in comparison.metrics.values()} == {None}
    assert "if not, import them again without --fresh-boots" in "\n".join(warned(comparison))
    with pytest.raises(api.BadSetting, match="not trials of one arm: their workloads differ: request_rate"):
        bring(VLLM_DETAILED, VLLM, to=tmp_path, fresh_boots=True)
    with pytest.raises(api.BadSetting, match="not trials of one arm: their tools differ"):
        bring(VLLM, GUIDELLM, to=tmp_path, fresh_boots=True)
    newer = edited(tmp_path, SGLANG, server_info={**document(SGLANG)["server_info"], "version": "0.5.24"})
    with pytest.raises(
        api.BadSetting, match=r"their versions differ: was 'server 0\.5\.23', is 'server 0\.5\.24'"
    ):
        bring(f"{SGLANG}:1", newer, to=tmp_path, fresh_boots=True)


def test_runs_of_two_tools_are_compared_with_a_warning(tmp_path: Path) -> None:
    first, _ = bring(AIPERF_RECORDS, to=tmp_path)
    second, _ = bring(SGLANG_DETAILED, to=tmp_path)
    (comparison,) = across_runs.compare([str(first), str(second)]).result.comparisons
    said = "\n".join(warned(comparison))
    assert "measured by aiperf and sglang.bench_serving" in said
    assert comparison.metrics["ttft_ms_p50"].change is not None
    with pytest.raises(api.BadSetting, match="their workload differs: request_rate"):
        across_runs.compare([str(bring(each, to=tmp_path)[0]) for each in (VLLM, VLLM_DETAILED)])


def test_an_imported_run_is_neither_compared_with_one_of_another_device_nor_measured_again(
    tmp_path: Path,
) -> None:
    folder, _ = bring(VLLM, to=tmp_path)
    with pytest.raises(api.BadSetting, match="their device differs"):
        across_runs.compare([str(folder), f"{REFERENCE}/runs/pinned-h2d:after"])
    assert "is imported from vllm bench serve: only that can meas" in bench("rerun", str(folder), code=2).err


def test_requests_of_a_measured_run_that_were_taken_out_are_still_missed(tmp_path: Path) -> None:
    """Only a run whose file held aggregates may have none."""
    folder, _ = bring(VLLM_DETAILED, to=tmp_path)
    read_block(folder, 0)["requests"].iloc[:0].to_parquet(table_path(folder, 0, "requests"))
    with pytest.raises(StoreError, match="it has no row of before"):
        overlap_bench.load(folder)


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello", "is not JSON at line 1"),
        ("\x80binary", "is not JSON"),
        ("[1, 2]", "is not a result of vllm bench serve, sglang.bench_serving, guidellm, aiperf"),
        ("{}", "is not a result of"),
        ('{"a": 1}', "is not a result of"),
        ('{"a": 1}', 'it has ["a"]'),
        (
            '{"metadata": {"request_start_ns": "?"}, "metrics": {}}',
            "not a result of aiperf, record 1, in a known",
        ),
        ('{"metadata": {"guidellm_version": "1"}, "benchmarks": []}', "holds no result"),
        ('{"benchmarks": [{"requests": {"successful": []}}]}', "not a result of guidellm in a known form"),
        ('{"benchmarks": [{}], "machine_info": {}}', "it looks like one of pytest-benchmark"),
        ('{"avg_latency": 1, "latencies": [], "percentiles": {}}', "it looks like one of vllm bench latency"),
    ],
)
def test_what_is_no_result_is_one_line(monkeypatch, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert message in complaint("import", str(path))
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "path", [VLLM_DETAILED, SGLANG_DETAILED, GUIDELLM, AIPERF], ids=lambda path: path.name
)
def test_a_file_that_is_cut_short_says_so(tmp_path: Path, path: Path) -> None:
    cut = tmp_path / path.name
    text = path.read_text()
    cut.write_text(text[: len(text) // 2])
    with pytest.raises(api.BadSetting, match=r"is cut short|is not JSON"):
        files.read(str(cut))


def first(path: Path, key: str, value: object) -> dict[str, object]:
    """The list of that name, with another first value."""
    return {key: [value, *document(path)[key][1:]]}


def sampled() -> dict[str, object]:
    """guidellm's benchmarks, of which one request that succeeded is left out."""
    benchmarks = document(GUIDELLM)["benchmarks"]
    benchmarks[0]["requests"]["successful"].pop()
    return {"benchmarks": benchmarks}


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (VLLM, {"duration": None}, "duration|is not a result of"),
        (SGLANG, {"mean_ttft_ms": None}, "mean_ttft_ms|is not a result of"),
        (GUIDELLM, {"benchmarks": None}, "benchmarks|is not a result of"),
        (AIPERF, {"request_latency": None}, "request_latency|is not a result of"),
        (VLLM, {"duration": "long"}, r"Expected `float`, got `str` - at `\$\.duration`"),
        (VLLM_DETAILED, {"ttfts": [0.1]}, "its lists of requests differ in length"),
        (VLLM_DETAILED, {"itls": [[0.1]]}, "its lists of requests differ in length"),
        (VLLM_DETAILED, first(VLLM_DETAILED, "ttfts", float("nan")), "request 0 took nan s"),
        (VLLM_DETAILED, first(VLLM_DETAILED, "ttfts", -0.011), r"request 0 took -0\.011 s"),
        (VLLM_DETAILED, first(VLLM_DETAILED, "itls", [0.01, float("inf")]), "request 0 took inf s"),
        (VLLM_DETAILED, {"duration": 0.0}, r"Expected `float` > 0\.0 - at `\$\.duration`"),
        (VLLM_DETAILED, first(VLLM_DETAILED, "input_lens", 1 << 63), "a count or a time does not fit"),
        (GUIDELLM, sampled(), "kept only a sample"),
    ],
)
def test_a_file_whose_values_cannot_be_is_refused_by_name(
    tmp_path: Path, path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(api.BadSetting, match=message):
        bring(edited(tmp_path, path, **values), to=tmp_path / "out")


@pytest.mark.parametrize("digits", ["1" * 20, "1" * 400, "1" * 5000])
@pytest.mark.parametrize(("path", "key"), [(VLLM, "duration"), (SGLANG, "mean_ttft_ms"), (VLLM, "completed")])
def test_a_number_of_any_length_is_refused_or_read(tmp_path: Path, path: Path, key: str, digits: str) -> None:
    changed = edited(tmp_path, path, **{key: "?"})
    changed.write_text(changed.read_text().replace('"?"', digits))
    with suppress(api.BadFile):
        bring(changed, to=tmp_path / "out")


def test_one_of_several_results_must_be_said(tmp_path: Path) -> None:
    for path, message in (
        (SGLANG, r"holds 2 results: say which one, .*:1 to .*:2"),
        (f"{SGLANG}:3", "holds 2 results, and 3 is none of them"),
        (tmp_path / "nowhere.json", r"cannot read .*nowhere.json: No such file"),
        ("/dev/null", "/dev/null is a device, not a file"),  # /dev/zero would take all memory where it fails
    ):
        with pytest.raises(api.BadSetting, match=message):
            files.read(str(path))


def test_import_prints_the_run_and_where_it_is(tmp_path: Path) -> None:
    arguments = ("import", str(VLLM), "--name", "mine", "--out", str(tmp_path), "--format", "json")
    output = bench(*arguments)
    (folder,) = tmp_path.iterdir()
    assert f"written to {folder}" in output.err
    assert json.loads(output.out)["run"] == folder.name
    assert json.loads(output.out)["comparisons"][0]["variant"] == "mine"


def test_prompts_of_unknown_length_give_no_throughput_of_all_tokens(tmp_path: Path) -> None:
    benchmarks = document(GUIDELLM)["benchmarks"]
    for each in benchmarks[0]["requests"]["successful"]:
        each["prompt_tokens"] = None
    found, said = had(edited(tmp_path, GUIDELLM, benchmarks=benchmarks), to=tmp_path / "out")
    assert {"throughput_tok_s"} == {"throughput_tok_s", "throughput_total_tok_s"} & {*found}
    assert "how long the prompts of" in said


# -- numbers of no request, and with two meanings ---------------------------------------------------------

NONE_SERVED = {"completed": 0, "failed": 9, "output_throughput": 0.0, "mean_ttft_ms": 0.0, "mean_itl_ms": 0.0}


def told(path: Path) -> tuple[dict[str, float], str]:
    """What a file's aggregates become, and what is said beside them."""
    read = files.read(str(path))
    return dict(read.told), "; ".join([*read.lacks, *read.differs])


def statistics(metric: str, value: float) -> dict[str, object]:
    return {f"{each}_{metric}_ms": value for each in STATISTICS}


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (VLLM, NONE_SERVED, "vllm bench serve in which no request was served: of 9, all failed"),
        (SGLANG, {**NONE_SERVED, **statistics("e2e_latency", np.nan)}, "no request was served"),
        (VLLM_DETAILED, {"errors": ["refused"] * 9}, "of 9, all failed, the first with: refused"),
        (VLLM_DETAILED, {"ttfts": [0.0] * 9}, "of 9, all failed, the first with: no token"),
        (SGLANG_DETAILED, {**NONE_SERVED, "output_lens": [0] * 9}, "of 9, all failed, the first with"),
        (AIPERF, {"request_count": None, "request_latency": None}, "aiperf in which no request was served"),
        (AIPERF, {"request_count": {"unit": "requests", "avg": 0.0}, "request_latency": None}, "was served"),
    ],
)  # fmt: skip
def test_numbers_of_no_request_are_refused(
    tmp_path: Path, path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(api.BadFile, match=message):
        files.read(str(edited(tmp_path, path, **values)))


@pytest.mark.parametrize(
    ("path", "values", "lost", "named"),
    [
        (VLLM, statistics("tpot", 0.0), ["tpot_ms"], "tpot_ms (tpot_ms_mean is 0 in the file"),
        (VLLM, statistics("itl", 0.0), ["itl_chunk_ms"], "itl_chunk_ms (itl_chunk_ms_mean is 0"),
        (VLLM, {"median_ttft_ms": 0.0}, ["ttft_ms", "tpot_ms"], "tpot_ms (made of ttft_ms)"),
        (SGLANG, statistics("ttft", 0), ["ttft_ms", "tpot_ms", "itl_chunk_ms"], "ttft_ms (ttft_ms_mean is 0"),
        (VLLM, {"p99_e2el_ms": np.nan}, ["latency_ms"], "latency_ms (latency_ms_p99 is nan in the file"),
        (VLLM, {"mean_e2el_ms": np.inf}, ["latency_ms"], "latency_ms (latency_ms_mean is inf"),
        (VLLM, {"mean_itl_ms": -1.0}, ["itl_chunk_ms"], "itl_chunk_ms (itl_chunk_ms_mean is -1"),
        (VLLM, {f"{each}_e2el_ms": None for each in STATISTICS}, ["latency_ms"], "statistics of latency_ms"),
        (VLLM, {"output_throughput": 0.0}, ["throughput_tok_s", "throughput_total_tok_s"], "tok_s is 0 in"),
        (VLLM, {"failed": None}, ["failed_requests"], "whether all else of 9 prompts failed"),
        (VLLM, {"request_goodput": np.nan}, ["goodput_req_s"], "goodput_req_s is nan"),
        (AIPERF, {"time_to_first_token": {"unit": "fortnights", "p50": 3}}, ["ttft_ms"], "is in fortnights"),
        (AIPERF, {"output_token_throughput": {"unit": "tokens/min", "avg": 9.0}}, ["throughput_tok_s"],
         "throughput_tok_s (output_token_throughput is in tokens/min)"),
        (AIPERF, {"input_config": {"endpoint": {"per_chunk_usage": True}}}, ["tpot_ms"], "--per-chunk-usage"),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_not_converted_and_named(
    tmp_path: Path, path: Path, values: dict[str, object], lost: list[str], named: str
) -> None:
    before, _ = told(edited(tmp_path, path))
    after, said = told(edited(tmp_path, path, **values))
    known, left = ({name for name, value in each.items() if not np.isnan(value)} for each in (before, after))
    assert {name for name in known if not name.startswith(tuple(lost))} == left
    assert named in said


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"accept_length": 3.0},
            "with speculation (accept_length 3) its ITL is shared among the tokens of a",
        ),
        ({"accept_length": 1.2, "backend": "sglang-oai-chat"}, "with speculation (accept_length 1.2)"),
        ({"accept_length": 0.0}, ""),
        ({"accept_length": 3.0, "backend": "vllm"}, ""),  # whose server tells none
        ({"backend": "sglang-native"}, "gaps between chunks: its ITL is shared among the tokens of a chunk"),
        ({"backend": "a-fork"}, "gaps between chunks: what the ITL of a-fork is, is not known"),
    ],
)
def test_sglangs_itl_is_a_gap_between_chunks_only_where_it_is_not_shared(
    tmp_path: Path, values: dict[str, object], named: str
) -> None:
    found, said = told(edited(tmp_path, SGLANG_OAI, ttfts=None, **values))
    assert ("itl_chunk_ms_p50" in found) == (not named)
    assert named in said
    (whole,) = {
        round(each.chunk_ns[-1] - each.chunk_ns[0], -1)
        for each in files.read(str(edited(tmp_path, SGLANG_OAI, **{**values, "backend": "a-fork"}))).requests[
            :1
        ]
    }
    assert whole == pytest.approx(1e9 * sum(document(SGLANG_OAI)["itls"][0]), abs=10)


def test_aggregates_of_a_part_of_the_requests_say_so(tmp_path: Path) -> None:
    assert "2 of 9 requests failed: its statistics are of the other 7" in told(VLLM)[1]
    assert "1 of 9 requests failed: its statistics are of the other 8" in told(AIPERF)[1]
    path = edited(tmp_path, AIPERF, is_complete=False, incomplete_reason="it stalled")
    assert "it ended early: it stalled" in told(path)[1]


def without_first_token(path: Path) -> dict[str, object]:
    """The values of a file whose first answer has no token. SGLang's tool says then that as many came as were
    asked for; guidellm that it was successful."""
    if path == GUIDELLM:
        benchmarks = document(path)["benchmarks"]
        answer = benchmarks[0]["requests"]["successful"][0]
        answer["output_tokens"] = answer["info"]["timings"]["first_token_iteration"] = None
        return {"benchmarks": benchmarks}
    nothing = first(path, "ttfts", 0.0 if path == SGLANG_OAI else None)
    return nothing | first(path, "errors", None)


@pytest.mark.parametrize(
    ("path", "values", "error"),
    [
        *((path, without_first_token(path), "no token") for path in (SGLANG_OAI, VLLM_DETAILED, GUIDELLM)),
        (VLLM_DETAILED, first(VLLM_DETAILED, "errors", " "), "an error without words"),
    ],
)
def test_an_answer_without_tokens_or_words_has_failed_and_the_others_have_not(
    tmp_path: Path, path: Path, values: dict[str, object], error: str
) -> None:
    read = files.read(str(edited(tmp_path, path, **values)))
    assert [each.error for each in read.requests[:2]] == [error, ""]


def of_aiperf(folder: Path, **metrics: object) -> list[Any]:
    """Its records, the first one with other metrics; None takes one away."""
    lines = [json.loads(line) for line in AIPERF_RECORDS.read_text().splitlines()]
    lines.sort(key=lambda each: (bool(each.get("error")), each["metadata"]["request_start_ns"]))
    changed = {**lines[0]["metrics"], **metrics}
    lines[0]["metrics"] = {name: value for name, value in changed.items() if value is not None}
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return sorted(files.read(str(path)).requests, key=lambda each: bool(each.error))


NO_REPLY = {"time_to_first_token": None, "output_sequence_length": None, "inter_chunk_latency": None}


@pytest.mark.parametrize(
    ("metrics", "failed"),
    [
        (NO_REPLY, 1),
        ({"time_to_first_token": {"value": None, "unit": "ms"}}, 1),
        ({"usage_details": {"cached": 3}}, 0),  # a metric that is not looked at may be anything
    ],
)
def test_an_empty_reply_among_aiperfs_records_has_failed(
    tmp_path: Path, metrics: dict[str, object], failed: int
) -> None:
    whole, found = ([each.error for each in of_aiperf(tmp_path, **more)] for more in ({}, metrics))
    assert (whole.count("") - found.count(""), found.count("no token")) == (failed, failed)


def test_times_of_aiperfs_records_are_those_that_can_be(tmp_path: Path) -> None:
    for metric, value, message in (
        ("time_to_first_token", {"value": np.nan, "unit": "ms"}, "a time of nan s"),
        ("inter_chunk_latency", {"value": [4, -3], "unit": "ms"}, "a time of -3 ms"),
    ):
        with pytest.raises(api.BadFile, match=message):
            of_aiperf(tmp_path, **{metric: value})
    in_seconds = of_aiperf(tmp_path, time_to_first_token={"value": 0.5, "unit": "sec"})[0]
    assert in_seconds.chunk_ns[0] - in_seconds.sent_ns == 500_000_000


def test_a_record_of_aiperf_without_its_end_gives_no_peak_concurrency(tmp_path: Path) -> None:
    of_aiperf(tmp_path, **NO_REPLY)
    path = tmp_path / "records.jsonl"
    with_end, text = files.read(str(path)), path.read_text()
    path.write_text(re.sub(r'"request_end_ns": \d+', '"request_end_ns": null', text, count=1))
    without = files.read(str(path))
    assert without.seconds == pytest.approx(with_end.seconds, rel=0.1)
    assert np.isnan(without.told["peak_concurrency"])
    assert "when 1 requests ended" in "; ".join(without.lacks)


def test_tokens_that_nobody_counted_make_no_throughput(tmp_path: Path) -> None:
    of_aiperf(tmp_path, output_sequence_length=None)
    found, said = told(tmp_path / "records.jsonl")
    assert np.isnan([found["throughput_tok_s"], found["throughput_total_tok_s"]]).all()
    assert "how many tokens 1 requests got" in said
    path = edited(tmp_path, VLLM_DETAILED, total_output_tokens=8, output_lens=[1] * 9)
    path.write_text(path.read_text().replace('"tokenizer_id": "tok"', '"tokenizer_id": null'))
    found, said = told(path)
    assert np.isnan(found["throughput_tok_s"])
    assert "--skip-tokenizer-init" in said


@pytest.mark.parametrize(
    ("path", "values", "looks_like"),
    [
        (VLLM, {"user_throughput": 3.0}, "it looks like one of TensorRT-LLM's benchmark_serving"),
        (AIPERF, {"aiperf_version": None, "error_summary": None, "was_cancelled": None}, "genai-perf"),
        (VLLM, {"tokenizer_id": None}, r'it has \["date", '),
        (SGLANG, {"total_output_tokens_retokenized": None}, r'it has \["backend", '),
    ],
)
def test_a_file_of_another_tool_of_the_same_shape_is_named(
    tmp_path: Path, path: Path, values: dict[str, object], looks_like: str
) -> None:
    with pytest.raises(api.BadFile, match=looks_like):
        files.read(str(edited(tmp_path, path, **values)))


def test_vllms_ttft_of_a_chat_is_said_to_end_with_the_first_chunk(tmp_path: Path) -> None:
    assert "which may hold the role alone" in told(edited(tmp_path, VLLM, backend="openai-chat"))[1]
    assert "which may hold the role alone" not in told(VLLM)[1]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("path", [VLLM, AIPERF_RECORDS], ids=["JSON", "JSON lines"])
def test_a_file_that_went_through_powershell_is_the_same(tmp_path: Path, path: Path, encoding: str) -> None:
    marked = tmp_path / path.name
    marked.write_text(path.read_text().replace("\n", "\r\n"), encoding=encoding, newline="")
    assert files.read(str(marked)) == files.read(str(path))


def test_a_list_of_results_is_read_as_lines_of_them_are(tmp_path: Path) -> None:
    together = tmp_path / "together.json"
    together.write_text(json.dumps([document(SGLANG, 0), document(SGLANG, 1)], indent=2))
    assert files.read(f"{together}:2") == files.read(f"{SGLANG}:2")


def test_numbers_as_strings_are_numbers_and_other_strings_are_not(tmp_path: Path) -> None:
    assert told(edited(tmp_path, VLLM, duration="0.5", mean_ttft_ms="25.0"))[0]["ttft_ms_mean"] == 25
    with pytest.raises(api.BadFile, match="mean_ttft_ms is '25,0', which is no number"):
        told(edited(tmp_path, VLLM, mean_ttft_ms="25,0"))
