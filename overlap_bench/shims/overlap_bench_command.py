"""The command `bench`, by a name that no project has: one that has an `overlap_bench` of its own is told."""

import sys


def main() -> None:
    try:
        from overlap_bench.harness.__main__ import main as bench
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("overlap_bench"):
            raise
        import overlap_bench

        sys.stderr.write(
            f"bench: {overlap_bench.__file__} takes the place of overlap-bench's own package: "
            "give it another name, or leave its folder out of PYTHONPATH\n"
        )
        sys.exit(2)
    bench()
