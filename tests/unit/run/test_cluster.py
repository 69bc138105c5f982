"""Where blocks can be measured, what is refused, and what is measured once more, without a cluster."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engines import api
from harness.common.machine import Code
from harness.run.cluster import driver, node
from harness.run.cluster.driver import RESOURCE, Places, places
from harness.run.events import Event, Said
from harness.run.hosts import RunFailed
from harness.store.manifest import read_manifest, write_manifest
from tests.support.made_blocks import manifest


def listed(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


def test_a_block_takes_a_whole_node_or_the_share_of_one_card() -> None:
    head = listed(CPU=64)
    gone = listed(False, CPU=64, **{RESOURCE: 1})
    assert places([head, gone]) == Places(0, 0, 0)
    whole = [listed(CPU=16, GPU=1, **{RESOURCE: 1})] * 3
    assert places([head, gone, *whole]) == Places(3, 16, 1)
    by_card = [listed(CPU=60, GPU=8, **{RESOURCE: 8})] * 2
    assert places(by_card) == Places(16, 7, 1)
    unequal = [listed(CPU=4, **{RESOURCE: 1}), listed(CPU=2, **{RESOURCE: 1})]
    assert places(unequal) == Places(2, 2, 0)


def test_a_node_with_other_code_or_versions_is_refused() -> None:
    plan = msgspec.structs.replace(manifest(), versions={"torch": "2.13"})
    with pytest.raises(api.BadSetting, match="other code than where the run was asked for: commit was 'abc'"):
        node.check(plan, Code(commit="def", changes=""), plan.versions)
    with pytest.raises(api.BadSetting, match=r"other code .*: changes was '', is 'x'"):
        node.check(plan, Code(commit="abc", changes="x"), plan.versions)
    with pytest.raises(api.BadSetting, match=r"other versions .*: torch was '2.13', is '2.12'"):
        node.check(plan, plan.code, {"torch": "2.12"})
    with pytest.raises(
        api.BadSetting, match="unknown engine 'e'"
    ):  # installed on this machine, but not there
        node.check(plan, plan.code, plan.versions)


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def failed(run: Any, block: int, error: Exception) -> None:
    """Let a task end with `error`."""
    future: Future[Any] = Future()
    future.set_exception(error)
    run.missing.remove(block)
    run.tasks[future] = block, None
    run._take(future)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError))
    seen: list[Event] = []
    write_manifest(tmp_path, manifest())
    made = driver._Blocks(
        ray, driver.on_this_node, [tmp_path], [manifest()], [set()], [0, 1, 2], seen.append, None
    )
    return SimpleNamespace(made=made, seen=seen)


def test_a_block_that_fails_is_measured_once_more_and_counted(run: Any, tmp_path: Path) -> None:
    failed(run.made, 1, RayTaskError(RunFailed("the engine (pid 12) died")))
    failed(run.made, 0, RayError("node gone"))
    failed(run.made, 1, RayError("node gone"))  # another way, and so is another block's
    assert run.made.missing == [1, 0, 2]
    assert [each.block for each in read_manifest(tmp_path).repeats] == [1, 0, 1]
    assert next(each for each in run.seen if isinstance(each, Said)) == Said(
        "block 2 is measured once more: the engine (pid 12) died"
    )


def test_the_same_failure_twice_ends_the_run_whatever_its_numbers(run: Any) -> None:
    failed(run.made, 1, RayTaskError(RunFailed("the engine (pid 12) died")))
    with pytest.raises(RunFailed, match="pid 13"):
        failed(run.made, 1, RayTaskError(RunFailed("the engine (pid 13) died")))


def test_what_dies_in_its_first_boots_is_tried_again_but_an_engine_that_can_not_boot_is_not(run: Any) -> None:
    future: Future[Any] = Future()
    future.set_exception(RayError("node gone"))
    run.made.tasks[future] = -1, None
    run.made._take(future)
    assert run.made.missing == [0, 1, 2]
    assert run.made.manifests[0].repeats == []
    assert run.seen[-1] == Said("the first boots are done once more: node gone")
    with pytest.raises(RunFailed, match="mainspring"):
        run.made._again(-1, RunFailed("the mainspring is broken"))


def test_a_block_that_fails_in_ever_other_ways_ends_the_run_too(run: Any) -> None:
    for way in "abcd":
        failed(run.made, 1, RayTaskError(RunFailed(f"fault {way}")))
    with pytest.raises(RunFailed, match="fault e"):
        failed(run.made, 1, RayTaskError(RunFailed("fault e")))


def test_a_node_that_lacks_the_project_is_told_so(run: Any) -> None:
    with pytest.raises(api.BadSetting, match="a node lacks this project, or a package of it: No module"):
        failed(run.made, 1, RayTaskError(ModuleNotFoundError("No module named 'harness'")))


@pytest.mark.parametrize("error", [api.BadSetting("no such thing"), KeyError("a fault of ours")])
def test_what_no_other_node_could_help_ends_the_run_at_once(run: Any, error: Exception) -> None:
    with pytest.raises(type(error)):
        failed(run.made, 1, RayTaskError(error))
    assert run.made.manifests[0].repeats == []
