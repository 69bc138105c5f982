"""SGLang's workers and model runner on the card that is a clock: what stands between them and CUDA is ours,
and nothing else is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, ClassVar

import sglang.srt.layers.attention.flashinfer_backend as flashinfer
import sglang.srt.layers.dp_attention as dp_attention
import sglang.srt.managers.scheduler as scheduler
import sglang.srt.managers.tp_worker as tp_worker
import sglang.srt.managers.tp_worker_overlap_thread as overlap_thread
import sglang.srt.model_executor.cuda_graph_runner as cuda_graph_runner
import sglang.srt.model_executor.model_runner as model_runner
import torch
from sglang.srt.distributed import parallel_state

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.sglang_044.card import Card, Wrapper, counted, lengths, torch_without_cuda
from overlap_bench.engines.sglang_044.toggles.sync import Sync
from overlap_bench.engines.sglang_base import worker

MEMORY_GB = 80.0  # of the card; KV slots are as many as were asked for


class Alone:
    """A group of ranks with one rank in it."""

    world_size = 1
    rank_in_group = 0
    cpu_group = device_group = ca_comm = None

    def barrier(self) -> None:
        pass

    @contextmanager
    def graph_capture(self, context: Any = None) -> Iterator[Any]:
        yield context or SimpleNamespace(stream=torch.cuda.Stream())


class Model(worker.Model):
    torchao_applied = True  # nothing is quantized


class UnfilledPool(worker.Unfilled, model_runner.MHATokenToKVPool):  # type: ignore[misc]
    """The KV cache."""


class PacedRunner(worker.Answering, model_runner.ModelRunner):  # type: ignore[misc]
    card: ClassVar[Card]

    def init_torch_distributed(self) -> float:
        alone = Alone()
        parallel_state._TP = parallel_state._PP = dp_attention._ATTN_TP_GROUP = alone
        dp_attention._ATTN_TP_RANK, dp_attention._ATTN_TP_SIZE = 0, 1
        dp_attention._DP_RANK, dp_attention._DP_SIZE = 0, 1
        self.tp_group = self.attention_tp_group = alone
        return MEMORY_GB

    def load_model(self) -> None:
        self.model = Model(self.card)
        self.sliding_window_size = None
        self.dtype = self.model_config.dtype

    def profile_max_num_token(self, total_gpu_memory: float) -> int:
        return int(self.server_args.max_total_tokens)

    def initialize(self, *given: Any) -> None:
        super().initialize(*given)
        self.init_cuda_graphs()  # left out where the device is called "cpu"
        pool = self.req_to_token_pool
        self.answers = torch.zeros((pool.size, pool.max_context_len), dtype=torch.int32)


class PacedWorker(tp_worker.TpModelWorker):  # type: ignore[misc]
    def forward_batch_generation(
        self, model_worker_batch: Any, launch_done: Any = None, skip_sample: bool = False
    ) -> Any:
        card = PacedRunner.card
        card.begin("decode" if model_worker_batch.forward_mode.is_decode() else "prefill")
        captured = self.model_runner.cuda_graph_runner.capture_bs
        card.program.sizes = [worker.size_of(model_worker_batch, model_worker_batch.seq_lens, captured)]
        with card.counting():
            done = super().forward_batch_generation(model_worker_batch, launch_done, skip_sample)
        card.launched()
        return done


class Client(overlap_thread.TpModelWorkerClient):  # type: ignore[misc]
    """SGLang's client of its forward thread, with the waits that were asked for, and their time."""

    sync: ClassVar[Sync]

    def resolve_batch_result(self, bid: int) -> Any:
        self.asked_ns = perf_counter_ns()
        done = self.sync.resolve(overlap_thread.TpModelWorkerClient.resolve_batch_result, self, bid)
        self.resolved_ns = perf_counter_ns()
        return done

    @property
    def parent_process(self) -> Any:
        """The process that SGLang's forward thread ends once it has logged what broke: the harness, here."""
        return SimpleNamespace(send_signal=lambda signal: self.output_queue.put(Broken(sys.exc_info()[1])))

    @parent_process.setter
    def parent_process(self, process: Any) -> None:
        pass


@dataclass(frozen=True)
class Broken:
    """Stands in for a result, where the forward thread has ended by this."""

    error: BaseException | None

    def __iter__(self) -> Iterator[Any]:
        raise EngineError(f"SGLang's forward thread ended: {self.error!r}") from self.error


def install(card: Card, sync: Sync) -> None:
    """Have SGLang make these in the place of its own."""
    PacedRunner.card = Wrapper.card = card
    Client.sync = sync
    model_runner.MHATokenToKVPool = UnfilledPool
    cuda_graph_runner.torch = torch_without_cuda()
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    flashinfer.get_seq_lens, flashinfer._get_range_buf = lengths, counted
    tp_worker.ModelRunner = PacedRunner
    tp_worker.broadcast_pyobj = lambda data, *given: data  # to nobody
    scheduler.TpModelWorker = overlap_thread.TpModelWorker = PacedWorker
    scheduler.TpModelWorkerClient = Client
    scheduler.create_grammar_backend = lambda *given: None  # no request brings a grammar
