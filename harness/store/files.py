"""Results on disk: results/<time>-<variant>-<id>/ with manifest.json, blocks/000/*.parquet, summary.json.

A block's folder is written under another name and renamed when whole, so a run that was killed keeps every
finished block and no half of one. JSON and parquet only, nothing that runs code when it is read.

What is left of a finished run may be less, to be small: its manifest says which tables of the blocks were
left out, and values.parquet has what was made of each block from them.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common import names

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 3  # 1 and 2 had other names: common/names.py
Read = TypeVar("Read")
PARTIAL = ".partial"
PROFILE = "profile"  # what a profile's folder says it is, in PROFILE_FILE
PROFILE_FILE = "profile.json"
SWEEP_FILE = "sweep.json"  # what makes a folder of runs a sweep; see plan/grid.py
FLOORS = "floors"  # beside the folders of runs: what equal arms show (analysis/noise_floor.py)
EXPERIMENT_FILE = "experiment.json"  # the same of an experiment; see studies/experiment.py
EVALUATION_FILE = "evaluation.json"
BISECTION_FILE = "bisect.json"
SUMMARY_FILE = "summary.json"  # of a run; of an experiment, where its runs have no blocks any more


class StoreError(api.BadFile):
    """A results folder can't be read or resumed; one line says which file and why."""


class WriteFailed(api.EngineError):
    """A result can't be written, as where the disk is full: the run has failed (exit code 4)."""


def floors_of(run: Path) -> Path:
    """Where the noise floors of a run are kept: beside it, or beside the sweep that it is a point of."""
    inside = (run.parent / SWEEP_FILE).exists()
    return (run.parent.parent if inside else run.parent) / FLOORS


def prepare(results: Path) -> None:
    """Make the folder that results are to go to, unless it is there. Raises BadSetting."""
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise api.BadSetting(
            f"can't write results to {results}: {reason_of(error)}; choose another --out"
        ) from error


def create_within(results: Path, name: str, now: datetime) -> Path:
    """As `create`, where something was measured into `results` already. Raises WriteFailed."""
    folder = results / f"{now:%Y%m%d-%H%M%S}-{name.replace('/', '-')}-{secrets.token_hex(2)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise WriteFailed(f"can't write results to {results}: {reason_of(error)}") from error
    return folder


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write or replace summary.json, the object that `--format json` prints, in the folder of its run."""
    if not folder.is_dir():
        raise WriteFailed(f"can't write {folder / SUMMARY_FILE}: the folder was removed")
    write_json(folder / SUMMARY_FILE, summary)


def read_summary(folder: Path) -> dict[str, Any]:
    """What `write_summary` wrote. Raises StoreError."""
    return read_json(folder / SUMMARY_FILE, dict[str, Any], "a finished run")


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file and its folder, whole or not at all. Raises WriteFailed."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write or replace a file with a line of JSON for each value, whole or not at all. Raises WriteFailed."""
    write_bytes(path, b"".join(msgspec.json.encode(each) + b"\n" for each in values))


def read_json_lines(path: Path, kind: type[Read]) -> list[Read]:
    """What `write_json_lines` wrote, each a struct with a schema_version; nothing where there is no such file
    yet. Raises StoreError where it can't be read, or a line is damaged or of a newer schema."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"can't read {path}: {reason_of(error)}") from error
    return [decoded(f"line {number} of {path}", line, kind) for number, line in enumerate(lines, 1)]


def read_json(path: Path, kind: type[Read], what: str) -> Read:
    """What `write_json` wrote, a struct with a schema_version. Raises StoreError where the file is missing
    (its folder is not `what`), damaged, or of a newer schema."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{path.parent} is not {what}: it has no {path.name}") from error
    except OSError as error:
        raise StoreError(f"{path.parent} is not {what}: {path.name}: {reason_of(error)}") from error
    return decoded(str(path), text, kind)


def decoded(where: str, text: bytes, kind: type[Read]) -> Read:
    """A struct with a schema_version from its JSON; `where` that stands. Raises StoreError."""
    text = text.removeprefix(codecs.BOM_UTF8)  # of an editor on Windows: plans and histories are kept in git
    try:
        schema = msgspec.json.decode(text, type=_Versioned).schema_version
        if schema < SCHEMA_VERSION:
            text = names.of_today(text.decode()).encode()
        if schema > SCHEMA_VERSION:
            raise StoreError(
                f"{where} has schema version {schema}, newer than {SCHEMA_VERSION}, the newest this program "
                "knows; update it"
            )
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{where} is damaged or was edited: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file and its folder, whole or not at all. Raises WriteFailed."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file and its folder, whole or not at all. Raises WriteFailed."""
    with written_whole(path) as partial:
        partial.write_bytes(content)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The file to write instead, which replaces `path` only once it was written to its end."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise WriteFailed(f"can't write {path}: {reason_of(error)}") from error


def append_step_summary(text: str, environment: Mapping[str, str]) -> None:
    """On GitHub, show a text beside the step that runs this. Raises WriteFailed."""
    if path := environment.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise WriteFailed(f"can't write {path}: {reason_of(error)}") from error


class _Versioned(msgspec.Struct):
    schema_version: int


# ---------------------------------------------------------------------------------------------------------
# Blocks


def to_parquet(where: Path | BinaryIO, table: pd.DataFrame) -> None:
    """Stamps hardly repeat but grow steadily: dictionaries of them make a block twice as large, differences a
    tenth smaller. Those in lists stay as they are: of a batch, many requests have the very same. A block has
    few rows, so that what parquet adds to a column (its statistics, the schema in two more forms) is most of
    a small table, and nothing reads it."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = pa.Table.from_pandas(table, preserve_index=False)
    parquet.write_table(
        rows,
        where,
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        column_encoding={
            column.name: "DELTA_BINARY_PACKED" for column in rows.schema if column.type == pa.int64()
        },
        write_statistics=False,
        store_schema=False,
    )


def reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def digest(path: str) -> str:
    """BLAKE2b-128 of a file, hexadecimal. Raises BadFile where it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise api.BadFile(f"cannot read {path}: {error.strerror}") from None
