"""Trained heads: networks, training text, training, files in three layouts, drafter, trees, gates.

Backbones are torch models. `specnb.registry` registers the drafters `medusa`, `hydra`, `jump`,
`eagle`.
"""
