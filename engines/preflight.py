"""What can't work, told before any arm of a run boots: `python -m overlap_bench.engines.preflight CONFIG` (a
HostConfig as JSON), in the arm's interpreter. An engine that boots for minutes would else refuse the second
arm after the first has booted.

The last line of stdout is the kind of its device, or the reason, where the status is REFUSED.
"""

from __future__ import annotations

import os
import sys

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.host import build_engine
from overlap_bench.engines.processes import die_with_parent

REFUSED = 2


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=api.HostConfig)
    die_with_parent(config.parent)
    try:
        print(build_engine(config).preflight(), flush=True)
    except api.BadSetting as error:
        print(error, flush=True)
        return REFUSED
    return 0


if __name__ == "__main__":
    os._exit(main())  # as engines.host ends
