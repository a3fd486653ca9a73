"""Captures of llama.cpp: what each node of its graph was given and gave, and which weights it read, as a trace.

The callback is taken when a context is made, so the model is opened inside the block. It stops after every node that is
written down, so the graph runs in pieces. On the processor all bits of the logits stay the same; a GPU does not fuse
operations over the end of a piece: compare two captures with each other there, not one with a plain run.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specnb.divergence.capture import Captured, Frame, TraceBuilder
from specnb.divergence.capture.at_use import UNKNOWN, Registry
from specnb.divergence.capture.tensors import Step, compiled, digest_bytes
from specnb.lm import load
from specnb.lm.base import LanguageModel
from specnb.lm.gguf.tensors import Decode, Node, StoredWeights, Watch, ggml


@contextlib.contextmanager
def capture_gguf(
    name_or_path: str | Path,
    *,
    tag: str = "draft",
    modules: str | None = None,
    full: str | None = None,
    **options: Any,
) -> Iterator[Captured]:
    """Open a model in llama.cpp and write down what it computes inside the block, one step for each llama_decode.

    `options` go to `specnb.load`; `modules` and `full` are as in `capture`. A module is a node of the graph: what
    llama.cpp calls `ffn_out-3` is `layers.3.ffn_out`; a node without a name is called after the weight or the cache it
    reads; its kind is the operation. Roles: "out"; "in", under the path of the node that made it; "state", the keys and
    values that attention reads from the cache. The token axis comes first, axes of size 1 are left out.

    The parameters are the weights that each node reads, with `tag` as the owner where the opened file has the same
    bytes under that name, else "?". Weights that llama.cpp has put in another order (`@` and the buffer behind their
    type) are told by name and size alone. Not seen: copies, and nodes that nothing can be called after;
    inputs that an operation writes its output over; the inside of a fused operation.

    Raises InputError for a pattern that is none and for a model that torch would run, and what `specnb.load` raises.
    """
    spec, watch = load.parse(str(name_or_path), **options), Watch()
    chosen = compiled(modules or "")
    model = load.load(name_or_path, watch=watch, **options)
    with contextlib.closing(model):
        builder = NodeBuilder(tag, StoredWeights(load.local_file(spec)), full, chosen)
        builder.facts |= _facts(tag, model)
        watch.begin, watch.wanted, watch.seen, watch.on = builder.begin, builder.wanted, builder.see_node, True
        try:
            yield Captured(model, builder)
        finally:
            watch.on = False
            builder.facts |= builder.coverage()


class NodeBuilder(TraceBuilder):
    """A trace of nodes, whose weights are ggml's and not torch's: the watch's three functions, and what they missed."""

    def __init__(self, tag: str, stored: StoredWeights, full: str | None, chosen: re.Pattern[str]) -> None:
        super().__init__(Registry({}), full)
        self._tag, self._stored, self._chosen = tag, stored, chosen
        self._weights: dict[tuple[int, str], dict[str, Any]] = {}
        self._paths: dict[str, bool] = {}
        self._decode: Decode | None = None
        self._with_tokens: set[tuple[str, str]] = set()
        """(role, name) of the tensors of the node at hand that have a token axis."""

    def begin(self, decode: Decode) -> None:
        """A llama_decode begins."""
        self._decode = decode
        self.begin_step(Step(len(self.facts["steps"]), 1, len(decode.ids), decode.first, decode.ids))
        self.facts["steps"][-1]["padding"] = decode.padding

    def wanted(self, node: Node) -> bool:
        """Whether a node is to be written down."""
        path = own_path(node)
        if path is None:
            return False
        if path not in self._paths:
            self._paths[path] = self._chosen.search(path) is not None
        return self._paths[path]

    def see_node(self, node: Node) -> None:
        """Write down what a node was given and gave, and the weights that it read."""
        frame = Frame(own_path(node), node.op, {})
        self.count(frame)
        self._with_tokens.clear()
        given, states = {}, {}
        for i, source in enumerate(node.sources):
            name = path_of(source) or f"src{i}"
            if source.is_weight:
                self._read(frame, source)
            elif source.overlaps(node):  # the operation writes over what it is given
                continue
            elif CACHE.fullmatch(_plain(source)):  # what earlier tokens left
                states |= cache_state(node, source, self._decode)
            else:
                given |= self._shown(source, "in", name if name not in given else f"{name}.{i}")
        for role, named in (("in", given), ("state", states), ("out", self._shown(node, "out", "out"))):
            if named:
                self.see(frame, role, [(name, torch.from_numpy(values)) for name, values in named.items()])

    def coverage(self) -> dict[str, Any]:
        """The nodes that ran, and those written down."""
        n = len(self._paths)
        return {"modules": {"hooked": n, "written": sum(self._paths.values()), "called": n, "never_called": []}}

    def _shown(self, node: Node, role: str, name: str) -> dict[str, np.ndarray]:
        values = node.values()
        if values is None:
            self.facts.setdefault("unread", {})[f"{own_path(node)}:{role}:{name}"] = node.type
            return {}
        values, has_tokens = in_order(node, values, self._decode)
        if has_tokens:
            self._with_tokens.add((role, name))
        return {name: values}

    def _axis(self, frame: Frame, role: str, name: str, tensor: torch.Tensor) -> int:
        """Operations tell: keys and values are `(heads, cells, dim)`, in all others the token axis comes first."""
        return 1 if role == "state" else 0 if (role, name) in self._with_tokens else -1

    def _read(self, frame: Frame, weight: Node) -> None:
        place = (weight.data, weight.name)
        if place not in self._weights:
            self._weights[place] = self._described(weight.base)
        row = {"step": self._step.index, "module": frame.module, "call": frame.call}
        self._params.append(row | self._weights[place])

    def _described(self, base: Node) -> dict[str, Any]:
        content, stored = base.raw_bytes(), self._stored.find(base.name)
        is_stored = stored is not None and len(stored) == len(content)
        digest = digest_bytes(base.type, base.shape, content)
        if is_stored and not base.reordered:
            is_stored = digest == digest_bytes(base.type, base.shape, stored)
        dtype = f"{base.type}@{base.buffer}" if base.reordered else base.type
        place = {"owner": self._tag if is_stored else UNKNOWN, "owner_path": base.name, "object_id": base.data}
        return place | {"digest": digest, "dtype": dtype}


