"""Which parameters the operations of a module really read, whatever its attributes say.

A module may resolve another model's weights inside an operation (a registry of experts by position); its own attributes
stay right. So parameters are told by where the operands of each operation lie in memory. Custom operations are followed
inside, where their kernels call torch's; what Triton or C++ reads by itself is never seen.

A service that hands the draft another model's weights makes them the draft's own attributes. What tells is whose values
they are (`relabel`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specnb.divergence.capture.tensors import digest_tensor
from specnb.divergence.trace import NEIGHBOUR, OWN, UNKNOWN, ModuleTrace

TORCH = ("aten", "prim", "prims")
"""Namespaces of operations that read what they are given and nothing else."""


class Owned(NamedTuple):
    """A parameter or buffer, the tag of the model that has it and its path there."""

    owner: str
    path: str
    tensor: Tensor


class AtUse(TorchDispatchMode):
    """While it is entered and something is in `running`, each known parameter that an operation reads is noted.

    Known are parameters and buffers of `models`, by tag, found by the storage that a tensor views. Of tied parameters
    the first name is kept; of a memory that two models share the first model's, so that the captured model comes first.
    A parameter object that no known model has is UNKNOWN, and is not kept: weights that are brought in for one call
    (offloading) must not pile up.
    """

    supports_higher_order_operators = True
    """Such as conditions on a tensor: torch would refuse to run them under this mode."""

    def __init__(self, models: Mapping[str, Module], note: Callable[[Owned], None], running: Sequence[object]) -> None:
        super().__init__()
        self._note, self._running = note, running
        self._owners = defaultdict(list)
        """Those that have, or had, something in the storage of this address."""
        self._objects = {}
        """Owners by the id of their tensor."""
        for tag, model in models.items():
            for path, tensor in list_parameters(model).items():
                self._add(Owned(tag, path, tensor))

    def find_owner(self, tensor: Tensor) -> Owned | None:
        """Who owns the memory that `tensor`, or the start of this view, lies in."""
        memory = _memory(tensor)
        # memory that its owner left (moved, offloaded) may be anybody's by now
        owners = (owned for owned in self._owners.get(memory, ()) if _memory(owned.tensor) == memory)
        before = [owned for owned in owners if owned.tensor.data_ptr() <= tensor.data_ptr()]
        if before or (memory and type(tensor) is Tensor):  # most operands are activations
            return max(before, key=lambda owned: owned.tensor.data_ptr(), default=None)
        # a wrapper (quantised weights) or nothing in it; or the parameter's memory was exchanged: known by itself
        if owner := self._objects.get(id(tensor)):
            self._add(owner)
        elif isinstance(tensor, nn.Parameter):
            owner = Owned(UNKNOWN, UNKNOWN, tensor)
        return owner

    def _add(self, owned: Owned) -> None:
        self._objects.setdefault(id(owned.tensor), owned)
        if memory := _memory(owned.tensor):
            self._owners[memory].append(owned)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [operand for operand in tree_leaves((args, kwargs)) if isinstance(operand, Tensor)]
        if self._running:
            reads = not getattr(func, "is_view", False)
            for tensor in tensors:
                # of a view only a parameter matters that nobody owns: what is read behind the view cannot be told
                owned = self.find_owner(tensor) if reads or type(tensor) is not Tensor else None
                if owned is not None and (reads or owned.owner == UNKNOWN):
                    self._note(owned)
        by_torch = not isinstance(func, torch._ops.OpOverload) or func.namespace in TORCH
        return func(*args, **kwargs) if by_torch or not tensors else self._inside(func, tensors, args, kwargs)

    def _inside(self, func: Any, tensors: list[Tensor], args: tuple, kwargs: dict) -> Any:
        """Run a custom operation with this mode on, which torch switches off while an operation runs.

        A kernel written in Python may look weights up by itself: that of vLLM's MoE is given a layer's name. One that
        is given no tensor is not looked into, nor one for which there is no choice of one dense backend.
        """
        # beside operands of another backend those of the CPU may stand
        device = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        key = torch._C._dispatch_key_for_device(device)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor views; 0 for a tensor without memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0


# --- whose values a parameter has -------------------------------------------------------------------------------------


def list_parameters(model: Module) -> dict[str, Tensor]:
    """Parameters and buffers by path, tied ones under each of their paths: a service may untie them."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict([*model.named_parameters(remove_duplicate=False), *buffers])


def relabel(trace: ModuleTrace, neighbour: Module | None, meant: Mapping[str, str]) -> None:
    """Make the neighbour the owner of what the draft has of its values, in `trace.params`.

    `meant` are the digests of the draft's parameters and buffers by their path, as they were loaded.
    """
    params = trace.params
    changed = (params["owner"] == OWN) & ~params["digest"].isin(["", *meant.values()])
    if neighbour is None or not changed.any():
        return
    tensors = list_parameters(neighbour).items()
    # all zeros, or ones, are nobody's
    owners = {digest_tensor(tensor): path for path, tensor in tensors if len(tensor.unique()) > 1}
    copied = changed & params["digest"].isin(owners)
    params.loc[copied, "owner"] = NEIGHBOUR
    params.loc[copied, "owner_path"] = params["digest"].map(owners)
