"""The matrix of set-ups: the same draft, fed the same tokens, beside different neighbours. Each contrast kills a guess.

S0 alone, S0w alone in feeds of another width, S1 beside a copy of itself, S2 beside a decoy twin (the same shapes,
other weights), S3 beside the larger target; then, where a neighbour makes it wrong, S4 beside a target that is loaded
and never run, S5 beside another decoy, S6 beside a target that first runs when the draft has read its prompt. (S7,
without features of the service, is `features`.) "Beside itself" cannot show that the draft is given another model's
weights: they are its own values. The decoy can.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import nn

from specnb.divergence import local
from specnb.divergence.at_use import UNKNOWN
from specnb.divergence.capture import TraceBuilder, capture
from specnb.divergence.ladder import ROUNDING
from specnb.divergence.local import Along, explained
from specnb.divergence.ownership import Before, held
from specnb.divergence.pair import copy_of, decoy_twin
from specnb.divergence.parts import find
from specnb.divergence.planting import Deploy
from specnb.divergence.precision import Rounded, coarser, comparable, held_by, off, same_bits_in, text_logits
from specnb.divergence.script import Script, run
from specnb.divergence.tensors import digest, dtype_name
from specnb.divergence.trace import Key, Trace
from specnb.errors import InputError

NEIGHBOUR = "neighbour"
"""The tag of the model beside the draft."""
OWN = "draft"
BLOCK = 5
"""Width of the feeds of S0w and of the second sound run."""


@dataclass(frozen=True)
class SetUp:
    """One way to run the draft; `kills` is what is ruled out where it is clean, or wrong, as `S0` is not."""

    id: str
    says: str
    beside: Literal["nobody", "copy", "decoy", "other decoy", "target"]
    runs: Literal["before", "after", "never"] = "before"
    kills: str = ""
    in_blocks: bool = False


SETUPS: Mapping[str, SetUp] = MappingProxyType(
    {
        setup.id: setup
        for setup in (
            SetUp("S0", "alone", "nobody", kills="wrong here: no neighbour is needed"),
            SetUp("S0w", "alone, in blocks", "nobody", kills="clean, S0 wrong: single steps, or tokens taken back",
                  in_blocks=True),
            SetUp("S1", "beside itself", "copy", kills="wrong: buffers or state are shared, whatever the weights"),
            SetUp("S2", "beside a decoy twin", "decoy", kills="S1 clean, wrong here: another model's values get in"),
            SetUp("S3", "beside the target", "target", kills="S2 clean, wrong here: size, layout or number of layers"),
            SetUp("S4", "the target loaded, never run", "target", "never", "wrong: made at loading; clean: at running"),
            SetUp("S5", "beside another decoy", "other decoy", kills="wrong otherwise than S2: the neighbour's values"),
            SetUp("S6", "the target first runs behind the prompt", "target", "after",
                  "clean, S3 wrong: what it left before the draft's first step is read"),
        )
    }
)  # fmt: skip
FIRST, ON_DEMAND = ("S0", "S0w", "S1", "S2", "S3"), ("S4", "S5", "S6")
"""Those that are always run, and those for a draft that only a neighbour makes wrong."""


@dataclass(frozen=True)
class Outcome:
    """What one set-up showed: `wrong` as `local.beyond` has it, first in time first; `trace` of the draft.

    `logits` are those of each feed, `(tokens, vocab)`. `offset`: all positions are one number off, which RoPE does not
    see: such rows have no error. `coarser`: the type to which all that differs is rounded, "" for that of the draft.
    """

    setup: SetUp
    script: Script
    wrong: pd.DataFrame
    errors: pd.DataFrame
    trace: Trace
    along: Along
    logits: tuple[torch.Tensor, ...]
    offset: bool
    coarser: str

    @property
    def clean(self) -> bool:
        return self.wrong.empty

    @property
    def foreign(self) -> pd.DataFrame:
        """Parameters of other models that the draft's modules read, at the point of use."""
        return self.trace.params[~self.trace.params["owner"].isin((OWN, UNKNOWN))]


