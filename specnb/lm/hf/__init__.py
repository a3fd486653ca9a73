"""transformers models with our own cache: forward passes over blocks and trees, and rollback.

The engine runs one sequence at a time; only training, in `medusa`, uses batches.
"""
