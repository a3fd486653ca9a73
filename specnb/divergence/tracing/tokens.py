"""Where the tokens of a forward are: which axis of a tensor counts them, and which positions they have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specnb.divergence.tracing.names import is_cache

IDS = ("input_ids", "tokens", "token_ids")
EMBEDDED = ("inputs_embeds", "hidden_states")
POSITIONS = ("position_ids", "positions", "cache_position")
KEPT_IDS = 4096
"""Token ids of one step that are written down."""


@dataclass(frozen=True)
class Step:
    """One forward: `batch` rows of `length` tokens, the first at position `first`; `ids` where they are known.

    `flat`: its tensors have no axis for the batch, as engines have it that put all sequences one behind the other.
    """

    index: int
    batch: int
    length: int
    first: int
    ids: list[int]
    flat: bool = False

    def token_axis(self, role: str, name: str, shape: tuple[int, ...]) -> int:
        """The axis of `shape` that counts tokens, -1 where there is none.

        Known layouts: (batch, length, …), (batch, heads, length, dim), (batch * length, …) as routers and flat engines
        have it, (batch, 1, features) for the last token, of which alone logits are made when text is continued, and
        for keys and values of a cache (batch, heads, all tokens so far, dim).
        """
        if role == "state":
            return len(shape) - 2 if name in ("keys", "values") and len(shape) >= 3 else -1
        if len(shape) >= 2 and shape[0] in (1, self.batch):
            flat = len(shape) == 2 and shape[0] == self.batch * self.length and self.length <= 1
            if shape[1] == self.length and not flat:
                return 1
            if len(shape) == 4 and shape[2] == self.length:
                return 2
            if len(shape) == 3 and shape[:2] == (self.batch, 1):
                return 1
        last = self.flat and len(shape) == 2 and shape[0] == 1  # of a prompt, the head is given the last token only
        return 0 if last or (shape and shape[0] == self.batch * self.length) else -1

    def ambiguous(self, role: str, shape: tuple[int, ...]) -> bool:
        """Whether the shape does not tell: as many heads as tokens, and either may come first."""
        return role != "state" and len(shape) == 4 and shape[1] == shape[2] == self.length

    def first_position(self, role: str, axis: int, shape: tuple[int, ...]) -> int:
        """Position of the first token on `axis`: caches and fewer tokens end with the step's last. 0 where none is."""
        if axis < 0:
            return 0
        earlier = self.length - shape[axis]
        return max(self.first + earlier, 0) if role == "state" else self.first + max(earlier, 0)


def step_of(index: int, arguments: Mapping[str, Any]) -> Step:
    """The step that a call with these named arguments is: from its ids or states, its positions, its cache."""
    tensors = {name: value for name, value in arguments.items() if _has_shape(value)}
    ids = _first(tensors, IDS)
    others = [name for name in tensors if name not in POSITIONS and "mask" not in name]
    batch, length, flat = _extent(_first(tensors, (*IDS, *EMBEDDED, *others)))
    given = _first(tensors, [name for name in POSITIONS if name in tensors and tensors[name].numel()])
    cache = next((value for value in arguments.values() if is_cache(value)), None)
    first = cache.get_seq_length() if cache is not None else 0
    mask = tensors.get("attention_mask")
    padded = mask is not None and mask.ndim == 2 and not bool(mask.all())
    # rows that were padded on the left have other positions each: then slots are counted, which all have in common
    if given is not None and not padded and not (given.ndim == 2 and bool((given != given[:1]).any())):
        first = given.reshape(-1)[0]
    kept = [] if ids is None or ids.is_floating_point() else ids.reshape(-1)[:KEPT_IDS].tolist()
    return Step(index, batch, length, int(first), kept, flat)


def _has_shape(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_nested and value.ndim > 0


def _first(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> torch.Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)


def _extent(main: torch.Tensor | None) -> tuple[int, int, bool]:
    """(batch, length, flat) of ids (batch, length) or states (batch, length, features); flat: without the batch."""
    if main is None:
        return 1, 0, False
    flat = main.ndim == (2 if main.is_floating_point() else 1) or main.ndim == 1
    return (1, main.shape[0], True) if flat else (main.shape[0], main.shape[1], False)
