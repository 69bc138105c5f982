"""Runs on a real Ray cluster of several nodes on this machine: what is kept, and what is left, when a node, a
worker or the driver dies. Skipped where Ray is not installed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import Manifest, read_manifest
from tests.process.test_experiment import write as write_experiment
from tests.support.bench_command import Bench, last_line, only_run, start
from tests.support.clockwork import CLOCKWORK
from tests.support.made_blocks import stored_result
from tests.support.ray_nodes import Nodes, nodes

COMPARE = (*CLOCKWORK, "--before", "pace=slow", "--after", "pace=fast")
LONG = (*COMPARE, "--num-requests", "60")  # a block takes seconds


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Nodes]:
    """One for all: each test says which nodes it has."""
    with nodes(environment) as made:
        yield made


def measured_by(folder: Path) -> list[str]:
    """The node of each block. Asserts that each has the order drawn for it, and that no block is missing."""
    plan = read_manifest(folder)
    found = []
    for number, order in enumerate(plan.drawn):
        rounds = tables.read_block(folder, number)["rounds"]
        for place, arm in enumerate(order):
            assert set(rounds[rounds["arm"] == plan.design.arms[arm].name]["position"]) == {place}
        (node,) = rounds["node"].unique() if "node" in rounds else [""]
        found.append(node)
    return found


def repeated(plan: Manifest) -> list[int]:
    return [each.block for each in plan.repeats]


def test_blocks_are_measured_by_all_nodes_and_kept_as_those_of_one_machine(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    """Also by a node that joins late."""
    cluster.has("one")
    asked = ("run", *LONG, "--trials", "5", "--format", "json", "--ray", cluster.address)
    bench = start(environment, tmp_path, *asked)
    bench.wait_for("first boots (discarded) done")
    cluster.add("two")
    code, stdout, stderr = bench.end()
    assert code == 0, stderr
    folder = only_run(tmp_path)
    assert json.loads(stdout).items() >= stored_result(folder).items()
    assert set(measured_by(folder)) == {"one", "two"}
    plan = read_manifest(folder)
    assert plan.nodes == {"one": plan.machine, "two": plan.machine}
    assert set(plan.descriptions) == {"before", "after"}
    assert plan.repeats == []
    assert stderr.count(" done on one in ") + stderr.count(" done on two in ") == 5
    assert not cluster.left()


def test_ctrl_c_ends_all_nodes_blocks_and_the_rest_is_measured_without_ray(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one", "two")
    bench = start(environment, tmp_path, "run", *LONG, "--trials", "4", "--ray", cluster.address)
    bench.wait_for(" of 4 done on ")
    assert " of 4 trials are kept, go on with bench run --resume" in bench.interrupt()
    assert not cluster.left()
    folder = only_run(tmp_path)
    kept = {number: written(folder, number) for number in tables.finished_blocks(folder)}
    assert kept
    code, _, stderr = start(environment, tmp_path, "run", "--resume", str(folder)).end()
    assert code == 0, stderr
    assert {number: written(folder, number) for number in kept} == kept
    assert {number for number, node in enumerate(measured_by(folder)) if node} == set(kept)


def written(folder: Path, number: int) -> bytes:
    return tables.table_path(folder, number, "requests").read_bytes()


def test_a_node_that_dies_costs_its_block_which_another_measures_in_the_same_order(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one", "two")
    bench = start(environment, tmp_path, "run", *LONG, "--trials", "3", "--ray", cluster.address)
    bench.wait_for("first boots (discarded) done")
    cluster.workers(2)
    cluster.kill("two")
    code, _, stderr = bench.end()
    assert code == 0, stderr
    folder = only_run(tmp_path)
    by = measured_by(folder)
    plan = read_manifest(folder)
    (block,) = repeated(plan)
    assert by == ["one"] * 3
    assert f"trial {block + 1} is measured once more" in stderr
    assert "died" in plan.repeats[0].reason


def in_a_block(bench: Bench, cluster: Nodes) -> None:
    """Until the run is past its first block, and an engine serves the next one."""
    bench.wait_for("trial 1 of 2 done on one")
    cluster.workers()
    cluster.measuring()


def test_a_worker_that_is_killed_costs_its_block_and_killed_again_the_run(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one")
    bench = start(environment, tmp_path, "run", *LONG, "--trials", "2", "--ray", cluster.address)
    in_a_block(bench, cluster)
    (worker,) = cluster.workers()
    worker.kill()
    bench.wait_for("trial 2 is measured once more")
    worker.wait()
    (worker,) = cluster.workers()
    worker.kill()
    code, _, stderr = bench.end()
    assert code == 4
    assert "its worker died" in last_line(stderr)
    assert "1 of 2 trials are kept" in last_line(stderr)
    assert repeated(read_manifest(only_run(tmp_path))) == [1]
    assert not cluster.left()


def test_a_driver_that_is_killed_leaves_nothing_running_and_is_gone_on_with(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one")
    bench = start(environment, tmp_path, "run", *LONG, "--trials", "2", "--ray", cluster.address)
    in_a_block(bench, cluster)
    bench.popen.kill()
    bench.popen.wait()
    assert not cluster.left()
    folder = only_run(tmp_path)
    kept = written(folder, 0)
    code, _, stderr = start(
        environment, tmp_path, "run", "--resume", str(folder), "--ray", cluster.address
    ).end()
    assert code == 0, stderr
    assert written(folder, 0) == kept
    assert measured_by(folder) == ["one"] * 2


def test_an_engine_that_breaks_ends_the_run_with_its_words_and_its_node(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one")
    asked = ("run", *CLOCKWORK, "--set", "boot=breaks", "--ray", cluster.address)
    code, _, stderr = start(environment, tmp_path, *asked).end()
    assert code == 4
    assert "on the node one: " in last_line(stderr)
    assert "the mainspring is broken" in last_line(stderr)
    asked = ("run", *CLOCKWORK, "--set", "python=/nowhere/python", "--ray", cluster.address)
    code, _, stderr = start(environment, tmp_path, *asked).end()
    assert code == 2
    assert "on the node one: can't start before with /nowhere/python" in last_line(stderr)
    assert not list((tmp_path / "results").iterdir())


def test_sweeps_and_experiments_run_on_a_cluster_too(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    """The runs of an experiment share their boots, so trial by trial they have the same node."""
    cluster.has("one", "two")
    for name, asked in (
        ("sweep", ("sweep", *COMPARE, "--trials", "1", "--over", "interval_ms=1,2")),
        ("experiment", ("experiment", "run", write_experiment(tmp_path), "--rounds", "1")),
    ):
        out = tmp_path / name
        code, _, stderr = start(
            environment, tmp_path, *asked, "--out", str(out), "--ray", cluster.address
        ).end()
        assert code == 0, stderr
        (whole,) = (each for each in out.iterdir() if each.name != "floors")
        by = [measured_by(each) for each in sorted(whole.iterdir()) if (each / "manifest.json").exists()]
        assert len(by) == 2
        assert {node for nodes_of_run in by for node in nodes_of_run} == {"one", "two"}
    assert by[0] == by[1]
