"""What both ways of running vLLM share: its arguments, its requests, and its outputs as events."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from engines import api
from engines.machine import cpu_model
from engines.overlap.models.published import save
from engines.overlap.presets import PRESETS, tokenizer_file
from engines.vllm import SPEC

USED = (
    "model", "device", "dtype", "seed", "max_batch_size", "prefill_max_tokens", "stream_interval",
    "num_blocks", "sampling", "prefix_cache", "max_context", "recorder",
)  # fmt: skip
CARD_SHARE = 0.45  # of a GPU's memory: the two arms of a block stand side by side on one card


class VllmEngine(api.Engine):
    """A vLLM engine, and everything about it but the process its core is in."""

    def __init__(self, options: api.EngineOptions, toggles: dict[str, str]) -> None:
        self.options = options
        self.toggles = toggles
        self._saved: TemporaryDirectory[str] | None = None

    def open(self) -> Any:
        """Start vLLM; its config."""
        raise NotImplementedError

    def start(self, events: api.EventSink) -> api.Description:
        self.options.refuse_unused(SPEC.name, USED)
        _check_device(self.options.device)
        self.events = events
        self._tokenizer = tokenizer_file(self.options.model)  # which refuses a typo
        self._folder = self._model_folder()
        try:
            config = self.open()
        except ValueError as error:  # pydantic's too: what its options don't allow together
            raise api.BadSetting(f"vLLM {vllm.__version__}: {_one_line(error)}") from error
        self._check_in_force(config)
        return self._describe(config)

    def stop(self) -> None:
        if self._saved is not None:
            self._saved.cleanup()
            self._saved = None

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
            gpu_memory_utilization=CARD_SHARE,
            enable_prefix_caching=options.prefix_cache,
            stream_interval=options.stream_interval,
            async_scheduling=toggles["async_scheduling"] == "on",
            enforce_eager=toggles["enforce_eager"] == "on",
            enable_chunked_prefill=toggles["chunked_prefill"] == "on",
            disable_log_stats=not options.recorder,
        )

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
        )

    def _model_folder(self) -> Path:
        """vLLM loads from folders; a preset is written to one."""
        if self.options.model not in PRESETS:
            return Path(self.options.model).expanduser()
        self._saved = TemporaryDirectory(prefix="preset-")
        folder = Path(self._saved.name)
        save(PRESETS[self.options.model], folder, self.options.seed)
        return folder

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
                    f"vLLM {vllm.__version__} does not run {self.options.model} with "
                    f"{name}={self.toggles[name]} on {current_platform.device_type}"
                )
        if bool(config.cache_config.enable_prefix_caching) != self.options.prefix_cache:
            raise api.BadSetting(f"vLLM {vllm.__version__} does not run with this prefix_cache here")
        heads, known = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if current_platform.device_type == "cpu" and heads not in known:
            raise api.BadSetting(
                f"{self.options.model} has attention heads of size {heads}; on the CPU, vLLM "
                f"{vllm.__version__} supports only {', '.join(map(str, known))}"
            )

    def _describe(self, config: Any) -> api.Description:
        cpu = current_platform.device_type == "cpu"
        return api.Description(
            engine=SPEC.name,
            versions={
                "python": platform.python_version(),
                "vllm": vllm.__version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
            },
            device={
                "kind": current_platform.device_type,
                "name": cpu_model() if cpu else current_platform.get_device_name(),
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
            # vLLM promises tokens independent of the batch under this switch only.
            deterministic=self.options.dtype == "float32" and (cpu or _batch_invariant()),
            pids=_pids(),
        )


@dataclass(slots=True, eq=False)
class Active:
    """A request that was taken in, and how far it is. Equal only to itself."""

    request: api.Request
    accepted_ns: int
    count: int = 0  # tokens
    prompt_tokens: int = -1
    admitted_ns: int = -1

    def events(self, output: RequestOutput) -> list[api.Event]:
        """One more output of vLLM as events. With its statistics on (option recorder), it tells when the
        request was scheduled and when the first token was there, but nothing of the other tokens."""
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        self.prompt_tokens = len(output.prompt_token_ids or ())
        stamps = []
        if output.metrics is not None:
            self.admitted_ns = _ns(output.metrics.scheduled_ts)
            if not self.count and len(tokens) == 1:
                stamps = [_ns(output.metrics.first_token_ts)]
        self.count += len(tokens)
        said: list[api.Event] = []
        if tokens or completion.text:
            said.append(api.Chunk(self.request.id, tokens, completion.text, stamps))
        if output.finished:
            said.append(self.finish(_reason(completion.finish_reason, completion.stop_reason)))
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
        )


def _reason(reason: str | None, stopped_by: int | str | None) -> str:
    """vLLM says "stop" for an end-of-text id as well as for a stop string."""
    if reason == "stop":
        return "stop" if isinstance(stopped_by, str) else "eos"
    return "length" if reason == "length" else "cancelled"


def _ns(seconds: float) -> int:
    """vLLM's core stamps by time.monotonic(), on Linux the clock of perf_counter_ns; 0 means never."""
    return round(seconds * 1e9) if seconds else -1


def error_of(request: int, error: Exception) -> api.Error:
    return api.Error(request, f"vLLM: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error.__cause__ or error).split())
    return text or type(error).__name__


def _check_device(kind: str) -> None:
    found = current_platform.device_type
    if kind not in ("auto", found):
        raise api.BadSetting(f"device '{kind}': this vLLM is built for {found}; leave --device auto")


def _batch_invariant() -> bool:
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


def _pids() -> dict[str, int]:
    """Every process of the engine: the host, and what vLLM started below it."""
    import psutil

    below = psutil.Process().children(recursive=True)
    return {"engine": os.getpid()} | {f"vllm_{index}": each.pid for index, each in enumerate(below)}
