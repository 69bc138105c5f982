"""What a node of a cluster does: one block of a run, from its boots to its tables. Ray runs it as a task."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from engines import api
from harness.common import machine
from harness.common.differences import difference
from harness.common.machine import Machine
from harness.run import blocks
from harness.run.events import Event, Said
from harness.run.hosts import spec_of
from harness.run.session import Session
from harness.run.worktrees import checked_out
from harness.store.manifest import Manifest, check_same_data
from harness.store.tables import packed


@dataclass(frozen=True, slots=True)
class Measured:
    """What a node sends back. `tables`: the block's parquet files; none of the discarded block, -1, after
    which `manifest` has what the engines said of themselves."""

    node: str
    machine: Machine
    manifest: bytes
    tables: dict[str, bytes]
    seconds: float
    stolen: float
    said: list[str]


def measure(asked: bytes, number: int, node: str, warm: Collection[str]) -> Measured:
    """Measure a block of the run whose manifest is `asked`, on this machine, which is called `node`. Where it
    is not one of the `warm`, its first boots are thrown away, as everywhere. Raises BadSetting where it can't
    measure what the run is made of, and as run.blocks.measure does; in each case no process is left."""
    began = time.monotonic()
    said: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.line)

    manifest = msgspec.json.decode(asked, type=Manifest)
    tables = {}
    try:
        check(manifest, machine.code(), machine.versions())
        with checked_out(manifest.design.arms) as worktrees, Session(worktrees) as session:
            if number == -1 or node not in warm:
                (manifest,) = blocks.discarded(session, [manifest], 0, observe)
            if number >= 0:
                (tables,) = blocks.one_block(session, [manifest], number, observe, lambda measured: None)
    except api.EngineError as error:
        error.args = (f"on the node {node}: {error}",)
        raise
    if tables:
        tables["rounds"]["node"] = node
    return Measured(
        node=node,
        machine=machine.fingerprint(),
        manifest=msgspec.json.encode(manifest),
        tables=packed(tables),
        seconds=time.monotonic() - began,
        stolen=blocks.stolen([tables]) if tables else 0.0,
        said=said,
    )


def check(manifest: Manifest, code: machine.Code, versions: dict[str, str]) -> None:
    """Raises BadSetting unless this node, which has that code and those versions, would measure the same as
    the machine that the run was asked for on."""
    for what, wanted, here in (("code", manifest.code, code), ("versions", manifest.versions, versions)):
        if other := difference(msgspec.to_builtins(wanted), msgspec.to_builtins(here)):
            raise api.BadSetting(f"other {what} than where the run was asked for: {other}; install the same")
    check_same_data(manifest)
    for arm in manifest.design.arms:
        spec_of(arm).check(arm.toggles)
