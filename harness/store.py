"""Results on disk: results/<time>-<variant>-<id>/ with manifest.json, blocks/000/*.parquet, summary.json.

A block's folder is written under another name and renamed when whole, so a run that was killed keeps every
finished block and no half of one. JSON and parquet only, nothing that runs code when it is read.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engines import api
from harness.design import Design
from harness.machine import Code, Machine

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
# What a block may hold; a table without rows has no file.
TABLES = ("requests", "steps", "rounds", "work", "divergences")
NEEDED = ("requests", "rounds")
COLUMNS = {  # without which a table can't be what the runner wrote
    "requests": (
        "request", "scheduled_ns", "sent_ns", "submitted_ns", "accepted_ns", "tokenized_ns", "admitted_ns",
        "chunk_ns", "chunk_tokens", "token_ns", "finished_ns", "reason", "prompt_tokens",
        "completion_tokens", "digest", "error",
    ),
    "steps": (
        "step", "kind", "batch", "dropped", "preempted", "device_start_ns", "device_end_ns", "device_ns",
    ),
    "rounds": ("started_ns", "ended_ns"),
    "work": ("kind", "step", "start_ns", "end_ns"),
    "divergences": (
        "request", "before", "agreed", "before_token", "after_token", "before_gap", "after_gap", "near_tie",
    ),
}  # fmt: skip
Read = TypeVar("Read")
PARTIAL = ".partial"
NOT_RECORDED = "not recorded"  # of an imported run: what its file does not say
PROFILE = "profile"  # what a profile's folder says it is, in PROFILE_FILE
PROFILE_FILE = "profile.json"
SWEEP_FILE = "sweep.json"  # what makes a folder of runs a sweep; see sweep.py
EXPERIMENT_FILE = "experiment.json"  # the same of an experiment; see experiment.py
EVALUATION_FILE = "evaluation.json"


class StoreError(api.BadSetting):
    """A results folder can't be written, read or resumed; one line says which file and why."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run comes from that another tool measured: `bench import`."""

    tool: str  # "vllm bench serve"
    version: str  # "" where its files do not say
    measured: list[str]  # when, for each block, as the file says it; "" where it does not
    asked: dict[str, str]  # the workload, in the tool's own words
    lacks: list[str]  # what its files do not say
    differs: list[str]  # what was converted although its definition is not quite ours
    fresh_boots: bool  # whoever imported it said that each file is of a server started anew


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was meant to be and where it ran, written before its first block.

    `after_first` is the order drawn for each block: whether the second arm came before the first. Of more
    than two arms, `orders` has the whole order, by number; without it, a block has all reversed or none.
    `descriptions` (by arm) is what the engines said of themselves once started, added after the discarded
    boot.
    """

    schema_version: int
    run: str  # the folder's name
    created: str  # local time, ISO 8601 with its offset
    design: Design
    after_first: list[bool]
    orders: list[list[int]] = []
    machine: Machine
    code: Code
    versions: dict[str, str]
    files: dict[str, str] = {}  # of the workload: a digest of each, by its path
    descriptions: dict[str, api.Description] = {}
    plant_ns: int | None = None  # the planted delay, sized in the discarded block
    imported: Imported | None = None  # None: this program measured it

    @property
    def promises_outputs(self) -> bool:
        """Whether equal prompts must have equal outputs. Not where tokens are sampled: the last digit of a
        logit, which depends on the batch, can move the border that a draw is compared with."""
        greedy = self.design.workload.temperature == 0
        return greedy and all(each.deterministic for each in self.descriptions.values())

    @property
    def resumed_by(self) -> str:
        """The command that goes on with it by --resume."""
        return "bench run" if self.design.factorial is None else "bench factorial"

    @property
    def drawn(self) -> list[list[int]]:
        """The order of each block: its arms by number, the first to run first."""
        given = range(len(self.design.arms))
        return self.orders or [[*given[::-1]] if turned else [*given] for turned in self.after_first]

    def pair(self, before: str, after: str) -> Manifest:
        """The same run with these two of its arms alone, as a before and an after."""
        arms = {arm.name: arm for arm in self.design.arms}
        names = list(arms)
        first, second = names.index(before), names.index(after)
        return msgspec.structs.replace(
            self,
            design=msgspec.structs.replace(self.design, arms=(arms[before], arms[after])),
            after_first=[order.index(second) < order.index(first) for order in self.drawn],
            orders=[],
            descriptions={name: each for name, each in self.descriptions.items() if name in (before, after)},
        )


def create(results: Path, name: str, now: datetime) -> Path:
    """A new, empty folder under `results`, for a run, or for another kind of result, whose `name` begins with
    its kind. Raises StoreError where that can't be written."""
    folder = results / f"{now:%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"can't write results to {results}: {_why(error)}; choose another --out") from error
    return folder


