"""What the modules of engines/ import: downward, never in a circle, and nothing of the harness."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.places import ROOT


def module_of(path: Path) -> str:
    inside = ("overlap_bench", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(inside).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted((ROOT / "engines").rglob("*.py"))}


def imported(node: ast.AST) -> set[str]:
    """Every module below `node` that is imported when the program runs, also late, inside a function."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            found.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            found.update(name if name in FILES else str(child.module) for name in names)
        found |= imported(child)
    return found


IMPORTS = {name: imported(ast.parse(path.read_text())) for name, path in FILES.items()}


def test_engines_know_nothing_of_the_harness() -> None:
    upward = {
        name: [each for each in found if each.startswith("overlap_bench.harness")]
        for name, found in IMPORTS.items()
    }
    assert not {name: each for name, each in upward.items() if each}


def test_no_module_imports_itself_by_way_of_another() -> None:
    try:
        TopologicalSorter({name: found & FILES.keys() for name, found in IMPORTS.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_contract_needs_nothing_but_msgspec() -> None:
    code = (
        "import sys; before = set(sys.modules); from overlap_bench import Engine, Toggle, profiles\n"
        "new = set(sys.modules) - before; assert 'overlap_bench.harness' not in new\n"
        "print(*sorted({name.partition('.')[0] for name in new} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    besides = {"typing_extensions"}  # msgspec takes it where it is there
    assert set(done.stdout.split()) <= {"overlap_bench", "msgspec"} | besides
