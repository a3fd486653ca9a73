"""Many runs of notebooks, on one machine or many, and tables over what they left.

It knows how a notebook is run (`book.engine`) and where records lie (`store`), not what a notebook measures.
"""
