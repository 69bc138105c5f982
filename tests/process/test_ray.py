"""Runs on a real Ray cluster of several nodes on this machine: what is kept, and what is left, when a node, a
worker or the driver dies. Skipped where Ray is not installed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import Manifest, read_manifest
from tests.process.test_experiment import write as write_experiment
from tests.support.bench_command import Bench, last_line, start
from tests.support.clockwork import CLOCKWORK, installed
from tests.support.ray_nodes import Nodes, nodes

COMPARE = (*CLOCKWORK, "--before", "pace=slow", "--after", "pace=fast")
LONG = (*COMPARE, "--num-requests", "60")  # a block takes seconds


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        yield {**installed(tmp_path_factory.mktemp("site")), "TMPDIR": sockets}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Nodes]:
    """One for all: each test says which nodes it has."""
    with nodes(environment) as made:
        yield made


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "results").iterdir()
    return found


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
    asked = ("run", *LONG, "--blocks", "5", "--format", "json", "--ray", cluster.address)
    bench = start(environment, tmp_path, *asked)
    bench.wait_for("first boots (discarded) done")
    cluster.add("two")
    code, stdout, stderr = bench.end()
    assert code == 0, stderr
    folder = run_folder(tmp_path)
    assert json.loads(stdout).items() >= json.loads((folder / "summary.json").read_text()).items()
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
    bench = start(environment, tmp_path, "run", *LONG, "--blocks", "4", "--ray", cluster.address)
    bench.wait_for(" of 4 done on ")
    bench.popen.send_signal(signal.SIGINT)
    code, stdout, stderr = bench.end()
    assert (code, stdout) == (130, "")
    assert " of 4 blocks are kept, go on with bench run --resume" in last_line(stderr)
    assert not cluster.left()
    folder = run_folder(tmp_path)
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
    bench = start(environment, tmp_path, "run", *LONG, "--blocks", "3", "--ray", cluster.address)
    bench.wait_for("first boots (discarded) done")
    cluster.workers(2)
    cluster.kill("two")
    code, _, stderr = bench.end()
    assert code == 0, stderr
    folder = run_folder(tmp_path)
    by = measured_by(folder)
    plan = read_manifest(folder)
    (block,) = repeated(plan)
    assert by == ["one"] * 3
    assert f"block {block + 1} is measured once more" in stderr
    assert "died" in plan.repeats[0].reason


def in_a_block(bench: Bench, cluster: Nodes) -> None:
    """Until the run is past its first block, and an engine serves the next one."""
    bench.wait_for("block 1 of 2 done on one")
    cluster.workers()
    cluster.measuring()


def test_a_worker_that_is_killed_costs_its_block_and_killed_again_the_run(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one")
    bench = start(environment, tmp_path, "run", *LONG, "--blocks", "2", "--ray", cluster.address)
    in_a_block(bench, cluster)
    (worker,) = cluster.workers()
    worker.kill()
    bench.wait_for("block 2 is measured once more")
    worker.wait()
    (worker,) = cluster.workers()
    worker.kill()
    code, _, stderr = bench.end()
    assert code == 4
    assert "its worker died" in last_line(stderr)
    assert "1 of 2 blocks are kept" in last_line(stderr)
    assert repeated(read_manifest(run_folder(tmp_path))) == [1]
    assert not cluster.left()


def test_a_driver_that_is_killed_leaves_nothing_running_and_is_gone_on_with(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has("one")
    bench = start(environment, tmp_path, "run", *LONG, "--blocks", "2", "--ray", cluster.address)
    in_a_block(bench, cluster)
    bench.popen.kill()
    bench.popen.wait()
    assert not cluster.left()
    folder = run_folder(tmp_path)
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
    """Of an experiment, the runs of one boot share their nodes, block by block."""
    cluster.has("one", "two")
    for name, asked in (
        ("sweep", ("sweep", *COMPARE, "--blocks", "1", "--over", "interval_ms=1,2")),
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


def test_a_cluster_without_a_node_that_may_measure_is_refused(
    cluster: Nodes, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster.has()
    asked = ("run", *COMPARE, "--ray", cluster.address)
    code, _, stderr = start(environment, tmp_path, *asked).end()
    assert code == 2
    assert "no node of the cluster has the resource bench_node" in last_line(stderr)


def test_this_machine_alone_is_a_cluster_too_and_finds_what_it_finds_without_ray(
    environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'overlap-bench[ray]'")
    results = []
    for name, ray in (("alone", ()), ("local", ("--ray", "local"))):
        (tmp_path / name).mkdir()
        asked = ("run", *COMPARE, "--blocks", "3", "--format", "json", *ray)
        bench = start(environment, tmp_path / name, *asked)
        code, stdout, stderr = bench.end()
        assert code == 0, stderr
        assert not bench.left()
        results.append(json.loads(stdout))
        assert len(read_manifest(run_folder(tmp_path / name)).nodes) == len(ray) / 2
    assert [*map(shape, results)] == [shape(results[0])] * 2


def shape(result: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how fast the machine was: what was compared with what, how, and what of it is
    judged."""
    (compared,) = result["comparisons"]
    same = ("before", "after", "blocks", "confidence", "margin", "primary", "outputs", "failures", "nodes")
    return {
        **{name: compared[name] for name in same},
        "metrics": {name: row["verdict"] is not None for name, row in compared["metrics"].items()},
        "mechanism": [*compared["mechanism"]],
        "stopped": result["stopped_because"],
    }


def test_without_ray_the_option_says_how_to_get_it(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "site" / "ray").mkdir(parents=True)
    (tmp_path / "site" / "ray" / "__init__.py").write_text("raise ImportError('not here')\n")
    without = {
        **environment,
        "PYTHONPATH": f"{tmp_path / 'site'}:{environment['PYTHONPATH']}",
    }
    code, _, stderr = start(without, tmp_path, "run", *COMPARE, "--ray", "local").end()
    assert code == 2
    assert last_line(stderr) == "bench: --ray needs Ray: pip install 'overlap-bench[ray]'"


def test_nothing_but_a_cluster_brings_ray() -> None:
    look = (
        "import sys; from overlap_bench.harness.cli.app import built; "
        "from overlap_bench.harness.run.cluster import driver; "
        "from overlap_bench.harness.studies import measure; built('run'); print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
