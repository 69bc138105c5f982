"""From what the processes of two arms wrote to what of their code ran, and whether there is a verdict."""

from pathlib import Path

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.run.differing import differing, files_in
from overlap_bench.harness.run.trial import may_run_different_code
from overlap_bench.harness.run.watch import (
    BOOTING,
    SERVING,
    Seen,
    Watch,
    changed_code,
    top_level,
)
from overlap_bench.harness.run.watcher import sitecustomize
from overlap_bench.harness.store.manifest import ChangedCode
from tests.support.made_blocks import manifest

MAP = """class Map:
    def __init__(self): self.items = {A}
    def get(self, key): return {A}
    def insert(self, key): return {A}
"""
OTHER = "SIZE = {A}\ndef used(): return {A}\n"
LINES = {"__init__": 2, "get": 3, "insert": 4, "used": 2, "<module>": 1}


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    for side in ("1", "2"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "map.py").write_text(MAP.replace("{A}", side))
    return tmp_path / "1", tmp_path / "2"


def found(sides: tuple[Path, Path], *ran: tuple[int, str, str]) -> ChangedCode:
    """With what ran in the after arm: when, in which file, which function."""
    files = differing(*(files_in({"": each}) for each in sides))
    before, after = Seen(prefixes={"/usr"}), Seen(prefixes={"/usr"})
    for phase, file, name in ran:
        after.code[str(sides[1] / file), name, LINES.get(name, 1)] = phase
    return changed_code(files, before, after)


def test_a_change_that_never_ran_has_no_verdict(sides: tuple[Path, Path]) -> None:
    """A map is made as the engine boots, and nobody asks it: the prefix cache is off."""
    unused = found(sides, (BOOTING, "map.py", "<module>"), (BOOTING, "map.py", "__init__"))
    assert (unused.functions, unused.counts) == (3, False)
    assert unused.at_boot == ["map.py: Map.__init__"]
    assert unused.never == ["map.py: Map.get", "map.py: Map.insert"]
    assert unused.never_ran == (
        "none of the 3 functions that differ ran in a round: map.py: Map.get, map.py: Map.insert; ran only "
        "as the engine booted: map.py: Map.__init__"
    )
    asked = found(sides, (BOOTING, "map.py", "__init__"), (SERVING, "map.py", "get"))
    assert asked.counts
    assert (asked.in_rounds, asked.never) == (["map.py: Map.get"], ["map.py: Map.insert"])


def test_what_ran_as_the_engine_booted_counts_where_nothing_of_its_file_was_left_out(
    sides: tuple[Path, Path],
) -> None:
    every = [(BOOTING, "map.py", name) for name in ("__init__", "get", "insert")]
    assert found(sides, *every).counts
    assert not found(sides, *every[:2]).counts


def test_a_constant_counts_once_its_module_is_imported(sides: tuple[Path, Path]) -> None:
    for side in sides:
        (side / "map.py").unlink()
        (side / "constant.py").write_text(OTHER.replace("{A}", side.name))
    assert not found(sides).counts
    imported = found(sides, (BOOTING, "constant.py", "<module>"))
    assert imported.counts
    assert imported.at_boot == ["constant.py: module level"]


def test_a_change_of_tests_or_of_no_python_is_not_said_to_have_never_run(sides: tuple[Path, Path]) -> None:
    for side in sides:
        (side / "map.py").rename(side / "test_map.py")
        (side / "README.md").write_text(side.name)
    both = found(sides)
    assert (both.functions, both.other, both.counts) == (0, ["README.md"], True)
    loaded = found(sides, (BOOTING, "test_map.py", "<module>"))  # an engine that is a test
    assert not loaded.counts


def test_what_is_compiled_is_not_said_to_have_never_run(sides: tuple[Path, Path]) -> None:
    assert not found(sides).counts
    graphs = found(sides, (BOOTING, "torch/_dynamo/aot_compile.py", "deserialize"))
    assert (graphs.counts, len(graphs.unseen)) == (True, 3)
    files = differing(*(files_in({"": each}) for each in sides))
    traced = Seen(traced={(str(sides[1] / "map.py"), "get", LINES["get"])})
    inlined = changed_code(files, Seen(), traced)
    assert (inlined.counts, inlined.unseen) == (True, ["map.py: Map.get"])
    for side in sides:
        (side / "map.py").write_text(f"@triton.jit\ndef kernel(): return {side.name}")
    assert found(sides).unseen == ["map.py: kernel"]
    assert found(sides).counts


