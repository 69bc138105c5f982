"""What vLLM gives on a paced device, as JSON: run by the interpreter that has vLLM.

python -m tests.support.paced_vllm MODEL on|off [ngram_gpu|v1]  the model's folder; whether async scheduling
                                                                is on; how drafts are found, or runner V1
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from overlap_bench.engines.vllm import paced, toggles
from overlap_bench.engines.vllm.fits import missing
from overlap_bench.engines.vllm.paced.fits import OF_V1, TAKEN

PACE = "decode=2ms,prefill=1ms+1us*tokens,launch=2us,replay=5us,copy=2us,wake=20us"


def ask(engine: Any, name: str, prompt: list[int], **given: Any) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    values = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **given}
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **values)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def finish(engine: Any) -> dict[str, Any]:
    said = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (done,) = output.outputs
                said[output.request_id] = {
                    "ids": list(done.token_ids),
                    "text": done.text,
                    "reason": done.finish_reason,
                    "logprobs": None if done.logprobs is None else [len(each) for each in done.logprobs],
                    "cached": output.num_cached_tokens,
                }
    return said


def lacking() -> dict[str, list[str]]:
    """What is said to be missing, of each name that the paced device takes, once that is gone."""
    from importlib import import_module

    said = {}
    taken = (*TAKEN, *OF_V1)
    for module, name, _ in taken:
        owner: Any = import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        kept = owner.__dict__[last]
        delattr(owner, last)
        said[f"{module}.{name}"] = missing(taken)
        setattr(owner, last, kept)
    return said


def main() -> None:
    model, scheduling, *other = sys.argv[1:]
    v1, drafts = "v1" in other, [each for each in other if each != "v1"]
    toggles.tell({"runner": "v1" if v1 else "v2"})
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    paced.tell(PACE)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    speculation = toggles.arguments({"spec": drafts[0]}) if drafts else {}
    arguments = EngineArgs(
        model=model,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=80,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        async_scheduling=scheduling == "on",
        disable_log_stats=True,
        **speculation,
    )
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    engine = LLMEngine.from_vllm_config(config)
    core = engine.engine_core.engine_core
    device: Any = paced.own_device()
    encode = engine.get_tokenizer().encode
    prompts = {
        str(row): encode(f"The {row} of them " + "went on, and so " * (4 + 3 * row)) for row in range(8)
    }

    for name, prompt in prompts.items():
        ask(engine, name, prompt)
    together = finish(engine)
    for name, prompt in prompts.items():
        ask(engine, name, prompt)
    again = finish(engine)
    alone = {}
    for name, prompt in prompts.items():
        ask(engine, name, prompt)
        alone |= finish(engine)

    ask(engine, "stop", prompts["0"], stop=[together["0"]["text"][12:16]])
    ask(engine, "seeded", prompts["1"], temperature=0.9, seed=7, top_k=20, top_p=0.9)
    ask(engine, "scored", prompts["2"], logprobs=None if v1 else 3)
    ask(engine, "long", encode("word " * 150)[:400])  # in parts
    several = finish(engine)
    for row in range(40):
        ask(engine, f"end {row}", encode(f"Number {row}"), ignore_eos=False, max_tokens=200)
    ended = finish(engine)

    def asked(name: str, tokens: int) -> dict[str, int]:
        """What a step that prefills so many tokens asks of the driver."""
        before = device.asked()
        ask(engine, name, [7 + len(name), *range(100, 99 + tokens)], max_tokens=1)
        finish(engine)
        return device.asked() - before

    pieces = {"graphs": asked("in pieces that are graphs", 30), "kernels": asked("in kernels", 100)}

    preempted = 0
    inner = type(core.scheduler)._preempt_request

    def counted(scheduler: Any, *given: Any, **named: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return inner(scheduler, *given, **named)

    type(core.scheduler)._preempt_request = counted
    for row in range(12):  # 12 x 12 blocks of 80
        ask(engine, f"crowd {row}", prompts["5"] + encode(f"{row}"), max_tokens=150)
    crowd = finish(engine)
    ask(engine, "crowd 3", prompts["5"] + encode("3"), max_tokens=150)
    calm = finish(engine)
    print(
        json.dumps(
            {
                "runner": type(core.model_executor.driver_worker.worker.model_runner).__mro__[1].__module__,
                "scheduler": type(core.scheduler).__name__,
                "executor": type(core.model_executor).__name__,
                "block_size": config.cache_config.block_size,
                "attention": str(config.attention_config.backend),
                "together": together,
                "again": again,
                "alone": alone,
                "several": several,
                "ended": ended,
                "preempted": preempted,
                "pieces": pieces,
                "crowd": crowd["crowd 3"],
                "calm": calm["crowd 3"],
                "counts": {kind: each.of_a_step() for kind, each in device.counts.items()},
                "steps": {kind: each.steps for kind, each in device.counts.items()},
                "lacking": lacking(),
            }
        )
    )


if __name__ == "__main__":
    main()
