"""What a run will do, as plain data: arms, blocks, order, seeds.

What is asked follows from `seed`, so that runs can ask the same. The order of the arms follows from a lot
that is each run's own: runs that shared one order would all have the same part of a position effect in their
change, and a fresh run would confirm what an earlier one owed to its order.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from overlap_bench.engines import api
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.stats.stopping import ALPHA, Until
from overlap_bench.harness.workload.workload import Workload

MAX_SECONDARIES = 5
MARGIN = 0.01  # unless another is asked for
ONE_SIDED = 0.05  # level of a gate's bounds
DEFAULT_LIMIT = 0.02  # of a gate
MOST = 10_000  # blocks, or rounds of a boot: weeks
SHARE = {"share": True}  # an option that is typed as 1% or 0.01
DELAYED = "after"  # the arm that a planted delay slows
DRAWN_TOGETHER = 6  # blocks whose orders are drawn together, so that both are among them
DOCUMENTS = (".md", ".rst")  # which no code reads
COMPILED = (  # files that a build makes code of, or follows
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".inl", ".pyx", ".rs"),
    *("CMakeLists.txt", ".cmake", "setup.py", "pyproject.toml", "Cargo.toml"),
)
HIDES = {  # where a delay is planted → the metrics that take that part as equal
    "device": (definitions.SAME_DEVICE, definitions.SLICED_SAME_DEVICE),
    "host": (definitions.SAME_HOST, definitions.SLICED_SAME_HOST),
}


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """A commit whose code an arm runs, in place of what is installed."""

    repository: str  # its folder
    name: str  # as it was asked for: "origin/main"
    commit: str


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    file: str  # that it was read from
    text: str
    strip: int  # leading folders of its paths that are none of the package's
    files: tuple[str, ...]  # of the package, that it changes: "vllm/v1/core/block_pool.py", "a_module.py"
    left_out: tuple[str, ...] = ()  # that it changes, too, and that are not installed, such as tests

    @property
    def not_built(self) -> list[str]:
        """What it changes of code that a build compiles, and of requirements, which a copy of the package
        lacks, and of data, which a module that is not changed reads beside itself, where the package is
        installed."""
        data = [each for each in self.files if not each.endswith((".py", *DOCUMENTS))]
        return [*filter(_is_built, self.left_out), *data]

    @property
    def packages(self) -> list[str]:
        return list(dict.fromkeys(map(package_of, self.files)))


def _is_built(file: str) -> bool:
    """Whether it is compiled, or says what is built or installed."""
    folders = file.split("/")[:-1]
    return (
        file.endswith(COMPILED)
        or ("requirements" in folders and file.endswith(".txt"))
        or ("csrc" in folders and not file.endswith(DOCUMENTS))  # a template, a script that writes code
    )


def package_of(file: str) -> str:
    """The top-level package that a file is in, or the module that it is; "" where it is neither."""
    first, inside, _ = file.partition("/")
    return first if inside else first.removesuffix(".py") if first.endswith(".py") else ""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: an engine with its settings, under a given interpreter."""

    name: str  # "before", "after"; where there are more, whatever tells them apart
    engine: str
    options: api.EngineOptions
    toggles: dict[str, str]
    python: str | None = None  # interpreter to start it with; None: the harness's own
    env: dict[str, str] = {}
    ref: Ref | None = None  # None: what is installed
    patch: Patch | None = None  # of the packages that the engine is about
    known: tuple[str, ...] | None = None  # options of an imported arm that are known; None: all in force
    device_holds: str | None = ""  # EngineSpec.device_holds

    @property
    def is_remote(self) -> bool:
        """Whether it is a server at an address, which runs before and after: it has one boot, whatever is
        asked of it."""
        return "url" in self.toggles


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """A toggle that a factorial varies, with two of its choices."""

    toggle: str
    before: str
    after: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a factorial that means nothing, and why."""

    name: str  # as its arm would be called
    reason: str


class Factorial(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a design whose arms are the settings of some factors; what is made of it: stats/contrasts.py."""

    factors: tuple[Factor, ...]
    left_out: tuple[LeftOut, ...] = ()


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """How much worse the after arm may be in the primary and in each secondary; see analysis/gate.py."""

    max_regression: float  # a fraction
    levels: tuple[float, ...]  # one-sided, of the bounds at each look; a single one without looks


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """A run, decided before its first block: what is compared, on what, how often, and by which metric."""

    name: str  # the variant's, or the engine's where there is none
    arms: tuple[Arm, ...]  # one; the before and the after; or several, each compared with the first
    workload: Workload
    # With `until`: at most so many.
    blocks: Annotated[
        int,
        Meta(
            description="Trials, fresh processes of each arm (6; of a gate 3 to 6).",
            extra={"first": True, "flag": "--trials"},
        ),
    ] = 6
    until: Until | None = None  # None: all the blocks, whatever they say
    max_minutes: Annotated[
        float | None,
        Meta(
            description="As many trials as fit into so many minutes, boots included.",
            extra={"first": True},
        ),
    ] = None
    # After the first boots, rounds and segments become as few as let the run end in about so many seconds,
    # and this becomes None.
    aim_s: float | None = None
    against_itself: bool = False  # both arms are one setting: what they differ by is noise
    overlay: tuple[str, ...] = ()  # files of a ref's repository that every ref's tree gets, by pattern
    plant: float | None = None  # delay put into each step of the after arm, as a share of the before's step
    plant_at: str = "device"  # one of the engines' `plants`
    gate: Gate | None = None
    factorial: Factorial | None = None
    # In turn with the other arm's; pooled.
    rounds: Annotated[
        int,
        Meta(
            description="Rounds of the workload in a trial (1 to 3, as many as fit into 90 s; 1 with "
            "--max-minutes; more without interleaved ones)."
        ),
    ] = 2
    warmup_rounds: Annotated[int, Meta(description="Rounds of a trial thrown away, first (1).")] = 1
    segments: Annotated[
        int,
        Meta(
            description="Rounds of a trial in which the arms alternate every few steps (3 to 16, as many as "
            "fit into 90 s; 3 or 8 with --max-minutes; of a gate 8, paced 5; 0: none).",
            extra={"flag": "--interleaved-rounds"},
        ),
    ] = 0
    turn_steps: int = 0  # of a turn
    turn_lead: int = 0  # its first steps, which fill the pipeline: no interval ends with them
    margin: Annotated[
        float, Meta(description="Largest change that counts as none (1%).", extra={**SHARE, "first": True})
    ] = MARGIN
    primary: Annotated[
        str,
        Meta(
            description="Metric that decides: decode_step_ms, else tpot_ms_p50.",
            extra={"metavar": "METRIC", "first": True},
        ),
    ] = "tpot_ms_p50"
    secondaries: Annotated[
        tuple[str, ...],
        Meta(
            description="Further metrics with a verdict, up to five, not the variant's.",
            extra={"flag": "--secondary", "metavar": "METRIC"},
        ),
    ] = ()
    seed: Annotated[int, Meta(description="Seed of prompts, lengths and arrivals (0).")] = 0
    goodput: Annotated[  # ms by "ttft", "tpot", "latency"
        dict[str, float],
        Meta(
            description="Limits of a good request: ttft:200, tpot:50, latency:2000 (ms).",
            extra={"metavar": "METRIC:MS"},
        ),
    ] = {}

    @property
    def splits_steps(self) -> bool:
        """Whether device times are the device's alone in every arm: else no part of a step is the host's."""
        return all(arm.device_holds == "" for arm in self.arms)

    @property
    def may_end_early(self) -> bool:
        return self.until is not None or self.max_minutes is not None

    @property
    def fewest(self) -> int:
        """Blocks at the end of which it may first be judged: so many must not all have one order."""
        if self.until is not None:
            return self.until.looks[0]
        return min(self.blocks, 3) if self.max_minutes is not None else self.blocks

    @property
    def fewest_judged(self) -> int:
        """Blocks without which it has no verdict, or, of one arm alone, no number."""
        if self.until is not None:
            return self.until.looks[0]
        return min(self.blocks, len(self.arms), 2)

    def alpha(self, blocks: int) -> float:
        """The two-sided level of intervals and verdicts made of the first `blocks` blocks: that of the last
        look that they have reached, or of the first look before that."""
        if self.until is None:
            return ALPHA
        reached = [
            level for look, level in zip(self.until.looks, self.until.levels, strict=True) if look <= blocks
        ]
        return reached[-1] if reached else self.until.levels[0]

    def one_sided(self, blocks: int) -> float:
        """The one-sided level of a gate's bounds after so many blocks. For a run that may stop early and was
        planned without a gate: half its two-sided level where its rule looks at the mean, which is stricter
        than 95% needs; where the rule looks at the width alone, that level itself for each side."""
        if self.gate is not None:
            looks = self.until.looks if self.until is not None else ()
            reached = sum(look <= blocks for look in looks)
            return self.gate.levels[max(0, reached - 1)]  # before the first look that one's, the strictest
        if self.until is None:
            return ONE_SIDED
        return self.alpha(blocks) / (1 if self.until.rule == "precise" else 2)

    @property
    def gated(self) -> tuple[str, ...]:
        return (self.primary, *(self.secondaries if self.gate is not None else ()))

    def check(self) -> None:
        """Raises BadSetting where this can't be run as it stands."""
        for flag, count, least in (
            ("--trials", self.blocks, 1),
            ("--rounds", self.rounds, 1),
            ("--warmup-rounds", self.warmup_rounds, 0),
            ("--interleaved-rounds", self.segments, 0),
        ):
            if not least <= count <= MOST:
                bound = f"at least {least}" if count < least else f"at most {MOST:,}"
                raise api.BadSetting(f"{flag} must be {bound}, not {count}")
        if self.max_minutes is not None and not 0 < self.max_minutes < float("inf"):
            raise api.BadSetting(f"--max-minutes must be above 0, not {self.max_minutes:g}")
        if any(arm.is_remote for arm in self.arms) and (self.blocks > 1 or self.may_end_early):
            raise api.BadSetting(
                "a server at a url is one boot, however often it is asked, and so gives one trial; start a "
                "server per boot with cmd="
            )
        if self.until is not None and len(self.arms) != 2:
            raise api.BadSetting(
                f"a run that may stop early needs two arms; with {len(self.arms)}, give --trials"
            )
        if not 0 < self.margin < 1:
            raise api.BadSetting(f"--margin must be above 0% and below 100%, not {100 * self.margin:.4g}%")
        if len(self.secondaries) > MAX_SECONDARIES:
            raise api.BadSetting(f"at most {MAX_SECONDARIES} --secondary, not {len(self.secondaries)}")
        if self.primary in self.secondaries or len(set(self.secondaries)) < len(self.secondaries):
            raise api.BadSetting("a metric is named twice among --primary and --secondary")
        if self.plant is not None:
            self._check_plant(self.plant)
        if len({arm.options.pace for arm in self.arms}) > 1:
            raise api.BadSetting(
                "all arms need the same pace: give it with --pace, or bench sweep --over pace="
            )
        for left, right in combinations(self.arms, 2):
            if left.name == right.name:
                raise api.BadSetting(f"two arms have the name {left.name}")
            if _settings(left) == _settings(right) and not self.against_itself and self.plant is None:
                raise api.BadSetting(
                    f"{left.name} and {right.name} are the same settings; change one with --before or "
                    "--after, or measure an arm against itself with bench aa"
                )

    def _check_plant(self, share: float) -> None:
        if not 0 <= share < 1:
            raise api.BadSetting(f"--inject-delay must be at least 0% and below 100%, not {100 * share:.4g}%")
        if len(self.arms) != 2:
            raise api.BadSetting("--inject-delay slows the after arm, and there is none; bench aa has one")
        if not self.arms[0].options.recorder:
            raise api.BadSetting("--inject-delay is sized by the before arm's steps, and its recorder is off")

    def arms_with_plant(self, ns: int | None) -> tuple[Arm, ...]:
        """The arms as they are booted, once it is known how long the planted delay is (None: not yet). Both
        have the hook, so that the delay is all that differs."""
        if self.plant is None:
            return self.arms
        delays = {DELAYED: ns or 0}  # by name: a stored run may be looked at the other way round
        return tuple(
            msgspec.structs.replace(
                arm,
                options=msgspec.structs.replace(
                    arm.options, plant_at=self.plant_at, plant_ns=delays.get(arm.name, 0)
                ),
            )
            for arm in self.arms
        )


