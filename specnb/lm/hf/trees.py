"""Trees in transformers' own forward: the mask of their nodes, and what in a model stands against them.

A node is told its position, and which keys it sees. A model that takes positions from elsewhere (the index of a key,
as ALiBi does, or the length of the cache), or looks back through a window over indices, would run without an error
and be wrong. `why_no_trees` reads that off the configuration; `probe.probe_trees` finds the rest.
"""

import inspect

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specnb.lm.tree import Tree

MASKED = ("eager", "sdpa")
"""Attention implementations of transformers that add a mask of four dimensions to the scores as it is."""


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Tell whether every layer attends to the whole past: no sliding windows, no chunks."""
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds <= {"full_attention", "global"} and not windowed


def tree_mask(tree: Tree, n_held: int, model: PreTrainedModel) -> torch.Tensor:
    """Return what `model` adds to scores of nodes after `n_held` tokens, `(1, 1, T, n_held + T)`: 0 or -inf."""
    # never boolean: eager attention would add False and True as 0 and 1, and say nothing
    hidden = np.pad(~tree.seen, ((0, 0), (n_held, 0)))  # the whole past is seen
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    return mask[None, None].to(model.device)


def why_no_trees(model: PreTrainedModel, rollback: str) -> str:
    """Say what in this model, or its rollback, stands against trees; "" if nothing that can be read off."""
    config = model.config.get_text_config(decoder=True)
    name, attention = type(model).__name__, config._attn_implementation
    if rollback != "crop":
        return f"nodes are dropped from a cache, and the way back of this model is {rollback}"
    if not attends_to_all(config):
        return f"{name} has layers that attend to a window of the past, which they count by index, not by depth"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes the positions of tokens from their index in the cache, not from position_ids"
    if attention not in MASKED:
        return f"its attention ({attention}) takes no mask of a tree; {' and '.join(MASKED)} do"
    return ""
