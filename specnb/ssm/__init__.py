"""Recurrent layers: bytes of state, what each rollback strategy costs, how other engines fail, trees.

The engines' own rollback is `lm.rollback`; here it is measured.
"""
