"""Installs the clockwork engine beside the others, for a `bench` in a process of its own."""

import os
from pathlib import Path

from tests.support.places import ROOT

SUPPORT = Path(__file__).resolve().parent
CLOCKWORK = (
    *("--engine", "clockwork", "--no-pretok", "--rounds", "2"),
    *("--num-requests", "8", "--max-new-tokens", "8"),
)


def distribution(where: Path, name: str, **engines: str) -> None:
    """Make a folder of the path one into which that distribution, with these engines, was installed."""
    information = where / f"{name}-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entries = "".join(f"{engine} = {place}\n" for engine, place in engines.items())
    (information / "entry_points.txt").write_text(f"[bench.engines]\n{entries}")


def installed(where: Path, **more: str) -> dict[str, str]:
    """An environment in which the clockwork engine, and `more`, are those of an installed distribution, and
    what comes first on the path is a project that has its own `engines` and `harness`."""
    distribution(where, "clockwork", clockwork="clockwork_engine:SPEC", **more)
    places = (SUPPORT / "a_project", ROOT, SUPPORT, where, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, places))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
