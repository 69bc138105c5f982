"""`bench gate`: from what was asked to a finished run, from a finished run to its verdict, and what is
written of that for people and for continuous integration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines import api
from harness import across_runs, comparison, floors, gate, gate_tables, outputs, store
from harness import measure as runs
from harness.across_runs import finished, readable
from harness.machine import guess_device
from harness.progress import on_stderr
from harness.settings import Asked, make_design
from harness.variants import load_variants
from harness.worktrees import resolve, uncommitted

Say = Callable[[str], None]
SUMMARY = "gate.md"
BENCHMARKS = {"lower": "smaller-is-better.json", "higher": "bigger-is-better.json"}


def measure(
    asked: Asked,
    base: str | None,
    head: str | None,
    names: Sequence[str],
    limit: float | None,
    out: Path,
    say: Say,
) -> Path:
    """Measure a base against a head; the folder of the run. `base` and `head` are git refs, or None; `names`
    and `limit` what it is judged by, and so planned for. Raises as measure.measure does, and BadSetting where
    what is asked is no gate's."""
    if {"primary", "secondaries"} & set(asked.design):
        raise api.BadSetting("a gate is about its --metric; leave --primary and --secondary out")
    if asked.until_precision is not None:
        raise api.BadSetting("a gate stops after --blocks, or --until-decided")
    if head is not None and base is None:
        raise api.BadSetting("--head-ref needs a --base-ref to be compared with")
    refs = None
    if base is not None:
        refs = (resolve(base, Path.cwd()), None if head is None else resolve(head, Path.cwd()))
        if refs[1] is not None and refs[0].commit == refs[1].commit:
            raise api.BadSetting(f"{base} and {head} are the same commit, {refs[0].commit[:10]}")
    verdicts: dict[str, Any] = {"primary": names[0], "secondaries": tuple(names[1:])} if names else {}
    asked = replace(
        asked,
        design={**asked.design, **verdicts},
        refs=refs,
        max_regression=gate.DEFAULT_LIMIT if limit is None else limit,
    )
    design = make_design(asked, api.find_engines(), load_variants(), guess_device)
    if len(design.arms) < 2:
        raise api.BadSetting("a gate needs two arms: --variant, --after key=value, or --base-ref")
    for ref in filter(None, refs or ()):
        if changed := uncommitted(ref):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            say(f"{ref.name} is measured as it was committed, without your changes to {changed[0]}{more}")
    return runs.measure(design, out, on_stderr).folder


def judge(folder: Path, names: Sequence[str], limit: float | None) -> dict[str, Any]:
    """The result of a finished run with the gate's part, `gate`. `names` empty and `limit` None: as the run
    was planned, else its primary metric and DEFAULT_LIMIT. Raises StoreError for a run that can't be read or
    is not finished, and BadSetting where it can't be gated."""
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
    level = gate.level(design, len(blocks))
    before, after = outputs.failed_shares(design, blocks)
    failing = gate.more_failed(before, after, most, level)
    compared = summary["comparisons"][0]
    found = gate.as_plain(judged, most, level, compared, manifest.promises_outputs, failing)
    return floors.beside_known(summary, manifest, floors.folder_of(folder)) | {"gate": found}


def write(folder: Path, result: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """In `folder`: gate.md, and what github-action-benchmark reads, one file for metrics that are better
    smaller and one for the others; on GitHub also the summary of the step. Raises StoreError."""
    text = gate_tables.to_markdown(result)
    store.write_text(folder / SUMMARY, text)
    for better, name in BENCHMARKS.items():
        rows = gate.benchmark(result, better)
        if rows:
            store.write_json(folder / name, rows)
        else:  # an earlier gate's would be taken for this one's
            (folder / name).unlink(missing_ok=True)
    step = environment.get("GITHUB_STEP_SUMMARY")
    if step:
        store.append_text(Path(step), text)
