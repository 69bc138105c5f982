"""Devices that outlive engines: starting one costs seconds, loading a model onto it a fraction of one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.devices import open_device
from engines.devices.base import Device

CHAOS_SEED = 7


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two spinning torch threads beside the device's process collapse on two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    opened = open_device("emulated", cores="shared")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def chaotic_device() -> Iterator[Device]:
    """Delays every stream at random: a missing guard shows as a wrong token."""
    opened = open_device("emulated", chaos=CHAOS_SEED, cores="shared")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def nvtx_tool(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that a small NVTX tool looks on at; see nvtx_tool.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("tool") / "nvtx_tool.so"
    source = Path(__file__).with_name("nvtx_tool.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return {"NVTX_INJECTION64_PATH": str(library)}
