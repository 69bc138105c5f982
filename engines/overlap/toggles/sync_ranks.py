"""sync-ranks: where the replicas of a model agree, ahead of each step, on whether there is one.

Data parallel: each replica has requests of its own, and a step of one is a step of all. (Where a model's
experts are spread over the replicas, every step needs all of them; the models here have none, so what is
measured is the agreement alone.) So each says whether it has something to run, and takes part with a step of
padding where only another one has.

Before (`device`): the word goes to the device, the all-reduce runs there, on stream `forward`, and the host
waits for what comes of it. It stands behind the step that is running, so the device has nothing queued when
that ends: the pipeline is drained in each step, and overlap is lost. After (`host`): the hosts agree among
themselves, by gloo, and the devices go on meanwhile.

Claim: vLLM 29311 (no number in its title; DP2 of a 30B model on H20). vLLM 32140 reports the opposite: an
all-reduce between hosts takes longer than one between cards. vLLM 30980 tries a third way, one step late.

What can go wrong: a replica that has nothing to run sleeps, and the others would wait for it in the
all-reduce for ever. So none falls asleep but together with all, and whoever wakes wakes the other one
(replicas.Meeting). And the word that came back may be read only behind its copy: else it is that of the step
before, one replica goes on without the other, and waits for it in vain.
"""

from __future__ import annotations

import os
from datetime import timedelta
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from engines.api import EngineError, Toggle

if TYPE_CHECKING:  # the declaration below is read by command lines that must not wait for torch
    from torch import Tensor

    from engines.devices.base import Device, Event

TOGGLE = Toggle(
    name="sync-ranks",
    module=__name__,
    choices=("device", "host"),
    changes="whether replicas agree on each step by an all-reduce on the devices, which the hosts wait for, "
    "or among the hosts",
    source="vLLM 29311",
    requires={"*": {"replicas": ("2",), "launch": ("inline",)}},
    counters=("sync_ranks_ns", "sync_ranks_words", "padding_steps"),
)

NOTHING, WORK, ATTEND = 0, 1, 2  # what a replica says; the largest counts
PROGRAM, WORD = "agree", "word"
JOIN_S = 120.0  # until all have booted
WAIT_S = 20.0  # until all have said their word


class Agreement(Protocol):
    def agree(self, word: int) -> int:
        """The largest word of all replicas; blocks until each has said one."""


class OnDevice:
    """Before."""

    def __init__(self, device: Device) -> None:
        import torch

        self.device, self.stream = device, device.stream("forward")
        self.word = device.buffer(WORD)
        self.said, self.heard = (device.pinned(1, torch.int64) for _ in range(2))
        device.capture(PROGRAM)

    def agree(self, word: int) -> int:
        device = self.device
        self.said[0] = word
        device.to_device(self.word, self.said, self.stream)
        device.launch(PROGRAM, stream=self.stream, step=-1)
        device.to_host(self.heard, self.word, self.stream)
        self.wait(device.record(self.stream))
        return int(self.heard[0])

    def wait(self, copied: Event) -> None:
        """The guard on reading; it is also what drains the pipeline."""
        self.device.synchronize(copied)


class OnHost:
    """After."""

    def __init__(self, rank: int, replicas: int, store: str) -> None:
        import torch
        from torch import distributed

        from engines.overlap.models.tensor_parallel import open_store

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are of one machine
        met = open_store(store, replicas)
        met.set_timeout(timedelta(seconds=JOIN_S))
        try:  # a group of its own: where the device is a card, the process's first one is NCCL's
            self._group = distributed.ProcessGroupGloo(met, rank, replicas, timedelta(seconds=WAIT_S))
        except RuntimeError as error:
            raise _lost(error) from error
        self._options = distributed.AllreduceOptions()
        self._options.reduceOp = distributed.ReduceOp.MAX
        self._word = torch.zeros(1, dtype=torch.int64)

    def agree(self, word: int) -> int:
        self._word[0] = word
        try:
            self._group.allreduce([self._word], self._options).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return int(self._word[0])


class Counted:
    """An agreement whose time and words are counted."""

    def __init__(self, agreement: Agreement, counters: dict[str, int]) -> None:
        self._agreement, self._counters = agreement, counters

    def agree(self, word: int) -> int:
        began = perf_counter_ns()
        agreed = self._agreement.agree(word)
        self._counters["sync_ranks_ns"] += perf_counter_ns() - began
        self._counters["sync_ranks_words"] += 1
        return agreed


def largest(word: Tensor) -> None:
    """The program of a module whose device has joined the others' (tensor_parallel.join)."""
    from torch import distributed

    try:
        distributed.all_reduce(word, distributed.ReduceOp.MAX)
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> EngineError:
    from engines.devices.base import RANK_LOST
    from engines.devices.loading import one_line

    return EngineError(f"{RANK_LOST}: {one_line(error)}")


def choose(
    choice: str, device: Device, rank: int, replicas: int, store: str, counters: dict[str, int]
) -> Agreement:
    if choice == "host":
        return Counted(OnHost(rank, replicas, store), counters)
    return Counted({"device": OnDevice}[choice](device), counters)
