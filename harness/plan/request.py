"""What a command was asked for, as it was typed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import SHARE, Ref

FIRST = {"first": True}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured, how, and by which rule; `workload`, `options` (of the engine) and `design` hold
    only what was given. Each field with a description is an option of the command line, as those of Workload,
    EngineOptions and Design are: `extra` says how it is typed, and {"first": True} puts it into the short
    help."""

    variant: Annotated[
        str | None,
        Meta(
            description="A named before/after pair: bench variants lists them.",
            extra={"metavar": "NAME", "first": True},
        ),
    ] = None
    engine: Annotated[
        str | None,
        Meta(description="An engine, in place of a variant.", extra={"metavar": "NAME", "first": True}),
    ] = None
    both: Annotated[
        tuple[str, ...],
        Meta(
            description="A toggle, an option, python, patch or env.NAME of both arms.",
            extra={"flag": "--set", "metavar": "KEY=VALUE", "first": True},
        ),
    ] = ()
    before: Annotated[
        tuple[str, ...],
        Meta(description="The same of the before arm.", extra={"metavar": "KEY=VALUE", "first": True}),
    ] = ()
    after: Annotated[
        tuple[str, ...],
        Meta(description="The same of the after arm.", extra={"metavar": "KEY=VALUE", "first": True}),
    ] = ()
    until_decided: Annotated[
        bool,
        Meta(description="Stop once the verdict is clear: looks at 6, 8, ... trials.", extra={"first": True}),
    ] = False
    until_precision: Annotated[
        float | None,
        Meta(
            description="Stop once the interval's half-width is this small, such as 1%.",
            extra={**SHARE, "first": True},
        ),
    ] = None
    max_blocks: Annotated[
        int | None,
        Meta(description="Most trials, if it may stop early (20).", extra={"flag": "--max-trials"}),
    ] = None
    plant: Annotated[
        float | None,
        Meta(
            description="Delay each step of the after arm by a known share, such as 3%.",
            extra={**SHARE, "flag": "--inject-delay"},
        ),
    ] = None
    plant_at: Annotated[
        str | None, Meta(description="Where: device or host (device).", extra={"flag": "--inject-at"})
    ] = None
    workload: dict[str, object] = {}
    options: dict[str, object] = {}
    design: dict[str, object] = {}
    against_itself: bool = False  # the before arm in both places
    refs: tuple[Ref | None, Ref | None] | None = None  # whose code each arm runs; None: what is installed
    overlay: tuple[str, ...] = ()  # patterns of files that the trees of refs get
    max_regression: float | None = None  # of a gate

    @property
    def nothing(self) -> bool:
        """Whether it is left to a stored run to say what to do."""
        return self == Request()


class OnUndecided(StrEnum):
    FAIL = "fail"
    PASS = "pass"


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate is asked besides: which refs are its arms, what it is judged by, and what becomes of that.
    Its fields are options as those of Request are."""

    base_ref: Annotated[
        str | None,
        Meta(description="Git ref whose code the base runs, from a folder of its own.", extra=FIRST),
    ] = None
    head_ref: Annotated[
        str | None, Meta(description="The same for the head (the code that is installed).", extra=FIRST)
    ] = None
    overlay: Annotated[
        tuple[str, ...],
        Meta(
            description="Files that a build left in your checkout, for both refs.",
            extra={**FIRST, "metavar": "PATTERN"},
        ),
    ] = ()
    metric: Annotated[
        tuple[str, ...],
        Meta(
            description="Metric that must not regress; up to five (the primary).",
            extra={**FIRST, "flag": "--metric", "metavar": "METRIC"},
        ),
    ] = ()
    max_regression: Annotated[
        float | None, Meta(description="How much worse each may get (2%).", extra={**FIRST, **SHARE})
    ] = None
    calibrate: Annotated[
        bool, Meta(description="Measure the base against itself: what can be gated here?", extra=FIRST)
    ] = False
    plan: Annotated[
        Path | None,
        Meta(description="Gate as this recommends: the calibration.json that --calibrate left.", extra=FIRST),
    ] = None
    history: Annotated[
        Path | None,
        Meta(
            description="File of gates against this base: add this one, show where the change moved.",
            extra=FIRST,
        ),
    ] = None
    on_undecided: Annotated[
        OnUndecided | None, Meta(description="What undecided counts as; else it exits with 3.", extra=FIRST)
    ] = None

    def check(self, request: Request, run: Path | None, on_cluster: bool) -> None:
        """Raises BadSetting unless it is one of: to judge the finished `run`, to calibrate, to measure."""
        if run is not None and (not request.nothing or self.base_ref or self.head_ref or self.overlay):
            raise api.BadSetting(f"{run} is already measured: only the options of Gate and Output apply")
        others = (run, self.base_ref, self.head_ref, self.on_undecided, self.plan, self.history)
        if self.calibrate and any(others):
            raise api.BadSetting(
                "--calibrate measures what is installed against itself: leave out RUN, --base-ref, "
                "--head-ref, --plan, --history and --on-undecided"
            )
        if self.plan is not None and run is not None:
            raise api.BadSetting(f"--plan is for a gate that measures, and {run} is already measured")
        if on_cluster and (self.calibrate or run is not None):
            raise api.BadSetting(
                "--ray is for a gate that measures trials: --calibrate is about this machine"
            )
