"""Diagonal state space models (Mamba-1, Mamba-2): step by step, over a draft tree at once, and back again by replay.

One recurrence serves both. For a head with state h (head_dim, state_size) and a token's activations x, dt, B, C:

    h <- exp(dt A) h + dt x B^T        y = h C + D x

Mamba-2 has one A a head; Mamba-1 has one A a channel and state column, and is the case of heads of one channel each
(`mamba1`). Because the transition is diagonal, decays along a path multiply into one exponential of a sum, so a packed
tree is verified from the one committed state without storing a state a node (STree, arXiv 2505.14969), and what was
accepted is committed afterwards from x, dt and B alone (activation replay; MambaInLlama, arXiv 2408.15237).

All functions are pure: no argument is written to, and no returned state shares memory with the one given. They work
in the dtype and on the device of the state. A must not be positive and dt not negative, as in every trained model:
then no exponent here is positive and nothing overflows.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.errors import InputError
from specnb.lm.tree import Tree

REJECTED_DT = -1e4
"""Time step before softplus of a slot that must not move the state: softplus gives exactly 0, so exp(dt A) is 1."""


class Activations(NamedTuple):
    """What a block of tokens does to the state, and all that replay keeps of it; C and the gate z are not needed.

    `x` (batch, length, heads, head_dim), `dt` (batch, length, heads) after softplus, `B` (batch, length, groups,
    state_size). Heads share B (and C) in groups of neighbours.
    """

    x: Tensor
    dt: Tensor
    B: Tensor

    def take(self, slots: Sequence[int]) -> "Activations":
        """The activations of these slots, in this order."""
        where = torch.as_tensor(slots, dtype=torch.long, device=self.x.device)
        return Activations(*(part.index_select(1, where) for part in self))

    @property
    def nbytes(self) -> int:
        """Bytes of the record as it is held."""
        return sum(part.nbytes for part in self)


class MultiStep(NamedTuple):
    """`y` of the new tokens, the state after the accepted ones (to be cached), and the state after all."""

    y: Tensor
    accepted_state: Tensor
    last_state: Tensor


def mamba1(x: Tensor, dt: Tensor, B: Tensor) -> Activations:
    """Mamba-1's activations as heads of one channel: `x` and `dt` (batch, length, channels), `B` (batch, length,
    state_size).

    The other arguments follow: A (channels, state_size), D (channels,), C `[:, :, None]`, state (batch, channels, 1,
    state_size), and y comes back as (batch, length, channels, 1).
    """
    return Activations(x.unsqueeze(-1), dt, B.unsqueeze(-2))


def recurrent(
    state: Tensor, block: Activations, A: Tensor, C: Tensor, D: Tensor | None = None, *, every_state: bool = False
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: outputs and the last state, or with `every_state` the state after each token.

    `state` (batch, heads, head_dim, state_size); `A` (heads,) or (heads, state_size); `C` as B; `D` (heads,) or None.
    Returns y (batch, length, heads, head_dim) and the state, with a length axis behind batch if every one is asked for.

    Raises InputError for shapes that do not belong together.
    """
    block, A, C, D = _checked(state, block, A, C, D)
    y = torch.empty_like(block.x)
    states = state.new_empty(y.shape[0], y.shape[1] if every_state else 0, *state.shape[1:])
    state = state if y.shape[1] else state.clone()
    for t in range(y.shape[1]):
        state = _step(state, block, A, t)
        y[:, t] = (state @ _per_head(C[:, t], state).unsqueeze(-1)).squeeze(-1)
        if every_state:
            states[:, t] = state
    if D is not None:
        y = y + D[:, None] * block.x
    return y, states if every_state else state


def replay(state: Tensor, block: Activations, A: Tensor, path: Sequence[int]) -> Tensor:
    """The state after the accepted slots of a block: the same bits as `recurrent` over those tokens alone.

    `path` holds the slots in the order in which they follow each other; none leaves a copy of the state. No output is
    computed, so neither C nor a second forward of the model is needed.

    Raises InputError for shapes that do not belong together and for a path that leaves the block or runs backwards.
    """
    block, A, _, _ = _checked(state, block, A)
    path = _checked_path(path, block.x.shape[1])
    for t in path:
        state = _step(state, block, A, t)
    return state if path else state.clone()


