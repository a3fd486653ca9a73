"""Trained heads, whole: nets, text, training, files in five layouts, drafter, trees, gates, benchmark.

Backbones are models in torch. That it is a drafter named "medusa" stands in `specnb.registry`.
"""
