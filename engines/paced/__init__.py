"""A card that is a clock, for engines of others: what their host code calls on CUDA and Triton is there, and
takes the time that a pace says. Tokens follow from the prompt. vllm/paced, sglang and sglang_044 install it.
"""
