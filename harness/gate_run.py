"""A finished run judged by a gate, and what is written of it for people and for continuous integration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import api
from harness import across_runs, comparison, floors, gate, gate_tables, measure, store
from harness.across_runs import finished, readable

SUMMARY = "gate.md"
BENCHMARKS = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}


@dataclass(frozen=True, slots=True)
class Gated:
    """The result with the gate's part, `gate`; `outputs_differ` as in measure.Outcome."""

    result: dict[str, Any]
    outputs_differ: bool

    @property
    def verdict(self) -> gate.Verdict:
        """An output that differs fails, whatever the speed."""
        found: gate.Verdict = self.result["gate"]["verdict"]
        return "fail" if self.outputs_differ else found


def judge(folder: Path, names: Sequence[str], limit: float | None) -> Gated:
    """Judge a finished run. `names` empty and `limit` None: as the run was planned, else its primary metric
    and DEFAULT_LIMIT. Raises StoreError for a run that can't be read or is not finished, and BadSetting
    where it can't be gated."""
    manifest = readable(folder)
    design = manifest.design
    across_runs.check_two(folder, manifest)
    if len(design.arms) < 2:
        raise api.BadSetting(f"{folder} has one arm, and a gate needs a before and an after")
    planned = design.gate.max_regression if design.gate is not None else gate.DEFAULT_LIMIT
    wanted, most = tuple(names) or gate.gated(design), planned if limit is None else limit
    gate.check(wanted, most)
    blocks, per_block = finished(folder, manifest)
    judged = comparison.judged(design, per_block, wanted, most)
    summary = comparison.result(manifest, blocks, per_block)
    found = gate.as_plain(judged, most, gate.level(design, len(blocks)))
    result = floors.beside_known(summary, manifest, floors.folder_of(folder)) | {"gate": found}
    return Gated(result, measure.outputs_differ(manifest, summary))


def write(folder: Path, gated: Gated, environment: Mapping[str, str] = os.environ) -> None:
    """In `folder`: gate.md, and what github-action-benchmark reads, one file for metrics that are better
    smaller and one for the others; on GitHub also the summary of the step. Raises StoreError."""
    text = gate_tables.to_markdown(gated.result, gated.verdict)
    store.write_text(folder / SUMMARY, text)
    for better, name in BENCHMARKS.items():
        rows = gate.benchmark(gated.result, better)
        if rows:
            store.write_json(folder / name, rows)
    step = environment.get("GITHUB_STEP_SUMMARY")
    if step:
        store.append_text(Path(step), text)
