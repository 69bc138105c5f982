"""`bench import`: result files of other benchmarking tools become runs that `bench compare` and `bench
report` read. What means the same is converted; what means nearly the same is converted and named (`differs`);
the rest is named as lacking. Definitions: harness/metrics/block.py.
"""
