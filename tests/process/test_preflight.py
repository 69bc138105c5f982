"""What an engine says before it boots, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import api
from harness.plan.design import Arm
from harness.run import hosts

ENGINE = """
import sys
from engines import api

class Choosy(api.Engine):
    def __init__(self, toggles):
        self.toggles = toggles

    def preflight(self):
        print("loading", file=sys.stderr)
        if self.toggles["heads"] == "16":
            raise api.BadSetting("heads of 16 have no kernel")
        if self.toggles["heads"] == "0":
            raise ZeroDivisionError("no heads")

def build(options, toggles):
    return Choosy(toggles)
"""


def arm(heads: str) -> Arm:
    return Arm(name="after", engine="choosy", options=api.EngineOptions(), toggles={"heads": heads})


@pytest.fixture(autouse=True)
def choosy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "choosy_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = api.EngineSpec("choosy", "", (), build="choosy_engine:build", preflight=True)
    monkeypatch.setattr(hosts, "spec_of", lambda arm: spec)


def test_what_can_not_work_is_refused_in_the_engines_own_words() -> None:
    with pytest.raises(api.BadSetting, match=r"^after can't run: heads of 16 have no kernel$"):
        hosts.check_preflight(arm("16"))
    hosts.check_preflight(arm("32"))


def test_an_engine_that_breaks_while_it_is_asked_has_failed() -> None:
    with pytest.raises(
        hosts.RunFailed, match=r"^after failed before it booted: ZeroDivisionError: no heads$"
    ):
        hosts.check_preflight(arm("0"))


def test_an_engine_that_has_nothing_to_say_is_not_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "spec_of", lambda arm: api.EngineSpec("choosy", "", (), build="none:none"))
    hosts.check_preflight(arm("16"))
