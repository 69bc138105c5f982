"""A run's folder and its manifest.json: what it was meant to be and where it ran, written before its first
block; a run is begun here, or opened to go on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common import machine
from overlap_bench.harness.common.machine import Code, Machine
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.plan.design import Design, check_metrics, orders
from overlap_bench.harness.store import trust
from overlap_bench.harness.store.files import (
    BISECTION_FILE,
    EVALUATION_FILE,
    EXPERIMENT_FILE,
    PROFILE_FILE,
    SCHEMA_VERSION,
    SUMMARY_FILE,
    SWEEP_FILE,
    StoreError,
    WriteFailed,
    create_within,
    digest,
    prepare,
    read_json,
    reason_of,
    write_json,
)
from overlap_bench.harness.store.tables import TABLES, finished_blocks
from overlap_bench.harness.store.trust import Admit
from overlap_bench.harness.workload.arrivals import ARRIVALS
from overlap_bench.harness.workload.prompts import ENGLISH, english_digest
from overlap_bench.harness.workload.workload import Workload

Run = AbstractContextManager[tuple[Path, "Manifest"]]  # to be measured: its folder is held while inside
NOT_RECORDED = "not recorded"  # of an imported run: what its file does not say
SHOWN = 3  # names of a kind, in a line


class Overlaid(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled or generated file that no ref has, laid over the tree of each."""

    file: str  # in the repository
    sha256: str


class ChangedCode(msgspec.Struct, frozen=True, kw_only=True):
    """The Python code that differs, as "vllm/v1/core/block_pool.py: BlockPool.touch", by when it ran.
    `other`: files that differ and are no Python, `used` those of them that were loaded or opened."""

    packages: list[str] = []  # that were compared; none: the trees of two refs
    functions: int  # that differ
    in_rounds: list[str]
    at_boot: list[str]  # and not in a round
    never: list[str]
    unseen: list[str]  # compiled, and so run without Python
    other: list[str]
    used: list[str]
    besides: list[str] = []  # other packages that both arms loaded, in two versions
    unwatched: str = ""  # processes that could not be seen, in words
    digest: str = ""  # of the functions and classes that differ
    counts: bool = True  # whether what differs ran, or may have: else there is nothing to judge

    @property
    def never_ran(self) -> str:
        """Why there is nothing to judge, in words."""
        what = f"none of the {self.functions} functions that differ ran in a round"
        if self.functions < 2:
            what = "the code that differs ran in no round"
        booted = f"; ran only as the engine booted: {listed(self.at_boot)}" if self.at_boot else ""
        return f"{what}: {listed(self.never)}{booted}"


def listed(names: list[str], most: int = SHOWN) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run comes from that another tool measured: `bench import`."""

    tool: str  # "vllm bench serve"
    version: str  # "" where its files do not say
    measured: list[str]  # when, for each block, as the file says it; "" where it does not
    asked: dict[str, str]  # the workload, in the tool's own words
    lacks: list[str]  # what its files do not say
    differs: list[str]  # what was converted although its definition is not quite ours
    fresh_boots: bool  # whoever imported it said that each file is of a server started anew


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """Notes that a block was measured once more, in its own order, as its node or what ran there failed."""

    block: int
    reason: str


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
    files: dict[str, str] = {}  # of the workload: a digest of each, by its path, or of prompts by ENGLISH
    descriptions: dict[str, api.Description] = {}
    segment_batch: int | None = None  # requests of a segment, where the discarded block had to tell
    plant_ns: int | None = None  # the planted delay, sized in the discarded block
    changed_code: ChangedCode | None = None  # that the arms differ by; None: they run the same installation
    overlaid: list[Overlaid] = []
    nodes: dict[str, Machine] = {}  # of a cluster, by name, that measured a block; none: this machine did
    repeats: list[Repeat] = []
    resumed_after: list[int] = []  # blocks that there were each time it was gone on with
    blocks_in_time: int | None = None  # how many there are, where --max-minutes left no time for another
    blocks_foreseen: int | None = None  # and how many there were to be, by the first boots
    imported: Imported | None = None  # None: this program measured it
    left_out: list[str] = []  # tables that its blocks no longer have; see check_whole
    signature: str = ""  # that its design was asked for on this machine; see store/trust.py

    @property
    def promises_outputs(self) -> bool:
        """Whether equal prompts must have equal outputs. Not where tokens are sampled: the last digit of a
        logit, which depends on the batch, can move the border that a draw is compared with."""
        greedy = self.design.workload.temperature == 0
        return greedy and all(each.deterministic for each in self.descriptions.values())

    @property
    def measured_on(self) -> Machine:
        """The machine that the blocks are of; of several nodes, which warnings compare, the first."""
        return next(iter(self.nodes.values()), self.machine)

    @property
    def resumed_by(self) -> str:
        return "bench run" if self.design.factorial is None else "bench factorial"

    @property
    def drawn(self) -> list[list[int]]:
        """The order of each block: its arms by number, the first to run first."""
        given = range(len(self.design.arms))
        return self.orders or [[*given[::-1]] if turned else [*given] for turned in self.after_first]

    @property
    def never_ran(self) -> str | None:
        """Why there is nothing to judge, where none of the code that differs between the arms ran."""
        changed = self.changed_code
        return None if changed is None or changed.counts else changed.never_ran

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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace manifest.json, whole or not at all."""
    write_json(folder / "manifest.json", manifest)


