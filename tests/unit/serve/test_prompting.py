"""Templates of a model's author, which may do anything: what of it reaches the client."""

from __future__ import annotations

import pytest

from harness.serve import prompting
from harness.serve.parsing import Refused
from harness.serve.prompting import Messages, Prompting


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), ValueError("roles alternate")])
def test_a_template_that_breaks_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def render(messages: Messages) -> str:
        raise error

    monkeypatch.setattr(prompting, "load_template", lambda model: render)
    with pytest.raises(Refused) as refused:
        Prompting({"name": "m", "context": 64}).prompt([{"role": "user", "content": "Hello"}])
    assert refused.value.status == 400
    assert refused.value.message.endswith(f"refuses these messages: {str(error) or 'MemoryError'}")
