"""What a reader of a comparison must know besides its verdict. Each check gives lines of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from overlap_bench.engines import api
from overlap_bench.harness.analysis import nodes
from overlap_bench.harness.analysis.result import UNDECIDED, Severity, Warning, ranked
from overlap_bench.harness.analysis.values import block_seconds
from overlap_bench.harness.common import core_speed
from overlap_bench.harness.common.formatting import between, duration, percent
from overlap_bench.harness.metrics import definitions, divergences
from overlap_bench.harness.metrics.requests import spans_ns
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.plan.settings import PACED_MODEL
from overlap_bench.harness.stats import checks, paired, planning
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.changed import listed
from overlap_bench.harness.store.manifest import Imported, Manifest
from overlap_bench.harness.workload.arrivals import ARRIVALS

if TYPE_CHECKING:
    import pandas as pd

    from overlap_bench.harness.store.block import Block

Floats = NDArray[np.float64]
BlockSeries = Mapping[str, Mapping[str, Sequence[float]]]  # metric → arm → one value per block

STEAL = 0.01  # share of all CPU time that another virtual machine took
OTHERS = 0.05  # share of all CPU time used by processes that are not the run's
FEASIBLE_S = 2 * 3600  # a run that takes longer keeps nobody's machine quiet
SUBMIT_LAG_MS = 1.0
LATE_READ = 0.5  # of the gap between two chunks
SQUEEZED, SOME = 0.5, 0.02  # of the time that a request's tokens took to make; of all requests
CLOCK_MOVED_US = 100
ONE_ORDER = "every trial ran in the same order"
SKIPPED = {
    "short": "conversations under 4 tokens",
    "long": "conversations too long for vLLM's limits or the context",
    "failed": "requests that failed when the trace was recorded",
}
LOST = {"counter.steps_lost": "steps", "counter.work_rows_lost": "rows of what the device did"}
PACED = "emulated, paced: "  # begins the kind of a device with a pace
HOST_PACED = "paced: "  # the same, of an engine whose host code is somebody else's
OVERRAN = 0.01  # of a paced device's programs
# What engines/openai/engine.py counts; each served request is counted by one of COUNTED.
COUNTED = "counter.requests_counted_by_"
AT_ONCE, IN_BURSTS = "counter.replies_at_once", "counter.replies_in_bursts"
NOT_STREAMED, PARTLY = "counter.tokens_not_streamed", "counter.requests_not_all_streamed"
DOUBTFUL = "counter.requests_of_doubtful_count"
GATHERED, BURST = 0.5, 4  # share of all replies; chunks at once, on average
NOT_PACED = 0.1  # of them: this many are in every trimmed mean
# Of the requests; each has its tokens besides, and all of those at once may be too much for the memory.
OF_REQUESTS = ("arm", "request", "sent_ns", "tokenized_ns", "admitted_ns", "finished_ns", "error")
FALLING_BEHIND = 0.5  # of the median latency: growth of the queue wait from first to last quarter
THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def collect(
    manifest: Manifest,
    blocks: Sequence[Block],
    values: BlockSeries,
    primary: paired.Effect | None,
    verdict: str | None,
) -> list[Warning]:
    """All that apply, those first that do most to the verdict on the primary."""
    return ranked(
        [
            *of_decision(manifest, primary, verdict, block_seconds(blocks)),
            *of_order(manifest, blocks, values, primary),
            *circumstances(manifest, blocks, values),
        ]
    )


def _of(kind: str, texts: Iterable[str], severity: Severity = Severity.DESCRIBES) -> list[Warning]:
    return [Warning(kind, text, severity) for text in texts]


def circumstances(manifest: Manifest, blocks: Sequence[Block], values: BlockSeries) -> list[Warning]:
    """The warnings that do not depend on the change: under what conditions it was measured."""
    imported = manifest.imported
    requests, rounds = _joined(blocks, "requests", OF_REQUESTS), _joined(blocks, "rounds")
    qualifies = Severity.QUALIFIES
    # What is wrong with rounds alone does nothing to a verdict of turns.
    of_rounds = Severity.DESCRIBES if manifest.design.primary in definitions.OF_PAIRS else qualifies
    differ = any(len(block.tables["divergences"]) for block in blocks)
    return ranked(
        [
            *_of("noise", _noise(rounds)),
            *_of("steadiness", _steadiness(manifest, requests), of_rounds),
            *_of("client", _late_sends(values)),
            *_of("client", _late_reads(manifest, values), of_rounds),
            *_of("client", _squeezed(manifest, blocks), of_rounds),
            *_of("clock", _clock(rounds), of_rounds),
            *_of("records", _lost(rounds), of_rounds),
            *_of("streams", _streams(rounds), qualifies),
            *_of("tokens", _counted(rounds), qualifies),
            *_of("failures", _failures(requests), qualifies),
            *_of("workload", _skipped(manifest, rounds)),
            *([] if imported is None else of_import(manifest.run, imported)),
            *([] if imported is not None else _overran(manifest, blocks, rounds)),
            *_of("device", _replaced(manifest), qualifies),
            *_of("toggles", _rewritten(manifest), qualifies),
            *_of("patch", _not_built(manifest), qualifies),
            *_of("device", _device(manifest, rounds)),
            *_of("outputs", _outputs(manifest, blocks), qualifies if differ else Severity.DESCRIBES),
            *_of("trials", _resumed(manifest)),
            *_of("nodes", nodes.remarks(manifest)),
            *_of("records", _recorder(manifest)),
        ]
    )


def _rewritten(manifest: Manifest) -> Iterator[str]:
    """What the arms differ by that is not the source's own code."""
    first, *others = manifest.design.arms
    spec = api.find_engines().get(first.engine) if others else None
    ours = []
    for toggle in () if spec is None else spec.toggles:
        chosen = {arm.toggles.get(toggle.name) for arm in manifest.design.arms}
        if toggle.rewritten in chosen and len(chosen) > 1:
            ours.append(f"{toggle.name}={toggle.rewritten} ({toggle.source})")
    if ours:
        yield (
            f"{', '.join(ours)}: our rewriting of what the source describes, so this is no verdict on the "
            "pull request itself"
        )


