"""Blocks to a result: comparison, verdicts, warnings, mechanism, outputs, limit, prediction."""
