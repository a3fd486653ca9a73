"""Many runs of notebooks, on one machine or several, and tables over their records.

It uses `book.engine` to run notebooks and `store` to find records; it does not depend on what a
notebook measures.
"""
