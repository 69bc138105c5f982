"""What is asked of an engine, and when: plain data, made from a few options and a seed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload import prompts as source
from overlap_bench.harness.workload.arrivals import ARRIVALS, using

*_SOME, _LAST = ARRIVALS
LENGTHS = ("input_tokens", "max_new_tokens")  # of tokens: a number, or a distribution (lengths.py)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked in a round. Each field is an option of the command line; its description is the help, and
    the short help has those with {"first": True}."""

    prompt: Annotated[str | None, Meta(description="Text that every request asks.")] = "Hello"
    prompts: Annotated[
        str | None,
        Meta(
            description="File of prompts; or english, Python's documentation; or openings, its first words "
            "(openings).",
            extra={"first": True},
        ),
    ] = None
    prompt_repeats: Annotated[
        int | None, Meta(description="How often each prompt is asked: a prefix to reuse.")
    ] = None
    unique_prompts: Annotated[bool, Meta(description="No two prompts begin alike (off).")] = False
    # Lengths (lengths.py): a number, or a distribution to draw from. Prompts are joined and cut.
    input_tokens: Annotated[
        int | str | None,
        Meta(description=f"Tokens of each prompt: {lengths.FORMS}.", extra={"first": True}),
    ] = None
    max_new_tokens: Annotated[
        int | str | None,
        Meta(
            description="Tokens to generate, likewise (64 on emulated, 128 on cuda; or as the data says).",
            extra={"first": True},
        ),
    ] = 128
    num_requests: Annotated[
        int,
        Meta(
            description="Requests of a round (16 on emulated, 64 on cuda); of a trace, its first so many.",
            extra={"first": True},
        ),
    ] = 64
    arrival: Annotated[
        str,
        Meta(description=f"{', '.join(_SOME)} or {_LAST} (fixed).", extra={"first": True}),
    ] = "fixed"
    interval_ms: Annotated[
        float,
        Meta(
            description="Between requests, arrival fixed (5 on emulated, 20 on cuda).", extra={"first": True}
        ),
    ] = 20.0
    arrival_schedule: Annotated[str, Meta(description="absolute or relative (absolute).")] = "absolute"
    rate: Annotated[
        float | None,
        Meta(
            description=f"Requests per second, arrival {using('rate')}.",
            extra={"first": True},
        ),
    ] = None
    burstiness: Annotated[
        float, Meta(description="Shape of the gamma distribution: 1 is Poisson, less comes in bursts (1).")
    ] = 1.0
    ramp_up: Annotated[
        str | None,
        Meta(
            description="RATE to start from; it grows with each request to --rate at the last or N-th.",
            extra={"metavar": "RATE[:N]"},
        ),
    ] = None
    trace: Annotated[
        str | None,
        Meta(description="File to replay, arrival trace: Mooncake (JSON lines) or BurstGPT (CSV)."),
    ] = None
    trace_scale: Annotated[
        float, Meta(description="Factor on every length of the trace, to fit the context (1).")
    ] = 1.0
    concurrency: Annotated[
        int | None, Meta(description="Requests in flight, arrival closed.", extra={"first": True})
    ] = None
    pretok: Annotated[bool, Meta(description="Send token ids instead of text (on).")] = True
    stop_on_eos: Annotated[bool, Meta(description="End at EOS (off).")] = False
    temperature: Annotated[
        float, Meta(description="Sample at this temperature (0, greedy).", extra={"first": True})
    ] = 0.0
    top_k: Annotated[int, Meta(description="Sample from this many of the likeliest tokens (0, all).")] = 0
    top_p: Annotated[
        float,
        Meta(description="Sample from the likeliest tokens with this total probability (1, all)."),
    ] = 1.0
    stop: Annotated[
        list[str], Meta(description="End a request where its text reaches this; repeatable.")
    ] = []

    @property
    def interval_ns(self) -> int:
        return round(self.interval_ms * 1e6)

    @property
    def most_new_tokens(self) -> int | None:
        """The longest output that can be asked for; None where the data says."""
        if self.max_new_tokens is None:
            return None
        return lengths.parse(self.max_new_tokens, "max_new_tokens").most

    @property
    def files(self) -> tuple[str, ...]:
        prompts = None if self.of_python else self.prompts
        return tuple(path for path in (prompts, self.trace) if path is not None)

    @property
    def of_python(self) -> bool:
        return self.prompts in source.OF_PYTHON


DEFAULT = Workload()
