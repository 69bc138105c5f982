"""Results of another tool as a run folder, one block a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.values import block_values, measured
from overlap_bench.harness.common import names
from overlap_bench.harness.common.machine import Code, Machine
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.definitions import TOLD
from overlap_bench.harness.metrics.requests import request_times
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.files import SCHEMA_VERSION, digest, write_summary
from overlap_bench.harness.store.manifest import (
    NOT_RECORDED,
    Imported,
    Manifest,
    whole_or_none,
    write_manifest,
)
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.studies.imports import files
from overlap_bench.harness.studies.imports.result import NO_LIMITS, NOT_TOLD, Sent, ToolResult, ns
from overlap_bench.harness.workload.workload import Workload

ARM = "before"
# The first of these that every file has is the run's primary.
PRIMARIES = ("tpot_ms_p50", "ttft_ms_p50", "latency_ms_p50", "throughput_tok_s", "throughput_req_s")
ALWAYS_LACKING = (
    "times inside the engine, steps and their phases, device work, mechanism counters",
    "machine, device, commit, and the engine's settings",
    "outputs to compare",
)


def bring(
    names: Sequence[str],
    results: Path,
    *,
    name: str | None,
    engine: str | None,
    fresh_boots: bool,
    goodput: Mapping[str, float],
) -> tuple[Path, Result]:
    """A new run folder under `results` with a block for each of the files, and its result. `goodput` is
    Design.goodput. Raises BadFile where a file can't be read, BadSetting where they do not belong together or
    do not say what goodput needs, and WriteFailed."""
    if len(names) > 1 and not fresh_boots:
        raise api.BadSetting(
            f"{len(names)} files are trials of one arm only if each is from a freshly started server: "
            "say so with --fresh-boots, or import them one by one"
        )
    read = [files.read(each) for each in names]
    for other, file in zip(read[1:], names[1:], strict=True):
        _check_alike(read[0], other, names[0], file)
    if goodput:
        read = [_counted_here(each, goodput, file) for each, file in zip(read, names, strict=True)]
    blocks = [_block(number, each, file) for number, (each, file) in enumerate(zip(read, names, strict=True))]
    with whole_or_none(results, name or read[0].tool.replace(" ", "-")) as (folder, now):
        manifest = _manifest(folder.name, now, read, names, name, engine, fresh_boots, goodput, blocks)
        for block in blocks:
            tables.write_block(folder, block.number, block.tables)
        write_manifest(folder, manifest)
        blocks = [Block(number, tables.read_block(folder, number)) for number in range(len(blocks))]
        summary = comparison.result(manifest, blocks)
        write_summary(folder, to_stored(summary))
    return folder, summary


def _counted_here(read: ToolResult, goodput: Mapping[str, float], file: str) -> ToolResult:
    """Without the goodput that the file gives, since its requests are counted by other limits."""
    requests = _requests(read.requests)
    served = requests[requests["error"] == ""]
    times = request_times(served)
    several = served["completion_tokens"] > 1
    for metric in ("ttft", *goodput):
        unknown = times[f"{metric}_ms"].isna() & (several if metric == "tpot" else True)
        if not read.requests or unknown.any():
            what = "its requests one by one" if not read.requests else f"every request's {metric}"
            raise api.BadSetting(
                f"--goodput is counted from requests, and {file} does not say {what}: leave --goodput out, "
                "or import a file that was saved with its requests"
            )
    told = {name: value for name, value in read.told.items() if name != "goodput_req_s"}
    lacks = [line for line in read.lacks if line != NO_LIMITS]
    return replace(read, told=told, lacks=lacks)


def _check_alike(first: ToolResult, other: ToolResult, name: str, file: str) -> None:
    for what, old, new in (
        ("tools", first.tool, other.tool),
        ("versions", first.version, other.version),
        ("models", first.model, other.model),
        ("workloads", dict(first.asked), dict(other.asked)),
    ):
        found = names.difference(old, new)
        if found:
            raise api.BadSetting(
                f"{name} and {file} are not trials of one arm: their {what} differ: {found.strip()}"
            )


def _manifest(
    run: str,
    now: datetime,
    read: Sequence[ToolResult],
    names: Sequence[str],
    name: str | None,
    engine: str | None,
    fresh_boots: bool,
    goodput: Mapping[str, float],
    blocks: Sequence[Block],
) -> Manifest:
    first = read[0]
    options = api.EngineOptions(model=first.model)
    arm = Arm(name=ARM, engine=engine or NOT_RECORDED, options=options, toggles={}, known=("model",))
    requests = max(len(each.requests) for each in read) or 1
    design = Design(
        name=name or first.tool,
        arms=(arm,),
        workload=Workload(
            prompt=None, num_requests=requests, max_new_tokens=None, arrival="burst", pretok=False
        ),
        blocks=len(read),
        rounds=1,
        warmup_rounds=0,
        goodput=dict(goodput),
    )
    design = msgspec.structs.replace(design, primary=_primary(design, blocks))
    version = first.version or NOT_RECORDED
    return Manifest(
        schema_version=SCHEMA_VERSION,
        run=run,
        created=now.isoformat(timespec="seconds"),
        design=design,
        after_first=[False] * len(read),
        machine=Machine(cpu=NOT_RECORDED, cores=0, kernel=NOT_RECORDED, memory_gib=0, gpus=[]),
        code=Code(commit="", changes=""),
        versions={first.tool: version},
        files={each: digest(str(files.split(each)[0])) for each in names},
        descriptions={
            ARM: api.Description(
                engine=arm.engine,
                versions={},
                device={"kind": "remote", "name": NOT_RECORDED},
                model={"name": first.model, "vocabulary": 0, "context": 0},
                toggles={},
                deterministic=False,
                pids={},
            )
        },
        imported=Imported(
            tool=first.tool,
            version=first.version,
            measured=[each.measured for each in read],
            asked=dict(first.asked),
            lacks=[*dict.fromkeys(line for each in read for line in each.lacks), *ALWAYS_LACKING],
            differs=[*dict.fromkeys(line for each in read for line in each.differs)],
            fresh_boots=fresh_boots,
        ),
    )


def _primary(design: Design, blocks: Sequence[Block]) -> str:
    values = measured(design, [block_values(design, block) for block in blocks])
    found = next((name for name in (*PRIMARIES, *definitions.METRICS) if name in values), None)
    if found is None:
        raise api.BadFile("these files have no metric in common that could be converted")
    return found


def _block(number: int, read: ToolResult, file: str) -> Block:
    try:
        return Block(number, _tables(read))
    except OverflowError:
        raise api.BadFile(f"{file}: it was edited: a count or a time does not fit into 64 bits") from None


def _tables(result: ToolResult) -> dict[str, pd.DataFrame]:
    """One block: the requests, and one round with what was told besides."""
    ended = ns(result.seconds)
    told = {f"{TOLD}{name}": value for name, value in result.told.items()}
    rounds = pd.DataFrame([{"arm": ARM, "round": 0, "started_ns": 0, "ended_ns": ended, **told}])
    return tables.whole({"requests": _requests(result.requests), "rounds": rounds})


def _requests(sent: Sequence[Sent]) -> pd.DataFrame:
    """As records.requests_frame, -1 where the file does not say."""

    def stamps(name: str) -> np.ndarray:
        return np.array([getattr(each, name) for each in sent], np.int64)

    def lists(name: str) -> pd.Series:
        return pd.Series([np.array(getattr(each, name), np.int64) for each in sent], dtype=object)

    count = len(sent)
    nothing = np.full(count, NOT_TOLD, np.int64)
    return pd.DataFrame(
        {
            "arm": pd.Series([ARM] * count, dtype="str"),
            "round": np.zeros(count, np.int64),
            "request": np.arange(count, dtype=np.int64),
            "scheduled_ns": stamps("scheduled_ns"),
            "sent_ns": stamps("sent_ns"),
            **dict.fromkeys(("submitted_ns", *api.STAMPS), nothing),
            "chunk_ns": lists("chunk_ns"),
            "chunk_tokens": lists("chunk_tokens"),
            "token_ns": pd.Series([np.array((), np.int64)] * count, dtype=object),
            "finished_ns": stamps("finished_ns"),
            "reason": pd.Series(["" if each.error else NOT_RECORDED for each in sent], dtype="str"),
            "prompt_tokens": stamps("prompt_tokens"),
            "completion_tokens": stamps("completion_tokens"),
            "digest": pd.Series([""] * count, dtype="str"),
            "error": pd.Series([each.error for each in sent], dtype="str"),
        }
    )
