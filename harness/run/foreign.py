"""Files of the gated project that an arm ran, and that are not of the tree of its ref: from the user's
checkout, by an editable install or PYTHONPATH, or from another copy that is installed.

Of the project is what lies in the repository of the ref, other than in a virtual environment, and every
module that the tree, too, has something for. Both arms would run that file, whatever their refs say.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.run.hosts import Trees, search_path
from overlap_bench.harness.run.overlay import digest
from overlap_bench.harness.run.watch import Seen
from overlap_bench.harness.run.worktrees import ignored
from overlap_bench.harness.store.manifest import listed

SHOWN = 5
PYTHON = (".py", ".pyc")
PACKAGE = Path(overlap_bench.__file__).resolve().parent
OURS = PACKAGE.parent  # where this project is installed, or checked out
# In a checkout the package links to two folders; where it is installed, two modules have their names.
OUR_FILES = [PACKAGE, *((PACKAGE / each).resolve() for each in ("engines", "harness"))]
OUR_FILES += [OURS / f"{each}.py" for each in ("engines", "harness")]
APART = "install each ref into an interpreter of its own: --before python=... --after python=..."


def check(design: Design, trees: Trees, seen: Mapping[str, Seen]) -> None:
    """Raises BadSetting, with their names, where an arm that has a ref ran such files, or where the other arm
    ran another copy of one that was laid over the ref's tree."""
    for arm in design.arms:
        if arm.ref is None:
            _check_same(arm, trees, seen[arm.name])
            continue
        repository = Path(arm.ref.repository)
        found = loaded_from_elsewhere(seen[arm.name], trees.places[arm.name], repository)
        source = [each for each in found if each.suffix in PYTHON and not ignored(repository, each)]
        if source:
            raise api.BadSetting(
                f"{arm.name} was to run the code of {arm.ref.name}, and ran files of the project from "
                f"elsewhere: {listed([*map(str, source)], SHOWN)}. Both arms would run these. The cause can "
                "be an editable install, PYTHONPATH, or a file or submodule that the tree of the ref lacks: "
                f"commit it, or {APART}"
            )
        if found:
            raise api.BadSetting(
                f"{arm.name} ran files of the project that a build made and {arm.ref.name} does not have: "
                f"{listed([*map(str, found)], SHOWN)}. If both arms may run the same ones, name them by "
                f"--overlay, such as --overlay '{found[0].name}'; else {APART}"
            )


def _check_same(arm: Arm, trees: Trees, seen: Seen) -> None:
    for each in trees.overlaid:
        ending = f"/{each.file.removeprefix('src/')}"
        for file in (*seen.compiled, *seen.modules):
            if file.endswith(ending) and digest(Path(file)) != each.sha256:
                raise api.BadSetting(
                    f"--overlay {each.file}: {arm.name} ran {file}, which is not the file of your checkout "
                    f"that the other arm got; {APART}"
                )


def loaded_from_elsewhere(seen: Seen, tree: Path, repository: Path) -> list[Path]:
    """Files of the project that an arm loaded from outside its tree, sorted."""
    tree, repository = tree.resolve(), repository.resolve()
    found = []
    for file, name in {**dict.fromkeys(seen.compiled, ""), **seen.modules}.items():
        path = Path(file)
        if path.is_relative_to(tree) or not path.is_absolute() or _is_ours(path, repository):
            continue
        if _lies_in(path, repository, seen.prefixes) or (name and _has(tree, name)):
            found.append(path)
    return sorted(found)


def _is_ours(path: Path, repository: Path) -> bool:
    """Whether it belongs to this harness, and that is not what is gated."""
    return repository != OURS and any(path.is_relative_to(each) for each in OUR_FILES)


def _lies_in(path: Path, repository: Path, prefixes: Collection[str]) -> bool:
    """Whether a file is the repository's own, and not of an environment that lies in it."""
    if not path.is_relative_to(repository):
        return False
    inner = [Path(each) for each in prefixes if Path(each).is_relative_to(repository)]
    installed = {"site-packages", "dist-packages"} & {*path.relative_to(repository).parts}
    return not installed and not any(path.is_relative_to(each) for each in inner if each != repository)


def _has(tree: Path, module: str) -> bool:
    """Whether the tree has something for a module of that name: its package, or where packages have no
    __init__.py, as those of a namespace, its folder or its file."""
    parts = module.split(".")
    return parts[0] not in sys.stdlib_module_names and any(
        _found(root, parts) for root in map(Path, search_path(tree))
    )


def _found(root: Path, parts: Sequence[str]) -> bool:
    for place, part in enumerate(parts):
        here = root / part
        if here.with_suffix(".py").is_file():
            return True
        if not here.is_dir():
            return False
        if (here / "__init__.py").is_file():
            return True
        inside = any(here.iterdir())
        if not inside:  # a submodule that was not checked out
            return True
        if place == len(parts) - 1:
            return next(here.rglob("*.py"), None) is not None
        root = here
    return False
