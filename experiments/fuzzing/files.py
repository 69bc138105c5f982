"""Every file that is read, damaged or made up: valid ones of this repository, changed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files as resources
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from engines import api
from engines.api import pace
from engines.overlap.model_check import check_model
from engines.overlap.models import open_model
from engines.overlap.models.published import load_model  # some seconds, which are no case's
from engines.overlap.presets import TOKENIZER_FILE
from experiments.common.command_line import ROOT
from experiments.fuzzing import mutations
from experiments.fuzzing.case import Broken, Target
from experiments.fuzzing.in_process import LONGEST_LINE, bench, judged, nothing_starts, rss
from experiments.fuzzing.mutations import Mutation
from harness.analysis import frames, history, noise_floor
from harness.analysis.gate_plans import GatePlan, GatePlans
from harness.cli import options
from harness.common import machine
from harness.metrics import definitions
from harness.plan import variants
from harness.plan.design import Ref
from harness.serve.parsing import Refused
from harness.serve.prompting import Prompting
from harness.store.files import SCHEMA_VERSION, write_json_lines
from harness.store.manifest import read_manifest, write_manifest
from harness.studies import doctor, gate
from harness.workload import check, conversations, prompts, traces
from harness.workload.plan import plan
from harness.workload.workload import Workload

REFERENCE = ROOT / "results" / "reference"
FIXTURES = ROOT / "tests" / "fixtures"
# How a file is changed besides in its bytes, by its name's end.
BY_FORMAT: dict[str, Mutation] = {
    ".json": mutations.in_json,
    ".jsonl": mutations.in_json,
    ".gz": mutations.in_gzip,
    ".parquet": mutations.in_parquet,
    ".safetensors": mutations.in_safetensors,
    ".sqlite": mutations.in_sqlite,
    ".toml": mutations.in_lines,
    ".csv": mutations.in_csv,
    ".txt": mutations.in_lines,
}
IMPORTS = tuple(path.name for path in sorted((FIXTURES / "imports").glob("*.json*")))
CLAIMS = tuple(path.name for path in sorted((ROOT / "experiments" / "claims").glob("*.toml")))
OF_VARIANTS = (["variants"], ["variants", "pinned-h2d"], ["run", "--variant", "all"])
FLOOR = f"{noise_floor.FOLDER}/floor.json"
MACHINE = {  # what the kernel says of it, by where that is written down here
    "machine/cpu0/cpufreq/scaling_governor": "performance\n",
    "machine/intel_pstate/no_turbo": "1\n",
    "machine/cpufreq/boost": "0\n",
    "machine/huge_pages": "always [madvise] never\n",
}
GATE, HISTORY = ("gate", "--out", "out"), "FOLDER/history.jsonl"
PLANNED = ("--variant", "pinned-h2d", "--plan", "FOLDER/calibration.json")
FIRST_SHARD = "model-00001-of-00003.safetensors"
CONTEXT = 1024
CHROME = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "host"}},
    {"ph": "M", "name": "thread_name", "pid": 2, "tid": 7, "args": {"name": "stream 7"}},
    {"ph": "X", "name": "step", "cat": "phase", "ts": 0.0, "dur": 9.0, "pid": 1, "tid": 1},
    {
        "ph": "X",
        "name": "cudaLaunchKernel",
        "cat": "cuda_runtime",
        "ts": 1.0,
        "dur": 1.0,
        "pid": 1,
        "tid": 1,
        "args": {"correlation": 5, "External id": 3},
    },
    {
        "ph": "X",
        "name": "gemm",
        "cat": "kernel",
        "ts": 3.0,
        "dur": 4.0,
        "pid": 2,
        "tid": 7,
        "args": {"correlation": 5, "device": 0, "stream": 7},
    },
    {
        "ph": "X",
        "name": "Memcpy HtoD (Pageable -> Device)",
        "cat": "gpu_memcpy",
        "ts": 8.0,
        "dur": 1.0,
        "pid": 2,
        "tid": 7,
        "args": {"correlation": 6, "device": 0, "stream": 7, "bytes": 128},
    },
    {
        "ph": "X",
        "name": "cudaDeviceSynchronize",
        "cat": "cuda_runtime",
        "ts": 5.0,
        "dur": 4.0,
        "pid": 1,
        "tid": 1,
        "args": {"correlation": 7},
    },
    {"ph": "s", "name": "launch", "cat": "ac2g", "id": 5, "ts": 1.0, "pid": 1, "tid": 1},
    {"ph": "f", "bp": "e", "name": "launch", "cat": "ac2g", "id": 5, "ts": 3.0, "pid": 2, "tid": 7},
]
TALKS = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "How are you today, my friend, and why?"},
            {"from": "gpt", "value": "Quite well, as far as I can tell, thank you."},
        ],
    },
    {
        "conversations": [
            {"from": "user", "value": "Write a line about rivers and about mountains."},
            {"from": "assistant", "value": "Rivers run, mountains stay; one carries the other away."},
        ]
    },
] * 3
OF_TRACE = {"arrival": "trace", "max_new_tokens": None, "prompt": None, "trace_scale": 0.05}
ASKED: dict[str, dict[str, object]] = {
    "prompts.txt": {"prompts": "FOLDER/prompts.txt", "prompt": None},
    "sharegpt.json": {"prompts": "FOLDER/sharegpt.json", "prompt": None, "max_new_tokens": None},
    "mooncake.jsonl": {"trace": "FOLDER/mooncake.jsonl", **OF_TRACE},
    "burst.csv": {"trace": "FOLDER/burst.csv", **OF_TRACE},
}
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
# Small enough to be loaded in a moment, and of several tensors.
WEIGHED = {
    **MODEL,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TEMPLATE = "{% for each in messages %}<{{ each['role'] }}>{{ each['content'] }}{% endfor %}<assistant>"


@dataclass(frozen=True, slots=True)
class Reader:
    """Files by their place below a folder, one of which is changed, and what reads them: given the folder, or
    that of the file's own below it, it says in a word or two how that ended. `share`: how often it is tried,
    for its cost."""

    name: str
    files: Sequence[str]
    read: Callable[[Path], str]
    share: int = 4


@dataclass(frozen=True, slots=True)
class Damaged:
    reader: Reader
    file: str
    content: bytes

    def __str__(self) -> str:
        return f"{self.reader.name}: {self.file}: {self.content[:400]!r}"


def shown(*words: str) -> Callable[[Path], str]:
    """By a command; FOLDER in a word stands for the folder."""
    return lambda folder: judged(bench([word.replace("FOLDER", str(folder)) for word in words]))


def refused(read: Callable[[Path], object]) -> Callable[[Path], str]:
    """By a function whose errors a command would print in a line."""

    def told(folder: Path) -> str:
        try:
            read(folder)
        except (api.BadSetting, api.EngineError, Refused) as error:
            if len(str(error)) > LONGEST_LINE:
                raise Broken("long line", f"{len(str(error))} characters: {str(error)[:200]}") from None
            return "refused"
        return "read"

    return told


def planned(**options: object) -> Callable[[Path], object]:
    """The requests of a round from a file of them; FOLDER stands for the file's."""

    def read(folder: Path) -> object:
        for each in (conversations.read, traces.read, prompts.load_tokenizer):
            getattr(each, "cache_clear", lambda: None)()
        filled = {
            name: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
            for name, value in options.items()
        }
        workload = Workload(num_requests=4, **filled)  # type: ignore[arg-type]
        check.check(workload)
        return plan(workload, 1, str(TOKENIZER_FILE), CONTEXT)

    return read


