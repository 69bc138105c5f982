"""What an engine says before it boots, in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import hosts, preflight, session
from overlap_bench.harness.run.messages import Booting, Said

NAMES = ("before", "after", "third", "fourth")
ASKED_FOR = {"before": "before", "after": "after", "third": "after", "fourth": "fourth"}  # third is as after
ENGINE = """
import os, pathlib, sys, time
from overlap_bench.engines import api

class Choosy(api.Engine):
    def __init__(self, toggles):
        self.toggles = toggles

    def preflight(self):
        print("loading", file=sys.stderr)
        if self.toggles["heads"] == "16":
            raise api.BadSetting("heads of 16 have no kernel")
        if self.toggles["heads"] == "0":
            raise ZeroDivisionError("no heads")
        if self.toggles["heads"] == "silent":
            os._exit(0)
        if self.toggles["heads"] == "hangs":
            time.sleep(600)
        if self.toggles["heads"].startswith("meets"):
            here = pathlib.Path(__file__).parent
            (here / self.toggles["heads"]).touch()
            while len(list(here.glob("meets *"))) < 2:
                time.sleep(0.01)
        print("a library is talkative")
        return "gpu" if self.toggles["heads"] == "meets 2" else "cpu"

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
    monkeypatch.setattr(preflight, "spec_of", lambda arm: spec)


def test_what_can_not_work_is_refused_in_the_engines_own_words() -> None:
    with pytest.raises(api.BadSetting, match=r"^after can't run: heads of 16 have no kernel$"):
        preflight.check([arm("16")])
    assert preflight.check([arm("32")]) == ["cpu"]


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ("0", r"^after failed before it booted: ZeroDivisionError: no heads$"),
        ("silent", r"^after ended before it booted, and said nothing$"),
    ],
)
def test_an_engine_that_breaks_while_it_is_asked_has_failed(heads: str, said: str) -> None:
    with pytest.raises(hosts.RunFailed, match=said):
        preflight.check([arm(heads)])


def test_arms_are_asked_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers once the other is being asked."""
    monkeypatch.setattr(preflight, "PREFLIGHT_S", 60)
    assert preflight.check([arm("meets 1"), arm("meets 2")]) == ["cpu", "gpu"]


def test_where_one_is_refused_no_other_is_left() -> None:
    with pytest.raises(api.BadSetting, match="can't run: heads of 16 have no kernel"):
        preflight.check([arm("16"), arm("hangs")])
    assert not [
        child
        for child in psutil.Process().children()
        if "overlap_bench.engines.preflight" in " ".join(child.cmdline())
    ]


def test_an_arm_is_asked_once_before_any_boots_and_only_where_its_engine_has_something_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, said = list[list[str]](), list[str]()

    def check(arms: Sequence[Arm]) -> list[str]:
        asked.append([each.name for each in arms])
        return [f"device of {each.name}" for each in arms]

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(session.Session, "_boot", lambda self, arms, on_booting, watch: 1 / 0)

    def note(event: Booting | Said) -> None:
        assert isinstance(event, Said)
        said.append(event.line)

    for asks, names in ((True, [["before", "after"], ["fourth"]]), (False, [])):
        spec = api.EngineSpec("choosy", "", (), build="choosy_engine:build", preflight=asks)
        for module in (session, preflight):
            monkeypatch.setattr(module, "spec_of", lambda arm, spec=spec: spec)
        asked.clear(), said.clear()
        arms = [arm("16"), arm("32"), arm("32"), arm("64")]
        named = [msgspec.structs.replace(each, name=name) for each, name in zip(arms, NAMES, strict=True)]
        with session.Session() as booting, pytest.raises(ZeroDivisionError):
            booting.boot(named, note)
        assert asked == names
        together = [" and ".join(each) for each in names]
        assert said == [f"asking whether {each} can run here, before anything boots" for each in together]
        kinds = preflight.ask(named, note)
        assert kinds == ({name: f"device of {ASKED_FOR[name]}" for name in NAMES} if asks else {})
