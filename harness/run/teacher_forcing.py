"""How likely the model considers the tokens at which the outputs of two arms part: the engine of the before
arm, booted once more when all is measured, is given the prompt and what both arms agreed on, and scores them.
It scores some of them twice, on two routes: what these differ by is its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.metrics import divergences
from overlap_bench.harness.plan.design import Arm, round_seed
from overlap_bench.harness.run.hosts import engines_of
from overlap_bench.harness.run.overlay import checked_out
from overlap_bench.harness.run.scoring import Client, to_score
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.run.trial import least_context, planned
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.workload.prompts import load_tokenizer

if TYPE_CHECKING:
    import pandas as pd

Context = tuple[int, ...]  # token ids
Say = Callable[[str], object]

# With the arm's own batch, up to 1,024, this boot would capture twice as many decode programs as a measured
# one, to be asked little.
BATCH = 32
PLACES = 32  # at which two answers are compared: enough that no single one sets the width


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an output leaves the first arm's: behind a prompt and what both said after it."""

    prompt: Context
    agreed: Context
    tokens: tuple[int, int]  # with which each goes on, before and after; ENDED where one does not

    @property
    def context(self) -> Context:
        return self.prompt + self.agreed


def judge(folder: Path, manifest: Manifest, blocks: Sequence[Block], say: Say) -> list[Block]:
    """The blocks with every divergence judged; the gaps are written to their files too. They stay as they
    are where tokens were sampled, or where the engine can't score. An engine that fails here does not fail
    the run: `say` gets the reason. Raises StoreError, WriteFailed and KeyboardInterrupt."""
    before = manifest.design.arms[0]
    spec = engines_of([before.ref]).get(before.engine)
    if spec is None or not spec.scores or manifest.design.workload.temperature > 0:
        return [*blocks]
    waiting = {
        block.number: found.copy()
        for block in blocks
        if len(found := block.tables["divergences"]) and found["before_gap"].isna().any()
    }
    if not waiting:
        return [*blocks]
    count = sum(map(len, waiting.values()))
    outputs = "1 output differs" if count == 1 else f"{count} outputs differ"
    say(f"{outputs}: asking the model of {before.name} how likely the differing tokens are")
    try:
        _fill(manifest, spec, waiting)
    except api.EngineError as error:
        say(f"the outputs that differ are not judged: {error}; --resume asks again")
        return [*blocks]
    for number, table in waiting.items():
        tables.write_table(tables.table_path(folder, number, "divergences"), table)
    return [
        Block(
            block.number,
            {**block.tables, "divergences": waiting.get(block.number, block.tables["divergences"])},
        )
        for block in blocks
    ]


def _fill(manifest: Manifest, spec: api.EngineSpec, waiting: Mapping[int, pd.DataFrame]) -> None:
    """Put the gaps into the divergences of these blocks. The engine booted here, not the manifest, says
    where its files are: those of a git ref went with the worktree that they were in. Raises EngineError."""
    before = manifest.design.arms[0]
    with (
        checked_out(manifest.design, [before]) as trees,
        Session(trees.places, generator=False) as session,
    ):
        booted = session.boot([to_judge(before, spec)])[before.name]
        partings = {block: _partings(manifest, block, table, booted) for block, table in waiting.items()}
        every = [parting for each in partings.values() for parting in each]
        model = booted.description.model
        vocabulary = int(model.get("vocabulary", np.iinfo(np.int64).max))
        # Neither ENDED, nor an id outside of the vocabulary.
        known = {token for each in every for token in each.tokens if 0 <= token < vocabulary}
        wanted = {(each.context, token) for each in every for token in each.tokens if token in known}
        client = Client(session, booted, lambda line: None)
        found = gaps(client, wanted)
        twice = apart(client, [each for each in every if known.issuperset(each.tokens)])
        largest = float(model.get("largest_logit", 0))
        near_tie = divergences.near_tie(before.options.dtype, largest, twice)
    for block, table in waiting.items():
        for side, name in enumerate(divergences.GAPS):
            table[name] = [found.get((each.context, each.tokens[side]), np.inf) for each in partings[block]]
        table["near_tie"] = near_tie