def check_whole(folder: Path, manifest: Manifest) -> None:
    """Raises StoreError for a run of which tables were left out, where its blocks are needed: what could be
    made from the others would not be what the run found."""
    if manifest.left_out:
        raise StoreError(
            f"{folder} was stored without {_and(manifest.left_out)}, which this needs; bench compare and "
            "report show what it found, bench rerun measures it again"
        )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def without_places(described: api.Description) -> api.Description:
    """What an engine said of itself, to be stored: where its tokenizer lies on this machine is nothing to
    keep. One that ships with a package is named by it, `engines.presets/tokenizer.json`; another one
    goes with the model's name."""
    path = Path(str(described.model.get("tokenizer", "")))
    if not path.is_absolute():
        return described
    model = {name: value for name, value in described.model.items() if name != "tokenizer"}
    if package := _package(path.parent).removeprefix("overlap_bench."):
        model["tokenizer"] = f"{package}/{path.name}"
    return msgspec.structs.replace(described, model=model)


def _package(folder: Path) -> str:
    """The dotted name of the package that a folder is, "" where it is none."""
    inside = (folder / "__init__.py").exists()
    return f"{_package(folder.parent)}.{folder.name}".lstrip(".") if inside else ""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run. Raises StoreError for no run folder, one of something else, a newer schema, or a
    damaged file."""
    of_something_else = {
        PROFILE_FILE: "a profile, not a run: times taken while profiling are not measurements",
        SWEEP_FILE: f"a sweep: each folder in it is a run; bench sweep {folder} shows all",
        EXPERIMENT_FILE: "an experiment: each folder in it is a run; bench experiment show "
        f"{folder} shows all",
        EVALUATION_FILE: "an evaluation, not a run: nothing in it was timed",
        BISECTION_FILE: f"a bisection: bench bisect {folder} shows it",
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
    """Whether it has an order for each block, what every arm said of itself, or nothing yet, and a workload
    that there is."""
    design, described = manifest.design, manifest.descriptions
    drawn = {len(manifest.after_first), len(manifest.orders) or design.blocks}
    whole = all(
        set(api.DEVICE_KEYS) <= each.device.keys() and set(api.MODEL_KEYS) <= each.model.keys()
        for each in described.values()
    )
    all_of_them = not described or {arm.name for arm in design.arms} <= described.keys()
    known = set(manifest.left_out) <= set(TABLES) and design.workload.arrival in ARRIVALS
    sound = whole and all_of_them and known and is_moment(manifest.created)
    return bool(design.arms) and drawn == {design.blocks} and sound


def is_moment(created: str) -> bool:
    """Whether it says when, and in which zone: others are subtracted from it."""
    try:
        return datetime.fromisoformat(created).tzinfo is not None
    except ValueError:
        return False


def check_resume(stored: Manifest, now: Manifest) -> None:
    """Raises StoreError, naming the difference, unless `now` is the same commit, settings and machine."""
    if stored.left_out:  # its blocks would be taken for missing, and measured again
        raise StoreError(
            f"{stored.run} is finished, and was stored without {_and(stored.left_out)}; bench rerun measures "
            "it again"
        )
    own = "settings that are not its own"
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("another commit", stored.code, now.code),
        (own, stored.design, as_sized(now.design, stored.design)),
        ("another machine", stored.machine, now.machine),
        ("other versions", stored.versions, now.versions),
        ("other files", stored.files, now.files),
    )
    for what, old, new in pairs:
        if found := difference(old, new):
            # With *k a pace is another one each time that it is asked for.
            tries = "leave all options but --resume out, or " if what == own else ""
            raise StoreError(f"can't resume {stored.run} on {what}: {found}; {tries}start a fresh run")


def as_sized(asked: Design, stored: Design) -> Design:
    """What was asked for, as large as it was stored, where its first boots say how large it is."""
    if asked.aim_s is None:
        return asked
    return msgspec.structs.replace(asked, rounds=stored.rounds, segments=stored.segments, aim_s=stored.aim_s)


def described_here(design: Design, run: str, now: datetime, lot: str) -> Manifest:
    """The manifest of a run that starts here and now; `lot` is what the order of its arms is drawn by."""
    arms = len(design.arms)
    drawn = [orders(lot, block, arms, design.fewest) for block in range(design.blocks)]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        run=run,
        created=now.isoformat(timespec="seconds"),
        design=design,
        after_first=[arms > 1 and order.index(1) < order.index(0) for order in drawn],
        orders=drawn if arms > 2 else [],
        machine=machine.fingerprint(),
        code=machine.code(),
        versions=machine.versions(),
        files=_digests(design.workload),
    )


def _digests(workload: Workload) -> dict[str, str]:
    """The digests of all that a workload is made of and that is not in its settings."""
    found = {path: digest(path) for path in workload.files}
    if workload.of_python:
        found[ENGLISH] = english_digest()
    return found


def check_same_data(stored: Manifest) -> None:
    """Raises StoreError unless what the run's workload is made of is still the same here: its requests would
    be others."""
    for name, found in _digests(stored.design.workload).items():
        if stored.files.get(name, found) == found:
            continue
        if name == ENGLISH:
            here, there = machine.versions()["python"], stored.versions.get("python", "another version")
            raise StoreError(
                f"can't measure {stored.run} again with Python {here}: its prompts, `{ENGLISH}`, are "
                f"another documentation, that of Python {there}; use that one, or start a fresh run"
            )
        raise StoreError(
            f"can't measure {stored.run} again: {name} has changed since; bring back the file as it was, or "
            "start a fresh run"
        )


def signed(manifest: Manifest) -> Manifest:
    """A manifest whose design was asked for here. That stays true however often it is rewritten, but for the
    sizes that the first boots gave it: see sign_anew."""
    return msgspec.structs.replace(manifest, signature=trust.signature([manifest.design]))


def sign_anew(before: Manifest, sized: Manifest) -> Manifest:
    """The manifest that first boots made of `before`, signed anew if `before` was signed here and only the
    size is another: a node of a cluster could send any design."""
    own = sized.design == as_sized(before.design, sized.design)
    return signed(sized) if own and trust.holds([before.design], before.signature) else sized


def create(results: Path, name: str, now: datetime) -> Path:
    """A new, empty folder under `results`, for a run, or for another kind of result, whose `name` begins with
    its kind. A stranger's manifest may bring the name: it can't lead elsewhere. Raises BadSetting where that
    can't be written: nothing was measured yet."""
    prepare(results)
    try:
        return create_within(results, name, now)
    except WriteFailed as error:
        raise api.BadSetting(f"{error}; choose another --out") from error