def _not_built(manifest: Manifest) -> Iterator[str]:
    """What a diff changes that was not measured."""
    for arm in manifest.design.arms:
        if arm.patch is not None and (files := arm.patch.not_built):
            yield (
                f"patch={arm.patch.file} of {arm.name} also changes compiled code, which was not measured: "
                f"{listed(files)}; build it into an environment of its own, and give that by python=PATH"
            )


def _resumed(manifest: Manifest) -> Iterator[str]:
    """A block that is ended and measured again may be one that somebody did not like."""
    if manifest.resumed_after:
        times = ", ".join(map(str, manifest.resumed_after))
        yield (
            f"interrupted and gone on with after {times} trials: what had been measured of the next one was "
            "dropped, and measured again in the same order"
        )


def of_factorial(
    manifest: Manifest, blocks: Sequence[Block], values: BlockSeries, judged: Mapping[str, Floats]
) -> list[Warning]:
    """The warnings about a factorial as a whole, not about any one pair of its arms. `judged`: the weights of
    the arms in each effect that carries a verdict."""
    return [
        *few_blocks(manifest, len(blocks)),
        *_order_of_factorial(manifest, blocks, values, judged),
        *circumstances(manifest, blocks, values),
    ]


def few_blocks(manifest: Manifest, blocks: int) -> list[Warning]:
    """Warn that there are too few blocks for a narrow interval, or for any. A rule that looks at fewer has
    enough of them."""
    design = manifest.design
    more = "--trials 6" if design.max_minutes is None else "a longer --max-minutes, or --trials 6,"
    if blocks == 1:
        one = f"one trial: numbers, no interval and no verdict; {more} gives both"
        return [Warning("trials", one, Severity.QUALIFIES)]
    few = f"too few trials: {blocks}; the interval is wide, and {more} gives a narrower one"
    return [Warning("trials", few)] if blocks < 6 and design.until is None else []


