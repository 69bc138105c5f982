"""fp32 tokens against transformers in every setting that means something, on a paced device.

    python -m experiments.validation.paced_combinations

As every_combination, with decode steps of 4 ms and prefills of 2: those of the unpaced device, for both are
transformers' own.
"""

from __future__ import annotations

from experiments.validation.every_combination import check

if __name__ == "__main__":
    check(__file__, __doc__, "decode=4ms,prefill=2ms")
