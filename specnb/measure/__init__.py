"""What speculation costs and whether it pays: cost curves, recordings and their replay, paired benchmarks, forks.

It knows models by their protocol, and shows nothing: tables and figures are `book`.
"""