def of_decision(
    manifest: Manifest, primary: paired.Effect | None, verdict: str | None, seconds: float | None
) -> list[Warning]:
    """What there is to say about the number of blocks, and about a verdict that was not reached. `seconds`:
    what a block takes."""
    if primary is None:
        return []
    design = manifest.design
    if any(arm.is_remote for arm in design.arms):
        one = (
            "one boot per side: boots of one server differ by a percent and more, and one of each can't "
            "tell that from a change; servers that are started with cmd= give intervals and verdicts"
        )
        return [Warning("trials", one, Severity.OVERRULES)]
    found = few_blocks(manifest, primary.blocks)
    if primary.sd is not None and verdict == "undecided" and primary.scale == "ratio":
        way_out = f"undecided: {_way_out(primary, design.margin, seconds)}"
        found.append(Warning(UNDECIDED, way_out, Severity.OVERRULES))
    return found


def _way_out(primary: paired.Effect, margin: float, seconds: float | None) -> str:
    """How long a fresh run has to be, judged by the spread alone (planning.blocks_needed)."""
    assert primary.sd is not None
    needed = planning.blocks_needed(primary.sd, primary.blocks, margin)
    shows = (
        f"shows a change of {100 * margin:.3g}% in 4 of 5 cases; more trials for this one would be peeking"
    )
    blocks = f"{between(*(f'{each:,}' for each in needed))} trials"
    if seconds is None:
        return f"a fresh run of {blocks} {shows}"
    time = between(*(duration(each * seconds) for each in needed))
    each = f"{blocks} of {duration(seconds)}"
    if needed[0] * seconds > FEASIBLE_S:
        return (
            f"about {time} on this machine ({each}): not feasible here, where {duration(FEASIBLE_S)} is the "
            "bound; look for what disturbs it (bench doctor)"
        )
    return f"about {time} on this machine would settle it: a fresh run of {each} {shows}"


def of_order(
    manifest: Manifest,
    blocks: Sequence[Block],
    values: BlockSeries,
    primary: paired.Effect | None,
    judged: bool = True,
) -> list[Warning]:
    """What the order of the arms and of the blocks did to the primary. Where that is described, not judged, a
    position effect is reported too, but never said to weaken the run: there is no verdict to weaken."""
    design = manifest.design
    if primary is None or primary.scale != "ratio" or primary.sd is None:
        return []
    before, after = values[design.primary].values()
    differences = paired.paired(before, after, "ratio")
    found = checks.position(differences, [manifest.after_first[block.number] for block in blocks])
    if found is None:
        told = [_one_order("second")]
    else:
        left = f"the orders drawn leave {percent(found.left)} of that in the change"
        told = _position(found, "second", left, judged and found.weakens(design.margin))
    if checks.sign_flip_disagrees(differences):
        p = checks.sign_flip(differences)
        told += _of(
            "order",
            [f"the sign-flip test (p = {p:.3f}) disagrees with the t test: look at single trials"],
            Severity.QUALIFIES,
        )
    drift = _drift(checks.drift(before, after), design.margin, "both arms")
    return [*told, *_of("drift", drift)]


def _order_of_factorial(
    manifest: Manifest, blocks: Sequence[Block], values: BlockSeries, judged: Mapping[str, Floats]
) -> list[Warning]:
    """The same for effects that are contrasts of a block's arms. Each contains whatever part of a position
    effect the orders that were drawn leave in it."""
    if len(blocks) < 2:
        return []
    design = manifest.design
    per_arm = [values[design.primary][arm.name] for arm in design.arms]
    logs = np.log(per_arm).T
    places = np.array([np.argsort(manifest.drawn[block.number]) for block in blocks]) / (len(per_arm) - 1)
    found = checks.position_of_several(logs, places)
    if found is None:
        told = [_one_order("early or late")]
    else:
        share = max(abs(float(places.mean(axis=0) @ weights)) for weights in judged.values())
        found = replace(found, left=share * abs(found.change))
        left = f"the orders drawn leave up to {found.left:.2%} of that in an effect"
        told = _position(found, "last", left, found.weakens(design.margin))
    disagree = [
        f"{name} (p = {checks.sign_flip(logs @ weights):.3f})"
        for name, weights in judged.items()
        if checks.sign_flip_disagrees(logs @ weights)
    ]
    if disagree:
        said = f"the sign-flip test disagrees with the t test on {', '.join(disagree)}: look at single trials"
        told += _of("order", [said], Severity.QUALIFIES)
    drift = _drift(checks.drift(*per_arm), design.margin, "all arms")
    return [*told, *_of("drift", drift)]


