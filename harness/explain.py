"""`bench explain RUN`: where each decode step's interval goes, what made the late requests late, and what the
toggle should have given. Reads a stored run; what it prints is one plain object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engines import api
from harness import across_runs, attribution, comparison, stats, tail
from harness.block import Block
from harness.design import Arm
from harness.store import SCHEMA_VERSION, Manifest

if TYPE_CHECKING:
    import pandas as pd

MOST_UNATTRIBUTED = 0.03  # of a step, above which a warning says so
SHOWN_CAUSES = 3


def explain(folder: Path) -> dict[str, Any]:
    """What the records of a finished run say of its time.

    {"schema_version", "run", "device", "variant", "before", "after", "blocks", "confidence", "intervals":
    decode intervals by arm, "step_us": {"interval" and each of attribution.PARTS: row}, "tail": [late],
    "prediction", "warnings"}. A row has before, after, delta, ci_low, ci_high (us) and share_before,
    share_after. With one arm, `after` and all that compares is null.

    Raises StoreError where the folder can't be read or the run is not finished, and BadSetting where it has
    no step records to explain.
    """
    manifest = across_runs.readable(folder)
    across_runs.check_two(folder, manifest)
    blocks, _ = across_runs.finished(folder, manifest)
    design = manifest.design
    arms = [[of_boot(block, arm, folder) for block in blocks] for arm in design.arms]
    alpha = design.alpha(len(blocks))
    means = [attribution.matched_means([boots[number] for boots in arms]) for number in range(len(blocks))]
    rows = {
        part: _row([[each[part] for each in block] for block in means], alpha)
        for part in ("interval_ns", *attribution.PARTS)
    }
    for side in ("before", "after"):
        whole = rows["interval_ns"][side]
        for row in rows.values():
            value = row[side]
            row[f"share_{side}"] = None if value is None or whole is None else value / whole
    step = {"interval": rows.pop("interval_ns"), **rows}
    before, *after = design.arms_with_plant(manifest.plant_ns)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": manifest.run,
        "device": manifest.descriptions[design.arms[0].name].device["kind"],
        "variant": design.name,
        "before": comparison.settings(before),
        "after": comparison.settings(after[0]) if after else None,
        "blocks": len(blocks),
        "confidence": 1 - alpha,
        "intervals": {arm.name: sum(map(len, boots)) for arm, boots in zip(design.arms, arms, strict=True)},
        "step_us": step,
        "tail": tails(design.arms, blocks),
        "prediction": predicted(manifest, blocks) if after else None,
        "warnings": warnings(step),
    }


def of_boot(block: Block, arm: Arm, folder: Path) -> pd.DataFrame:
    """attribution.attribute of one boot. Raises BadSetting where it has nothing to attribute."""
    steps, work = block.of(arm.name, "steps"), block.of(arm.name, "work")
    where = f"{folder}, block {block.number}, arm {arm.name}"
    if not len(steps):
        off = not arm.options.recorder
        none = f"the engine {arm.engine} records none, or steps.parquet is gone"
        why = "it ran with recorder=off" if off else none
        raise api.BadSetting(f"{where} has no step records to explain: {why}")
    parts = attribution.attribute(steps, work, arm.toggles.get("launch") == "thread")
    if not len(parts):
        raise api.BadSetting(f"{where} has no two decode steps in a row, so no interval to explain")
    return parts


def _row(per_block: Sequence[Sequence[float]], alpha: float) -> dict[str, float | None]:
    """One part: per block, its value in each arm."""
    values = np.array(per_block, np.float64).T
    if not np.isfinite(values).all():
        raise api.BadSetting("in some block the arms have no batch size in common, so no step to compare")
    row: dict[str, float | None] = dict.fromkeys(("before", "after", "delta", "ci_low", "ci_high"))
    row["before"] = float(values[0].mean())
    if len(values) == 2:
        effect = stats.effect(list(values[0]), list(values[1]), "difference", alpha)
        row |= {"after": effect.after, "delta": effect.delta, "ci_low": effect.low, "ci_high": effect.high}
    return row


def tails(arms: Sequence[Arm], blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """For each arm, metric and level, in that order: {"arm", "metric", "level", "samples", "enough",
    "percentile", "typical", "late", "causes"}, times in ms; causes are (activity, ms more than typical), the
    largest first."""
    found = []
    for arm in arms:
        boots = [tail.split(block.of(arm.name, "requests"), block.of(arm.name, "steps")) for block in blocks]
        for metric in tail.TAILS:
            for level in tail.LEVELS:
                late = tail.late(metric, [boot[metric] for boot in boots], level)
                if late is None:
                    continue
                causes = sorted(late.more.items(), key=lambda each: -each[1])
                found.append(
                    {
                        "arm": arm.name,
                        "metric": metric,
                        "level": level,
                        "samples": late.samples,
                        "enough": late.samples >= tail.NEEDED_SAMPLES[level],
                        "percentile": late.percentile,
                        "typical": late.typical,
                        "late": late.late,
                        "causes": [[name, more] for name, more in causes],
                    }
                )
    return found


def predicted(manifest: Manifest, blocks: Sequence[Block]) -> dict[str, Any]:
    """The prediction as `bench run` prints it."""
    per_block = [comparison.block_values(manifest.design, block) for block in blocks]
    found: dict[str, Any] = comparison.comparison(manifest, blocks, per_block)["prediction"]
    return found


def warnings(step: dict[str, dict[str, float | None]]) -> list[str]:
    """What a reader must know before believing the table."""
    lines = []
    for side in ("before", "after"):
        share = step["unattributed"][f"share_{side}"]
        if share is not None and share > MOST_UNATTRIBUTED:
            lines.append(
                f"{share:.1%} of the {side} arm's step is unattributed: code between two phases, or somebody "
                "else on the host's core"
            )
    return lines
