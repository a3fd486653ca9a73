"""Recurrent layers: bytes of state, costs of rollback strategies, failures of other engines, trees.

`lm.rollback` implements the rollback; this package measures it.
"""
