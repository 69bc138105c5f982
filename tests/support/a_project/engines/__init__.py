"""A project's own package, by the name of one of overlap-bench's, first on the path of many tests."""

raise ImportError("what is installed imports engines, which may be anybody's, and not overlap_bench.engines")
