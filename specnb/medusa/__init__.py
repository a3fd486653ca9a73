"""Trained heads, whole: nets, text, training, files in five layouts, drafter, trees, gates, benchmark.

It knows torch backbones; that it is a drafter named "medusa" stands in `specnb.registry`.
"""
