"""Weights as integer codes with a scale and an offset per group: w = scale * code + offset.

Q4_0, Q4_1 and Q4_K blocks of a GGUF file have this form, in groups of 32. All other weights are
rounded to 8-bit codes in longer groups, because a forward pass also reads the scales and offsets.
"""

import mmap
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

GROUP = 32
"""Number of weights that share a scale and an offset, for 4-bit codes."""
LONG_GROUPS = (128, 64, 32)
"""The same for 8-bit codes: the first that divides the row length."""


class Blocks(NamedTuple):
    """Rows of a matrix as codes of 4 or 8 bits."""

    codes: Tensor  # (rows, inputs) uint8
    scales: Tensor  # (rows, inputs / group) float32
    offsets: Tensor  # (rows, inputs / group) float32


@dataclass(frozen=True)
class FileMatrix:
    """A matrix in a GGUF file: `data (outputs, bytes per row)` maps the file; rows are read on use.

    `order[i]` is the row of the file for row i of the matrix (None: the same order). Types
    other than LAYOUTS are rounded to codes of `most_bits` bits, 4 or 8.
    """

    kind: Kind
    data: np.ndarray
    shape: tuple[int, int]
    order: np.ndarray | None = None
    most_bits: int = 8

    @property
    def bits(self) -> int:
        """Bits per code: 4 or 8."""
        return 4 if self.kind in LAYOUTS else self.most_bits

    def blocks(self, rows: slice) -> Blocks:
        """Return these rows as codes of `bits` bits."""
        if self.kind not in LAYOUTS:
            return round_rows(self.weights(rows), self.bits)
        n_bytes, split = LAYOUTS[self.kind]
        parts = split(torch.from_numpy(self._read(rows)).unflatten(1, (-1, n_bytes)))
        return Blocks(*(part.flatten(1) for part in parts))

    def weights(self, rows: slice | np.ndarray) -> Tensor:
        """Return these rows `(n, inputs)` in float32."""
        data = self._read(rows)
        if self.kind is Kind.Q6_K:  # a third of a Q4_K_M file, where gguf takes seconds
            return _weights_q6_k(torch.from_numpy(data).unflatten(1, (-1, 210)))
        return torch.from_numpy(dequantize(data, self.kind))

    def forget(self) -> None:
        """Release the mapped pages of the file; the system decides when to free them."""
        if isinstance(self.data, np.memmap):
            pages = self.data._mmap  # pyright: ignore[reportAttributeAccessIssue]
            pages.madvise(mmap.MADV_DONTNEED)

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        return self.data[rows if self.order is None else self.order[rows]].copy()


@dataclass(frozen=True)
class RoundedMatrix:
    """A floating-point matrix, rounded on use between each group's minimum and maximum."""

    weight: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.weight.shape
        return outputs, inputs

    def blocks(self, rows: slice | np.ndarray) -> Blocks:
        return round_rows(self.weight[rows].float(), self.bits)

    def forget(self) -> None:
        """Do nothing: the weights are in memory."""

    def weights(self, rows: slice | np.ndarray) -> Tensor:
        codes, scales, offsets = self.blocks(rows)
        return (
            codes.unflatten(1, (scales.shape[1], -1)) * scales[..., None] + offsets[..., None]
        ).flatten(1)


Matrix = FileMatrix | RoundedMatrix
"""A matrix `(outputs, inputs)`, read in slices of rows."""


def group_of(inputs: int, bits: int) -> int:
    """Return the number of weights in a row of `inputs` that share a scale and an offset.

    >>> group_of(1536, 4), group_of(1536, 8), group_of(576, 8)
    (32, 128, 64)
    """
    return GROUP if bits == 4 else next(n for n in LONG_GROUPS if inputs % n == 0)


def round_rows(weight: Tensor, bits: int) -> Blocks:
    """Round `weight (…, inputs)` to `2**bits` evenly spaced values between each group's extremes.

    >>> codes, scales, offsets = round_rows(torch.linspace(-1, 1, 32)[None], 4)
    >>> codes.unique().tolist() == [*range(16)], scales.item(), offsets.item()
    (True, 0.13333334028720856, -1.0)
    """
    groups = weight.unflatten(-1, (-1, group_of(weight.shape[-1], bits)))
    offsets, most = groups.aminmax(dim=-1)
    scales = (most - offsets) / (2**bits - 1)
    codes = (groups - offsets[..., None]).div_(torch.where(scales > 0, scales, 1)[..., None])
    return Blocks(codes.round_().byte().flatten(-2), scales, offsets)


def _halves(data: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of each block, `(rows, blocks, 1)` float32."""
    return data[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the low 4 bits of all bytes, then the high 4 bits."""
    return torch.cat([data & 15, data >> 4], -1)


def _split_q4_0(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _halves(data, 0)
    return _nibbles(data[..., 2:]), scale, -8 * scale


def _split_q4_1(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(data[..., 4:]), _halves(data, 0), _halves(data, 2)


def _split_q4_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split blocks of eight groups of 32: 6-bit scales and minima; two groups share 32 bytes."""
    low, middle, high = data[..., 4:16].split(4, -1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    codes = _nibbles(data[..., 16:].unflatten(2, (4, 32)))
    return codes.flatten(2), _halves(data, 0) * scales, -_halves(data, 2) * minima


def _weights_q6_k(data: Tensor) -> Tensor:
    """Return the weights of blocks `(rows, blocks, 210)`: codes of 6 bits in groups of 16."""
    low = data[..., :128].unflatten(2, (2, 2, 32))
    high = data[..., 128:192].unflatten(2, (2, 1, 32))
    high = torch.cat([high << 4, high << 2, high, high >> 2], 3) & 48  # (rows, blocks, 2, 4, 32)
    codes = torch.cat([low & 15, low >> 4], 3) | high
    scales = data[..., 192:208].contiguous().view(torch.int8) * _halves(data, 208)
    weights = (codes.flatten(2).unflatten(2, (16, 16)) - 32.0) * scales[..., None]
    return weights.flatten(1)


LAYOUTS = {
    Kind.Q4_0: (18, _split_q4_0),
    Kind.Q4_1: (20, _split_q4_1),
    Kind.Q4_K: (144, _split_q4_k),
}
"""Bytes per block, and a function that splits `(rows, blocks, bytes)` into 4-bit codes, scales and
offsets. Source: `block_q4_0`, `block_q4_1` and `block_q4_K` in ggml/src/ggml-common.h."""
