"""What `import engines` and `import harness` give: a project's own packages of these names, or else ours.

Ours are overlap_bench.engines and overlap_bench.harness, and import each other by these names alone. Where
Python finds ours by the short name, it gives way to any other package of that name, wherever on the path
that lies. Where there is none, a module below the short name is the module below overlap_bench, so that no
class is there twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import CodeType, ModuleType

OURS = "overlap_bench"
# By short name what no other package has: one from before there was overlap_bench is ours too.
OLD = {"engines": "api/wire.py", "harness": "cli/exit_codes.py"}
MARK = b"overlap_bench.old_names import give_way"  # in each file of ours that Python finds by a short name


def give_way(name: str) -> None:
    """Called by a file of ours while Python imports it as `name`: put in its place what that is to mean."""
    for spec in _others(name):
        if spec.loader is not None:  # it is no mere folder
            theirs = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(theirs)
            return
    module = sys.modules[name]
    own = import_module(f"{OURS}.{name}")
    module.__dict__.update(__path__=_folders(name), __getattr__=partial(getattr, own))
    sys.meta_path.insert(0, _Below(module))


def hint(error: ImportError) -> str:
    """What to try where it fails for a name that a project and overlap-bench both have; "" otherwise."""
    name = (error.name or "").partition(".")[0]
    if name == OURS and isinstance(error, ModuleNotFoundError):
        return f"; {OURS} is overlap-bench's own package: give one of yours another name"
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in OLD or file is None or _is_ours(name, file):
        return ""
    return f"; {name} is {file} here: import overlap-bench's as {OURS}.{name}, or its names from {OURS}"


def _others(name: str) -> Iterator[ModuleSpec]:
    """All packages and modules of that name that Python would find, but for ours."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = [PathFinder.find_spec(name, [place]) for place in sys.path]
        else:
            found = [finder.find_spec(name, None)]
        yield from (spec for spec in found if spec is not None and not _is_ours(name, spec.origin))


def _folders(name: str) -> list[str]:
    return [each for spec in _others(name) for each in spec.submodule_search_locations or ()]


def _is_ours(name: str, file: str | None) -> bool:
    if file is None:
        return False
    with suppress(OSError):
        return (Path(file).parent / OLD[name]).exists() or MARK in Path(file).read_bytes()
    return False


class _Below(MetaPathFinder, Loader):
    """Finds what is imported below the short name that `top` stands for."""

    def __init__(self, top: ModuleType) -> None:
        self.top = top

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{self.top.__name__}."):
            return None
        parent = sys.modules[name.rpartition(".")[0]]
        if parent is self.top:  # the path may be longer by now
            if theirs := PathFinder.find_spec(name, _folders(parent.__name__)):
                return theirs
        elif getattr(parent.__spec__, "loader", None) is not self and not parent.__name__.startswith(OURS):
            return None
        own = find_spec(f"{OURS}.{name}")
        package = own is not None and own.submodule_search_locations is not None
        return own and ModuleSpec(name, self, origin=own.origin, is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"{OURS}.{module.__name__}")

    def get_code(self, name: str) -> CodeType | None:
        """What `python -m NAME` runs."""
        own = find_spec(f"{OURS}.{name}")
        return own.loader.get_code(own.name)  # type: ignore[union-attr, no-any-return]
