"""The matrix of set-ups: the same draft, fed the same tokens, beside different neighbours. Each contrast kills a guess.

S0 alone, S0w alone in feeds of another width, S1 beside a copy of itself, S2 beside a decoy twin (the same shapes,
other weights), S3 beside the larger target; then, where a neighbour makes it wrong, S4 beside a target that is loaded
and never run, S5 beside another decoy, S6 with the neighbour's step behind the draft's. (S7, without features of the
service, is `features`.) "Beside itself" cannot show that the draft is given another model's weights: they are its own
values. The decoy can.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import pandas as pd
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from specnb.divergence import local
from specnb.divergence.along import Along
from specnb.divergence.capture import capture
from specnb.divergence.ladder import GROWN, ROUNDING
from specnb.divergence.local_offset import explained
from specnb.divergence.pair import copy_of, decoy_twin
from specnb.divergence.parts import find
from specnb.divergence.precision import coarser
from specnb.divergence.script import Feed, Script, run
from specnb.divergence.trace import Trace
from specnb.divergence.tracing.at_use import AtUse
from specnb.divergence.tracing.fingerprint import digest
from specnb.divergence.tracing.names import dtype_name
from specnb.errors import InputError

NEIGHBOUR = "neighbour"
"""The tag of the model beside the draft."""
OWN = "draft"
BLOCK = 5
"""Width of the feeds of S0w and of the second sound run."""

Deploy = Callable[[nn.Module, nn.Module | None], AbstractContextManager[object]]
"""What puts a draft into service beside a neighbour (None: alone) for the time of a block: what is under suspicion."""


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
        one.id: one
        for one in (
            SetUp("S0", "alone", "nobody", kills="wrong here: no neighbour is needed"),
            SetUp("S0w", "alone, in blocks", "nobody", kills="clean, S0 wrong: single steps, or tokens taken back",
                  in_blocks=True),
            SetUp("S1", "beside itself", "copy", kills="wrong: buffers or state are shared, whatever the weights"),
            SetUp("S2", "beside a decoy twin", "decoy", kills="S1 clean, wrong here: another model's values get in"),
            SetUp("S3", "beside the target", "target", kills="S2 clean, wrong here: size, layout or number of layers"),
            SetUp("S4", "the target loaded, never run", "target", "never", "wrong: made at loading; clean: at running"),
            SetUp("S5", "beside another decoy", "other decoy", kills="wrong otherwise than S2: the neighbour's values"),
            SetUp("S6", "the target's step afterwards", "target", "after", "clean: the order of steps matters"),
        )
    }
)  # fmt: skip
FIRST, ON_DEMAND = ("S0", "S0w", "S1", "S2", "S3"), ("S4", "S5", "S6")
"""Those that are always run, and those for a draft that only a neighbour makes wrong."""


def setup_of(name: str) -> SetUp:
    """The set-up of that name. Raises InputError for one that does not exist."""
    if name not in SETUPS:
        raise InputError(f"no set-up {name!r}: there are {', '.join(SETUPS)}")
    return SETUPS[name]


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
        """Parameters of others that the draft's modules read, at the point of use."""
        return self.trace.params[self.trace.params["owner"] != OWN]


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
        weights = (*self.reference.named_parameters(), *self.reference.named_buffers())
        self.meant = {name: digest(value) for name, value in weights}
        """Digests of parameters and buffers, as a capture has them."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        self._rotaries = [path for path, _ in find(self.reference).rotaries]
        self.sound: list[Along] = []
        """The pristine copy's runs: fed as the script has it, and in blocks."""
        self.sound_logits: list[tuple[torch.Tensor, ...]] = []
        self.floor = self._floors()

    def fitting(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these set-ups that can be run: without a target none beside it."""
        return tuple(name for name in names if self.target is not None or SETUPS[name].beside != "target")

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up; `deploy` stands in for the lab's own, so that one reference serves many services.

        Raises InputError for a set-up that does not exist, or needs a target where there is none.
        """
        setup = setup_of(name)
        script, neighbour = self._script_of(setup), self._neighbour(setup)
        known = {} if neighbour is None else {NEIGHBOUR: neighbour}
        with (
            (deploy or self.deploy)(self.draft, neighbour),
            capture(self.draft, tag=OWN, known=known, full="") as builder,
        ):
            logits = run(self.draft, script, **self._steps(setup, neighbour))
        trace = builder.trace()
        along = Along.of(trace, script)
        errors = local.local_errors(self.reference, along)
        shifted = explained(errors, along, self.sound[0], self._rotaries)
        errors.loc[shifted, "error"] = 0.0
        wrong = local.beyond(errors, self.floor, script)
        rounded = coarser(wrong, trace, self.dtype) if self._as_meant(trace) else ""
        wrong = wrong.iloc[:0] if rounded else wrong
        return Outcome(setup, script, wrong, errors, trace, along, tuple(logits), bool(shifted.any()), rounded)

    def bare(self, name: str, deploy: Deploy | None = None) -> tuple[torch.Tensor, ...]:
        """The logits of a set-up without hooks. Raises InputError as `run` does."""
        setup = setup_of(name)
        neighbour = self._neighbour(setup)
        with (deploy or self.deploy)(self.draft, neighbour):
            return tuple(run(self.draft, self._script_of(setup), **self._steps(setup, neighbour)))

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """How far the logits of set-ups are from sound ones at most (relative L2), and how far rounding takes them."""
        sound = [text_logits(*both) for both in zip(self.sound_logits, (self.script, self.blocks), strict=True)]
        far = [off(text_logits(one.logits, one.script), sound[one.setup.in_blocks]) for one in outcomes]
        return max(far), GROWN * max(off(*sound), ROUNDING[self.dtype])

    def _neighbour(self, setup: SetUp) -> nn.Module | None:
        if setup.beside == "target" and self.target is None:
            raise InputError(f"{setup.id} runs the draft beside the target: give one")
        made = {
            "nobody": lambda: None,
            "copy": lambda: copy_of(self.reference),
            "decoy": lambda: decoy_twin(self.reference),
            "other decoy": lambda: decoy_twin(self.reference, seed=2),
            "target": lambda: self.target,
        }
        return made[setup.beside]()

    def _script_of(self, setup: SetUp) -> Script:
        return self.blocks if setup.in_blocks else self.script

    def _steps(self, setup: SetUp, neighbour: nn.Module | None) -> dict[str, Callable[[Feed], None]]:
        """What the neighbour does around each of the draft's forwards."""
        runs = neighbour is not None and setup.runs != "never"
        return {setup.runs: lambda feed: self._step(neighbour)} if runs else {}

    def _as_meant(self, trace: Trace) -> bool:
        """Whether all parameters that were read are the draft's own, with the content of the pristine copy's."""
        read = trace.params
        meant = [self.meant.get(path, digest) for path, digest in zip(read["owner_path"], read["digest"], strict=True)]
        return bool((read["owner"] == OWN).all() and (read["digest"] == meant).all())

    @torch.no_grad()
    def _step(self, neighbour: nn.Module) -> None:
        """The neighbour reads the text, as a target that verifies does."""
        with unfollowed():
            neighbour(torch.tensor([self.script.text], device=next(neighbour.parameters()).device), use_cache=False)

    def _floors(self) -> pd.Series:
        """How far sound runs are from the replay."""
        sound = []
        for script in (self.script, self.blocks):
            with capture(self.reference, tag=OWN, full="", at_use=False) as builder:
                self.sound_logits.append(tuple(run(self.reference, script)))
            self.sound.append(Along.of(builder.trace(), script))
            sound.append(local.local_errors(self.reference, self.sound[-1]))
        return local.floors(sound, self.dtype)


@contextmanager
def unfollowed() -> Iterator[None]:
    """What the neighbour reads is not noted: to ask of each of its operations would cost more than they do."""
    with _pop_mode_temporarily() if isinstance(_get_current_dispatch_mode(), AtUse) else nullcontext():
        yield


def vocabulary_size(model: nn.Module) -> int:
    """Tokens that a model has an embedding of; sys.maxsize where it does not tell."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", sys.maxsize)


def text_logits(logits: Sequence[torch.Tensor], script: Script) -> torch.Tensor:
    """The logits of each token of the text, `(tokens, vocab)`, from those of each feed."""
    rows = (logits[feed][position - script.starts[feed]] for position, feed in enumerate(script.last_feeds))
    return torch.stack(list(rows)).double()


def off(logits: torch.Tensor, sound: torch.Tensor) -> float:
    """The largest relative L2 error of a token's logits; infinite where one is no number."""
    error = float(((logits - sound).norm(dim=-1) / sound.norm(dim=-1)).max())
    return error if error == error else float("inf")
