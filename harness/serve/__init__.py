"""`bench serve`: an engine behind an OpenAI-compatible server, and a mock of one whose timing is known.

Needs the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engines.api import BadSetting


@contextmanager
def needs_extra() -> Iterator[None]:
    """Around the imports of what the extra brings: a missing package becomes one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"bench serve needs {error.name}, which the extra `serve` brings: pip install -e '.[serve]'"
        ) from error