def _facts(tag: str, model: LanguageModel) -> dict[str, Any]:
    caps = model.caps
    engine = {"dtype": caps.dtype, "device": caps.device, "engine": caps.engine, "ggml": ggml().ggml_version().decode()}
    return {"tag": tag, "model": model.name, "known": {}} | engine | caps.details


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


def in_order(node: Node, values: np.ndarray, step: Decode) -> tuple[np.ndarray, bool]:
    """`values` (four axes) with the token axis first and without others of size 1; and whether it has a token axis.

    ggml names no axes: size and operation tell, in attention the permutation. Columns of unused cells are cut off.
    """
    axis = _token_axis(node, values.dtype, step)
    if "kq" in node.name and "kqv" not in node.name:
        values = values[..., : step.first + len(step.ids)]
    if axis >= 0:
        values = np.moveaxis(values, axis, 0)
    dropped = tuple(i for i in range(values.ndim - 1, -1, -1) if values.shape[i] == 1 and (i or axis < 0))
    return values.squeeze(dropped[: values.ndim - 1]), axis >= 0


def cache_state(node: Node, source: Node, step: Decode) -> dict[str, np.ndarray]:
    """What a node of attention reads from the cache `source`, `(heads, cells, dim)` by its name; {} of other states."""
    name, values = STATE_NAMES.get(CACHE.fullmatch(_plain(source))[1]), source.values()
    if name is None or values is None:
        return {}
    values = values[0]
    if name == "values" and node.op == "MUL_MAT":  # without flash attention the values lie transposed
        values = values.swapaxes(-1, -2)
    return {name: values[:, : step.first + len(step.ids)]}


def _token_axis(node: Node, dtype: np.dtype, step: Decode) -> int:
    """Of the four axes (ggml's backwards): 1 as in (1, tokens, heads, dim), 2 as in (…, tokens, features), or -1."""
    sizes, lengths = node.shape, (len(step.ids), step.rows)
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
