"""torch's layers without weights of their own: weights.fill gives them theirs, and to draw a billion first
would take seconds of a boot. Built on torch's meta device instead, they would import half of its compiler."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Leave what memory held."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leave what memory held."""
