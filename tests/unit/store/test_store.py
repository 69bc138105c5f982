"""Run folders: what survives, what is refused, and with which reason."""

import errno
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.presets import TOKENIZER_FILE
from overlap_bench.harness.analysis import frames
from overlap_bench.harness.common import machine, names
from overlap_bench.harness.common.machine import Code, Machine
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.store.files import (
    EVALUATION_FILE,
    EXPERIMENT_FILE,
    PROFILE_FILE,
    SCHEMA_VERSION,
    SWEEP_FILE,
    StoreError,
    WriteFailed,
    prepare,
    write_summary,
)
from overlap_bench.harness.store.manifest import (
    Manifest,
    check_resume,
    check_same_data,
    create,
    described_here,
    discard_if_empty,
    read_manifest,
    without_places,
    write_manifest,
)
from overlap_bench.harness.store.tables import (
    COLUMNS,
    TABLES,
    finished_blocks,
    read_block,
    read_table,
    read_values,
    table_path,
    write_block,
)
from overlap_bench.harness.workload import prompts
from overlap_bench.harness.workload.workload import Workload
from tests.support.keep import write_values
from tests.support.made_blocks import described
from tests.support.refusals import refusal

NOW = datetime(2026, 5, 4, 3, 2, 1)
DESIGN = Design(
    name="pinned-h2d",
    arms=(
        Arm(name="before", engine="e", options=api.EngineOptions(), toggles={"h2d": "pageable"}),
        Arm(name="after", engine="e", options=api.EngineOptions(), toggles={"h2d": "pinned"}, env={"A": "1"}),
    ),
    workload=Workload(),
)
MANIFEST = Manifest(
    schema_version=SCHEMA_VERSION,
    run="a-run",
    created="2026-05-04T03:02:01+00:00",
    design=DESIGN,
    after_first=[True, False, True, True, False, False],
    machine=Machine(cpu="a cpu", cores=2, kernel="6", memory_gib=8, gpus=[]),
    code=Code(commit="abc", changes=""),
    versions={"python": "3.11"},
    files={"a.txt": "0c2d"},
)


def tables(rows: int = 3) -> dict[str, pd.DataFrame]:
    lists = [np.arange(each, dtype=np.int64) for each in range(rows)]
    requests = {name: np.arange(rows) for name in COLUMNS["requests"]}
    requests |= dict.fromkeys(("chunk_ns", "chunk_tokens", "token_ns"), lists)
    requests |= dict.fromkeys(("reason", "digest", "error"), "")
    return {
        "requests": pd.DataFrame({"arm": "before", "round": 0, **requests}),
        "steps": pd.DataFrame({"arm": [], "round": []}),
        "rounds": pd.DataFrame(
            {"arm": ["before"], "round": [0], "started_ns": [0], "ended_ns": [1], "counter.x": [1.5]}
        ),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = create(tmp_path / "results", "pinned-h2d", NOW)
    write_manifest(made, MANIFEST)
    return made


def changed(**changes: Any) -> Manifest:
    return msgspec.structs.replace(MANIFEST, **changes)


def test_a_run_whose_blocks_can_not_be_listed_is_not_taken_for_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "blocks" / "000").mkdir(parents=True)

    def failing(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "the disk is tired")

    with monkeypatch.context() as now:
        now.setattr(Path, "iterdir", failing)
        with pytest.raises(OSError, match="tired"):
            discard_if_empty(folder)
    assert finished_blocks(folder) == [0]


@pytest.mark.parametrize(
    ("tokenizer", "kept"),
    [
        (str(TOKENIZER_FILE), "engines.presets/tokenizer.json"),
        ("/home/me/.cache/models/m/tokenizer.json", None),  # the model's name says which it is
        ("mine/tokenizer.json", "mine/tokenizer.json"),  # as it was asked for
        (None, None),
    ],
)
def test_where_a_tokenizer_lies_on_this_machine_is_not_stored(
    tokenizer: str | None, kept: str | None
) -> None:
    model = described().model
    said = msgspec.structs.replace(
        described(), model=model if tokenizer is None else model | {"tokenizer": tokenizer}
    )
    assert without_places(said).model == (model if kept is None else model | {"tokenizer": kept})