def _partings(manifest: Manifest, block: int, table: pd.DataFrame, booted: Booted) -> list[Parting]:
    """The divergences of a block, in the order of the table."""
    design, context = manifest.design, least_context(manifest.descriptions.values())
    tokenizer = str(booted.description.model.get("tokenizer", ""))
    encode: Any = None if design.workload.pretok else load_tokenizer(tokenizer).encode
    prompts: dict[int, list[Context]] = {}
    for index in table["round"].unique().tolist():
        asked, _ = planned(design.workload, round_seed(design.seed, block, index), booted, context)
        ids = (each.prompt if isinstance(each.prompt, list) else encode(each.prompt).ids for each in asked)
        prompts[index] = [*map(tuple, ids)]
    columns = ("round", "request", "agreed", "before_token", "after_token")
    rows = zip(*(table[name] for name in columns), strict=True)
    return [
        Parting(prompts[index][request], tuple(agreed.tolist()), (before, after))
        for index, request, agreed, before, after in rows
    ]


def to_judge(arm: Arm, spec: api.EngineSpec) -> Arm:
    """The arm as it is booted for this."""
    scoring = to_score(arm)
    size = min(BATCH, arm.options.max_batch_size)
    options = msgspec.structs.replace(scoring.options, max_batch_size=size)
    return msgspec.structs.replace(scoring, options=options, toggles=_one_token_a_step(arm.toggles, spec))


def _one_token_a_step(toggles: Mapping[str, str], spec: api.EngineSpec) -> dict[str, str]:
    """The toggles without what composes a step, as one that gives several tokens can't be told what to score,
    and without what means something beside that alone. The model is the same."""
    if not spec.composing:
        return dict(toggles)
    usual = spec.check({})
    plain = {name: choice for name, choice in toggles.items() if name not in spec.composing}
    plain |= {name: usual[name] for name in spec.composing if name in usual}
    return spec.check(
        {
            name: choice
            for name, choice in plain.items()
            if spec.setting(name) or spec.toggle(name).unmet(choice, plain) is None
        }
    )


def gaps(client: Client, wanted: set[tuple[Context, int]]) -> dict[tuple[Context, int], float]:
    """How much less likely than the likeliest one each token is after its context, as a difference of logits;
    infinite where the model's numbers are NaN. Raises EngineError."""
    contexts = sorted({context for context, _ in wanted})
    likeliest = [
        answer.token_ids[0]
        for answer in client.ask([api.Request(0, list(context), 1) for context in contexts])
    ]
    scored = sorted(wanted | set(zip(contexts, likeliest, strict=True)))
    answers = client.ask([api.Request(0, list(context), 1, forced=[token]) for context, token in scored])
    if not all(answer.finish.scores for answer in answers):
        raise api.EngineError("the engine gives no scores: its code may predate them")
    logprobs = {each: answer.finish.scores[0].logprob for each, answer in zip(scored, answers, strict=True)}
    tops = {context: logprobs[context, token] for context, token in zip(contexts, likeliest, strict=True)}
    found = {(context, token): tops[context] - logprobs[context, token] for context, token in wanted}
    return {each: np.inf if np.isnan(gap) else gap for each, gap in found.items()}


def apart(client: Client, partings: Sequence[Parting]) -> list[float]:
    """How far apart, in logits, two answers about the lead of one token of a parting over the other are: with
    all before them as the prompt, and with the outputs' part of that decoded token by token, as the arms did.
    At about PLACES places, within the outputs and at their ends. Raises EngineError."""
    decoded = [each for each in partings if each.agreed]
    cuts = max(1, PLACES // max(1, len(decoded)))
    places = [
        (each.prompt, each.agreed[:length], each.tokens)
        for each in decoded[:: max(1, len(decoded) // PLACES)]
        for length in sorted({-(-len(each.agreed) * cut // cuts) for cut in range(1, cuts + 1)})
    ]
    at_once = _lead(client, [(prompt + said, (), tokens) for prompt, said, tokens in places])
    one_by_one = _lead(client, places)
    return [one - other for one, other in zip(at_once, one_by_one, strict=True)]


def _lead(client: Client, places: Sequence[tuple[Context, Context, tuple[int, int]]]) -> list[float]:
    """By how many logits the first of two tokens leads, behind a prompt and tokens decoded after it."""
    answers = client.ask(
        [
            api.Request(0, list(prompt), len(said) + 1, forced=[*said, token])
            for prompt, said, tokens in places
            for token in tokens
        ]
    )
    logprobs = [answer.finish.scores[-1].logprob for answer in answers]
    return [first - second for first, second in zip(logprobs[::2], logprobs[1::2], strict=True)]
