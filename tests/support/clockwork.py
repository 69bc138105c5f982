"""Installs the clockwork engine beside the others, for a `bench` in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.places import ROOT

SUPPORT = Path(__file__).resolve().parent
ENTRY_POINTS = "[bench.engines]\nclockwork = clockwork_engine:SPEC\n"
CLOCKWORK = (
    *("--engine", "clockwork", "--no-pretok", "--rounds", "2"),
    *("--num-requests", "8", "--max-new-tokens", "8"),
)


def installed(where: Path) -> dict[str, str]:
    """An environment in which the clockwork engine is an installed distribution, and what comes first on the
    path is a project that has its own `engines` and `harness`."""
    information = where / "clockwork-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: clockwork\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    places = (SUPPORT / "a_project", ROOT, SUPPORT, where, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, places))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
