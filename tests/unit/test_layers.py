"""The folders show the layers: imports in harness/ run downward, and no file is part of a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from overlap_bench import harness

NAME = "overlap_bench.harness"
ROOT = Path(harness.__file__).resolve().parent
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
    ".".join((NAME, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imports(module: str) -> Iterator[str]:
    """The modules of harness/ that a module imports, wherever in it the import stands."""
    yield from imported_by(ast.parse(MODULES[module].read_text()))


def imported_by(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{NAME}."):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)


def package(module: str) -> str:
    return (*module.split("."), "")[2]


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


def test_a_run_imports_what_a_run_needs() -> None:
    """Not what shows other results, nor what only refs, patches, clusters, traces or gates need."""
    found: set[str] = set()
    new = {f"{NAME}.{each}" for each in ("cli.app", "cli.measure", "cli.progress", "report.formats")}
    new.add(f"{NAME}.studies.measure")
    while new:
        found |= new
        new = {other for module in new for other in at_once(module)} - found
    assert len(found) <= 84, sorted(found)


def at_once(module: str) -> Iterator[str]:
    """The modules that it imports as it is imported itself."""
    body = ast.parse(MODULES[module].read_text()).body
    yield from imported_by(ast.Module([each for each in body if isinstance(each, ast.ImportFrom)], []))


def test_what_is_installed_calls_itself_by_a_name_that_no_project_has() -> None:
    """A project that is measured may have packages called engines and harness."""
    short = [
        f"{path.relative_to(ROOT.parent)}: {name}"
        for folder in ("engines", "harness", "overlap_bench")
        for path in (ROOT.parent / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in named(node)
        if re.fullmatch(r"(engines|harness)(\.\w+)*[.:]?\w*", name)
    ]
    assert short == []


def named(node: ast.AST) -> Iterator[str]:
    """The modules that a piece of code imports, or names in a string with a dot, as for `python -m`."""
    match node:
        case ast.Import():
            yield from (each.name for each in node.names)
        case ast.ImportFrom(level=0):
            yield str(node.module)
        case ast.Constant(value=str(text)) if "." in text:
            yield text


def test_what_takes_half_a_second_to_import_is_imported_where_it_is_used() -> None:
    """By the few commands that need it: harness/stats/distributions.py has what all need."""
    at_once = [
        module
        for module, path in MODULES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module in {"scipy", "scipy.stats", "scipy.optimize"}
    ]
    assert at_once == []