def test_a_manifest_and_a_block_come_back(folder: Path) -> None:
    assert read_manifest(folder) == MANIFEST
    write_block(folder, 0, tables())
    back = read_block(folder, 0)
    assert list(back["requests"]["request"]) == [0, 1, 2]
    assert [list(each) for each in back["requests"]["chunk_ns"]] == [[], [0], [0, 1]]
    assert not len(back["steps"])
    assert list(back["work"]) == ["arm", "round", *COLUMNS["work"]]  # it was empty, and is no file
    assert back["rounds"]["counter.x"].item() == 1.5


def test_a_block_of_an_older_run_comes_back_as_one_of_now(folder: Path) -> None:
    """Until now pandas wrote it, with dictionaries."""
    write_block(folder, 0, tables())
    write_block(folder, 1, tables())
    for name in ("requests", "rounds"):
        tables()[name].to_parquet(table_path(folder, 1, name), index=False, compression="zstd")
        now, older = (read_table(folder, number, name) for number in (0, 1))
        pd.testing.assert_frame_equal(now, older, check_exact=True)
        pd.testing.assert_frame_equal(now, tables()[name], check_exact=True)


def test_half_a_block_is_none(folder: Path) -> None:
    write_block(folder, 0, tables())
    half = folder / "blocks" / "001.partial"
    half.mkdir()
    (half / "requests.parquet").write_bytes(b"half")
    assert finished_blocks(folder) == [0]
    write_block(folder, 1, tables())
    assert not half.exists()
    for name in ("²", "٣", "-1", "notes"):  # no numbers of blocks
        (folder / "blocks" / name).mkdir()
    assert finished_blocks(folder) == [0, 1]


