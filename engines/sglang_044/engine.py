"""SGLang 0.4.4 in the host's own process, behind the contract of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_bench.engines import api
from overlap_bench.engines.sglang_044 import REPLACED, SPEC, VERSION
from overlap_bench.engines.sglang_044.toggles.sync import POLICIES
from overlap_bench.engines.sglang_base.engine import SglangEngine, check_interpreter, check_options

if TYPE_CHECKING:
    from overlap_bench.engines.sglang_044.card import Card

# What is imported and no step of ours comes to: empty modules stand in for it.
ABSENT = {
    "vllm": "layers of models and quantization; this release wants 0.7",
    "sgl_kernel": "CUDA kernels of sampling, normalization and speculation",
    "gguf": "a format of weights",
    "IPython": "display in notebooks",
}
NEEDED = ("torch", "triton", "transformers", "fastapi", "aiohttp", "dill", "PIL", "setproctitle", "zmq")
CAPTURED = 160  # rows of the largest graph that SGLang 0.4.4 captures


def build(options: api.EngineOptions, toggles: dict[str, str]) -> api.Engine:
    """What the host calls (api.EngineSpec.build). BadSetting for what can't work."""
    check_interpreter(SPEC.name, VERSION, NEEDED, "engines/sglang_044/README.md")
    check_options(SPEC.name, VERSION, options, CAPTURED)
    return Sglang044(options, SPEC.check(toggles))


class Sglang044(SglangEngine):
    _card: Card
    name = SPEC.name
    replaced = REPLACED
    absent = ABSENT

    def open(self) -> None:
        from sglang.srt.server_args import ServerArgs

        from overlap_bench.engines.sglang_044 import card, scheduler, worker
        from overlap_bench.engines.sglang_base.card import OnHost

        self._card = card.Card(self.pace, held=self.held)
        card.install(self._card)
        worker.install(self._card, POLICIES[self.toggles.get("sync", "launch-and-copy")])
        with OnHost():
            arguments = ServerArgs(**self.arguments(self.toggles["attention"]))
            self._loop = scheduler.Loop(arguments, self._card, self)

    def loop(self) -> None:
        overlap = self.toggles["schedule"] == "overlap"
        (self._loop.event_loop_overlap if overlap else self._loop.event_loop_normal)()

    def collect(self) -> api.RoundRecord:
        self._loop.steps.launching = self._card.native
        return super().collect()

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": ids, "image_inputs": None}