def _one_order(ran: str) -> Warning:
    said = f"{ONE_ORDER}: an effect of running {ran} can't be told apart"
    return Warning("order", said, Severity.QUALIFIES)


def _position(found: checks.Position, ran: str, left: str, weakened: bool) -> list[Warning]:
    """A position effect whose interval contains 0 is not reported."""
    if found.low is None or not found.seen:
        return []
    where = f"[{percent(found.low)}, {percent(found.high)}]"
    was = f"position effect: the arm that ran {ran} was at {percent(found.change)} {where}; {left}"
    if weakened:
        return [Warning("order", f"weakened by a {was}, more than half the margin", Severity.QUALIFIES)]
    return [Warning("order", was)]


def _drift(found: checks.Drift | None, margin: float, arms: str) -> Iterator[str]:
    if found is not None and abs(found.change) > margin and found.p < ALPHA:
        yield (
            f"drift: {arms} drifted by {percent(found.change)} from the first trial to the last; drift "
            f"common to {arms} cancels in the comparison"
        )


def _noise(rounds: pd.DataFrame) -> Iterator[str]:
    steal = _largest(rounds, "steal_share")
    if steal > STEAL:
        yield f"noise: up to {steal:.1%} of the CPU time was taken by other virtual machines (steal)"
    others = _largest(rounds, "others_share")
    if others > OTHERS:
        yield (
            f"noise: processes that are not the run's used up to {others:.1%} of the CPU time; load average "
            f"up to {_largest(rounds, 'load_1m'):.1f}"
        )
    if "loop_us" in rounds and rounds["loop_us"].notna().any():
        fast, slow = core_speed.spread(rounds["loop_us"].dropna().tolist())
        if slow >= core_speed.STEADY * fast:
            yield (
                f"noise: the same loop took {fast:.0f} us between some rounds and {slow:.0f} us between "
                "others: other work on the same physical core, or clocks that move; steal does not show it"
            )
    if _largest(rounds, "gpu_other_processes") > 0:
        yield "shared GPU: other processes were on the card"
    if "gpu_throttle_reasons" in rounds:
        reasons = rounds["gpu_throttle_reasons"].fillna(0).astype("int64")
        for bit, reason in THROTTLE.items():
            if (reasons & bit).any():
                yield f"throttling: the GPU was slowed down ({reason})"


def _steadiness(manifest: Manifest, requests: pd.DataFrame) -> Iterator[str]:
    arrival = ARRIVALS[manifest.design.workload.arrival]
    if not arrival.open_loop:
        return
    slower = "a longer --interval-ms" if "interval_ms" in arrival.options else "a lower --rate"
    requests = requests[(requests["admitted_ns"] >= 0) & (requests["tokenized_ns"] >= 0)]
    for arm, own in requests.groupby("arm", sort=False):
        if len(own) < 8:
            continue
        waited = (own["admitted_ns"] - own["tokenized_ns"]) / 1e6
        latency = (own["finished_ns"] - own["sent_ns"]) / 1e6
        quarter = own["request"].rank(pct=True)
        growth = float(waited[quarter > 0.75].median() - waited[quarter <= 0.25].median())
        if growth > FALLING_BEHIND * float(latency.median()):
            yield (
                f"not steady: the queue wait of {arm} grew by {growth:.3g} ms over a round; arrivals outrun "
                f"the engine: try {slower}"
            )


def _late_sends(values: BlockSeries) -> Iterator[str]:
    lag = max((max(series) for series in values.get("submit_lag_ms_p99", {}).values()), default=0.0)
    if lag > SUBMIT_LAG_MS:
        yield (
            f"late sends (submit lag): 1% of a boot's requests were {lag:.2f} ms late or more; TTFT is "
            "from the send"
        )


