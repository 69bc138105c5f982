"""SGLang's scheduler in the host's own process, behind the contract of an engine. What differs by its release
is a subclass's."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

from overlap_bench.engines import api
from overlap_bench.engines.machine import cpu_model
from overlap_bench.engines.pace import Pace, make_pace
from overlap_bench.engines.presets import PRESETS, SHAPES, tokenizer_file
from overlap_bench.engines.sglang_base import GIL, absent, folder
from overlap_bench.engines.sglang_base.answer import Active

if TYPE_CHECKING:
    from overlap_bench.engines.paced.device import Device

USED = (
    "model", "device", "dtype", "seed", "max_batch_size", "prefill_max_tokens", "stream_interval",
    "num_blocks", "prefix_cache", "max_context", "recorder", "pace", "plant_at", "plant_ns",
)  # fmt: skip
HELD, RELEASED = "held", "released"
SPARE = 8  # positions that SGLang keeps of a context, and slots that it keeps of its KV cache, for itself


class Stopped(Exception):
    """Ends SGLang's loop, which has no end of its own."""


def check_interpreter(name: str, needed: str, packages: Sequence[str], document: str) -> None:
    """BadSetting where this interpreter has another SGLang, or lacks packages that it needs here."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != needed:
        raise api.BadSetting(
            f"engine {name} needs sglang {needed}, and {sys.executable} has {found}: name one that has "
            f"it by --set python=PATH ({document} says how it is made)"
        )
    if lacking := [each for each in packages if find_spec(each) is None]:
        missing = ", no ".join(lacking)
        raise api.BadSetting(f"{sys.executable} has no {missing}, which SGLang {needed} needs here")


def check_options(name: str, release: str, options: api.EngineOptions, captured: int) -> None:
    """BadSetting for what no SGLang of ours does. `captured`: rows of the largest graph that this one has."""
    if not options.pace:
        raise api.BadSetting(f"engine {name} runs on a device that is a clock: --pace 10ms, or a profile")
    options.refuse_unused(name, USED)
    if options.device != "auto":
        raise api.BadSetting(f"device '{options.device}': engine {name} has the clock alone; leave it out")
    if os.environ.get(GIL, RELEASED) not in (HELD, RELEASED):
        raise api.BadSetting(f"{GIL} is {HELD} or {RELEASED}, not '{os.environ[GIL]}'")
    if options.max_batch_size > captured:
        raise api.BadSetting(
            f"max_batch_size={options.max_batch_size}: SGLang {release} captures graphs for at most "
            f"{captured} requests"
        )


class SglangEngine(api.Engine):
    """SGLang's scheduler as an engine."""

    name: ClassVar[str]
    replaced: ClassVar[str]
    absent: ClassVar[Collection[str]]
    _loop: Any
    _card: Device

    def __init__(self, options: api.EngineOptions, toggles: dict[str, str]) -> None:
        self.options = options
        self.toggles = toggles
        self._at_end = ExitStack()  # what is to be cleaned up
        self._names = count()
        self._active: dict[str, Active] = {}  # by SGLang's name for it
        self._inbox: list[Any] = []  # what SGLang has not been given yet

    def preflight(self) -> str:
        tokenizer_file(self.options.model)  # which refuses a typo
        return f"paced: {self.pace.name}"

    def start(self, events: api.EventSink) -> api.Description:
        self.events = events
        os.environ["OMP_NUM_THREADS"] = "1"  # nothing computes; more would wake for each small operation
        absent.import_without(self.absent)
        logging.getLogger("sglang").setLevel(logging.WARNING)
        from overlap_bench.engines.paced.tokens import vocabulary

        self.open_or_say_why()
        self._tokenizer = self._loop.tokenizer
        self._words = vocabulary(len(self._tokenizer), lambda each: str(self._tokenizer.decode([each])))
        self._card.serving = True
        absent.seal()
        return self._describe()

    def open_or_say_why(self) -> None:
        """Open it. BadSetting for what SGLang refuses of its arguments."""
        try:
            self.open()
        except ValueError as error:
            raise api.BadSetting(
                f"SGLang: {error} (context_length is max_context={self.options.max_context} and {SPARE} more "
                "that SGLang keeps for itself)"
            ) from error

    def open(self) -> None:
        """Make its card and its scheduler, of what imports SGLang."""
        raise NotImplementedError

    def loop(self) -> None:
        """Run its event loop, until `Stopped`."""
        raise NotImplementedError

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        """What SGLang's tokenizer process sends of a prompt."""
        raise NotImplementedError

    @property
    def pace(self) -> Pace:
        return make_pace(self.options.pace)

    @property
    def slots(self) -> int:
        """Tokens that its KV cache holds."""
        options = self.options
        if options.num_blocks:
            return options.num_blocks * options.block_size
        return options.max_batch_size * (options.max_context + SPARE)

    @property
    def held(self) -> bool:
        return os.environ.get(GIL) == HELD

    def stop(self) -> None:
        self._at_end.close()

    # -- what is asked of it ---------------------------------------------------------------------------------

    def submit(self, request: api.Request) -> None:
        accepted = perf_counter_ns()
        ids = request.prompt if isinstance(request.prompt, list) else self._tokenizer.encode(request.prompt)
        # SGLang keeps some slots for itself: it would cut such an answer short, or end the request.
        most = min(self.options.max_context, self.slots - SPARE)
        if not ids or len(ids) + request.max_new_tokens > most:
            why = "an empty prompt" if not ids else f"{len(ids)} tokens and {request.max_new_tokens} more"
            self.events.send([api.Error(request.id, f"SGLang: {why}, of {most} at most")])
            return
        name = f"{next(self._names):012d}"  # SGLang takes what begins with a name for it
        self._active[name] = Active(request, ids, accepted, perf_counter_ns())
        self._inbox.append(self.tokenized(name, request, ids))

    def run(self, pump: Callable[[float | None], bool]) -> None:
        self._pump = pump
        with suppress(Stopped):
            self.loop()

    def drain(self) -> None:
        self._loop.finish_begun()

    def begin_round(self) -> None:
        self.drain()
        self._loop.steps.clear()

    def delay(self, phase: str, ns: int) -> int:
        return int(self._loop.steps.delay.put(phase, ns))

    def begin_profile(self, steps: int) -> None:
        if not self.options.recorder:
            raise api.BadSetting("a profile is made of step records, and recorder=off keeps none")
        self.drain()
        self._loop.steps.begin_profile(steps)

    def collect(self) -> api.RoundRecord:
        return self._loop.steps.record() if self.options.recorder else api.RoundRecord()

    # -- what SGLang calls -----------------------------------------------------------------------------------

    def feed(self) -> list[Any]:
        """Give it what has come, between two steps; may sleep. Unwanted steps it finishes by itself."""
        if (self._active or not self._loop.is_left) and not self._pump(0 if self._active else None):
            raise Stopped
        given, self._inbox = self._inbox, []
        return given

    def admit(self, name: str, place: int) -> None:
        """Put the answer of a request that got a place in the pool there."""
        active = self._active.get(name)
        if active is None:
            return
        import torch

        if active.admitted_ns < 0:
            active.admitted_ns = perf_counter_ns()
            active.answer = torch.from_numpy(self._answer(active))
        begin = len(active.prompt)
        self._loop.answers[place, begin : begin + len(active.answer)] = active.answer

    def _answer(self, active: Active) -> Any:
        import numpy as np

        from overlap_bench.engines.paced.tokens import draw, seed_of

        tokens = active.request.max_new_tokens
        seeds = np.full(tokens, seed_of(active.prompt, None), np.uint64)
        positions = np.arange(len(active.prompt), len(active.prompt) + tokens)
        return draw(seeds, positions, self._words, self._tokenizer.eos_token_id).astype(np.int32)

    def say(self, message: Any) -> None:
        """Send a message to its detokenizer, BatchTokenIDOut, as events."""
        said: list[api.Event] = []
        decode = self._tokenizer.backend_tokenizer
        for name, finished, ids, total in zip(
            message.rids, message.finished_reasons, message.decode_ids, message.completion_tokens, strict=True
        ):
            active = self._active.get(name)
            if active is None:
                continue
            said += active.events(list(ids), total, finished, decode)
            if finished is not None:
                del self._active[name]
        if said:
            self.events.send(said)

    # -- how it is made --------------------------------------------------------------------------------------

    def arguments(self, attention: str) -> dict[str, Any]:
        """Arguments of its server. The device is called "cpu", for tensors are the host's."""
        options = self.options
        known = {**PRESETS, **SHAPES}
        path = Path(options.model).expanduser()
        if options.model in known:
            path = Path(self._at_end.enter_context(TemporaryDirectory(prefix="preset-")))
            folder.save(known[options.model], path)
        return {
            "model_path": str(path),
            "device": "cpu",
            "dtype": options.dtype,
            "context_length": options.max_context + SPARE,
            "max_running_requests": options.max_batch_size,
            "max_total_tokens": self.slots,
            "max_prefill_tokens": max(options.prefill_max_tokens, 1),
            "chunked_prefill_size": options.prefill_max_tokens,
            "stream_interval": options.stream_interval,
            "random_seed": options.seed,
            # s; then it kills the parent of who runs no step, as in another's turn
            "watchdog_timeout": 1e8,
            "attention_backend": attention,
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": self.toggles["schedule"] == "normal",
            "disable_radix_cache": not options.prefix_cache,
        }

    def tokenized(self, name: str, request: api.Request, ids: list[int]) -> Any:
        """Request as SGLang's tokenizer process sends it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        return TokenizedGenerateReqInput(
            rid=name,
            input_text="",
            sampling_params=self.sampling(request),
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
            **self.prompt(ids),
        )

    def sampling(self, request: api.Request) -> Any:
        """SGLang's SamplingParams of a request."""
        from sglang.srt.sampling.sampling_params import SamplingParams

        found = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=0,
            stop=request.stop or None,
            ignore_eos=not request.stop_on_eos,
        )
        found.normalize(self._tokenizer)
        return found

    def _describe(self) -> api.Description:
        config = self._loop.model_config
        return api.Description(
            engine=self.name,
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in ("sglang", "torch", "transformers", "triton")},
            },
            device={
                "kind": f"paced: {self.pace.name}",
                "name": cpu_model(),
                "replaced": self.replaced,
            },
            model={
                "name": self.options.model,
                "dtype": self.options.dtype,
                "vocabulary": config.vocab_size,
                "context": self.options.max_context,
                "kv_tokens": self._loop.max_total_num_tokens,
                "tokenizer": str(tokenizer_file(self.options.model)),
            },
            toggles=self.toggles,
            deterministic=True,
            pids={"engine": os.getpid()},
        )
