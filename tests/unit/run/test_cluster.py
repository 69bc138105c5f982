"""Where blocks can be measured, what is refused, and what is measured once more, without a cluster."""

import gc
import time
import weakref
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis.values import block_values
from overlap_bench.harness.common.machine import Code
from overlap_bench.harness.run import trial
from overlap_bench.harness.run.cluster import driver, node
from overlap_bench.harness.run.cluster.places import HEAD_S, RESOURCE, Lookout, Places, places
from overlap_bench.harness.run.hosts import RunFailed
from overlap_bench.harness.run.messages import Event, Said
from overlap_bench.harness.store import trust
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.manifest import read_manifest, signed, write_manifest
from overlap_bench.harness.store.tables import (
    TABLES,
    finished_blocks,
    packed,
    stored_block,
    write_block,
    write_packed,
)
from tests.support.made_blocks import block as made_block
from tests.support.made_blocks import described, manifest, side

ONE, TWO = "1" * 56, "2" * 56  # as Ray names its nodes


def listed(node: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": node, "Alive": alive, "Resources": resources}


def test_a_block_takes_a_whole_node_or_the_share_of_one_card() -> None:
    head = listed("head", CPU=64)
    gone = listed("gone", False, CPU=64, **{RESOURCE: 1})
    assert places([head, gone]) == Places({})
    whole = [listed(name, CPU=16, GPU=1, **{RESOURCE: 1}) for name in "abc"]
    assert places([head, gone, *whole]) == Places({"a": 1, "b": 1, "c": 1}, 16, 1)
    by_card = [listed(name, CPU=60, GPU=8, **{RESOURCE: 8}) for name in "ab"]
    assert places(by_card) == Places({"a": 8, "b": 8}, 7, 1)
    assert places(by_card).count == 16
    unequal = [listed("a", CPU=4, **{RESOURCE: 1}), listed("b", CPU=2, **{RESOURCE: 1})]
    assert places(unequal) == Places({"a": 1, "b": 1}, 2, 0)


def test_a_block_is_asked_for_where_none_is_under_way() -> None:
    there = Places({"a": 1, "b": 2})
    assert there.free(["a"]) == there.free(["a", "b"]) == "b"
    assert there.free(["b", "b"]) == "a"
    assert there.free(["gone", "a"]) == "b"


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


@pytest.mark.parametrize("other", [{"kind": "cuda"}, {"name": "another card"}])
def test_a_node_whose_engine_has_another_device_is_refused(other: dict[str, str]) -> None:
    """By what the first boots of the run found; what another machine may say besides is of no interest."""
    plan = manifest()
    there = described()
    on_it = dict.fromkeys(plan.descriptions, SimpleNamespace(description=there))
    assert trial.described(plan, cast(Any, on_it)).descriptions.keys() == plan.descriptions.keys()
    there = msgspec.structs.replace(there, device={**there.device, **other})
    on_it = dict.fromkeys(plan.descriptions, SimpleNamespace(description=there))
    with pytest.raises(StoreError, match="began with another engine in before: device"):
        trial.described(plan, cast(Any, on_it))


class RayError(Exception):
    pass


class NodeDiedError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@pytest.fixture
def cluster() -> driver._Cluster:
    """A cluster of two nodes, without its lookout for others."""
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, NodeDiedError=NodeDiedError)
    nodes = [listed(name, CPU=1, **{RESOURCE: 1}) for name in (ONE, TWO)]
    ray = SimpleNamespace(exceptions=exceptions, cancel=lambda task: None, nodes=lambda: nodes)
    lookout = Lookout(ray)
    lookout.close()
    return driver._Cluster(ExitStack(), "auto", None, driver.on_this_node, ray=ray, lookout=lookout)


