"""How a step's tokens are chosen: in which family of programs, and what that is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from overlap_bench.engines.overlap.batch import Batch, Values
from overlap_bench.engines.overlap.layout import FAMILIES, NO_TARGET
from overlap_bench.engines.overlap.scoring import scores

# Each array of a family: the field of a request that fills it, and the value of a padding row.
SAMPLED_BY: dict[str, tuple[str, float]] = {
    "seeds": ("seed", 0),
    "temperatures": ("temperature", 0.0),
    "top_ks": ("top_k", 0),
    "top_ps": ("top_p", 1.0),
}


def with_sampling(batch: Batch) -> Batch:
    """The batch in the family that its requests need, with the arrays of that family."""
    requests = [active.request for active in batch.requests]
    if all(request.temperature == 0 for request in requests):
        return batch
    family = "filtered" if any(each.top_k > 0 or each.top_p < 1 for each in requests) else "sampled"
    padding = batch.program.rows - len(requests)
    columns = {
        name: [getattr(request, field) for request in requests] + [empty] * padding
        for name in FAMILIES[family]
        for field, empty in (SAMPLED_BY[name],)
    }
    return _in_family(batch, family, columns)


def with_targets(batch: Batch) -> Batch:
    """The batch in the family that scores, where some request brought forced tokens."""
    targets = [request.target for request in batch.requests]
    if all(target == NO_TARGET for target in targets):
        return batch
    padding = [NO_TARGET] * (batch.program.rows - len(targets))
    return _in_family(batch, "scored", {"targets": targets + padding})


def _in_family(batch: Batch, family: str, columns: Mapping[str, Values]) -> Batch:
    program = structs.replace(batch.program, family=family)
    return replace(batch, program=program, values={**batch.values, **columns})


def tokens_of(batch: Batch, ids: Sequence[int]) -> Sequence[int]:
    """The tokens among a step's ids. Of a scored step, requests that still run get the scores of theirs."""
    if batch.program.family != "scored":
        return ids
    tokens, found = scores(ids, batch.values["targets"][: len(batch.requests)])  # type: ignore[arg-type]
    for request, score in zip(batch.given, found, strict=False):
        if request.request.forced and not request.finish_reason:
            request.scores.append(score)
    return tokens
