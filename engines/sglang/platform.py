"""The platform that SGLang finds: a card's choices, with tensors in the host's memory."""

from __future__ import annotations

from typing import Any

import sglang.srt.platforms as platforms
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import PlatformCapabilities


class PacedPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """Called "cpu", for tensors are the host's; what it can do is CUDA's."""

    capabilities = PlatformCapabilities(supports_triton=True, graph_capture=True)

    def get_kv_pool_cls(self, *, kind: str) -> type[Any] | None:
        from overlap_bench.engines.sglang.worker import UnfilledPool

        return UnfilledPool if kind == "mha" else None


def install() -> None:
    """Have SGLang take it. Before anything of SGLang's that asks what it runs on is imported."""
    platforms._current_platform = PacedPlatform()