class Lab:
    """A draft under suspicion: runs set-ups, each compared with what a pristine copy makes of the same inputs.

    `deploy(draft, neighbour)` is the service under suspicion; left out, the models just run in turn. The copy is made
    here, before anything is deployed. Raises InputError for a draft in a dtype without known rounding, and for a script
    with tokens that the target has not.
    """

    def __init__(
        self, draft: nn.Module, target: nn.Module | None = None, *, script: Script, deploy: Deploy | None = None
    ) -> None:
        self.draft, self.target, self.script = draft, target, script
        self.dtype = dtype_name(next(draft.parameters()))
        if self.dtype not in ROUNDING:
            raise InputError(f"the draft computes in {self.dtype}: give it in {', '.join(ROUNDING)}")
        if target is not None and (size := vocabulary_size(target)) <= max(script.text):
            raise InputError(
                f"the text has token {max(script.text)}, and the target knows {size}: give a script of tokens both have"
            )
        self.in_service = deploy is not None
        self.deploy = deploy or (lambda draft, neighbour: nullcontext())
        self.reference = copy_of(draft)
        self.meant = {name: digest(value) for name, value in held(self.reference).items()}
        """Digests of parameters and buffers, tied ones under each of their paths, as a capture has them."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        parts = find(self.reference)
        self._rotaries, self._routers = (
            [path for path, _ in parts_of_kind] for parts_of_kind in (parts.rotaries, parts.routers)
        )
        self.sound: list[Along] = []
        """The pristine copy's runs: fed as the script has it, and in blocks."""
        self.sound_logits: list[tuple[torch.Tensor, ...]] = []
        self.floor, self.unsteady = self._floors()

    def fitting(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these set-ups that can be run: without a target none beside it."""
        return tuple(name for name in names if self.target is not None or SETUPS[name].beside != "target")

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up; `deploy` stands in for the lab's own, so that one reference serves many services.

        Raises InputError for a service whose logits are of another vocabulary.
        """
        setup = SETUPS[name]
        script, neighbour = self._script_of(setup), self._neighbour(setup)
        known = {} if neighbour is None else {NEIGHBOUR: neighbour}
        before = Before(self.draft, neighbour, meant=self.meant, tag=OWN, other=NEIGHBOUR)
        with (
            (deploy or self.deploy)(self.draft, neighbour),
            capture(self.draft, tag=OWN, known=known, full="") as builder,
        ):
            logits = self._logits(script, setup, neighbour, builder)
        trace = before.told_apart(builder.trace())
        along = Along.of(trace, script)
        errors = local.local_errors(self.reference, along)
        shifted = explained(errors, along, self.sound[0], self._rotaries)
        errors.loc[shifted, "error"] = 0.0
        wrong = local.beyond(errors, self.floor, script)
        rounded = "" if wrong.empty else self._rounded_to(wrong, logits, trace, setup)
        wrong = wrong.iloc[:0] if rounded else wrong
        return Outcome(setup, script, wrong, errors, trace, along, logits, bool(shifted.any()), rounded)

    def bare(self, name: str, deploy: Deploy | None = None) -> tuple[torch.Tensor, ...]:
        """The logits of a set-up without hooks."""
        setup = SETUPS[name]
        neighbour = self._neighbour(setup)
        with (deploy or self.deploy)(self.draft, neighbour):
            return self._logits(self._script_of(setup), setup, neighbour)

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """How far the logits of set-ups are from sound ones at most (relative L2), and how far those of sound runs are
        from one another, at least what rounding to the draft's type may do."""
        far = (self._logits_off(outcome.logits, outcome.setup) for outcome in outcomes)
        apart = off(*(self._sound_logits(in_blocks) for in_blocks in (False, True)))
        return max(far, default=0.0), max(apart, ROUNDING[self.dtype])

    def first_nan(self) -> tuple[str, int] | None:
        """The module that gives NaN first in the pristine copy, and at which position; None where none does."""
        for key, values in self.sound[0].values.items():
            if key.role == "out" and len(bad := np.flatnonzero(np.isnan(values.reshape(len(values), -1)).any(1))):
                return key.module, int(bad[0])
        return None

    def _logits(
        self, script: Script, setup: SetUp, neighbour: nn.Module | None, builder: TraceBuilder | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Those of the draft in service, each feed after or before what its neighbour does, unseen by `builder`."""
        runs = neighbour is not None and setup.runs != "never"
        steps = {setup.runs: lambda feed: self._step(neighbour, builder)} if runs else {}
        return comparable(run(self.draft, script, **steps), self.sound_logits[0][0].shape[-1])

    def _sound_logits(self, in_blocks: bool) -> dict[int, torch.Tensor]:
        return text_logits(self.sound_logits[in_blocks], self.blocks if in_blocks else self.script)

    def _logits_off(self, logits: Sequence[torch.Tensor], setup: SetUp) -> float:
        return off(text_logits(logits, self._script_of(setup)), self._sound_logits(setup.in_blocks))

    def _rounded_to(self, wrong: pd.DataFrame, logits: Sequence[torch.Tensor], trace: Trace, setup: SetUp) -> str:
        """The type, coarser than the draft's, to which all that differs is rounded; "" where there is none."""
        known = same_bits_in(self.reference, self._script_of(setup), logits, self.dtype)
        if known or not self._as_meant(trace):
            return known

        def rounded(dtype: str) -> Rounded:
            copy = copy_of(self.reference).to(getattr(torch, dtype))
            outcome, along = _captured(copy, self._script_of(setup))
            errors = local.local_errors(self.reference, along).groupby(list(local.WHICH))["error"].max()
            return Rounded(errors, self._logits_off(outcome, setup))

        held = partial(held_by, logits)
        return coarser(wrong, self._logits_off(logits, setup), trace, self.dtype, rounded=rounded, held=held)

    def _neighbour(self, setup: SetUp) -> nn.Module | None:
        if setup.beside == "target" and self.target is None:
            raise InputError(f"{setup.id} runs the draft beside the target: give one")
        neighbours = {
            "nobody": lambda: None,
            "copy": lambda: copy_of(self.reference),
            "decoy": lambda: decoy_twin(self.reference),
            "other decoy": lambda: decoy_twin(self.reference, seed=2),
            "target": lambda: self.target,
        }
        return neighbours[setup.beside]()

    def _script_of(self, setup: SetUp) -> Script:
        return self.blocks if setup.in_blocks else self.script

    def _as_meant(self, trace: Trace) -> bool:
        """Whether all parameters that were read are the draft's own, with the content of the pristine copy's."""
        read = trace.params
        meant = [self.meant.get(path, digest) for path, digest in zip(read["owner_path"], read["digest"], strict=True)]
        return bool((read["owner"] == OWN).all() and (read["digest"] == meant).all())

    @torch.no_grad()
    def _step(self, neighbour: nn.Module, builder: TraceBuilder | None) -> None:
        """The neighbour reads the text, as a target that verifies does."""
        with nullcontext() if builder is None else builder.paused():
            neighbour(torch.tensor([self.script.text], device=next(neighbour.parameters()).device), use_cache=False)

    def _floors(self) -> tuple[pd.Series, pd.Series]:
        """How far sound runs are from the replay, and those of which that says nothing."""
        sound = []
        for script in (self.script, self.blocks):
            logits, along = _captured(self.reference, script)
            self.sound_logits.append(tuple(row.cpu() for row in logits))
            self.sound.append(along)
            sound.append(local.local_errors(self.reference, along))
        return local.floors(sound, self.dtype), local.unsteady(sound, self._routers)


def _captured(model: nn.Module, script: Script) -> tuple[tuple[torch.Tensor, ...], Along]:
    """The logits of each feed, and what every module was given and gave."""
    with capture(model, tag=OWN, full="", at_use=False) as builder:
        logits = tuple(run(model, script))
    return logits, Along.of(builder.trace(), script)


def vocabulary_size(model: nn.Module) -> int:
    """Tokens that a model has an embedding of; sys.maxsize where it does not tell."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", sys.maxsize)


@dataclass(frozen=True)
class Coverage:
    """Modules that ran and, of these, those of which something was `compared`; `left_out` are "module:role:name".

    `with_holder` are modules whose own outputs could not be compared, inside one whose outputs were: what they do wrong
    shows there (an activation that sees the tokens of one expert). `uncompared` are those of which nothing tells. Left
    out are tensors without a token axis or of other shapes (masks): what they do shows in what is made of them.
    `unread` are those that torch cannot read, with the reason. `seen_at_use` are those of the draft's parameters that
    an operation was seen to read: what a kernel of Triton or C++ looks up by itself is not.
    """

    modules: int
    uncompared: tuple[str, ...]
    with_holder: tuple[str, ...]
    never_called: tuple[str, ...]
    tensors: int
    left_out: tuple[str, ...]
    unread: tuple[str, ...]
    tokens: int
    parameters: int
    seen_at_use: int
    output: bool

    @classmethod
    def of(cls, outcome: Outcome, draft: nn.Module) -> "Coverage":
        """Of one set-up's run."""
        seen = outcome.trace.facts["modules"]
        left_out = [*outcome.along.left_out, *_reshaped(outcome)]
        ran = {*outcome.trace.tensors["module"]}
        compared = {*outcome.errors.loc[outcome.errors["role"] == "out", "at"]}
        # a wrapper that the pristine copy has not: what it gives is what a module inside gave
        gave = outcome.trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[module] for module in compared))
        compared |= {module for module in ran - compared if module in gave and gave[module] <= known}
        held = {module for module in ran - compared if any(holder in compared for holder in _holders(module))}
        params = outcome.trace.params
        read = {*params.loc[params["owner"] == OWN, "owner_path"]}
        parameters = [name for name, _ in draft.named_parameters()]
        return cls(
            modules=len(ran),
            uncompared=tuple(sorted(ran - compared - held)),
            with_holder=tuple(sorted(held)),
            never_called=tuple(seen["never_called"]),
            tensors=len(outcome.errors[["at", "call", "role", "name"]].drop_duplicates()),
            left_out=tuple(f"{key.module or 'model'}:{key.role}:{key.name}" for key in left_out),
            unread=tuple(f"{place} ({why})" for place, why in outcome.trace.facts.get("unread", {}).items()),
            tokens=len(outcome.along.text),
            parameters=len(parameters),
            seen_at_use=sum(name in read for name in parameters),
            output="" in compared,
        )

    @property
    def compared(self) -> int:
        return self.modules - len(self.uncompared) - len(self.with_holder)

    @property
    def complete(self) -> bool:
        """Whether every module that ran was compared, or one that holds it, and so was what the model gave."""
        return self.output and not self.uncompared

    def __str__(self) -> str:
        never = (
            f", {len(self.never_called)} never ran ({', '.join(self.never_called[:3])})" if self.never_called else ""
        )
        within = f", {len(self.with_holder)} with the one that holds them" if self.with_holder else ""
        not_seen = f", not {', '.join(self.uncompared[:3])}" if self.uncompared else ""
        return (
            f"{self.compared} of {self.modules} modules{within}{not_seen}{never}; {self.tensors} tensors at "
            f"{self.tokens} tokens, {len(self.left_out)} left out (other shapes); {self.seen_at_use} of "
            f"{self.parameters} parameters seen at use"
        )


def _holders(path: str) -> Iterator[str]:
    """The paths of the modules that hold one, the nearest first, without the model itself: that holds them all."""
    while path := path.rpartition(".")[0]:
        yield path


def _reshaped(outcome: Outcome) -> list[Key]:
    """Tensors along the text that came in another shape than the pristine copy has: attention weights over a window."""
    seen = {*outcome.errors[["at", "call", "role", "name"]].itertuples(index=False, name=None)}
    return [key for key in outcome.along.values if tuple(key) not in seen]