def tokenized(folder: Path) -> object:
    """As a server's tokenizing process does it, without a template."""
    prompts.load_tokenizer.cache_clear()
    path = folder / "tokenizer.json"
    prompts.load_tokenizer(str(path))
    prompting = _prompting({"tokenizer": str(path), "name": "tiny-gpt2"})
    return [prompting.prompt("Hello there, world"), prompting.prompt([{"role": "user", "content": "hi"}])]


def _prompting(model: dict[str, str | int | float]) -> Prompting:
    """Whatever it breaks on, its process tells in a line (harness/serve/tokenizing_process.py)."""
    try:
        return Prompting({**model, "context": CONTEXT})
    except Exception as error:
        raise api.BadFile(f"{type(error).__name__}: {error}"[:LONGEST_LINE]) from error


def templated(folder: Path) -> object:
    prompting = _prompting({"tokenizer": str(folder / "tokenizer.json"), "name": str(folder)})
    return prompting.prompt([{"role": "user", "content": "hi"}])


def configured(folder: Path) -> object:
    """As far as it is read before its weights, which are not there."""
    return load_model(str(folder), torch.float32, torch.device("cpu"), 0)


def weighed(folder: Path) -> None:
    """As an engine does it, up to where its memory is laid out."""
    with torch.no_grad():
        model = open_model(str(folder), torch.float32, torch.device("cpu"), 0)
        check_model(str(folder), model, torch.float32, torch.device("cpu"), 32)


