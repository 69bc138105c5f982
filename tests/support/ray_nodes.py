"""A Ray cluster for a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from experiments.common.ray_nodes import Nodes


@contextmanager
def nodes(environment: Mapping[str, str]) -> Iterator[Nodes]:
    """A cluster while inside. Skips where Ray is not installed."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    made = Nodes(environment)
    try:
        yield made
    finally:
        made.stop()
