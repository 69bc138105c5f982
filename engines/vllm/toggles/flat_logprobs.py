"""flat_logprobs: what holds the log probabilities of a request that asks for them.

Before (`off`), a list with a dict for each token, whose values are an object for each candidate: the
collector walks over all of them. After (`on`), a few flat lists that all tokens share.

Claim: vLLM 28171, far less for the collector to do. vLLM 57442 measured it, with one log probability a token
(`logprobs=0`) and 512 requests at once: 3,917 against 3,922 tokens/s, no help. A field of vLLM's
SamplingParams; each request's first output shows which it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from overlap_bench.engines.api import EngineError, Toggle
from overlap_bench.engines.vllm.toggles.change import Change

NEEDS = (
    ("vllm.sampling_params", "SamplingParams", ("logprobs", "flat_logprobs")),
    ("vllm.logprobs", "FlatLogprobs", ()),
)
ASKED = ("0", "1", "5", "20")

LOGPROBS = Change(
    toggle=Toggle(
        name="logprobs",
        module=__name__,
        choices=("none", *ASKED),
        after="0",
        changes="log probabilities that each token brings: none; its own; or also of so many candidates",
        source="the OpenAI API's logprobs; vLLM 57442",
        optional=True,
    ),
    sampling={each: {"logprobs": int(each)} for each in ASKED},
)
FLAT = Change(
    toggle=Toggle(
        name="flat_logprobs",
        module=__name__,
        choices=("off", "on"),
        changes="log probabilities as dicts of objects for each token, or in a few flat lists",
        source="vLLM SamplingParams.flat_logprobs; pull requests 28171, 57442",
        requires={"*": {"logprobs": ASKED}},
        optional=True,
    ),
    needs=NEEDS,
    sampling={"off": {"flat_logprobs": False}, "on": {"flat_logprobs": True}},
)
CHANGES = (LOGPROBS, FLAT)


def check_in_force(settings: Mapping[str, str], logprobs: object) -> None:
    """Raises EngineError where the log probabilities of an output are not as an arm that names them asks."""
    asked, flat = settings.get("logprobs"), settings.get("flat_logprobs")
    if asked is not None and (logprobs is None) != (asked == "none"):
        raise EngineError(
            f"logprobs={asked} is not in force: an output has {'none' if logprobs is None else 'some'}"
        )
    found = type(logprobs).__name__
    if flat is not None and (found == "FlatLogprobs") != (flat == "on"):
        raise EngineError(
            f"flat_logprobs={flat} is not in force: an output's log probabilities are a {found}"
        )
