"""Holds unit tests to what they are: they start no process, and bring no torch."""

import sys
from collections.abc import Iterator

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
_running: list[str] = []


def _refuse(event: str, _: tuple[object, ...]) -> None:
    if event in STARTS and _running:
        raise RuntimeError(f"{_running[0]} starts a process: it belongs into tests/process")


sys.addaudithook(_refuse)  # for good: a hook can't be taken back


@pytest.fixture(autouse=True)
def light(request: pytest.FixtureRequest) -> Iterator[None]:
    before = "torch" in sys.modules  # another folder's tests may have brought it into this process
    _running.append(request.node.nodeid)
    yield
    _running.clear()
    assert before or "torch" not in sys.modules, "it imports torch: it belongs into tests/engine"
