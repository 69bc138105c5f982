"""SGLang's scheduler, which records each step, is fed from outside, and can be stopped between two steps."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import PortArgs, ServerArgs

from overlap_bench.engines.sglang_044.card import Card
from overlap_bench.engines.sglang_044.toggles.sync import launch_and_copy
from overlap_bench.engines.sglang_044.worker import Client
from overlap_bench.engines.sglang_base.engine import SglangEngine
from overlap_bench.engines.sglang_base.scheduler import Recorded

NOBODY = PortArgs(
    tokenizer_ipc_name="inproc://tokenizer",
    scheduler_input_ipc_name="inproc://scheduler",
    detokenizer_ipc_name="inproc://detokenizer",
    nccl_port=0,
)


class Loop(Recorded, Scheduler):  # type: ignore[misc]
    """SGLang's scheduler."""

    def __init__(self, arguments: ServerArgs, card: Card, engine: SglangEngine) -> None:
        super().__init__(engine, card, arguments, NOBODY, 0, 0, None)
        self.send_to_detokenizer = SimpleNamespace(send_pyobj=self._send)
        self.send_to_tokenizer = SimpleNamespace(send_pyobj=lambda message: None)

    @property
    def answers(self) -> Any:
        """Table in which the worker looks tokens up."""
        worker = self.tp_worker.worker if self.enable_overlap else self.tp_worker
        return worker.model_runner.answers

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
        return self.engine.feed()

    def get_new_batch_prefill(self) -> Any:
        batch = None if self._parking else super().get_new_batch_prefill()
        for request in batch.reqs if batch else ():
            self.engine.admit(request.rid, request.req_pool_idx)
        return batch

    def update_running_batch(self, batch: Any) -> Any:
        return batch if self._parking else super().update_running_batch(batch)

    def _extend_requests_to_queue(self, requests: Sequence[Any]) -> None:
        """Count those whose KV slots others got."""
        self.steps.preempted += len(requests)
        super()._extend_requests_to_queue(requests)

    def run_batch(self, batch: Any) -> Any:
        self.scheduled()
        if not self.enable_overlap:  # it runs in here
            self.add(batch)
            return super().run_batch(batch)
        result = super().run_batch(batch)
        self.add(batch)
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        if result is None:  # SGLang's dummy, which starts the pipeline
            super().process_batch_result(batch, result)
            return
        self.count_dropped(batch)
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
        self.steps.said()  # with which SGLang's own work ends
        self.engine.say(message)
