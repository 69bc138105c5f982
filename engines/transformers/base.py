"""What both ways of batching share: the model, the way in of a request, and the way out of its tokens."""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from importlib.metadata import version
from time import perf_counter_ns

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from overlap_bench.engines import api
from overlap_bench.engines.machine import cpu_model
from overlap_bench.engines.output import Opening, OutputProcessor, Produced, Stopped
from overlap_bench.engines.presets import load_tokenizer, rescaling, tokenizer_file
from overlap_bench.engines.presets.checkpoints import end_ids, load_model, rescaled_after
from overlap_bench.engines.requests import Taken, why_impossible
from overlap_bench.engines.transformers import SPEC

USED = (
    "model", "device", "dtype", "seed", "max_batch_size", "prefill_max_tokens", "stream_interval",
    "max_context", "recorder",
)  # fmt: skip


class TransformersEngine(api.Engine):
    """A model of transformers, and everything about it but its batching."""

    used: tuple[str, ...] = USED

    def __init__(self, options: api.EngineOptions, toggles: dict[str, str]) -> None:
        self.options = options
        self.toggles = toggles
        self.counters: Counter[str] = Counter()

    # -- what a way of batching adds -----------------------------------------------------------------------

    def prepare(self) -> None:
        """Be ready for the first request; the model is loaded."""

    def queue(self, active: Taken) -> None:
        """Take a request that can be served."""
        raise NotImplementedError

    def give_up(self, request: int) -> Taken | None:
        """Stop work on the request with that id; None where it has ended."""
        raise NotImplementedError

    # -- the protocol --------------------------------------------------------------------------------------

    def start(self, events: api.EventSink) -> api.Description:
        options = self.options
        options.refuse_unused(SPEC.name, self.used)
        self.device = _find_device(options.device)
        transformers_logging.set_verbosity_error()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._events = events
        self.model = load_model(options.model, getattr(torch, options.dtype), self.device, options.seed)
        config = self.model.config.get_text_config()
        if options.max_context > config.max_position_embeddings:
            raise api.BadSetting(
                f"{options.model} has {config.max_position_embeddings} positions: set max_context to that or "
                "less"
            )
        rescaled = rescaled_after(config)
        if rescaled and rescaled < options.max_context:
            raise api.BadSetting(rescaling(options.model, rescaled))
        self.eos = frozenset(end_ids(self.model))
        # Greedy and nothing else: a published generation config has temperatures and penalties of its own.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._vocabulary: int = config.vocab_size
        self.tokenizer = load_tokenizer(options.model, self._vocabulary)
        self.output = OutputProcessor(self.tokenizer, options.stream_interval, events, self._end_stopped)
        self.prepare()
        return self._describe()

    def submit(self, request: api.Request) -> None:
        accepted = perf_counter_ns()
        prompt = request.prompt
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode(prompt).ids
            except Exception as error:  # the library raises nothing narrower
                self._events.send([api.Error(request.id, f"the prompt can't be tokenized: {error}")])
                return
        reason = why_impossible(request, prompt, self.options, self._vocabulary)
        if reason is None and request.temperature != 0:
            reason = f"temperature is {request.temperature:g}; engine transformers decodes greedily"
        if reason is not None:
            self._events.send([api.Error(request.id, reason)])
        else:
            self.queue(Taken(request, prompt, accepted, perf_counter_ns()))

    def begin_round(self) -> None:
        self.counters.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def collect(self) -> api.RoundRecord:
        memory = {}
        if self.device.type == "cuda":
            memory["device_peak"] = torch.cuda.max_memory_allocated(self.device)
        return api.RoundRecord(counters=dict(self.counters), memory=memory)

    # -- tokens on their way out ---------------------------------------------------------------------------

    def admit(self, active: Taken, admitted_ns: int) -> None:
        """Its first step is about to run, or ran; before its first token is said."""
        active.admitted_ns = admitted_ns
        if active.request.stop:
            self.output.open(Opening(active.request.stop, active.finish("stop")))

    def produce(self, active: Taken, token: int, token_ns: int) -> Produced:
        """One token that was on the host at `token_ns`, with what ends its request where it does."""
        active.count += 1
        reason = None
        if active.request.stop_on_eos and token in self.eos:
            reason = "eos"
        elif active.count >= active.request.max_new_tokens:
            reason = "length"
        return Produced(active.request.id, token, token_ns, None if reason is None else active.finish(reason))

    def _end_stopped(self, stopped: list[Stopped]) -> None:
        """Texts came to a stop string, and their ends are about to be sent."""
        for each in stopped:
            if not each.dropped and self.give_up(each.id):
                self.output.close(each.id)

    # -- small things --------------------------------------------------------------------------------------

    def _describe(self) -> api.Description:
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else cpu_model()
        return api.Description(
            engine=SPEC.name,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            device={"kind": self.device.type, "name": name, "torch_threads": str(torch.get_num_threads())},
            model={
                "name": self.options.model,
                "dtype": self.options.dtype,
                "attention": str(self.model.config._attn_implementation),
                "vocabulary": self._vocabulary,
                "parameters": self.model.num_parameters(),
                "context": self.options.max_context,
                "tokenizer": str(tokenizer_file(self.options.model)),
            },
            toggles=self.toggles,
            # On a card the batch decides which kernel sums up a logit, and in which order.
            deterministic=self.options.dtype == "float32" and not cuda,
            pids={"engine": os.getpid()},
        )


def _find_device(kind: str) -> torch.device:
    if kind == "emulated":
        raise api.BadSetting(
            "engine transformers runs on the CPU or on CUDA, not on the emulated device: leave --device auto"
        )
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if kind == "cuda":
        raise api.BadSetting("device 'cuda': torch finds no CUDA device here; leave --device auto")
    return torch.device("cpu")
