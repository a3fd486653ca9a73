"""The state of a transformers model: a cache that keeps what can be dropped again, and copies of what cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from specnb.lm.hf.attention import LANES

FIRST_ROOM = 256


class KeptPastLayer(DynamicLayer):
    """KV of one layer, `(batch, kv_heads, length, head_dim)`, in a buffer that doubles when it is full.

    transformers' own layer copies the whole cache at every step (torch.cat); here a step writes its new rows in
    place, and a crop only moves the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[-2]
        if self.keys.numel() == 0 or end > self.keys.shape[-2]:
            self.keys = self._grown(self.keys, key_states, end)
            self.values = self._grown(self.values, value_states, end)
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: torch.Tensor, new: torch.Tensor, end: int) -> torch.Tensor:
        batch, heads, _, dim = new.shape
        room = new.new_zeros(batch, heads, max(FIRST_ROOM, -(-2 * end // LANES) * LANES), dim)
        if self._length:
            room[:, :, : self._length] = old[:, :, : self._length]
        return room

    def get_seq_length(self) -> int:
        return self._length

    def keep(self, length: int) -> None:
        """Forget what lies behind the first `length` positions."""
        self._length = min(self._length, length)

    def gather(self, start: int, nodes: Sequence[int]) -> None:
        """Of the positions from `start` on keep these, counted from there, in this order and in place."""
        end = start + len(nodes)
        stay = next((at for at, node in enumerate(nodes) if at != node), len(nodes))
        if stay < len(nodes):  # those before lie where they should
            rows = _rows(start, tuple(nodes[stay:]), self.keys.device)
            for held in (self.keys, self.values):
                held[:, :, start + stay : end] = held.index_select(2, rows)
        self._length = end

    def reset(self) -> None:
        super().reset()
        self._length = 0


@lru_cache(maxsize=1)
def _rows(start: int, nodes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Positions of nodes behind `start`; every layer of a cache asks for the same ones in turn."""
    return torch.tensor([start + node for node in nodes], device=device)


CROPPABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of transformers whose entries KeptPastLayer keeps: each position has its own."""


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for `model`; sliding windows keep every position, for their masks, not the cache, forget."""
    layers = DynamicCache(config=model.config).layers
    return Cache(layers=[KeptPastLayer() if type(layer) in CROPPABLE else layer for layer in layers])


def uncroppable(model: PreTrainedModel) -> str:
    """What in the state of this model cannot go back by dropping entries; "" when all can."""
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has recurrent layers, whose state keeps no past to go back to"
    other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) not in CROPPABLE}
    return f"its cache holds {', '.join(sorted(other))}, which cannot be cropped exactly" if other else ""


def keep_entries(cache: Cache, length: int) -> None:
    """Drop the attention entries behind the first `length` tokens; recurrent states stay as they are."""
    for layer in cache.layers:
        if isinstance(layer, KeptPastLayer):
            layer.keep(length)
        elif isinstance(layer, DynamicLayer) and layer.is_initialized:  # attention beside a recurrence (Falcon-H1)
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def recurrent_layers(cache: Cache) -> Iterator[tuple[int, LinearAttentionCacheLayerMixin]]:
    """The layers with a recurrent or convolutional state that was written, by index."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
            yield index, layer


def trim_window(layer: LinearAttentionCacheLayerMixin) -> None:
    """Stop recording the past of a layer, and cut its convolution's window to the width it needs."""
    LinearAttentionCacheLayerMixin.crop(layer, 0)
    layer.record_past = False


@dataclass(frozen=True)
class SavedState:
    """Copies of all recurrent states after `n_tokens` tokens, by layer: `(conv states, recurrent states)`.

    Convolutional windows are `(batch, channels, kernel)`; recurrent states as the family keeps them.
    """

    n_tokens: int
    layers: dict[int, tuple[dict[int, torch.Tensor | None], dict[int, torch.Tensor | None]]]

    @property
    def nbytes(self) -> int:
        tensors = (t for conv, states in self.layers.values() for t in (*conv.values(), *states.values()))
        return sum(t.nbytes for t in tensors if t is not None)

    @classmethod
    def of(cls, cache: Cache, n_tokens: int) -> "SavedState":
        return cls(
            n_tokens, {i: (_copies(x.conv_states), _copies(x.recurrent_states)) for i, x in recurrent_layers(cache)}
        )

    def put_back(self, cache: Cache) -> None:
        """Overwrite the recurrent states of `cache`, which must have been written since. Attention is not touched."""
        for index, (conv, states) in self.layers.items():
            layer = cache.layers[index]
            layer.conv_states = _copies(conv)
            layer.recurrent_states = _copies(states)


def _copies(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
    return {i: None if state is None else state.clone() for i, state in states.items()}
