"""The short causal convolution before a recurrent layer, over a tree of drafted tokens, and its window.

name    shape           meaning
B, T                    rows of a batch; tokens, or nodes of a tree
C, W                    channels; columns of the window
kernel                  taps of the filter, 4 in Qwen3-Next and Mamba, 3 in LFM2
x       (B, C, T)       the columns of this block, before the convolution
window  (B, C, W)       the newest committed columns, newest last; W >= kernel - 1 (transformers keeps kernel, one more
                        than is read); zeros before the first token
weight  (C, kernel)     one filter a channel, newest tap last; bias (C,) or None

A node reads itself and its kernel - 1 nearest ancestors, then committed columns: not its neighbours in the packed
block. The window is a state like the recurrent one, and a rewind that forgets it is the classic fault: the next
kernel - 1 tokens are wrong, and after them everything a little.
"""

import torch
from torch.nn import functional

from specnb.errors import InputError
from specnb.lm.tree import Tree


def tree_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tree: Tree
) -> torch.Tensor:
    """The convolution of every node over its own path: (B, C, T) in the type of x, before any activation.

    On a chain it is the ordinary one with a cached window. Raises InputError for shapes that do not fit.
    """
    columns, kernel = _columns(x, window, tree), weight.shape[-1]
    if weight.shape != (x.shape[1], kernel) or not 1 <= kernel <= window.shape[-1] + 1:
        raise InputError(
            f"weight {tuple(weight.shape)} must be (channels, kernel): {x.shape[1]} channels as in x {tuple(x.shape)}, "
            f"kernel 1 to {window.shape[-1] + 1} with the {window.shape[-1]} columns of the window"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias must be ({x.shape[1]},), one a channel, got {tuple(bias.shape)}")
    if not len(tree):
        return x
    gathered = columns[..., _taps(tree, kernel, window.shape[-1]).to(x.device)].flatten(2).to(weight.dtype)
    # a stride of one whole filter: the library's own kernel, so that bfloat16 is summed as it is without a tree
    return functional.conv1d(gathered, weight[:, None], bias, stride=kernel, groups=x.shape[1]).to(x.dtype)


def commit_window(window: torch.Tensor, x: torch.Tensor, tree: Tree, node: int) -> torch.Tensor:
    """The window (B, C, W), in its own type, after the path down to `node` is accepted; node -1 accepts nothing.

    Raises InputError for a node outside the tree, or shapes that do not fit.
    """
    kept = window.shape[-1]
    path = [kept + i for i in tree.path(node)]
    return _columns(x, window, tree)[..., [*range(kept), *path][len(path) :]].to(window.dtype)


def _columns(x: torch.Tensor, window: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Window and block side by side (B, C, W + T): column W + i is node i."""
    if x.ndim != 3 or window.ndim != 3 or x.shape[:2] != window.shape[:2] or x.shape[2] != len(tree):
        raise InputError(
            f"x {tuple(x.shape)} and window {tuple(window.shape)} must be (rows, channels, columns), the first two "
            f"alike, with one column of x for each of the {len(tree)} nodes"
        )
    return torch.cat([window, x], dim=-1)


def _taps(tree: Tree, kernel: int, width: int) -> torch.Tensor:
    """Columns that each node reads, oldest first: (T, kernel)."""
    rows = ([*range(width), *(width + i for i in tree.path(node))] for node in range(len(tree)))
    return torch.tensor([row[-kernel:] for row in rows])
