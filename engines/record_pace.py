"""Record what a card and its host take, as a profile for `--pace`: about a minute on the card.

    bench pace record --out my-card.toml    # or this file alone, wherever torch is: python record_pace.py
    bench run --variant overlap --pace my-card.toml

A decode step by batch and context and a prefill by tokens, of a plain transformer in the model's shapes,
with random weights, in CUDA graphs; where vLLM is installed, its own time per token with async scheduling
on and off, and the decode step is then vLLM's. The ledger: what a driver takes for a launch, a replay, a
copy, pinned memory and a wake-up, without Python. `probe`: what Python takes on this host, for k (pace.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 2048)
TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192)
TRIES = 20  # of a step; the median counts
CALLS = 200  # of a driver's call
PROBES, APART_S = 5, 0.2  # of this host's speed
VLLM_CONTEXT = 304  # 256 tokens of prompt, and half of what follows
SLEEP_CYCLES = 2_000_000  # about a millisecond of a card


class _Request:
    def __init__(self, name: str, prompt: int) -> None:
        self.name = name
        self.tokens = list(range(prompt))
        self.blocks: list[int] = []
        self.computed = 0
        self.finished = False


def _schedule(steps: int) -> int:
    """What a scheduler does with its requests, in small: attributes, dicts, lists, small objects."""
    free = list(range(2048))
    running = [_Request(f"r{index}", 24 + index % 16) for index in range(32)]
    by_name = {each.name: each for each in running}
    sent = 0
    for step in range(steps):
        scheduled: dict[str, int] = {}
        for request in running:
            new = len(request.tokens) - request.computed
            while len(request.blocks) * 16 < len(request.tokens):
                request.blocks.append(free.pop())
            scheduled[request.name] = new
        outputs = [(name, (hash(count) + step) % 4096) for name, count in scheduled.items()]
        for name, token in outputs:
            request = by_name[name]
            request.computed += scheduled[name]
            request.tokens.append(token)
            if len(request.tokens) > 120:
                request.finished = True
                free.extend(reversed(request.blocks))
                request.blocks = []
            sent += len({"id": name, "token": token, "finished": request.finished})
        running = [each for each in running if not each.finished] or running
    return sent


def probe() -> float:
    """Nanoseconds that a fixed piece of Python takes here, which is like a scheduler's: the least of 200."""
    taken = []
    for _ in range(200):
        begin = perf_counter_ns()
        _schedule(40)
        taken.append(perf_counter_ns() - begin)
    return float(min(taken))


def probes() -> float:
    """The least of several, each of about 0.1 s: while a neighbour computes on the same physical core, one
    takes half as long again."""
    found = [probe()]
    for _ in range(PROBES - 1):
        sleep(APART_S)
        found.append(probe())
    return min(found)


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, as its Hugging Face configuration has them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    gated: bool = True


MODELS = {
    "llama3-8b": Shape(4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936),
    "gpt2": Shape(768, 12, 12, 12, 64, 3072, 50257, gated=False),
}


class Refused(Exception):
    """What was asked can't be done here; its text is the one line that says so."""


