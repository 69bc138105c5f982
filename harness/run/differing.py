"""What the code of two arms differs by: Python function by function, other files by name.

A unit is what starts to run by itself: a function, the body of a class, the rest of a module. Comments,
docstrings, formatting and the order of imports are no difference. Units are compared by their syntax trees;
at run time one is known again by its file, its name and the line in which its code begins.
"""

from __future__ import annotations

import ast
import filecmp
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Kind = Literal["function", "class", "module"]
NO_SOURCE = (".git", "__pycache__", "site-packages")  # .git of a worktree is a file
# A decorator of this name compiles a function, which then runs without Python: nobody can see that it does.
COMPILERS = ("jit", "njit", "cfunc", "vectorize", "guvectorize", "stencil", "script", "compile")
# What tools write anew at each build, and a module's list of its names: they change nothing that runs.
NO_CHANGE = {"__all__", "__version__", "__version_tuple__", "version", "version_tuple", "__commit_id__"}


@dataclass(frozen=True, slots=True)
class Unit:
    name: str  # "BlockPool.touch", "outer.inner"; "" of a module
    kind: Kind
    lines: frozenset[int]  # its code begins in one of them
    text: str  # its tree, without the units in it
    compiled: bool = False

    @property
    def code_name(self) -> str:
        return self.name.rpartition(".")[2] or "<module>"

    @property
    def told(self) -> str:
        return {"function": self.name, "class": f"class {self.name}", "module": "module level"}[self.kind]


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a module. `binds`: the names that it gives a value, where it does nothing else."""

    text: str
    binds: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Module:
    units: tuple[Unit, ...]  # the module itself is none of them
    statements: tuple[Statement, ...]
    names: frozenset[str]  # that a statement, or a definition, gives a value


EMPTY = Module((), (), frozenset())


def parsed(source: bytes) -> Module:
    """What a module is made of. Raises SyntaxError, ValueError or RecursionError where this Python can't read
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a \\d that is no escape is its author's affair
        tree = ast.parse(source)
    inner: list[Definition] = []
    statements = [each for part in _without_docstring(tree.body) for each in _statements(part, inner)]
    found = [unit for each in inner for unit in _units(each, "")]
    bound = (each.binds or () for each in statements)
    names = frozenset(name for each in bound for name in each) | {each.name for each in inner}
    return Module(tuple(found), tuple(statements), names)


def apart(one: Module, other: Module) -> list[Unit]:
    """The units of `one` that `other` has not like that. A name that only one of them gives a value at module
    level is used by what differs elsewhere, or by nothing: it does not count by itself. Nor does the body of
    a class that only one of them has."""
    there = Counter((each.name, each.text) for each in other.units)
    classes = {each.name for each in other.units if each.kind == "class"}
    found = []
    for unit in one.units:
        if there[unit.name, unit.text]:
            there[unit.name, unit.text] -= 1
        elif unit.kind != "class" or unit.name in classes:
            found.append(unit)
    if _statements_apart(one, other) or _statements_apart(other, one):
        found.append(Unit("", "module", frozenset(), ""))
    return found


def _statements_apart(one: Module, other: Module) -> bool:
    there = {each.text for each in other.statements}
    differing = [each for each in one.statements if each.text not in there]
    return any(each.binds is None or (each.binds - NO_CHANGE) & other.names for each in differing)


def _units(tree: Definition, within: str) -> Iterator[Unit]:
    name = f"{within}.{tree.name}" if within else tree.name
    inner: list[Definition] = []
    parts: list[ast.AST] = [*tree.decorator_list]
    if isinstance(tree, ast.ClassDef):
        parts += [*tree.bases, *tree.keywords]
    else:  # run by what stands around it, but of the function: its defaults, above all
        parts += [tree.args, *([] if tree.returns is None else [tree.returns])]
    body = [each for part in _without_docstring(tree.body) for each in _statements(part, inner)]
    yield Unit(
        name,
        "class" if isinstance(tree, ast.ClassDef) else "function",
        frozenset({tree.lineno, *(each.lineno for each in tree.decorator_list)}),
        "\n".join([type(tree).__name__, *map(ast.dump, parts), *(each.text for each in body)]),
        any(_last_name(each) in COMPILERS for each in tree.decorator_list),
    )
    for each in inner:
        yield from _units(each, name)


