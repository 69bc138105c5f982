"""Stop strings: what is sent, what is held back, and what is dropped."""

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from overlap_bench.engines import api
from overlap_bench.engines.output import Opening, OutputProcessor, Produced, Stopped
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.toggles.output import InProcess
from overlap_bench.engines.presets import load_tokenizer
from tests.engine.conftest import CHAOS_SEED
from tests.support.in_process_engine import Collected, column, serve

TOKENIZERS = {model: load_tokenizer(model, 4096) for model in ("tiny-gpt2", "tiny-llama")}
TOKENIZER = TOKENIZERS["tiny-gpt2"]


def finish(reason: str, tokens: int = 0) -> api.Finish:
    return api.Finish(1, reason, 3, tokens, 0, 0, 0)


def process(
    text: str, stops: list[str], interval: int = 1, behind: int = 0
) -> tuple[list[api.Event], list[Stopped], int]:
    """Events and what was told, of an engine that hears of a stop `behind` tokens later; tokens in all."""
    sink, told = Collected(), list[Stopped]()
    processor = OutputProcessor(TOKENIZER, interval, sink, told.extend)
    ids = TOKENIZER.encode(text).ids
    processor.open(Opening(stops, finish("stop")))
    left: int | None = None
    for place, token in enumerate(ids):
        last = finish("length", len(ids)) if place == len(ids) - 1 else None
        processor.process([Produced(1, token, place, last)])
        if told and left is None:
            left = behind
        if left == 0 and last is None:
            processor.close(1)
            break
        left = None if left is None else left - 1
    assert not processor._streams, "a request that is over is forgotten"
    return sink.events, told, len(ids)


def sent_text(events: list[api.Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, api.Chunk))


def sent_tokens(events: list[api.Event]) -> list[int]:
    return [token for event in events if isinstance(event, api.Chunk) for token in event.token_ids]


words = st.text(alphabet="ab c", min_size=1, max_size=40)
stop_strings = st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300)
@given(text=words, stops=stop_strings, interval=st.integers(1, 4), behind=st.integers(0, 3))
def test_text_ends_before_a_stop_string_and_tokens_with_the_one_that_completes_it(
    text, stops, interval, behind
):
    events, _, tokens = process(text, stops, interval, behind)
    ids = TOKENIZER.encode(text).ids
    # The first token with which the text holds a stop string, and the first stop string in that text.
    at = next((n for n in range(1, tokens + 1) if any(s in TOKENIZER.decode(ids[:n]) for s in stops)), None)
    known = TOKENIZER.decode(ids[:at])
    expected = known if at is None else known[: min(known.find(s) for s in stops if s in known)]
    assert sent_text(events) == expected
    assert sent_tokens(events) == ids[:at]
    ends = [event for event in events if isinstance(event, api.Finish)]
    assert [(end.reason, end.completion_tokens) for end in ends] == [
        ("length", tokens) if at is None else ("stop", at)
    ]
    assert events[-1] is ends[0], "nothing is sent behind the end"


def test_text_that_may_become_a_stop_string_is_held_back_and_its_tokens_are_not():
    events, _, _ = process("x a b c", [" a b d"])
    chunks = [(event.text, len(event.token_ids)) for event in events if isinstance(event, api.Chunk)]
    assert chunks == [("x", 1), ("", 1), ("", 1), (" a b c", 1)]


def test_tokens_that_come_after_the_stop_are_counted_and_never_sent():
    events, told, _ = process("one two three four five six", ["two"], behind=3)
    assert sent_text(events) == "one "
    assert told == [Stopped(1, 0), Stopped(1, 1), Stopped(1, 1), Stopped(1, 1)]


# -- in the engine ----------------------------------------------------------------------------------------

SHARED = {"h2d": "pinned", "graph": "on"}
CHOICES = [
    SPEC.check(SHARED | {"schedule": "serial", "output": "inline"}),
    SPEC.check(SHARED | {"schedule": "serial", "output": "deferred"}),
    SPEC.check(SHARED | {"schedule": "serial", "output": "process"}),
    SPEC.check(SHARED | {"schedule": "overlap", "output": "inline", "launch": "inline"}),
    SPEC.check(SHARED | {"schedule": "overlap", "output": "process", "launch": "thread"}),
]


def name(settings: dict[str, str]) -> str:
    return f"{settings['schedule']}-{settings['output']}"


def outcome(events: list[api.Event], request: int) -> tuple[str, list[int], str, int]:
    own = [event for event in events if event.id == request]
    end = own[-1]
    assert isinstance(end, api.Finish), end
    return sent_text(own), sent_tokens(own), end.reason, end.completion_tokens


