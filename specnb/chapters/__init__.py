"""Chapters: code that only one notebook uses (experiment, tables, figures), in notebook order.

Shared parts, such as the explorer and `lanes` (notebooks 00 and 09), are in `book`. Notebook 04 has
three modules: `rollback`, `delta_rule` and `state_memory`. Only notebooks and tests import a
chapter; `specnb` also exports `ksweep`.
"""
