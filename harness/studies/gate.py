"""`bench gate`: from what was asked to a finished run, from a finished run to its verdict, and what is
written of that for people and for continuous integration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis import (
    comparison,
    gate,
    gate_plans,
    history,
    nodes,
    noise_floor,
    outputs,
    stored,
    turns,
    words,
)
from overlap_bench.harness.analysis.gate_plans import GatePlans
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.stored import finished, readable
from overlap_bench.harness.analysis.values import THROUGHPUTS, block_seconds, counted, offered_load
from overlap_bench.harness.analysis.values import judged as judged_by
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import DEFAULT_LIMIT, check_gated, check_split
from overlap_bench.harness.plan.request import GateRequest, Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run.hosts import engines_of
from overlap_bench.harness.run.overlay import check as check_pattern
from overlap_bench.harness.run.worktrees import resolve, uncommitted
from overlap_bench.harness.store.files import floors_of, read_json, read_json_lines, write_json_lines
from overlap_bench.harness.store.manifest import fresh
from overlap_bench.harness.studies import measure as measure_
from overlap_bench.harness.studies.measure import Display, Source, trials

Say = Callable[[str], None]
CALIBRATED_BY = 6  # blocks: of fewer, the SD is known too badly to plan with


def measure(
    request: Request, asked: GateRequest, out: Path, say: Say, display: Display, source: Source = trials
) -> Path:
    """Measure a base against a head; the folder of the run. Raises as measure.measure does, and BadSetting
    where what is asked is no gate's."""
    base, head = asked.base_ref, asked.head_ref
    if asked.history is not None and not (base and head):
        raise api.BadSetting(history.NEEDS_REFS)
    check_gated(asked.metric, _limit(asked))
    if {"primary", "secondaries"} & set(request.design):
        raise api.BadSetting("a gate is about its --metric; leave --primary and --secondary out")
    if request.until_precision is not None:
        raise api.BadSetting("a gate stops after --trials, or --until-decided")
    if head is not None and base is None:
        raise api.BadSetting("--head-ref needs a --base-ref to be compared with")
    if asked.overlay and base is None:
        raise api.BadSetting("--overlay lays files over the trees of refs: give a --base-ref")
    for pattern in asked.overlay:
        check_pattern(pattern)
    refs = None
    if base is not None:
        refs = (resolve(base, Path.cwd()), None if head is None else resolve(head, Path.cwd()))
        if refs[1] is not None and refs[0].commit == refs[1].commit:
            raise api.BadSetting(f"{base} and {head} are the same commit, {refs[0].commit[:10]}")
    request = msgspec.structs.replace(
        request,
        design={**request.design, **_verdicts(asked.metric)},
        refs=refs,
        overlay=asked.overlay,
        max_regression=_limit(asked),
    )
    design = make_design(request, engines_of(refs or ()), load_variants(), guess_device)
    if len(design.arms) < 2:
        raise api.BadSetting("a gate needs two arms: --variant, --after key=value, or --base-ref")
    for ref in filter(None, refs or ()):
        if changed := uncommitted(ref):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            say(f"{ref.name} is measured as it was committed, without your changes to {changed[0]}{more}")
    return measure_.measure(fresh(design, out), display, source).folder


def calibrate(request: Request, asked: GateRequest, out: Path, display: Display) -> GatePlans:
    """What a gate on the before arm can decide here, from that arm measured against itself, in blocks as a
    gate's. Raises as measure.measure does, and BadSetting for metrics or a limit that can't be gated."""
    names, limit = asked.metric, asked.max_regression
    check_gated(names, _limit(asked))
    minutes = request.design.get("max_minutes")
    planned = {name: value for name, value in request.design.items() if name != "max_minutes"}
    request = msgspec.structs.replace(
        request,
        design={"blocks": CALIBRATED_BY, **planned, **_verdicts(names)},
        after=(),
        against_itself=True,
        max_regression=_limit(asked),
        until_decided=False,  # its blocks are as a fixed gate's, whatever the gate does
        max_blocks=None,
    )
    design = make_design(request, api.find_engines(), load_variants(), guess_device)
    if design.blocks < 2:
        raise api.BadSetting("one trial has no SD: leave --trials out, or give six")
    began = time.monotonic()
    measured = measure_.measure(fresh(design, out), display)
    seconds = time.monotonic() - began
    _, per_block = finished(measured.folder, readable(measured.folder))
    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    most = cast("float | None", minutes)
    return gate_plans.of_equal_arms(measured.result, seconds, most, names, limit, offered)