def _last_name(decorator: ast.expr) -> str:
    """ "jit" of @numba.jit(nopython=True)."""
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _statements(node: ast.stmt, inner: list[Definition]) -> Iterator[Statement]:
    """A statement without the definitions in it, which go to `inner`; an import as one for each name."""
    if isinstance(node, Definition):
        inner.append(node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            one = (
                ast.Import([alias])
                if isinstance(node, ast.Import)
                else ast.ImportFrom(node.module, [alias], node.level)
            )
            name = alias.asname or alias.name.partition(".")[0]
            yield Statement(ast.dump(one), frozenset({name}))
    else:
        emptied = _Emptied(inner).visit(node)
        yield Statement(ast.dump(emptied), _bound(emptied))


class _Emptied(ast.NodeTransformer):
    """Takes the definitions out of a compound statement."""

    def __init__(self, inner: list[Definition]) -> None:
        self.inner = inner

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, Definition):
            self.inner.append(node)
            return ast.Pass()
        found: ast.AST = self.generic_visit(node)
        return found


def _bound(node: ast.AST) -> frozenset[str] | None:
    """The names that a statement gives a value; None where it does more than that."""
    match node:
        case ast.Assign(targets=targets) if all(isinstance(each, ast.Name | ast.Tuple) for each in targets):
            return _names(*targets)
        case ast.AnnAssign(target=ast.Name() as target):
            return _names(target)
        case ast.Import() | ast.ImportFrom():
            return frozenset(each.asname or each.name.partition(".")[0] for each in node.names)
        case ast.Pass():
            return frozenset()
        case ast.If() | ast.Try():
            parts = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                parts += [*node.finalbody, *(each for handler in node.handlers for each in handler.body)]
            found = [_bound(each) for each in parts]
            return None if None in found else frozenset(name for each in found for name in each or ())
    return None


def _names(*nodes: ast.AST) -> frozenset[str]:
    return frozenset(part.id for each in nodes for part in ast.walk(each) if isinstance(part, ast.Name))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


# ---------------------------------------------------------------------------------------------------------
# Files


@dataclass(frozen=True, slots=True)
class File:
    """A file that differs, under its name in what is compared. `before` and `after`: its units that the other
    arm has not like that; None: it is no Python, or none that can be read here."""

    name: str  # "vllm/v1/core/block_pool.py"
    paths: tuple[Path | None, Path | None]  # before and after, None: not there
    units: tuple[tuple[Unit, ...], tuple[Unit, ...]] | None

    @property
    def of_tests(self) -> bool:
        """Whether it is one that no engine would load."""
        *folders, name = self.name.split("/")
        named = name.startswith("test_") or name.endswith("_test.py")
        return named or name in ("conftest.py", "setup.py") or bool({"test", "tests"} & {*folders})


def files_in(roots: Mapping[str, Path]) -> dict[str, Path]:
    """Every file of these packages and modules, by its name: a package's folder under its own name, that of a
    whole tree under ""."""
    found = {}
    for name, root in roots.items():
        if root.is_file():
            found[root.name] = root
        for folder, folders, names in os.walk(root):
            folders[:] = [each for each in folders if each not in NO_SOURCE]
            for each in names:
                path = Path(folder, each)
                if path.suffix != ".pyc" and each not in NO_SOURCE:
                    found["/".join((*filter(None, name.split(".")), path.relative_to(root).as_posix()))] = (
                        path
                    )
    return found


def differing(before: Mapping[str, Path], after: Mapping[str, Path]) -> list[File]:
    """What differs between the files of two arms, by files_in."""
    found = []
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        if one is not None and other is not None and equal(one, other):
            continue
        each = File(name, (one, other), _units_apart(one, other) if name.endswith(".py") else None)
        if each.units is None or any(each.units):
            found.append(each)
    return found


def equal(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other) or filecmp.cmp(one, other, shallow=False)
    except OSError:  # a link to nowhere, in both
        return os.path.islink(one) and os.path.islink(other) and os.readlink(one) == os.readlink(other)


def _units_apart(before: Path | None, after: Path | None) -> tuple[tuple[Unit, ...], tuple[Unit, ...]] | None:
    try:
        one, other = (EMPTY if path is None else parsed(path.read_bytes()) for path in (before, after))
    except (SyntaxError, ValueError, RecursionError, OSError):  # of another Python, perhaps
        return None
    return tuple(apart(one, other)), tuple(apart(other, one))
