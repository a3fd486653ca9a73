"""Which parameters the operations of a module really read, whatever its attributes say.

A module may resolve another model's weights inside an operation (a registry of experts by position, a name used twice);
its own attributes stay right. So parameters are told by where the operands of each operation lie in memory.
"""

import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specnb.divergence.tracing.fingerprint import digest

UNKNOWN = "?"


class Owned(NamedTuple):
    """A parameter or buffer, the tag of the model that has it and its path there.

    The tensor is held: memory that were freed and used again would be taken for it.
    """

    owner: str
    path: str
    tensor: torch.Tensor


class Registry:
    """Who owns which memory: parameters and buffers of the known models, found by address.

    Of tied parameters the first name is kept; of a memory that two models share the first model's, so that the
    captured model comes first. A parameter object that no known model has is taken up as UNKNOWN when it is met.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, Owned]] = []
        self._objects: dict[int, Owned] = {}
        self._digests: dict[tuple[int, int], str] = {}
        for tag, model in models.items():
            for named in (model.named_parameters, model.named_buffers):
                for path, tensor in named():
                    self.add(Owned(tag, path, tensor))

    def add(self, owned: Owned) -> None:
        """Take up a tensor, unless its memory is known already."""
        start = _address(owned.tensor)
        if not start:  # a wrapper (quantised weights) or nothing in it: only the object itself can be known again
            self._objects.setdefault(id(owned.tensor), owned)
        elif self._at(start) is None:
            place = bisect.bisect(self._starts, start)
            self._starts.insert(place, start)
            self._spans.insert(place, (start + _extent(owned.tensor), owned))

    def find(self, tensor: torch.Tensor) -> Owned | None:
        """Who owns the memory that `tensor`, or the start of this view, lies in."""
        start = _address(tensor)
        found = self._at(start) if start else self._objects.get(id(tensor))
        # the exact type first: asking whether something is a Parameter runs Python, and most operands are activations
        if found is None and type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            self.add(Owned(UNKNOWN, UNKNOWN, tensor))
            return self.find(tensor)
        return found

    def digest(self, owned: Owned) -> str:
        """The digest of all of the parameter, made anew only when torch has counted a change."""
        key = (id(owned.tensor), version_of(owned.tensor))
        if key not in self._digests:
            try:
                self._digests[key] = digest(owned.tensor)
            except (RuntimeError, TypeError, NotImplementedError):  # a wrapper without bytes of its own, or on "meta"
                self._digests[key] = ""
        return self._digests[key]

    def _at(self, address: int) -> Owned | None:
        place = bisect.bisect(self._starts, address) - 1
        if place < 0:
            return None
        end, owned = self._spans[place]
        return owned if address < end else None


class AtUse(TorchDispatchMode):
    """While it is entered, `note(owned)` is called for each known parameter that an operation reads.

    Operations that only make a view are passed over: their result is found again by its memory when it is read.
    """

    def __init__(self, registry: Registry, note: Callable[[Owned], None], running: Callable[[], bool]) -> None:
        super().__init__()
        self._registry, self._note, self._running = registry, note, running

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._running():
            reads = not func.is_view
            for tensor in _operands((*args, *kwargs.values()) if kwargs else args):
                # of a view only parameters matter: one that nobody owns is taken up before it is hidden behind the view
                if reads or type(tensor) is not torch.Tensor:
                    owned = self._registry.find(tensor)
                    if owned is not None and reads:
                        self._note(owned)
        return func(*args, **kwargs)


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has counted a change in place; -1 under inference mode, where it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _operands(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _operands(value)


def _address(tensor: torch.Tensor) -> int:
    """Where the first value lies; 0 for a tensor without memory of its own."""
    try:
        return tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first value to the end of the last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