def paced(folder: Path) -> str:
    pace.profiles.cache_clear()
    try:
        with patch.object(pace, "PROFILES", folder / "profiles.toml"):
            return ", ".join(
                judged(bench(words))
                for words in (["devices"], ["run", "--variant", "all", "--pace", "llama3-8b-h100"])
            )
    finally:
        pace.profiles.cache_clear()


def examined(base: Path) -> str:
    """What `bench doctor` reads of the machine, and what `bench aa` left; what it measures takes four seconds
    and reads nothing."""
    with (
        patch.object(doctor, "CPU", base / "machine"),
        patch.object(doctor, "HUGE_PAGES", base / "machine" / "huge_pages"),
        patch.object(doctor, "keep_busy", lambda: doctor.Busy(0.0, [100.0] * 8)),
        patch.object(doctor, "other_processes", lambda: doctor.Finding("other processes", True, "")),
        patch.object(doctor, "wake_ups", lambda: doctor.Finding("wake-ups", True, "")),
        patch.object(options, "RESULTS", base),
    ):
        return judged(bench(["doctor"]))


def named_variants(*commands: Sequence[str]) -> Callable[[Path], str]:
    def told(folder: Path) -> str:
        with patch.object(variants, "files", lambda _: folder):
            return ", ".join(judged(bench(words)) for words in commands)

    return told


def readers() -> list[Reader]:
    run_files = [
        f"{name}/{file}"
        for name in ("pinned-h2d-turns", "deferred-output")
        for file in ("manifest.json", "summary.json", "values.parquet")
    ]
    blocks = [
        f"overlap/blocks/00{block}/{table}.parquet"
        for block in range(3)
        for table in ("requests", "steps", "rounds", "work")
    ]
    of_run = (("compare", "FOLDER"), ("gate", "FOLDER"), ("rerun", "FOLDER"), ("run", "--resume", "FOLDER"))
    of_blocks = (
        ("compare", "FOLDER"),
        ("explain", "FOLDER"),
        ("gate", "FOLDER"),
        ("report", "FOLDER", "-o", "report.md"),
    )
    of_many = {
        "factorial": "factorial-h2d-sync-output",
        "sweep": "sweep-concurrency",
        "experiment show": "gil",
        "experiment run --resume": "small-model-share",
    }
    model = ("model/config.json", "model/tokenizer_config.json")
    return [
        *(Reader(" ".join(words[:-1]), run_files, shown(*words), 12) for words in of_run),
        *(
            Reader(f"{words[0]} of blocks", ["overlap/manifest.json", *blocks], shown(*words), 1)
            for words in of_blocks
        ),
        Reader("gate --history", ["history.jsonl"], shown(*GATE, "FOLDER/gated", "--history", HISTORY), 2),
        Reader("gate --plan", ["calibration.json"], shown(*GATE, *PLANNED), 8),
        Reader("report", run_files, shown("report", "FOLDER", "-o", "report.html"), 1),
        *(
            Reader(
                command,
                [f"{name}/{each}" for each in _inside(REFERENCE / "experiments" / name)],
                shown(*command.split(), "FOLDER"),
                8,
            )
            for command, name in of_many.items()
        ),
        *(Reader("import", [name], shown("import", f"FOLDER/{name}", "--out", "out"), 4) for name in IMPORTS),
        *(
            Reader("trace", [name], shown("trace", f"FOLDER/{name}", "--all"), share)
            for name, share in (("host_2022.sqlite", 6), ("chrome.json", 12), ("chrome.json.gz", 6))
        ),
        *(
            Reader("experiment show", [name], shown("experiment", "show", f"FOLDER/{name}"), 4)
            for name in CLAIMS
        ),
        *(
            Reader(
                "experiment run",
                [name],
                shown("experiment", "run", f"FOLDER/{name}", "--trust", "--out", "out"),
                2,
            )
            for name in CLAIMS
        ),
        Reader("variants", ["variants.toml"], named_variants(*OF_VARIANTS), 6),
        Reader("claims", ["variants.toml"], named_variants(["variants", "--claims"]), 1),
        *(Reader("requests", [name], refused(planned(**options)), 24) for name, options in ASKED.items()),
        Reader("profiles", ["profiles.toml"], paced, 6),
        Reader("doctor", [FLOOR, *MACHINE], lambda folder: examined(folder.parent), 6),
        Reader("compare beside a floor", [FLOOR], shown("compare", "FOLDER/../pinned-h2d-turns"), 4),
        Reader("compare an evaluation", ["eval-copy-done/evaluation.json"], shown("compare", "FOLDER"), 1),
        *(
            Reader("weights", [f"{folder}/{each}" for each in names], refused(weighed), share)
            for folder, names, share in (
                ("weights", ("model.safetensors", "generation_config.json"), 8),
                ("sharded", ("model.safetensors.index.json", FIRST_SHARD), 8),
                ("pickled", ("pytorch_model.bin",), 4),
            )
        ),
        Reader("tokenizer", ["tokenizer.json"], refused(tokenized), 4),
        Reader("model", model[:1], refused(configured), 12),
        Reader("chat template", model[1:], refused(templated), 2),
    ]