def _settings(arm: Arm) -> Arm:
    return msgspec.structs.replace(arm, name="")


def check_gated(names: Sequence[str], limit: float) -> None:
    """Raises BadSetting where these metrics can't be gated by this limit."""
    for name in names:
        metric = api.pick(name, definitions.METRICS, "metric")
        if metric.can_be_zero or not metric.better:
            raise api.BadSetting(f"{name} has no regression in percent; choose another --metric")
    if len(set(names)) < len(names) or len(names) > MAX_SECONDARIES:
        raise api.BadSetting(f"--metric takes up to {MAX_SECONDARIES} different metrics")
    if not 0 < limit < 1:
        raise api.BadSetting(f"--max-regression must be above 0% and below 100%, not {100 * limit:.4g}%")


def check_split(design: Design, names: Sequence[str]) -> None:
    """Raises BadSetting where one of these metrics takes a device time for the device's own, and an engine's
    holds more, or there is none."""
    for name in names:
        for arm in design.arms if name in definitions.SPLIT else ():
            if arm.device_holds == "":
                continue
            why = f"its device time also holds {arm.device_holds}" if arm.device_holds else "it records none"
            raise api.BadSetting(
                f"{name} takes device time for the device's own, and with engine {arm.engine} {why}; "
                f"{definitions.SPLIT[name]} is the whole step"
            )