def begun(cluster: driver._Cluster, folder: Path, described: bool = True) -> tuple[driver._Job, list[Event]]:
    """A run of three blocks on a cluster, and what it tells."""
    folder.mkdir(exist_ok=True)
    seen: list[Event] = []
    plan = manifest(3)
    plan = plan if described else msgspec.structs.replace(plan, descriptions={})
    write_manifest(folder, plan)
    job = driver.job_of({folder: plan}, seen.append)
    cluster.jobs.append(job)
    return job, seen


def failed(cluster: driver._Cluster, job: driver._Job, error: Exception) -> int:
    """Let the next block of a run end with `error`; which that was. Raises what ended the run."""
    block = job.take()
    future: Future[Any] = Future()
    future.set_exception(error)
    cluster.tasks[future] = driver._UnderWay(job, block, ONE, None)
    cluster._take(future)
    if job.error is not None:
        raise job.error
    return block


def test_a_block_that_fails_is_measured_once_more_and_counted(
    cluster: driver._Cluster, tmp_path: Path
) -> None:
    run, seen = begun(cluster, tmp_path)
    assert failed(cluster, run, RayTaskError(RunFailed("the engine (pid 12) died"))) == 0
    assert failed(cluster, run, RayError("node gone")) == 0  # another way
    run.take()
    assert failed(cluster, run, RayError("node gone")) == 1  # and another block's
    assert run.missing == [1, 2]
    assert [each.block for each in read_manifest(tmp_path).repeats] == [0, 0, 1]
    assert seen[0] == Said("trial 1 is measured once more: the engine (pid 12) died")


@pytest.mark.parametrize(
    "failures",
    [
        ["the engine (pid 12) died", "the engine (pid 13) died"],  # the same twice, but for its number
        ["on the node one: the engine (pid 12) died", "on the node two: the engine (pid 13) died"],
        ["fault a", "fault b", "fault c", "fault d", "fault e"],
    ],
)
def test_a_block_that_fails_again_or_in_ever_other_ways_ends_the_run(
    cluster: driver._Cluster, tmp_path: Path, failures: list[str]
) -> None:
    run, _ = begun(cluster, tmp_path)
    for each in failures[:-1]:
        failed(cluster, run, RayTaskError(RunFailed(each)))
    with pytest.raises(RunFailed, match=r"pid 13|fault e"):
        failed(cluster, run, RayTaskError(RunFailed(failures[-1])))
    assert cluster.jobs == []


def test_what_dies_in_its_first_boots_is_tried_again_but_an_engine_that_can_not_boot_is_not(
    cluster: driver._Cluster, tmp_path: Path
) -> None:
    run, seen = begun(cluster, tmp_path, described=False)
    assert failed(cluster, run, RayError("node gone")) == -1
    assert run.next == -1
    assert run.missing == [0, 1, 2]
    assert run.manifests[0].repeats == []
    assert seen[-1] == Said("the first boots are done once more: node gone")
    with pytest.raises(RunFailed, match="mainspring"):
        failed(cluster, run, RayTaskError(RunFailed("the mainspring is broken")))


def test_a_node_that_is_done_gets_the_next_block(cluster: driver._Cluster, tmp_path: Path) -> None:
    """It, and no other: it does not wait until Ray has heard that it is free."""
    pytest.importorskip("ray")
    asked: list[str] = []

    def options(scheduling_strategy: Any, **what_it_takes: object) -> Any:
        asked.append(scheduling_strategy.node_id)
        return SimpleNamespace(remote=lambda *arguments: SimpleNamespace(future=Future))

    cluster.remote = SimpleNamespace(options=options)
    begun(cluster, tmp_path)
    cluster._ask()
    assert asked == [ONE, TWO]
    _, later = cluster.tasks
    del cluster.tasks[later]
    cluster._ask()
    assert asked == [ONE, TWO, TWO]