# -- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["requests", "rounds"])
def test_a_truncated_table_is_named(folder: Path, name: str) -> None:
    write_block(folder, 0, tables())
    path = folder / "blocks" / "000" / f"{name}.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    said = refusal(lambda: read_block(folder, 0), StoreError)
    assert f"{name}.parquet is damaged or was edited" in said


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', '{"schema_version": "one"}', "[]"])
def test_a_damaged_manifest_is_named(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    said = refusal(lambda: read_manifest(folder), StoreError)
    assert "manifest.json is damaged or was edited" in said


def test_a_newer_schema_is_refused_whatever_else_it_holds(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"schema_version": 99, "unheard": "of"}')
    with pytest.raises(StoreError, match="schema version 99, newer than 3"):
        read_manifest(folder)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (PROFILE_FILE, "is a profile, not a run"),
        (SWEEP_FILE, "is a sweep: .* bench sweep"),
        (EXPERIMENT_FILE, "is an experiment: .* bench experiment show"),
        (EVALUATION_FILE, "is an evaluation, not a run"),
    ],
)
def test_a_folder_of_something_else_is_named(tmp_path: Path, file: str, named: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(StoreError, match=named):
        read_manifest(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where a folder should be")
    for ask in (lambda out: create(out, "x", NOW), prepare):
        with pytest.raises(api.BadSetting, match=r"can't write results to .*choose another --out"):
            ask(tmp_path / "results")


LIST, GONE = np.arange(2), object()


@pytest.mark.parametrize(
    ("table", "name", "value", "message"),
    [
        ("requests", "chunk_ns", GONE, "it has no column 'chunk_ns'"),
        ("rounds", "round", GONE, "it has no column 'round'"),
        ("requests", "sent_ns", "soon", "column 'sent_ns' holds something other than integers"),
        ("requests", "chunk_ns", "soon", "column 'chunk_ns' holds something other than .*integers"),
        ("requests", "arm", 1, "column 'arm' holds something other than "),
        ("requests", "reason", None, "column 'reason' holds something other than texts"),
        ("requests", "reason", ["stop", "stop", None], "column 'reason' holds something other than texts"),
        ("requests", "completion_tokens", "9", "column 'completion_tokens' holds something other than "),
        ("requests", "chunk_tokens", "a", "column 'chunk_tokens' holds something other than "),
        ("requests", "prompt_tokens", float("inf"), "column 'prompt_tokens' holds something other than "),
        ("requests", "accepted_ns", LIST, "column 'accepted_ns' holds something other than "),
        ("requests", "error", LIST, "column 'error' holds something other than "),
        ("rounds", "round", 0.5, "column 'round' holds something other than "),
    ],
)
def test_a_column_that_can_not_be_is_named(
    folder: Path, table: str, name: str, value: object, message: str
) -> None:
    whole = tables()
    frame = whole[table].drop(columns=name)
    if value is not GONE:
        values = value if isinstance(value, list) else [value] * len(frame)
        frame[name] = pd.Series(values, dtype=object).infer_objects()
    write_block(folder, 0, {**whole, table: frame})
    with pytest.raises(StoreError, match=rf"{table}\.parquet was edited: .*{message}"):
        read_block(folder, 0)


NAMELESS = msgspec.structs.replace(described(), device={"kind": "emulated"})
NO_MODEL = msgspec.structs.replace(described(), model={})


@pytest.mark.parametrize(
    "changes",
    [
        {"after_first": [True]},
        {"left_out": ["summary"]},  # which is no table
        {"created": "yesterday"},
        {"created": "2026-05-04T03:02:01"},
        {"descriptions": {"before": described()}},
        {"descriptions": {"before": described(), "after": NAMELESS}},
        {"descriptions": {"before": NO_MODEL, "after": described()}},
        {"design": msgspec.structs.replace(DESIGN, workload=Workload(arrival="whenever"))},
    ],
)
def test_a_manifest_whose_parts_do_not_fit_is_named(folder: Path, changes: dict[str, Any]) -> None:
    write_manifest(folder, changed(**changes))
    with pytest.raises(StoreError, match=r"manifest\.json was edited: its parts do not fit"):
        read_manifest(folder)


# -- resume -----------------------------------------------------------------------------------------------


OTHER_ARMS = (DESIGN.arms[0], msgspec.structs.replace(DESIGN.arms[1], toggles={"h2d": "packed"}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"code": Code(commit="def", changes="")}, "another commit: commit was 'abc', is 'def'"),
        ({"code": Code(commit="abc", changes="12")}, "another commit: changes was '', is '12'"),
        (
            {"design": msgspec.structs.replace(DESIGN, arms=OTHER_ARMS)},
            "settings that are not its own: arms.1.toggles.h2d was 'pinned', is 'packed'",
        ),
        (
            {"design": msgspec.structs.replace(DESIGN, blocks=7)},
            "settings that are not its own: trials was 6, is 7",
        ),
        ({"machine": msgspec.structs.replace(MANIFEST.machine, cores=4)}, "machine: cores was 2, is 4"),
        ({"versions": {"python": "3.12"}}, "versions: python was '3.11', is '3.12'"),
        ({"files": {"a.txt": "5e1f"}}, "files: a.txt was '0c2d', is '5e1f'"),
    ],
)
def test_resume_refuses_and_names_the_difference(changes: dict[str, Any], reason: str) -> None:
    said = refusal(lambda: check_resume(MANIFEST, changed(**changes)), StoreError)
    assert reason in said
    assert ("leave all options but --resume out, or" in said) == ("design" in changes)
    assert said.endswith("start a fresh run")