def check_metrics(design: Design) -> None:
    """Raises BadSetting where a declared metric is unknown, or can't carry the verdict asked of it."""
    for name in (design.primary, *design.secondaries):
        api.pick(name, definitions.METRICS, "metric")
        if not definitions.METRICS[name].better:
            raise api.BadSetting(f"neither lower nor higher is better for {name}, so it can have no verdict")
        of_a_step = definitions.of_a_step(name)
        if (of_a_step or name.startswith(("tpot", "itl"))) and design.workload.most_new_tokens == 1:
            raise api.BadSetting(f"{name} needs at least 2 output tokens; raise --max-new-tokens")
        if of_a_step and (silent := [arm.name for arm in design.arms if not arm.options.recorder]):
            raise api.BadSetting(f"{name} is made from step records, and {silent[0]} has recorder=off")
        if name == "goodput_req_s" and not design.goodput:
            raise api.BadSetting("goodput_req_s needs to know what is good: give --goodput, such as ttft:200")
    check_split(design, (design.primary, *design.secondaries))
    if design.plant is not None and design.primary in HIDES[design.plant_at]:
        raise api.BadSetting(
            f"{design.primary} takes the {design.plant_at} as equal in both arms, so it can't show a delay "
            "that is injected there; choose another --primary or --inject-at"
        )
    for name in (design.primary, *design.secondaries):
        if definitions.METRICS[name].of_turns and not design.segments:
            raise api.BadSetting(
                f"{name} is measured in turns, and this run takes none: name it first (--metric, --primary), "
                "without --interleaved-rounds 0"
            )
    if design.gate is not None:
        check_gated(design.gated, design.gate.max_regression)
    if definitions.METRICS[design.primary].can_be_zero:
        raise api.BadSetting(
            f"{design.primary} can be zero, so a margin in percent means nothing; choose another --primary"
        )