def test_a_node_that_died_is_asked_for_nothing_though_the_last_look_found_it(
    cluster: driver._Cluster, tmp_path: Path
) -> None:
    run, seen = begun(cluster, tmp_path, described=False)
    failed(cluster, run, NodeDiedError("node gone"))
    assert cluster.lookout.places() == Places({TWO: 1}, 1, 0)
    cluster._check_there(Places({}))
    assert "no node is left: waiting for one" in str(seen[-1])
    run.failed.clear()  # as if the cluster had never had a node
    with pytest.raises(api.BadSetting, match=f"no node of the cluster has the resource {RESOURCE}"):
        cluster._check_there(Places({}))


OTHER_DEVICE = StoreError("r began with another engine in before: device.kind was 'cuda', is 'emulated'")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (api.BadSetting("no such thing"), "^no such thing"),
        (KeyError("a fault of ours"), "a fault of ours"),
        (OTHER_DEVICE, "^r began with another engine"),
        (
            ModuleNotFoundError("No module named 'harness'"),
            "^a node lacks this project, or a package of it: ",
        ),
    ],
)
def test_what_no_other_node_could_help_ends_that_run_at_once(
    cluster: driver._Cluster, tmp_path: Path, error: Exception, said: str
) -> None:
    fine, broken = (begun(cluster, tmp_path / name)[0] for name in "ab")
    wanted = api.BadSetting if isinstance(error, ImportError) else type(error)
    with pytest.raises(wanted, match=said):
        failed(cluster, broken, RayTaskError(error))
    assert broken.manifests[0].repeats == []
    assert fine.error is None
    assert cluster.jobs == [fine]


