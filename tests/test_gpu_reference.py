"""What the reference runs of a card leave behind when time runs out. They need no card to be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import gpu_reference
from experiments.gpu_reference import Model


def test_a_model_whose_writing_was_interrupted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_reference, "LARGE", ("tiny-gpt2",))

    def interrupted(preset: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(gpu_reference, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gpu_reference.prepared("tiny-gpt2:bfloat16", tmp_path)
    model = gpu_reference.prepared("tiny-gpt2:bfloat16", tmp_path)
    assert model == Model("tiny-gpt2", "bfloat16", str(tmp_path / "tiny-gpt2"))
    assert (tmp_path / "tiny-gpt2" / "model.safetensors").exists()


def test_everything_a_part_writes_is_below_the_folder_that_comes_back(tmp_path: Path) -> None:
    model = Model("gpt2", "bfloat16", "gpt2")
    for part in gpu_reference.PARTS:
        for command in gpu_reference.commands(part, model, tmp_path):
            assert Path(command[command.index("--out") + 1]).is_relative_to(tmp_path)


def test_a_command_that_runs_out_of_time_is_interrupted_and_what_it_said_is_kept(tmp_path: Path) -> None:
    stays = "trap 'echo asked; exit 1' INT; echo begun; while :; do sleep 0.1; done"
    table = tmp_path / "table.md"
    ended = gpu_reference.run(["sh", "-c", stays], 1, table, tmp_path / "log")
    assert ended == "interrupted"
    assert table.read_text() == "begun\nasked\n"