def test_a_data_file_that_is_opened_and_an_arm_without_a_watched_process(sides: tuple[Path, Path]) -> None:
    for side in sides:
        (side / "tuned.json").write_text(side.name)
    files = differing(*(files_in({"": each}) for each in sides))
    before, after = Seen(prefixes={"/usr"}), Seen(prefixes={"/usr"})
    assert not changed_code(files, before, after).counts
    blind = changed_code(files, before, after, blind=["the server of after could not be watched"])
    assert (blind.counts, blind.unwatched) == (True, "the server of after could not be watched")
    after.data[str(sides[1] / "tuned.json")] = SERVING
    assert changed_code(files, before, after).counts


def test_what_a_watcher_missed_does_not_pass_for_what_never_ran(
    sides: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "room").mkdir()
    watch = Watch(manifest().design, dict(zip(("before", "after"), sides, strict=True)), tmp_path / "room")
    assert not watch.changed_code(watch.seen(), {}).counts
    folder = tmp_path / "room" / "watched-1"
    sitecustomize.Watcher(str(folder)).failed(ValueError("odd"))
    found = watch.changed_code(watch.seen(), {})
    assert found.counts
    assert found.unwatched == "a part of what after ran could not be watched (ValueError('odd'))"


def test_other_packages_of_two_versions_are_named(sides: tuple[Path, Path]) -> None:
    for side in sides:
        (side / "same.py").write_text("X = 1")
    before, after = (
        Seen(modules={str(side / f"{name}.py"): f"{name}.inner" for name in ("map", "same")})
        for side in sides
    )
    files = differing(*(files_in({"": each}) for each in sides))
    assert changed_code(files, before, after, packages=["vllm"]).besides == ["map"]
    assert changed_code(files, before, after, packages=["map"]).besides == []
    assert changed_code(files, before, after).besides == []  # of two refs, all of the trees is compared


def test_lines_that_a_killed_process_left_half_written(tmp_path: Path) -> None:
    lines = [
        ["process", 7, "/usr"],
        ["module", "a.b", "/b.py"],
        ["code", 0, "/b.py", 3, "f"],
        ["code", 1, "/b.py", 3, "f"],
    ]
    text = b"\n".join(map(msgspec.json.encode, lines))
    (tmp_path / "1.jsonl").write_bytes(text + b'\n["code", 0, "/b.p')
    seen = Seen.read(tmp_path)
    assert seen.code == {("/b.py", "f", 3): SERVING}
    assert (seen.pids, seen.prefixes, seen.modules) == ({7}, {"/usr"}, {"/b.py": "a.b"})


def test_arms_that_may_run_different_code_are_watched() -> None:
    def arm(name: str, **more: object) -> Arm:
        return msgspec.structs.replace(
            Arm(name=name, engine="openai", options=api.EngineOptions(), toggles={}), **more
        )

    def watched(before: Arm, after: Arm, **more: object) -> bool:
        design = msgspec.structs.replace(manifest().design, arms=(before, after), **more)
        return may_run_different_code(design)

    ref = Ref(repository="/r", name="main", commit="abc")
    serves = "python -m vllm.entrypoints.openai.api_server --port {port}"
    assert not watched(arm("before"), arm("after", toggles={"h2d": "pinned"}))
    assert watched(arm("before", ref=ref), arm("after"))
    assert watched(arm("before", python="/a"), arm("after", python="/b"))
    assert not watched(arm("before", python="/a"), arm("after", python="/a"))
    assert not watched(arm("before", python="/a"), arm("after", python="/b"), against_itself=True)
    assert watched(arm("before"), arm("after", env={"PYTHONPATH": "/a"}))
    same = {"cmd": f"{serves} --max-num-seqs 8"}
    assert not watched(arm("before", toggles={"cmd": serves}), arm("after", toggles=same))
    other = {"cmd": f"env A=1 /venv/bin/{serves}"}
    assert watched(arm("before", toggles={"cmd": serves}), arm("after", toggles=other))
    assert not watched(arm("before", toggles={"url": "http://a"}), arm("after", toggles={"url": "http://b"}))


def test_what_can_be_imported_of_a_tree(tmp_path: Path) -> None:
    for each in (
        "src/pkg/a.py",
        "plain/deep/b.py",
        "docs/index.md",
        "mod.py",
        "fast.cpython-311.so",
        "a-b/c.py",
    ):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    (tmp_path / "submodule").mkdir()
    assert sorted(top_level(tmp_path)) == ["fast", "mod", "pkg", "plain", "src", "submodule"]
