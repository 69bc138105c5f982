"""Each guard of the engine, taken out: the outputs must then be wrong, or the guard guards nothing.

Chaos holds back device streams and the forward thread at random, so that what can overtake does.
"""

from __future__ import annotations

import pytest

from engines import api
from engines.overlap import SPEC, scheduler
from engines.overlap.forward import Forward
from engines.overlap.toggles.d2h import BehindEvent
from engines.overlap.toggles.h2d import PinnedSet
from tests.conftest import CHAOS_SEED
from tests.serving import generated, serve

REQUESTS = [api.Request(number, [number * 37 % 4000 + 1, 11, number + 5], 24) for number in range(4)]

INLINE = {"schedule": "overlap", "launch": "inline", "h2d": "pinned", "graph": "on"}
THREAD = {"schedule": "overlap", "launch": "thread", "sync": "copy-done", "h2d": "pinned", "graph": "on"}
THREAD_PAGEABLE = THREAD | {"h2d": "pageable"}
SERIAL = {"schedule": "serial", "d2h": "event", "h2d": "pinned", "graph": "on"}


def wrong_requests(device, settings: dict[str, str]) -> int:
    """How many requests got other tokens than generate() gives."""
    expected = generated("tiny-gpt2", REQUESTS)
    tokens, _, _ = serve(device, SPEC.check(settings), REQUESTS, max_batch_size=4, chaos=CHAOS_SEED)
    return sum(tokens[number] != expected[number] for number in expected)


def keep_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decode batch share one set of lists, rewritten in place by the next schedule."""
    shared: dict[str, list[int]] = {}
    build = scheduler.decode_batch

    def rewrite(*arguments: object) -> scheduler.Batch:
        batch = build(*arguments)  # type: ignore[arg-type]
        for key, values in batch.values.items():
            if isinstance(values, list):
                shared.setdefault(key, [])[:] = values
                batch.values[key] = shared[key]
        return batch

    monkeypatch.setattr(scheduler, "decode_batch", rewrite)


@pytest.mark.parametrize("settings", [INLINE, THREAD, SERIAL], ids=["inline", "thread", "serial"])
def test_with_every_guard_in_place_the_tokens_are_right(chaotic_device, settings):
    assert wrong_requests(chaotic_device, settings) == 0


@pytest.mark.parametrize("settings", [INLINE, THREAD], ids=["inline", "thread"])
def test_rewriting_a_pinned_set_before_its_copies_are_done_gives_wrong_tokens(
    chaotic_device, monkeypatch, settings
):
    monkeypatch.setattr(PinnedSet, "wait_until_read", lambda self: None)
    assert wrong_requests(chaotic_device, settings) > 0


@pytest.mark.parametrize("settings", [INLINE, SERIAL], ids=["inline", "serial"])
def test_reading_ids_before_copy_done_gives_wrong_tokens(chaotic_device, monkeypatch, settings):
    monkeypatch.setattr(BehindEvent, "wait_copy_done", lambda self, step: None)
    assert wrong_requests(chaotic_device, settings) > 0


def test_overwriting_sampled_ids_before_they_are_copied_gives_wrong_tokens(chaotic_device, monkeypatch):
    monkeypatch.setattr(Forward, "fence", lambda self: None)
    assert wrong_requests(chaotic_device, INLINE) > 0


def test_a_batch_that_changes_after_it_was_handed_over_gives_wrong_tokens(chaotic_device, monkeypatch):
    assert wrong_requests(chaotic_device, THREAD_PAGEABLE) == 0
    keep_no_snapshot(monkeypatch)
    assert wrong_requests(chaotic_device, THREAD_PAGEABLE) > 0