def multi_step(
    state: Tensor,
    cached: Activations,
    path: Sequence[int],
    new: Activations,
    A: Tensor,
    C: Tensor,
    D: Tensor | None = None,
) -> MultiStep:
    """One call a round with one cached state: commit the last round's accepted slots, then run the new tokens.

    MultiStep(h_i, y_1:n, i, j, k) of MambaInLlama (arXiv 2408.15237, algorithm 2): `state` is h_i, `path` the slots
    i..j of `cached` that were accepted, `new` the tokens j..k with their `C`. Keep `accepted_state` (h_j) and `new`
    for the next call; `last_state` (h_k) is good only if all of `new` is accepted.

    Raises InputError as `replay` and `recurrent` do.
    """
    accepted_state = replay(state, cached, A, path)
    y, last_state = recurrent(accepted_state, new, A, C, D)
    return MultiStep(y, accepted_state, last_state)


def tree_scan(state: Tensor, block: Activations, A: Tensor, C: Tensor, tree: Tree, D: Tensor | None = None) -> Tensor:
    """Outputs of every node of a packed draft tree, each as if its path alone had been run (STree, arXiv 2505.14969).

    Slot i of the block is node i of the tree; the other arguments are those of `recurrent`. The state is read, never
    advanced, and no node gets a state: commit with `replay` along `tree.path(node)`. Returns y (batch, nodes, heads,
    head_dim).

    Raises InputError for shapes that do not belong together and a tree of another size than the block.
    """
    block, A, C, D = _checked(state, block, A, C, D)
    if len(tree) != block.x.shape[1]:
        raise InputError(f"a tree of {len(tree)} nodes for a block of {block.x.shape[1]} slots: one node a slot")
    seen = torch.tensor(tree.seen, device=state.device)
    since_state, between = _path_times(seen, block.dt)
    C_head = _per_head(C, state)
    y = torch.einsum("bthn,bhpn->bthp", C_head * torch.exp(since_state.unsqueeze(-1) * A), state)
    within = _within_shared_decay if A.shape[-1] == 1 else _within_decay_of_each_column
    y = y + within(seen, between, A, block, C)
    return y if D is None else y + D[:, None] * block.x


def time_step(
    raw: Tensor,
    bias: Tensor | None = None,
    *,
    limit: tuple[float, float] = (0.0, float("inf")),
    accepted: Tensor | None = None,
) -> Tensor:
    """dt as the models compute it: softplus(raw + bias), then clamped to `limit` (the config's `time_step_limit`).

    `raw` (batch, length, heads). Slots where `accepted` (batch, length) is false get dt 0 by REJECTED_DT before the
    softplus, which fused kernels that take the raw time step allow too: an update that changes nothing, so that a
    block of fixed width can be replayed for every accepted length.

    Raises InputError for a lower limit above 0 together with `accepted`: the clamp would let rejected slots decay.
    """
    if accepted is not None:
        if limit[0] > 0:
            raise InputError(
                f"time_step_limit {tuple(limit)} lifts the zero time step of rejected slots, so they would still "
                "decay the state: replay the accepted slots only (`replay` with their path)"
            )
        raw = raw.masked_fill(~accepted.unsqueeze(-1), REJECTED_DT)
    return F.softplus(raw if bias is None else raw + bias).clamp(*limit)


def silence(block: Activations, accepted: Tensor) -> Activations:
    """The block with x, B and dt of the slots where `accepted` (batch, length) is false set to zero.

    x and B too, not dt alone: what a rejected slot holds may be inf or NaN, and 0 times that is NaN.
    """
    keep = accepted.unsqueeze(-1)
    return Activations(
        block.x.masked_fill(~keep.unsqueeze(-1), 0.0),
        block.dt.masked_fill(~keep, 0.0),
        block.B.masked_fill(~keep.unsqueeze(-1), 0.0),
    )


def _step(state: Tensor, block: Activations, A: Tensor, t: int) -> Tensor:
    """The state after token t. `A` is (heads, 1 or state_size).

    Nothing is computed for several tokens at once: kernels may round an element by its place in the tensor (torch's
    softplus does on CPUs), and replay over part of a block must give the bits of the run over all of it.
    """
    x, dt, B = block.x[:, t], block.dt[:, t].unsqueeze(-1), _per_head(block.B[:, t], state)
    return state * torch.exp(dt * A).unsqueeze(-2) + x.unsqueeze(-1) * (dt * B).unsqueeze(-2)


