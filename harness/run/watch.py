"""Boots that are thrown away, looked at: which files the processes of an arm load, and which of the functions
that differ between the arms they run, as they boot and in a round. No process of a measured round is watched.

Each Python that an arm starts runs watcher/sitecustomize.py first, which writes what it sees into a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec

from overlap_bench.harness.plan.design import Arm, Design, started_by
from overlap_bench.harness.plan.patch import packages_of
from overlap_bench.harness.run import watcher
from overlap_bench.harness.run.differing import File, Unit, differing, equal, files_in
from overlap_bench.harness.run.hosts import IMPORT_S, ROLES, environment, search_path, spec_of
from overlap_bench.harness.store.manifest import ChangedCode

# The second line of a script whose interpreter's path has a space.
PIPS = re.compile(r"'''exec' (\"[^\"]+\"|\S+)")
BOOTING, SERVING, OVER = 0, 1, 2  # as in watcher/sitecustomize.py
FOLDER = "BENCH_WATCH"  # in the environment of what is watched
# Where torch loads graphs that it made before: which functions are in them, nobody says.
LOADS_GRAPHS = ("torch/_dynamo/aot_compile.py", "deserialize")
LOCATE = """
import json, sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    try:
        spec = find_spec(name)
    except Exception:
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin])
    print(json.dumps([name, [each for each in places if each]]))
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the processes of an arm did. Code and files by when: SERVING where it was in a round."""

    pids: set[int] = field(default_factory=set)
    prefixes: set[str] = field(default_factory=set)  # where their Pythons are installed
    modules: dict[str, str] = field(default_factory=dict)  # file → the module's name
    compiled: set[str] = field(default_factory=set)  # files
    data: dict[str, int] = field(default_factory=dict)  # file → phase
    code: dict[tuple[str, str, int], int] = field(default_factory=dict)  # file, name, line → phase
    traced: set[tuple[str, str, int]] = field(default_factory=set)  # the same, of what is in graphs
    failures: list[str] = field(default_factory=list)  # of the watcher: more may have run than is here

    @classmethod
    def read(cls, folder: Path) -> Seen:
        """From what the processes wrote; one that was killed may have left half a line."""
        seen = cls()
        for log in folder.glob("*.jsonl"):
            for line in log.read_bytes().splitlines():
                try:
                    seen._add(msgspec.json.decode(line))
                except (msgspec.DecodeError, TypeError, ValueError):
                    continue
        return seen

    def _add(self, line: list[str | int]) -> None:
        match line:
            case ["process", int(pid), str(prefix)]:
                self.pids.add(pid)
                self.prefixes.add(prefix)
            case ["module", str(name), str(file)]:
                self.modules[file] = name
            case ["failed", str(error)]:
                self.failures.append(error)
            case ["compiled", str(file)]:
                self.compiled.add(file)
            case ["data", int(phase), str(file)]:
                self.data[file] = max(phase, self.data.get(file, 0))
            case ["traced", str(file), int(begins), str(name)]:
                self.traced.add((file, name, begins))
            case ["code", int(phase), str(file), int(begins), str(name)]:
                self.code[file, name, begins] = max(phase, self.code.get((file, name, begins), 0))

    def ran(self, path: Path | None, unit: Unit) -> int | None:
        """When a unit of that file ran; None: never."""
        if path is None:
            return None
        file = os.path.realpath(path)
        if unit.kind == "module":
            found = [
                when for (there, name, _), when in self.code.items() if (there, name) == (file, "<module>")
            ]
        else:
            found = [
                self.code[file, unit.code_name, line]
                for line in unit.lines
                if (file, unit.code_name, line) in self.code
            ]
        return max(found, default=None)

    def used(self, path: Path | None) -> bool:
        """Whether a file that is no Python was loaded or opened, or one that is, run."""
        if path is None:
            return False
        file = os.path.realpath(path)
        return file in self.data or file in self.compiled or any(there == file for there, _, _ in self.code)

    def compiled_by_torch(self, path: Path | None, unit: Unit) -> bool:
        """Whether a unit of that file may run in a graph, which nobody can see."""
        file, function = LOADS_GRAPHS
        if any(there.endswith(file) and name == function for there, name, _ in self.code):
            return True
        real = "" if path is None else os.path.realpath(path)
        return any((real, unit.code_name, line) in self.traced for line in unit.lines)


class Watch:
    """Watches the arms of a design in one boot. `trees`: by the arm's name, the tree of its ref. Its files
    are in `room`."""

    def __init__(self, design: Design, trees: Mapping[str, Path], room: Path) -> None:
        self._folders = {arm.name: room / f"watched-{number}" for number, arm in enumerate(design.arms)}
        before, after = roots_of(design.arms, trees)
        self._packages = [name for name in before if name]
        self._files = differing(files_in(before), files_in(after))
        self._compared = bool(before)
        for side, folder in enumerate(self._folders.values()):
            folder.mkdir()
            (folder / "phase").write_bytes(bytes([BOOTING]))
            paths = [
                (each.units is not None or each.name.endswith(".py"), os.path.realpath(path))
                for each in self._files
                if (path := each.paths[side]) is not None
            ]
            asked = {
                "code": [path for is_code, path in paths if is_code],
                "data": [path for is_code, path in paths if not is_code],
                "endings": [LOADS_GRAPHS[0]],
            }
            (folder / "asked.json").write_bytes(msgspec.json.encode(asked))

    def environment(self, arm: str, values: Mapping[str, str]) -> dict[str, str]:
        """What the arm's processes start with, in place of `values`."""
        first = str(Path(watcher.__file__).parent)
        path = os.pathsep.join(filter(None, (first, values.get("PYTHONPATH"))))
        return {**values, "PYTHONPATH": path, FOLDER: str(self._folders[arm])}

    def phase(self, now: int) -> None:
        """Tell every process what is going on: BOOTING, SERVING, OVER."""
        for folder in self._folders.values():
            with (folder / "phase").open("r+b") as file:  # in place: they have it mapped
                file.write(bytes([now]))

    def seen(self) -> dict[str, Seen]:
        return {name: Seen.read(folder) for name, folder in self._folders.items()}

    def changed_code(self, seen: Mapping[str, Seen], pids: Mapping[str, Mapping[str, int]]) -> ChangedCode:
        """What ran of the code that differs. `pids`: by arm, those of its engine, by role."""
        blind = [
            f"the {ROLES.get(role, role)} of {arm} could not be watched"
            for arm, roles in pids.items()
            for role, pid in roles.items()
            if pid not in seen[arm].pids
        ]
        if not self._compared:
            blind.append("their interpreters found no package of both arms, so nothing was compared")
        blind += [
            f"a part of what {arm} ran could not be watched ({each.failures[0]})"
            for arm, each in seen.items()
            if each.failures
        ]
        before, after = seen.values()
        found = changed_code(self._files, before, after, self._packages, blind)
        return msgspec.structs.replace(found, digest=self._digest())

    def _digest(self) -> str:
        """The functions and classes that differ, without comments and docstrings: a run that is resumed must
        go on with the same. Module level and other files are left out: engines write there."""
        seen = blake2b(digest_size=8)
        for each in sorted(self._files, key=lambda file: file.name):
            for side in () if each.of_tests else each.units or ():
                units = sorted((unit.name, unit.text) for unit in side)
                seen.update(msgspec.json.encode((each.name, units)))
        return seen.hexdigest()


