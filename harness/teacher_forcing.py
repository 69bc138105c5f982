"""How likely the model holds the tokens at which the outputs of two arms part: the engine of the before arm,
booted once more when all is measured, is given the prompt and what both arms agreed on, and says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engines import api
from harness import store
from harness.design import Arm, round_seed
from harness.divergences import ENDED
from harness.scoring import Client, to_score
from harness.session import Session
from harness.store import Manifest
from harness.workload import plan
from harness.workload.prompts import load_tokenizer
from harness.worktrees import checked_out

if TYPE_CHECKING:
    import pandas as pd

Context = tuple[int, ...]  # token ids: a prompt, and what both arms said after it
Say = Callable[[str], object]

# Prompts are all that is run. With the arm's own batch, up to 1,024, the boot would capture twice as many
# decode programs as a measured one, for nothing.
BATCH = 8


def judge(folder: Path, manifest: Manifest, say: Say) -> None:
    """Have each divergence of a run judged that is not yet, and write the gaps beside it. Nothing where
    tokens were sampled, or where the engine can't score. An engine that fails at it costs the run nothing:
    `say` gets the reason. Raises StoreError and KeyboardInterrupt."""
    before = manifest.design.arms[0]
    spec = api.find_engines().get(before.engine)
    if spec is None or not spec.scores or manifest.design.workload.temperature > 0:
        return
    waiting = {}
    for block in store.finished_blocks(folder):
        found = store.read_table(folder, block, "divergences")
        if len(found) and found["before_gap"].isna().any():
            waiting[block] = found
    if not waiting:
        return
    count = sum(map(len, waiting.values()))
    say(f"{count} outputs differ: asking the model of {before.name} how likely the tokens are that differ")
    contexts = {block: _contexts(manifest, block, table) for block, table in waiting.items()}
    wanted = {
        (context, token)
        for block, table in waiting.items()
        for side in ("before_token", "after_token")
        for context, token in zip(contexts[block], table[side], strict=True)
        if token != ENDED
    }
    try:
        gaps = _ask(before, wanted)
    except api.EngineError as error:
        say(f"the outputs that differ are not judged: {error}")
        return
    for block, table in waiting.items():
        for side in ("before", "after"):
            asked = zip(contexts[block], table[f"{side}_token"], strict=True)
            table[f"{side}_gap"] = [gaps.get(each, np.inf) for each in asked]
        store.write_table(store.table_path(folder, block, "divergences"), table)


def _contexts(manifest: Manifest, block: int, table: pd.DataFrame) -> list[Context]:
    """What the model had before it at each divergence of a block."""
    design = manifest.design
    model = manifest.descriptions[design.arms[0].name].model
    path, context = str(model.get("tokenizer", "")), int(model["context"])
    prompts: dict[int, list[Context]] = {}
    for index in table["round"].unique().tolist():
        asked = plan(design.workload, round_seed(design.seed, block, index), path, context)
        prompts[index] = [tuple(_ids(each.prompt, path)) for each in asked]
    rows = zip(table["round"], table["request"], table["agreed"], strict=True)
    return [prompts[index][request] + tuple(agreed.tolist()) for index, request, agreed in rows]


def _ids(prompt: str | list[int], tokenizer: str) -> list[int]:
    if isinstance(prompt, str):
        ids: list[int] = load_tokenizer(tokenizer).encode(prompt).ids
        return ids
    return prompt


def asked(arm: Arm) -> Arm:
    """The arm as it is booted for this."""
    scoring = to_score(arm)
    size = min(BATCH, arm.options.max_batch_size)
    return msgspec.structs.replace(
        scoring, options=msgspec.structs.replace(scoring.options, max_batch_size=size)
    )


def _ask(arm: Arm, wanted: set[tuple[Context, int]]) -> dict[tuple[Context, int], float]:
    """How much less likely than the likeliest one each token is after its context, as a difference of logits,
    by an engine of that arm. Raises EngineError."""
    contexts = sorted({context for context, _ in wanted})
    with checked_out([arm]) as worktrees, Session(worktrees, generator=False) as session:
        booted = session.boot([asked(arm)])[arm.name]
        client = Client(session, booted, lambda line: None)
        likeliest = [
            answer.token_ids[0]
            for answer in client.ask([api.Request(0, list(context), 1) for context in contexts])
        ]
        scored = sorted(wanted | set(zip(contexts, likeliest, strict=True)))
        answers = client.ask([api.Request(0, list(context), 1, forced=[token]) for context, token in scored])
        found = [answer.finish.scores[0].logprob for answer in answers]
    logprobs = dict(zip(scored, found, strict=True))
    tops = {context: logprobs[context, token] for context, token in zip(contexts, likeliest, strict=True)}
    return {(context, token): tops[context] - logprobs[context, token] for context, token in wanted}