def shape_of(model: str) -> Shape:
    """The sizes of one of MODELS, or of a configuration: a config.json, or its folder."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        found = json.loads(path.read_text("utf-8"))
        found = {**found, **found.get("text_config", {})}
        hidden = found.get("hidden_size") or found["n_embd"]
        heads = found.get("num_attention_heads") or found["n_head"]
        return Shape(
            hidden=hidden,
            layers=found.get("num_hidden_layers") or found["n_layer"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head=found.get("head_dim") or hidden // heads,
            inner=found.get("intermediate_size") or found.get("n_inner") or 4 * hidden,
            vocabulary=found["vocab_size"],
            gated="intermediate_size" in found,
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        known = ", ".join(MODELS)
        raise Refused(f"no model '{model}': one of {known}, or a config.json ({error})") from error
    except KeyError as error:
        raise Refused(f"{path} names no {error}: a decoder's configuration does") from error


class Model:
    """The weights of a shape, and its forward. Layers share key-value memory where it would not fit."""

    def __init__(self, torch: Any, shape: Shape) -> None:
        self.torch, self.shape, self.dtype = torch, shape, torch.bfloat16
        torch.manual_seed(0)
        query, kv = shape.heads * shape.head, shape.kv_heads * shape.head
        self.layers = [
            {
                "norm": self._make(shape.hidden),
                "qkv": self._make(query + 2 * kv, shape.hidden),
                "out": self._make(shape.hidden, query),
                "up": self._make((1 + shape.gated) * shape.inner, shape.hidden),
                "down": self._make(shape.hidden, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        self.embedding = self._make(shape.vocabulary, shape.hidden)
        self.norm = self._make(shape.hidden)
        self.split = (query, kv, kv)

    def _make(self, *size: int) -> Any:
        return self.torch.empty(*size, device="cuda", dtype=self.dtype).normal_(std=0.02)

    def memory(self, batch: int, context: int) -> list[Any]:
        """Keys and values of `context` tokens: one buffer per layer, as far as half of what is free goes."""
        shape = self.shape
        one = 2 * batch * shape.kv_heads * context * shape.head * self.dtype.itemsize
        several = int(self.torch.cuda.mem_get_info()[0] * 0.5 / one)
        if several < 1:
            raise MemoryError
        size = (2, batch, shape.kv_heads, context, shape.head)
        return [self._make(*size) for _ in range(min(several, shape.layers))]

    def forward(self, ids: Any, memory: Sequence[Any]) -> Any:
        """The next id of each row; `memory`: of the tokens before, none for a prefill."""
        functional, shape = self.torch.nn.functional, self.shape
        rows, tokens = ids.shape
        state = functional.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = functional.rms_norm(state, (shape.hidden,), layer["norm"])
            parts = functional.linear(normed, layer["qkv"]).split(self.split, -1)
            query, key, value = (each.view(rows, tokens, -1, shape.head).transpose(1, 2) for each in parts)
            if memory:
                kept = memory[index % len(memory)]
                kept[0][:, :, -1:].copy_(key)
                kept[1][:, :, -1:].copy_(value)
                key, value = kept
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=not memory, enable_gqa=True
            )
            attended = attended.transpose(1, 2).reshape(rows, tokens, -1)
            state = state + functional.linear(attended, layer["out"])
            up = functional.linear(functional.rms_norm(state, (shape.hidden,), layer["norm"]), layer["up"])
            if shape.gated:
                gate, up = up.chunk(2, -1)
                up = functional.silu(gate) * up
            else:
                up = functional.gelu(up)
            state = state + functional.linear(up, layer["down"])
        last = functional.rms_norm(state[:, -1], (shape.hidden,), self.norm)
        return functional.linear(last, self.embedding).argmax(-1)


def captured(torch: Any, run: Callable[[], Any]) -> Any:
    """A CUDA graph of `run`, warmed up."""
    with torch.inference_mode():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In this order: the state of torch's generator, made by the capture, is no tensor of inference mode.
    with torch.cuda.graph(graph), torch.inference_mode():
        run()
    torch.cuda.synchronize()
    return graph


def device_ms(torch: Any, graph: Any) -> float:
    """How long the device takes for a replay, one behind another: the median of TRIES."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TRIES + 3)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return median([begin.elapsed_time(end) for begin, end in pairwise(marks[2:])])


def forward_ms(model: Model, context: int, rows: int, tokens: int) -> float:
    """A forward of that many new tokens a row behind `context` others, as one graph."""
    torch, memory = model.torch, model.memory(rows, context) if context else ()
    ids = torch.zeros(rows, tokens, device="cuda", dtype=torch.int64)
    return device_ms(torch, captured(torch, lambda: model.forward(ids, memory)))