def _inside(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.*"))]


def lay_out(base: Path) -> None:
    """A copy of everything that is changed, the runs and other folders below their names."""
    for name in ("pinned-h2d-turns", "deferred-output", "overlap"):
        shutil.copytree(REFERENCE / "runs" / name, base / name)
    for name in (
        "factorial-h2d-sync-output",
        "sweep-concurrency",
        "gil",
        "small-model-share",
        "eval-copy-done",
    ):
        shutil.copytree(REFERENCE / "experiments" / name, base / name)
    flat = [
        *(FIXTURES / "imports" / name for name in IMPORTS),
        FIXTURES / "nsys" / "host_2022.sqlite",
        *(ROOT / "experiments" / "claims" / name for name in CLAIMS),
        TOKENIZER_FILE,
    ]
    for path in flat:
        shutil.copy(path, base)
    (base / "variants.toml").write_bytes(resources("engines").joinpath("variants.toml").read_bytes())
    chrome = json.dumps({"traceEvents": CHROME}).encode()
    (base / "chrome.json").write_bytes(chrome)
    (base / "chrome.json.gz").write_bytes(gzip.compress(chrome))
    (base / "sharegpt.json").write_text(json.dumps(TALKS))
    (base / "prompts.txt").write_text("How are you?\n\nWrite about rivers.\nAnd mountains\n")
    requests = [
        {"timestamp": at * 10, "input_length": 600, "output_length": 5, "hash_ids": [0, at]}
        for at in range(6)
    ]
    (base / "mooncake.jsonl").write_text("\n".join(map(json.dumps, requests)))
    rows = [f"{at},ChatGPT,{at + 5},20,{at + 25},API" for at in range(6)]
    names = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (base / "burst.csv").write_text("\n".join([names, *rows]))
    model = base / "model"
    model.mkdir()
    shutil.copy(TOKENIZER_FILE, model)
    (model / "config.json").write_text(json.dumps(MODEL))
    _lay_out_weights(base)
    _lay_out_machine(base)
    _lay_out_gates(base)
    (base / "profiles.toml").write_bytes(resources("engines").joinpath("profiles.toml").read_bytes())
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": 1024}
    (model / "tokenizer_config.json").write_text(json.dumps(told))


def _lay_out_weights(base: Path) -> None:
    """One model, published in three ways."""
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # it tells of each weight that does not fit
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WEIGHED))
    model.save_pretrained(base / "weights")
    model.save_pretrained(
        base / "sharded", max_shard_size=sum(each.nbytes for each in model.parameters()) // 2
    )
    model.config.save_pretrained(base / "pickled")
    torch.save(model.state_dict(), base / "pickled" / "pytorch_model.bin")
    assert (base / "sharded" / FIRST_SHARD).exists()


