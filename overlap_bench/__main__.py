"""`python -m overlap_bench`, which is `bench`."""

from overlap_bench.harness.__main__ import main

if __name__ == "__main__":
    main()
