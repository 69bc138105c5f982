"""What a node of a cluster does: one block of a run, from its boots to its tables. Ray runs it as a task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common import machine
from overlap_bench.harness.common.machine import Machine
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics.block import Values, of_block
from overlap_bench.harness.run import trial
from overlap_bench.harness.run.hosts import spec_of
from overlap_bench.harness.run.messages import Event, Said
from overlap_bench.harness.run.session import Session, checked_out
from overlap_bench.harness.store.manifest import Manifest, check_same_data
from overlap_bench.harness.store.tables import Block, packed

if TYPE_CHECKING:
    import pandas as pd


ON_NODE = "on the node "


@dataclass(frozen=True, slots=True)
class Measured:
    """What a node sends back. Of each run the block's parquet files, and the values that its metrics have in
    it: made here, since a driver that makes them for a hundred nodes is busy with that. None of the discarded
    block, -1, after which the `manifests` have what the engines said of themselves."""

    node: str  # its name
    machine: Machine
    manifests: list[bytes]
    tables: list[dict[str, bytes]]
    values: list[Values]
    seconds: float
    stolen: float
    said: list[str]
    id: str = ""  # Ray's, of the node


def measure(asked: Sequence[bytes], number: int, node: str, warm: bool) -> Measured:
    """Measure a block of the runs whose manifests are `asked`, on this machine, which is called `node`. Where
    it is not `warm`, its first boots are thrown away, as everywhere. Raises BadSetting where it can't measure
    what the runs are made of, and as studies.measure.trials does; in each case no process is left."""
    began = time.monotonic()
    said: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.line)

    manifests = [msgspec.json.decode(each, type=Manifest) for each in asked]
    tables: list[dict[str, pd.DataFrame]] = []
    try:
        for manifest in manifests:
            check(manifest, machine.code(), machine.versions())
        with checked_out(manifests[0].design) as trees, Session(trees.places) as session:
            if number == -1 or not warm:
                manifests = trial.first_boots(session, trees, manifests, 0, observe)
            if number >= 0:
                tables = trial.measure(session, manifests, number, observe, lambda measured: None)
    except api.EngineError as error:
        error.args = (f"{ON_NODE}{node}: {error}",)
        raise
    for each in tables:
        each["rounds"]["node"] = node
    return Measured(
        node=node,
        machine=machine.fingerprint(),
        manifests=[*map(msgspec.json.encode, manifests)],
        tables=[*map(packed, tables)],
        values=[values_of(manifests[run], Block(number, each)) for run, each in enumerate(tables)],
        seconds=time.monotonic() - began,
        stolen=trial.stolen(tables) if tables else 0.0,
        said=said,
    )


def without_node(said: str) -> str:
    """What `measure` raised, without the name of the node that it ran on."""
    return said.partition(": ")[2] if said.startswith(ON_NODE) else said


def values_of(manifest: Manifest, block: Block) -> Values:
    design = manifest.design
    return of_block(block.of, [arm.name for arm in design.arms], design.goodput)


def check(manifest: Manifest, code: machine.Code, versions: dict[str, str]) -> None:
    """Raises BadSetting unless this node, which has that code and those versions, would measure the same as
    the machine that the run was asked for on."""
    for what, wanted, here in (("code", manifest.code, code), ("versions", manifest.versions, versions)):
        if other := difference(wanted, here):
            raise api.BadSetting(f"other {what} than where the run was asked for: {other}; install the same")
    check_same_data(manifest)
    for arm in manifest.design.arms:
        spec_of(arm).check(arm.toggles)
