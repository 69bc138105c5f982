"""SGLang's scheduler, which records each step, is fed from outside, and can be stopped between two steps."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import PortArgs, ServerArgs

from overlap_bench.engines.delay import spin
from overlap_bench.engines.sglang_044.card import Card
from overlap_bench.engines.sglang_044.toggles.sync import launch_and_copy
from overlap_bench.engines.sglang_044.worker import Client
from overlap_bench.engines.steps import DECODE, PREFILL, Steps

NOBODY = PortArgs(
    tokenizer_ipc_name="inproc://tokenizer",
    scheduler_input_ipc_name="inproc://scheduler",
    detokenizer_ipc_name="inproc://detokenizer",
    nccl_port=0,
)


class Loop(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler. `feed` gives the requests that have come, and may sleep; `admit` is told of each
    request that gets a place; `say` gets each message to the detokenizer, as SGLang makes and packs it."""

    def __init__(
        self,
        arguments: ServerArgs,
        card: Card,
        feed: Callable[[], list[Any]],
        admit: Callable[[str, int], None],
        say: Callable[[Any], None],
        planted_ns: int | None,
    ) -> None:
        self.card, self.steps = card, Steps()
        card.delay = self.steps.delay
        self._feed, self._admit, self._say, self._planted_ns = feed, admit, say, planted_ns
        self._began_ns = 0
        self._parking = False
        self._dropped = 0
        super().__init__(arguments, NOBODY, 0, 0, None)
        self.send_to_detokenizer = SimpleNamespace(send_pyobj=self._send)
        self.send_to_tokenizer = SimpleNamespace(send_pyobj=lambda message: None)

    @property
    def answers(self) -> Any:
        """Table in which the worker looks tokens up."""
        worker = self.tp_worker.worker if self.enable_overlap else self.tp_worker
        return worker.model_runner.answers

    @property
    def is_left(self) -> bool:
        """Whether it has something to do, if nobody asks for more."""
        return bool(self.last_batch or self.waiting_queue or self.chunked_req or self.running_batch.reqs)

    def finish_begun(self) -> None:
        """Do what its loop does where there is nothing to run: the step in flight is processed, and the next
        one starts the pipeline anew."""
        if not self.enable_overlap or not self.result_queue:
            return
        self._parking = True
        super().get_next_batch_to_run()  # merges a prefill into the batch that decodes
        self._parking = False
        batch, result = self.result_queue.popleft()
        batch.next_batch_sampling_info = None
        self.process_batch_result(batch, result)
        self.last_batch = None

    # -- what its loop calls -------------------------------------------------------------------------------

    def recv_requests(self) -> list[Any]:
        return self._feed()

    def get_next_batch_to_run(self) -> Any:
        self._began_ns = perf_counter_ns()
        return super().get_next_batch_to_run()

    def get_new_batch_prefill(self) -> Any:
        batch = None if self._parking else super().get_new_batch_prefill()
        for request in batch.reqs if batch else ():
            self._admit(request.rid, request.req_pool_idx)
        return batch

    def update_running_batch(self, batch: Any) -> Any:
        return batch if self._parking else super().update_running_batch(batch)

    def _extend_requests_to_queue(self, requests: Sequence[Any]) -> None:
        """Count those whose KV slots others got."""
        self.steps.preempted += len(requests)
        super()._extend_requests_to_queue(requests)

    def run_batch(self, batch: Any) -> Any:
        if self._planted_ns is not None:
            self.steps.planted_ns += spin(self._planted_ns)
        self.steps.delay.spend("schedule")
        decode = batch.forward_mode.is_decode()
        kind, tokens = (DECODE, len(batch.reqs)) if decode else (PREFILL, batch.extend_num_tokens)
        if not self.enable_overlap:  # it runs in here
            self.steps.add(kind, len(batch.reqs), tokens, self._began_ns, perf_counter_ns())
            return super().run_batch(batch)
        result = super().run_batch(batch)
        self.steps.add(kind, len(batch.reqs), tokens, self._began_ns, perf_counter_ns())
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        if result is None:  # SGLang's dummy, which starts the pipeline
            super().process_batch_result(batch, result)
            return
        self._dropped = sum(each.finished() or each.is_retracted for each in batch.reqs)
        super().process_batch_result(batch, result)
        if self.enable_overlap and (wait := Client.sync.processed) is not None:
            began = perf_counter_ns()
            wait(self.tp_worker)
            self.steps.also("wait.launch_done", began, perf_counter_ns())

    def stream_output(self, *given: Any) -> None:
        """Record the step, whose tokens are appended by now, and its output."""
        steps, program = self.steps, self.card.programs.popleft()
        steps.delay.spend("append")
        if not self.enable_overlap:
            steps.finished(self._dropped, program.woke_ns, perf_counter_ns(), program)
        else:
            client = self.tp_worker
            steps.finished(self._dropped, client.resolved_ns, perf_counter_ns(), program)
            steps.also("wait.copy_done", client.asked_ns, program.woke_ns)
            if Client.sync.resolve is launch_and_copy:
                steps.also("wait.launch_done", program.woke_ns, client.resolved_ns)
        super().stream_output(*given)
        steps.said()

    def _send(self, message: Any) -> None:
        """Pack it as a socket would, for a process that isn't there."""
        pickle.dumps(message, pickle.DEFAULT_PROTOCOL)
        self._say(message)
