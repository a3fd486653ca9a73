"""Gated DeltaNet, the linear layers of Qwen3-Next and Qwen3.5: token by token, and for a tree.

The memory of a value head is a matrix S. A token updates it as follows (arXiv 2412.06464, which
uses the transpose):

    S' = e^g S                  forget: the gate decays all entries
    u  = beta (v - S'^T k)      error: the difference between v and the memory's value for k
    S  = S' + k u^T             write
    o  = S^T q                  read

In a tree, the write of node i depends only on its ancestors' writes. Let a_ij be the sum of the
gates on the path from j (exclusive) to i, and a_i the sum from the committed text to i. Then the
writes U of all nodes solve one linear system (the UT transform of the same paper, with an ancestor
mask instead of the causal mask):

    (I + X) U = R       X_ij = e^a_ij beta_i (k_i . k_j)  if j is an ancestor of i, else 0
                        R_i  = beta_i (v_i - e^a_i S_0^T k_i)
    o_i = e^a_i S_0^T q_i + sum of e^a_ij (q_i . k_j) u_j, over i and its ancestors j

X is strictly lower triangular, because parents come before children. S_0 does not change.

name    shape               meaning
B, T                        rows of a batch; tokens, or nodes of a tree
HK, HV                      key heads, value heads; value head h uses key head h // (HV / HK)
q, k    (B, T, HK, dk)      query, key; unit length, q divided by sqrt(dk)
v       (B, T, HV, dv)      value
g       (B, T, HV)          log of the gate, <= 0; -inf means a gate of exactly 0
beta    (B, T, HV)          strength of the write
state   (B, HV, dk, dv)     S, float32 or float64, the dtype of all computations
"""

from timeit import timeit

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specnb.lm.tree import Tree

HEADS = 32
KEY_HEADS = 16
DIM = 128
"""Head counts and size in Qwen3-Next-80B."""
NODES = (4, 8, 16, 32)
"""Number of nodes of the timed trees."""
REPEATS = 15

GATE_FLOOR = -1e4
"""A finite gate with e^g = 0 in float32 and float64; -inf would give 0 * -inf = NaN."""


def unit(x: Tensor) -> Tensor:
    """Normalize the last axis of `x` to unit length, like transformers and FLA (epsilon 1e-6)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule token by token. Return outputs (B, T, HV, dv) and the last state; T >= 1.

    The operations and their order are those of transformers' `torch_recurrent_gated_delta_rule`, so
    the results are bit-identical.
    """
    q, k = (_each_value_head(x, v) for x in (q, k))
    outputs = []
    for t in range(v.shape[1]):
        faded = state * g[:, t].exp()[..., None, None]
        u = (v[:, t] - _read(faded, k[:, t])) * beta[:, t, :, None]
        state = faded + k[:, t, ..., :, None] * u[..., None, :]
        outputs.append(_read(state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def verify_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, tree: Tree
) -> Tensor:
    """Return outputs (B, T, HV, dv) of all nodes; each equals that of its path alone."""
    q, k = (_each_value_head(x, v) for x in (q, k))
    # heads before tokens: (B, HV, T, ...)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    fade, fade_from_start = _fades(g, torch.tensor(tree.seen))
    predicted = fade_from_start * (k @ state)
    weights = fade * (k @ k.mT) * beta[..., None]
    errors = beta[..., None] * (v - predicted)
    u = torch.linalg.solve_triangular(weights, errors, upper=False, unitriangular=True)
    return (fade_from_start * (q @ state) + fade * (q @ k.mT) @ u).transpose(1, 2)


def _each_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Repeat keys or queries for each value head: (B, T, HK, dk) to (B, T, HV, dk)."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)


def _read(state: Tensor, q: Tensor) -> Tensor:
    return (state * q[..., :, None]).sum(dim=-2)


def _fades(g: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^a_ij (B, HV, T, T), 0 unless j is i or an ancestor of i, and e^a_i (B, HV, T, 1).

    `g` is (B, HV, T). a_ij is summed over the nodes between. The difference a_i - a_j would
    overflow if j is not an ancestor, and lose precision if both are large.
    """
    gates = g.clamp(min=GATE_FLOOR)
    on_path = seen.to(g.dtype)
    # below[m, j]: j is an ancestor of m, so m's gate decays the write of j
    below = on_path.tril(-1)
    between = (on_path * gates[..., None, :]) @ below
    return between.masked_fill(~seen, -torch.inf).exp(), (gates @ on_path.mT).exp()[..., None]


def tree_cost() -> pd.DataFrame:
    """Time tree verification on one float32 layer with the shapes of Qwen3-Next-80B.

    The trees are a chain, a tree with four children per node, and a star. Columns: tree, nodes,
    depth, paths, solve_ms (`verify_tree`), chains_ms (`verify_tree` on the chain of each path), and
    max_error (difference from the token-by-token rule). Times are medians of REPEATS interleaved
    runs, `*_low` and `*_high` their quartiles.
    """
    rows = []
    for n in NODES:
        trees = {
            "chain": Tree.chain(n),
            "4-ary": Tree(tuple((i - 1) // 4 for i in range(n))),  # -1 for node 0
            "star": Tree((-1,) * n),
        }
        rows += [{"tree": kind, "nodes": n, **_cost_of(tree)} for kind, tree in trees.items()]
    return pd.DataFrame(rows)


def _cost_of(tree: Tree) -> dict[str, float]:
    # 1. Draw random tokens and a state.
    n = len(tree)
    draw = torch.Generator().manual_seed(0)
    q, k = unit(torch.randn(2, 1, n, KEY_HEADS, DIM, generator=draw))
    g, beta = torch.rand(2, 1, n, HEADS, generator=draw)
    v = torch.randn(1, n, HEADS, DIM, generator=draw)
    tokens = [q / DIM**0.5, k, v, -g, beta]
    state = 0.1 * torch.randn(1, HEADS, DIM, DIM, generator=draw)
    # 2. Verify the tree at once and path by path.
    paths = [tree.path(leaf) for leaf in range(n) if leaf not in tree.parents]
    chains = [([x[:, path] for x in tokens], Tree.chain(len(path))) for path in paths]

    def solve() -> Tensor:
        return verify_tree(*tokens, state, tree)

    def solve_chains() -> list[Tensor]:
        return [verify_tree(*along_path, state, chain) for along_path, chain in chains]

    with torch.inference_mode():
        outputs = solve()
        solve_chains()  # the first runs are warm-up
        errors = [
            (outputs[:, path] - recurrent(*(x[:, path] for x in tokens), state)[0]).abs().max()
            for path in paths
        ]
        times = [(timeit(solve, number=1), timeit(solve_chains, number=1)) for _ in range(REPEATS)]
    names = [f"{name}_ms{end}" for name in ("solve", "chains") for end in ("", "_low", "_high")]
    quantiles = 1e3 * np.quantile(times, (0.5, 0.25, 0.75), axis=0)
    columns = {"depth": max(map(len, paths)), "paths": len(paths)}
    columns |= dict(zip(names, quantiles.T.ravel(), strict=True))
    return columns | {"max_error": max(errors).item()}
