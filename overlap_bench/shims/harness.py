"""`harness` where overlap-bench is installed, for whoever imports it, or runs `python -m harness`."""

if __name__ == "__main__":
    from overlap_bench.harness.__main__ import main

    main()
else:
    from overlap_bench.old_names import give_way

    give_way(__name__)
