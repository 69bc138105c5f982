"""`bench eval`: tasks of lm-eval asked of each arm in turn, and their answers side by side."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis.accuracy import (
    Answers,
    AnswersMayDiffer,
    Cut,
    Evaluation,
    Row,
    agreement,
    pooled,
    row,
)
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.analysis.result import Settings
from overlap_bench.harness.analysis.warnings import Warning
from overlap_bench.harness.common import machine
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run.scoring import Client, to_score
from overlap_bench.harness.run.session import Session
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.files import EVALUATION_FILE, SCHEMA_VERSION, write_json
from overlap_bench.harness.store.manifest import whole_or_none, without_places

OWN_TASKS = Path(__file__).with_name("tasks")
INSTALL = "pip install 'overlap-bench[eval]'"

Say = Callable[[str], object]
Values = Mapping[tuple[str, str], Mapping[int, float]]  # (task, metric) → item → its value


@dataclass(frozen=True, slots=True)
class Asked:
    """What one arm said. `groups`: the tasks of each group."""

    values: Values
    groups: Mapping[str, Sequence[str]]
    answers: Answers
    description: api.Description


def check(tasks: Sequence[str], limit: int | None, few: int | None) -> None:
    """Raises BadSetting for what can't be asked, and where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise api.BadSetting(f"bench eval needs lm-eval, which is not installed: {INSTALL}")
    if "" in tasks:
        raise api.BadSetting("--tasks needs names such as mmlu,hellaswag")
    if limit is not None and limit < 1:
        raise api.BadSetting(f"--limit must be at least 1, not {limit}")
    if few is not None and few < 0:
        raise api.BadSetting(f"--num-fewshot must be at least 0, not {few}")