def _path_times(seen: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Time that passes along paths: from the state to each node (batch, nodes, heads), and from slot j, not counted, to
    node i, counted (batch, heads, i, j), 0 where j is not above i.

    Summed for every pair and not taken as a difference of running sums: after one strong decay (a running sum of
    10,000) such a difference has lost four digits in float32.
    """
    on_path = seen.to(dt.dtype)
    strictly_below = torch.tril(on_path, diagonal=-1)
    since_state = torch.einsum("im,bmh->bih", on_path, dt)
    between = (on_path * dt.transpose(1, 2).unsqueeze(-2)) @ strictly_below
    return since_state, between


def _within_shared_decay(seen: Tensor, between: Tensor, A: Tensor, block: Activations, C: Tensor) -> Tensor:
    """What the nodes add to each other, one A a head: an attention with scores (C_i . B_j) exp(A t_ij) dt_j."""
    scores = torch.einsum("bign,bjgn->bgij", C, block.B)
    scores = scores.repeat_interleave(A.shape[0] // scores.shape[1], dim=1)
    scores = scores * torch.exp(between * A.unsqueeze(-1)).masked_fill(~seen, 0.0)
    return torch.einsum("bhij,bjh,bjhp->bihp", scores, block.dt, block.x)


def _within_decay_of_each_column(seen: Tensor, between: Tensor, A: Tensor, block: Activations, C: Tensor) -> Tensor:
    """The same with one A a state column: the decay stays inside the sum over columns, one node's path at a time."""
    y = torch.empty_like(block.x)
    repeats = A.shape[0] // C.shape[2]
    for node in range(y.shape[1]):
        path = seen[node].nonzero().squeeze(-1)
        products = (C[:, node].unsqueeze(1) * block.B[:, path]).repeat_interleave(repeats, dim=2)
        decay = torch.exp(between[:, :, node, path].transpose(1, 2).unsqueeze(-1) * A)
        scores = (products * decay).sum(-1) * block.dt[:, path]
        y[:, node] = torch.einsum("bjh,bjhp->bhp", scores, block.x[:, path])
    return y


def _per_head(grouped: Tensor, state: Tensor) -> Tensor:
    """B or C of each head: (..., groups, state_size) to (..., heads, state_size)."""
    return grouped.repeat_interleave(state.shape[1] // grouped.shape[-2], dim=-2)


def _checked(
    state: Tensor, block: Activations, A: Tensor, C: Tensor | None = None, D: Tensor | None = None
) -> tuple[Activations, Tensor, Tensor | None, Tensor | None]:
    """All in the state's dtype, A with an axis for state columns. Raises InputError for shapes that do not fit."""
    if state.dim() != 4 or block.x.dim() != 4 or block.B.dim() != 4:
        raise InputError(
            f"state {tuple(state.shape)}, x {tuple(block.x.shape)}, B {tuple(block.B.shape)}: they need four "
            "axes, (batch, heads, head_dim, state_size), (batch, length, heads, head_dim) and (batch, length, groups, "
            "state_size)"
        )
    batch, heads, head_dim, columns = state.shape
    length, groups = block.x.shape[1], block.B.shape[2]
    if groups == 0 or heads % groups:
        raise InputError(f"{heads} heads cannot share B in {groups} groups: groups must divide heads")
    per_token = (batch, length, groups, columns)
    shapes = {"x": (block.x, (batch, length, heads, head_dim)), "dt": (block.dt, (batch, length, heads))}
    shapes |= {"B": (block.B, per_token), "C": (C, per_token), "D": (D, (heads,))}
    shapes["A"] = (A, (heads,) if A.dim() == 1 else (heads, columns))
    for name, (tensor, wanted) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}, but a state {tuple(state.shape)} and x "
                f"{tuple(block.x.shape)} need {wanted}"
            )
    block = Activations(*(part.to(state.dtype) for part in block))
    A = A.to(state.dtype).reshape(heads, -1)
    return block, A, *(part if part is None else part.to(state.dtype) for part in (C, D))


def _checked_path(path: Sequence[int], length: int) -> list[int]:
    try:
        slots = [index(slot) for slot in path]
    except TypeError as error:
        raise InputError(f"a path is a list of slots, whole numbers in order; got {path!r}") from error
    if any(not 0 <= slot < length for slot in slots) or any(b <= a for a, b in pairwise(slots)):
        raise InputError(f"path {slots} in a block of {length}: every slot is in the block and after the one before it")
    return slots
