"""What a call is refused with."""

from collections.abc import Callable

import pytest

from overlap_bench.engines.api import BadSetting


def refusal(call: Callable[[], object], error: type[Exception] = BadSetting) -> str:
    """The one line that it raises."""
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
