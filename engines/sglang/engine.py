"""SGLang 0.5.23 in the host's own process, behind the contract of an engine."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from overlap_bench.engines import api
from overlap_bench.engines.sglang import REPLACED, SPEC, VERSION, toggles
from overlap_bench.engines.sglang_base.engine import SglangEngine, check_interpreter, check_options

MODELS = "overlap_bench.engines.sglang.models"
# What is imported and no step of ours comes to: empty modules stand in for it.
ABSENT = {
    "sgl_kernel": "CUDA kernels of sampling, normalization and speculation",
    "flashinfer": "attention and sampling on a card",
    "vllm": "layers of models where no kernel of SGLang's own is there",
    "tvm_ffi": "calls of kernels that SGLang compiles",
    "torchvision": "pictures",
    "gguf": "a format of weights",
    "IPython": "display in notebooks",
}
CAPTURED = 256  # rows of the largest graph, by arg_groups/memory_hook.py; more would run eagerly
NEEDED = ("torch", "triton", "transformers", "msgspec", "orjson", "openai", "compressed_tensors", "zmq")


def build(options: api.EngineOptions, toggles: dict[str, str]) -> api.Engine:
    """What the host calls (api.EngineSpec.build). BadSetting for what can't work."""
    check_interpreter(SPEC.name, VERSION, NEEDED, "engines/sglang/README.md")
    check_options(SPEC.name, VERSION, options, CAPTURED)
    return Sglang(options, SPEC.check(toggles))


class Sglang(SglangEngine):
    name = SPEC.name
    replaced = REPLACED
    absent = ABSENT

    def open(self) -> None:
        from overlap_bench.engines.paced.device import Device
        from overlap_bench.engines.sglang import platform
        from overlap_bench.engines.sglang_base import card

        self._card = Device(self.pace, held=self.held)
        card.take_place(self._card)
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = MODELS
        os.environ |= toggles.variables(self.toggles)
        platform.install()

        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import freeze_gc

        from overlap_bench.engines.sglang import scheduler, worker

        worker.install(self._card)
        toggles.put(self.toggles)
        arguments = ServerArgs(**self.arguments("triton"), grammar_backend="none")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with card.OnHost(), TemporaryDirectory(prefix="ranks-") as folder:
            # One rank finds itself by a file, and by no port.
            os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (Path(folder) / "store").as_uri()
            self._loop = scheduler.Loop(arguments, self._card, self, self.toggles)
        if self._loop.enable_overlap != (self.toggles["schedule"] == "overlap"):
            raise api.BadSetting(
                f"SGLang {VERSION} switched to its other event loop for this model or these options, so "
                f"schedule={self.toggles['schedule']} is not in force: try another --model, or fewer options"
            )
        # As its server asks of its scheduler once it is warm, whatever its options: else a full collection
        # walks over all that was imported, for tens of milliseconds within a step.
        freeze_gc("Scheduler", arguments.gc_threshold)

    def loop(self) -> None:
        # As on a card: what writes to buffers that both streams use waits for the step that reads them.
        os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
        self._loop.run_event_loop()

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": array("q", ids), "input_embeds": None, "mm_inputs": None, "token_type_ids": None}
