"""Trained heads: nets, text, training, files in three layouts, drafter, trees, gates, benchmark.

Backbones are models in torch. That it is a drafter named "medusa" stands in `specnb.registry`.
"""