def as_far_as_fits(
    torch: Any, what: str, measure: Callable[[int], float], sizes: Sequence[int]
) -> dict[int, float]:
    """Milliseconds by size, up to the first that the card's memory has no room for."""
    found: dict[int, float] = {}
    for size in sizes:
        try:
            found[size] = measure(size)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            say(f"  {what} {size}: does not fit")
            break
        finally:
            torch.cuda.empty_cache()
        say(f"  {what} {size}: {found[size]:.3f} ms")
    return found


def ledger(torch: Any, model: Model, context: int) -> dict[str, float]:
    """Nanoseconds of a driver's calls. Launch, copy and pin are timed beside the same call on the CPU, which
    has the Python and the dispatch and no driver."""

    def call_ns(call: Callable[[], Any], settles: bool = True, calls: int = CALLS, every: int = 20) -> float:
        taken = []
        for index in range(calls):
            if settles and index % every == 0:
                torch.cuda.synchronize()  # else a full queue would be measured
            begin = perf_counter_ns()
            call()
            taken.append(perf_counter_ns() - begin)
        return median(taken)

    there, here = torch.zeros(1, device="cuda"), torch.zeros(1)
    pinned, far = torch.zeros(1024, pin_memory=True), torch.zeros(1024, device="cuda")
    near, plain = torch.zeros(1024), torch.zeros(1024)
    ids, memory = torch.zeros(1, 1, device="cuda", dtype=torch.int64), model.memory(1, context)
    graph = captured(torch, lambda: model.forward(ids, memory))
    costs = {
        "launch": call_ns(lambda: there.add_(1)) - call_ns(lambda: here.add_(1), settles=False),
        "replay": call_ns(graph.replay, calls=TRIES, every=1),
        "copy": call_ns(lambda: far.copy_(pinned, non_blocking=True))
        - call_ns(lambda: near.copy_(plain, non_blocking=True), settles=False),
        "pin": call_ns(lambda: plain.pin_memory()) - call_ns(plain.clone, settles=False),
        "wake": median([wake_ns(torch) for _ in range(TRIES)]),
    }
    return {name: max(0.0, ns) for name, ns in costs.items()}


