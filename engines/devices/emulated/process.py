"""The device process: `python -m overlap_bench.engines.devices.emulated.process BOOT` (a commands.Boot as
JSON).

Started by exec, so that it shares no memory layout with its parent and starts no warmer than it should.
"""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> None:
    # The host's Ctrl-C reaches the whole process group; the host decides when its device ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # nothing made by the imports below is garbage; settle_garbage puts it out of sight

    import msgspec

    from overlap_bench.engines.devices.emulated.commands import Boot
    from overlap_bench.engines.processes import signal_at_parents_end

    boot = msgspec.json.decode(sys.argv[1], type=Boot)
    if boot.die_with_parent:
        signal_at_parents_end(signal.SIGKILL)  # also in the middle of a program
    if os.getppid() != boot.parent:
        return

    from overlap_bench.engines.devices.emulated.service import Service
    from overlap_bench.engines.tracing import name_thread

    name_thread("device")
    Service(boot).run()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the kernel takes everything back; torch's own farewell would take 0.1 s
