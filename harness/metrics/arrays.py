"""Arrays of samples and of stamps; apart from the definitions, which a command line reads without numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]  # samples
Int64s = NDArray[np.int64]  # stamps, ns
