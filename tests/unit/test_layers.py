"""The folders show the layers: imports in harness/ run downward, and no file is part of a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import harness

ROOT = Path(harness.__file__).parent
# The floors, the ground first; packages of one floor know nothing of each other.
FLOORS = (
    {"stats", "common"},
    {"workload"},
    {"trace", "metrics"},
    {"plan"},
    {"store"},
    {"analysis", "run"},
    {"studies", "report", "serve"},
    {"cli"},
)
MODULES = {
    ".".join(("harness", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imports(module: str) -> Iterator[str]:
    """The modules of harness/ that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "harness":
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)


def package(module: str) -> str:
    return (*module.split("."), "")[1]


def test_a_stranger_meets_at_most_sixteen_entries() -> None:
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 16, sorted(entries)


def test_every_package_says_what_it_is_for_and_stands_on_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set.union(*FLOORS)
    for name in packages:
        assert ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text())), name


def test_imports_run_downward() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if package(module) in floor
        and package(other) != package(module)
        and floor.get(package(other), len(FLOORS)) >= floor[package(module)]
    ]
    assert upward == []


def test_no_file_is_part_of_a_circle() -> None:
    graph = {module: {other for other in imports(module) if other != module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"circle: {' -> '.join(error.args[1])}") from None


def test_what_takes_half_a_second_to_import_is_imported_where_it_is_used() -> None:
    """By the few commands that need it: harness/stats/distributions.py has what all need."""
    at_once = [
        module
        for module, path in MODULES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module in {"scipy", "scipy.stats", "scipy.optimize"}
    ]
    assert at_once == []
