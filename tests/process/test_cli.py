"""The command line in-process: exit codes, one line per error, and a light start."""

import subprocess
import sys
from pathlib import Path

import pytest

from overlap_bench.engines.api import profiles
from overlap_bench.harness.cli import measure
from tests.support.bench_command import last_line
from tests.support.in_process import bench, complaint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", "say what to run: --variant NAME (bench variants lists them) or --engine NAME"),
        ("run --variant zzz", "unknown variant 'zzz'; bench variants lists them"),
        ("run --variant pinned-h2b", "unknown variant 'pinned-h2b'; did you mean pinned-h2d?"),
        ("run --resume results/a-run --trials 8", "--resume goes on with a run as it was asked for: leave"),
        ("run --variant overlap --trust", "--trust is for what a folder or a file says: what you ask for"),
        ("factorial --toggles h2d,sync --trust", "what you ask for here needs none"),
        ("sweep --variant overlap --over seed=1,2 --trust", "what you ask for here needs none"),
        ("run --variant overlap --goodput ttft=200", "--goodput needs METRIC:MS such as ttft:200, not"),
        ("run --engine overlop", "unknown engine 'overlop'; did you mean overlap?"),
        ("run --variant pinned-h2d --set h2b=pinned", "unknown setting 'h2b'; did you mean h2d?"),
        ("run --variant pinned-h2d --after h2d=pined", "unknown choice of h2d 'pined'; did you mean pinned?"),
        ("run --variant pinned-h2d --device cudda", "unknown device 'cudda'; did you mean cuda?"),
        ("run --variant pinned-h2d --model tiny-gtp2", "unknown model 'tiny-gtp2'; did you mean tiny-gpt2?"),
        ("profile --engine overlap --model gtp2", "unknown model 'gtp2'; did you mean gpt2?"),
        ("run --variant pinned-h2d --dtype float23", "unknown dtype 'float23'; did you mean float32?"),
        ("run --variant pinned-h2d --arrival fixt", "unknown arrival 'fixt'; did you mean fixed?"),
        ("run --variant pinned-h2d --primary ttft_m", "did you mean ttft_ms_mean, ttft_ms_p50, "),
        ("run --variant pinned-h2d --trials 0", "--trials must be at least 1, not 0"),
        ("run --variant pinned-h2d --num-requests -3", "num_requests must be at least 1, not -3"),
        ("run --variant pinned-h2d --max-batch-size 0", "max_batch_size must be at least 1, not 0"),
        ("run --variant pinned-h2d --stream-interval -1", "stream_interval must be at least 1, not -1"),
        ("run --variant pinned-h2d --interval-ms 0", "interval_ms must be above 0, not 0"),
        ("run --variant pinned-h2d --margin 0%", "--margin must be above 0% and below 100%, not 0%"),
        ("run --variant pinned-h2d --margin 1", "--margin 1 would be 100%; 1% is written 1%"),
        (
            "run --variant overlap --temperature 1 --set sampling=off",
            "--set sampling=off: --temperature ",
        ),
        ("run --engine overlap --temperature 1 --after sampling=off", "--after sampling=off: --temperature "),
        ("run --variant pinned-h2d --margin wide", "--margin needs a share such as 1% or 0.01, not 'wide'"),
        ("run --variant pinned-h2d --set h2d=pinned", "before and after are the same settings"),
        ("run --variant pinned-h2d --set sync=copy-done", "sync applies only with schedule=overlap"),
        ("run --variant pinned-h2d --arrival burst --interval-ms 5", "interval_ms applies only with"),
        ("run --variant pinned-h2d --arrival closed", "arrival=closed needs a concurrency"),
        ("run --variant overlap --arrival poisson", "arrival=poisson needs a rate"),
        (
            "run --variant overlap --arrival gamma --rate 9 --burstiness 0",
            "burstiness must be above 0, not 0",
        ),
        (
            "run --variant pinned-h2d --input-tokens uniform:9:3",
            "input_tokens=uniform:9:3: LOW is above HIGH",
        ),
        ("run --variant pinned-h2d --max-new-tokens many", "max_new_tokens needs a number, uniform:LOW:HIGH"),
        ("run --variant pinned-h2d --arrival trace --trace /no/trace", "cannot read /no/trace: No such file"),
        ("run --variant pinned-h2d --prompts /no/where.json", "cannot read /no/where.json: No such file"),
        ("run --variant pinned-h2d --prompt-repeats 8", "needs 2 different prompts, and there are 1"),
        (
            "run --variant pinned-h2d --goodput tttf:9",
            "unknown metric of --goodput 'tttf'; did you mean ttft",
        ),
        ("run --variant pinned-h2d --primary goodput_req_s", "goodput_req_s needs to know what is good"),
        (
            "run --variant pinned-h2d --tokenize-workers 2",
            "tokenize_workers applies only with --no-p",
        ),
        ("run --variant pinned-h2d --resume /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("run --resume /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("run --variant pinned-h2d --out /dev/null/results", "can't write results to /dev/null/results"),
        ("run --variant pinned-h2d --max-trials 8", "--max-trials applies only with --until-decided"),
        ("run --variant pinned-h2d --until-decided --trials 8", "with --until-decided give --max-trials"),
        (
            "run --variant pinned-h2d --until-decided --max-trials 5",
            "needs --max-trials from 6 to 100",
        ),
        (
            "run --variant pinned-h2d --until-precision 0%",
            "must be above 0% and below 100%, not 0%",
        ),
        ("run --variant pinned-h2d --until-precision tiny", "--until-precision needs a share such as 1%"),
        ("run --variant pinned-h2d --until-decided --until-precision 1%", "exclude each other"),
        ("run --engine overlap --until-decided", "needs two arms"),
        ("run --variant pinned-h2d --inject-delay 3% --inject-at dvice", "did you mean device?"),
        ("run --variant pinned-h2d --inject-delay 200%", "--inject-delay must be at least 0% and below 100%"),
        ("run --engine overlap --inject-delay 3%", "--inject-delay slows the after arm, and there is none"),
        ("aa --variant pinned-h2d --after h2d=packed", "an arm against itself has no --after"),
        ("aa", "say what to run"),
        ("compare /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("compare", "Missing argument 'runs'; see bench compare --help"),
        ("run pinned-h2d", "(pinned-h2d); see bench run --help"),
        ("cmpare", "Did you mean 'compare'"),
        ("rerun /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("gate /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("gate --variant overlap --on-undecided perhaps", "perhaps"),
        ("gate --calibrate --engine overlap --base-ref main", "measures what is installed against itself"),
        ("gate --calibrate --engine overlap --trials 1", "one trial has no SD"),
        (
            "gate --calibrate --engine overlap --plan calibration.json",
            "measures what is installed against itself",
        ),
        ("gate --variant overlap --history gates.jsonl", "--history is of gates of git refs"),
        ("gate --variant overlap --plan nowhere/calibration.json", "nowhere is not a calibration"),
        ("run --variant overlap --max-minutes nan", "--max-minutes must be above 0, not nan"),
        ("gate --variant overlap --max-regression 0%", "--max-regression must be above 0% and below 100%"),
        ("gate --variant overlap --metric submit_lag_ms_p99", "has no regression in percent"),
        ("report /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("report /nowhere/at/all -o report.pdf", "end report.pdf in .html or .md"),
        ("run --trials six", "--trials"),
        ("run --bloks 6", "--bloks"),
        ("run --variant pinned-h2d --format xml", "xml"),
        ("ran", "ran"),
        (f"report {'a' * 300}", "File name too long: "),
        (f"gate {'a' * 300}", "File name too long: "),
        ("variants pinned-h2b", "unknown variant 'pinned-h2b'; did you mean pinned-h2d?"),
        ("variants --format csv", "--results, --format and -o apply only with --claims"),
        ("variants --claims --results /no/where", "/no/where is no folder with results"),
        ("variants --claims -o claims.md", "-o takes a web page: end it in .html, and leave --format out"),
        ("factorial", "say what to vary: --toggles h2d,sync,output"),
        ("factorial --toggles h2d,sinc", "did you mean sync?"),
        ("factorial --toggles h2d,sync --engine overlop", "unknown engine 'overlop'; did you mean overlap?"),
        ("factorial --toggles h2d,sync --max-new-tokens 1", "tpot_ms_p50 needs at least 2 output tokens"),
        ("factorial --toggles h2d,sync --before h2d=pinned", "--before"),
        ("factorial /nowhere/at/all", "/nowhere/at/all is not a run folder"),
        ("factorial /nowhere/at/all --toggles h2d,sync", "only --format applies"),
        ("factorial /nowhere/at/all --trust", "only --format applies"),
        ("sweep /nowhere/at/all --trust", "only --format applies"),
        ("sweep --variant pinned-h2d", "say what to sweep: --over concurrency=1,8,32"),
        (
            "sweep --variant pinned-h2d --over concurency=1,8",
            "unknown setting to sweep 'concurency'; did you mean concurrency?",
        ),
        (
            "sweep --variant pinned-h2d --over h2b=pinned,packed",
            "unknown setting to sweep 'h2b'; did you mean h2d?",
        ),
        (
            "sweep --variant pinned-h2d --over concurrency",
            "--over needs NAME=VALUE,VALUE,..., not 'concurrency'",
        ),
        (
            "sweep --variant pinned-h2d --over concurrency=1,,8",
            "--over needs NAME=VALUE,VALUE,..., not 'concurrency=1,,8'",
        ),
        ("sweep --variant pinned-h2d --over concurrency=1,1", "--over concurrency=1,1 names a value twice"),
        (
            "sweep --variant pinned-h2d --over concurrency=1",
            "--over concurrency=1 has one value, and a sweep needs at least two",
        ),
        (
            "sweep --variant pinned-h2d --over concurrency=1,8 --over concurrency=8,9",
            "--over concurrency is given twice",
        ),
        ("sweep --variant pinned-h2d --over concurrency=1,many", "concurrency=many"),
        (
            "sweep --variant pinned-h2d --over concurrency=0,8",
            "concurrency=0: concurrency must be at least 1, not 0",
        ),
        (
            "sweep --variant pinned-h2d --over h2d=pined,pinned",
            "h2d=pined: unknown choice of h2d 'pined'; did you mean pinned?",
        ),
        (
            "sweep --variant pinned-h2d --over variant=overlap,copy-done",
            "variant is swept: leave it out elsewhere",
        ),
        (
            "sweep --variant pinned-h2d --over rate=5,9",
            "rate=5: rate applies only with arrival=poisson, gamma",
        ),
        (
            "sweep --variant pinned-h2d --over sync=copy-done,launch-and-copy",
            "sync=copy-done: sync applies only with schedule=overlap",
        ),
        (
            "sweep --variant pinned-h2d --over max_new_tokens=8,08",
            "max_new_tokens=8 and max_new_tokens=08 are the same run",
        ),
        ("sweep --variant pinned-h2d --over seed=1,2", "unknown setting to sweep 'seed'"),
        ("sweep --variant pinned-h2d --over plant_ns=1,2", "unknown setting to sweep 'plant_ns'"),
        (
            "sweep --variant pinned-h2d --over num_requests=" + ",".join(map(str, range(1, 202))),
            "spans 201 points",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in complaint(*arguments.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", ["", "experiment"])
def test_no_command_gives_help_and_no_empty_line(arguments: str) -> None:
    output = bench(*arguments.split(), code=2)
    assert output.err == ""
    assert "Usage: bench" in output.out


def test_debug_adds_a_traceback() -> None:
    text = bench("run", "--variant", "nothing-like-it-at-all", "--debug", code=2).err
    assert "Traceback" in text
    assert last_line(text).startswith("bench: unknown variant")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ZeroDivisionError("a fault\nof two lines"),
            "unexpected ZeroDivisionError: a fault of two lines; --debug shows where\n",
        ),
        (MemoryError(), "memory is used up; end other processes"),
    ],
)
def test_the_unexpected_and_a_shortage_are_one_line_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def break_down(*_: object) -> None:
        raise error

    monkeypatch.setattr(measure, "_measure", break_down)
    assert bench("run", "--variant", "pinned-h2d", code=4).err.startswith(f"bench: {said}")


def test_a_ctrl_c_outside_of_a_measurement_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(results: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("overlap_bench.harness.studies.doctor.examine", interrupted)
    assert bench("doctor", code=130).err == "bench: interrupted\n"


def test_variants_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    listed = bench("variants").out
    assert "pinned-h2d" in listed
    assert "roseinfer" in listed
    assert "\nh2d  " in listed
    full = bench("variants", "pinned-h2d").out
    for word in (
        "h2d=pageable", "h2d=pinned", "roseinfer", "expected on emulated", "5.5%",
        "round_step_ms_same_device", "engines/overlap/toggles/h2d.py",
    ):  # fmt: skip
        assert word in full


def test_claims_stand_beside_what_was_measured_and_one_can_be_asked_for(tmp_path: Path) -> None:
    head, *lines = bench("variants", "--claims", "--format", "csv").out.splitlines()
    assert bench("variants", "pinned-h2d", "--claims", "--format", "csv").out.splitlines() == [
        head,
        *(line for line in lines if line.startswith("pinned-h2d,")),
    ]
    page = tmp_path / "claims.html"
    assert bench("variants", "--claims", "-o", str(page)).out == f"{page}\n"
    assert page.read_text().count("<tr>") == 1 + len(lines)


def test_engines_are_listed() -> None:
    listed = bench("engines").out
    assert "overlap" in listed
    assert "pageable" in listed
    (one, *_) = bench("engines", "overlap").out.splitlines()
    assert one.startswith("overlap: ")
    assert one in listed
    assert "did you mean overlap?" in bench("engines", "overlop", code=2).err


def test_a_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from overlap_bench.harness.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "variants"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bench: interrupted\n")


@pytest.mark.parametrize("arguments", ["--help", "run --help", "gate --help", "variants", "engines"])
def test_what_measures_nothing_starts_light(arguments: str) -> None:
    code = (
        "import sys; from overlap_bench.harness.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    code += "heavy = {'torch', 'pandas', 'scipy', 'numpy', 'zmq', 'matplotlib', 'jinja2'}\n"
    code += "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_devices_lists_every_profile_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    listed = " ".join(bench("devices").out.split())
    for name, profile in profiles().items():
        assert f"{name} {profile.summary}" in listed
        assert profile.source in listed
        assert profile.ledger.text.replace(",", ", ") in listed
        assert f"Host (assumed): {profile.host}" in listed
    assert "Driver and host of all of them" in listed
    assert " times as long here, measured now" in listed


@pytest.mark.parametrize(
    ("asked", "said", "means"),
    [
        (("--blocks", "0"), "--blocks is called --trials now", "--trials must be at least 1, not 0"),
        (("--blocks=0",), "--blocks is called --trials now", "--trials must be at least 1, not 0"),
        (("--max-blocks", "8"), "--max-blocks is called --max-trials now", "--max-trials applies only"),
        (("--segments=-1",), "--segments is called --interleaved-rounds now", "--interleaved-rounds must be"),
        (("--plant", "200%"), "--plant is called --inject-delay now", "--inject-delay must be at least 0%"),
        (("--plant-at", "host"), "--plant-at is called --inject-at now", "--inject-at applies only with"),
    ],
)
def test_an_option_goes_on_working_by_its_old_name_and_a_line_names_the_new_one(
    asked: tuple[str, ...],
    said: str,
    means: str,
) -> None:
    first, second = bench("run", "--variant", "pinned-h2d", *asked, code=2).err.splitlines()
    assert first == f"bench: {said}"
    assert means in second
