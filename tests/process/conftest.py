"""What several files start: `bench` with the clockwork engine, and sessions of this process."""

import tempfile
from collections.abc import Iterator

import pytest

from overlap_bench.harness.run.session import Session
from tests.support.clockwork import installed


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # a harness that is killed leaves them behind
        yield {**installed(tmp_path_factory.mktemp("site")), "TMPDIR": sockets}


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as found:
        yield found
