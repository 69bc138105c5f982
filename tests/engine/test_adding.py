"""A toggle is a file among the toggles, and a pair in variants.toml: nothing else is written for it."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC, TOGGLES, engine, toggles
from overlap_bench.harness.plan import variants
from tests.support.in_process_engine import serve, some_requests

FILE = '''
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.overlap.loop import Loop

TOGGLE = Toggle(
    name="tally", module=__name__, choices=("off", "on"), source="mine",
    changes="whether it is counted how often a batch is asked for", counters=("asked",),
)


@contextmanager
def counting(loop: Loop) -> Iterator[None]:
    """After."""
    compose = loop.scheduler.compose

    def compose_and_count(scheduler):
        loop.counters["asked"] += 1
        return compose(scheduler)

    loop.scheduler.compose = compose_and_count
    yield


SERVING = {"off": nullcontext, "on": counting}
'''
PAIR = """
[tallied]
title = "Count how often a batch is asked for"
source = "mine"
claim = "none yet"
base = "serial"
before.tally = "off"
after.tally = "on"
expect = {}
"""


def test_a_toggle_takes_its_own_file_and_a_pair(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tally.py").write_text(FILE)
    monkeypatch.setattr(toggles, "__path__", [*toggles.__path__, str(tmp_path)])
    try:
        found = {each.TOGGLE.name: each for each in toggles.found()}
    finally:
        sys.modules.pop(f"{toggles.__name__}.tally", None)
    assert [*found] == [*TOGGLES, "tally"]
    spec = replace(SPEC, toggles=tuple(each.TOGGLE for each in found.values()))
    monkeypatch.setattr(engine, "SPEC", spec)
    monkeypatch.setattr(engine, "TOGGLES", found)

    tables = variants._tables()
    monkeypatch.setattr(variants, "_tables", lambda: tables | tomllib.loads(PAIR))
    pair = variants.load_variants()["tallied"]
    assert pair.changes == ["tally"]
    requests, said = some_requests(4), {}
    for arm in (pair.before, pair.after):
        settings = spec.check(arm)
        tokens, _, record = serve(device, settings, requests, model="micro-gpt2")
        said[settings["tally"]] = tokens, record.counters.get("asked", 0)
    assert said["off"][0] == said["on"][0]
    assert said["off"][1] == 0 < said["on"][1]
