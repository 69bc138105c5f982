"""The folders show the layers: imports run downward, and no file is part of a circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.places import ROOT

# What may be imported from each house besides itself.
BELOW = {
    "engines": (),
    "harness": (  # no engine among them
        "engines.api",
        *(
            f"engines.{each}"
            for each in ("machine", "processes", "shortages", "sockets", "timers", "tracing")
        ),
        "engines.preflight",
        "overlap_bench",  # which says where it lies
    ),
    "overlap_bench": ("engines.api", "harness"),  # the public name of the contract, and the command
    "tests": ("engines", "harness", "overlap_bench"),
    "experiments": ("engines", "harness", "tests.support"),
}
# The floors of each house, the ground first; packages of one floor know nothing of each other.
FLOORS: dict[str, tuple[set[str], ...]] = {
    "engines": (
        # The standard library alone, so that any engine's interpreter can have them.
        {"contention", "delay", "errors", "fits", "machine", "processes", "record_pace", "sockets", "timers"},
        {"clock", "shortages"},
        {"pace"},
        {"api"},
        {"baton", "output", "presets", "requests", "tracing"},
        {"devices", "host", "paced"},
        {"preflight", "steps"},
        {"sglang_base"},
        {"overlap", "sglang", "sglang_044", "transformers", "vllm"},
        {"openai"},  # which starts vLLM's server, too, on a device of its own pace
    ),
    "harness": (
        {"stats", "common"},
        {"workload"},
        {"trace", "metrics"},
        {"plan"},
        {"store"},
        {"analysis", "run"},
        {"studies", "report", "serve"},
        {"cli"},
    ),
    "tests": ({"support"}, {"engine", "unit"}, {"gpu", "process"}),
    "experiments": ({"common"}, {"gpu", "validation"}),
}
# By the name that it is found under in a checkout, without the one it is installed under.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for house in BELOW
    for path in (ROOT / house).rglob("*.py")
    if "shims" not in path.parts and path.resolve().is_relative_to(ROOT / house)  # overlap_bench has links
}


def imports(module: str) -> Iterator[str]:
    """The modules that a module imports, wherever in it the import stands."""
    yield from imported_by(ast.parse(MODULES[module].read_text()))


def imported_by(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = str(node.module).removeprefix("overlap_bench.")
            for name in node.names:
                whole = f"{source}.{name.name}"
                found = whole if whole in MODULES else source
                if found in MODULES:
                    yield found
        elif isinstance(node, ast.Import):
            names = (name.name.removeprefix("overlap_bench.") for name in node.names)
            yield from (name for name in names if name in MODULES)


IMPORTS = {module: {other for other in imports(module) if other != module} for module in MODULES}


def package(module: str) -> str:
    return (*module.split("."), "")[1]


@pytest.mark.parametrize("house", FLOORS)
def test_every_package_stands_on_a_floor(house: str) -> None:
    found = {package(module) for module in MODULES if module.startswith(f"{house}.")}
    if house == "harness":
        found -= {path.stem for path in (ROOT / house).glob("*.py")}
    assert found - {"conftest"} == set.union(*FLOORS[house])


@pytest.mark.parametrize("house", ["engines", "harness"])
def test_every_package_says_what_it_is_for(house: str) -> None:
    for path in (ROOT / house).glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_a_house_is_entered_from_above() -> None:
    strangers = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if not f"{other}.".startswith(
            tuple(f"{each}." for each in (module.split(".")[0], *BELOW[module.split(".")[0]]))
        )
    ]
    assert strangers == []


@pytest.mark.parametrize("house", FLOORS)
def test_imports_run_downward(house: str) -> None:
    floor = {name: number for number, names in enumerate(FLOORS[house]) for name in names}
    upward = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        if module.startswith(f"{house}.") and package(module) in floor
        for other in others
        if other.startswith(f"{house}.")
        and package(other) != package(module)
        and floor.get(package(other), len(floor)) >= floor[package(module)]
    ]
    assert upward == []


def test_no_file_is_part_of_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(f"circle: {' -> '.join(error.args[1])}") from None


def test_a_run_imports_what_a_run_needs() -> None:
    """Not what shows other results, nor what only refs, patches, clusters, traces, gates or plans of
    another run need."""
    found: set[str] = set()
    new = {f"harness.{each}" for each in ("cli.app", "cli.measure", "cli.progress", "report.formats")}
    new.add("harness.studies.measure")
    while new:
        found |= new
        new = {other for module in new for other in at_once(module)} - found
    assert len(found) <= 72, sorted(found)


def at_once(module: str) -> Iterator[str]:
    """The modules of harness/ that it imports as it is imported itself."""
    body = ast.parse(MODULES[module].read_text()).body
    found = imported_by(ast.Module([each for each in body if isinstance(each, ast.ImportFrom)], []))
    return (each for each in found if each.startswith("harness."))


def test_what_is_installed_calls_itself_by_a_name_that_no_project_has() -> None:
    """A project that is measured may have packages called engines and harness."""
    short = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("engines", "harness", "overlap_bench")
        for path in (ROOT / folder).rglob("*.py")
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
        if module.startswith("harness.")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module in {"scipy", "scipy.stats", "scipy.optimize"}
    ]
    assert at_once == []
