"""One question from its plan to its result: a run, a gate, a factorial, a sweep, a claim, a profile."""
