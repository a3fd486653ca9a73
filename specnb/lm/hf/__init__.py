"""transformers models with our own cache: forward passes of blocks and trees, and rollback.

It runs one sequence at a time; only training, in `medusa`, uses batches.
"""
