"""What both ways of running vLLM share: its arguments, its requests, and its outputs as events."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import psutil
import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from overlap_bench.engines import api
from overlap_bench.engines.machine import cpu_model, known
from overlap_bench.engines.pace import make_pace
from overlap_bench.engines.presets import PRESETS, SHAPES, Preset, tokenizer_file
from overlap_bench.engines.presets.checkpoints import save, save_without_weights
from overlap_bench.engines.processes import with_below
from overlap_bench.engines.requests import reason_of
from overlap_bench.engines.tracing import listening
from overlap_bench.engines.vllm import SPEC, fits, paced
from overlap_bench.engines.vllm import toggles as changes
from overlap_bench.engines.vllm.gate import printed_error
from overlap_bench.engines.vllm.toggles import flat_logprobs

USED = (
    "model", "device", "dtype", "seed", "max_batch_size", "prefill_max_tokens", "stream_interval",
    "num_blocks", "sampling", "prefix_cache", "max_context", "recorder", "pace",
    "plant_at", "plant_ns",
)  # fmt: skip
USED_PACED = (*USED, "block_size")  # without a pace vLLM chooses it by its device
CARD_SHARE = 0.45  # of a GPU's memory: the two arms of a block stand side by side on one card
GIB = 1 << 30
# What pydantic says around the one sentence that vLLM raised in it.
PYDANTICS_OWN = re.compile(r"^\d+ validation errors? for \w+ Value error, | \[type=value_error, .*$")
PACE_HAS_IT = "; with --pace a clock stands in for a card, and it stays on (engines/vllm/README.md)"


class VllmEngine(api.Engine):
    """A vLLM engine, and everything about it but the process its core is in."""

    recorded: ClassVar[str]  # how the names of its classes in scheduler.py begin

    def __init__(self, options: api.EngineOptions, toggles: dict[str, str]) -> None:
        self.options = options
        self.toggles = toggles
        self._at_end = ExitStack()  # what is to be cleaned up
        self._asked = False  # whether what was switched where outputs are processed is in force

    def open(self, config: Any) -> None:
        """Start vLLM with this config."""
        raise NotImplementedError

    def preflight(self) -> str:
        """Everything that vLLM decides from the model's configuration; nothing is loaded."""
        fits.check()
        try:
            self._configure(save_without_weights, arms=2)
            if self.options.pace:
                # Which looks whether it fits.
                name = "runner_v1" if self.toggles.get("runner") == "v1" else "worker"
                import_module(f"overlap_bench.engines.vllm.paced.{name}")
        finally:
            self.stop()
        return str(current_platform.device_type)

    def start(self, events: api.EventSink) -> api.Description:
        self.events = events
        config = self._configure(partial(save, seed=self.options.seed))
        try:
            self.open(config)
        except ValueError as error:  # pydantic's too: what its options don't allow together
            raise api.BadSetting(f"vLLM {vllm.__version__}: {_one_line(error)}") from error
        except RuntimeError as error:  # its core has failed, and has printed why
            raise api.EngineError(f"vLLM did not start: {printed_error() or _one_line(error)}") from error
        # How it boots is worth reading, its steps are not.
        logging.getLogger("vllm").setLevel(logging.WARNING)
        self._check_in_force(config)
        return self._describe(config)

    def stop(self) -> None:
        self._at_end.close()

    def check_profile(self) -> None:
        """Raises BadSetting where a round can't be profiled."""
        if not self.options.recorder:
            raise api.BadSetting("a profile is made of step records, and recorder=off keeps none")
        if listening() and find_spec("nvtx") is None:
            raise api.BadSetting(
                f"{sys.executable} has no nvtx, and Nsight Systems would wait for a range that never begins: "
                f"{sys.executable} -m pip install nvtx"
            )

    # -- what is asked of vLLM -----------------------------------------------------------------------------

    def arguments(self) -> AsyncEngineArgs:
        options, toggles = self.options, self.toggles
        return AsyncEngineArgs(
            model=str(self._folder),
            dtype=options.dtype,
            seed=options.seed,
            max_model_len=options.max_context,
            max_num_seqs=options.max_batch_size,
            max_num_batched_tokens=max(options.prefill_max_tokens, options.max_batch_size),
            num_gpu_blocks_override=options.num_blocks,
            **({} if on_cpu() else {"gpu_memory_utilization": CARD_SHARE}),
            **({"attention_backend": "FLASH_ATTN", "block_size": options.block_size} if options.pace else {}),
            enable_prefix_caching=options.prefix_cache,
            stream_interval=options.stream_interval,
            async_scheduling=toggles["async_scheduling"] == "on",
            enforce_eager=toggles["enforce_eager"] == "on",
            enable_chunked_prefill=toggles["chunked_prefill"] == "on",
            disable_log_stats=not options.recorder,
            scheduler_cls=self.scheduler,
            **changes.arguments(self.toggles),
        )

    def active(self, request: api.Request, accepted_ns: int) -> Active:
        """A request that was just taken in."""
        return Active(request, accepted_ns, self._check_output)

    def _check_output(self, completion: Any) -> None:
        """Raises EngineError where a request's first output shows that what was switched is not in force."""
        flat_logprobs.check_in_force(self.toggles, completion.logprobs)
        if not self._asked:
            changes.check_in_force(self.toggles)
            self._asked = True

    def prompt(self, request: api.Request) -> Any:
        """As vLLM takes it."""
        if isinstance(request.prompt, str):
            return request.prompt
        return {"prompt_token_ids": request.prompt}

    def sampling(self, request: api.Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed if request.temperature else None,
            max_tokens=request.max_new_tokens,
            ignore_eos=not request.stop_on_eos,
            stop=request.stop,
            output_kind=RequestOutputKind.DELTA,
            **changes.sampling(self.toggles),
        )

    @property
    def scheduler(self) -> str | None:
        """The class that vLLM is to schedule with, by name; None: its own."""
        if not self.options.recorder:
            return None
        kind = "AsyncScheduler" if self.toggles["async_scheduling"] == "on" else "Scheduler"
        return f"overlap_bench.engines.vllm.scheduler.{self.recorded}{kind}"

    def _configure(self, write: Callable[[Preset, Path], None], arms: int = 1) -> Any:
        """vLLM's config of this arm. Raises BadSetting for what can't work. `write`: how a preset becomes the
        folder that vLLM loads models from. `arms`: how many have to fit into what memory is free."""
        self.options.refuse_unused(SPEC.name, USED_PACED if self.options.pace else USED)
        _check_device(self.options.device)
        changes.check(self.toggles, prefix_cache=self.options.prefix_cache, recorder=self.options.recorder)
        self._tokenizer = tokenizer_file(self.options.model)  # which refuses a typo
        self._folder = Path(self.options.model).expanduser()
        known = {**PRESETS, **SHAPES}
        if self.options.model in known:
            self._folder = Path(self._at_end.enter_context(TemporaryDirectory(prefix="preset-")))
            if self.options.pace:
                write = save_without_weights
            write(known[self.options.model], self._folder)
        try:
            config = self.arguments().create_engine_config(UsageContext.ENGINE_CONTEXT)
        except ValueError as error:
            raise api.BadSetting(f"vLLM {vllm.__version__}: {_one_line(error)}") from error
        self._check_in_force(config)
        if on_cpu() and not self.options.pace:
            self._check_heads(config.model_config.get_head_size())
            self._limit_cache(config, arms)
        return config

    def _check_in_force(self, config: Any) -> None:
        """vLLM flips some switches by itself, with a line in its log: the record would be a lie."""
        scheduling = config.scheduler_config
        found = {
            "async_scheduling": scheduling.async_scheduling,
            "enforce_eager": config.model_config.enforce_eager,
            "chunked_prefill": scheduling.enable_chunked_prefill,
        }
        for name, is_on in found.items():
            if bool(is_on) != (self.toggles[name] == "on"):
                raise api.BadSetting(
                    f"{name}={self.toggles[name]}: vLLM {vllm.__version__} switches it "
                    f"{'on' if is_on else 'off'} for {self.options.model} on {current_platform.device_type}, "
                    f"whatever is asked{PACE_HAS_IT if name == 'async_scheduling' and on_cpu() else ''}"
                )
        if bool(config.cache_config.enable_prefix_caching) != self.options.prefix_cache:
            raise api.BadSetting(f"vLLM {vllm.__version__} does not run with this prefix_cache here")

    def _check_heads(self, size: int) -> None:
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise api.BadSetting(
                f"{self.options.model} has attention heads of size {size}; on the CPU, vLLM "
                f"{vllm.__version__} has kernels for {', '.join(map(str, known))}: --model "
                f"{SPEC.defaults['model']}, or one of your own"
            )

    def _limit_cache(self, config: Any, arms: int) -> None:
        """On a CPU vLLM's share would be of all of the machine's memory, in each arm. What it gets in its
        place is what every request in full length needs, or the blocks that were asked for."""
        cache, model = config.cache_config, config.model_config
        if cache.kv_cache_memory_bytes is not None:  # VLLM_CPU_KVCACHE_SPACE
            return
        options = self.options
        per_request = -(-options.max_context // cache.block_size)
        blocks = options.num_blocks or options.max_batch_size * per_request + 1  # vLLM keeps one
        values = model.get_num_layers(config.parallel_config) * model.get_head_size()
        values *= 2 * model.get_num_kv_heads(config.parallel_config)
        size = blocks * cache.block_size * values * torch.empty((), dtype=model.dtype).element_size()
        memory = known(psutil.virtual_memory, None)
        free = arms * size if memory is None else memory.available
        if arms * size > free:
            raise api.BadSetting(
                f"a KV cache of {blocks} blocks of {cache.block_size} tokens takes {size / GIB:.1f} GiB in "
                f"each arm, and {free / GIB:.1f} GiB are free: limit it by num_blocks=N, --max-batch-size or "
                "max_context"
            )
        cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes = blocks, size

    def _describe(self, config: Any) -> api.Description:
        cpu = on_cpu()
        return api.Description(
            engine=SPEC.name,
            versions={
                "python": platform.python_version(),
                "vllm": vllm.__version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
            },
            device={
                "kind": f"paced: {make_pace(self.options.pace).name}"
                if self.options.pace
                else current_platform.device_type,
                "name": cpu_model() if cpu else current_platform.get_device_name(),
                **({"replaced": paced.REPLACED} if self.options.pace else {}),
            },
            model={
                "name": self.options.model,
                "dtype": self.options.dtype,
                "vocabulary": config.model_config.get_vocab_size(),
                "context": config.model_config.max_model_len,
                "kv_blocks": config.cache_config.num_gpu_blocks or 0,
                "block_size": config.cache_config.block_size,
                "tokenizer": str(self._tokenizer),
            },
            toggles=self.toggles,
            # vLLM promises tokens independent of the batch under this switch only. A clock's follow from the
            # prompt (paced/tokens.py), whatever else a step holds.
            deterministic=bool(self.options.pace)
            or (self.options.dtype == "float32" and (cpu or os.environ.get("VLLM_BATCH_INVARIANT") == "1")),
            pids=_pids(),
        )


@dataclass(slots=True, eq=False)
class Active:
    """A request that was taken in, and how far it is. Equal only to itself."""

    request: api.Request
    accepted_ns: int
    check: Callable[[Any], None]  # of its first output that has tokens
    count: int = 0  # tokens
    prompt_tokens: int = -1
    queued_ns: int = -1
    admitted_ns: int = -1

    def events(self, output: RequestOutput) -> list[api.Event]:
        """One more output of vLLM as events. With its statistics on (option recorder), it tells when the
        request was queued, when scheduled and when the first token was there, but nothing of the others."""
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        if tokens and not self.count:
            self.check(completion)
        self.prompt_tokens = len(output.prompt_token_ids or ())
        stamps = []
        if output.metrics is not None:
            self.queued_ns = _ns(output.metrics.queued_ts)
            self.admitted_ns = _ns(output.metrics.scheduled_ts)
            if not self.count and len(tokens) == 1:
                stamps = [_ns(output.metrics.first_token_ts)]
        self.count += len(tokens)
        said: list[api.Event] = []
        if tokens or completion.text:
            said.append(api.Chunk(self.request.id, tokens, completion.text, stamps))
        if output.finished:
            said.append(self.finish(reason_of(completion.finish_reason, completion.stop_reason)))
        return said

    def finish(self, reason: str) -> api.Finish:
        """Ids need no tokenizing; vLLM does not tell when it was done with a text."""
        tokenized = -1 if isinstance(self.request.prompt, str) else self.accepted_ns
        return api.Finish(
            self.request.id,
            reason,
            self.prompt_tokens,
            self.count,
            self.accepted_ns,
            tokenized,
            self.admitted_ns,
            queued_ns=self.queued_ns,
        )


def _ns(seconds: float) -> int:
    """vLLM's core stamps by time.monotonic(), on Linux the clock of perf_counter_ns; 0 means never."""
    return round(seconds * 1e9) if seconds else -1


def error_of(request: int, error: Exception) -> api.Error:
    return api.Error(request, f"vLLM: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error.__cause__ or error).split())
    text = PYDANTICS_OWN.sub("", text)
    return text or type(error).__name__


def _check_device(kind: str) -> None:
    found = current_platform.device_type
    if kind not in ("auto", found):
        raise api.BadSetting(f"device '{kind}': this vLLM is built for {found}; leave --device auto")


def on_cpu() -> bool:
    return bool(current_platform.device_type == "cpu")


def _pids() -> dict[str, int]:
    """Every process of the engine: the host, and what vLLM started below it."""
    engine, *below = with_below([os.getpid()])
    return {"engine": engine} | {f"vllm_{index}": pid for index, pid in enumerate(below)}
