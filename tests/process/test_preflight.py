"""What an engine says before it boots, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engines import api
from harness.plan.design import Arm
from harness.run import hosts, session
from harness.run.events import Booting, Said

NAMES = ("before", "after", "third")
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


def test_an_arm_is_asked_once_before_any_boots_and_only_where_its_engine_has_something_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, said = list[str](), list[str]()
    monkeypatch.setattr(session, "check_preflight", lambda arm: asked.append(arm.name))
    monkeypatch.setattr(session.Session, "_boot", lambda self, arms, on_booting: 1 / 0)

    def note(event: Booting | Said) -> None:
        assert isinstance(event, Said)
        said.append(event.line)

    for preflight, expected in ((True, ["before", "after"]), (False, [])):
        spec = api.EngineSpec("choosy", "", (), build="choosy_engine:build", preflight=preflight)
        monkeypatch.setattr(session, "spec_of", lambda arm, spec=spec: spec)
        asked.clear(), said.clear()
        arms = [arm("16"), arm("32"), arm("32")]
        named = [msgspec.structs.replace(each, name=name) for each, name in zip(arms, NAMES, strict=True)]
        with session.Session() as booting, pytest.raises(ZeroDivisionError):
            booting.boot(named, note)
        assert asked == expected
        assert said == [f"asking whether {name} can run here, before anything boots" for name in expected]
