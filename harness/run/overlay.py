"""Compiled and generated files that no ref has, laid over the tree of each: both arms run the same ones. They
are of the checkout, as --overlay says; or, for an engine that drives a package (vLLM), of the interpreter
that has it installed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.run import worktrees
from overlap_bench.harness.run.hosts import Trees, driven, spec_of
from overlap_bench.harness.run.watch import located
from overlap_bench.harness.store.manifest import Overlaid

NOT_THE_PROJECTS = {"site-packages", ".git"}  # folders


@contextmanager
def checked_out(design: Design, arms: Sequence[Arm] | None = None) -> Iterator[Trees]:
    """worktrees.checked_out of these arms, or of all, each with the design's overlay, and with what its
    interpreter has built."""
    arms = design.arms if arms is None else arms
    with worktrees.checked_out(arms) as places:
        overlaid = lay(design, places)
        for arm in arms:
            if arm.name in places:
                lay_installed(arm, places[arm.name])
        yield Trees(places, overlaid)


def lay(design: Design, places: Mapping[str, Path]) -> list[Overlaid]:
    """Copy what the patterns name into each tree. Raises BadSetting for a pattern that names nothing, or
    what a ref has."""
    found: dict[Path, Overlaid] = {}
    repositories = {Path(arm.ref.repository) for arm in design.arms if arm.ref is not None}
    for pattern in design.overlay:
        named = False
        for repository in repositories:
            for file in _matching(repository, pattern):
                own = file.relative_to(repository)
                having = [name for name, tree in places.items() if own not in found and (tree / own).exists()]
                if having and len(having) < len(places):
                    raise api.BadSetting(
                        f"--overlay {pattern} names {own}, which the ref of {having[0]} has and the other "
                        "has not: no overlay makes it the same in both arms"
                    )
                if having:
                    continue
                named = True
                for tree in places.values():
                    (tree / own).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, tree / own)
                found[own] = Overlaid(file=own.as_posix(), sha256=digest(file))
        if not named:
            raise api.BadSetting(
                f"--overlay {pattern} names no file of your checkout that the refs lack: it is for what a "
                "build left there, such as vllm/*.so"
            )
    return [*found.values()]


def lay_installed(arm: Arm, tree: Path) -> None:
    """Put into an arm's tree what its interpreter's installation of the package has, the tree lacks, and git
    ignores, as it should what a build made. Links, where they can be: vLLM's are gigabytes."""
    assert arm.ref is not None
    for package in driven(spec_of(arm), tree):
        installed = located(arm, [package.name]).get(package.name)
        if installed is None:
            continue
        lacking = [
            file.relative_to(installed)
            for file in sorted(installed.rglob("*"))
            if file.is_file()
            and "__pycache__" not in file.parts
            and not (package / file.relative_to(installed)).exists()
        ]
        inside = package.relative_to(tree)
        built = worktrees.ignored_of(Path(arm.ref.repository), [inside / each for each in lacking])
        for each in lacking:
            if inside / each in built:
                (package / each).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(installed / each, package / each)
                except OSError:  # another file system, or one without links
                    shutil.copy2(installed / each, package / each)


def check(pattern: str) -> None:
    """Raises BadSetting for a pattern that leads out of the repository."""
    path = PurePath(pattern)
    if not pattern or path.is_absolute() or ".." in path.parts:
        raise api.BadSetting(f"--overlay {pattern} must lead to files in the repository, as vllm/*.so does")


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _matching(repository: Path, pattern: str) -> Iterator[Path]:
    """Files of the checkout, without those of environments in it. A pattern without a slash is looked for in
    every folder."""
    check(pattern)
    for each in sorted(repository.glob(pattern) if "/" in pattern else repository.rglob(pattern)):
        for file in sorted(each.rglob("*")) if each.is_dir() else [each]:
            folders = [one for one in file.parents if one != repository and one.is_relative_to(repository)]
            in_environment = any((folder / "pyvenv.cfg").exists() for folder in folders)
            if file.is_file() and not in_environment and not NOT_THE_PROJECTS & {one.name for one in folders}:
                yield file
