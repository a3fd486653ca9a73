"""Forward passes of a transformers model over its state, and copies of the state, for `rollback`.

Attention caches are cropped; recurrent states are copied. Several families silently lose their
state: they use another argument, store it in modules, or ignore it in passes over more than one
token (Mamba, Falcon-Mamba, Jamba). `probe` detects them.
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
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from specnb.errors import InputError, LoadError
from specnb.lm.hf.decoder import Decoder, additive_mask, attends_to_all
from specnb.lm.probe import Steps
from specnb.lm.rollback import Engine
from specnb.lm.tree import Tree

States = dict[int, torch.Tensor | None]
PREFILL_WIDTH = 512
FIRST_ROOM = 256


class KeptPastLayer(DynamicLayer):
    """KV cache of a layer, `(batch, kv_heads, length, head_dim)`, in a buffer that doubles.

    transformers' own layer copies the whole cache at every step (torch.cat). This one writes new
    rows in place, and cropping only changes the length.
    """

    _length = 0

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states[:, :, :0]
            self.values = value_states[:, :, :0]
        start = self._length
        end = start + key_states.shape[-2]
        if (room := self.keys.shape[-2]) < end:
            more = (0, 0, 0, max(FIRST_ROOM, 2 * end) - room)
            self.keys = pad(self.keys, more)
            self.values = pad(self.values, more)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self):
        return self._length

    def keep(self, length: int) -> None:
        """Crop the cache to the first `length` positions."""
        self._length = min(self._length, length)

    def gather(self, start: int, nodes: Sequence[int]) -> None:
        """Move the entries `start + nodes` to consecutive positions from `start`; drop the rest."""
        end = start + len(nodes)
        if list(nodes) != list(range(len(nodes))):  # if not already in place
            rows = torch.tensor(nodes, device=self.keys.device) + start
            for entries in (self.keys, self.values):
                entries[:, :, start:end] = entries.index_select(2, rows)
        self._length = end


CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers of transformers that KeptPastLayer can replace: they have one entry per position."""


def new_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache for `model`. It holds all positions; masks apply sliding windows."""
    layers = DynamicCache(config=model.config).layers
    return Cache(
        layers=[KeptPastLayer() if type(layer) in CROPPABLE else layer for layer in layers]
    )


def uncroppable(model: PreTrainedModel) -> str:
    """Return why the state of this model cannot be cropped; "" if it can."""
    if model._is_stateful:
        return f"{type(model).__name__} has recurrent layers, whose state cannot be cropped"
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    other = ", ".join(sorted(kind.__name__ for kind in kinds.difference(CROPPABLE)))
    return f"its cache has {other}, which cannot be cropped exactly" if other else ""


def recurrent_layers(cache: Cache) -> Iterator[tuple[int, LinearAttentionCacheLayerMixin]]:
    """Yield the index and layer of all recurrent and convolution states that are not empty."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(
            layer.has_previous_state.values()
        ):
            yield index, layer


class SavedState(NamedTuple):
    """Copies of the recurrent states after `n_tokens`, by layer: `(conv states, recurrent states)`.

    Convolution windows are `(batch, channels, kernel)`; shapes of recurrent states depend on the
    family.
    """

    n_tokens: int
    layers: dict[int, tuple[States, States]]

    @property
    def nbytes(self) -> int:
        tensors = (
            t for conv, states in self.layers.values() for t in (*conv.values(), *states.values())
        )
        return sum(t.nbytes for t in tensors if t is not None)

    def put_back(self, cache: Cache) -> None:
        """Restore the recurrent states, but not attention, of `cache`, which must not be empty."""
        for index, (conv, states) in self.layers.items():
            layer = cache.layers[index]
            layer.conv_states = _copies(conv)
            layer.recurrent_states = _copies(states)


def _copies(states: States) -> States:
    return {i: None if state is None else state.clone() for i, state in states.items()}


