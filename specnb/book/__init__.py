"""The output of notebooks: tables, figures, the explorer, publishing, headless runs.

It depends on records, not on how they were measured.
"""