def _late_reads(manifest: Manifest, values: BlockSeries) -> Iterator[str]:
    """Only where they could have distorted a time: arrival stamps are the kernel's, but bytes that are still
    unread when the next chunk comes are read together with it, and get its stamp."""
    gaps = values.get("itl_chunk_ms_p50", {})
    late = [
        max(lags)
        for arm, lags in values.get("client_lag_ms_p99", {}).items()
        if max(lags) > LATE_READ * min(gaps.get(arm, [np.inf]))
    ]
    if late:
        yield (
            f"late reads (client lag): bytes lay unread for up to {max(late):.2f} ms (p99), long enough for "
            "the next chunk to arrive and be read as one with them; the client had too little of "
            f"{_cores(manifest)}: try fewer requests at once, or more cores"
        )


def _squeezed(manifest: Manifest, blocks: Sequence[Block]) -> Iterator[str]:
    """Requests whose chunks lay unread, and were read together: by an engine's own stamps of their tokens."""
    several = squeezed = 0
    for requests in (each for block in blocks if len(each := block.tables["requests"])):
        made, came = (spans_ns(requests[name]) for name in ("token_ns", "chunk_ns"))
        several += int(np.count_nonzero((made > 0) & (came > 0)))
        squeezed += int(np.count_nonzero((made > 0) & (came > 0) & (came < SQUEEZED * made)))
    if squeezed > SOME * several:
        yield (
            f"late reads: {squeezed} of {several} requests had their chunks within less than half the time "
            "in which the engine made their tokens, so TPOT and ITL are too small: the client had too little "
            f"of {_cores(manifest)}, or the engine sent late; try fewer requests at once, or more cores"
        )


def _clock(rounds: pd.DataFrame) -> Iterator[str]:
    """Arrival stamps are of CLOCK_REALTIME, which can be set."""
    moved_us = _largest(rounds, "counter.clock_moved_us")
    if moved_us > CLOCK_MOVED_US:
        yield (
            f"the time of day was changed by {moved_us / 1e3:.3g} ms in a round: its arrival times are wrong"
        )


def _lost(rounds: pd.DataFrame) -> Iterator[str]:
    """A round that outgrew its records; each arm then lacks a different part of it."""
    lost = [f"{count:,.0f} {what}" for column, what in LOST.items() if (count := _largest(rounds, column))]
    if lost:
        yield (
            f"records lost: up to {' and '.join(lost)} in a round; step times, phases, device_busy, "
            "exposed_host_us and the mechanism cover only what is left, a different part in each arm: try "
            "a lower --num-requests or --max-new-tokens"
        )


def _failures(requests: pd.DataFrame) -> Iterator[str]:
    failed = requests[requests["error"] != ""]
    if len(failed):
        first = failed["error"].iloc[0]
        yield f"{len(failed)} of {len(requests)} requests failed and are left out: {first}"


def _counted(rounds: pd.DataFrame) -> Iterator[str]:
    """Replies that do not say how many tokens they hold: one per chunk is then a guess. And those that say
    more than they streamed."""
    if by_chunks := _sum(rounds, f"{COUNTED}chunks"):
        yield (
            f"tokens of {by_chunks} requests were counted as one per chunk, as the server gives no count, or "
            "too low a one: TPOT, ITL and throughput are wrong where a chunk holds more; "
            "--set tokenizer=FILE counts them"
        )
    if hidden := _sum(rounds, NOT_STREAMED):
        requests = _sum(rounds, PARTLY)
        yield (
            f"not streamed: in {requests} requests the server counted {hidden:,} tokens "
            f"({hidden / requests:.3g} each) that came in no chunk, as of a thought that it hides: TTFT "
            "holds the time that they took; TPOT and throughput are of the tokens that came"
        )
    if doubtful := _sum(rounds, DOUBTFUL):
        yield (
            f"token count: in {doubtful} requests the server counts more tokens than so short a text is "
            "likely to hold. If it hides some, as of a thought, TPOT is too small and throughput too large; "
            "--set tokenizer=FILE counts those that came"
        )


