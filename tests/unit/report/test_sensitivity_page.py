"""What a sensitivity looks like: as a page, as markdown, and beside a run that it foretells."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis.foretold import Foretold, changed, felt, foretell
from overlap_bench.harness.analysis.sensitivity import ABSENT, FILE, Phase, Sensitivity, of_others
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.report import html, sensitivity_tables
from overlap_bench.harness.report.explain_tables import foretold_table
from overlap_bench.harness.store.files import write_json
from tests.support import made_blocks

US = 1000


def phase(name: str, us: float, slope: float, slack_us: float | None = 0.0, gains: bool = True) -> Phase:
    return Phase(
        phase=name,
        us=us,
        slope=slope,
        slope_low=slope - 0.02,
        slope_high=slope + 0.02,
        slack_us=slack_us,
        slack_low=slack_us or 0.0,
        slack_high=slack_us,
        gain_most=slope * us if gains else 0.0,
        points=[(100.0, 100.0 * slope), (300.0, 300.0 * slope)],
    )


def sensitivity(*phases: Phase, engine: str = "e", **more: object) -> Sensitivity:
    about = {"schema_version": 1, "run": "a <run>", "engine": engine, "device": "emulated", "model": "m"}
    found = {"toggles": {"h2d": "pageable"}, "batch": 4, "step_us": 4000.0, "trials": 6}
    return msgspec.convert({**about, **found, "phases": phases, **more}, Sensitivity)


METADATA, H2D, OUTPUT = (
    phase("metadata", 200, 1.0),
    phase("h2d", 50, 1.5),
    phase("output", 90, 1.0, 900.0, False),
)


def test_its_report_is_a_page_that_needs_nothing_else_and_markdown(tmp_path: Path) -> None:
    found = sensitivity(METADATA, OUTPUT, left_out={"tokenize": "no step of these settings has it"})
    write_json(tmp_path / FILE, found)
    written = html.write(tmp_path)
    page = written.read_text()
    assert written == tmp_path / "report.html"
    assert "phases metadata costs a step most, at most 200 of its 4,000 us" in page
    assert page.count("<svg") == 2  # for wide screens and narrow ones
    assert "What a microsecond more costs" in page
    assert "tokenize: no step of these settings has it" in page
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert "<script" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    text = html.write(tmp_path, tmp_path / "report.md").read_text()
    assert "| metadata | 200 | 1.00 [0.98, 1.02] |" in text


def test_a_shorter_phase_is_felt_where_it_is_not_hidden_and_a_longer_one_beyond_the_slack() -> None:
    assert felt(METADATA, -20) == -20
    assert felt(H2D, 20) == 30
    assert felt(OUTPUT, -20) == felt(OUTPUT, 800) == 0
    assert felt(OUTPUT, 1000) == 100


def test_only_changes_of_how_long_a_phase_takes_are_foretold() -> None:
    def why_not(*sides: dict[str, str]) -> tuple[list[str], str]:
        arms = (
            Arm(name=str(at), engine="overlap", options=api.EngineOptions(), toggles=toggles)
            for at, toggles in enumerate(sides)
        )
        names, why = changed(*arms, ["schedule", "append"])
        return list(names), why

    assert why_not({"h2d": "pageable"}, {"h2d": "pinned"}) == (["metadata", "h2d"], "")
    assert why_not({"schedule": "serial"}, {"schedule": "overlap"})[1]
    assert why_not({"h2d": "pageable", "graph": "off"}, {"h2d": "pinned", "graph": "on"})[1]
    assert why_not({"h2d": "pinned"}, {"h2d": "pinned"}) == (["schedule", "append"], "")  # code differs


def foretold(found: Sensitivity, took_us: float) -> Foretold:
    """By that sensitivity, of six blocks whose after arm is slower in metadata by so much, and in its step by
    10 us less."""
    plan = made_blocks.manifest()
    arms = [msgspec.structs.replace(arm, engine="overlap") for arm in plan.design.arms]
    design = msgspec.structs.replace(plan.design, arms=tuple(arms))
    blocks = []
    for number in range(6):
        before, after = made_blocks.side(4), made_blocks.side(4)
        after["steps"]["metadata.end"] += round((took_us + number % 2) * US)
        blocks.append(made_blocks.block(number, {"before": before, "after": after}))
    step = [[4000.0 + number, 4000.0 + number + took_us - 10] for number in range(6)]
    return foretell(found, design, blocks, step, [[3000.0, 2990.0]] * 6, 0.05, plan.descriptions["before"])


def test_what_phases_changed_by_times_their_slopes_stands_beside_what_the_step_did() -> None:
    found = foretold(sensitivity(METADATA, H2D, OUTPUT, engine="overlap"), -100)
    assert [each.phase for each in found.phases] == ["metadata", "h2d"]
    assert found.foretold.us == pytest.approx(-99.5)
    # the slope's 2% of it, and what blocks differ by
    assert 2 < found.foretold.us - found.foretold.low < 2.2
    assert found.measured.us == pytest.approx(-110)
    assert found.aside.us == pytest.approx(-100)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Foretold) == found  # explain --format json
    rows = {row[0]: row[1:] for row in foretold_table(found).rows}
    assert rows["metadata"] == ("−99.5", "[−100.1, −98.9]", "1.00", "−99.5")
    assert rows["a step, measured"][0] == "−110.0"


def test_what_was_not_seen_at_the_step_is_said_to_be_so() -> None:
    found = [phase("schedule", 20.0, 1.0), phase("output-process", 200.0, 1.0, slack_us=4000.0, gains=False)]
    (note,) = of_others(found)
    assert note.startswith("output-process: done beside the step")
    assert "was not seen at the step" in " ".join(
        sensitivity_tables.page(sensitivity(*found, notes=[note])).lines
    )
    assert not of_others(found[:1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"toggles": {"h2d": "pinned"}}, "is not of the run's before arm: h2d differ"),
        ({"device": "emulated, paced: 10ms"}, "it is of device"),
        ({"model": "m2"}, "it is of model m2, not m"),
        ({"options": {"stream_interval": "1"}}, "it is of stream_interval 1, not 8"),
        ({"batch": 5}, "no decode step of the sensitivity's batch, 5"),
    ],
)
def test_a_sensitivity_of_other_settings_foretells_nothing(change: dict[str, object], said: str) -> None:
    with pytest.raises(api.BadSetting, match=said):
        foretold(sensitivity(METADATA, H2D, engine="overlap", **change), -100)


def test_a_phase_of_which_nothing_is_said_foretells_nothing_unless_no_step_has_it() -> None:
    told = foretold(sensitivity(OUTPUT, H2D, engine="overlap"), -100)  # by --phase, without metadata
    assert "does not say what metadata costs" in told.why_not
    absent = sensitivity(METADATA, engine="overlap", left_out={"h2d": ABSENT})
    assert foretold(absent, -100).why_not == ""
    hidden = foretold(sensitivity(phase("metadata", 200, 1.0, 900.0, False), H2D, engine="overlap"), -100)
    assert hidden.foretold.us == hidden.foretold.low == 0
