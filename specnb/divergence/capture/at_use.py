"""Find which parameters the operations of a module really read, whatever its attributes are.

A module may resolve another model's weights inside an operation (a registry of experts by position)
while its attributes stay right. So parameters are identified by the memory of each operation's
operands. Custom operations whose kernels call torch operations are traced; what a Triton or C++
kernel reads by itself is not seen.

A service may also assign another model's weights to the draft's attributes. Then their values
identify the owner (`relabel`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from specnb.divergence.capture.tensors import digest_tensor
from specnb.divergence.trace import NEIGHBOR, OWN, UNKNOWN, ModuleTrace

TORCH = ("aten", "prim", "prims")
"""Namespaces of operations that read only their operands."""


class Owned(NamedTuple):
    """A parameter or buffer, the tag of the model it belongs to, and its path there."""

    owner: str
    path: str
    tensor: Tensor


class AtUse(TorchDispatchMode):
    """Calls `note` for each parameter that an operation reads while `running` is not empty.

    Parameters and buffers of `models`, by tag, are identified by the storage that a tensor views.
    Tied parameters have their first name. Memory that two models share belongs to the first, so
    pass the captured model first. A parameter of no model is UNKNOWN and is not stored: weights
    loaded for one call (offloading) must not accumulate.
    """

    supports_higher_order_operators = True
    """Operators such as `torch.cond`, which torch otherwise refuses to run under this mode."""

    def __init__(
        self, models: Mapping[str, Module], note: Callable[[Owned], None], running: Sequence[object]
    ) -> None:
        super().__init__()
        self._note, self._running = note, running
        self._owners = defaultdict(list)
        """Owners of tensors that are, or were, in the storage at this address."""
        self._objects = {}
        """Owners by the id of the tensor."""
        for tag, model in models.items():
            for path, tensor in list_parameters(model).items():
                self._add(Owned(tag, path, tensor))

    def find_owner(self, tensor: Tensor) -> Owned | None:
        """Return the owner of the memory at the start of `tensor`."""
        memory = _memory(tensor)
        # Memory that its owner no longer uses (moved, offloaded) may now belong to any tensor.
        owners = (
            owned for owned in self._owners.get(memory, ()) if _memory(owned.tensor) == memory
        )
        before = [owned for owned in owners if owned.tensor.data_ptr() <= tensor.data_ptr()]
        if before or (memory and type(tensor) is Tensor):  # most operands are activations
            return max(before, key=lambda owned: owned.tensor.data_ptr(), default=None)
        # A wrapper (quantized weights), an empty tensor, or a parameter whose memory was replaced.
        if owner := self._objects.get(id(tensor)):
            self._add(owner)
        elif isinstance(tensor, nn.Parameter):
            owner = Owned(UNKNOWN, UNKNOWN, tensor)
        return owner

    def _add(self, owned: Owned) -> None:
        self._objects.setdefault(id(owned.tensor), owned)
        if memory := _memory(owned.tensor):
            self._owners[memory].append(owned)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [operand for operand in _leaves(args, kwargs) if isinstance(operand, Tensor)]
        if self._running:
            reads = not getattr(func, "is_view", False)
            for tensor in tensors:
                # A view reads nothing yet; only a parameter without an owner must be noted here.
                owned = self.find_owner(tensor) if reads or type(tensor) is not Tensor else None
                if owned is not None and (reads or owned.owner == UNKNOWN):
                    self._note(owned)
        by_torch = not isinstance(func, torch._ops.OpOverload) or func.namespace in TORCH
        return (
            func(*args, **kwargs)
            if by_torch or not tensors
            else self._inside(func, tensors, args, kwargs)
        )

    def _inside(self, func: Any, tensors: list[Tensor], args: tuple, kwargs: dict) -> Any:
        """Run a custom operation with this mode on; torch turns it off while an operation runs.

        A kernel written in Python may look up weights by itself: vLLM's MoE kernel gets the name of
        a layer. Operations without tensor arguments, or without a kernel for the device of their
        operands, are not traced.
        """
        # CPU operands may be mixed with those of another backend.
        device = next(
            (tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu"
        )
        key = torch._C._dispatch_key_for_device(device)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(
                torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs
            )


def _leaves(args: tuple, kwargs: dict) -> Iterator[object]:
    """Yield operands, and those in lists: schemas nest no deeper. (Faster than `tree_leaves`.)"""
    for operand in (*args, *kwargs.values()):
        if isinstance(operand, list | tuple):
            yield from operand
        else:
            yield operand


def _memory(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor views; 0 if it has no memory."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0


# --- owners by value ------------------------------------------------------------------------------


def list_parameters(model: Module) -> dict[str, Tensor]:
    """Return parameters and buffers by path, tied ones under each of their paths."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict([*model.named_parameters(remove_duplicate=False), *buffers])


def relabel(trace: ModuleTrace, neighbor: Module | None, loaded: Mapping[str, str]) -> None:
    """In `trace.params`, attribute draft parameters with the neighbor's values to the neighbor.

    `loaded`: digests of the draft's parameters and buffers as loaded, by path.
    """
    params = trace.params
    changed = (params["owner"] == OWN) & ~params["digest"].isin(["", *loaded.values()])
    if neighbor is None or not changed.any():
        return
    tensors = list_parameters(neighbor).items()
    # Constant tensors (zeros, ones) identify no owner.
    owners = {digest_tensor(tensor): path for path, tensor in tensors if len(tensor.unique()) > 1}
    copied = changed & params["digest"].isin(owners)
    params.loc[copied, "owner"] = NEIGHBOR
    params.loc[copied, "owner_path"] = params["digest"].map(owners)
