"""Errors that a user can act on. The message names the offending value and the remedy.

Every error that the package raises on purpose is a `SpecnbError`. The command line prints it as one
line and exits with 2. Any other exception is a bug and shows its traceback.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from math import inf
from numbers import Integral
from typing import Any


class SpecnbError(Exception):
    """Base class of all errors that specnb raises on purpose."""


class InputError(SpecnbError, ValueError):
    """A parameter, a file or a name is invalid."""


class HeadsMismatch(InputError):
    """Trained heads differ from their file's description, or do not fit the target model."""


class MissingExtraError(SpecnbError, ImportError):
    """A package of an optional extra is not installed."""


class FetchError(SpecnbError, RuntimeError):
    """A model file could not be downloaded, or its digest differs from the pinned one."""


class LoadError(SpecnbError, RuntimeError):
    """The requested engine could not open the model."""


class MemoryShortError(LoadError):
    """Weights, state and safety margin exceed the free memory of the device."""


class EngineError(SpecnbError, RuntimeError):
    """The engine failed during a forward pass.

    A state that can be cropped is unchanged; any other state is empty.
    """


class ServerError(SpecnbError, RuntimeError):
    """A server does not respond, or its response is not in its engine's format."""


class VocabularyMismatch(SpecnbError, ValueError):
    """The token ids of draft model and target stand for different texts."""


OTHER_DRAFTERS = (
    "Use a draft model with the target's tokenizer, "
    "--drafter self (a copy of it), or --drafter lookup"
)
"""The remedy for vocabularies that do not fit."""


class CapacityError(SpecnbError, ValueError):
    """The number of tokens exceeds the model's context."""


class RewindError(SpecnbError, RuntimeError):
    """The model cannot roll back exactly by that many tokens."""


class StateError(SpecnbError, RuntimeError):
    """Something else used the model during this generation and changed its state."""


class NonFiniteLogits(SpecnbError, FloatingPointError):
    """A row of logits contains NaN or +inf, or no finite entry. Such a row is never replaced."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return "did you mean …? " with the closest of `names`; "" if none is close."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""


def require_known(noun: str, name: object, names: Iterable[str]) -> None:
    """Raise InputError unless `names` contains `name`; suggest the closest name and list all."""
    names = list(names)
    if name not in names:
        text = str(name)[:200]
        hint = did_you_mean(text, names)
        raise InputError(f"unknown {noun} {text!r}: {hint}choose from {', '.join(names)}")


def require_number(name: str, value: Any, kind: type, low: float, high: float = inf) -> None:
    """Raise InputError unless `value` is a `kind` (Real or Integral, no bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        noun = "an integer" if kind is Integral else "a number"
        raise InputError(f"{name} must be {noun} from {low} to {high}, got {value!r:.80}")


@contextmanager
def importing() -> Iterator[None]:
    """Convert the failed import of an extra's package to MissingExtraError with a pip command."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        for requirement in metadata.requires("specnb") or ():
            if extra := re.match(rf"{package.replace('_', '-')}\b.*; extra == .(\w+)", requirement):
                command = f"pip install 'specnb[{extra[1]}]'"
                raise MissingExtraError(f"{package} is not installed: {command}") from error
        raise
