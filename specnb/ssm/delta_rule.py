"""Gated DeltaNet, the rule of the linear layers of Qwen3-Next and Qwen3.5: token by token, and over a tree at once.

The memory of one value head is a matrix S; one token changes it so (arXiv 2412.06464, there transposed):

    S' = e^g S                  forget: the gate fades everything
    u  = beta (v - S'^T k)      surprise: what v holds beyond what the memory already answers to k
    S  = S' + k u^T             write
    o  = S^T q                  read

What node i of a tree writes depends on its ancestors' writes, and on nothing else. With a_ij the sum of the gates on
the way from j (exclusive) down to i, and a_i the sum from the committed text on, the writes U of all nodes solve one
linear system (the UT transform of the same paper, its causal mask replaced by the ancestors'):

    (I + X) U = R       X_ij = e^a_ij beta_i (k_i . k_j)  where j is an ancestor of i, else 0
                        R_i  = beta_i (v_i - e^a_i S_0^T k_i)
    o_i = e^a_i S_0^T q_i + sum over j, i or an ancestor, of e^a_ij (q_i . k_j) u_j

X is triangular because parents come before children, and S_0 is only read.

name    shape               meaning
B, T                        rows of a batch; tokens, or nodes of a tree
HK, HV                      key heads, value heads; value head h uses key head h // (HV / HK)
q, k    (B, T, HK, dk)      query, key; of unit length, q over sqrt(dk)
v       (B, T, HV, dv)      value
g       (B, T, HV)          log of the gate, <= 0; -inf is a gate of exactly 0
beta    (B, T, HV)          strength of the write
state   (B, HV, dk, dv)     S, float32 or float64, which is what everything is computed in
"""

from timeit import timeit

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specnb.lm.tree import Tree

HEADS, KEY_HEADS, DIM = 32, 16, 128
"""One layer of Qwen3-Next-80B."""
NODES, REPEATS = (4, 8, 16, 32), 5
"""Sizes of the trees that are timed, and how often."""

GATE_FLOOR = -1e4
"""e to this is 0 in float32 and float64, as for anything below; but it is finite, and 0 * -inf would be NaN."""


def unit(x: Tensor) -> Tensor:
    """`x` with its last axis of unit length, as transformers and FLA compute it (epsilon 1e-6)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token: outputs (B, T, HV, dv) and the last state, T at least 1.

    The operations and their order are those of transformers' `torch_recurrent_gated_delta_rule`, and so are the bits.
    """
    q, k = (_each_value_head(x, v) for x in (q, k))
    outputs = []
    for t in range(v.shape[1]):
        faded = state * g[:, t].exp()[..., None, None]
        u = (v[:, t] - _read(faded, k[:, t])) * beta[:, t, :, None]
        state = faded + k[:, t, ..., :, None] * u[..., None, :]
        outputs.append(_read(state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def verify_tree(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, tree: Tree) -> Tensor:
    """Outputs (B, T, HV, dv) of all nodes against the committed state: each gets what its path alone would give it."""
    q, k = (_each_value_head(x, v) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))  # heads before tokens: (B, HV, T, ...)
    fade, fade_from_start = _fades(g, torch.tensor(tree.seen))
    known = fade_from_start * (k @ state)
    weights = fade * (k @ k.mT) * beta[..., None]
    u = torch.linalg.solve_triangular(weights, beta[..., None] * (v - known), upper=False, unitriangular=True)
    return (fade_from_start * (q @ state) + fade * (q @ k.mT) @ u).transpose(1, 2)


def _each_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Keys or queries of each value head: (B, T, HK, dk) to (B, T, HV, dk)."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)


def _read(state: Tensor, q: Tensor) -> Tensor:
    return (state * q[..., :, None]).sum(dim=-2)


def _fades(g: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """g (B, HV, T) -> e^a_ij (B, HV, T, T), 0 unless j is i or an ancestor, and e^a_i (B, HV, T, 1).

    a_ij is summed over the nodes between, never taken as a_i - a_j: that would overflow where j is no ancestor, and
    lose digits where both are large.
    """
    gates = g.clamp(min=GATE_FLOOR)
    on_path = seen.to(g.dtype)
    below = on_path.tril(-1)  # below[m, j]: j is an ancestor of m, so m's gate fades what j wrote
    between = (on_path * gates[..., None, :]) @ below
    return between.masked_fill(~seen, -torch.inf).exp(), (gates @ on_path.mT).exp()[..., None]


def tree_cost() -> pd.DataFrame:
    """Time (medians of REPEATS, interleaved) verifying trees on one layer of Qwen3-Next-80B's shapes, float32.

    The trees are a chain, four children each, and all side by side. Columns: tree, nodes, depth, solve_s (`verify`),
    paths_s (the serial rule along each path from the committed state), ratio, and max_error, the largest difference
    of the two outputs.
    """
    rows = []
    for n in NODES:
        # (i - 1) // 4 is -1 of node 0, too
        trees = {"chain": Tree.chain(n), "4-ary": Tree(tuple((i - 1) // 4 for i in range(n))), "star": Tree((-1,) * n)}
        rows += [{"tree": kind, "nodes": n, **_cost_of(tree)} for kind, tree in trees.items()]
    return pd.DataFrame(rows)


def _cost_of(tree: Tree) -> dict[str, float]:
    draw, n = torch.Generator().manual_seed(0), len(tree)

    q, k = unit(torch.randn(2, 1, n, KEY_HEADS, DIM, generator=draw))
    g, beta = torch.rand(2, 1, n, HEADS, generator=draw)
    v = torch.randn(1, n, HEADS, DIM, generator=draw)
    tokens, state = [q / DIM**0.5, k, v, -g, beta], 0.1 * torch.randn(1, HEADS, DIM, DIM, generator=draw)
    paths = [tree.path(leaf) for leaf in range(n) if leaf not in tree.parents]
    along_paths = torch.empty_like(v)

    def solve() -> Tensor:
        return verify_tree(*tokens, state, tree)

    def each_path() -> Tensor:
        for path in paths:
            along_paths[:, path] = recurrent(*(x[:, path] for x in tokens), state)[0]
        return along_paths

    with torch.inference_mode():
        error = (solve() - each_path()).abs().max().item()  # the first runs are warm-up
        times = [(timeit(solve, number=1), timeit(each_path, number=1)) for _ in range(REPEATS)]
    depth, (solve_s, paths_s) = max(map(len, paths)), np.median(times, axis=0)
    return {"depth": depth, "solve_s": solve_s, "paths_s": paths_s, "ratio": paths_s / solve_s, "max_error": error}
