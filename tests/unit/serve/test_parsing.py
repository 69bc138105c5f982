"""A request's body that no JSON parser should have to meet."""

from __future__ import annotations

import pytest

from harness.serve.parsing import Refused, Served, parse_chat, parse_completion

SERVED = Served(model="m", context=64, temperature=0.0)
DEEP = b"[" * 100_000
BODIES = {
    "a list": DEEP,
    "a prompt": b'{"prompt": ' + DEEP + b"}",
    "a closed prompt": b'{"prompt": ' + DEEP + b"]" * len(DEEP) + b"}",
    "messages": b'{"messages": ' + DEEP + b"]" * len(DEEP) + b"}",
    "a field that is not looked at": b'{"prompt": "x", "user": ' + DEEP + b"]" * len(DEEP) + b"}",
    "a field that must be neutral": b'{"prompt": "x", "best_of": ' + DEEP + b"]" * len(DEEP) + b"}",
}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "\\r\\n\\u001b[2J": 1}',
        b'{"prompt": "x", "model": "a\\nb"}',
        b'{"prompt": "x", "n": [\n2]}',
    ],
)
def test_what_a_client_sent_is_quoted_on_one_line_without_control_characters(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse_completion(body, SERVED)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_too_deep_is_refused(body: bytes, parse: object) -> None:
    with pytest.raises(Refused) as refused:
        parse(body, SERVED)  # type: ignore[operator]
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)