def of_one_model(design: Design) -> list[str]:
    """The arms whose outputs might be equal: those of the first one's model and dtype. Another dtype rounds
    every weight and every sum, which comes to more than another order of summation does."""
    first = design.arms[0].options
    return [
        arm.name
        for arm in design.arms
        if (arm.options.model, arm.options.dtype) == (first.model, first.dtype)
    ]


def started_by(python: str | None, toggles: Mapping[str, str]) -> tuple[str | None, str]:
    """The interpreter that runs an engine, and the package: of a server, those of its command."""
    if "cmd" not in toggles:
        return python, ""
    words = [*shlex.split(toggles["cmd"])]
    while words and (words[0] == "env" or "=" in words[0]):
        words.pop(0)
    if not words:
        return None, ""
    if "-m" in words[1:-1] and "python" in Path(words[0]).name:
        return words[0], words[words.index("-m") + 1].partition(".")[0]
    return words[0], Path(words[0]).name.replace("-", "_")


def orders(lot: str, block: int, arms: int, fewest: int = DRAWN_TOGETHER) -> list[int]:
    """The arms of `block` by number, in the order in which they run: each order is as likely as any other,
    and independent of other blocks and of runs with another lot.

    With one exception: six blocks (0 to 5, 6 to 11, ...) in which some arm always ran before the first arm,
    or always after it, are drawn again; of two arms so are the `fewest` blocks that the run may be judged by,
    where they are two to five. With two arms, one run in 32 would draw that in six blocks, and could not tell
    a position effect from the change. The first of many arms then runs at an end more often than in the
    middle, at both ends alike: with four arms by 1%, with sixteen by 11%. Orders that are balanced further
    resonate with periodic noise: one of each order in every two blocks gives 14% false alarms, where this
    gives 5 to 6% (stats.md).
    """
    together = min(DRAWN_TOGETHER, fewest) if arms == 2 else DRAWN_TOGETHER
    place, attempt = block % together, 0
    while True:
        group = [
            sorted(range(arms), key=partial(_draw, lot, "order", block - place + number, attempt))
            for number in range(together)
        ]
        ahead = [{order.index(arm) < order.index(0) for order in group} for arm in range(1, arms)]
        if together == 1 or all(len(found) == 2 for found in ahead):
            return group[place]
        attempt += 1


def workload_order(seed: int, block: int, index: int, workloads: int) -> list[int]:
    """The workloads that share a boot, by number, in the order in which they have their turn in one round:
    each order is as likely as any other, so that none always runs behind the same one."""
    return sorted(range(workloads), key=lambda workload: _draw(seed, "workload", block, index, workload))


def turn_order(lot: str, block: int, segment: int, arms: int) -> list[int]:
    """The arms by number, in the order of their turns in one segment: each is as likely as any other."""
    return sorted(range(arms), key=partial(_draw, lot, "turn", block, segment))


def segment_seed(seed: int, block: int, segment: int) -> int:
    """Seed of what a segment asks; every arm gets the same."""
    return _draw(seed, "segment", block, segment)


def round_seed(seed: int, block: int, index: int) -> int:
    """Seed of one round's prompts and arrivals; both arms of a block get the same. Warm-up rounds are
    numbered below zero, and block -1 is the discarded one."""
    return _draw(seed, "round", block, index)


def _draw(*parts: object) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
