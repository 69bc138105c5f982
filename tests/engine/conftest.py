"""Devices that outlive engines: starting one costs seconds, loading a model onto it a fraction of one."""

import gc
from collections.abc import Iterator

import pytest
import torch

from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import Device

CHAOS_SEED = 7


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two spinning torch threads beside the device's process collapse on two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def frozen_again(request: pytest.FixtureRequest, frozen: None) -> Iterator[None]:
    """An engine with gc=frozen thaws everything at its end, not only what it froze; a test's name
    holds its choices. (To ask whether anything is frozen would walk all of it, 0.1 s each time.)"""
    yield
    if "frozen" in request.node.name:
        gc.freeze()


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
