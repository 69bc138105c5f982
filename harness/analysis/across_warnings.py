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
        "{measured_after}. What the machine did in between is part of the change, and no number of "
        "trials removes it: by simulation, equal arms compared this way differ in 43% of cases where the "
        "machine wanders, not in the 5% claimed. So there is no verdict; bench run measures side by side"
    )


class NotCompared(OfVerdict, frozen=True):
    first: str
    before: str
    after: str
    usual = Severity.OVERRULES
    says = (
        "described, not judged: the run compares its arms with {first}, and not {after} with "
        "{before}; a run of these two gives a verdict"
    )


class Different(OfVerdict, frozen=True):
    what: str
    differ: str
    says = "different {what}: {differ}"


class OtherSeeds(OfVerdict, frozen=True):
    says = "different seeds, so different prompts and arrivals: outputs are not compared"


class UnevenTrials(OfVerdict, frozen=True):
    told: str
    says = "numbers of trials differ: {told}"


class InPlaceOf(OfVerdict, frozen=True):
    shown: str
    primary: str
    why: str
    usual = Severity.QUALIFIES
    says = "{shown} is compared in place of {primary}: {why}"


class OtherClients(OfVerdict, frozen=True):
    """Several tools measured."""

    tools: str
    usual = Severity.QUALIFIES

    says = (
        "measured by {tools}: each client's own time is part of its numbers, and whether the workload was "
        "the same can't be known; measure both with one of them"
    )
