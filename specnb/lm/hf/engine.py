"""One forward of a transformers model over its state, and the state's copies: what `rollback` builds on.

A cache keeps what can be dropped again, and is copied where it cannot. Several families run without an error and
forget: their state has another argument, lives in the modules, or is ignored by forwards of more than one token
(Mamba, Falcon-Mamba, Jamba). `probe` looks for them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.modules.module import register_module_forward_hook
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from specnb.errors import InputError, LoadError
from specnb.lm.hf.decoder import Decoder, attends_to_all
from specnb.lm.probe import Steps
from specnb.lm.rollback import Engine
from specnb.lm.tree import Tree

States = dict[int, torch.Tensor | None]
PREFILL_WIDTH = 512
FIRST_ROOM = 256
MASKED = ("eager", "sdpa")
"""Attention implementations of transformers that add a mask of four dimensions to the scores as it is."""


class KeptPastLayer(DynamicLayer):
    """KV of one layer, `(batch, kv_heads, length, head_dim)`, in a buffer that doubles when it is full.

    transformers' own layer copies the whole cache at every step (torch.cat); here a step writes its new rows in
    place, and a crop only moves the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self._length, self._length + key_states.shape[-2]
        if (room := self.keys.shape[-2]) < end:
            more = (0, 0, 0, max(FIRST_ROOM, 2 * end) - room)
            self.keys, self.values = pad(self.keys, more), pad(self.values, more)
        self.keys[:, :, start:end], self.values[:, :, start:end] = key_states, value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self):
        return self._length

    def keep(self, length: int) -> None:
        """Forget what lies behind the first `length` positions."""
        self._length = min(self._length, length)

    def gather(self, start: int, nodes: Sequence[int]) -> None:
        """Keep these of the positions from `start` on, counted from there, in this order and in place."""
        end = start + len(nodes)
        if list(nodes) != list(range(len(nodes))):  # else they lie where they should
            rows = torch.tensor(nodes, device=self.keys.device) + start
            for rows_held in (self.keys, self.values):
                rows_held[:, :, start:end] = rows_held.index_select(2, rows)
        self._length = end


CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of transformers whose entries KeptPastLayer keeps: each position has its own."""


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for `model`; sliding windows keep every position, for their masks, not the cache, forget."""
    layers = DynamicCache(config=model.config).layers
    return Cache(layers=[KeptPastLayer() if type(layer) in CROPPABLE else layer for layer in layers])


def uncroppable(model: PreTrainedModel) -> str:
    """Say what in the state of this model cannot go back by dropping entries; "" when all can."""
    if model._is_stateful:
        return f"{type(model).__name__} has recurrent layers, whose state keeps no past to go back to"
    other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) not in CROPPABLE}
    return f"its cache holds {', '.join(sorted(other))}, which cannot be cropped exactly" if other else ""


