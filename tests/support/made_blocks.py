"""Blocks as a run would have stored them, made up so that what is in them is known; with the manifest of such
a run, and the result that they give."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from rich.console import Console

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.explain import Explained
from overlap_bench.harness.analysis.plain import from_plain, to_plain
from overlap_bench.harness.analysis.result import Comparison, FactorialResult, Result
from overlap_bench.harness.common.machine import Code, Machine
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.report import formats
from overlap_bench.harness.store.files import SCHEMA_VERSION, read_summary
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import TABLES, Block
from overlap_bench.harness.workload.workload import Workload

REQUESTS = 12
MS = 1_000_000


def described(kind: str = "emulated") -> api.Description:
    return api.Description(
        engine="e",
        versions={},
        device={"kind": kind, "name": "x"},
        model={"name": "m", "vocabulary": 9, "context": 99},
        toggles={},
        deterministic=True,
        pids={},
    )


def manifest(blocks: int = 6, arms: int = 2, **design: Any) -> Manifest:
    both = (
        Arm(name="before", engine="e", options=api.EngineOptions(), toggles={"h2d": "pageable"}),
        Arm(name="after", engine="e", options=api.EngineOptions(), toggles={"h2d": "pinned"}),
    )
    planned = Design(name="pinned-h2d", arms=both[:arms], blocks=blocks, **{"workload": Workload(), **design})
    return Manifest(
        schema_version=SCHEMA_VERSION,
        run="a-run",
        created="2026-05-04T03:02:01+00:00",
        design=planned,
        after_first=[block % 2 == 0 for block in range(blocks)],
        machine=Machine(cpu="a cpu", cores=2, kernel="6", memory_gib=8, gpus=[]),
        code=Code(commit="abc", changes=""),
        versions={},
        descriptions={arm.name: described() for arm in planned.arms},
    )


def requests(tpot_ms: float, lag_ms: float = 0.1, digest: str = "d", wait_ms: float = 0.0) -> pd.DataFrame:
    """Requests of 5 tokens, one chunk each; `wait_ms` is added to the queue wait of each later request."""
    rows = []
    for index in range(REQUESTS):
        due = index * 20 * MS
        sent = due + round(lag_ms * MS)
        admitted = sent + round((0.2 + wait_ms * index) * MS)
        chunks = admitted + (3 * MS + np.arange(5) * tpot_ms * MS).astype(np.int64)
        rows.append(
            {
                "request": index,
                "scheduled_ns": due,
                "sent_ns": sent,
                "submitted_ns": sent + 1000,
                "accepted_ns": sent + 2000,
                "tokenized_ns": sent + 2000,
                "admitted_ns": admitted,
                "chunk_ns": chunks,
                "chunk_tokens": np.ones(5, dtype=np.int64),
                "token_ns": chunks - 1000,
                "finished_ns": int(chunks[-1]) + 1000,
                "reason": "length",
                "prompt_tokens": 1,
                "completion_tokens": 5,
                "digest": f"{digest}{index}",
                "error": "",
            }
        )
    return pd.DataFrame(rows)


def steps(interval_ms: float, count: int = 10) -> pd.DataFrame:
    rows = []
    for index in range(count):
        start = round(index * interval_ms * MS)
        row = {"step": index, "kind": "decode" if index else "prefill", "batch": 4, "tokens": 4, "dropped": 0}
        row |= {
            "preempted": 0,
            "given": 4,
            "device_start_ns": start,
            "device_end_ns": start + MS,
            "device_ns": MS,
        }
        for phase in api.PHASES:
            row |= {f"{phase}.start": start, f"{phase}.end": start + 1000}
        rows.append(row)
    return pd.DataFrame(rows)


def block(number: int, arms: dict[str, dict[str, pd.DataFrame]]) -> Block:
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for arm, frames in arms.items():
        for name, frame in frames.items():
            parts[name].append(frame.assign(arm=arm, round=frame.get("round", 0)))
    return Block(
        number,
        {
            name: pd.concat(each, ignore_index=True) if each else pd.DataFrame()
            for name, each in parts.items()
        },
    )


def side(tpot_ms: float, copies: int = 7, **more: Any) -> dict[str, pd.DataFrame]:
    asked = requests(tpot_ms, **more)
    made = steps(tpot_ms)
    row = {"counter.copies": copies * len(made), "load_1m": 0.1, "steal_share": 0.0, "others_share": 0.0}
    row |= {"started_ns": 0, "ended_ns": int(asked["finished_ns"].max())}
    work = made[["step", "device_start_ns", "device_end_ns"]].set_axis(["step", "start_ns", "end_ns"], axis=1)
    rounds = pd.DataFrame([row])
    return {"requests": asked, "steps": made, "rounds": rounds, "work": work.assign(kind="program")}


def blocks(factor: float, count: int = 6, noise: float = 0.001, **after: Any) -> list[Block]:
    """`count` blocks in which the after arm's TPOT is `factor` times the before arm's."""
    random = np.random.default_rng(1)
    pairs = np.exp(random.normal(0, noise, (count, 2)))
    return [
        block(number, {"before": side(4 * left), "after": side(4 * factor * right, **after)})
        for number, (left, right) in enumerate(pairs)
    ]


_found: dict[bytes, Result] = {}


def result(factor: float = 0.9, plan: Manifest | None = None, **more: Any) -> Result:
    """Read by many, changed by none, and so computed once."""
    plan = plan or manifest()
    asked = msgspec.json.encode((factor, plan, more))
    if asked not in _found:
        _found[asked] = comparison.result(plan, blocks(factor, plan.design.blocks, **more))
    return _found[asked]


def warned(found: Comparison | Explained | FactorialResult) -> list[str]:
    """The texts of its warnings."""
    return [each.text for each in found.warnings]


def shown(found: msgspec.Struct, width: int, whole: bool = True) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False).print(
        *formats.to_terminal(found, width, whole), sep="\n"
    )
    return text.getvalue()


def stored_result(folder: Path) -> dict[str, Any]:
    """What a run's folder keeps of its result, as it is printed."""
    return to_plain(from_plain(read_summary(folder), Result))
