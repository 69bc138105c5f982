"""One model on several devices, each with a part of every layer's weights (Megatron-LM, 2019).

Of what projects from the hidden state a rank keeps some outputs (COLUMNS): its heads, its part of the MLP. Of
what projects back it keeps the inputs that go with them (ROWS), and what the ranks get is summed: one
all-reduce for attention and one for the MLP, in each layer, inside the program. Embeddings, norms and the
output's weights are whole on every rank. So all have the same hidden states, and choose the same tokens.

Between cards the sum is NCCL's, between emulated devices gloo's; which of the two is torch.distributed's
affair. A rank that waits for another one waits for WAIT_S at most.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase

import torch
from torch import Tensor, distributed, nn

from overlap_bench.engines.api import BadSetting, EngineError
from overlap_bench.engines.devices.base import RANK_LOST
from overlap_bench.engines.devices.loading import one_line
from overlap_bench.engines.overlap.models.contract import Shape

COLUMNS, ROWS, FUSED = "columns", "rows", "fused"  # fused: queries, keys and values in one matrix
JOIN_S = 120.0  # until all ranks have booted
WAIT_S = 20.0  # until all ranks have come to the same place of a step

Plan = Mapping[str, str]  # by patterns of module names


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one model, as one of them sees it."""

    rank: int
    ranks: int

    def part(self, whole: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part of `whole` along a dimension."""
        size = whole.shape[dim]
        if size % self.ranks:
            raise BadSetting(f"{what} has {size} columns or rows, which {self.ranks} ranks can't divide")
        each = size // self.ranks
        return whole.narrow(dim, self.rank * each, each)

    def part_of(self, shape: Shape, model: str) -> Shape:
        """What this rank has of a model: so many heads fewer."""
        for what, count in (("heads", shape.heads), ("KV heads", shape.kv_heads)):
            if count % self.ranks:
                raise BadSetting(
                    f"{model} has {count} {what}, which {self.ranks} ranks can't divide: set ranks to a "
                    "number that does"
                )
        return replace(shape, heads=shape.heads // self.ranks, kv_heads=shape.kv_heads // self.ranks)


def join(device: torch.device, group: Group, store: str) -> None:
    """Meet the other ranks at `store`, a file that all of them can open. Blocks until they are there."""
    if distributed.is_initialized():  # of a module that was on this device before
        distributed.destroy_process_group()
    if device.type != "cuda":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # emulated devices are of one machine
    met = open_store(store, group.ranks)
    met.set(f"rank {group.rank}", "here")
    try:
        met.wait([f"rank {rank}" for rank in range(group.ranks)], timedelta(seconds=JOIN_S))
    except RuntimeError as error:
        raise EngineError(f"{RANK_LOST}: it did not boot within {JOIN_S:.0f} s") from error
    # A card's communicator is made by the first all-reduce: at load, before anything is captured.
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=met,
        rank=group.rank,
        world_size=group.ranks,
        timeout=timedelta(seconds=WAIT_S),
    )


def open_store(path: str, ranks: int) -> distributed.Store:
    """By a descriptor of this process's own, which stays open: torch opens the file anew when it lets go of
    the store, and dies where the number is a socket's by then."""
    return distributed.FileStore(f"/proc/self/fd/{os.open(path, os.O_RDWR | os.O_CLOEXEC)}", ranks)


class AllReduce(nn.Module):
    """A leaf module, so that an eager launch pays for it as for any other kernel."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            distributed.all_reduce(x)
        except RuntimeError as error:
            raise EngineError(f"{RANK_LOST}: {one_line(error)}") from error
        return x


@torch.no_grad()
def shard(root: nn.Module, plan: Plan, group: Group, model: str) -> None:
    """Leave of the modules of `root` that the plan names this rank's part."""
    for pattern, kind in plan.items():
        named = [name for name, _ in root.named_modules() if fnmatchcase(name, pattern)]
        if not named:
            raise BadSetting(f"{model} has no {pattern}, which {group.ranks} ranks were to divide")
        for name in named:
            module = root.get_submodule(name)
            _cut(module, kind, group, f"{model}'s {name}")
            if kind == ROWS:
                above, _, last = name.rpartition(".")
                setattr(root.get_submodule(above), last, nn.Sequential(module, AllReduce()))


def _cut(module: nn.Module, kind: str, group: Group, what: str) -> None:
    """Weights are [out, in], as nn.Linear's, or [in, out], as GPT-2's."""
    out = 0 if isinstance(module, nn.Linear) else 1
    weight, bias = module.weight, module.bias
    assert isinstance(weight, nn.Parameter)
    if kind == ROWS:
        module.weight = _kept(group.part(weight, 1 - out, what))
        if bias is not None and group.rank:
            bias.zero_()  # the sum has it from the first rank
        return
    parts = 3 if kind == FUSED else 1
    module.weight = _kept(torch.cat([group.part(each, out, what) for each in weight.chunk(parts, out)], out))
    if bias is not None:
        module.bias = _kept(torch.cat([group.part(each, 0, what) for each in bias.chunk(parts)]))
    if hasattr(module, "nf"):  # transformers' GPT-2 says there how wide its output is
        module.nf = module.weight.shape[1]


def _kept(part: Tensor) -> nn.Parameter:
    """Alone: a view would keep the whole alive."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
