"""Packages that SGLang 0.5.23 imports and no step of ours comes to: empty modules stand in for them."""

from __future__ import annotations

ABSENT = {
    "sgl_kernel": "CUDA kernels of sampling, normalization and speculation",
    "flashinfer": "attention and sampling on a card",
    "vllm": "layers of models where no kernel of SGLang's own is there",
    "tvm_ffi": "calls of kernels that SGLang compiles",
    "torchvision": "pictures",
    "gguf": "a format of weights",
    "IPython": "display in notebooks",
}