def changed_code(
    files: Sequence[File], before: Seen, after: Seen, packages: Sequence[str] = (), blind: Sequence[str] = ()
) -> ChangedCode:
    """What of these files ran. What ran as an engine booted, and not in a round, may all the same be what
    rounds use, as a table is, or a constant. But where its file has other code that differs and never ran, as
    a class whose instances nobody asks, it does not count. `packages`: that they are of; `blind`: processes
    that could not be watched, in words."""
    both = (before, after)
    lists: dict[str, list[str]] = {each: [] for each in ("in_rounds", "at_boot", "never", "unseen")}
    other, used = [], []
    functions, counts = 0, False
    for file in files:
        is_used = any(seen.used(path) for seen, path in zip(both, file.paths, strict=True))
        if file.of_tests and not is_used:
            continue
        if file.units is None:
            other.append(file.name)
            used += [file.name] * is_used
            continue
        when: dict[tuple[str, str], int | None] = {}
        unseen = set()
        for seen, path, units in zip(both, file.paths, file.units, strict=True):
            for unit in units:
                key = (unit.kind, unit.told)
                ran = seen.ran(path, unit)
                when[key] = max((each for each in (ran, when.get(key)) if each is not None), default=None)
                if unit.compiled or seen.compiled_by_torch(path, unit):
                    unseen.add(key)
        functions += sum(kind == "function" for kind, _ in when)
        found = {
            key: "in_rounds" if ran == SERVING else "at_boot" if ran is not None
            else "unseen" if key in unseen else "never"
            for key, ran in when.items()
        }  # fmt: skip
        for (_, told), where in found.items():
            lists[where].append(f"{file.name}: {told}")
        whole = "never" not in found.values()
        counts |= any(
            where in ("in_rounds", "unseen") or (where == "at_boot" and (whole or kind == "module"))
            for (kind, _), where in found.items()
        )
    return ChangedCode(
        packages=[*packages],
        functions=functions,
        **lists,
        other=other,
        used=used,
        besides=_other_packages(before, after, packages) if packages else [],
        unwatched=" and ".join(blind),
        digest="",
        counts=counts or bool(used or blind) or not any(lists.values()),
    )


