"""Names of what a module is given and gives back."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specnb.errors import InputError

DEEPEST = 6
"""Levels of nested containers that are looked into."""

STATES = ("keys", "values", "conv_states", "recurrent_states")


class Arguments:
    """Names the arguments of a module's calls by the signature of its forward, which is read once: to bind it again at
    each of the thousand calls of a decoding step would cost a tenth of the step."""

    def __init__(self, module: nn.Module) -> None:
        found = _signature(module)
        parameters = [] if found is None else list(found.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """In the order of the signature, then other keywords under their own names; more positional ones in a tuple."""
        given = dict(zip(self._positional, args, strict=False)) | kwargs
        if len(args) > len(self._positional):
            given[self._rest] = args[len(self._positional) :]
        return {name: given.pop(name) for name in self._names if name in given} | given


def _signature(module: nn.Module) -> inspect.Signature | None:
    """A forward that was patched on the object may say `*args, **kwargs` only: then that of its class."""
    for forward, skip in ((module.forward, 0), (type(module).forward, 1)):
        try:
            found = inspect.signature(forward)
        except (TypeError, ValueError):
            continue
        parameters = list(found.parameters.values())[skip:]
        if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
            return found.replace(parameters=parameters)
    return None


def is_cache(value: object) -> bool:
    """A transformers Cache, told by what it can do: the class is not imported for that."""
    return hasattr(value, "get_seq_length") and isinstance(getattr(value, "layers", None), list)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own but others inside it (quantised, distributed)."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return is_traceable_wrapper_subclass(tensor)


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` and the like."""
    return _name(tensor.dtype)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in all arguments of a call, with dotted names."""
    for name, value in arguments.items():
        yield from tensors_in(name, value)


def tensors_in(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists, mappings and dataclasses, with dotted names."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == DEEPEST or value is None or isinstance(value, str | bytes | int | float | nn.Module) or is_cache(value):
        return
    for key, inner in _items(value):
        yield from tensors_in(f"{name}.{key}", inner, depth + 1)


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return ()


def outputs_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """`out` for a tensor; of a tuple `out`, `out.1`, …: a module that also gives its weights back keeps its name."""
    if isinstance(value, tuple | list) and value and not hasattr(value, "_fields"):
        yield from tensors_in("out", value[0])
        for i, inner in enumerate(value[1:], 1):
            yield from tensors_in(f"out.{i}", inner)
        return
    yield from tensors_in("out", value)


def states_in(arguments: Mapping[str, Any], layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Keys and values (or recurrent states) that the caches among the arguments hold for `layer`."""
    for value in arguments.values():
        if is_cache(value) and 0 <= layer < len(value.layers):
            for name in STATES:
                yield from tensors_in(name, getattr(value.layers[layer], name, None))


Chooser = Callable[[str, str, str], bool]
"""Whether (module, role, name) is chosen."""


def chooser(full: str | Chooser | None) -> Chooser:
    """Which tensors are kept in full: none, those of modules whose path has the pattern, or what a function says."""
    if full is None:
        return lambda module, role, name: False
    if callable(full):
        return full
    pattern = compiled(full)
    return lambda module, role, name: pattern.search(module) is not None


def compiled(pattern: str) -> re.Pattern[str]:
    """A user's regular expression. Raises InputError for what is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern!r} is no regular expression ({error}); use e.g. r'layers\\.0\\.mlp'") from error
