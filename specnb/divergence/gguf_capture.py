"""Captures of llama.cpp: what each node of its graph was given and gave, and which weights it read, as a trace.

What llama.cpp allows: the callback is taken when a context is made, so the model is opened inside the block. It stops
after every node that is written down, so the graph runs in pieces. On the processor each operation is the same one
then, and so are all bits of the logits; a GPU that fuses operations does not fuse over the end of a piece, and its
logits may differ by rounding: compare two captures with each other there, not one with a plain run.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specnb.divergence.trace_builder import Frame, TraceBuilder
from specnb.divergence.tracing.at_use import UNKNOWN, Registry
from specnb.divergence.tracing.gguf_names import (
    SHOWN_AGAIN,
    GraphStep,
    cache_state,
    in_order,
    is_cache,
    own_path,
    path_of,
)
from specnb.divergence.tracing.names import Chooser, chooser, compiled
from specnb.divergence.tracing.sketch import digest_bytes
from specnb.lm import load
from specnb.lm.base import LanguageModel
from specnb.lm.gguf_tensors import Decode, Node, StoredWeights, Watch, ggml


@dataclass(frozen=True)
class Captured:
    """`model`: opened for the block and closed with it. `builder.trace()` is the trace, also after the block."""

    model: LanguageModel
    builder: TraceBuilder


@contextlib.contextmanager
def capture_gguf(
    name_or_path: str | Path,
    *,
    tag: str = "draft",
    modules: str | None = None,
    full: str | Chooser | None = None,
    inputs: bool = True,
    **options: Any,
) -> Iterator[Captured]:
    """Open a model in llama.cpp and write down what it computes inside the block, one step for each llama_decode.

    `options` go to `specnb.load`; `modules` and `full` are as in `capture`. A module is a node of the graph: what
    llama.cpp calls `ffn_out-3` is `layers.3.ffn_out`; a node without a name is called after the weight or the cache it
    reads. Of several of one name (queries before and after their rotation) each is a call. Its kind is the operation.
    Roles: "out"; with `inputs` "in", under the path of the node that made it (`src0`, … where it has none); "state",
    the keys and values that attention reads from the cache, cell by cell. The token axis comes first, axes of size 1
    are left out. The last layer goes on with only those tokens whose logits are asked for.

    The parameters are the weights that each node reads: their place in memory (`object_id`), and `tag` as the owner
    where the opened file has the same bytes under that name, else "?". A weight is hashed once a capture, when it is
    first read. Weights that llama.cpp has put in another order (`@` and the buffer behind their type) are told by name
    and size alone.

    Not seen: copies, and nodes that nothing can be called after (`facts`: "passed_over"); inputs that an operation
    writes its output over ("overwritten"; mostly they are the output of another node); the inside of a fused operation
    such as flash attention.

    Logits are the same bits as without, on the processor. Raises InputError for a pattern that is none and for a model
    that torch would run, and what `specnb.load` raises. An error while a node is written down is raised by the forward;
    its tokens are not in the model's state then, but in the trace as far as they came.
    """
    spec = load.parse(str(name_or_path), **options)
    chosen, kept = None if modules is None else compiled(modules).search, chooser(full)
    watch = Watch()
    model = load.load(name_or_path, watch=watch, **options)
    with contextlib.closing(model):
        builder = NodeBuilder(tag, StoredWeights(load.local_file(spec)), kept)
        builder.facts |= _facts(tag, model)
        nodes = _Nodes(builder, chosen, inputs)
        watch.begin, watch.wanted, watch.seen, watch.on = nodes.begin, nodes.wanted, nodes.see, True
        try:
            yield Captured(model, builder)
        finally:
            watch.on = False
            builder.measure()
            builder.facts |= nodes.facts()


class NodeBuilder(TraceBuilder):
    """A trace of nodes, whose weights are ggml's and not torch's."""

    def __init__(self, tag: str, stored: StoredWeights, full: Chooser) -> None:
        super().__init__(Registry({}), full)
        self._tag, self._stored = tag, stored
        self._weights: dict[tuple[int, str], dict[str, Any]] = {}

    def read(self, frame: Frame, weight: Node) -> None:
        """Write down that a node read a weight."""
        place = (weight.data, weight.name)
        if place not in self._weights:
            self._weights[place] = self._described(weight)
        row = {"step": self._step.index, "module": frame.module, "call": frame.call}
        self._params.append(row | self._weights[place])

    def _described(self, weight: Node) -> dict[str, Any]:
        base = weight.base
        found, stored = base.raw_bytes(), self._stored.find(base.name)
        dtype, own = base.type, stored is not None and len(stored) == len(found)
        digest = digest_bytes(dtype, base.shape, found)
        if base.reordered:
            dtype = f"{dtype}@{base.buffer}"
        elif own:
            own = digest == digest_bytes(dtype, base.shape, stored)
        owner = self._tag if own else UNKNOWN
        return {"owner": owner, "owner_path": base.name, "object_id": base.data, "digest": digest, "dtype": dtype}


class _Nodes:
    """The watch's three functions, and what was passed over."""

    def __init__(self, builder: NodeBuilder, chosen: Any, inputs: bool) -> None:
        self._builder, self._chosen, self._inputs = builder, chosen, inputs
        self._step: GraphStep | None = None
        self._paths: dict[str, bool] = {}
        self._unread: Counter[str] = Counter()
        self._overwritten: set[str] = set()
        self._passed_over: Counter[str] = Counter()

    def begin(self, decode: Decode) -> None:
        self._builder.measure()
        length = len(decode.ids)
        self._step = GraphStep(self._builder.n_steps, 1, length, decode.first, decode.ids, rows=decode.rows)
        self._builder.begin_step(self._step)
        self._builder.facts["steps"][-1] |= {"rows": decode.rows, "padding": decode.padding}

    def wanted(self, node: Node) -> bool:
        path = own_path(node)
        if path is None:
            if node.op not in SHOWN_AGAIN:
                self._passed_over[node.op] += 1
            return False
        if path not in self._paths:
            self._paths[path] = self._chosen is None or self._chosen(path) is not None
        return self._paths[path]

    def see(self, node: Node) -> None:
        frame = Frame(own_path(node), node.op, {})
        self._builder.count(frame)
        self._step.tokens_in.clear()
        given, states = {}, {}
        for i, source in enumerate(node.sources):
            name = path_of(source) or f"src{i}"
            if source.is_weight:
                self._builder.read(frame, source)
            elif source.overlaps(node):
                if node.op not in SHOWN_AGAIN:
                    self._overwritten.add(f"{frame.module}:{name}")
            elif is_cache(source):
                states |= self._state(node, source)
            elif self._inputs:
                given |= self._shown(source, "in", name if name not in given else f"{name}.{i}")
        for role, named in (("in", given), ("state", states), ("out", self._shown(node, "out", "out"))):
            if named:
                self._builder.see(frame, role, named.items())

    def _state(self, node: Node, source: Node) -> dict[str, torch.Tensor]:
        found = cache_state(node, source, self._step)
        return {} if found is None else {found[0]: _tensor(found[1])}

    def _shown(self, node: Node, role: str, name: str) -> dict[str, torch.Tensor]:
        values = node.values()
        if values is None:
            self._unread[node.type] += 1
            return {}
        values, has_tokens = in_order(node, values, self._step)
        if has_tokens:
            self._step.tokens_in.add((role, name))
        return {name: _tensor(values)}

    def facts(self) -> dict[str, Any]:
        """Coverage: the nodes that ran, those written down, and what could not be."""
        n = len(self._paths)
        return {
            "modules": {"hooked": n, "written": sum(self._paths.values()), "called": n, "never_called": []},
            "overwritten": sorted(self._overwritten),
            "passed_over": dict(self._passed_over),
            "unread_types": dict(self._unread),
        }


def _tensor(values: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor of torch. An inference tensor: torch counts no changes that llama.cpp makes."""
    with torch.inference_mode():
        return torch.from_numpy(values)


def _facts(tag: str, model: LanguageModel) -> dict[str, Any]:
    caps = model.caps
    return {
        "tag": tag,
        "model": model.name,
        "known": {},
        "dtype": caps.dtype,
        "device": caps.device,
        "engine": caps.engine,
        "ggml": ggml().ggml_version().decode(),
        **caps.details,
    }
