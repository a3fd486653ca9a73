"""What a function of transformers was given and what it returned: the kernels are module globals, looked up by name."""

import inspect
from typing import Any, NamedTuple

import torch


class Call(NamedTuple):
    """Arguments by name, tensors as they were before the call, and what came back."""

    given: dict[str, Any]
    returned: Any


def record_calls(monkeypatch, where: object, name: str) -> list[Call]:
    """Every later call of `where.name`, in order; the list grows as the model runs."""
    inner, calls = getattr(where, name), []

    def outer(*args, **kwargs):
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        given = {key: value.clone() if torch.is_tensor(value) else value for key, value in given.items()}
        calls.append(Call(given, inner(*args, **kwargs)))
        return calls[-1].returned

    monkeypatch.setattr(where, name, outer)
    return calls
