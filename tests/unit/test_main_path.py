"""What a reader of `bench run` goes through: its calls, from the command to the screen, file by file.

Each function is read once, where it is first called, in the order of the source. Who reads stays on the path:
does not enter what an option imports as it needs it, nor a function that calls nothing beyond its own file,
nor the floors that the others take as words.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import NamedTuple

from tests.unit.test_layers import MODULES

COMMAND = "harness.cli.measure"
# Numbers from frames, and no I/O: `harness.metrics.` names a number, as `harness.stats.` names a test of it.
WORDS = ("harness.common.", "harness.stats.", "harness.metrics.", "harness.workload.", "engines.")
ENTERED = ("__init__", "__post_init__", "__enter__")  # as an object is made
CALLED_AS_SOURCE = ("harness.studies.measure", "trials")  # what measures the trials, unless --ray is given
Def = ast.FunctionDef | ast.ClassDef


class Place(NamedTuple):
    module: str
    owner: ast.ClassDef | None  # of a method
    code: Def


@cache
def names(module: str) -> dict[str, tuple[str, str]]:
    """What a module calls by name: (module, name in it), or (module, "") of a module."""
    found, body = {}, ast.parse(MODULES[module].read_text())
    for node in ast.walk(body) if module.startswith("harness.cli.") else body.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            source = node.module.removeprefix("overlap_bench.")
            for each in node.names:
                whole = f"{source}.{each.name}"
                found[each.asname or each.name] = (whole, "") if whole in MODULES else (source, each.name)
    return found | {each.name: (module, each.name) for each in definitions(module)}


@cache
def definitions(module: str) -> list[Def]:
    return [each for each in ast.parse(MODULES[module].read_text()).body if isinstance(each, Def)]


def named(module: str, name: str) -> Place | None:
    """What a module calls by that name, where it is defined in this project and is no word."""
    source, name = names(module).get(name, ("", ""))
    if source not in MODULES or source.startswith(WORDS):
        return None
    own = (Place(source, None, each) for each in definitions(source) if each.name == name)
    return next(own, None) or (named(source, name) if source != module and name else None)


def method(kind: Place | None, name: str) -> Place | None:
    """A method of a class, or of those that it derives from."""
    if kind is None or not isinstance(kind.code, ast.ClassDef):
        return None
    for each in kind.code.body:
        if isinstance(each, ast.FunctionDef) and each.name == name:
            return Place(kind.module, kind.code, each)
    bases = (named(kind.module, each.id) for each in kind.code.bases if isinstance(each, ast.Name))
    return next(filter(None, (method(each, name) for each in bases)), None)


def called(at: Place, what: ast.expr) -> Place | None:
    """What a call in a place calls, as far as its names and annotations tell."""
    match what:
        case ast.Name("source"):
            return named(*CALLED_AS_SOURCE)
        case ast.Name(name):
            return named(at.module, name)
        case ast.Attribute(ast.Name("self" | "cls"), name) if at.owner:
            return method(Place(at.module, None, at.owner), name)
        case ast.Attribute(ast.Call(ast.Name("super")), name) if at.owner:
            bases = (named(at.module, each.id) for each in at.owner.bases if isinstance(each, ast.Name))
            return next(filter(None, (method(each, name) for each in bases)), None)
        case ast.Attribute(ast.Name(of), name):
            source, inside = names(at.module).get(of, ("", ""))
            if source in MODULES and not inside:
                return named(source, name)
            kind = of if inside else kinds(at.code).get(of, "")
            return method(named(at.module, kind), name)
    return None


def kinds(code: Def) -> dict[str, str]:
    """The classes of a function's arguments, and of what it makes."""
    found = {}
    for node in ast.walk(code):
        match node:
            case ast.arg(name, ast.Name(kind)):
                found[name] = kind
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name(kind))):
                found[name] = kind
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(), [ast.Call(ast.Name(kind))])):
                found[name] = kind  # stack.enter_context(Session(...))
    return found


def calls(at: Place) -> Iterator[Place]:
    """In the order in which they are made: arguments first."""
    if isinstance(at.code, ast.ClassDef):
        yield from filter(None, (method(at, name) for name in ENTERED))
        return

    def expressions(node: ast.AST) -> Iterator[ast.expr]:
        children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Call):
            children = [*node.args, *(each.value for each in node.keywords), node.func]
        for child in children:
            if not isinstance(child, ast.arguments):
                yield from expressions(child)
        if isinstance(node, ast.Call):
            yield node.func

    for statement in at.code.body:
        yield from filter(None, (called(at, each) for each in expressions(statement)))


def leads(at: Place, seen: frozenset[int] = frozenset()) -> bool:
    """Whether it calls what is in another file, by itself or through its own file."""
    for each in calls(at):
        if each.module != at.module:
            if isinstance(each.code, ast.FunctionDef) or any(calls(each)):
                return True
        elif id(each.code) not in seen and leads(each, seen | {id(at.code)}):
            return True
    return False


def read(at: Place, done: set[str]) -> Iterator[str]:
    """The files of the path, one for each function."""
    name = f"{at.module} {at.owner and at.owner.name} {at.code.name}"
    if name in done:
        return
    done.add(name)
    if isinstance(at.code, ast.FunctionDef):
        yield at.module
    for each in calls(at):
        if each.module == at.module or leads(each):
            yield from read(each, done)


def test_the_main_path_is_short() -> None:
    command = named(COMMAND, "run")
    assert command is not None
    entered = [file for file, _ in groupby(read(command, set()))]
    files = [*dict.fromkeys(entered)]
    assert {"harness.run.session", "harness.analysis.comparison", "harness.report.sections"} <= {*files}
    assert len(files) <= 15, entered
    assert len(entered) - len(files) <= 10, entered
