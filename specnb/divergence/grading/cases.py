"""The cases of the grid: every planted fault, at every layer it can be put on, with options and text drawn by seed.

A fault that did not act is no case: counting it would make any tool look better or worse than it is.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from specnb.divergence.faults import FAULTS
from specnb.divergence.parts import find, layer_number
from specnb.divergence.planted.fault import Fault
from specnb.divergence.script import Script
from specnb.errors import InputError

TEXTS, PROMPTS, ROUNDS = (26, 33), (14, 19), (2, 5)
"""Half-open ranges that a seed draws the length of the text, of the prompt and K from."""
WAITING = frozenset(
    ("shared_buffer", "stale_row", "foreign_routing", "kv_slot_swap", "foreign_writer", "untrimmed", "overtrimmed",
     "overtrimmed_by_two")
)  # fmt: skip
"""Faults that act only when something happens, and then say so in `struck`."""


def script_of(seed: int, vocab_size: int) -> Script:
    """The text of a seed: its tokens, its length, where its prompt ends, and K differ from seed to seed."""
    rng = np.random.default_rng([seed, 7])
    n_tokens, prompt, k = (int(rng.integers(*between)) for between in (TEXTS, PROMPTS, ROUNDS))
    text = rng.integers(0, vocab_size, n_tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=vocab_size, seed=seed)


@dataclass(frozen=True)
class GridCase:
    """One fault as it is planted; `layer` None where the fault has no layer, or is in all of them."""

    fault: str
    layer: int | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return self.fault if self.layer is None else f"{self.fault} in layer {self.layer}"


class Service:
    """A way into service with a fault in it, and what it says of itself each time: `planted` with whom beside."""

    def __init__(self, case: GridCase) -> None:
        self.case = case
        self.planted: list[tuple[nn.Module | None, Fault]] = []

    @contextmanager
    def __call__(self, draft: nn.Module, neighbour: nn.Module | None) -> Iterator[Fault]:
        layer = {} if self.case.layer is None else {"layer": self.case.layer}
        with FAULTS[self.case.fault](draft, neighbour, **layer, **self.case.options) as fault:
            self.planted.append((neighbour, fault))
            yield fault

    def beside(self, neighbour: nn.Module) -> Fault:
        """The fault as it was first planted beside this model. Raises InputError where it waited and never acted."""
        # the first: later set-ups beside the same model may be those in which it never runs
        return self._acted([fault for model, fault in self.planted if model is neighbour][:1])

    def told(self) -> Fault:
        """The fault as it was planted when it first acted, or at all. Raises InputError where it waited in vain."""
        acted = [fault for _, fault in self.planted if fault.struck] or [fault for _, fault in self.planted]
        structural = [fault for fault in acted if fault.first is not None] or acted
        return self._acted(structural[:1])

    def _acted(self, found: Sequence[Fault]) -> Fault:
        if not found or (self.case.fault in WAITING and not found[0].struck):
            raise InputError(f"{self.case.says} never acted: choose a script in which what it waits for happens")
        return found[0]


def cases(
    draft: nn.Module,
    script: Script,
    *,
    seed: int = 0,
    faults: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
) -> list[GridCase]:
    """All cases of a draft and a text; `faults` and `layers` None: all there are.

    Raises InputError for a fault that is not in FAULTS and a layer that the draft does not have.
    """
    chosen = tuple(FAULTS) if faults is None else tuple(faults)
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise InputError(f"no fault {unknown[0]!r}: there are {', '.join(FAULTS)}")
    every = sorted({number for path, _ in find(draft).attentions if (number := layer_number(path)) is not None})
    if strange := set(layers or ()) - set(every):
        raise InputError(f"no layer {min(strange)}: the draft has {', '.join(map(str, every))}")
    return [
        GridCase(name, layer, _options(name, script, _drawn(seed, name, layer)))
        for name in chosen
        for layer in _layers(name, every if layers is None else layers)
    ]


def starts(fault: Fault) -> int:
    """The first position that can be wrong. A fault that waits begins when it first acted, unless it says when."""
    begin, end = fault.tokens[0]
    return max(begin, min(fault.struck, default=0)) if end is None else begin


def within(fault: Fault, position: int) -> bool:
    """Whether a position is one that the fault can make wrong."""
    return position >= starts(fault) and any(
        begin <= position and (end is None or position < end) for begin, end in fault.tokens
    )


def _drawn(seed: int, fault: str, layer: int | None) -> np.random.Generator:
    """The same options for a case whichever other cases are run."""
    return np.random.default_rng([seed, list(FAULTS).index(fault), layer or 0])


def _layers(fault: str, layers: Sequence[int]) -> tuple[int | None, ...]:
    """None stands for a fault without a layer, and for one that by default is in all of them."""
    option = inspect.signature(FAULTS[fault]).parameters.get("layer")
    if option is None:
        return (None,)
    return (*((None,) if option.default is None else ()), *layers)


def _options(fault: str, script: Script, rng: np.random.Generator) -> dict[str, Any]:
    """Where in the text a fault is. Two slots are swapped that one forward writes, so both lie in the prompt."""
    prompt, n_tokens = len(script.feeds[0].ids), len(script.text)
    a = int(rng.integers(1, prompt - 4))
    drawn = {
        "stale_row": {"token": int(rng.integers(2, n_tokens))},
        "kv_slot_swap": {"a": a, "b": int(rng.integers(a + 2, prompt))},
        "foreign_writer": {"position": prompt - int(rng.integers(2, 6)), "after": prompt},
        "rope_mismatch": {"start": int(rng.integers(4, n_tokens - 4))},
        "dummy_tokens": {"start": int(rng.integers(4, n_tokens - 4))},
        "experts_permuted": {"seed": int(rng.integers(1 << 16))},
        "random_head": {"seed": int(rng.integers(1 << 16))},
        "uniform_offset": {"offset": int(rng.integers(1, 200))},
    }
    return drawn.get(fault, {})
