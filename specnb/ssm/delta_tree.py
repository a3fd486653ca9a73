"""Gated DeltaNet for many tokens at once: in chunks, and over a tree of drafted tokens. Names as in `deltanet`.

What token i writes depends on what its ancestors wrote, and on nothing else. With a_ij the sum of the gates on the
way from j (exclusive) down to i, and a_i the sum from the committed text on, the writes U of all tokens solve one
linear system (the UT transform of arXiv 2412.06464, its causal mask replaced by the ancestors'):

    (I + X) U = R       X_ij = e^a_ij beta_i (k_i . k_j)  where j is an ancestor of i, else 0
                        R_i  = beta_i (v_i - e^a_i S_0^T k_i)
    o_i = e^a_i S_0^T q_i + sum over j, i or an ancestor, of e^a_ij (q_i . k_j) u_j

X is triangular because parents come before children. S_0 is only read; U, k and g are all that is needed to commit
any path later. A chunk of a sequence is the tree in which every token has one child.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specnb.errors import InputError
from specnb.lm.tree import Tree
from specnb.ssm.deltanet import Record, counted, ready

CHUNK = 64
GATE_FLOOR = -1e4
"""e to this is 0 in float32 and float64, as for anything below; but it is finite, and 0 * -inf would be NaN."""


@dataclass(frozen=True, eq=False)
class Factors(Record):
    """What the tokens of a block wrote: k (B, T, HK, dk) of unit length, u (B, T, HV, dv), g (B, T, HV).

    g itself and not its running sum G, which has as many bytes: where strong gates bring G to some thousands,
    e^(G_n - G_t) in float32 would be wrong in the fourth digit.
    """

    u: torch.Tensor
    g: torch.Tensor

    def replay(self, state: torch.Tensor, n: int) -> torch.Tensor:
        """As `Record.replay`, in one matrix product: e^G_n S_0 + sum_t e^(G_n - G_t) k_t u_t^T, G the running sum of g.

        No serial chain, and for that equal to `Raw.replay` only up to rounding.
        """
        state, (k, u, g) = ready(state, **vars(self))
        n = counted(n, u.shape[1])
        later = torch.cat([g[:, 1:n], torch.zeros_like(g[:, :1])], dim=1)[:, :n]
        after = later.flip(1).cumsum(dim=1).flip(1)  # G_n - G_t, summed from the end: no difference of large numbers
        whole = g[:, :n].sum(dim=1)
        written = torch.einsum("bthk,bthv->bhkv", k[:, :n] * after.exp()[..., None], u[:, :n])
        return state * whole.exp()[..., None, None] + written


class Verified(NamedTuple):
    """Outputs (B, T, HV, dv) of every node, and what each would write if it were accepted."""

    outputs: torch.Tensor
    factors: Factors


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    tree: Tree,
) -> Verified:
    """All nodes of a tree against the committed state: each gets what its own path alone would give it.

    The T nodes are along axis 1, in the order of `tree`. Raises InputError for shapes or types that do not fit.
    """
    _check_nodes(k, tree)
    return _solved(q, k, v, g, beta, state, torch.tensor(tree.seen))


def commit(state: torch.Tensor, record: Record, tree: Tree, node: int) -> torch.Tensor:
    """The state after the path down to `node`, from the one the tree was verified against; -1 accepts nothing.

    From a `Raw` record bit for bit what serial decoding gives, from `Factors` up to rounding. Raises InputError for
    a node that is not in the tree, or shapes that do not fit.
    """
    _check_nodes(record.k, tree)
    path = tree.path(node)
    return record.take(path).replay(state, len(path))


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule in blocks of `chunk` tokens: outputs (B, T, HV, dv) and the last state; `recurrent` up to rounding.

    T may be any number; the last chunk is just shorter. Padding (k, g and beta 0) changes nothing. Raises InputError
    for shapes or types that do not fit, or a chunk below 1.
    """
    if chunk < 1:
        raise InputError(f"a chunk holds at least 1 token, got {chunk}; {CHUNK} is usual")
    state, _ = ready(state, q=q, k=k, v=v, g=g, beta=beta)
    state, outputs = state.clone(), [torch.empty_like(v[:, :0], dtype=state.dtype)]
    for at in range(0, q.shape[1], chunk):
        tokens = [x[:, at : at + chunk] for x in (q, k, v, g, beta)]
        n = tokens[0].shape[1]
        read, factors = _solved(*tokens, state, torch.ones(n, n, dtype=torch.bool).tril())
        outputs.append(read)
        state = factors.replay(state, n)
    return torch.cat(outputs, dim=1), state


def _check_nodes(k: torch.Tensor, tree: Tree) -> None:
    if k.ndim != 4 or k.shape[1] != len(tree):
        raise InputError(f"k must be (B, T, HK, dk) with the {len(tree)} nodes of the tree as T, got {tuple(k.shape)}")


def _solved(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    seen: torch.Tensor,
) -> Verified:
    state, tokens = ready(state, q=q, k=k, v=v, g=g, beta=beta)
    qs, ks, vs, gs, betas = (x.transpose(1, 2) for x in tokens)  # heads before tokens: (B, HV, T, ...)
    fade, fade_from_start = _fades(gs, seen.to(state.device))
    known = fade_from_start * (ks @ state)
    weights = fade * (ks @ ks.mT) * betas[..., None]
    u = torch.linalg.solve_triangular(weights, betas[..., None] * (vs - known), upper=False, unitriangular=True)
    outputs = fade_from_start * (qs @ state) + fade * (qs @ ks.mT) @ u
    return Verified(outputs.transpose(1, 2), Factors(k.to(state.dtype), u.transpose(1, 2), g.to(state.dtype)))


def _fades(g: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """g (B, HV, T) -> e^a_ij (B, HV, T, T), 0 unless j is i or an ancestor, and e^a_i (B, HV, T, 1).

    a_ij is summed over the nodes between, never taken as a_i - a_j: that would overflow where j is no ancestor, and
    lose digits where both are large.
    """
    gates = g.clamp(min=GATE_FLOOR)
    on_path = seen.to(g.dtype)
    below = on_path.tril(-1)  # below[m, j]: j is an ancestor of m, so m's gate fades what j wrote
    between = (on_path * gates[..., None, :]) @ below
    return between.masked_fill(~seen, -torch.inf).exp(), (gates @ on_path.mT).exp()[..., None]
