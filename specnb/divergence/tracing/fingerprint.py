"""What is kept of a tensor: its digest, its statistics, and a sketch of each of its tokens or, without any, of it all.

Works on a stack of tensors of one shape at once: a decoding step shows a thousand small ones, and the calls would cost
more than the numbers. The sums are float32 within a token and float64 over tokens.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from specnb.divergence.tracing.names import dtype_name
from specnb.divergence.tracing.sketch import BITS, TENSOR_K, TOKEN_K, digest_bytes, signs

# A prime, so that a channel that repeats with the width of the model (a power of two, say) falls on all columns.
BLOCK = 4093
# Block b takes its signs from place 61 b on: the blocks differ, and no sign matrix of the tensor's size is held.
SHIFT = 61
BLOCKS_AT_ONCE = 256
# Masks hold the lowest float32; in a sketch its square would overflow.
LARGEST = 1e15

STATISTICS = ("mean", "std", "l1", "l2", "min", "max", "n_nan", "n_inf")


@dataclass(frozen=True)
class Prints:
    """Of a stack of n tensors: `statistics` name -> (n,), then `tokens` (n, t, 16) and `token_l2` (n, t), or where
    there are no tokens `sketch` (n, 64). Sketches of a tensor's tokens laid end to end are one of the whole tensor."""

    statistics: dict[str, np.ndarray]
    sketch: np.ndarray | None
    tokens: np.ndarray | None
    token_l2: np.ndarray | None


def digest(values: torch.Tensor | np.ndarray) -> str:
    """Order-sensitive digest (XXH3, 32 hexadecimal digits) over dtype, shape and bytes in logical order."""
    return digests(_as_tensor(values)[None])[0]


def digests(stack: torch.Tensor) -> list[str]:
    """The digest of each tensor of a stack `(n, *shape)`."""
    n, shape, dtype = len(stack), tuple(stack.shape[1:]), dtype_name(stack)
    # by strides: one value counts as contiguous whatever its stride, and then cannot be viewed as bytes
    flat = stack.detach().resolve_conj().resolve_neg().contiguous().as_strided((stack.numel(),), (1,))
    rows = flat.view(torch.uint8).cpu().numpy().reshape(n, -1 if stack.numel() else 0)
    return [digest_bytes(dtype, shape, row.data) for row in rows]


def fingerprint(values: torch.Tensor | np.ndarray, token_axis: int = -1) -> Prints:
    """`fingerprints` of one tensor, without the leading axis of the stack."""
    many = fingerprints(_as_tensor(values)[None], token_axis)
    one = {name: column[0] for name, column in many.statistics.items()}
    return Prints(one, *(None if x is None else x[0] for x in (many.sketch, many.tokens, many.token_l2)))


@torch.no_grad()
def fingerprints(stack: torch.Tensor, token_axis: int = -1) -> Prints:
    """Statistics (float64, over the finite values) and sketches of a stack `(n, *shape)` of tensors, any dtype.

    `token_axis` counts within `shape`; the axes before it, if any, are the batch, so tokens come batch by batch; -1:
    no tokens. NaN and infinities count as 0 in sketches, and what is beyond 1e15 as that. An empty tensor has the
    statistics of no values: sums 0, the others NaN.
    """
    if stack.is_complex():
        stack = torch.view_as_real(stack)
    if stack.numel() == 0:
        return _empty(stack.shape, token_axis)
    prints = _finite_prints(stack.to(torch.float32), token_axis)
    for i in np.flatnonzero(~np.isfinite(prints.statistics["l2"] + prints.statistics["l1"])):
        _mend(prints, int(i), stack[i], token_axis)
    return prints


def _finite_prints(stack: torch.Tensor, token_axis: int) -> Prints:
    rows = token_rows(stack, token_axis)
    n, n_values = len(stack), stack[0].numel()
    if token_axis < 0:
        sums, tokens, norms = rows.sum(-1, dtype=torch.float64), None, torch.linalg.vector_norm(rows.double(), dim=-1)
    else:
        signed = rows @ token_signs(rows.shape[-1], str(stack.device))
        sums, tokens, norms = (
            signed[..., TOKEN_K].double(),
            signed[..., :TOKEN_K],
            torch.linalg.vector_norm(rows, dim=-1),
        )
        tokens = _numpy(tokens / math.sqrt(TOKEN_K))
    mean = sums.sum(-1) / n_values
    square = norms.double().square().sum(-1)
    statistics = {
        "mean": mean,
        "std": (square / n_values - mean.square()).clamp(min=0).sqrt(),
        "l1": rows.abs().sum(-1).double().sum(-1),
        "l2": square.sqrt(),
        "min": rows.amin(-1).amin(-1).double(),
        "max": rows.amax(-1).amax(-1).double(),
    }
    columns = {name: _numpy(column) for name, column in statistics.items()}
    columns |= {name: np.zeros(n, np.int64) for name in ("n_nan", "n_inf")}
    if tokens is None:
        return Prints(columns, _sketch(stack.reshape(n, -1)), None, None)
    return Prints(columns, None, tokens, _numpy(norms))


