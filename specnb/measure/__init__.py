"""Costs of speculation: cost curves, recordings and their replay, benchmarks, and divergence.

This package uses models through `LanguageModel` only. Tables and figures are in `book`.
"""
