"""SGLang's scheduler, which records each step, is fed from outside, and can be stopped between two steps."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import zmq
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.server_args import PortArgs, ServerArgs

from overlap_bench.engines.paced.device import Device
from overlap_bench.engines.sglang.toggles import Settings, check_in_force
from overlap_bench.engines.sglang_base.engine import SglangEngine
from overlap_bench.engines.sglang_base.scheduler import Recorded
from overlap_bench.engines.sglang_base.worker import size_of

NOBODY = PortArgs(
    tokenizer_ipc_name="",
    scheduler_input_ipc_name="",
    detokenizer_ipc_name="",
    nccl_port=0,
    rpc_ipc_name="",
    metrics_ipc_name="",
    tokenizer_worker_ipc_name=None,
    decoupled_spec_ipc_config=None,
)


class Wire:
    """A socket by which nothing comes, and by which everything is lost once it is packed."""

    def recv(self, flags: int = 0) -> bytes:
        raise zmq.Again

    def send(self, packed: bytes, flags: int = 0) -> None:
        pass

    def recv_pyobj(self, flags: int = 0) -> Any:
        return pickle.loads(self.recv(flags))

    def send_pyobj(self, said: Any, flags: int = 0, protocol: int = pickle.DEFAULT_PROTOCOL) -> None:
        self.send(pickle.dumps(said, protocol), flags)


class Inbox(Wire):
    """The socket that requests come by. `feed` gives what has come, and may sleep; it is asked once for each
    time that SGLang empties the socket."""

    def __init__(self, feed: Callable[[], list[Any]]) -> None:
        self._feed = feed
        self._asked = False
        self._left: deque[bytes] = deque()

    def send(self, packed: bytes, flags: int = 0) -> None:
        self._left.append(packed)

    def recv(self, flags: int = 0) -> bytes:
        if not self._asked:
            self._asked = True
            for each in self._feed():
                sock_send(self, each)
        if self._left:
            return self._left.popleft()
        self._asked = False
        raise zmq.Again


class Outbox(SenderWrapper):  # type: ignore[misc]
    """What SGLang sends its detokenizer by: each message is packed as for a process that isn't there, with
    which SGLang's own work ends (`packed`), and said."""

    def __init__(self, say: Callable[[Any], None], packed: Callable[[], None]) -> None:
        super().__init__(Wire())
        self._say, self._packed = say, packed

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        super().send_output(output, recv_obj)
        self._packed()
        self._say(output)


class Streamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """Tells when a step's tokens are appended, and when its output is sent."""

    loop: Loop

    def stream_output(self, *given: Any, **named: Any) -> None:
        if self.loop.processing is None:  # a request that was refused
            super().stream_output(*given, **named)
            return
        self.loop.appended()
        super().stream_output(*given, **named)
        self.loop.steps.said()


class Loop(Recorded, Scheduler):  # type: ignore[misc]
    """SGLang's scheduler."""

    def __init__(self, arguments: ServerArgs, card: Device, engine: SglangEngine, toggles: Settings) -> None:
        self._unchecked: Settings | None = toggles  # until its first step
        self.processing: Any = None  # the batch whose results are
        super().__init__(engine, card, arguments, NOBODY)

    # -- what it makes ---------------------------------------------------------------------------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.recv_from_tokenizer = Inbox(self.engine.feed)
        self.load_snapshot_writer = None
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=self.recv_from_tokenizer,
            recv_from_rpc=Wire(),
            send_to_tokenizer=SenderWrapper(Wire()),
            send_to_detokenizer=Outbox(self.engine.say, lambda: self.steps.said()),
            send_metrics_from_scheduler=None,
        )

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return Streamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        self.output_streamer.loop = self

    # -- what is asked of it ---------------------------------------------------------------------------------

    @property
    def answers(self) -> Any:
        """Table in which the worker looks tokens up."""
        return self.tp_worker.model_runner.answers

    def finish_begun(self) -> None:
        """Do what its loop does where there is nothing to run: the step in flight is processed, and the next
        one starts the pipeline anew."""
        if not self.enable_overlap or not self.result_queue:
            return
        self._parking = True
        plan = super().get_next_batch_to_run(self.running_batch, self.last_batch)  # merges a prefill
        self._parking = False
        self.running_batch = plan.running_batch
        self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = None

    # -- what its loop calls ---------------------------------------------------------------------------------

    def get_new_batch_prefill(self, running_batch: Any) -> NextBatchPlan:
        if self._parking:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan = super().get_new_batch_prefill(running_batch)
        for request in plan.batch_to_run.reqs if plan.batch_to_run else ():
            self.engine.admit(request.rid, request.kv.req_pool_idx)
        return plan

    def update_running_batch(self, batch: Any) -> Any:
        return None if self._parking else super().update_running_batch(batch)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """Count those whose KV slots others got."""
        self.steps.preempted += is_retracted
        super()._add_request_to_queue(req, is_retracted)

    def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.scheduled()
        self.add(batch)
        card, runner = self.card, self.tp_worker.model_runner
        card.begin("decode" if batch.forward_mode.is_decode() else "prefill")
        captured = runner.decode_cuda_graph_runner.capture_bs
        card.program.sizes = [size_of(batch, batch.seq_lens_cpu, captured)]
        with card.counting():
            result = super().run_batch(batch, pp_proxy_tensors)
        card.launched()  # sampling and the copy to the host, too
        if self._unchecked is not None:
            check_in_force(self._unchecked, self, result)
            self._unchecked = None
        return result

    def launch_batch_sample_if_needed(self, batch_result: Any, cur_batch: Any) -> Any:
        """Count and charge what sampling asks of torch where it is launched later (toggle `sample`)."""
        if batch_result is None or batch_result.delay_sample_func is None:
            return None
        with self.card.delayed():
            return super().launch_batch_sample_if_needed(batch_result, cur_batch)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        program = self.card.programs[0]
        if result.copy_done is None:  # as its normal loop has it: reading the tokens waits for them
            self.card.wait(program.end_ns + self.card.ledger.copy_ns, program)
        self.count_dropped(batch)
        self.processing = batch
        super().process_batch_result(batch, result)
        self.processing = None

    def appended(self) -> None:
        """Record the step, whose tokens are appended."""
        steps, program = self.steps, self.card.programs.popleft()
        steps.delay.spend("append")
        steps.finished(self._dropped, program.woke_ns, perf_counter_ns(), program)
