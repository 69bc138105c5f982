"""Accelerators an engine can run on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from overlap_bench.engines.api import BadSetting, pick
from overlap_bench.engines.pace import make_pace

if TYPE_CHECKING:
    from overlap_bench.engines.devices.base import Device


def open_device(
    kind: str,
    *,
    staging: str = "copy",
    pace: str = "",
    chaos: int | None = None,
    cores: str = "split",
    blocking_sync: bool = False,
    place: tuple[int, int] = (0, 1),
) -> Device:
    """The device of that kind: "cuda", "emulated", or "auto", which is CUDA where there is a card.

    `staging`, `pace` (engines/pace.py) and `cores` are the emulated device's, `blocking_sync` (threads
    sleep in `synchronize` instead of spinning) is CUDA's. `place`: which of how many devices this is that
    work together. Raises BadSetting. Takes seconds: the emulated device starts a process.

    The casts: a device is only ever given its own handles, so its methods ask for those, not for any.
    """
    pick(kind, dict.fromkeys(("auto", "cuda", "emulated")), "device")
    if kind != "emulated":
        import torch

        if torch.cuda.is_available():
            if staging != "copy":
                raise BadSetting(
                    "staging is for the emulated device only: on a card the driver decides what a pageable "
                    "copy does; leave it out"
                )
            if pace:
                raise BadSetting("pace is for the emulated device only: a card has its own; leave it out")
            from overlap_bench.engines.devices.cuda import CudaDevice

            (rank, ranks), cards = place, torch.cuda.device_count()
            if ranks > cards:
                raise BadSetting(f"ranks={ranks}: each takes a card, and torch finds {cards}")
            return cast("Device", CudaDevice(chaos=chaos, blocking_sync=blocking_sync, index=rank))
        if kind == "cuda":
            raise BadSetting("device 'cuda': torch finds no CUDA device here; use --device emulated")

    if blocking_sync:
        raise BadSetting("blocking_sync is for CUDA only: nothing spins on the emulated device; leave it out")
    from overlap_bench.engines.devices.emulated.device import EmulatedDevice

    chosen = make_pace(pace) if pace else None
    return cast("Device", EmulatedDevice(staging=staging, pace=chosen, chaos=chaos, cores=cores, place=place))