def test_of_several_runs_the_lowest_block_is_the_next_and_all_progress(
    cluster: driver._Cluster, tmp_path: Path
) -> None:
    runs = [begun(cluster, tmp_path / name, described=False)[0] for name in "ab"]
    asked = []
    while (job := cluster._next()) is not None:
        block = job.take()
        asked.append((runs.index(job), block))
        if block == -1:
            job.under_way.clear()
            job.manifests = [manifest(3)]
    assert asked == [(0, -1), (1, -1), (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_task_of_a_run_that_has_enough_is_of_no_interest(cluster: driver._Cluster, tmp_path: Path) -> None:
    run, seen = begun(cluster, tmp_path)
    block = run.take()
    future: Future[Any] = Future()
    future.set_exception(KeyError("cancelled"))
    cluster.tasks[future] = driver._UnderWay(run, block, ONE, None)
    cluster._end(run)
    cluster._take(future)
    assert (run.error, seen, cluster.tasks) == (None, [], {})


def test_a_cluster_that_does_not_answer_any_more_is_gone() -> None:
    answers = [listed("a", CPU=2, **{RESOURCE: 1})]

    def nodes() -> list[dict[str, Any]]:
        return [answers.pop()]  # and then raises

    lookout = Lookout(SimpleNamespace(nodes=nodes))
    lookout.close()
    assert lookout.places() == Places({"a": 1}, 2, 0)
    lookout._seen = time.monotonic() - HEAD_S - 1
    with pytest.raises(RunFailed, match="the cluster is gone: its head has not answered for 21 s"):
        lookout.places()


def test_no_table_of_a_block_is_kept_once_the_next_one_is_looked_at(tmp_path: Path) -> None:
    plan = manifest(2)
    write_manifest(tmp_path, plan)
    for number in range(2):
        write_block(tmp_path, number, made_block(number, {"before": side(4.0), "after": side(4.0)}).tables)
    measured = driver.measure({tmp_path: plan}, lambda event: None, address="nowhere: nothing is missing")
    (first,), (second,) = (blocks for _, blocks in measured)
    held = [weakref.ref(first.tables[name]) for name in TABLES]
    assert first.tables["requests"] is first.tables["requests"]  # one block's are, for whoever looks again
    for name in TABLES:
        second.tables[name]
    gc.collect()
    assert [each() for each in held] == [None] * len(TABLES)


def measured(tpot_ms: float) -> node.Measured:
    """What a node would send of a block of `manifest`."""
    made = made_block(0, {"before": side(tpot_ms), "after": side(tpot_ms)})
    return node.Measured(
        node="a-node",
        machine=manifest().machine,
        manifests=[],
        tables=[packed(made.tables)],
        values=[node.values_of(manifest(), made)],
        seconds=1.0,
        stolen=0.0,
        said=[],
    )


def test_a_machine_that_joins_again_under_its_name_has_had_no_first_boots(tmp_path: Path) -> None:
    plan = manifest(3)
    write_manifest(tmp_path, plan)
    job = driver.job_of({tmp_path: plan}, lambda event: None)
    job.keep(job.take(), replace(measured(4.0), id="its first id"))
    assert job.warm == {"its first id"}  # and not "a-node", which its next id has too


@pytest.mark.parametrize(
    ("asked_here", "changed", "believed"),
    [(True, {}, True), (False, {}, False), (True, {"name": "x"}, False)],
)
def test_a_run_sized_by_a_node_is_signed_as_before_and_one_that_a_node_changed_is_not(
    tmp_path: Path, asked_here: bool, changed: dict[str, Any], believed: bool
) -> None:
    """What is signed is started by `bench rerun` and `--resume`."""
    plan = msgspec.structs.replace(manifest(3, rounds=3, segments=16, aim_s=80.0), descriptions={})
    plan = signed(plan) if asked_here else plan
    write_manifest(tmp_path, plan)
    job = driver.job_of({tmp_path: plan}, lambda event: None)
    design = msgspec.structs.replace(plan.design, rounds=1, segments=3, aim_s=None, **changed)
    sized = msgspec.structs.replace(plan, design=design)
    job.keep(job.take(), replace(measured(4.0), manifests=[msgspec.json.encode(sized)]))
    kept = read_manifest(tmp_path)
    assert kept.design == design
    assert trust.holds([kept.design], kept.signature) == believed


def test_what_a_node_makes_of_a_block_is_what_is_made_of_its_files(tmp_path: Path) -> None:
    sent = measured(4.0)
    write_packed(tmp_path, 0, sent.tables[0])
    read = block_values(manifest().design, stored_block(tmp_path, 0))
    for arm, values in sent.values[0].items():
        assert values == pytest.approx(read[arm], rel=0, abs=0, nan_ok=True)
    assert sent.values[0]["before"]["tpot_ms_p50"] == pytest.approx(4.0)


def test_values_that_a_node_sent_are_not_made_again(cluster: driver._Cluster, tmp_path: Path) -> None:
    run, _ = begun(cluster, tmp_path)
    sent = measured(4.0)
    run.write(run.take(), sent)
    run.under_way.clear()
    _, (first,) = next(cluster._blocks_of(run))
    assert block_values(manifest().design, first) is sent.values[0]
    assert first.only(["before"]).values is None  # those of fewer arms are others


def test_what_a_cluster_measured_before_it_was_gone_is_kept(
    cluster: driver._Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: driver._Cluster) -> None:
        raise RunFailed("the cluster is gone")

    run, _ = begun(cluster, tmp_path)
    monkeypatch.setattr(driver._Cluster, "_ask", ask)
    with pytest.raises(RunFailed):
        cluster._keep(run, 0, measured(5.0))
    assert finished_blocks(tmp_path) == [0]


def test_a_block_that_a_run_had_already_keeps_its_own_values(
    cluster: driver._Cluster, tmp_path: Path
) -> None:
    """Killed between two writes, one of the runs that share their boots has it."""
    write_packed(tmp_path, 0, measured(4.0).tables[0])
    run, _ = begun(cluster, tmp_path)
    run.write(0, measured(5.0))
    _, (first,) = next(cluster._blocks_of(run))
    assert block_values(manifest().design, first)["before"]["tpot_ms_p50"] == pytest.approx(4.0)
