"""Nodes of llama.cpp's graphs under names and in shapes that are the same in every run, however many tokens it fed."""

import re
from dataclasses import dataclass, field

import numpy as np

from specnb.divergence.tracing.tokens import Step
from specnb.lm.gguf_tensors import Node

LAYERED = re.compile(r"(?:model\.)?(.+)-([0-9]+)")
NAMELESS = re.compile(r"(node|leaf)_[0-9]+|")
WEIGHT = re.compile(r"blk\.([0-9]+)\.(.+?)(?:\.weight|\.bias)?")
CACHE = re.compile(r"cache_([a-z]+)_l([0-9]+)")
STATE_NAMES = {"k": "keys", "v": "values"}
SHOWN_AGAIN = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing."""
MOVED = frozenset({"GET_ROWS", "SET_ROWS", "CPY", "CONT", "DUP", "SCALE"})
"""Operations by which a cache is read and written as a whole."""


def path_of(node: Node) -> str | None:
    """`layers.3.ffn_out` of `ffn_out-3` and of views of it; other names as they are; None where nothing tells it.

    A node without a name is called after the weight it reads (`layers.0.ssm_in`), or after its operation if it reads
    the cache of a layer (`layers.0.flash_attn_ext`).
    """
    plain = _plain(node)
    if NAMELESS.fullmatch(plain):
        return _path_by_reading(node.base)
    layered = LAYERED.fullmatch(plain)
    return f"layers.{layered[2]}.{layered[1]}" if layered else plain.removeprefix("model.")


def own_path(node: Node) -> str | None:
    """The path of a node that computes something, or shows something under a new name; None of all others."""
    if " (" in node.name or 0 in node.shape:
        return None
    path = path_of(node)
    if node.op in SHOWN_AGAIN and (not node.sources or path_of(node.sources[0]) == path):
        return None
    return path


def _plain(node: Node) -> str:
    """Views and copies add ` (view)` and the like to the name of what they show."""
    return node.name.split(" (", 1)[0]


def _path_by_reading(node: Node) -> str | None:
    for source in node.sources:
        if (cache := CACHE.fullmatch(_plain(source))) and node.op not in MOVED:
            return f"layers.{cache[2]}.{node.op.lower()}"
    for source in node.sources:
        if weight := WEIGHT.fullmatch(_plain(source)):
            return f"layers.{weight[1]}.{weight[2]}"
    return None


def is_cache(source: Node) -> bool:
    """Whether it shows what earlier tokens left."""
    return CACHE.fullmatch(_plain(source)) is not None


@dataclass(frozen=True)
class GraphStep(Step):
    """One llama_decode. `rows`: its last tokens, those with logits; the last layer goes on with these alone.

    `tokens_in`: (role, name) of the tensors of the node at hand that have a token axis: it is their first.
    """

    rows: int = 0
    tokens_in: set[tuple[str, str]] = field(default_factory=set)

    def token_axis(self, role: str, name: str, shape: tuple[int, ...]) -> int:
        if role == "state":
            return super().token_axis(role, name, shape)
        return 0 if (role, name) in self.tokens_in else -1

    def ambiguous(self, role: str, shape: tuple[int, ...]) -> bool:
        return False  # operations tell

    def first_position(self, role: str, axis: int, shape: tuple[int, ...]) -> int:
        return 0 if axis < 0 else max(self.first + self.length - shape[axis], 0)

    @property
    def cells(self) -> int:
        """Of a cache that are in use after this step."""
        return self.first + self.length


def in_order(node: Node, values: np.ndarray, step: GraphStep) -> tuple[np.ndarray, bool]:
    """`values` (four axes) with the token axis first and without others of size 1; and whether it has a token axis.

    ggml names no axes: the token axis is told by its size, by the operation, and in attention by whose permutation it
    follows. Attention looks at more cells of the cache than hold tokens: its columns for the others are cut off.
    """
    axis = _token_axis(node, values.dtype, step)
    if "kq" in node.name and "kqv" not in node.name:
        values = values[..., : step.cells]
    if axis >= 0:
        values = np.moveaxis(values, axis, 0)
    dropped = tuple(i for i in range(values.ndim - 1, -1, -1) if values.shape[i] == 1 and (i or axis < 0))
    return values.squeeze(dropped[: values.ndim - 1]), axis >= 0


def cache_state(node: Node, source: Node, step: GraphStep) -> tuple[str, np.ndarray] | None:
    """What a node of attention reads from the cache: its name and `(heads, cells, dim)`; None of other sources."""
    cache = CACHE.fullmatch(_plain(source))
    values = source.values() if cache and cache[1] in STATE_NAMES else None
    if values is None:
        return None
    name, values = STATE_NAMES[cache[1]], values[0]
    if name == "values" and node.op == "MUL_MAT":  # without flash attention the values lie transposed
        values = values.swapaxes(-1, -2)
    return name, values[:, : step.cells]


def _token_axis(node: Node, dtype: np.dtype, step: GraphStep) -> int:
    """Of the four axes (ggml's backwards): 1 as in (1, tokens, heads, dim), 2 as in (…, tokens, features), or -1."""
    sizes, lengths = node.shape, (step.length, step.rows)
    if dtype.kind == "i" and sizes[:3] == (1, 1, 1) and sizes[3] in lengths:
        return 3  # ids, positions
    stacked = _of_experts(node) or (sizes[1] > 1 and not _turned(node))
    flat = (2,) if sizes[1] > 1 else (2, 1)  # the second: heads of one token
    axes = (1,) if stacked else flat
    return next((axis for length in lengths for axis in axes if sizes[axis] == length), -1)


def _turned(node: Node) -> bool:
    """Whether heads come before tokens: so it is from the permutation of the queries to that of their result."""
    turned = False
    while node.sources and node.shape[1] > 1:
        if node.op == "PERMUTE":
            turned = not turned
            node = node.sources[0]
        elif node.op == "MUL_MAT":
            node = node.sources[1]
        elif node.op != "FLASH_ATTN_EXT" and node.sources[0].shape == node.shape:
            node = node.sources[0]
        else:
            break
    return turned


def _of_experts(node: Node) -> bool:
    """Whether the rows of a token are those of its experts."""
    while node.op != "MUL_MAT_ID":
        if not node.sources or node.sources[0].shape != node.shape:
            return False
        node = node.sources[0]
    return True