def _streams(rounds: pd.DataFrame) -> Iterator[str]:
    """Replies whose chunks were gathered on their way: their times are not the model's."""
    replies = sum(_sum(rounds, name) for name in rounds if name.startswith(COUNTED))
    at_once, in_bursts = _sum(rounds, AT_ONCE), _sum(rounds, IN_BURSTS)
    if at_once > GATHERED * replies:
        yield (
            f"not streamed: {at_once} of {replies} replies came all at once, as through a proxy that buffers "
            "them or from a server that does not stream: TTFT is then the latency, and TPOT and ITL mean "
            "nothing; ask the server itself, or turn the buffering off (nginx: proxy_buffering off)"
        )
    elif at_once + in_bursts > GATHERED * replies:
        yield (
            f"bursts: {at_once + in_bursts} of {replies} replies came in bursts of {BURST} chunks or more, "
            "as through a proxy that buffers them, or from speculative decoding: ITL is that of bursts, and "
            "TTFT may have waited for one to fill"
        )


def _skipped(manifest: Manifest, rounds: pd.DataFrame) -> Iterator[str]:
    """What the workload's data holds but was not sent. The smallest context of all arms decides, so all skip
    the same, and one of them is counted."""
    rounds = rounds[rounds["arm"] == manifest.design.arms[0].name]
    counts = {
        what: int(rounds[f"skipped.{why}"].sum())
        for why, what in SKIPPED.items()
        if f"skipped.{why}" in rounds
    }
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if found:
        yield f"skipped, over all rounds: {found}"


def _replaced(manifest: Manifest) -> Iterator[str]:
    """What of an engine is not its own."""
    devices = {arm: each.device for arm, each in manifest.descriptions.items() if "replaced" in each.device}
    for replaced in dict.fromkeys(device["replaced"] for device in devices.values()):
        arms = " and ".join(arm for arm, device in devices.items() if device["replaced"] == replaced)
        yield f"in {arms} a clock stands in for {replaced}. All other host code ran as installed"


def _device(manifest: Manifest, rounds: pd.DataFrame) -> Iterator[str]:
    if "emulated" in _kinds(manifest):
        yield "emulated device: these are times of CPU cores; never compare them with a GPU's"
    for kind in sorted(kind for kind in _kinds(manifest) if kind.startswith((PACED, HOST_PACED))):
        name, stretched, k = kind.removeprefix(PACED).removeprefix(HOST_PACED).rpartition("*")
        profile = api.profiles().get(name)
        host = ", a host that is assumed" if profile and "host" in profile.assumed else ""
        by = f" times {k}, for this host's speed beside the profile's{host}" if stretched else ""
        yield (
            f"{kind}: device times are what a profile says{by}, host times are this machine's; never compare "
            "them with another device's"
        )
    readings = [column for column in rounds if column.startswith("gpu_")]
    unknown = [
        arm
        for arm, description in manifest.descriptions.items()
        if description.device["kind"] == "cuda"
        and rounds.loc[rounds["arm"] == arm, readings].isna().all(axis=1).any()
    ]
    if unknown and manifest.imported is None:
        arms = " and ".join(unknown)
        yield f"NVML tells nothing of the GPU of {arms}: its clocks, throttling and other users are unknown"


def _overran(manifest: Manifest, blocks: Sequence[Block], rounds: pd.DataFrame) -> Iterator[Warning]:
    """Programs of a paced device that were late for their pace: their times are a CPU core's."""
    if "counter.paced_programs" not in rounds:
        return
    counts = rounds.groupby("arm")[["counter.paced_overruns", "counter.paced_programs"]].sum()
    shares = counts["counter.paced_overruns"] / counts["counter.paced_programs"]
    for arm in manifest.design.arms:
        share = float(shares.get(arm.name, 0.0))
        if share > OVERRAN:
            said = (
                f"pace not kept: {share:.1%} of the programs of {arm.name} computed for longer than their "
                f"pace, and took as long as they computed: {_to_keep_pace(manifest, arm, blocks)}"
            )
            yield Warning("pace", said, Severity.OVERRULES if share > NOT_PACED else Severity.QUALIFIES)


