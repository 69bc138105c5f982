"""The README's command on a device whose decode step takes 10 ms, again and again.

    python -m experiments.validation.paced_command [RUNS]    5 by default

As main_command, with `--pace 10ms`.
"""

from __future__ import annotations

from experiments.validation.main_command import repeat

if __name__ == "__main__":
    repeat(__file__, __doc__, "--pace", "10ms")
