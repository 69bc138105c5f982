"""A model that spans several devices: the tokens of one, and one line that names the rank where it fails.

Each boot of a rank starts two processes, so there are few of them here, and each shows several things.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.engine import OverlapEngine
from overlap_bench.harness.run.records import steps_frame
from tests.engine.conftest import CHAOS_SEED
from tests.engine.test_tokens import DRAFTS, EIGHT, INLINE, THREAD, some_sampled_requests
from tests.support.in_process_engine import Collected, near_ties, sampled, serve, some_requests
from tests.support.processes import ends


def two_ranks(settings: dict[str, str], share: str) -> dict[str, str]:
    return SPEC.check(settings | {"ranks": "2", "share": share})


def test_two_ranks_give_the_tokens_of_transformers(device):
    requests, asked = some_requests(8), {"model": "tiny-llama", "max_batch_size": 6, "stream_interval": 3}
    tokens, _, record = serve(device, two_ranks(INLINE, "pickle"), requests, **asked)
    assert near_ties("tiny-llama", requests, tokens) == 0
    assert record.counters["shared_steps"] == record.steps.rows
    times = steps_frame(record)
    both = times[["device_start_ns.1", "device_start_ns", "device_end_ns.1", "device_end_ns"]].to_numpy()
    assert (both > 0).all()
    assert (both[:, :2].max(axis=1) < both[:, 2:].min(axis=1)).all()  # neither ends before both have begun


@pytest.mark.parametrize(
    ("model", "settings", "share"),
    [
        ("tiny-gpt2", THREAD, "pickle"),
        ("tiny-gpt2", DRAFTS, "ring"),
        ("tiny-llama", EIGHT, "ring"),
    ],
    ids=["gpt2-thread-pickle", "gpt2-drafts-ring", "llama-chunks-ring"],
)
def test_two_ranks_give_the_tokens_of_transformers_under_chaos(chaotic_device, model, settings, share):
    """Every rank's streams are held back at random, each in its own way; and blocks run out."""
    requests = some_requests(8)
    tight = {"block_size": 4, "num_blocks": 1 + 24, "max_context": 96, "chunk_tokens": 16}
    tokens, _, _ = serve(
        chaotic_device,
        two_ranks(settings, share),
        requests,
        model=model,
        max_batch_size=5,
        chaos=CHAOS_SEED,
        **tight,
    )
    assert near_ties(model, requests, tokens) == 0


def test_two_ranks_sample_the_same_tokens_as_one(chaotic_device):
    """Or each would go on with another text than the other."""
    requests = some_sampled_requests()
    options = {"sampling": True, "max_batch_size": 6, "max_context": 64, "prefix_cache": True}
    settings = two_ranks(INLINE, "ring")
    tokens, _, _ = serve(chaotic_device, settings, requests, chaos=CHAOS_SEED, **options)
    assert tokens == sampled("tiny-gpt2", requests)


@contextmanager
def running(
    device, share: str = "ring", **options: object
) -> Iterator[tuple[OverlapEngine, api.Description]]:
    """An engine of two ranks that has requests."""
    engine = OverlapEngine(
        api.EngineOptions(max_batch_size=4, **options),  # type: ignore[arg-type]
        two_ranks(INLINE, share),
        device=device,
    )
    try:
        described = engine.start(Collected())
        for request in some_requests(4):
            engine.submit(request)
        yield engine, described
    finally:
        engine.stop()


def test_an_engine_of_two_ranks_names_their_processes_drains_them_and_leaves_none(device):
    with running(device) as (engine, described):
        roles = {"rank 1", "device of rank 1"}
        assert roles <= described.pids.keys()
        pids = [described.pids[role] for role in roles]
        steps = iter(range(4))

        def pump(timeout: float | None) -> bool:
            engine.drain()
            return next(steps, None) is not None

        engine.run(pump)
        assert engine._loop.in_flight is None
    assert all(ends(pid) for pid in pids)


@pytest.mark.parametrize(("role", "share"), [("rank 1", "pickle"), ("device of rank 1", "ring")])
def test_a_rank_that_is_killed_is_named_and_takes_nothing_with_it_that_lives_on(own_device, role, share):
    with running(own_device, share) as (engine, described):
        pids = [described.pids["rank 1"], described.pids["device of rank 1"]]
        os.kill(described.pids[role], signal.SIGKILL)
        with pytest.raises(api.EngineError) as failure:
            engine.run(lambda timeout: True)
        assert str(failure.value).startswith(f"rank 1 (pid {pids[0]})")
        assert str(failure.value).endswith("died (signal 9)")
        assert failure.value.names_process
    assert all(ends(pid) for pid in pids)


@pytest.fixture
def own_device():
    """A device that may be lost."""
    from overlap_bench.engines.devices import open_device

    opened = open_device("emulated", cores="shared")
    yield opened
    opened.close()


def test_ranks_that_can_not_divide_a_models_heads_are_refused_in_one_line(device):
    engine = OverlapEngine(api.EngineOptions(), SPEC.check({"ranks": "3"}), device=device)
    try:
        with pytest.raises(api.BadSetting, match="has 4 heads, which 3 ranks can't divide") as refusal:
            engine.start(Collected())
    finally:
        engine.stop()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("said", ["0", "two", "9"])
def test_what_is_no_number_of_ranks_is_refused_before_anything_is_started(device, said):
    engine = OverlapEngine(api.EngineOptions(), SPEC.check({"ranks": said}), device=device)
    with pytest.raises(api.BadSetting, match=f"ranks={said}: it is a number from 1 to 8"):
        engine.start(Collected())


def test_with_one_rank_nothing_is_shared_and_nothing_else_is_started(device):
    assert all("share" not in settings for settings in SPEC.every_setting())
    for settings in ({}, {"ranks": "1"}):
        engine = OverlapEngine(api.EngineOptions(), SPEC.check(settings), device=device)
        try:
            assert engine.start(Collected()).pids.keys() == {"engine", "device"}
        finally:
            engine.stop()


LET_GO = """
import os
import socket
from overlap_bench.engines.overlap.models.tensor_parallel import open_store

file = os.memfd_create("ranks")
store = open_store(f"/proc/self/fd/{file}", 1)
store.set("rank 0", "here")
os.close(file)
other = socket.socket()
assert other.fileno() == file  # which no path opens
del store
"""


def test_a_device_lets_go_of_a_model_after_whoever_made_its_ranks_has_closed_their_file():
    """Its number is another file's by then. In a process of its own, which torch would end."""
    assert subprocess.run([sys.executable, "-c", LET_GO], check=False).returncode == 0