def _to_keep_pace(manifest: Manifest, arm: Arm, blocks: Sequence[Block]) -> str:
    """What to try. No model is small enough for devices that wait for each other's core."""
    from overlap_bench.harness.metrics import ranks

    steps = [block.of(arm.name, "steps") for block in blocks]
    devices = max(map(ranks.count, steps))
    if manifest.measured_on.cores <= devices:
        each = f"{devices} devices and the host" if devices > 1 else "the device and the host"
        less = "fewer ranks, or " if devices > 1 else ""
        has = _cores(manifest)
        return f"{each} want a core each, and this machine has {has}: try {less}a machine with more"
    tries = ["a longer pace"]
    if max((int(each["batch"].max()) for each in steps if len(each)), default=2) > 1:
        tries.append("a smaller batch")
    if arm.options.model != PACED_MODEL:
        tries.append(f"--model {PACED_MODEL}")
    return f"try {' or '.join(tries)}"


def _cores(manifest: Manifest) -> str:
    cores = manifest.measured_on.cores
    return f"{cores} core{'s' if cores != 1 else ''}"


def _kinds(manifest: Manifest) -> set[str]:
    return {description.device["kind"] for description in manifest.descriptions.values()}


def _outputs(manifest: Manifest, blocks: Sequence[Block]) -> Iterator[str]:
    """When outputs that differ fail the run."""
    arms = len(manifest.design.arms)
    if "remote" in _kinds(manifest) and arms == 2:
        how_often = "" if manifest.design.against_itself else "; bench aa shows how often"
        yield (
            "outputs of servers are compared as text (as token ids with count=ids), and differences do not "
            f"fail this run: batching can change a token, so a server differs from itself too{how_often}"
        )
    elif arms > 1 and manifest.descriptions and not manifest.promises_outputs and manifest.imported is None:
        yield _differing_outputs(blocks)
    elif any(len(block.tables["divergences"]) for block in blocks):
        yield (
            "outputs that differ fail this run where no near-tie explains it: its engines promise equal "
            "tokens for equal prompts, whatever the batch"
        )


def _recorder(manifest: Manifest) -> list[str]:
    off = [arm.name for arm in manifest.design.arms if not arm.options.recorder]
    return [f"recorder off in {name}: it has no step records" for name in off]


def _differing_outputs(blocks: Sequence[Block]) -> str:
    tables = [table for block in blocks if len(table := block.tables["divergences"])]
    widest = divergences.widest_gap(tables)
    if widest is None:
        return (
            "outputs that differ do not fail this run, unless they are judged and no near-tie explains it: "
            "where tokens are sampled, or computed in half precision or on a GPU, the last digit of a logit "
            "depends on the batch and can change one"
        )
    line = (
        "outputs that differ fail this run where no near-tie explains it: computed in half precision or on a "
        "GPU, the last digit of a logit depends on the batch and can change a token"
    )
    if np.isinf(widest):
        return line
    return (
        f"{line}; by the model of {tables[0]['before'].iloc[0]}, tokens at which they part are up to "
        f"{widest:.2g} below the likeliest (in logits; a near-tie is below "
        f"{max(table['near_tie'].max() for table in tables):.2g})"
    )


def of_import(name: str, imported: Imported) -> list[Warning]:
    """What has to be known of a run that another tool measured."""
    who = f"{imported.tool} {imported.version}".strip()
    boots = "one file, so one boot: its numbers can't decide anything"
    if imported.fresh_boots:
        boots = "each file counts as a boot of its own, as stated at import"
    decides = Severity.DESCRIBES if imported.fresh_boots else Severity.QUALIFIES
    lines = [f"{name} lacks {'; '.join(imported.lacks)}", *(f"{name}: {line}" for line in imported.differs)]
    return [Warning("import", f"{name} is imported from {who}: {boots}", decides), *_of("import", lines)]


def _joined(blocks: Sequence[Block], table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """A table of all blocks; of all its columns, unless only some are wanted."""
    import pandas as pd

    wanted = slice(None) if columns is None else list(columns)
    return pd.concat([block.tables[table].loc[:, wanted] for block in blocks], ignore_index=True)


def _sum(frame: pd.DataFrame, column: str) -> int:
    return int(frame[column].sum()) if column in frame else 0


def _largest(frame: pd.DataFrame, column: str) -> float:
    return float(np.nanmax(frame[column])) if column in frame and frame[column].notna().any() else 0.0
