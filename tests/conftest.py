"""Devices that outlive engines, for starting one costs seconds and loading a model onto it a fraction of one;
and where a profiler's real export lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from engines.devices import open_device
from engines.devices.base import Device

CHAOS_SEED = 7

# A test that fails for being slow says nothing on a shared machine.
settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")


_state = tempfile.TemporaryDirectory(prefix="bench-tests-")


def pytest_configure() -> None:
    """Runs are signed here with a secret of the tests' own. Modules copy the environment as they are read."""
    os.environ["XDG_STATE_HOME"] = _state.name


def pytest_unconfigure() -> None:
    _state.cleanup()


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
def h100_export() -> Path:
    """A real export of Nsight Systems. It is not ours to carry, so it lies beside the checkout, or beside the
    one that this worktree belongs to."""
    here = Path(__file__).resolve().parents[1]
    asked = ("git", "rev-parse", "--path-format=absolute", "--git-common-dir")
    found = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    for checkout in (here, *([Path(found).parent] if found else [])):
        path = checkout.parent / "shared" / "fixtures" / "nsys" / "h100_2gpu_1s.sqlite"
        if path.is_file():
            return path
    pytest.skip("no ../shared/fixtures/nsys/h100_2gpu_1s.sqlite beside the checkout")


@pytest.fixture(scope="session", params=["", "DEAF"], ids=["listening", "deaf"])
def nvtx_tool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that a small NVTX tool looks on at; see nvtx_tool.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("tool") / "nvtx_tool.so"
    source = Path(__file__).with_name("nvtx_tool.c")
    kind = [f"-D{request.param}"] if request.param else []
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", *kind, "-o", library, source], check=True)
    return {"NVTX_INJECTION64_PATH": str(library)}