def discard_if_empty(folder: Path) -> bool:
    """Remove a run folder that holds no finished block; whether it did so."""
    if finished_blocks(folder):
        return False
    discard(folder)
    return True


def discard(folder: Path) -> None:
    """Remove a folder, whatever it holds."""
    shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace manifest.json, whole or not at all."""
    write_json(folder / "manifest.json", manifest)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write or replace summary.json: the object that `--format json` prints."""
    write_json(folder / "summary.json", summary)


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file and its folder, whole or not at all. Raises StoreError."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run. Raises StoreError for no run folder, one of something else, a newer schema, or a
    damaged file."""
    of_something_else = {
        PROFILE_FILE: "a profile, not a run: times taken while profiling are not measurements",
        SWEEP_FILE: f"a sweep: each folder in it is a run; bench sweep {folder} shows all",
        EXPERIMENT_FILE: "an experiment: each folder in it is a run; bench experiment show "
        f"{folder} shows all",
        EVALUATION_FILE: "an evaluation, not a run: nothing in it was timed",
    }
    for name, said in of_something_else.items():
        if (folder / name).exists():
            raise StoreError(f"{folder} is {said}")
    path = folder / "manifest.json"
    manifest = read_json(path, Manifest, "a run folder")
    if not _fits(manifest):
        raise StoreError(f"{path} was edited: its parts do not fit each other")
    return manifest


def _fits(manifest: Manifest) -> bool:
    """Whether it has an order for each block, and what every arm said of itself, or nothing yet."""
    design, described = manifest.design, manifest.descriptions
    drawn = {len(manifest.after_first), len(manifest.orders) or design.blocks}
    whole = all(
        set(api.DEVICE_SAYS) <= each.device.keys() and set(api.MODEL_SAYS) <= each.model.keys()
        for each in described.values()
    )
    all_of_them = not described or {arm.name for arm in design.arms} <= described.keys()
    return bool(design.arms) and drawn == {design.blocks} and whole and all_of_them


def read_json(path: Path, kind: type[Read], what: str) -> Read:
    """What `write_json` wrote, a struct with a schema_version. Raises StoreError where the file is missing
    (its folder is not `what`), damaged, or of a newer schema."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path.parent} is not {what}: {path.name}: {_why(error)}") from error
    try:
        schema = msgspec.json.decode(text, type=_Versioned).schema_version
        if schema > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has schema version {schema}, newer than {SCHEMA_VERSION}, the newest this program "
                "knows; update it"
            )
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise StoreError(f"{path} is damaged or was edited: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file and its folder, whole or not at all. Raises StoreError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file and its folder, whole or not at all. Raises StoreError."""
    with _whole(path) as partial:
        partial.write_bytes(content)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write or replace a parquet file and its folder, whole or not at all. Raises StoreError."""
    with _whole(path) as partial:
        _to_parquet(partial, table)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """The file to write instead, which replaces `path` only once it was written to its end."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(f"can't write {path}: {_why(error)}") from error


def append_text(path: Path, text: str) -> None:
    """Add to a text file. Raises StoreError."""
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(f"can't write {path}: {_why(error)}") from error


class _Versioned(msgspec.Struct):
    schema_version: int


def check_resume(stored: Manifest, now: Manifest) -> None:
    """Raises StoreError, naming the difference, unless `now` is the same commit, settings and machine."""
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("another commit", stored.code, now.code),
        ("settings that are not its own", stored.design, now.design),
        ("another machine", stored.machine, now.machine),
        ("other versions", stored.versions, now.versions),
        ("other files", stored.files, now.files),
    )
    for what, old, new in pairs:
        found = difference(msgspec.to_builtins(old), msgspec.to_builtins(new))
        if found:
            raise StoreError(f"can't resume {stored.run} on {what}: {found}; start a fresh run")