def discard_if_empty(folder: Path) -> bool:
    """Remove a run folder that holds no finished block; whether it did so."""
    if finished_blocks(folder):
        return False
    discard(folder)
    return True


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole_or_none(results: Path, name: str) -> Iterator[tuple[Path, datetime]]:
    """A folder that `create` makes, and when it did; what ends in between leaves none."""
    now = datetime.now().astimezone()
    folder = create(results, name, now)
    try:
        yield folder, now
    except BaseException:
        discard(folder)
        raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A run's folder, locked for this process: two that measured its blocks at the same time would mix them.
    Raises StoreError where another one has it. On a file system without such locks nothing is locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"can't open {folder}: {reason_of(error)}") from error
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


@contextmanager
def fresh(
    design: Design,
    results: Path,
    create: Callable[[Path, str, datetime], Path] = create,
    made_here: bool = True,
) -> Iterator[tuple[Path, Manifest]]:
    """A run in a new folder under `results`, which `create` makes. `made_here`: no stored run of elsewhere
    asked for it. One that ends before its first trial leaves no folder. Raises BadSetting, as `create` does,
    and WriteFailed."""
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now, lot=folder.name)
        manifest = signed(manifest) if made_here else manifest
        write_manifest(folder, manifest)
        with held(folder):
            yield folder, manifest
    finally:
        discard_if_empty(folder)


@contextmanager
def stored(folder: Path, design: Design | None, admit: Admit) -> Iterator[tuple[Path, Manifest]]:
    """A run to go on with; `design` None: as it was asked for, if `admit` allows that. Raises StoreError
    where the commit, the settings, the machine or the versions are others, and as `admit` does."""
    manifest = read_manifest(folder)
    if design is None:  # before anything that it names is looked at
        admit(folder, [manifest.design], manifest.signature)
    now = described_here(design or manifest.design, manifest.run, datetime.now().astimezone(), manifest.run)
    check_resume(manifest, now)
    with held(folder):
        yield folder, note_resumed(folder, manifest)


def note_resumed(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest of a run that goes on, which says after how many trials; written, unless it is done."""
    kept = len(finished_blocks(folder))
    if kept < manifest.design.blocks and not (folder / SUMMARY_FILE).exists():
        manifest = msgspec.structs.replace(manifest, resumed_after=[*manifest.resumed_after, kept])
        write_manifest(folder, manifest)
    return manifest


def run_of(design: Design | None, resume: Path | None, results: Path, admit: Admit, **more: Any) -> Run:
    """A fresh run of `design`; with `resume` that run, to go on with. `more`: as of `fresh`."""
    if resume is not None:
        return stored(resume, design, admit)
    assert design is not None
    return fresh(design, results, **more)


def differences_from(manifest: Manifest) -> list[str]:
    """How here and now differ from where and when a run was measured; a rerun tells."""
    now = described_here(manifest.design, manifest.run, datetime.now().astimezone(), manifest.run)
    pairs = {
        "commit": difference(manifest.code, now.code),
        "machine": difference(manifest.machine, now.machine),
        "versions": difference(manifest.versions, now.versions),
    }
    return [f"different {what}: {found}" for what, found in pairs.items() if found]
