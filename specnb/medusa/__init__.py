"""Trained drafters: networks, training text, training, files in two layouts, trees, gates.

Backbones are torch models. `specnb.registry` registers the drafters `medusa`, `hydra`, `jump` and
`eagle`.
"""
