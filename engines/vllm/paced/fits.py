"""What the paced device takes from vLLM by name: all of it is here, and is looked for before anything boots.

Tried with 0.32.0. Another version fits as long as it has these; what it lacks is said by name.
"""

from __future__ import annotations

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.fits import Taken, missing
from overlap_bench.engines.vllm.fits import TRIED, version

RUNNER = "vllm.v1.worker.gpu.model_runner"
TAKEN: Taken = (
    # platform.py
    ("vllm.platforms.cpu", "CpuPlatform", ("apply_config_platform_defaults", "get_attn_backend_cls")),
    ("vllm.platforms.interface", "Platform", ("support_static_graph_mode", "update_block_size_for_backend")),
    ("vllm.platforms.interface", "DeviceCapability", ("major", "minor")),
    ("vllm.config", "CompilationMode", ("NONE",)),
    ("vllm.config", "CUDAGraphMode", ("FULL_DECODE_ONLY",)),
    ("vllm.config", "VllmConfig", ("use_v2_model_runner",)),
    ("vllm.config", "SpeculativeConfig", ("method", "synthetic_acceptance_rates")),
    # what stands in the place of CUDA
    ("vllm.utils.torch_utils", "async_tensor_h2d", ("data", "device", "dtype", "out")),
    ("vllm.v1.worker.gpu.buffer_utils", "UvaBuffer", ("uva",)),
    ("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version", ()),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder", ("_get_scheduler_metadata",)),
    (RUNNER, "init_kv_cache", ()),
    ("vllm.v1.worker.gpu.cudagraph_utils", "ModelCudaGraphManager", ("run_fullgraph", "capture")),
    # card.py, worker.py
    ("vllm.v1.worker.gpu_worker", "Worker", ("init_device", "determine_available_memory")),
    ("vllm.v1.worker.gpu_worker", "init_worker_distributed_environment", ("local_rank", "backend")),
    ("vllm.v1.worker.worker_base", "CompilationTimes", ("language_model", "encoder")),
    ("vllm.v1.worker.workspace", "init_workspace_manager", ("device",)),
    ("vllm.config", "CompilationConfig", ("max_cudagraph_capture_size",)),
    ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase", ()),
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor", ()),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead", ()),
    ("vllm.model_executor.model_loader.utils", "initialize_model", ("vllm_config",)),
    ("vllm.tokenizers", "cached_tokenizer_from_config", ()),
    (RUNNER, "GPUModelRunner", ("add_requests", "sample_tokens", "capture_model")),
    (RUNNER, "get_model_loader", ()),
    (RUNNER, "GPUModelRunner.prepare_inputs", ("scheduler_output",)),
    (RUNNER, "GPUModelRunner.execute_model", ("scheduler_output",)),
    (RUNNER, "GPUModelRunner.sample", ("hidden_states", "input_batch", "grammar_output")),
    (
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            *("num_reqs", "num_tokens_after_padding", "idx_mapping_np", "num_scheduled_tokens"),
            *("prefill_len_np", "is_prefilling_np", "logits_indices", "expanded_idx_mapping"),
            *("num_draft_tokens_per_req", "input_ids"),
        ),
    ),
    (
        "vllm.v1.worker.gpu.sample.output",
        "SamplerOutput",
        ("sampled_token_ids", "num_sampled", "num_rejected", "logprobs_tensors"),
    ),
    (
        "vllm.v1.core.sched.output",
        "NewRequestData",
        ("prompt_token_ids", "num_computed_tokens", "sampling_params"),
    ),
)
V1 = "vllm.v1.worker.gpu_model_runner"
OF_V1: Taken = (  # runner_v1.py
    ("vllm.compilation.cuda_graph", "weak_ref_tensors", ()),
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler", ("forward_cpu", "forward_native")),
    ("vllm.v1.sample.sampler", "Sampler", ("greedy_sample",)),
    (V1, "GPUModelRunner", ("initialize_kv_cache_tensors", "_to_list")),
    (V1, "GPUModelRunner.load_model", ("model",)),
    (V1, "GPUModelRunner.execute_model", ("scheduler_output",)),
    (V1, "GPUModelRunner.sample_tokens", ("grammar_output",)),
    (V1, "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
    (V1, "GPUModelRunner._model_forward", ("positions",)),
)


def check(taken: Taken = TAKEN) -> None:
    """Raises BadSetting for a vLLM that lacks some of it. What the paced device puts in the place of its own
    must be there already: this imports the modules that take it."""
    if lacking := missing(taken):
        raise BadSetting(
            f"vLLM {version()} does not fit the paced device, which was tried with {TRIED}: it has no "
            f"{', no '.join(lacking)}"
        )
