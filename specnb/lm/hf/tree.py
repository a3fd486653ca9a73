"""Trees of drafted tokens in one forward of a transformers model: the mask, and which models can take it.

A node's position is passed, and which keys it sees; a model that takes its positions from elsewhere (the index of a
key, as ALiBi does, or the length of the cache), or looks back through a window over indices, would run without an
error and be wrong. What the configuration does not tell, `probe_trees` finds by comparing.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.lm.base import Capabilities, TreeModel
from specnb.lm.hf.attention import NAME, attends_to_all
from specnb.lm.preflight import TOLERANCE, apart, probe_ids
from specnb.lm.tree import Tree

MASKED = ("eager", "sdpa", NAME)
"""Attention implementations of transformers that add a mask of four dimensions to the scores as it is."""
PAST = 3
PROBE = Tree((-1, -1, -1, -1, -1, 4, 0, 5))
"""Wide before it is deep, so that a node's index is far from its depth."""
DROPPED, KEPT = PROBE.path(6), PROBE.path(7)


def tree_mask(tree: Tree, held: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of `tree`'s nodes behind `held` tokens, `(1, 1, T, held + T)`: 0 or -inf.

    Never boolean: eager attention would add False and True as 0 and 1, and say nothing.
    """
    hidden = np.pad(~tree.seen, ((0, 0), (held, 0)))  # the whole past is seen
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[None, None].to(device)


def why_no_trees(model: PreTrainedModel, rollback: str) -> str:
    """What in this model, or its way back, stands against trees; "" if nothing that can be read off."""
    config = model.config.get_text_config(decoder=True)
    name, attention = type(model).__name__, config._attn_implementation
    if rollback != "crop":
        return f"nodes are dropped from a cache, and the way back of this model is {rollback}"
    if not attends_to_all(config):
        return f"{name} has layers that attend to a window of the past, which they count by index, not by depth"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes the positions of tokens from their index in the cache, not from position_ids"
    if attention not in MASKED:
        return f"its attention ({attention}) takes no mask of a tree; {' and '.join(MASKED[:2])} do"
    return ""


class ProbedLater(Capabilities):
    """Capabilities whose `trees` and `trees_reason` are found at the first look at either: most users look at none."""

    @classmethod
    def of(cls, caps: Capabilities, probe: Callable[[Capabilities], str]) -> Self:
        """`caps`, which allow trees, but that `probe` is asked once what stands against them, "" if nothing."""
        probed = cls(**{field.name: getattr(caps, field.name) for field in fields(caps)})
        for name in ("trees", "trees_reason"):
            del probed.__dict__[name]  # where the values below are then kept
        probed.__dict__["_ask"] = lambda: probe(caps)
        return probed

    @cached_property
    def trees_reason(self) -> str:
        return self._ask()

    @cached_property
    def trees(self) -> bool:
        return not self.trees_reason


def probe_trees(model: TreeModel) -> str:
    """What is wrong with the trees of `model`; "" where nodes get the logits of their paths, and so does what follows.

    Feeds a few tokens and leaves the state empty; a context too short for them is not looked into.
    """
    if model.caps.n_ctx < PAST + len(PROBE):
        return ""
    try:
        tree_rows, expected = _in_tree(model), _in_chains(model)
    except Exception as error:  # of a family that takes no such mask
        return f"a tree fails: {error}"
    finally:
        model.reset()
    if not all(np.isfinite(rows).all() for rows in expected):
        return ""  # nothing to compare; the run itself will say where NaN comes from
    tolerance = TOLERANCE[model.caps.lossless_dtype]
    if all(apart(rows, whole) < tolerance for rows, whole in zip(tree_rows, expected, strict=True)):
        return ""
    return "the nodes of a tree do not get the logits that their paths get"


def _probe_ids(model: TreeModel) -> tuple[list[int], list[int], list[int]]:
    """Tokens of the past, of the nodes, and of what follows."""
    ids = probe_ids(model.vocab.size, PAST + len(PROBE) + 1)
    return ids[:PAST], ids[PAST:-1], ids[-1:]


def _in_tree(model: TreeModel) -> list[np.ndarray]:
    """Logits of two paths of the probe, and of a token behind the second one."""
    past, nodes, after = _probe_ids(model)
    model.forward(past, 0)
    rows = model.forward_tree(nodes, PROBE)
    model.keep_path(KEPT)
    tree_rows = [rows[DROPPED], rows[KEPT], model.forward(after)]
    model.reset()
    return tree_rows


def _in_chains(model: TreeModel) -> list[np.ndarray]:
    """The same, each path fed by itself."""
    past, nodes, after = _probe_ids(model)
    model.forward(past, 0)
    dropped = model.forward([nodes[i] for i in DROPPED])
    model.rewind(len(DROPPED))
    return [dropped, model.forward([nodes[i] for i in KEPT]), model.forward(after)]
