"""Find the tensors among a module's inputs and outputs: names, digests, and the step."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Module


def digest_tensor(tensor: Tensor) -> str:
    """Return a digest (XXH3, 32 hexadecimal digits) of dtype, shape and bytes in logical order."""
    # as_strided: a single value is contiguous with any stride, but may not be viewed as bytes.
    flat = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .as_strided((tensor.numel(),), (1,))
    )
    state = xxhash.xxh3_128(f"{dtype_name(tensor)}{list(tensor.shape)}".encode())
    state.update(flat.view(torch.uint8).cpu().numpy().data)
    return state.hexdigest()


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return the values on the CPU, possibly shared; dtypes that NumPy lacks become float32."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8
        return tensor.float().numpy()


def name_arguments(module: Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the class's forward, then extra keywords."""
    signature = inspect.signature(type(module).forward)
    try:
        _, *values = signature.bind(module, *args, **kwargs).arguments.items()
    except TypeError:  # the module's forward has other arguments than its class's
        return {"args": args, **kwargs}
    named = dict(values)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def is_cache(value: object) -> bool:
    """Return whether a value has the attributes of a Transformers Cache (without importing it)."""
    return hasattr(value, "get_seq_length") and isinstance(getattr(value, "layers", None), list)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def named_tensors(
    values: Mapping[object, object], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name; those in tuples, lists, mappings and dataclasses have dotted names."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif not is_cache(value):
            yield from named_tensors(_inner(value), f"{prefix}{name}.")


def _inner(value: object) -> Mapping[object, object]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: getattr(value, field.name, None) for field in fields}


def outputs_in(value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield `out` for a tensor; `out`, `out.1`, … for a tuple; `out.logits`, … for a mapping."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return named_tensors({f"out.{i}" if i else "out": inner for i, inner in enumerate(value)})
    return named_tensors({"out": value})


def states_in(arguments: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys and values of `layer` in the caches among the arguments."""
    for value in arguments.values():
        if is_cache(value) and layer < len(value.layers):
            yield from named_tensors(
                {name: getattr(value.layers[layer], name, None) for name in ("keys", "values")}
            )


IDS = ("input_ids", "tokens", "token_ids")
EMBEDDED = ("inputs_embeds", "hidden_states")
POSITIONS = ("position_ids", "positions", "cache_position")


def step_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step of a call, from its ids or hidden states, its positions and its cache.

    It is one forward pass over `batch` rows of `length` tokens from `first_position` on;
    `token_ids` is empty for hidden states.
    """
    tensors = {name: v for name, v in arguments.items() if isinstance(v, Tensor) and v.ndim}
    others = [name for name in tensors if name not in POSITIONS and "mask" not in name]
    empty = torch.empty(1, 0, 0)
    ids, main, positions = (
        next((tensors[name] for name in names if name in tensors), empty)
        for names in (IDS, (*IDS, *EMBEDDED, *others), POSITIONS)
    )
    # ids (batch, length) or states (batch, length, features), or either without the batch
    flat = main.ndim == 1 or (main.ndim == 2 and main.is_floating_point())
    batch, length = (1, len(main)) if flat else main.shape[:2]
    first = next((value.get_seq_length() for value in arguments.values() if is_cache(value)), 0)
    if positions.numel() and (positions.ndim != 2 or (positions == positions[:1]).all()):
        first = positions.reshape(-1)[0]
    written = [] if ids.is_floating_point() else ids.reshape(-1).tolist()
    return {"batch": batch, "length": length, "first_position": int(first), "token_ids": written}
