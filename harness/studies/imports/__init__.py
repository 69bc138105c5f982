"""`bench import`: result files of other benchmarking tools become runs that `bench compare` and `bench
report` read.

    files.py      a file on disk → which tool's it is, and one result in that tool's own words
    vllm.py sglang.py guidellm.py aiperf.py
                  that → a ToolResult: what it says in our words, what it lacks, where its definitions differ
    run.py        Results → a run folder

What means the same is converted; what means nearly the same is converted and named (`differs`); the rest is
named as lacking. Definitions: harness/metrics/boot.py.
"""