def _mend(prints: Prints, i: int, tensor: torch.Tensor, token_axis: int) -> None:
    """Fill place i again: something in it is not finite, or too large for float32 sums."""
    clean = tensor.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
    again = _finite_prints(clean[None], token_axis)
    if prints.tokens is None:
        prints.sketch[i] = again.sketch[0]
    else:
        prints.tokens[i], prints.token_l2[i] = again.tokens[0], again.token_l2[0]
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    found = {"n_nan": int(wide.isnan().sum()), "n_inf": int(wide.isinf().sum())}
    if finite.numel():
        found |= {"mean": finite.mean(), "std": finite.std(correction=0), "min": finite.min(), "max": finite.max()}
        found |= {"l1": finite.abs().sum(), "l2": torch.linalg.vector_norm(finite)}
    else:
        found |= dict.fromkeys(("mean", "std", "min", "max"), math.nan) | {"l1": 0.0, "l2": 0.0}
    for name, value in found.items():
        prints.statistics[name][i] = float(value)


def _empty(shape: torch.Size, token_axis: int) -> Prints:
    n = shape[0]
    columns = {name: np.full(n, math.nan) for name in ("mean", "std", "min", "max")}
    columns |= {name: np.zeros(n) for name in ("l1", "l2")} | {
        name: np.zeros(n, np.int64) for name in ("n_nan", "n_inf")
    }
    if token_axis < 0:
        return Prints(columns, np.zeros((n, TENSOR_K), np.float32), None, None)
    t = math.prod(shape[1 : token_axis + 2]) if token_axis < 2 else shape[1] * shape[token_axis + 1]
    return Prints(columns, None, np.zeros((n, t, TOKEN_K), np.float32), np.zeros((n, t), np.float32))


def token_rows(stack: torch.Tensor, token_axis: int) -> torch.Tensor:
    """A stack `(n, *shape)` as `(n, tokens, features)`; without a token axis `(n, 1, values)`.

    `(batch, heads, length, dim)` with axis 2 gives batch * length tokens of heads * dim features.
    """
    n = len(stack)
    if token_axis < 0:
        return stack.reshape(n, 1, -1)
    stack = stack.movedim(token_axis + 1, min(token_axis, 1) + 1)
    tokens = stack.shape[1] * (stack.shape[2] if token_axis else 1)
    return stack.reshape(n, tokens, -1)


def _sketch(flat: torch.Tensor) -> np.ndarray:
    """Sketches `(n, 64)` of rows `(n, values)`: values fall with a sign on BLOCK columns, these on 64 with signs again.

    One multiplication a value. Two values of one column meet with their own signs, so the first step adds a variance of
    about 2 / BLOCK beside the 2 / 64 of the second.
    """
    n, values = flat.shape
    whole = values // BLOCK
    device = str(flat.device)
    places = block_signs(1 << (whole * SHIFT + BLOCK).bit_length(), device)
    width = min(values, BLOCK)  # most tensors of a decoding step are far smaller than a block
    folded = flat.new_zeros((n, width))
    for start in range(0, whole, BLOCKS_AT_ONCE):
        end = min(whole, start + BLOCKS_AT_ONCE)
        signed = places.as_strided((end - start, BLOCK), (SHIFT, 1), start * SHIFT)
        folded += (flat[:, start * BLOCK : end * BLOCK].reshape(n, -1, BLOCK) * signed).sum(1)
    if rest := values - whole * BLOCK:
        folded[:, :rest] += flat[:, whole * BLOCK :] * places[whole * SHIFT : whole * SHIFT + rest]
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is made again by `_mend`
        return _numpy(folded.double() @ tensor_signs(device)[:width] / math.sqrt(TENSOR_K)).astype(np.float32)


@functools.lru_cache(maxsize=4)
def tensor_signs(device: str) -> torch.Tensor:
    """`(BLOCK, 64)` float64."""
    return torch.from_numpy(signs("tensor", BLOCK)).to(device, torch.float64)


def token_signs(features: int, device: str) -> torch.Tensor:
    """`(features, 17)` float32: sixteen columns of signs, and ones, which give the sum of a token's values."""
    return _token_signs(1 << (features - 1).bit_length(), device)[:features]


@functools.lru_cache(maxsize=32)
def _token_signs(rows: int, device: str) -> torch.Tensor:
    table = signs("token", rows)[:, : TOKEN_K + 1].astype(np.float32)
    table[:, TOKEN_K] = 1
    return torch.from_numpy(table).to(device)


@functools.lru_cache(maxsize=32)
def block_signs(count: int, device: str) -> torch.Tensor:
    """`(count,)` float32; `count` is a multiple of 64."""
    return torch.from_numpy(signs("block", count // BITS).reshape(-1).astype(np.float32)).to(device)


def _as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values, order="C"))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
