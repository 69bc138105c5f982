"""What a command was asked for, as it was typed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from overlap_bench.harness.plan.design import SHARE, Ref


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
