"""Many runs of notebooks, on one machine or several, and tables over their records.

`book.engine` runs the notebooks and `store` finds the records; nothing here depends on what a
notebook measures.
"""
