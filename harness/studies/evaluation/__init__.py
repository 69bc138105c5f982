"""`bench eval`: does a toggle change what the model answers? Tasks of lm-eval, before and after.

model.py     the engine as a language model of lm-eval; needs the extra `eval`, as tasks do
accuracy.py  pure: the answers of both arms → accuracies, their paired difference, how many items differ
evaluate.py  boots each arm in turn, lets lm-eval ask it, puts the answers side by side and keeps them
shown.py     the result for people
tasks/       what ships with this project, and needs no download
"""
