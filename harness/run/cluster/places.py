"""Where blocks can be measured now, and whether the cluster is still there to be asked."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from overlap_bench.harness.run.hosts import RunFailed

RESOURCE = "bench_node"
LOOK_S = 1.0  # between two looks for nodes
HEAD_S = 20.0  # without an answer, after which a cluster counts as gone


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks can be measured now: how many at once on each node, by Ray's id of it, and what of a node
    each takes."""

    on: dict[str, int]
    cpus: float = 0
    gpus: float = 0

    @property
    def count(self) -> int:
        return sum(self.on.values())

    def free(self, taken: Iterable[str]) -> str:
        """A node that can measure another block, `taken` being where blocks are under way: fewer of them than
        there are places. Those of a node that died since are nowhere."""
        under_way = Counter(taken)
        return next(node for node, most in self.on.items() if under_way[node] < most)


def places(nodes: list[dict[str, Any]]) -> Places:
    """The places on the nodes that Ray lists. What a block takes fits on the smallest of them."""
    marked = {
        each["NodeID"]: each["Resources"]
        for each in nodes
        if each["Alive"] and each["Resources"].get(RESOURCE, 0) >= 1
    }
    if not marked:
        return Places({})
    cpus, gpus = (
        min(each.get(what, 0) / each[RESOURCE] for each in marked.values()) for what in ("CPU", "GPU")
    )
    return Places({node: int(each[RESOURCE]) for node, each in marked.items()}, _whole(cpus), _whole(gpus))


def _whole(count: float) -> float:
    """Ray has parts of one, and whole ones."""
    return count if count < 1 else int(count)


@dataclass(slots=True)
class Lookout:
    """Looks for nodes, from a thread of its own. Whoever asks a cluster whose head is gone gets no answer,
    and a minute later Ray ends the process without a word: so a run does not ask, and looks at the clock."""

    ray: Any
    _nodes: list[dict[str, Any]] = field(default_factory=list)
    _seen: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._look()
        self._thread = threading.Thread(target=self._keep_looking, name="lookout", daemon=True)
        self._thread.start()

    def places(self) -> Places:
        """Raises RunFailed where the cluster does not answer any more."""
        silent = time.monotonic() - self._seen
        if silent > HEAD_S:
            raise RunFailed(f"the cluster is gone: its head has not answered for {silent:.0f} s")
        return places(self._nodes)

    def forget(self, node: str) -> None:
        """One that died since the last look."""
        self._nodes = [each for each in self._nodes if each["NodeID"] != node]

    def _look(self) -> None:
        self._nodes = self.ray.nodes()
        self._seen = time.monotonic()

    def _keep_looking(self) -> None:
        while not self._over.wait(LOOK_S):
            with suppress(Exception):  # Ray's words for no answer; the time since the last one tells
                self._look()

    def close(self) -> None:
        """It is not waited for for long: it may be the one who gets no answer."""
        self._over.set()
        self._thread.join(LOOK_S)