def scoring(engines: Mapping[str, api.EngineSpec], arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms as they are booted for this. Raises BadSetting for an engine that can't score."""
    for arm in arms:
        if not engines[arm.engine].scores:
            able = ", ".join(name for name, spec in engines.items() if spec.scores)
            raise api.BadSetting(
                f"engine {arm.engine} can't score given tokens, as bench eval must; {able} can"
            )
    return tuple(map(to_score, arms))


def evaluate(
    name: str,
    arms: Sequence[Arm],
    tasks: Sequence[str],
    limit: int | None,
    few: int | None,
    results: Path,
    say: Say,
) -> tuple[Evaluation, bool]:
    """Ask every arm, one after the other, and keep what came of it in a new folder under `results`; whether
    answers differ although the engines promise equal ones. Raises BadSetting, EngineError, RunFailed,
    WriteFailed; an evaluation that is not finished leaves no folder."""
    with whole_or_none(results, f"eval-{name}") as (folder, now):
        manager = _manager(tasks)
        with Session(generator=False) as session:
            asked = [_ask(session, manager, arm, tasks, limit, few, say) for arm in arms]
        result = compared(folder.name, name, arms, tasks, asked)
        about = {
            **to_stored(result),
            "created": now.isoformat(timespec="seconds"),
            "limit": limit,
            "num_fewshot": few,
            "machine": machine.fingerprint(),
            "code": machine.code(),
            "versions": machine.versions() | {"lm-eval": version("lm-eval")},
            "descriptions": {
                arm.name: without_places(each.description) for arm, each in zip(arms, asked, strict=True)
            },
        }
        write_json(folder / EVALUATION_FILE, about)
        tables.write_table(folder / "items.parquet", _items(asked))
    differ = result.answers.apart or result.answers.texts_differ
    alike = len({(arm.options.model, arm.options.max_context) for arm in arms}) == 1
    promised = alike and all(each.description.deterministic for each in asked)
    say(f"written to {folder}")
    return result, bool(promised and differ)


# ---------------------------------------------------------------------------------------------------------
# Asking


def _manager(tasks: Sequence[str]) -> Any:
    """The index of tasks. The thousands of lm-eval are read only where one of them is asked for. Raises
    BadSetting for an unknown one."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress is said by the client
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = TaskManager(include_path=str(OWN_TASKS), include_defaults=False)
    if set(tasks) <= set(own.all_tasks):
        return own
    every = TaskManager(include_path=str(OWN_TASKS))
    for task in tasks:
        api.pick(task, dict.fromkeys(every.all_tasks), "task")
    return every


def _ask(
    session: Session,
    manager: Any,
    arm: Arm,
    tasks: Sequence[str],
    limit: int | None,
    few: int | None,
    say: Say,
) -> Asked:
    from lm_eval import evaluator

    from overlap_bench.harness.studies.evaluation.model import EngineModel

    say(f"{arm.name}: booting")
    booted = session.boot([arm])[arm.name]
    model = EngineModel(Client(session, booted, say))
    evaluator.get_git_commit_hash = str  # git would be asked about the current folder, and complain of it
    with _one_line(tasks):
        found = evaluator.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=few,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
        )
    session.shut([booted])
    groups = {group: list(children) for group, children in found.get("group_subtasks", {}).items()}
    return Asked(_values(found["samples"]), groups, model.answers, booted.description)


@contextmanager
def _one_line(tasks: Sequence[str]) -> Iterator[None]:
    """One line for what fails inside lm-eval, such as a task whose data is neither here nor to be had."""
    try:
        yield
    except api.EngineError:
        raise
    except Exception as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise api.EngineError(
            f"lm-eval can't ask {', '.join(tasks)} (data that is not at hand must be downloaded): {what[0]}"
        ) from error


def _values(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str], dict[int, float]]:
    """What lm-eval logged, for every item and metric that has a number."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for task, logged in samples.items():
        for sample in logged:
            for metric in sample["metrics"]:
                value, kind = sample[metric], sample["filter"]
                if isinstance(value, bool | int | float):
                    # An item has no perplexity: under that name lm-eval logs what it takes the mean of.
                    metric = "loglikelihood" if metric == "perplexity" else metric
                    name = metric if kind == "none" else f"{metric},{kind}"
                    values.setdefault((task, name), {})[int(sample["doc_id"])] = float(value)
    return values


# ---------------------------------------------------------------------------------------------------------
# What came of it


def compared(
    run: str, name: str, arms: Sequence[Arm], tasks: Sequence[str], asked: Sequence[Asked]
) -> Evaluation:
    """What the arms answered, side by side; with one arm `after` is None, and so is all that compares."""
    before, *after = asked
    return Evaluation(
        schema_version=SCHEMA_VERSION,
        run=run,
        device=before.description.device["kind"],
        variant=name,
        before=Settings.of(arms[0]),
        after=Settings.of(arms[1]) if after else None,
        confidence=1 - ALPHA,
        tasks=rows(tasks, before, after[0] if after else None),
        answers=agreement(before.answers, after[0].answers if after else None),
        warnings=_warnings(asked),
    )


def rows(tasks: Sequence[str], before: Asked, after: Asked | None) -> list[Row]:
    """The rows of what was asked for, groups pooled over their items, then of every other task."""
    leaves = list(dict.fromkeys(task for task, _ in before.values))
    parts = {task: _leaves(task, before.groups, leaves) for task in tasks}
    parts |= {leaf: [leaf] for leaf in leaves if leaf not in parts}
    found = []
    for task, members in parts.items():
        metrics = dict.fromkeys(metric for leaf, metric in before.values if leaf in members)
        for metric in metrics:
            first, second = (
                None if side is None else _pooled(side.values, members, metric) for side in (before, after)
            )
            assert first is not None
            if after is not None and (second is None or len(first) != len(second)):
                raise api.EngineError(
                    f"the arms were asked different items of {task}: lm-eval did not repeat itself"
                )
            found.append(row(task, metric, first, second))
    return found


def _leaves(task: str, groups: Mapping[str, Sequence[str]], leaves: Sequence[str]) -> list[str]:
    if task in leaves:
        return [task]
    return [leaf for child in groups.get(task, ()) for leaf in _leaves(child, groups, leaves)]


def _pooled(values: Values, tasks: Sequence[str], metric: str) -> list[float]:
    by_task = {
        task: [value for _, value in sorted(items.items())]
        for (task, name), items in values.items()
        if name == metric
    }
    return pooled(by_task, [task for task in tasks if task in by_task])


def _items(asked: Sequence[Asked]) -> pd.DataFrame:
    """One row per item and metric: task, metric, item, before, after (NaN for one arm alone)."""
    before, *after = asked
    return pd.DataFrame(
        [
            {
                "task": task,
                "metric": metric,
                "item": item,
                "before": value,
                "after": after[0].values[task, metric][item] if after else float("nan"),
            }
            for (task, metric), items in before.values.items()
            for item, value in items.items()
        ]
    )


def _warnings(asked: Sequence[Asked]) -> list[Warning]:
    found: list[Warning] = []
    most = max(asked, key=lambda each: each.answers.cut)  # the arms' contexts may differ
    answers = most.answers
    if answers.cut:
        count = len(answers.likelihoods) + len(answers.texts)
        found.append(Cut(answers.cut, count, int(most.description.model["context"])))
    if not all(each.description.deterministic for each in asked):
        found.append(AnswersMayDiffer())
    return found
