"""A project's own module, by the name of one of overlap-bench's packages."""

raise ImportError("what is installed imports harness, which may be anybody's, and not overlap_bench.harness")
