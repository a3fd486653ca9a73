"""Does this draft fit that target? Tokenizers and configs of any format to one verdict with its remedy.

It opens no weights: headers and small files are enough.
"""
