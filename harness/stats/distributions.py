"""Student's t, F, chi-square and the normal distribution, as scipy.special computes them.

scipy.stats calls the same functions, and gives the same last digit. It takes half a second of each command to
import, and a hundred times as long for each call.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import fdtrc, fdtri, gammaincinv, ndtr, stdtr, stdtrit

Floats = npt.NDArray[np.float64]
Value = TypeVar("Value", float, Floats)


def t_quantile(p: Value, freedom: int) -> Value:
    """Where Student's t stays below with chance `p`."""
    found: Value = stdtrit(freedom, p)
    return found


def t_tail(x: Value, freedom: int) -> Value:
    """Chance that Student's t exceeds `x`."""
    found: Value = stdtr(freedom, -x)
    return found


def chi2_quantile(p: Value, freedom: int) -> Value:
    """Where chi-square stays below with chance `p`."""
    found: Value = 2 * gammaincinv(freedom / 2, p)
    return found


def f_quantile(p: float, above: int, below: int) -> float:
    """Where F stays below with chance `p`; degrees of freedom of its numerator and its denominator."""
    return float(fdtri(above, below, p))


def f_tail(x: float, above: int, below: int) -> float:
    """Chance that F exceeds `x`."""
    return float(fdtrc(above, below, x))


def normal_tail(x: Value) -> Value:
    """Chance that a standard normal variable exceeds `x`."""
    found: Value = ndtr(-x)
    return found
