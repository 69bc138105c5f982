"""What the reference runs of a card leave behind when time runs out. They need no card to be interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.gpu import reference, unfinished
from experiments.gpu.reference import Model
from harness.cli import printing
from harness.cli.printing import Format
from harness.store.files import write_summary
from harness.store.manifest import write_manifest
from tests.support.made_blocks import manifest
from tests.support.made_runs import stored


def test_a_model_whose_writing_was_interrupted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "LARGE", ("tiny-gpt2",))

    def interrupted(preset: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(reference, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reference.prepared("tiny-gpt2:bfloat16", tmp_path)
    model = reference.prepared("tiny-gpt2:bfloat16", tmp_path)
    assert model == Model("tiny-gpt2", "bfloat16", str(tmp_path / "tiny-gpt2"))
    assert (tmp_path / "tiny-gpt2" / "model.safetensors").exists()


def test_everything_a_part_writes_is_below_the_folder_that_comes_back(tmp_path: Path) -> None:
    model = Model("gpt2", "bfloat16", "gpt2")
    for part in reference.PARTS:
        for command in reference.commands(part, model, tmp_path):
            assert Path(command[command.index("--out") + 1]).is_relative_to(tmp_path)


def test_a_command_that_runs_out_of_time_is_interrupted_and_what_it_said_is_kept(tmp_path: Path) -> None:
    # A handler of its own: where this suite runs in the background of a script, SIGINT is ignored, and a
    # shell's trap would be too.
    stays = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('asked')))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    table = tmp_path / "table.md"
    ended = reference.run([sys.executable, "-c", stays], 2, table, tmp_path / "log")
    assert ended == "interrupted"
    assert table.read_text() == "begun\nasked\n"


def test_what_an_unfinished_run_holds_is_described_and_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "experiment"
    stored(experiment, "workload", 0.9, count=4)
    (run,) = unfinished.runs(experiment)
    assert run == experiment / "workload"
    assert list(unfinished.runs(run)) == [run]
    result = unfinished.described(run)
    assert result is not None
    assert result.stopped_because == "4 of 6 blocks are finished: described, not judged"
    (comparison,) = result.comparisons
    primary = comparison.metrics[comparison.primary]
    assert (comparison.blocks, primary.verdict) == (4, None)
    assert primary.change == pytest.approx(-0.1, abs=0.01)
    printing.show(result, Format.MARKDOWN)
    assert "no verdict" in capsys.readouterr().out.splitlines()[0]


def test_a_workload_that_ended_before_its_experiment_was_cut_off_has_its_verdict(
    tmp_path: Path,
) -> None:
    run = Path(stored(tmp_path, "workload", 0.9))
    write_summary(run, {})
    result = unfinished.described(run)
    assert result is not None
    (comparison,) = result.comparisons
    assert comparison.metrics[comparison.primary].verdict == "faster"
    assert result.stopped_because == "all 6 blocks done"


def test_a_run_without_a_finished_block_has_nothing_to_describe(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    assert unfinished.described(tmp_path) is None


def test_an_unfinished_run_of_equal_arms_has_a_floor_of_its_own(tmp_path: Path) -> None:
    plan = manifest(against_itself=True)
    result = unfinished.described(Path(stored(tmp_path, "aa", plan=plan, count=3)))
    assert result is not None
    (comparison,) = result.comparisons
    assert comparison.metrics[comparison.primary].floor > 0


def test_only_the_runs_of_an_interrupted_part_are_shown_with_it(tmp_path: Path) -> None:
    stored(tmp_path / "runs", "20261122-000000-one", count=4)
    earlier = reference.runs_under(tmp_path)
    stored(tmp_path / "runs", "20261122-000001-two", count=4)
    table = tmp_path / "table.md"
    reference.show_unfinished(reference.runs_under(tmp_path) - earlier, table, tmp_path / "log")
    assert table.read_text().count("4 of 6 blocks are finished") == 1
