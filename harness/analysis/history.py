"""What the gates of main say together: where the change against one base moved, though each gate passed.

A gate compares its head with its base on one machine, in the same minutes. So its change can be set beside
that of another night, which its times can't: the machine is another one, or in another mood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.analysis.result import GateVerdict, History, Moved, Result
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.stats.change_points import ChangePoint, change_points, scatter
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.manifest import Manifest

NEAR = 2  # gates that a place may be off (results/reference/proofs/gates.md)
NEEDS_REFS = "--history is of gates of git refs: give --base-ref, the same each time, and --head-ref"


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """A gate as a history keeps it: one line of a file."""

    schema_version: int
    run: str
    created: str
    setting: str  # a digest of all that was asked for but the commits
    base: str  # commits
    head: str
    machine: str
    verdict: GateVerdict
    changes: dict[str, float]  # head/base - 1, by metric


def remembered(result: Result, manifest: Manifest) -> Remembered:
    """A gate for its history. Raises BadSetting where it was not of two refs."""
    before, after = manifest.design.arms
    if before.ref is None or after.ref is None:
        raise api.BadSetting(NEEDS_REFS)
    assert result.gate is not None
    return Remembered(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        created=manifest.created,
        setting=_setting(manifest),
        base=before.ref.commit,
        head=after.ref.commit,
        machine=manifest.measured_on.cpu,
        verdict=result.gate.verdict,
        changes={name: each.change for name, each in result.gate.metrics.items() if each.change > -1},
    )


def _setting(manifest: Manifest) -> str:
    """Gates of other settings have changes of their own; how many blocks there were is none of them, nor is
    which machine of the kind measured."""
    of = noise_floor.circumstances(manifest, 0)
    arms = [(arm.toggles, arm.env) for arm in manifest.design.arms]
    parts: tuple[object, ...] = (
        of.kind,
        of.engine,
        of.model,
        _written(of.options),
        of.workload,
        of.method,
        arms,
    )
    parts += tuple(filter(None, (of.goodput, _of_its_own(manifest, of.options))))  # few have them
    return blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=8).hexdigest()


def _written(options: api.EngineOptions) -> api.EngineOptions:
    """The options as histories have them since they began: no pace is None."""
    return msgspec.structs.replace(options, pace=options.pace or None)


def _of_its_own(manifest: Manifest, before: api.EngineOptions) -> object:
    """The after arm's engine, interpreter and options, where they are not those of before."""
    first, last = manifest.design.arms[0], manifest.design.arms[-1]
    after = noise_floor.without_k_of(last.options, manifest.descriptions[last.name].device["kind"])
    after, before = _written(after), _written(before)
    own = (last.engine, last.python, after)
    return None if own == (first.engine, first.python, before) else own


def added(past: Sequence[Remembered], this: Remembered) -> list[Remembered]:
    """The history with this gate: as its last or, where it is judged again, in its old place, for changes are
    found in the order of the nights, and with what it was judged by before."""
    before = next((each for each in past if each.run == this.run), None)
    if before is None:
        return [*past, this]
    again = msgspec.structs.replace(this, changes={**before.changes, **this.changes})
    return [again if each is before else each for each in past]


def history_of(gates: Sequence[Remembered], this: Remembered) -> History:
    """What the gates of this one's setting and base say together of its metrics."""
    return _history(_alike(gates, this), this.changes)


def found_now(gates: Sequence[Remembered], this: Remembered) -> list[Moved]:
    """The last change for the worse of each metric of which the gates beside this one showed fewer: one whose
    place moves by a night is the same one still."""
    alike = _alike(gates, this)
    now = _worse(alike, this.changes)
    known = Counter(
        each.metric for each in _worse([each for each in alike if each.run != this.run], this.changes)
    )
    counted = Counter(each.metric for each in now)
    last = {each.metric: each for each in now}
    return [each for name, each in last.items() if counted[name] > known[name]]


def span(gates: Sequence[Remembered], metric: str | None = None) -> tuple[str, str, str] | None:
    """The latest change for the worse that they show, of that metric or any: its metric, and the heads
    between which it lies, with NEAR gates more on either side. None where they show none."""
    alike = _alike(gates, gates[-1]) if gates else []
    found = []
    names = dict.fromkeys(name for gate in alike for name in gate.changes if metric in (None, name))
    for each in _worse(alike, names):
        having = [gate for gate in alike if each.metric in gate.changes]
        at = [(gate.head, gate.created) for gate in having].index((each.first, each.when))
        last, first = max(0, at - 1 - NEAR), min(len(having) - 1, at + NEAR)
        found.append((alike.index(having[at]), each.metric, having[last].head, having[first].head))
    return max(found)[1:] if found else None


def _alike(gates: Sequence[Remembered], this: Remembered) -> list[Remembered]:
    return [each for each in gates if (each.setting, each.base) == (this.setting, this.base)]


def _worse(alike: Sequence[Remembered], names: Iterable[str]) -> list[Moved]:
    return [each for each in _history(alike, names).moved if each.worse] if alike else []


def _history(alike: Sequence[Remembered], names: Iterable[str]) -> History:
    """What they say of these metrics; a gate may be of others, as where each metric has its own."""
    spread: dict[str, float | None] = {}
    moved: list[Moved] = []
    counts: list[int] = []
    for name in names:
        having = [each for each in alike if name in each.changes]
        counts.append(len(having))
        values = [float(np.log1p(each.changes[name])) for each in having]
        points = change_points(values)
        spread[name] = scatter(values, points)
        starts = [0, *(each.index for each in points), len(having)]
        for point, before, after in zip(points, starts, starts[2:], strict=False):
            moved.append(_moved(name, point, having[before : point.index], having[point.index : after]))
    gates = min(counts, default=len(alike))
    return History(base=alike[-1].base, gates=gates, scatter=spread, moved=moved)


def _moved(name: str, point: ChangePoint, old: Sequence[Remembered], new: Sequence[Remembered]) -> Moved:
    return Moved(
        metric=name,
        last=old[-1].head,
        first=new[0].head,
        when=new[0].created,
        change=float(np.expm1(point.shift)),
        ci_low=float(np.expm1(point.low)),
        ci_high=float(np.expm1(point.high)),
        p=point.p,
        gates=len(new),
        worse=(point.shift > 0) == (definitions.METRICS[name].better == "lower"),
        other_machines={each.machine for each in old}.isdisjoint(each.machine for each in new),
    )
