"""One arm's profile in a process of its own, so that a profiler can be put in front of it:
`python -m overlap_bench.harness.studies.profiled_arm CONFIG` (a profile.ProfiledArm as JSON). What it
captured goes to a file.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.store.files import write_bytes
from overlap_bench.harness.studies import profile


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to answer; it ends this process
    config = msgspec.json.decode(sys.argv[1], type=profile.ProfiledArm)
    try:
        (captured,) = profile.capture(config.design, config.steps, say=lambda line: None)
        write_bytes(Path(config.file), msgspec.msgpack.encode(captured))
    except api.EngineError as error:  # the last line is what the harness shows
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
