"""What is recorded of a card, rehearsed where the CPU plays it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import pace, record_pace
from overlap_bench.engines.record_pace import Refused, fitted, shape_of, toml
from tests.support.bench_command import PATIENCE_S
from tests.support.places import ROOT

BENCH = (sys.executable, "-m", "overlap_bench")
SMALL = "--batches 1,2 --contexts 8,16 --tokens 4,8"
CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
VLLM = """
class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, async_scheduling, **_):
        import json, os, sys
        assert json.load(open(os.path.join(model, "config.json")))["num_key_value_heads"] == 2
        assert sys.path[0] != RECORDER
        self.ms = 1 if async_scheduling else 2

    def generate(self, prompts, asked, **_):
        import time
        time.sleep(self.ms * len(prompts) * asked.max_tokens / 1e5)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([*BENCH, "pace", "record"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("record_pace: torch")
    assert "finds no CUDA card here" in line
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_where_the_cpu_plays_the_card_is_a_pace(tmp_path: Path) -> None:
    """The whole command, with a vLLM that only takes its time; by an interpreter that asks for less."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    folder = str(Path(record_pace.__file__).parent)
    (tmp_path / "vllm.py").write_text(VLLM.replace("RECORDER", repr(folder)))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" {SMALL}\n')
    python.chmod(0o755)
    played = os.pathsep.join([str(tmp_path), str(ROOT / "tests/support/card"), str(ROOT)])
    options = ("--model", "tiny", "--out", "card.toml", "--python", str(python))
    done = subprocess.run(
        [*BENCH, "pace", "record", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": played, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "card.toml"
    assert "bench run --variant overlap --pace card.toml" in done.stdout
    (name, profile), *_ = pace._read(tmp_path / "card.toml").items()
    assert name == "tiny-stand-in"
    assert profile.assumed == ()
    assert profile.host_ns > 0
    assert profile.facts["card"] == "stand-in"
    assert set(profile.facts["vllm_ms"]) == {"async_off", "async_on"}  # type: ignore[call-overload]
    assert "vLLM's time per token" in profile.source
    made = pace.make_pace(pace.settle(str(tmp_path / "card.toml")))
    assert made.name == name
    assert made.ns(pace.Size("prefill", 1, 8, 8)) > 0
    assert made.ledger.replay_ns > 0


@given(
    table=st.dictionaries(st.integers(1, 256), st.floats(0.5, 50), min_size=1, max_size=6),
    slope_ns=st.floats(0, 50),
    contexts=st.lists(st.integers(16, 4096), min_size=1, max_size=3, unique=True),
)
def test_a_step_that_is_of_that_form_is_found_again(
    table: dict[int, float], slope_ns: float, contexts: list[int]
) -> None:
    measured = {
        (batch, context): ms + slope_ns * batch * context / 1e6
        for batch, ms in table.items()
        for context in contexts
    }
    found, slope, error = fitted(measured)
    assert error < 1e-6
    if len(contexts) > 1:
        assert slope == pytest.approx(slope_ns, abs=1e-6)
        assert found == pytest.approx(table, rel=1e-6)


def test_the_shape_is_what_a_configuration_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert shape_of(str(tmp_path)) == shape_of(str(path))
    assert (shape_of(str(path)).head, shape_of(str(path)).gated) == (8, True)
    path.write_text(json.dumps({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 10}))
    assert (shape_of(str(path)).inner, shape_of(str(path)).gated) == (256, False)
    for text in ("{}", "[]", "{", '{"hidden_size": 64}'):
        path.write_text(text)
        with pytest.raises(Refused):
            shape_of(str(path))
    with pytest.raises(Refused, match="no model 'none': one of llama3-8b"):
        shape_of("none")


def test_a_profile_is_written_as_it_is_read() -> None:
    import tomllib

    table = {"a": 'x "y" \\ ü\n', "b": 1.5, "c": {"d": True, "e": {"1": 2.0}}}
    assert tomllib.loads(toml("name", table)) == {"name": table}


def test_a_file_that_no_pace_could_be_read_from_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        record_pace.main(["--out", "my-card"])
    assert ended.value.code == 2
    assert "--out my-card: a pace is read from a file NAME.toml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        record_pace.main(["--out", "cards/mine.toml"])
    assert "--out cards/mine.toml: there is no folder cards" in capsys.readouterr().err


def test_k_is_that_of_the_interpreter_that_runs_the_engine(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho 25000\n")
    slow.chmod(0o755)
    host = pace.profiles()["llama3-8b-h100"].host_ns
    assert pace.host_k(host, str(slow)) == 25000 / host
    assert pace.host_k(host, str(tmp_path / "none")) > 0  # who boots it says what is wrong
    assert 0.2 < pace.host_k(host, sys.executable) / pace.host_k(host) < 5
