"""`bench import`: result files of other benchmarking tools become runs that `bench compare` and `bench
report` read.

    files.py      a file on disk → one result in the tool's own words
    vllm.py sglang.py guidellm.py aiperf.py
                  that → a Result: what it says in our words, what it lacks, and where its definitions differ
    run.py        Results → a run folder

Only what is the same thing is converted; what is nearly the same is converted and named (`differs`), the rest
is named as lacking. Definitions: harness/metrics.py.
"""
