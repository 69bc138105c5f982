"""Every option of every command, with values that mean something and values that do not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from experiments.common.command_line import ROOT
from experiments.fuzzing import values
from experiments.fuzzing.case import Target
from experiments.fuzzing.in_process import bench, judged, nothing_starts, rss
from harness.cli.app import COMMANDS, built

RUNS = tuple(
    str(ROOT / "results" / "reference" / "runs" / name) for name in ("pinned-h2d", "deferred-output")
)
# Values that mean something, by what an option is called.
SENSIBLE: dict[str, tuple[str, ...]] = {
    "variant": ("overlap", "pinned-h2d", "all", "copy-done"),
    "engine": ("overlap", "openai", "transformers", "vllm"),
    "both": ("h2d=pinned", "schedule=overlap", "sync=copy-done", "model=tiny-llama", "env.X=1", "pace=10ms"),
    "before": ("h2d=pinned", "h2d=pageable", "schedule=serial", "python=/bin/true", "url=http://127.0.0.1:9"),
    "after": ("h2d=packed", "schedule=overlap", "output=process", "engine=overlap", "cmd=true", "env.A=b"),
    "model": ("tiny-gpt2", "micro-gpt2", "tiny-llama"),
    "device": ("auto", "emulated", "cuda"),
    "dtype": ("float32", "bfloat16"),
    "pace": ("10ms", "llama3-8b-h100", "decode=10ms+0.05ms*batch,prefill=80us*tokens"),
    "arrival": ("fixed", "poisson", "gamma", "burst", "closed", "trace"),
    "input_tokens": ("16", "uniform:4:8", "normal:16:4"),
    "max_new_tokens": ("16", "uniform:4:8", "normal:16:4"),
    "ramp_up": ("5:16", "1:2"),
    "goodput": ("ttft:200", "tpot:20", "latency:1e9"),
    "margin": ("1%", "0.01", "50%"),
    "max_regression": ("2%", "5%"),
    "primary": ("tpot_ms_p50", "step_ms_sliced", "ttft_ms_p50"),
    "secondaries": ("ttft_ms_p50", "throughput_tok_s"),
    "metric": ("tpot_ms_p50", "ttft_ms_p50", "step_ms_sliced"),
    "over": ("concurrency=1,4", "h2d=pageable,pinned", "variant=overlap,all", "rate=1,2,3"),
    "toggles": ("h2d,sync", "schedule,h2d,output", "h2d=pageable:pinned"),
    "plant_at": ("device", "host"),
    "prompts": ("english", "prompts.txt", "sharegpt.json"),
    "trace": ("mooncake.jsonl", "burst.csv"),
    "run": RUNS,
    "runs": (*RUNS, f"{RUNS[0]}:before", f"{RUNS[0]}:after", f"{RUNS[1]}:after"),
    "files": (
        str(ROOT / "tests/fixtures/imports/vllm.json"),
        str(ROOT / "tests/fixtures/imports/sglang.jsonl:1"),
    ),
    "what": ("gil", "sglang-launch-done", "small-model-share"),
    "name": ("gil", "overlap", "roseinfer-pinned-h2d"),
    "base_ref": ("HEAD", "main", "HEAD~1"),
    "head_ref": ("HEAD", "HEAD~2"),
    "host": ("127.0.0.1", "::1", "0.0.0.0"),
    "port": ("0",),
    "format": ("table", "markdown", "json", "csv"),
    "on_undecided": ("fail", "pass"),
    "graph_trace": ("graph", "node"),
    "tasks": ("offline-arithmetic", "mmlu"),
}
NUMBERS = ("0", "1", "2", "4", "6", "100", "0.5", "-1", "50%")
# Never a value of these that is a path outside of the folder it runs in: they are written to.
WRITTEN = ("out",)
# A traceback, a page and a browser are what they are for.
LEFT_OUT = ("debug", "help", "help_all", "opened")
SLOW = ("doctor",)  # it looks around for a second, and has no option
Words = list[str]


def commands(
    group: Mapping[str, Any] | None = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command's words, and what typer made of it."""
    for name, each in ({name: built(name) for name in COMMANDS} if group is None else group).items():
        if hasattr(each, "commands"):
            yield from commands(each.commands, (*path, name))
        elif name not in SLOW:
            yield (*path, name), each


def value(option: Any, random: Random) -> str:
    """For one option: sensible three times of four."""
    name = option.name
    if name in WRITTEN:
        return random.choice(("results", "a/b/c", "report.md", "x" * 300, "prompts.txt", "report.html", "é"))
    if random.random() < 0.75:
        choices = SENSIBLE.get(name, NUMBERS)
        return str(random.choice(choices))
    return values.word(random)


def words(known: list[tuple[tuple[str, ...], Any]], random: Random) -> Words:
    path, command = random.choice(known)
    found = list(path)
    for option in random.sample(command.params, min(len(command.params), random.choice((0, 1, 2, 3, 4, 8)))):
        if option.name in LEFT_OUT:
            continue
        if option.param_type_name == "argument":
            found += [value(option, random) for _ in range(random.choice((1, 1, 1, 2, 3)))]
        elif option.is_flag:
            found.append(random.choice([*option.opts, *option.secondary_opts]))
        else:
            flag, given = random.choice(option.opts), value(option, random)
            found += [f"{flag}={given}"] if random.random() < 0.3 else [flag, given]
    if random.random() < 0.05:
        found.insert(random.choice((len(path), len(found))), values.word(random))  # never behind --out
    # A word that no option takes is a place to write to, and this may run as root.
    return [each for each in found if not each.startswith(("/dev", "--out=/", "-o/", "--debug"))]


def write_files(folder: Path) -> None:
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "sharegpt.json").write_text(
        '[{"conversations": [{"from": "human", "value": "how are you"}, {"from": "gpt", "value": "well"}]}]'
    )
    (folder / "mooncake.jsonl").write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 3
    )
    (folder / "burst.csv").write_text("Timestamp,Request tokens,Response tokens\n1,10,20\n2,10,20\n")


@contextmanager
def opened() -> Iterator[Target[Words]]:
    """In a folder of its own, some levels below one that goes with it: "../.." is still inside."""
    known = list(commands())
    with TemporaryDirectory() as outside:
        folder = Path(outside, "a", "b", "c", "d")
        folder.mkdir(parents=True)
        write_files(folder)
        with patch.dict(os.environ, {"XDG_STATE_HOME": outside}), chdir(folder), nothing_starts():
            yield Target(
                make=partial(words, known),
                attempt=lambda case: f"{case[0]}: {judged(bench(case))}",
                settle=lambda: None,
                rss=rss,
            )