def wake_ns(torch: Any) -> float:
    """How much later a thread that sleeps on an event runs on than one that spins on it."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
    begun.record()
    begun.synchronize()
    seen = perf_counter_ns()
    torch.cuda._sleep(SLEEP_CYCLES)
    ended.record()
    ended.synchronize()
    return perf_counter_ns() - seen - float(begun.elapsed_time(ended)) * 1e6


def vllm_ms(config: Path, asynchronous: bool, batches: Sequence[int]) -> dict[int, float]:
    """Milliseconds per token of vLLM on random weights, by batch; the prefill cancels between two lengths."""
    from vllm import LLM, SamplingParams

    short, long = 16, 2 * (VLLM_CONTEXT - 256) - 16
    engine = LLM(
        model=str(config), load_format="dummy", skip_tokenizer_init=True, async_scheduling=asynchronous,
        gpu_memory_utilization=0.8, enable_prefix_caching=False, max_model_len=1024,
        max_num_seqs=max(batches),
    )  # fmt: skip
    found = {}
    for batch in batches:
        prompts = [{"prompt_token_ids": [1 + index % 7] * 256} for index in range(batch)]
        taken = []
        for length in (short, short, long, short, long):
            asked = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length, detokenize=False)
            begin = perf_counter()
            engine.generate(prompts, asked, use_tqdm=False)
            taken.append(perf_counter() - begin)
        found[batch] = (taken[2] + taken[4] - taken[1] - taken[3]) / 2 / (long - short) * 1e3
    return found


def of_vllm(shape: Shape, batches: Sequence[int]) -> dict[str, dict[int, float]]:
    """Its time per token with async scheduling off and on, each in its own process; failures are told."""
    if not shape.gated or find_spec("vllm") is None:
        return {}
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head, "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary, "max_position_embeddings": 4096,
    }  # fmt: skip
    found = {}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        for word in ("off", "on"):
            say(f"  vLLM with async scheduling {word}")
            asked = ",".join(map(str, batches))
            command = [sys.executable, __file__, "--vllm", word, "--model", folder, "--batches", asked]
            ended = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in ended.stdout.splitlines() if line.startswith('{"batches"')]
            if ended.returncode or not lines:
                causes = re.findall(r"\w*(?:Error|Exception): .*", ended.stdout + ended.stderr)
                say(f"  vLLM was not measured: {(causes or ['it ended without a word'])[0][:300]}")
                return {}
            found[word] = {int(batch): ms for batch, ms in json.loads(lines[-1])["batches"].items()}
    return found


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def fitted(found: Mapping[tuple[int, int], float]) -> tuple[dict[int, float], float, float]:
    """A step as a table over the batch (ms), plus so many ns for each token of context in each row: the pace
    that has the least squared error in the change with the context. And its largest relative error."""
    pairs = [
        (batch * (context - other), ms - found[batch, other])
        for (batch, context), ms in found.items()
        for other in {each for _, each in found}
        if other < context and (batch, other) in found
    ]
    squares = sum(tokens * tokens for tokens, _ in pairs)
    slope = max(0.0, sum(tokens * change for tokens, change in pairs) / squares) if squares else 0.0
    table = {}
    for batch in sorted({batch for batch, _ in found}):
        rests = [ms - slope * batch * context for (each, context), ms in found.items() if each == batch]
        table[batch] = max(1e-4, sum(rests) / len(rests))
    errors = [abs(table[batch] + slope * batch * context - ms) / ms for (batch, context), ms in found.items()]
    return table, slope * 1e6, max(errors)


def pace_text(table: Mapping[int, float], factor: str) -> str:
    return f"{factor}[{' '.join(f'{at}:{ms * 1e3:.2f}us' for at, ms in sorted(table.items()))}]"


def toml(name: str, profile: Mapping[str, Any]) -> str:
    """A table of texts and numbers, and tables below it."""
    below = {key: value for key, value in profile.items() if isinstance(value, Mapping)}
    plain = [f"{key} = {json.dumps(profile[key], ensure_ascii=False)}" for key in profile if key not in below]
    tables = [toml(f"{name}.{key}", each) for key, each in below.items()]
    return "\n\n".join(["\n".join([f"[{name}]", *plain]), *tables])


def record(
    torch: Any, model: str, batches: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]
) -> str:
    """The profile of this card and host, as text."""
    shape, card, host_ns = shape_of(model), torch.cuda.get_device_name(), probes()
    say(f"{card}, {model} in bfloat16; on the host, Python takes {host_ns / 1e3:.0f} us for the probe")
    stepped, prefilled, costs = measured(torch, shape, batches, contexts, tokens)
    torch.cuda.empty_cache()
    say("  a driver's calls: " + ", ".join(f"{name} {ns / 1e3:.1f} us" for name, ns in costs.items()))
    table, slope, error = fitted(stepped)
    vllm = of_vllm(shape, tuple(table))
    of_what = "a plain transformer in CUDA graphs"
    if vllm:  # where its host is too slow for the card, it can't tell the card's time
        of_what += ", or vLLM's time per token with async scheduling on where that is less"
        table = {
            batch: max(1e-4, min(ms, vllm["on"][batch] - slope * batch * VLLM_CONTEXT / 1e6))
            for batch, ms in table.items()
        }
    told = {word: {str(at): round(ms, 4) for at, ms in found.items()} for word, found in vllm.items()}
    today, python = date.today().isoformat(), platform.python_version()
    called = Path(model).resolve().parent.name if model.endswith(".json") else Path(model).name
    profile = {
        "summary": f"{called} in bfloat16 on {card}",
        "decode": pace_text(table, "batch") + (f"+{slope:.4f}ns*batch*context" if slope else ""),
        "prefill": pace_text(prefilled, "tokens"),
        "source": f"recorded on {today}: {of_what}",
        "host_ns": round(host_ns),
        "host": f"{cpu()}, Python {python}, measured",
        "ledger": {name: f"{ns:.0f}ns" for name, ns in costs.items()} | {"source": "measured, by torch.cuda"},
        "facts": {
            "card": card,
            "driver": driver(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "python": python,
            "date": today,
            "shape": asdict(shape),
            "fit_error": round(error, 4),  # of a decode step at most, relative
            "vllm_ms": {f"async_{word}": found for word, found in told.items()},
        },
    }
    return toml(re.sub(r"[^A-Za-z0-9_-]+", "-", f"{called}-{card}").strip("-").lower(), profile) + "\n"


def measured(
    torch: Any, shape: Shape, batches: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]
) -> tuple[dict[tuple[int, int], float], dict[int, float], dict[str, float]]:
    """Milliseconds of a decode step by batch and context and of a prefill by tokens, and the ledger (ns)."""
    try:
        model = Model(torch, shape)
    except torch.cuda.OutOfMemoryError as error:
        raise Refused("the card's memory does not hold the model: try --model qwen2.5-0.5b") from error
    stepped = {}
    for context in contexts:
        measure = partial(forward_ms, model, context, tokens=1)
        found = as_far_as_fits(torch, f"decode at context {context}, batch", measure, batches)
        stepped.update({(batch, context): ms for batch, ms in found.items()})
    prefilled = as_far_as_fits(torch, "prefill, tokens", partial(forward_ms, model, 0, 1), tokens)
    if not stepped or not prefilled:
        raise Refused("the card's memory holds the model and no request: try --model qwen2.5-0.5b")
    return stepped, prefilled, ledger(torch, model, contexts[0])


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        return said.partition("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu() -> str:
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", known.read_text("utf-8", "replace")) if known.exists() else None
    return found[1].strip() if found else platform.machine()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(each) for each in text.split(",")}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="the profile's file (NAME.toml, by model and card)")
    models = f"{', '.join(MODELS)}, or a config.json (llama3-8b)"
    parser.add_argument("--model", default="llama3-8b", help=models)
    for name, sizes in (("--batches", BATCHES), ("--contexts", CONTEXTS), ("--tokens", TOKENS)):
        parser.add_argument(name, type=numbers, default=sizes, help=argparse.SUPPRESS)
    parser.add_argument("--vllm", choices=("off", "on"), help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.probe:
        print(probes())
        return 0
    if asked.out is not None and asked.out.suffix != ".toml":
        parser.error(f"--out {asked.out}: a pace is read from a file NAME.toml")
    if asked.out is not None and not asked.out.parent.is_dir():
        parser.error(f"--out {asked.out}: there is no folder {asked.out.parent}")
    if asked.vllm:
        print(
            json.dumps({"batches": vllm_ms(Path(asked.model), asked.vllm == "on", asked.batches)}), flush=True
        )
        return 0
    try:
        shape_of(asked.model)
        try:
            import torch
        except ModuleNotFoundError as error:
            raise Refused(f"{sys.executable} has no torch: run it where torch finds the card") from error
        if not torch.cuda.is_available():
            found = f"torch {torch.__version__} finds no CUDA card here"
            raise Refused(f"{found}: run it on the machine that has one")
        text = record(torch, asked.model, asked.batches, asked.contexts, asked.tokens)
        out = asked.out or Path(f"{text[1:].partition(']')[0]}.toml")
        out.write_text(text, "utf-8")
    except (Refused, OSError) as error:
        say(f"record_pace: {error}")
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    # Run by its path, this file's folder comes first, and some of its neighbours are called vllm and openai.
    here = Path(__file__).resolve().parent
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != here]
    sys.exit(main())