def test_a_run_whose_prompts_were_another_pythons_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = made_here(monkeypatch, Workload(prompts="english"))
    check_same_data(made)
    check_same_data(msgspec.structs.replace(made, files={}))  # an older one, which does not tell
    monkeypatch.setattr(prompts, "english", lambda: ("Another passage.",))
    with pytest.raises(
        StoreError, match=r"^can't measure a-run again with Python 3.*; use that one, or start"
    ):
        check_same_data(made)


def test_a_run_whose_file_of_prompts_has_changed_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n")
    made = made_here(monkeypatch, Workload(prompts=str(path)))
    check_same_data(made)
    path.write_text("two\n")
    with pytest.raises(StoreError, match=r"prompts\.txt has changed since; bring back the file as it was"):
        check_same_data(made)


def made_here(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> Manifest:
    """The manifest of a run that starts now; what it would start processes for is given."""
    monkeypatch.setattr(machine, "code", lambda: MANIFEST.code)
    monkeypatch.setattr(machine, "fingerprint", lambda: MANIFEST.machine)
    return described_here(msgspec.structs.replace(DESIGN, workload=workload), "a-run", NOW, "lot")


def test_differences_are_named_up_to_four_and_counted() -> None:
    old = dict.fromkeys("abcdef", 1)
    assert names.difference(old, old) == ""
    assert names.difference(old, {**old, "b": 2}) == "b was 1, is 2"
    nested = names.difference({"x": [1, {"y": 2}]}, {"x": [0, {"y": 3}]})
    assert nested == "x.0 was 1, is 0; x.1.y was 2, is 3"
    changed = names.difference(old, dict.fromkeys("abcdef", 2))
    assert changed.startswith("a was 1, is 2; b was 1, is 2; ")
    assert changed.endswith("; and 2 more")


def test_nothing_is_written_into_a_folder_that_was_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(WriteFailed, match="No such file"):
        write_block(gone, 0, tables())
    with pytest.raises(WriteFailed, match="the folder was removed"):
        write_summary(gone, {})
    assert not gone.exists()


@pytest.mark.parametrize("name", TABLES)
def test_every_column_that_a_run_writes_is_read_back(tmp_path: Path, name: str) -> None:
    """analysis/frames lists every column. A reader that took one for edited would refuse every run."""
    values: dict[str, Any] = {"int64": 1, "float64": 0.5, "text": "x", "list": np.array([1, 2])}
    table = pd.DataFrame(
        {
            column + ("x" if column[-1] in "._" else ""): [values[documented.dtype]]
            for column, documented in frames.COLUMNS[name].items()
            if column != "trial"
        }
    )
    whole = pd.DataFrame({each: [0] for each in (*COLUMNS[name], "arm", "round") if each not in table})
    write_block(tmp_path, 0, {**tables(), name: pd.concat([table, whole], axis=1)})
    assert len(read_table(tmp_path, 0, name)) == 1


def test_a_run_that_its_first_boots_sized_is_gone_on_with_as_it_was_asked_for() -> None:
    asked = msgspec.structs.replace(DESIGN, segments=16, rounds=3, aim_s=80.0)
    sized = msgspec.structs.replace(asked, segments=7, rounds=1, aim_s=None)
    check_resume(changed(design=sized), changed(design=asked))
    check_resume(changed(design=sized), changed(design=sized))
    with pytest.raises(StoreError, match="interleaved_rounds"):
        check_resume(changed(design=sized), changed(design=msgspec.structs.replace(asked, aim_s=None)))


def test_values_of_many_metrics_come_back_as_they_were_without_a_warning(tmp_path: Path) -> None:
    keys = pd.DataFrame({"block": [0, 0, 1, 1], "arm": ["before", "after"] * 2})
    made = pd.DataFrame({f"metric_{number}": np.arange(4.0) + number for number in range(150)})
    written = pd.concat([keys, made], axis=1)
    write_values(tmp_path, written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_values(tmp_path, ["before", "after"])
    pd.testing.assert_frame_equal(found, written)
