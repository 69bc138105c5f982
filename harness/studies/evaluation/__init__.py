"""`bench eval`: does a toggle change what the model answers? Tasks of lm-eval (extra `eval`), before and
after."""