def _verdicts(names: Sequence[str]) -> dict[str, object]:
    """What a gate on these metrics says in its design; they decide how it measures."""
    return {"primary": names[0], "secondaries": tuple(names[1:])} if names else {}


def _limit(asked: GateRequest) -> float:
    return DEFAULT_LIMIT if asked.max_regression is None else asked.max_regression


def as_planned(request: Request, asked: GateRequest) -> tuple[Request, GateRequest]:
    """What a gate is asked for with what a calibration recommends, where its file is given. Raises
    StoreError."""
    if asked.plan is None:
        return request, asked
    plain = read_json(asked.plan, dict[str, Any], "a calibration")
    plans = stored.as_found(asked.plan, plain, GatePlans)
    request, names, limit = gate_plans.applied(plans, request, asked.metric, asked.max_regression)
    return request, msgspec.structs.replace(asked, metric=tuple(names), max_regression=limit)


def judge(folder: Path, names: Sequence[str], limit: float | None) -> Result:
    """The result of a finished run with the gate's part, `gate`. `names` empty and `limit` None: as the run
    was planned, else its primary metric and DEFAULT_LIMIT. Raises StoreError for a run that can't be read or
    is not finished, and BadSetting where it can't be gated."""
    manifest = readable(folder)
    design = manifest.design
    stored.check_two(folder, manifest)
    if len(design.arms) < 2:
        raise api.BadSetting(f"{folder} has one arm, and a gate needs a before and an after")
    planned = design.gate.max_regression if design.gate is not None else DEFAULT_LIMIT
    wanted, most = tuple(names) or design.gated, planned if limit is None else limit
    check_gated(wanted, most)
    check_split(design, wanted)
    blocks, per_block = finished(folder, manifest)
    judged = judged_by(design, per_block, wanted, most)
    summary = comparison.result(manifest, blocks, per_block)
    level = design.one_sided(len(blocks))
    before, after = outputs.failed_shares(design, blocks)
    failing = gate.more_failed(before, after, most, level)
    compared = summary.comparisons[0]
    by_rounds = {name: each for name, each in judged.items() if not definitions.METRICS[name].of_turns}
    counting = counted(design, per_block, wanted)
    deciding = [per_block[place] for place in counting]
    doubt = turns.disagreement(design, deciding, 2 * level) if len(by_rounds) < len(judged) else None
    between = nodes.disagreement(design, deciding, [blocks[place].node for place in counting], wanted)
    apart = manifest.never_ran or doubt or between
    chosen = gate.unplanned(design, wanted, most)
    seconds = block_seconds(blocks)
    found = gate.result_of(
        judged, most, level, compared, manifest.promises_outputs, failing, apart, chosen, seconds,
        believed=by_rounds if doubt and not (manifest.never_ran or between) else {},
    )  # fmt: skip
    known = noise_floor.beside_known(summary, manifest, floors_of(folder))
    return msgspec.structs.replace(known, gate=found)


def remember(gated: Result, folder: Path, path: Path) -> Result:
    """The result of a gate with the part `history`: what it says together with those in the file at `path`,
    to which it is added. A change for the worse that they did not show yet keeps it from passing, this once.
    Raises StoreError and WriteFailed for the file, and BadSetting for a gate that was not of two refs."""
    this = history.remembered(gated, readable(folder))
    gates = history.added(read_json_lines(path, history.Remembered), this)
    write_json_lines(path, gates)
    assert gated.gate is not None
    new = [f"{words.moved(each)}, as no gate before showed" for each in history.found_now(gates, this)]
    judged = gate.doubted(gated.gate, new)
    return msgspec.structs.replace(gated, gate=judged, history=history.history_of(gates, this))
