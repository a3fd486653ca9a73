"""transformers' model code with our own cache: forwards of blocks and trees, and every rollback strategy.

It knows one sequence at a time; batches are for training, in `medusa`.
"""
