"""Costs of speculation: cost curves, recordings and their replay, paired benchmarks, forks.

Uses models by their protocol; tables and figures are in `book`.
"""
