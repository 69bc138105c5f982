"""What both releases of SGLang that are engines here share: the way in of a request, the way out of its
tokens, and the card that is a clock. Needs no SGLang.
"""

GIL = "BENCH_SGLANG_GIL"  # "held": driver calls hold it, as no driver does, to show what that changes
