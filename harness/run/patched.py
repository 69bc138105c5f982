"""The package of an arm with a diff in it: a copy of links, in which the files that it changes are real ones.
Nothing is written where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common import git
from overlap_bench.harness.plan.design import Arm, Patch
from overlap_bench.harness.plan.patch import commits, unquoted
from overlap_bench.harness.run.hosts import check_interpreter
from overlap_bench.harness.run.watch import located

CACHE = "__pycache__"
FAILED = re.compile(r"(?m)^error: (?:patch failed: )?(?!while searching for:)(.+)")
CHECKED = re.compile(r"(?m)^Checking patch (.+)\.\.\.$")
IMPLIED = ("patch does not apply",)  # what git adds to each place that it names


class Patches:
    """The copies that the arms of a session have, each made once, in `room`."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self._made: dict[str, Path] = {}  # by the arm's name

    def find_first(self, arm: Arm, patch: Patch) -> Arm:
        """The arm, which finds the patched copy of its packages before what is installed. Raises BadSetting
        where the patch does not apply."""
        if arm.name not in self._made:
            check_interpreter(arm)
            packages = located(arm, patch.packages)
            if lacking := [each for each in patch.packages if each not in packages]:
                raise api.BadSetting(
                    f"{arm.name}: {arm.python or sys.executable} has no {' and no '.join(lacking)}, which "
                    f"patch={patch.file} changes"
                )
            self._made[arm.name] = patched(patch, packages, self._room / f"patched-{len(self._made)}")
        inherited = arm.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        path = [str(self._made[arm.name]), *filter(None, [inherited])]
        found = msgspec.structs.replace(arm, env={**arm.env, "PYTHONPATH": os.pathsep.join(path)})
        for name, place in located(found, patch.packages).items():
            if not place.is_relative_to(self._made[arm.name]):  # a server looks in the current folder first
                raise api.BadSetting(
                    f"{arm.name} would run {name} without patch={patch.file}: it finds {place} first; start "
                    "bench in another folder"
                )
        return found


def patched(patch: Patch, packages: Mapping[str, Path], folder: Path) -> Path:
    """`folder`, made and with the packages in it, to be put first on a path. `packages`: by name, the folder
    of each that the diff changes, or the file of a module. Raises BadSetting, with the places, where the diff
    does not apply."""
    if not (why := _apply(patch, packages, folder)):
        return folder
    where = ", ".join(str(each) for each in packages.values())
    if not _apply(patch, packages, folder.with_name(f"{folder.name}-reversed"), "--reverse"):
        raise api.BadSetting(
            f"patch={patch.file} is in {where} already; to measure it, give --before its reverse: git diff -R"
        )
    raise api.BadSetting(f"patch={patch.file} does not apply to {where}: {why}")


def _apply(patch: Patch, packages: Mapping[str, Path], folder: Path, *way: str) -> str:
    """`folder`, made and with the packages in it, and the diff in them, or out of them with `--reverse`. Why
    it does not apply; "" where it does."""
    for name, root in packages.items():
        if root.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(root, folder / root.name)
        else:
            _link(root, folder / name, name, {*patch.files})
    # In a repository of its own: in another one's folder, git would pass over every file, and say nothing.
    git.run("init", "--quiet", where=folder)
    # Not each file by its name, in which brackets would be a pattern's. git writes through no link.
    included = [f"--include={name}{end}" for name in patch.packages for end in ("/*", ".py")]
    asked = ["apply", "--verbose", f"-p{patch.strip}", "--whitespace=nowarn", *included, *way]
    text = folder / "patch.diff"
    for commit, files in reversed([*commits(patch)]) if way else commits(patch):
        with text.open("w", encoding="utf-8", newline="") as file:  # the ends of its lines are the files'
            file.write(commit)
        done = git.run(*asked, text.name, where=folder)
        if done.returncode:
            return f"{_places(done.stderr)}; take the diff against the release that is installed"
        checked = map(unquoted, " => ".join(CHECKED.findall(done.stderr)).split(" => "))
        if passed_over := [*(Counter(files) - Counter(checked))]:  # with success, and no word
            return (
                f"git passes over {', '.join(passed_over[:3])}, which it may read under another name; try "
                "git diff --no-renames main...branch, or git diff in place of diff -ru"
            )
    return ""


def _places(said: str) -> str:
    """The places where a diff failed, as "vllm/envs.py:12", from what git says."""
    found = [each for each in FAILED.findall(said) if not each.endswith(IMPLIED)]
    return ", ".join(dict.fromkeys(found)) or said.strip()


def _link(root: Path, copy: Path, name: str, changed: Set[str]) -> None:
    """`copy`, with the folders of `root`, and a link for each file but those that change."""
    copy.mkdir(parents=True)
    with os.scandir(root) as entries:
        for each in entries:
            own = f"{name}/{each.name}"
            if each.is_dir(follow_symlinks=False):
                if each.name != ".git":
                    _link(Path(each.path), copy / each.name, own, changed)
            elif own in changed:
                shutil.copy(each.path, copy / each.name)
            elif not _compiled_of(name, each.name, changed):
                (copy / each.name).symlink_to(os.path.abspath(each.path))


def _compiled_of(folder: str, name: str, changed: Set[str]) -> bool:
    above, _, last = folder.rpartition("/")
    return last == CACHE and f"{above}/{name.partition('.')[0]}.py" in changed
