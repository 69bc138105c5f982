"""A request as an engine takes it in, whatever runs it: what it is until its end, and why it can't run."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_bench.engines.api import EngineOptions, Finish, Request


@dataclass(slots=True, eq=False)
class Taken:
    """A request that was taken in, and how far it is. Equal only to itself."""

    request: Request
    prompt: list[int]
    accepted_ns: int
    tokenized_ns: int
    admitted_ns: int = -1
    count: int = 0  # tokens so far

    def finish(self, reason: str) -> Finish:
        return Finish(
            self.request.id,
            reason,
            len(self.prompt),
            self.count,
            self.accepted_ns,
            self.tokenized_ns,
            self.admitted_ns,
        )


def reason_of(said: str | None, stopped_by: object) -> str:
    """An engine that says "stop" says so for an end-of-text id as well as for a stop string."""
    if said == "stop":
        return "stop" if isinstance(stopped_by, str) else "eos"
    return "length" if said == "length" else "cancelled"


def why_impossible(
    request: Request, prompt: list[int], options: EngineOptions, vocabulary: int, whole: bool = True
) -> str | None:
    """None where no option and no id forbids it. `whole`: a prompt is prefilled at once."""
    most = request.max_new_tokens
    if not prompt:
        return "the prompt is empty"
    if most < 1:
        return f"max_new_tokens is {most}; at least one token must be asked for"
    if len(prompt) + most > options.max_context:
        return (
            f"a prompt of {len(prompt)} tokens and {most} new ones exceed max_context={options.max_context}"
        )
    if len(prompt) > options.prefill_max_tokens and whole:
        return f"a prompt of {len(prompt)} tokens exceeds prefill_max_tokens={options.prefill_max_tokens}"
    if max(prompt) >= vocabulary or min(prompt) < 0:
        return f"the prompt has ids beyond the model's vocabulary, 0 to {vocabulary - 1}"
    return "a stop string is empty" if "" in request.stop else None
