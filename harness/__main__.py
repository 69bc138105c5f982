"""What `bench` and `python -m overlap_bench` run. Importing the command line takes a while, in which a Ctrl-C
is as good as in any other: one line and its exit code."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    try:
        from overlap_bench.harness.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("bench: interrupted\n")
        sys.exit(130)
    finally:
        # The process ends. Python would first look for garbage in all that was imported and made.
        gc.freeze()


if __name__ == "__main__":
    main()
