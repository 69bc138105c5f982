"""A real Ray cluster on this machine: a head that measures nothing, nodes that come and are killed."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from overlap_bench.harness.run.cluster.places import RESOURCE
from tests.support.bench_command import LOOK_S, PATIENCE_S, wait_until

OURS = ("overlap_bench.engines.host", "overlap_bench.harness.run.load_generator")  # what a block starts
TASK = "ray::on_this_node"  # a worker's title while it measures
# Ray takes 15 s to notice that a node is gone. Here it asks twice a second, and is as patient with an answer.
LOOKED_AFTER = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class Nodes:
    """`address` of the cluster; what is started on it has `environment`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        from ray.cluster_utils import Cluster

        self._environment = {**environment, **LOOKED_AFTER, "RAY_USAGE_STATS_ENABLED": "0"}
        self._nodes: dict[str, Any] = {}
        with _environ(self._environment):
            self._cluster = Cluster()
            self._cluster.add_node(num_cpus=0, node_name="head", include_dashboard=False)
        self.address: str = self._cluster.address

    def has(self, *names: str) -> None:
        """Let these nodes be the ones that may measure: what is there stays, and its workers with it."""
        for name in [*self._nodes]:
            if name not in names:
                self._cluster.remove_node(self._nodes.pop(name))
        self._cluster.wait_for_nodes()
        self.add(*(name for name in names if name not in self._nodes))

    def add(self, *names: str) -> None:
        """Start nodes that may measure."""
        for name in names:
            with _environ(self._environment):
                self._nodes[name] = self._cluster.add_node(
                    num_cpus=1, resources={RESOURCE: 1}, node_name=name
                )

    def kill(self, name: str) -> None:
        """As by a machine that is switched off: none of its processes gets a word."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def workers(self, count: int = 1) -> list[psutil.Process]:
        """Workers that are measuring a block; waits for so many."""

        def found() -> list[psutil.Process]:
            measuring = _eldest(self._running((TASK,)))
            return measuring if len(measuring) >= count else []

        return wait_until(found, lambda: "no worker measures", LOOK_S)

    def measuring(self) -> None:
        """Wait until an engine runs."""
        wait_until(lambda: self._running(OURS[:1]), lambda: "no engine is started", LOOK_S)

    def left(self) -> list[psutil.Process]:
        """What blocks started and what still runs, once it had time to end."""
        deadline = time.monotonic() + PATIENCE_S / 10
        while (found := self._running(OURS)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _running(self, words: tuple[str, ...]) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                said = " ".join(process.cmdline())
                if any(word in said for word in words) and self._is_ours(process):
                    found.append(process)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        """Other tests run beside these, with folders of their own."""
        return bool(process.environ().get("TMPDIR") == self._environment["TMPDIR"])

    def stop(self) -> None:
        for name in [*self._nodes]:
            self.kill(name)
        self._cluster.shutdown()


def _eldest(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Without children of others: what a worker starts bears its name until it is what it shall be."""
    pids, found = {process.pid for process in processes}, []
    for process in processes:
        with suppress(psutil.Error):
            if process.ppid() not in pids:
                found.append(process)
    return found


@contextmanager
def _environ(environment: Mapping[str, str]) -> Iterator[None]:
    """Ray's processes get the environment of whoever starts them."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def nodes(environment: Mapping[str, str]) -> Iterator[Nodes]:
    """A cluster while inside. Skips where Ray is not installed."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'overlap-bench[ray]'")
    made = Nodes(environment)
    try:
        yield made
    finally:
        made.stop()
