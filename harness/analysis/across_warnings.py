"""Warnings about arms that are of two runs, or that a run did not mean to compare."""

from __future__ import annotations

from overlap_bench.harness.analysis.verdict_warnings import OfVerdict
from overlap_bench.harness.analysis.warnings import Severity


class NotInterleaved(OfVerdict, frozen=True):
    before: str
    measured_before: str
    after: str
    measured_after: str
    usual = Severity.OVERRULES
    says = (
        "not interleaved: {before} was measured at {measured_before}, {after} at "
        "{measured_after}; what the machine did in between is part of the change, however many trials "
        "there are (simulated: up to 43% of equal arms differ, not 5%), so there is no verdict; bench run "
        "measures them side by side"
    )


class NotCompared(OfVerdict, frozen=True):
    first: str
    before: str
    after: str
    usual = Severity.OVERRULES
    says = (
        "described, not judged: the run set out to compare its arms with {first}, and not {after} with "
        "{before}; of pairs that are picked afterwards, more than 5% differ by chance; a run of these two "
        "gives a verdict"
    )


class Different(OfVerdict, frozen=True):
    what: str
    differ: str
    says = "different {what}: {differ}; the change may come from that; measure both arms in one bench run"


class OtherSeeds(OfVerdict, frozen=True):
    says = (
        "different seeds, so different prompts and arrivals; outputs are not compared, and the change may be "
        "the workload's; measure both with one --seed"
    )


class UnevenTrials(OfVerdict, frozen=True):
    told: str
    says = (
        "numbers of trials differ: {told}; the side with fewer makes the interval wide; measure as many "
        "trials of both"
    )


class InPlaceOf(OfVerdict, frozen=True):
    shown: str
    primary: str
    why: str
    usual = Severity.QUALIFIES
    says = (
        "{shown} is compared in place of {primary}, as {why}; the two may change by different amounts; "
        "measure both arms in one bench run to compare {primary}"
    )


class OtherClients(OfVerdict, frozen=True):
    tools: str
    usual = Severity.QUALIFIES

    says = (
        "measured by {tools}; each client's own time is part of its numbers, and workloads may differ, so "
        "the change may be the clients'; measure both with one of them"
    )
