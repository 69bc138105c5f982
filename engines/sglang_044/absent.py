"""Packages that SGLang 0.4.4 imports and no step of ours comes to: empty modules stand in for them."""

from __future__ import annotations

ABSENT = {
    "vllm": "layers of models and quantization; this release wants 0.7",
    "sgl_kernel": "CUDA kernels of sampling, normalization and speculation",
    "gguf": "a format of weights",
    "IPython": "display in notebooks",
}