@pytest.fixture(scope="module")
def stopping(device) -> tuple[list[api.Request], list[api.Event]]:
    """Requests that stop at something in the middle of their text, and what they give without a stop."""
    requests = [api.Request(number, [number * 31 + 5, 77, number + 9], 24) for number in range(6)]
    _, events, _ = serve(device, CHOICES[0], requests, max_batch_size=4)
    texts = [outcome(events, request.id)[0] for request in requests]
    stops = [[text[len(text) // 2 :][:3], "never in it"] for text in texts]
    return [msgspec.structs.replace(each, stop=stops[each.id]) for each in requests], events


@pytest.mark.parametrize("settings", CHOICES, ids=name)
def test_every_output_choice_stops_at_the_same_text_and_token(
    chaotic_device, monkeypatch, stopping, settings
):
    requests, without = stopping
    if name(settings) == "serial-process":
        # A quick process may tell of every stop before the next step, which is a race; here it is heard late.
        listen, heard = InProcess.stopped, deque([(), ()])

        def late_by_a_step(self):
            heard.append(listen(self))
            return heard.popleft()

        monkeypatch.setattr(InProcess, "stopped", late_by_a_step)
    options = {"max_batch_size": 4, "stream_interval": 5, "chaos": CHAOS_SEED}
    _, events, record = serve(chaotic_device, settings, requests, **options)
    for request in requests:
        text, tokens, reason, count = outcome(events, request.id)
        whole_text, whole, _, _ = outcome(without, request.id)
        assert text == whole_text[: whole_text.index(request.stop[0])]
        assert tokens == whole[:count]
        assert reason == "stop"
        before = TOKENIZER.decode(whole[: count - 1])
        assert request.stop[0] not in before, "it was known a token earlier"
    dropped = sum(column(record, "dropped")) + record.counters.get("stop_dropped_tokens", 0)
    late = settings["schedule"] == "overlap" or settings["output"] != "inline"
    assert dropped > 0 if late else dropped == 0


def test_an_id_may_come_again_as_soon_as_its_text_has_stopped(device, monkeypatch, stopping):
    """Here the engine does not listen to its output process until the id has come again."""
    requests, _ = stopping
    first = requests[0]
    again = msgspec.structs.replace(first, stop=[])
    settings = SPEC.check(SHARED | {"schedule": "overlap", "output": "process"})
    asked: list[bool] = []
    listen = InProcess.stopped
    monkeypatch.setattr(InProcess, "stopped", lambda self: listen(self) if asked else ())

    def ask_again(engine: api.Engine, events: list[api.Event]) -> None:
        ended = any(isinstance(event, api.Finish) and event.id == first.id for event in events)
        if ended and not asked:
            asked.append(True)
            engine.submit(again)

    _, events, _ = serve(device, settings, requests, meanwhile=ask_again, ends=len(requests) + 1)
    own = [event for event in events if event.id == first.id]
    ends = [place for place, event in enumerate(own) if isinstance(event, api.Finish)]
    assert len(ends) == 2
    assert len(sent_tokens(own[ends[0] + 1 :])) == again.max_new_tokens


def sent(tokenizer: Tokenizer, ids: list[int], interval: int = 1) -> list[api.Event]:
    """The events of a request that has these tokens."""
    sink = Collected()
    processor = OutputProcessor(tokenizer, interval, sink, lambda told: None)
    for place, token in enumerate(ids, 1):
        last = finish("length", place) if place == len(ids) else None
        processor.process([Produced(1, token, place - 1, last)])
    return sink.events


@pytest.mark.parametrize("model", TOKENIZERS)
@given(ids=st.lists(st.integers(0, 4095), min_size=1, max_size=30), interval=st.integers(1, 8))
@settings(max_examples=150)
def test_the_chunks_together_are_the_text_of_all_tokens(model: str, ids: list[int], interval: int) -> None:
    """Half a character at the end included, for which no further token comes."""
    tokenizer = TOKENIZERS[model]
    assert sent_text(sent(tokenizer, ids, interval)) == tokenizer.decode(ids)


def byte_fallback() -> Tokenizer:
    """A decoder like Llama 2's: bytes that are no character read as one replacement each, until more come."""
    vocabulary = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return tokenizer


@given(ids=st.lists(st.integers(1, 257), min_size=1, max_size=60))
def test_a_decoder_that_loses_its_place_ends_no_request(ids: list[int]) -> None:
    assert sent_tokens(sent(byte_fallback(), ids)) == ids


def test_a_decoder_that_loses_its_place_loses_no_half_of_a_character() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(token) for token in ("<0x60>", "<0xCE>", "a", "a")]
    assert sent_text(sent(tokenizer, ids)) == "`\ufffdaa"  # read as a whole, 0x60 is lost as well


def test_an_output_process_that_can_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(api.EngineError, match=r"the output process \(pid \d+\) did not start"):
        InProcess("ipc:///nowhere", "tiny-gpt2", 4096, 8, {})
