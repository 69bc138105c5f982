"""Quantiles and tails of the distributions that decide. They are in scipy.stats too, which takes a second to
import."""

from __future__ import annotations

from typing import Any

from scipy import special


def t_quantile(share: Any, freedom: float) -> Any:
    return special.stdtrit(freedom, share)


def t_tail(value: Any, freedom: float) -> Any:
    """The chance of more than `value`."""
    return special.stdtr(freedom, -value)


def chi2_quantile(share: Any, freedom: float) -> Any:
    return 2 * special.gammaincinv(freedom / 2, share)


def normal_tail(value: Any) -> Any:
    return special.ndtr(-value)
