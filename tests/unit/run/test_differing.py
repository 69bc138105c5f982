"""What counts as a difference between two versions of a module."""

from pathlib import Path

import pytest

from overlap_bench.harness.run.differing import apart, differing, files_in, parsed

A_CLASS = "class A:\n def f(self): pass\n"


@pytest.mark.parametrize(
    ("before", "after", "units"),
    [
        ("# c\nX=1\n", '"""Doc."""\nX  = (1)', []),
        ("def f():\n '''doc'''\n return 1", "def f(): return 1  # x", []),
        ("X = 1", "X = 2", ["module level"]),
        ("STEP = 2", "from kernels import STEP", ["module level"]),
        ("", "patch()", ["module level"]),
        ("", "os.environ['A'] = ''", ["module level"]),
        ("if X:\n Y = 1", "if X:\n Y = 2", ["module level"]),
        # A name that only one version has is of the code that uses it, which differs too, or of none.
        ("import a", "import b, a\nfrom c import d\nNEW: int = 1", []),
        ("from a import b, c", "from a import c, b, d", []),
        ("from a import b", "from x import b", ["module level"]),
        ("try:\n import a\nexcept E:\n a = None", "try:\n import a\nexcept E:\n a = 1", ["module level"]),
        ("__version__ = '1'", "__version__ = '2'", []),
        ("def f(x=1): pass", "def f(x=2): pass", ["f"]),
        ("def f(): pass", "@cache\ndef f(): pass", ["f"]),
        ("def f(): pass", "async def f(): pass", ["f"]),
        ("def f():\n def g(): return 1\n return g", "def f():\n def g(): return 2\n return g", ["f.g"]),
        (A_CLASS, f"{A_CLASS} x = 1", ["class A"]),
        (A_CLASS, A_CLASS.replace("pass", "return 1"), ["A.f"]),
        (A_CLASS, A_CLASS.replace("A:", "A(B):"), ["class A"]),
        ("", f"{A_CLASS} x = 1", ["A.f"]),
        (
            "class A:\n @property\n def x(self): pass\n @x.setter\n def x(self, v): pass",
            "class A:\n @property\n def x(self): pass\n @x.setter\n def x(self, v): return v",
            ["A.x"],
        ),
        ("if C:\n def f(): return 1\nelse:\n def f(): return 2", "if C:\n def f(): return 1", ["f"]),
    ],
)
def test_units(before: str, after: str, units: list[str]) -> None:
    one, other = parsed(before.encode()), parsed(after.encode())
    found = [each.told for each in (*apart(one, other), *apart(other, one))]
    assert sorted({*found}) == sorted(units)


def test_a_function_is_known_by_the_line_of_its_decorator_too() -> None:
    (unit,) = apart(parsed(b"\n@numba.njit(cache=True)\ndef f(): pass"), parsed(b""))
    assert (unit.code_name, unit.lines, unit.compiled) == ("f", {2, 3}, True)


def test_files(tmp_path: Path) -> None:
    for side, body in (("before", "1"), ("after", "2")):
        package = tmp_path / side / "pkg"
        (package / "__pycache__").mkdir(parents=True)
        (package / "__pycache__" / "same.cpython-311.pyc").write_text(body)
        (package / "same.py").write_text("X = 1")
        (package / "named.json").write_text(body)
        (package / "newer.py").write_text(f"type X = {body}\nX Y")  # that no Python reads
        (package / "changed.py").write_text(f"def f():\n    return {body}\n")
        (package / "comment.py").write_text(f"# {body}")
    (tmp_path / "after" / "pkg" / "new.py").write_text("def g(): pass")
    (tmp_path / "after" / "test_it.py").write_text("def test_it(): pass")
    found = differing(files_in({"": tmp_path / "before"}), files_in({"": tmp_path / "after"}))
    assert {
        each.name: each.units and [[unit.told for unit in side] for side in each.units] for each in found
    } == {
        "pkg/changed.py": [["f"], ["f"]],
        "pkg/named.json": None,
        "pkg/new.py": [[], ["g"]],
        "pkg/newer.py": None,
        "test_it.py": [[], ["test_it"]],
    }
    assert [each.name for each in found if each.of_tests] == ["test_it.py"]
    assert files_in({"pkg": tmp_path / "after" / "pkg"}).keys() >= {"pkg/new.py"}
