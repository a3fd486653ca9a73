"""Errors a user can act on. Each carries the offending value and the remedy in its message.

Everything the package raises on purpose is a `SpecnbError`; the command line prints it as one line and exits
with 2. Anything else that escapes is a bug and keeps its traceback.
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
    """Base of all errors that specnb raises on purpose."""


class InputError(SpecnbError, ValueError):
    """A parameter, a file or a name that cannot be used as given."""


class HeadsMismatch(InputError):
    """Trained heads are not what their file says, or do not fit the model they are put on."""


class MissingExtraError(SpecnbError, ImportError):
    """A package that belongs to an extra of the installation is not there."""


class FetchError(SpecnbError, RuntimeError):
    """A model file could not be fetched or does not have the pinned digest."""


class LoadError(SpecnbError, RuntimeError):
    """A model could not be opened by the engine that was asked for."""


class MemoryShortError(LoadError):
    """Weights, state and margin do not fit the free memory of the device."""


class EngineError(SpecnbError, RuntimeError):
    """The engine failed during a forward. A state that can be cropped is what it was before; another one is empty."""


class VocabularyMismatch(SpecnbError, ValueError):
    """Draft and target tokens do not mean the same text."""


OTHER_DRAFTERS = "Use a draft model with the target's tokenizer, --drafter self (a copy of it), or --drafter lookup"
"""What to do where vocabularies do not fit."""


class CapacityError(SpecnbError, ValueError):
    """More tokens than the context of the model holds."""


class RewindError(SpecnbError, RuntimeError):
    """The model cannot forget that many tokens exactly."""


class StateError(SpecnbError, RuntimeError):
    """A model's state is not the one this generation left it in: something else used the model in between."""


class NonFiniteLogits(SpecnbError, FloatingPointError):
    """A row of logits holds NaN or +inf, or has no finite entry; it is never replaced by another row."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return the nearest of the names as a question and a space; "" where none is near."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""


def require_known(noun: str, name: object, names: Iterable[str]) -> None:
    """Raise InputError for a name that is none of the known ones, with the nearest and all of them."""
    names, text = list(names), str(name)[:200]
    if name not in names:
        raise InputError(f"unknown {noun} {text!r}: {did_you_mean(text, names)}there are {', '.join(names)}")


def require_number(name: str, value: Any, kind: type, low: float, high: float = inf) -> None:
    """Raise InputError unless `value` is a number of this `kind` (Real or Integral; no bool) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        noun = "an integer" if kind is Integral else "a number"
        raise InputError(f"{name} must be {noun} from {low} to {high}, got {value!r:.80}")


@contextmanager
def importing() -> Iterator[None]:
    """Turn the failed import of a package that an extra would bring into a MissingExtraError that says what to type."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        for requirement in metadata.requires("specnb") or ():
            if extra := re.match(rf"{package.replace('_', '-')}\b.*; extra == .(\w+)", requirement):
                raise MissingExtraError(f"{package} is not installed: pip install 'specnb[{extra[1]}]'") from error
        raise