def recurrent_layers(cache: Cache) -> Iterator[tuple[int, LinearAttentionCacheLayerMixin]]:
    """Yield the layers with a recurrent or convolutional state that was written, by index."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
            yield index, layer


class SavedState(NamedTuple):
    """Copies of all recurrent states after `n_tokens` tokens, by layer: `(conv states, recurrent states)`.

    Convolutional windows are `(batch, channels, kernel)`; recurrent states as the family keeps them.
    """

    n_tokens: int
    layers: dict[int, tuple[States, States]]

    @property
    def nbytes(self) -> int:
        tensors = (t for conv, states in self.layers.values() for t in (*conv.values(), *states.values()))
        return sum(t.nbytes for t in tensors if t is not None)

    def put_back(self, cache: Cache) -> None:
        """Overwrite the recurrent states of `cache`, which must have been written since. Attention is not touched."""
        for index, (conv, states) in self.layers.items():
            layer = cache.layers[index]
            layer.conv_states, layer.recurrent_states = _copies(conv), _copies(states)


def _copies(states: States) -> States:
    return {i: None if state is None else state.clone() for i, state in states.items()}


def tree_mask(tree: Tree, n_held: int, model: PreTrainedModel) -> torch.Tensor:
    """Return what `model` adds to scores of nodes after `n_held` tokens, `(1, 1, T, n_held + T)`: 0 or -inf."""
    # never boolean: eager attention would add False and True as 0 and 1, and say nothing
    hidden = np.pad(~tree.seen, ((0, 0), (n_held, 0)))  # the whole past is seen
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    return mask[None, None].to(model.device)


def why_no_trees(model: PreTrainedModel, rollback: str) -> str:
    """Say what in this model, or its rollback, stands against trees; "" if nothing that can be read off.

    A node is told its position, and which keys it sees. A model that takes positions from elsewhere (the index of a
    key, as ALiBi does, or the length of the cache), or looks back through a window over indices, would run without an
    error and be wrong. `probe.probe_trees` finds what the configuration does not tell.
    """
    config = model.config.get_text_config(decoder=True)
    name, attention = type(model).__name__, config._attn_implementation
    if rollback != "crop":
        return f"nodes are dropped from a cache, and the way back of this model is {rollback}"
    if not attends_to_all(config):
        return f"{name} has layers that attend to a window of the past, which they count by index, not by depth"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes the positions of tokens from their index in the cache, not from position_ids"
    if attention not in MASKED:
        return f"its attention ({attention}) takes no mask of a tree; {' and '.join(MASKED)} do"
    return ""


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward's argument that takes the cache. LoadError for models that keep their state otherwise."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise LoadError(f"{type(model).__name__} takes no cache (past_key_values, cache_params): it cannot be run here")


def final_norm(net: PreTrainedModel) -> torch.nn.Module:
    """Return the norm between the last layer and lm_head. Raises InputError unless one candidate stands there."""
    width = net.get_output_embeddings().weight.shape[1]
    children = net.get_decoder().named_children()
    norms = {n: c for n, c in children if getattr(getattr(c, "weight", None), "shape", ()) == (width,)}
    if len(norms) != 1:
        raise InputError(f"{type(net).__name__} has {len(norms)} norms that may stand before lm_head: {[*norms]}")
    (norm,) = norms.values()
    return norm


class TorchEngine(Engine):
    """`model` with a state of `n_held` tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.n_held = 0
        self.cache = new_cache(model)
        self.feeding = False
        """True while the model runs to extend this state, and for nobody else: recorders keep nothing of other runs."""
        self.steps: Steps = "blocks"
        """Whether tokens are fed one by one, and from when on (`probe.probe_steps`)."""
        self._threads = torch.get_num_threads()
        self._state_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def set_threads(self, n: int) -> None:
        """Compute with `n` threads from the next forward pass on."""
        self._threads = n

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Run torch with this model's number of threads, and leave the process with its own."""
        others = torch.get_num_threads()
        if others != self._threads:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if others != self._threads:
                torch.set_num_threads(others)

    @torch.inference_mode()
    def feed(self, ids, rows):
        with self.threads():
            return self._feed(ids, rows)

    def _feed(self, ids: Sequence[int], rows: int) -> np.ndarray:
        if self.steps == "single" or (self.steps == "later" and self.n_held):
            return _last_rows(torch.cat([self._forward([token], 1)[0] for token in ids]), rows)
        # ids before it need no logits, and go in pieces where blocks see the state
        end = max(0, len(ids) - max(rows, PREFILL_WIDTH)) if self.steps == "blocks" else 0
        for start in range(0, end, PREFILL_WIDTH):
            self._forward(ids[start : min(start + PREFILL_WIDTH, end)], 1)
        return _last_rows(self._forward(ids[end:], max(1, rows))[0], rows)

    @torch.inference_mode()
    def feed_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        """Append the nodes of `tree` in one forward; their logits `(T, vocab)`."""
        n = len(tree)
        if tree == Tree.chain(n):  # needs no mask, and without one its bits are those of plain decoding
            return self.feed(ids, n)
        with self.threads():
            return _last_rows(self._forward(ids, n, tree)[0], n)

    @torch.inference_mode()
    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Keep these of the entries after the first `start` tokens, counted from there, in their order."""
        for layer in self.cache.layers:
            layer.gather(start, nodes)
        self.n_held = start + len(nodes)

    def _forward(self, ids: Sequence[int], keep: int, tree: Tree | None = None) -> torch.Tensor:
        """Token i at its place in line, or as node i of `tree` at its depth, seeing its ancestors only.

        Returns logits `(1, keep, vocab)` in the model's dtype.
        """
        options = {self._state_argument: self.cache}
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        if tree is not None:
            options["attention_mask"] = tree_mask(tree, self.n_held, self.model)
        fed = torch.tensor([[*ids], [*(tree.depths if tree else range(len(ids)))]], device=self.device)
        self.feeding = True
        try:
            out = self.model(input_ids=fed[:1], position_ids=self.n_held + fed[1:], use_cache=True, **options)
        finally:
            self.feeding = False
        self.n_held += len(ids)
        return out.logits[:, -keep:]

    def listen(self, hear: Callable[..., object], layers: Sequence[int] = ()) -> Callable[[], None]:
        """As `HfModel.listen`; behind the two states `hear` gets the outputs of these layers, from 0."""
        outputs = {}

        def keep(layer, _module, _inputs, output):
            outputs[layer] = output if isinstance(output, torch.Tensor) else output[0]

        def hook(_norm, inputs, output):
            if self.feeding:  # heads may borrow this very norm
                hear(inputs[0][0], output[0], *(outputs[layer][0] for layer in layers))

        hooks = ExitStack()
        hooks.enter_context(final_norm(self.model).register_forward_hook(hook))
        for layer in layers:
            module = self.model.get_decoder().layers[layer]
            hooks.enter_context(module.register_forward_hook(partial(keep, layer)))
        return hooks.close

    def keep(self, n):
        """As `Engine.keep`, which never fails here."""
        for layer in self.cache.layers:
            if isinstance(layer, KeptPastLayer):
                layer.keep(n)
            elif isinstance(layer, DynamicLayer) and layer.is_initialized:  # attention beside a recurrence (Falcon-H1)
                layer.keys, layer.values = layer.keys[:, :, :n], layer.values[:, :, :n]
        self.n_held = n
        return True

    def save(self):
        layers = recurrent_layers(self.cache)
        return SavedState(self.n_held, {i: (_copies(x.conv_states), _copies(x.recurrent_states)) for i, x in layers})

    def restore(self, saved: SavedState):
        saved.put_back(self.cache)
        self.keep(saved.n_tokens)

    def clear(self):
        self.cache = new_cache(self.model)
        self.n_held = 0

    @torch.inference_mode()
    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """Name of the first module whose output is not finite when `ids` are fed from scratch, "" if all are finite."""
        names = {module: name for name, module in self.model.named_modules() if name}
        nonfinite = []

        def hook(module, _inputs, output):
            first = output[0] if isinstance(output, tuple) and output else output
            if module in names and isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
                nonfinite.append(names[module])

        with register_module_forward_hook(hook):
            TorchEngine(self.model)._forward(ids, len(ids))
        return next(iter(nonfinite), "")


class DecoderEngine(TorchEngine):
    """The same, computed by our own forward where there is one (`decoder.refuse`)."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder) -> None:
        super().__init__(model)
        self.decoder = decoder
        self.cache = Cache(layers=[decoder])  # which keeps the entries of all layers
        self._listeners = []

    def _forward(self, ids, keep, tree=None):
        taps = sorted({layer for _, layers in self._listeners for layer in layers})
        x = self.decoder.embed(torch.tensor(ids))
        out = self.decoder.decode(x, self.n_held, keep=keep, tree=tree, taps=taps)
        for hear, layers in self._listeners:
            hear(out.pre_norm, out.post_norm, *(out.taps[taps.index(layer)] for layer in layers))
        self.n_held += len(ids)
        return out.logits[None]

    def listen(self, hear, layers=()):
        listener = hear, layers
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def clear(self):
        self.n_held = 0


def _last_rows(logits: torch.Tensor, rows: int) -> np.ndarray:
    """Return the last `rows` of logits `(n, vocab)`, in float32."""
    return logits[len(logits) - rows :].float().cpu().numpy()
