"""Sampling held against the rows it was drawn from: what `sampling` is made of."""
