"""Gated DeltaNet token by token, and its exact replay from a record (the linear layers of Qwen3-Next, Qwen3.5, ...).

The memory of one value head is a matrix S; one token changes it so (arXiv 2412.06464, there transposed):

    S' = e^g S                  forget: the gate fades everything
    u  = beta (v - S'^T k)      surprise: what v holds beyond what the memory already answers to k
    S  = S' + k u^T             write
    o  = S^T q                  read

name    shape               meaning
B, T                        rows of a batch; tokens, or nodes of a tree
HK, HV                      key heads, value heads; value head h uses key head h // (HV / HK)
dk, dv                      width of a key, of a value
q, k    (B, T, HK, dk)      query, key; of unit length, q over sqrt(dk): see `normalise`
v       (B, T, HV, dv)      value
g       (B, T, HV)          log of the gate, <= 0; -inf is a gate of exactly 0
beta    (B, T, HV)          strength of the write
state   (B, HV, dk, dv)     S, at first what the tokens before left: transformers' layout, so its caches fit as they are
u       (B, T, HV, dv)      what a token writes, the part of v that was news
o       (B, T, HV, dv)      outputs

Everything is computed in the type of the state, float32 or float64, whatever the type of the tokens: with bfloat16 in
the recurrence the state drifts until long outputs degenerate. No function writes to its arguments, and no returned
state shares memory with the one given, so a cache can be overwritten in place.

`delta_tree` computes the same for many tokens at once, in chunks and over trees of drafts; `conv` is the short
convolution in front of q, k and v, which has a state of its own to rewind.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from specnb.errors import InputError

AXES = {
    **dict.fromkeys(["q", "k"], ("B", "T", "HK", "dk")),
    **dict.fromkeys(["v", "u"], ("B", "T", "HV", "dv")),
    **dict.fromkeys(["g", "beta"], ("B", "T", "HV")),
    "state": ("B", "HV", "dk", "dv"),
}
"""Shapes of the arguments by name, in the words of the glossary."""


class Recurrence(NamedTuple):
    """What `recurrent` returns; `states[:, t]` (B, T, HV, dk, dv) is the state after token t, None if not asked for."""

    outputs: torch.Tensor
    state: torch.Tensor
    states: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Record(ABC):
    """What is kept of the tokens of a block (B, T, ...), so that the state after any of them can be had again."""

    k: torch.Tensor

    @abstractmethod
    def replay(self, state: torch.Tensor, n: int) -> torch.Tensor:
        """The state after the first n tokens, from the one (B, HV, dk, dv) before them.

        Raises InputError for shapes or types that do not fit, or n outside 0..T.
        """

    def take(self, path: Sequence[int]) -> Self:
        """The record of these tokens alone, in this order: of a path of a tree, see `Tree.path`."""
        return type(self)(**{name: x[:, list(path)] for name, x in vars(self).items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens, in the types they are kept in."""
        return sum(x.nbytes for x in vars(self).values())


@dataclass(frozen=True, eq=False)
class Raw(Record):
    """What the tokens of a block were fed as: k (B, T, HK, dk) of unit length, v (B, T, HV, dv), g, beta (B, T, HV).

    q is not in it: reading changes nothing. To keep a bfloat16 model's record at its own size, keep k as projected
    and pass it through `unit` before the replay: kernels take the length in float32 as well, so the bits are the same.
    """

    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def replay(self, state: torch.Tensor, n: int) -> torch.Tensor:
        """As `Record.replay`, one token after the other: bit for bit the state of `recurrent`."""
        state, (k, v, g, beta) = ready(state, **vars(self))
        for t in range(counted(n, k.shape[1])):
            state = _write(state, k[:, t], v[:, t], g[:, t], beta[:, t])
        return state if n else state.clone()


def unit(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`x` with its last axis of unit length, computed in `dtype`, as transformers and FLA do it (epsilon 1e-6)."""
    x = x.to(dtype).contiguous()  # layers hand out views of (B, C, T); the order of a sum follows the layout
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def normalise(
    q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (..., dk) as a model projects them -> as the rule reads them: of unit length, q over sqrt(dk)."""
    return unit(q, dtype) / q.shape[-1] ** 0.5, unit(k, dtype)


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    every_state: bool = False,
) -> Recurrence:
    """The rule token by token: outputs (B, T, HV, dv), the last state, and with `every_state` the one after each token.

    `state` None is a memory of zeros. One block of T tokens and T blocks of one give the same bits, and those are the
    bits of transformers' `torch_recurrent_gated_delta_rule`. Raises InputError for shapes or types that do not fit.
    """
    state, (q, k, v, g, beta) = ready(state, q=q, k=k, v=v, g=g, beta=beta)
    if not q.shape[1]:
        return Recurrence(v, state.clone(), state[:, None][:, :0] if every_state else None)
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = _write(state, k[:, t], v[:, t], g[:, t], beta[:, t])
        outputs.append(_read(state, q[:, t]))
        if every_state:
            states.append(state)
    return Recurrence(torch.stack(outputs, dim=1), state, torch.stack(states, dim=1) if every_state else None)


def _write(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    # the operations and their order are transformers': a product and a sum, no matmul and no fused multiply-add,
    # because a replay must give the bits of the decode it stands for
    faded = state * g.exp()[..., None, None]
    u = (v - _read(faded, k)) * beta[..., None]
    return faded + k[..., :, None] * u[..., None, :]


def _read(state: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (state * q[..., :, None]).sum(dim=-2)


def ready(state: torch.Tensor | None, **tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state and the named tokens, checked against each other, in the type of the state, one key head a value head.

    A state of None becomes zeros, in float64 if v is. Raises InputError, with the shapes, for what does not fit.
    """
    sizes = _sizes(state, tokens)
    if state is None:
        dtype = torch.promote_types(tokens["v"].dtype, torch.float32)
        state = tokens["v"].new_zeros([sizes[axis] for axis in ("B", "HV", "dk", "dv")], dtype=dtype)
    if state.dtype not in (torch.float32, torch.float64):
        raise InputError(f"the state is kept in float32 or float64, got {state.dtype}: it drifts in less, cast it up")
    spread = {"HK": sizes["HV"] // sizes["HK"], "HV": 1}
    return state.contiguous(), [
        x.to(state.dtype).repeat_interleave(spread[AXES[name][2]], dim=2).contiguous() for name, x in tokens.items()
    ]


def counted(n: int, there: int) -> int:
    """n, if a record of `there` tokens holds that many; InputError otherwise."""
    if not 0 <= n <= there:
        raise InputError(f"the record holds {there} tokens: 0 to {there} of them can be replayed, got {n}")
    return n


def _sizes(state: torch.Tensor | None, tokens: dict[str, torch.Tensor]) -> dict[str, int]:
    """The size of every axis named in AXES; the first tensor that has an axis says how long it is."""
    given = tokens if state is None else {**tokens, "state": state}
    sizes: dict[str, int] = {}
    for name, x in given.items():
        if not x.is_floating_point():
            raise InputError(f"{name} must hold floats, got {x.dtype}")
        axes = AXES[name]
        if x.ndim != len(axes) or any(sizes.setdefault(a, n) != n for a, n in zip(axes, x.shape, strict=True)):
            shapes = ", ".join(f"{other} {tuple(y.shape)}" for other, y in given.items())
            raise InputError(f"{name} must be ({', '.join(axes)}) and fit the others, got {shapes}")
    if not sizes["HK"] or sizes["HV"] % sizes["HK"]:
        raise InputError(f"value heads must be a multiple of key heads, got {sizes['HV']} and {sizes['HK']}")
    return sizes
