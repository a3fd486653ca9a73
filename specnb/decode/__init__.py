"""How tokens are made: the loop, the rules of acceptance, sampling, trees, controllers of K, when to stop.

It knows token ids and rows of logits only: no files, no clock but the round's own, no experiment.
"""