def _by_name(seen: Seen) -> dict[str, Path]:
    """The file of each module that has one; some run others under their own name."""
    files: dict[str, list[Path]] = {}
    for file, name in seen.modules.items():
        files.setdefault(name, []).append(Path(file))
    return {name: paths[0] for name, paths in files.items() if len(paths) == 1 and name[:2] != "__"}


def _other_packages(before: Seen, after: Seen, packages: Sequence[str]) -> list[str]:
    one, other = (_by_name(each) for each in (before, after))
    found: set[str] = set()
    for name in one.keys() & other.keys():
        known = any(f"{name}.".startswith(f"{each}.") for each in (*packages, *found))
        if not known and not equal(one[name], other[name]):
            found.add(name.partition(".")[0])
    return sorted(found)


def roots_of(arms: Sequence[Arm], trees: Mapping[str, Path]) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """Where the packages to be compared are, of the before and of the after arm: those that are found in
    both."""
    if len(trees) == len(arms):
        before, after = ({"": trees[arm.name]} for arm in arms)
        return before, after
    names = packages_of(spec_of(arms[0]), arms[0].python, arms[0].toggles)
    if trees:
        (tree,) = trees.values()
        names = [*top_level(tree)]
    found = [top_level(trees[arm.name]) if arm.name in trees else located(arm, names) for arm in arms]
    both = [name for name in names if all(name in each for each in found)]
    before, after = ({name: each[name] for name in both} for each in found)
    return before, after


def top_level(tree: Path) -> dict[str, Path]:
    """What Python can import of a tree, by name: modules, and folders with Python in them. An empty folder is
    a submodule's that was not checked out, and may be one too."""
    found: dict[str, Path] = {}
    for root in map(Path, search_path(tree)):
        for each in sorted(root.iterdir()):
            name = each.name.partition(".")[0]
            if not name.isidentifier() or name in found:
                continue
            if each.is_dir():
                inside = any(each.iterdir())
                if each.name == name and (not inside or next(each.rglob("*.py"), None)):
                    found[name] = each
            elif each.suffix in (".py", ".so"):
                found[name] = each
    return found


def _interpreter_of(script: str) -> str | None:
    """The Python that a script such as vllm's names in its first line: by itself, through env, or, as pip
    writes one whose path has a space, by the shell's exec. None where that is another program, which nobody
    may start with Python's arguments."""
    path = shutil.which(script)
    with suppress(OSError), Path(path or script).open("rb") as file:
        first, second = (file.readline().decode(errors="replace") for _ in range(2))
        if not first.startswith("#!"):
            return sys.executable
        words = first[2:].split()
        if words and Path(words[0]).name == "env":
            words = [each for each in words[1:] if each[:1] != "-" and "=" not in each]
        named = PIPS.match(second)
        program = named[1].strip('"') if named else words[0] if words else ""
        found = shutil.which(program)
        return found if found and Path(found).name.startswith(("python", "pypy")) else None
    return sys.executable


def located(arm: Arm, names: Sequence[str]) -> dict[str, Path]:
    """Where the arm's interpreter finds these, those that it has. Nothing is imported."""
    python, served = started_by(arm.python, arm.toggles)
    command = [python or sys.executable, "-c", LOCATE, *names]
    if served and "python" not in Path(command[0]).name:
        interpreter = _interpreter_of(command[0])
        if interpreter is None:
            return {}
        command[0] = interpreter
    try:
        done = subprocess.run(
            command,
            env=environment(arm.env, None, "cmd" in arm.toggles),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=IMPORT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in done.stdout.splitlines():
        try:
            name, places = msgspec.json.decode(line, type=tuple[str, list[str]])
        except msgspec.DecodeError:
            continue  # what the interpreter prints as it starts
        if places and Path(places[0]).exists():
            found[name] = Path(places[0])
    return found
