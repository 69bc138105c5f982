"""Warnings about what the arms were: their devices and code, their outputs, where and how often they ran."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.analysis.run_warnings import WIDER, BlockSeries, Measured, OfRun
from overlap_bench.harness.analysis.warnings import Severity, Warning, applicable
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics import divergences, ranks
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.plan.settings import PACED_MODEL
from overlap_bench.harness.store.manifest import Imported, Manifest, Repeat, listed
from overlap_bench.harness.store.tables import Block

PACED = "emulated, paced: "  # begins the kind of a device with a pace
HOST_PACED = "paced: "  # the same, of an engine whose host code is somebody else's
OVERRAN = 0.01  # of a paced device's programs
NOT_PACED = 0.1  # of them: this many are in every trimmed mean
THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
TOLD = 3  # blocks that were measured once more, by name


def circumstances(manifest: Manifest, blocks: Sequence[Block], values: BlockSeries) -> list[Warning]:
    """The warnings that do not depend on the change: under what conditions it was measured."""
    return applicable(OfRun, Measured(manifest, blocks, values))


class FromAnotherTool(OfRun, frozen=True):
    run: str
    tool: str
    fresh_boots: bool

    def sentence(self) -> str:
        if self.fresh_boots:
            return (
                f"{self.run} is imported from {self.tool}, each file as a trial; that is right only if each "
                "file is of a freshly started server; if not, import them again without --fresh-boots"
            )
        return (
            f"{self.run} is imported from {self.tool}, one file of one server process; two starts of one "
            "server differ, so its numbers decide nothing; measure several, and import their files together "
            "with --fresh-boots"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.imported is not None:
            yield cls.of_import(run.manifest.run, run.manifest.imported)

    @classmethod
    def of_import(cls, name: str, imported: Imported) -> Self:
        fresh = imported.fresh_boots
        severity = Severity.DESCRIBES if fresh else Severity.QUALIFIES
        return cls(name, f"{imported.tool} {imported.version}".strip(), fresh, weight=severity)


class NotLikeOurs(OfRun, frozen=True):
    """The tool's file lacks something, or its metrics are defined in another way: `said` in full."""

    said: str
    says = (
        "{said}; its numbers do not mean all that ours mean; compare it with results of the same tool, or "
        "measure the server by bench run --engine openai"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.imported is not None:
            yield from cls.of_import(run.manifest.run, run.manifest.imported)

    @classmethod
    def of_import(cls, name: str, imported: Imported) -> Iterator[Self]:
        if imported.lacks:
            yield cls(f"{name} lacks {'; '.join(imported.lacks)}")
        if imported.differs:
            yield cls(f"{name} differs from bench: {'; '.join(imported.differs)}")


class PaceNotKept(OfRun, frozen=True):
    arm: str
    share: float
    tries: str
    says = (
        "pace not kept: {share:.1%} of the programs of {arm} took this machine longer to compute than the "
        "pace says; those steps are too long, so this is not the change at that pace; {tries}"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.imported is not None or "counter.paced_programs" not in run.rounds:
            return
        counts = run.rounds.groupby("arm")[["counter.paced_overruns", "counter.paced_programs"]].sum()
        shares = counts["counter.paced_overruns"] / counts["counter.paced_programs"]
        for arm in run.manifest.design.arms:
            share = float(shares.get(arm.name, 0.0))
            severity = Severity.OVERRULES if share > NOT_PACED else Severity.QUALIFIES
            if share > OVERRAN:
                yield cls(arm.name, share, _to_keep_pace(run, arm), weight=severity)


def _to_keep_pace(run: Measured, arm: Arm) -> str:
    """What to try. No model is small enough for devices that wait for each other's core."""
    steps = [block.of(arm.name, "steps") for block in run.blocks]
    devices = max(map(ranks.count, steps))
    if run.manifest.measured_on.cores <= devices:
        each = f"{devices} devices and the host" if devices > 1 else "the device and the host"
        less = "fewer ranks, or " if devices > 1 else ""
        return f"{each} want a core each, and this machine has {run.cores}: try {less}a machine with more"
    tries = ["a longer pace"]
    if max((int(each["batch"].max()) for each in steps if len(each)), default=2) > 1:
        tries.append("a smaller batch")
    if arm.options.model != PACED_MODEL:
        tries.append(f"--model {PACED_MODEL}")
    return f"try {' or '.join(tries)}"


class StandsIn(OfRun, frozen=True):
    arms: str
    replaced: str
    usual = Severity.QUALIFIES
    says = (
        "no GPU: in {arms}, a clock stands in for {replaced}; all other host code ran as installed, at this "
        "machine's speed; to judge a change of what the clock replaces, measure on a GPU"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        by_arm = {arm: each.device.get("replaced") for arm, each in run.manifest.descriptions.items()}
        for replaced in filter(None, dict.fromkeys(by_arm.values())):
            yield cls(" and ".join(arm for arm, its in by_arm.items() if its == replaced), replaced)


class OurRewriting(OfRun, frozen=True):
    choices: str
    usual = Severity.QUALIFIES
    says = (
        "{choices}: our rewriting of what the source describes; this is no verdict on the pull request "
        "itself; --after patch=FILE measures its own diff"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        arms = run.manifest.design.arms
        spec = api.find_engines().get(arms[0].engine) if len(arms) > 1 else None
        ours = []
        for toggle in () if spec is None else spec.toggles:
            chosen = {arm.toggles.get(toggle.name) for arm in arms}
            if toggle.rewritten in chosen and len(chosen) > 1:
                ours.append(f"{toggle.name}={toggle.rewritten} ({toggle.source})")
        if ours:
            yield cls(", ".join(ours))


class NotBuilt(OfRun, frozen=True):
    arm: str
    patch: str
    files: str
    usual = Severity.QUALIFIES
    says = (
        "patch={patch} of {arm} also changes compiled code, requirements or data: {files}; that was not "
        "built, or may not be what was read, so the numbers lack it; build it into an environment of its "
        "own, and give that by python=PATH"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        for arm in run.manifest.design.arms:
            if arm.patch is not None and (files := arm.patch.not_built):
                yield cls(arm.name, arm.patch.file, listed(files))


class Emulated(OfRun, frozen=True):
    says = (
        "emulated device: a CPU core plays the accelerator; on a GPU, times and changes differ; try --pace "
        "with a GPU's times (bench devices), or run on a GPU"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if "emulated" in run.device_kinds:
            yield cls()


class Paced(OfRun, frozen=True):
    """A profile says how long the device takes. `k`: what it is multiplied by, "" nothing."""

    device: str
    k: str = ""
    host_assumed: bool = False

    def sentence(self) -> str:
        assumed = ", whose speed is assumed" if self.host_assumed else ""
        slower = f"k, how many times as long this host takes as the GPU's host{assumed}"
        by = f", multiplied by {self.k} ({slower}, and what --pace says besides)" if self.k else ""
        return (
            f"{self.device}: device times come from --pace{by}, host times from this machine; the change "
            "holds for this pair of device and host alone; try other paces (bench devices), or a GPU"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        for kind in sorted(each for each in run.device_kinds if each.startswith((PACED, HOST_PACED))):
            name, _, k = kind.removeprefix(PACED).removeprefix(HOST_PACED).rpartition("*")
            name = name.partition(",ledger=")[0]
            profile = api.profiles().get(name)
            stretched = k if re.fullmatch(r"[\d.]+", k) else ""  # a formula may end with *tokens
            # Of a formula nobody said which host it assumes: k is held against that of the profiles.
            assumed = "host" in profile.assumed if profile is not None else "=" in name and bool(stretched)
            yield cls(kind, stretched, assumed)


class SharedGPU(OfRun, frozen=True):
    says = f"shared GPU: other processes were on the GPU; {WIDER}; stop them and measure again"

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.most("gpu_other_processes") > 0:
            yield cls()


class Throttled(OfRun, frozen=True):
    reason: str
    says = (
        "throttling: the GPU slowed down ({reason}); steps are longer at some times than at "
        "others; cool it, or lock its clock lower (nvidia-smi -lgc)"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if "gpu_throttle_reasons" in run.rounds:
            reasons = run.rounds["gpu_throttle_reasons"].fillna(0).astype("int64")
            yield from (cls(reason) for bit, reason in THROTTLE.items() if (reasons & bit).any())


class GPUUnknown(OfRun, frozen=True):
    arms: str
    says = (
        "unknown GPU: NVML tells nothing of the GPU of {arms}; it may throttle or be shared, unseen; "
        "look at nvidia-smi on the host while it runs, as a container may hide it"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        rounds = run.rounds
        readings = [column for column in rounds if column.startswith("gpu_")]
        unknown = [
            arm
            for arm, description in run.manifest.descriptions.items()
            if description.device["kind"] == "cuda"
            and rounds.loc[rounds["arm"] == arm, readings].isna().all(axis=1).any()
        ]
        if unknown and run.manifest.imported is None:
            yield cls(" and ".join(unknown))


class OutputsAsText(OfRun, frozen=True):
    against_itself: bool

    def sentence(self) -> str:
        aa = "see by bench aa how often equal arms differ, and compare"
        told = "hold other runs against how often these equal arms differ" if self.against_itself else aa
        return (
            "outputs of servers are compared as text (as token ids with count=ids); batching can change a "
            "token, so a server differs from itself too, and no difference fails this run; "
            f"{told}"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        design = run.manifest.design
        if "remote" in run.device_kinds and len(design.arms) == 2:
            yield cls(design.against_itself, weight=_of_outputs(run))


class OutputsMayDiffer(OfRun, frozen=True):
    """Equal outputs were not promised. `widest`: how far below the likeliest token one that differs was, by
    the model of an `arm`, and `near_tie` how far one may be; None where it was not judged."""

    judged: bool
    arm: str = ""
    widest: float | None = None
    near_tie: float | None = None

    def sentence(self) -> str:
        if not self.judged:
            return (
                "equal outputs are not promised: with sampling, half precision or a GPU, the batch can "
                "change a token; a difference fails this run only where the engine can score both "
                "tokens, and one is clearly likelier; see by bench aa how often equal arms differ, and "
                "compare"
            )
        scored = " (a near-tie)"
        if self.widest is not None and self.near_tie is not None:
            scored = (
                f" (by the model of {self.arm}, their logits were up to {self.widest:.2g} apart, and less "
                f"than {self.near_tie:.2g} is a near-tie)"
            )
        return (
            "equal outputs are not promised: in half precision or on a GPU, the batch can change a token; "
            f"a difference fails this run unless both tokens were about as likely{scored}; see by "
            "bench aa how often equal arms differ"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        manifest, arms = run.manifest, len(run.manifest.design.arms)
        servers = "remote" in run.device_kinds and arms == 2
        promised = manifest.promises_outputs or manifest.imported is not None
        if servers or promised or arms < 2 or not manifest.descriptions:
            return
        tables = [table for block in run.blocks if len(table := block.tables["divergences"])]
        widest = divergences.widest_gap(tables)
        severity = _of_outputs(run)
        if widest is None or np.isinf(widest):
            yield cls(widest is not None, weight=severity)
            return
        near_tie = float(max(table["near_tie"].max() for table in tables))
        yield cls(True, str(tables[0]["before"].iloc[0]), widest, near_tie, weight=severity)


class OutputsPromised(OfRun, frozen=True):
    usual = Severity.QUALIFIES
    says = (
        "outputs differ, though the engine promises equal tokens for equal prompts, whatever the batch; a "
        "difference that no near-tie explains is a fault, and fails this run; look for a race, such as "
        "a buffer that is written again too early"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        manifest, arms = run.manifest, len(run.manifest.design.arms)
        servers = "remote" in run.device_kinds and arms == 2
        promised = arms < 2 or not manifest.descriptions or manifest.promises_outputs
        if not servers and (promised or manifest.imported is not None) and _differ(run):
            yield cls()


def _differ(run: Measured) -> bool:
    return any(len(block.tables["divergences"]) for block in run.blocks)


def _of_outputs(run: Measured) -> Severity:
    return Severity.QUALIFIES if _differ(run) else Severity.DESCRIBES


class Resumed(OfRun, frozen=True):
    """A block was ended and measured again: it may be one that somebody did not like."""

    after: str
    says = (
        "interrupted and resumed after {after} trials; what had been measured of the next one was "
        "dropped, and measured again in the same order; if you stopped it because of the numbers you saw, "
        "start a new run"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.resumed_after:
            yield cls(", ".join(map(str, run.manifest.resumed_after)))


class UnequalNodes(OfRun, frozen=True):
    node: str
    first: str
    differ: str
    says = (
        "unequal nodes: {node} is not like {first}: {differ}; the change may differ by node; use equal nodes"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        machines = dict(run.manifest.nodes)
        if machines and not all(block.node for block in run.blocks):  # some were measured by its own machine
            machines["the machine without a cluster"] = run.manifest.machine
        first, *others = machines.items() or [("", run.manifest.machine)]
        for name, machine in others:
            if other := difference(msgspec.to_builtins(first[1]), msgspec.to_builtins(machine)):
                yield cls(name, first[0], other)


class MeasuredAgain(OfRun, frozen=True):
    repeats: tuple[Repeat, ...]

    def sentence(self) -> str:
        told = "; ".join(f"{each.block + 1} ({each.reason})" for each in self.repeats[:TOLD])
        more = f"; and {len(self.repeats) - TOLD} more" if len(self.repeats) > TOLD else ""
        return (
            f"failed and repeated: trial {told}{more}; only the repeat counts, its arms in the same order; "
            "if one arm makes trials fail, fix that first"
        )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        if run.manifest.repeats:
            yield cls(tuple(run.manifest.repeats))


class RecorderOff(OfRun, frozen=True):
    arm: str
    says = (
        "the record of steps is off in {arm}; step times and the device's idle time are not known; --set "
        "recorder=on keeps it"
    )

    @classmethod
    def found(cls, run: Measured) -> Iterator[Self]:
        yield from (cls(arm.name) for arm in run.manifest.design.arms if not arm.options.recorder)