TOLD = 4  # differences, in a line


def difference(old: Any, new: Any, path: str = "") -> str:
    """Where two plain values differ: "arms.0.toggles.h2d was 'pinned', is 'packed'; ...", the first ones and
    how many there are besides; "" where they are equal."""
    found = list(_differences(old, new, path))
    more = [f"and {len(found) - TOLD} more"] if len(found) > TOLD else []
    return "; ".join(found[:TOLD] + more)


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(each for each in new if each not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(left, right, f"{path}.{index}")
    else:
        yield f"{path} was {old!r}, is {new!r}"


# ---------------------------------------------------------------------------------------------------------
# Blocks


def _to_parquet(path: Path, table: pd.DataFrame) -> None:
    """Stamps hardly repeat: dictionaries of them only add to the file, and make a block twice as large."""
    table.to_parquet(path, index=False, compression="zstd", compression_level=3, use_dictionary=False)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A run's folder, locked for this process: two that measured its blocks at the same time would mix them.
    Raises StoreError where another one has it. On a file system without such locks nothing is locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"can't open {folder}: {_why(error)}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{folder} is being measured by another bench: wait for its end") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def write_block(folder: Path, block: int, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write one whole block; what a killed run left of it is dropped first. Raises EngineError, not
    StoreError: by now it is not the fault of what was asked."""
    whole = _block_folder(folder, block)
    partial = whole.with_name(whole.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, table in tables.items():
            if len(table) or name in NEEDED:
                _to_parquet(partial / f"{name}.parquet", table)
        os.rename(partial, whole)
    except OSError as error:
        raise api.EngineError(f"can't write block {block} to {whole}: {_why(error)}") from error


def finished_blocks(folder: Path) -> list[int]:
    """The numbers of the whole blocks, ascending."""
    try:
        names = [each.name for each in (folder / "blocks").iterdir() if each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):  # another error does not mean that there are none
        return []
    return sorted(int(name) for name in names if name.isdigit())


def read_block(folder: Path, block: int) -> dict[str, pd.DataFrame]:
    """Every table of one block; one that has no file has its columns and no rows. Raises StoreError where a
    file is missing, cut short or edited."""
    return {name: read_table(folder, block, name) for name in TABLES}


def read_table(folder: Path, block: int, name: str) -> pd.DataFrame:
    """One table of a block, as read_block gives it. Raises StoreError."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = table_path(folder, block, name)
    if not path.exists() and name not in NEEDED:
        return pd.DataFrame(columns=["arm", "round", *COLUMNS[name]])
    try:
        table = parquet.ParquetFile(path).read().to_pandas()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} is damaged or was edited: {_why(error)}") from error
    missing = next((each for each in ("arm", "round", *COLUMNS[name]) if each not in table), None)
    if missing:
        raise StoreError(f"{path} was edited: it has no column '{missing}'")
    stamps = (each for each in COLUMNS[name] if each.endswith("_ns"))
    strange = next((each for each in stamps if not _integers(table[each])), None)
    if strange:
        raise StoreError(f"{path} was edited: its column '{strange}' holds something other than integers")
    return table


def _integers(column: pd.Series) -> bool:
    """Whether it holds integers, one a row or an array a row."""
    return bool(column.dtype.kind == "i") or all(getattr(each, "dtype", None) == "int64" for each in column)


def table_path(folder: Path, block: int, table: str) -> Path:
    """The file of a block's table."""
    return _block_folder(folder, block) / f"{table}.parquet"


def _block_folder(folder: Path, block: int) -> Path:
    return folder / "blocks" / f"{block:03d}"


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
