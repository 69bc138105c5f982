"""A verdict has its reason from where it is decided: nothing that shows it makes one up."""

import pytest
from msgspec.structs import replace

from overlap_bench.harness.analysis import decision, words
from overlap_bench.harness.analysis.decision import Verdict
from overlap_bench.harness.analysis.plain import from_plain, to_plain, to_stored
from overlap_bench.harness.analysis.result import Comparison
from tests.support.made_blocks import manifest, result

HOLDS_0 = "the interval holds 0 and reaches beyond ±1%"


@pytest.mark.parametrize(
    ("factor", "noise", "trials", "verdict"),
    [
        (0.9, 0.001, 6, Verdict("faster")),
        (1.1, 0.001, 6, Verdict("slower")),
        (1.0, 0.0005, 6, Verdict("same", "within ±1%")),
        (0.995, 0.0002, 6, Verdict("same", "within ±1%; a change of −0.50% was detected")),
        (1.0, 0.05, 6, Verdict("undecided", HOLDS_0)),
        (0.9, 0.001, 1, decision.ONE_TRIAL),
    ],
)
def test_a_verdict_is_stored_with_its_reason_and_an_older_one_gets_the_reason_that_its_rule_had(
    factor: float, noise: float, trials: int, verdict: Verdict
) -> None:
    (found,) = result(factor, manifest(trials), noise=noise).comparisons
    assert found.verdict == verdict
    assert found.decided.verdict == verdict.word
    assert from_plain(to_stored(found), Comparison).verdict == verdict
    assert from_plain(to_plain(found), Comparison).verdict == verdict  # without it, as older files are


def test_the_sentence_says_the_verdict_that_was_decided_and_looks_at_no_number() -> None:
    (found,) = result(0.9).comparisons
    overruled = replace(found, verdict=decision.CONTRADICTED)
    said = words.conclusion("emulated", overruled)
    assert ": undecided: other measurements of this run contradict it. TPOT p50 is 10" in said
    assert from_plain(to_stored(overruled), Comparison).verdict == decision.CONTRADICTED
    row = replace(found.metrics[found.primary], verdict="undecided")
    older = replace(found, metrics={**found.metrics, found.primary: row})
    assert from_plain(to_plain(older), Comparison).verdict == decision.CONTRADICTED