def tree_mask(tree: Tree, n_held: int, model: PreTrainedModel) -> torch.Tensor:
    """Return the tree mask after `n_held` tokens, `(1, 1, T, n_held + T)`: 0 or -inf."""
    # not boolean: eager attention would silently add False and True as 0 and 1
    hidden = np.pad(~tree.seen, ((0, 0), (n_held, 0)))  # the committed text is visible
    return additive_mask(torch.from_numpy(hidden)[None, None], model.dtype).to(model.device)


def why_no_trees(model: PreTrainedModel, rollback: str) -> str:
    """Return why this model or its rollback cannot run trees; "" if the config shows no reason.

    A tree needs explicit positions and a mask. A model that derives positions from key indices
    (ALiBi) or from the cache length, or applies a window to indices, would silently return wrong
    logits. `probe.probe_trees` detects the cases that the config does not show.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if rollback != "crop":
        return f"trees need rollback=crop, but the rollback strategy of this model is {rollback}"
    if not attends_to_all(config):
        return f"{name} has layers that attend to a window of the past, by index instead of depth"
    if (
        getattr(config, "alibi", False)
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        return (
            f"{name} takes the positions of tokens from their index in the cache, "
            "not from position_ids"
        )
    return ""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of `forward`. Raises LoadError if there is none."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise LoadError(
        f"{type(model).__name__} takes no cache argument, expected past_key_values or "
        "cache_params: use another model"
    )


def final_norm(net: PreTrainedModel) -> torch.nn.Module:
    """Return the norm between the last layer and lm_head. Raises InputError unless it is unique."""
    width = net.get_output_embeddings().in_features
    children = net.get_decoder().named_children()
    norms = {
        n: c for n, c in children if getattr(getattr(c, "weight", None), "shape", ()) == (width,)
    }
    if len(norms) != 1:
        raise InputError(
            f"{type(net).__name__} has {len(norms)} norms before lm_head ({', '.join(norms)}), "
            "expected 1"
        )
    (norm,) = norms.values()
    return norm


class TorchEngine(Engine):
    """A transformers model with a state of `n_held` tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.n_held = 0
        self.cache = new_cache(model)
        self.feeding = False
        """True while the model runs on this state; recorders ignore all other calls."""
        self.steps: Steps = "blocks"
        """How tokens must be fed (see `probe.probe_steps`)."""
        self._threads = torch.get_num_threads()
        self._state_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def set_threads(self, n: int) -> None:
        """Use `n` threads from the next forward pass."""
        self._threads = n

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Use this model's number of torch threads in a block, then restore the previous number."""
        n_before = torch.get_num_threads()
        if n_before != self._threads:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if n_before != self._threads:
                torch.set_num_threads(n_before)

    @torch.inference_mode()
    def feed(self, ids, rows):
        with self.threads():
            if self.steps == "single" or (self.steps == "later" and self.n_held):
                return _last_rows(torch.cat([self._forward([token], 1)[0] for token in ids]), rows)
            # ids before `end` need no logits; run them in chunks if blocks use the state
            end = max(0, len(ids) - max(rows, PREFILL_WIDTH)) if self.steps == "blocks" else 0
            for start in range(0, end, PREFILL_WIDTH):
                self._forward(ids[start : min(start + PREFILL_WIDTH, end)], 1)
            return _last_rows(self._forward(ids[end:], max(1, rows))[0], rows)

    @torch.inference_mode()
    def feed_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        """Append the nodes of `tree` in one forward pass; return their logits `(T, vocab)`."""
        n = len(tree)
        if tree == Tree.chain(n):  # without a mask, bit-identical to plain decoding
            return self.feed(ids, n)
        with self.threads():
            return _last_rows(self._forward(ids, n, tree)[0], n)

    @torch.inference_mode()
    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Move the entries `start + nodes` to consecutive positions from `start`; drop the rest."""
        for layer in self.cache.layers:
            layer.gather(start, nodes)
        self.n_held = start + len(nodes)

    def _forward(self, ids: Sequence[int], keep: int, tree: Tree | None = None) -> torch.Tensor:
        """Run `ids` as a chain, or as the nodes of `tree` with a tree mask.

        Returns logits `(1, keep, vocab)` in the model's dtype.
        """
        options = {self._state_argument: self.cache}
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        if tree is not None:
            options["attention_mask"] = tree_mask(tree, self.n_held, self.model)
        depths = tree.depths if tree else range(len(ids))
        fed = torch.tensor([[*ids], [*depths]], device=self.device)
        options["input_ids"] = fed[:1]
        options["position_ids"] = self.n_held + fed[1:]
        self.feeding = True
        try:
            out = self.model(use_cache=True, **options)
        finally:
            self.feeding = False
        self.n_held += len(ids)
        return out.logits[:, -keep:]

    def listen(self, receive: Callable, layers: Sequence[int] = ()) -> Callable[[], None]:
        """See `HfModel.listen`; `receive` also gets the outputs of `layers`, numbered from 0."""
        outputs = {}

        def store(layer, _module, _inputs, output):
            outputs[layer] = output if isinstance(output, torch.Tensor) else output[0]

        def hook(_norm, inputs, output):
            if self.feeding:  # heads may call the same norm
                receive(inputs[0][0], output[0], *(outputs[layer][0] for layer in layers))

        hooks = ExitStack()
        hooks.enter_context(final_norm(self.model).register_forward_hook(hook))
        for layer in layers:
            module = self.model.get_decoder().layers[layer]
            hooks.enter_context(module.register_forward_hook(partial(store, layer)))
        return hooks.close

    def keep(self, n):
        """See `Engine.keep`; always succeeds."""
        for layer in self.cache.layers:
            if isinstance(layer, KeptPastLayer):
                layer.keep(n)
            # attention in a layer that is also recurrent (Falcon-H1)
            elif isinstance(layer, DynamicLayer) and layer.is_initialized:
                layer.keys = layer.keys[:, :, :n]
                layer.values = layer.values[:, :, :n]
        self.n_held = n
        return True

    def save(self):
        layers = {
            index: (_copies(layer.conv_states), _copies(layer.recurrent_states))
            for index, layer in recurrent_layers(self.cache)
        }
        return SavedState(self.n_held, layers)

    def restore(self, saved: SavedState):
        saved.put_back(self.cache)
        self.keep(saved.n_tokens)

    def clear(self):
        self.cache = new_cache(self.model)
        self.n_held = 0

    @torch.inference_mode()
    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """Run `ids` on an empty state; return the first module with non-finite output, or ""."""
        names = {module: name for name, module in self.model.named_modules() if name}
        nonfinite = []

        def hook(module, _inputs, output):
            first = output[0] if isinstance(output, tuple) and output else output
            if (
                module in names
                and isinstance(first, torch.Tensor)
                and not torch.isfinite(first).all()
            ):
                nonfinite.append(names[module])

        with register_module_forward_hook(hook):
            TorchEngine(self.model)._forward(ids, len(ids))
        return next(iter(nonfinite), "")


class DecoderEngine(TorchEngine):
    """An engine with our own forward pass, for models that `hf.decoder` supports."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder) -> None:
        super().__init__(model)
        self.decoder = decoder
        self.cache = Cache(layers=[decoder])  # it holds the entries of all layers
        self._listeners = []

    def _forward(self, ids, keep, tree=None):
        taps = {layer for _, layers in self._listeners for layer in layers}
        x = self.decoder.embed(torch.tensor(ids))
        out = self.decoder.decode(x, self.n_held, keep=keep, tree=tree, taps=taps)
        for receive, layers in self._listeners:
            receive(out.pre_norm, out.post_norm, *(out.taps[layer] for layer in layers))
        self.n_held += len(ids)
        return out.logits[None]

    def listen(self, receive, layers=()):
        listener = receive, layers
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def clear(self):
        self.n_held = 0


def _last_rows(logits: torch.Tensor, rows: int) -> np.ndarray:
    """Return the last `rows` of logits `(n, vocab)`, in float32."""
    return logits[len(logits) - rows :].float().cpu().numpy()
