"""Seeded random-sign sketches: what two tokens of many features differ by, told from 16 numbers of each.

A sketch is a linear map s = R x with signs R, scaled so that <s_a, s_b> estimates <a, b> (Alon, Matias and Szegedy
1996; Achlioptas 2003). The signs come from a counter hash, so every machine and version draws the same ones. To
compare sketches numpy is enough; `fingerprint` makes them, and only to make digests xxhash is needed.
"""

from typing import NamedTuple

import numpy as np

TOKEN_K = 16
DIGEST = "xxh3-128"
"""How `digest_bytes` makes digests: those of two algorithms cannot be compared."""

_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 2 << 56
"""Far from the counters that another use of the hash would start at."""


class Estimate(NamedTuple):
    """A value told from sketches, and its standard error; arrays where stacks of sketches were given."""

    value: np.ndarray
    error: np.ndarray


def signs(count: int) -> np.ndarray:
    """Signs `(count, 64)` int8, one row for each feature of a token; row i depends on i only.

    The hash is splitmix64 (Steele, Lea and Flood 2014), the counter its index.
    """
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_STREAM)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    bits = np.unpackbits(z.astype("<u8").view(np.uint8).reshape(count, 8), axis=1)
    return bits.astype(np.int8) * np.int8(2) - np.int8(1)


def digest_bytes(dtype: str, shape: tuple[int, ...], data: object) -> str:
    """32 hexadecimal digits of a tensor: its dtype (torch's name), its shape, its bytes in logical order.

    XXH3 with 128 bits: tensors are not forged, and a cryptographic hash of every activation costs half a forward.
    """
    import xxhash

    state = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    state.update(data)
    return state.hexdigest()


def relative_l2(a: np.ndarray, b: np.ndarray, *, norm: np.ndarray | None = None) -> Estimate:
    """||b - a|| / ||a|| of the tensors behind the sketches `(..., k)`; 0 where both are zero, inf where only a is.

    `norm`: the exact ||a|| (the column l2, or token_l2), which takes the noise of the denominator away. The standard
    error is value / sqrt(2 k) with it and value / sqrt(k) without. Values below 3e-7 are rounding of the sketches:
    whether two tensors are equal is told by their digests.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    top = np.linalg.norm(b - a, axis=-1)
    below = np.linalg.norm(a, axis=-1) if norm is None else np.asarray(norm, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(top == 0, 0.0, top / below)
        return Estimate(value, value / np.sqrt(a.shape[-1] * (1 if norm is None else 2)))


def gain(a: np.ndarray, b: np.ndarray) -> Estimate:
    """<a, b> / <a, a> of the tensors behind the sketches `(..., k)`: 1.02 where b = 1.02 a; NaN where a is zero.

    The standard error is ||b - gain a|| / ||a|| / sqrt(k), so a pure scale has an error of 0.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (a * a).sum(-1)
        value = (a * b).sum(-1) / square
        rest = np.linalg.norm(b - value[..., None] * a, axis=-1)
        return Estimate(value, rest / np.sqrt(square * a.shape[-1]))
