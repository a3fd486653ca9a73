"""Generation of tokens: the loop, acceptance rules, sampling, trees, controllers of K, and stop rules.

This package works on token ids and rows of logits only: no files, no experiments, and no clock but
the round's own.
"""
