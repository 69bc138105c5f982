"""Whole runs, made: of two arms and of three, factorials and sweeps, in memory and on disk."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.plan.design import Arm, Design, orders
from overlap_bench.harness.plan.factors import make_factorial
from overlap_bench.harness.plan.grid import Axis, Point
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.store import sweep
from overlap_bench.harness.store.files import SCHEMA_VERSION, SWEEP_FILE, write_json, write_summary
from overlap_bench.harness.store.manifest import Manifest, write_manifest
from overlap_bench.harness.store.tables import Block, write_block
from tests.support.made_blocks import block, blocks, described, manifest, side

ENGINES = {"overlap": SPEC}


def stored(
    folder: Path,
    name: str,
    factor: float = 1.0,
    plan: Manifest | None = None,
    count: int | None = None,
    measured: Sequence[Block] = (),
) -> str:
    """A run on disk, whose after arm's TPOT is `factor` times the before arm's 4 ms, or with these blocks."""
    plan = msgspec.structs.replace(plan or manifest(), run=name)
    path = folder / name
    write_manifest(path, plan)
    arms = [arm.name for arm in plan.design.arms]
    for each in measured or blocks(factor, count or plan.design.blocks):
        write_block(path, each.number, each.only(arms).tables)
    return str(path)


def factorial_design(toggles: str = "h2d,output", **asked: Any) -> Design:
    """Judged by TPOT, which the blocks that are made here have."""
    asked["design"] = {"primary": "tpot_ms_p50", **asked.get("design", {})}
    return make_factorial(Request(**asked), toggles, ENGINES, lambda: "emulated")


def planned_factorial(toggles: str, blocks: int = 6, **asked: Any) -> Manifest:
    """The manifest of a factorial."""
    found = factorial_design(toggles, design={"blocks": blocks}, **asked)
    return msgspec.structs.replace(
        manifest(blocks),
        design=found,
        orders=[orders("0", number, len(found.arms)) for number in range(blocks)],
        descriptions={arm.name: described() for arm in found.arms},
    )


def factorial_blocks(
    plan: Manifest, tpot_ms: dict[str, float], noise: float = 0.001, **last: Any
) -> list[Block]:
    """Blocks with that TPOT in each arm."""
    random = np.random.default_rng(1)
    names = [arm.name for arm in plan.design.arms]

    def luck() -> float:
        return float(np.exp(random.normal(0, noise)))

    def more(name: str) -> dict[str, Any]:
        return last if name == names[-1] else {}

    return [
        block(number, {name: side(tpot_ms[name] * luck(), **more(name)) for name in names})
        for number in range(plan.design.blocks)
    ]


TPOT = {"before": 4.0, "h2d": 3.8, "output": 3.6, "h2d+output": 3.6 * 0.97}


@cache
def factorial_found(noise: float = 0.001, **last: Any) -> Result:
    """Its result: read by many, changed by none."""
    plan = planned_factorial("h2d,output")
    return comparison.result(plan, factorial_blocks(plan, TPOT, noise, **last))


NAMES = ("before", "half", "all")


def three(blocks: int = 6, **design: Any) -> Manifest:
    """A manifest of three arms."""
    plan = manifest(blocks, **design)
    arms = tuple(
        Arm(name=name, engine="e", options=api.EngineOptions(), toggles={"h2d": choice})
        for name, choice in zip(NAMES, ("pageable", "pinned", "packed"), strict=True)
    )
    return msgspec.structs.replace(
        plan,
        design=msgspec.structs.replace(plan.design, name="steps", arms=arms),
        orders=[orders("0", number, 3) for number in range(blocks)],
        descriptions={name: described() for name in NAMES},
    )


def three_blocks(factors: tuple[float, float], noise: float = 0.001, **last: Any) -> list[Block]:
    """Blocks in which the TPOT of the second and third arm is so many times the first's."""
    tpot_ms = {name: 4 * factor for name, factor in zip(NAMES, (1, *factors), strict=True)}
    return factorial_blocks(three(), tpot_ms, noise, **last)


def stored_three(folder: Path, factors: tuple[float, float] = (0.9, 0.8)) -> Path:
    return Path(stored(folder.parent, folder.name, plan=three(), measured=three_blocks(factors)))


FACTORS = {1: 0.95, 8: 0.9, 32: 1.0}


def stored_sweep(folder: Path) -> Path:
    """Three points, of which two are finished."""
    made = []
    for concurrency in FACTORS:
        plan = manifest()
        workload = msgspec.structs.replace(plan.design.workload, arrival="closed", concurrency=concurrency)
        design = msgspec.structs.replace(plan.design, workload=workload)
        made.append((Point(at={"concurrency": str(concurrency)}, design=design), plan))
    plan = made[0][1]
    axes = (Axis(name="concurrency", values=tuple(map(str, FACTORS))),)
    planned = sweep.Sweep(
        schema_version=SCHEMA_VERSION,
        sweep=folder.name,
        created=plan.created,
        axes=axes,
        points=tuple(point for point, _ in made),
        machine=plan.machine,
        code=plan.code,
        versions={},
    )
    write_json(folder / SWEEP_FILE, planned)
    for number, (point, plan) in enumerate(made[:2]):
        plan = msgspec.structs.replace(plan, design=point.design)
        run = stored(folder, f"run-{number}", FACTORS[int(point.at["concurrency"])], plan)
        write_summary(Path(run), {})
    return folder
