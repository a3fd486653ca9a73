"""What is kept of a tensor: its digest, its statistics, and a sketch of each of its tokens.

Works on a stack of tensors of one shape at once: a decoding step shows a thousand small ones, and the calls would cost
more than the numbers. The sums are float32 within a token and float64 over tokens.

A tensor without a token axis has no sketch: there is no position at which it could be compared, so its digest and its
statistics stand for it.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from specnb.divergence.tracing.names import dtype_name
from specnb.divergence.tracing.sketch import TOKEN_K, digest_bytes, signs

# Masks hold the lowest float32; in a sketch its square would overflow.
LARGEST = 1e15
# Values whose spread is measured together: logits of a prompt are more than a cache holds.
AT_ONCE = 1 << 18

STATISTICS = ("mean", "std", "l1", "l2", "min", "max", "n_nan", "n_inf")


@dataclass(frozen=True)
class Prints:
    """Of a stack of n tensors: `statistics` name -> (n,), `tokens` float32 (n, t, 16) and `token_l2` float32 (n, t),
    None where there are no tokens. Sketches of a tensor's tokens laid end to end are one of the whole tensor."""

    statistics: dict[str, np.ndarray]
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
    return Prints(one, *(None if x is None else x[0] for x in (many.tokens, many.token_l2)))


@torch.no_grad()
def fingerprints(stack: torch.Tensor, token_axis: int = -1) -> Prints:
    """Statistics (float64, over the finite values) and sketches of a stack `(n, *shape)` of tensors, any dtype.

    `token_axis` counts within `shape`; the axes before it, if any, are the batch, so tokens come batch by batch; -1:
    no tokens. NaN and infinities count as 0 in sketches, and what is beyond 1e15 as that. An empty tensor has the
    statistics of no values: sums 0, the others NaN.

    Sketches are stored in float32. Integers are summed exactly before, so two tokens of integers have two sketches
    unless their sums differ by less than float32 can hold: an id of 2**24 alone in its token and the one after it are
    told apart by the digest of the tensor only.
    """
    if stack.is_complex():
        stack = torch.view_as_real(stack)
    if stack.numel() == 0:
        return _empty(stack.shape, token_axis)
    if stack.device.type == "mps":  # which has no float64
        stack = stack.cpu()
    prints = _finite_prints(stack.to(dtype_of_product(stack.device.type, stack.dtype, _cpu_precision())), token_axis)
    for i in np.flatnonzero(~(prints.statistics["l1"] <= LARGEST)):  # NaN is not less than anything
        _mend(prints, int(i), stack[i], token_axis)
    return prints


def dtype_of_product(device_type: str, dtype: torch.dtype, cpu_precision: str = "none") -> torch.dtype:
    """In which type values of `dtype` meet the signs: float32 where it keeps its 24 bits and holds the values.

    Elsewhere float64: integers and float64 do not fit; an accelerator may be set to multiply float32 with 10 bits
    (TF32), and a processor with 8 (`cpu_precision`, torch's setting for its matrix products, "bf16"). That a float64
    product cannot be so set costs less than to change a setting that other threads see.
    """
    exact = cpu_precision in ("none", "ieee", "highest")
    fits = dtype.is_floating_point and dtype is not torch.float64
    return torch.float32 if device_type == "cpu" and exact and fits else torch.float64


def _cpu_precision() -> str:
    """torch's setting for products of float32 on the processor; before torch 2.9 there was one for all devices."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision


def _finite_prints(stack: torch.Tensor, token_axis: int) -> Prints:
    """Of a stack of float32 or float64 of moderate values; where they are not, `l1` is NaN or above LARGEST."""
    rows = token_rows(stack, token_axis)
    if token_axis < 0:  # one long row
        tokens, sums = None, rows.sum(-1, dtype=torch.float64)
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    else:
        signed = rows @ token_signs(rows.shape[-1], rows.dtype, str(stack.device))
        tokens, sums = _numpy((signed[..., :TOKEN_K] / math.sqrt(TOKEN_K)).float()), signed[..., TOKEN_K]
        norms = torch.linalg.vector_norm(rows, dim=-1)
    means, variances = _moments(rows, sums, norms)
    mean = means.mean(-1)
    # the law of total variance: within the tokens, and between them
    variance = variances.mean(-1) + (means - mean[:, None]).square().mean(-1)
    statistics = {
        "mean": mean,
        "std": variance.sqrt(),
        "l1": rows.abs().sum(-1).double().sum(-1),
        "l2": torch.linalg.vector_norm(norms.double(), dim=-1),
        "min": rows.amin(-1).amin(-1).double(),
        "max": rows.amax(-1).amax(-1).double(),
    }
    columns = {name: _numpy(column) for name, column in statistics.items()}
    columns |= {name: np.zeros(len(stack), np.int64) for name in ("n_nan", "n_inf")}
    return Prints(columns, tokens, None if tokens is None else _numpy(norms.float()))


def _moments(rows: torch.Tensor, sums: torch.Tensor, norms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance `(n, t)` float64 of rows `(n, t, values)`, from their sums and norms where that is right.

    The mean square less the square of the mean has no digits left where the mean is far larger than the spread: those
    rows are done again around their mean, which need not be exact, for what it is off by is in what is left.
    """
    (n, t, size), rows = rows.shape, rows.flatten(0, 1)
    means = sums.flatten().double() / size
    variances = norms.flatten().double().square() / size - means.square()
    narrow = (means.square() > variances).nonzero()[:, 0]
    for some in narrow.split(max(AT_ONCE // size, 1)):
        about = means[some].to(rows.dtype)
        rest = rows[some] - about[:, None]
        off = rest.sum(-1, dtype=torch.float64) / size
        means[some] = about.double() + off
        square = torch.linalg.vector_norm(rest, dim=-1, dtype=torch.float64).square() / size
        variances[some] = (square - off.square()).clamp(min=0)
    return means.view(n, t), variances.view(n, t)


def _mend(prints: Prints, i: int, tensor: torch.Tensor, token_axis: int) -> None:
    """Fill place i again: something in it is not finite, or too large for sums in float32."""
    wide = tensor.double()
    if prints.tokens is not None:
        again = _finite_prints(wide.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)[None], token_axis)
        prints.tokens[i], prints.token_l2[i] = again.tokens[0], again.token_l2[0]
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
        return Prints(columns, None, None)
    t = math.prod(shape[1 : token_axis + 2]) if token_axis < 2 else shape[1] * shape[token_axis + 1]
    return Prints(columns, np.zeros((n, t, TOKEN_K), np.float32), np.zeros((n, t), np.float32))


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


def token_signs(features: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """`(features, 17)`: sixteen columns of signs, and ones, which give the sum of a token's values."""
    return _token_signs(1 << (features - 1).bit_length(), dtype, device)[:features]


@functools.lru_cache(maxsize=32)
def _token_signs(rows: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    table = signs(rows)[:, : TOKEN_K + 1]
    table[:, TOKEN_K] = 1
    return torch.from_numpy(table).to(device, dtype)


def _as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values, order="C"))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
