"""Token generation: decoding loops, acceptance rules, sampling, controllers of K, and stop rules.

This package works on token ids and logits. Models and files belong to `lm`, cost measurements and
experiments to `measure`.
"""