def _lay_out_machine(base: Path) -> None:
    """What `bench doctor` reads; the noise floor is of this machine, and made of a run of another."""
    for name, content in MACHINE.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(content)
    stored = frames.load(base / "pinned-h2d-turns")
    floor = noise_floor.floor_of(stored.manifest, stored.result.comparisons[0], seconds=15.0)
    here = msgspec.structs.replace(floor.of, machine=machine.fingerprint())
    (base / FLOOR).parent.mkdir()
    (base / FLOOR).write_bytes(msgspec.json.encode(msgspec.structs.replace(floor, of=here)))


def _lay_out_gates(base: Path) -> None:
    """A gate of two refs, those before it, and what a calibration recommends."""
    gated = base / "gated"
    shutil.copytree(base / "overlap", gated)
    manifest = read_manifest(gated)
    refs = [Ref(repository="/repository", name=each, commit=each[0] * 40) for each in ("base", "head")]
    arms = [
        msgspec.structs.replace(arm, ref=ref) for arm, ref in zip(manifest.design.arms, refs, strict=True)
    ]
    design = msgspec.structs.replace(manifest.design, arms=arms)
    write_manifest(gated, msgspec.structs.replace(manifest, design=design))
    last = history.remembered(gate.judge(gated, (), None), read_manifest(gated))
    gates = [
        msgspec.structs.replace(
            last,
            run=f"night-{night}",
            head=f"{night:040x}",
            changes=dict.fromkeys(last.changes, 0.001 * (night % 5) + 0.01 * (night > 20)),
        )
        for night in range(30)
    ]
    write_json_lines(base / "history.jsonl", gates)
    plans = [
        GatePlan(metric=definitions.SLICED, limit=limit, blocks=blocks, minutes=0.2 * blocks)
        for limit, blocks in ((0.01, 24), (0.02, 8))
    ]
    calibration = GatePlans(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        device="emulated",
        blocks=6,
        seconds_per_block=12.0,
        max_minutes=3.0,
        sd={definitions.SLICED: 0.01},
        plans=plans,
        recommended=plans[1],
    )
    (base / "calibration.json").write_bytes(msgspec.json.encode(calibration))


def damaged(known: Sequence[Reader], base: Path, random: Random) -> Damaged:
    reader = random.choices(known, [each.share for each in known])[0]
    file = random.choice(reader.files)
    content = _valid(base / file)
    by_format = BY_FORMAT.get(Path(file).suffix, mutations.in_bytes)
    change = by_format if random.random() < 0.75 else mutations.in_bytes
    return Damaged(reader, file, change(content, random))


@cache
def _valid(path: Path) -> bytes:
    return path.read_bytes()


def attempt(base: Path, case: Damaged) -> str:
    """With the one file in place of the valid one, which comes back."""
    path = base / case.file
    inside, slash, _ = case.file.partition("/")
    path.write_bytes(case.content)
    try:
        return f"{case.reader.name}: {case.reader.read(base / inside if slash else base)}"
    finally:
        path.write_bytes(_valid(path))


@contextmanager
def opened() -> Iterator[Target[Damaged]]:
    with TemporaryDirectory() as outside:
        base, beside = Path(outside, "files"), Path(outside, "beside")
        base.mkdir()
        beside.mkdir()
        lay_out(base)
        known = readers()
        for name in {file for reader in known for file in reader.files}:
            _valid(base / name)
        alone = {"XDG_STATE_HOME": outside, "HF_HUB_OFFLINE": "1"}
        with patch.dict(os.environ, alone), chdir(beside), nothing_starts():
            yield Target(
                make=partial(damaged, known, base),
                attempt=partial(attempt, base),
                settle=partial(_emptied, beside),
                rss=rss,
            )
        _valid.cache_clear()


def _emptied(folder: Path) -> None:
    """What commands wrote: it would fill the disk."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
