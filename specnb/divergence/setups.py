"""The matrix of set-ups: the same draft, fed the same tokens beside different neighbours. A contrast rules out a guess.

"Beside itself" cannot show that the draft is given another model's weights: they are its own values. The decoy twin
(the same shapes, other weights) can.

Rounding to a coarser type than the draft's is no fault: another build, kernels in half precision, autocast. A fault
sits somewhere and has a direction. Rounding is everywhere that modules of a kind are, and has none: the gain stays at 1
while the error is that of the type. How large that is, a sound copy of the draft in that type shows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module

from specnb.divergence.align import Alignment
from specnb.divergence.capture import TraceBuilder, capture
from specnb.divergence.capture.at_use import list_parameters, relabel
from specnb.divergence.capture.tensors import digest_tensor, dtype_name
from specnb.divergence.errors import TENSOR, judge_errors, locate, noise_floors
from specnb.divergence.faults.planting import Deploy
from specnb.divergence.pair import copy_of, decoy_twin
from specnb.divergence.parts import find
from specnb.divergence.replay import explain_offset, local_errors
from specnb.divergence.script import Script, feed_script
from specnb.divergence.tolerances import DIRECTED, ROUNDING, TIMES_FLOOR, relative_l2
from specnb.divergence.trace import NEIGHBOUR, OWN, UNKNOWN, Key, ModuleTrace
from specnb.errors import InputError

BLOCK = 5
"""Width of the feeds of S0w and of the second sound run."""
Logits = tuple[Tensor, ...]
"""Of each feed `(tokens, vocab)`, in the CPU's memory."""
LOGITS = Key("", 0, "out", "out.logits")


@dataclass(frozen=True)
class SetUp:
    """One way to run the draft; `rules_out`: the guess that a clean result excludes (for `S0`: a wrong one)."""

    id: str
    says: str
    beside: Literal["nobody", "copy", "decoy", "other decoy", "target"]
    runs: Literal["before", "after", "never"] = "before"
    rules_out: str = ""
    in_blocks: bool = False


SETUPS: Mapping[str, SetUp] = {
    setup.id: setup for setup in (
        SetUp("S0", "alone", "nobody", rules_out="wrong here: no neighbour is needed"),
        SetUp("S0w", "alone, in blocks", "nobody", rules_out="clean, S0 wrong: single steps, or tokens taken back",
              in_blocks=True),
        SetUp("S1", "beside itself", "copy", rules_out="wrong: buffers or state are shared, whatever the weights"),
        SetUp("S2", "beside a decoy twin", "decoy", rules_out="S1 clean, wrong here: another model's values get in"),
        SetUp("S3", "beside the target", "target", rules_out="S2 clean, wrong here: size, layout or number of layers"),
        SetUp("S4", "the target loaded, never run", "target", "never", "wrong: made at loading; clean: at running"),
        SetUp("S5", "beside another decoy", "other decoy", rules_out="wrong otherwise than S2: the neighbour's values"),
        SetUp("S6", "the target first runs behind the prompt", "target", "after",
              "clean, S3 wrong: what it left before the draft's first step is read"),
    )
}  # fmt: skip
FIRST, ON_DEMAND = ("S0", "S0w", "S1", "S2", "S3"), ("S4", "S5", "S6")
"""Those that are always run, and those for a draft that only a neighbour makes wrong."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one set-up: `errors` as `errors.judge_errors` has them; `run` of the draft, along its text.

    `logits` are those of each feed. `offset`: all positions are one number off, which RoPE does not see. `coarser`: the
    type to which all that differs is rounded, "" for that of the draft: nothing is wrong then.
    """

    setup: SetUp
    script: Script
    errors: pd.DataFrame
    trace: ModuleTrace
    run: Alignment
    logits: Logits
    offset: bool
    coarser: str

    @cached_property
    def wrong(self) -> pd.DataFrame:
        """The rows that are wrong by themselves, first in time first."""
        return locate(self.errors)

    @property
    def clean(self) -> bool:
        return self.wrong.empty

    @property
    def foreign(self) -> pd.DataFrame:
        """Parameters of other models that the draft's modules read, at the point of use."""
        return self.trace.params[~self.trace.params["owner"].isin((OWN, UNKNOWN))]


class Lab:
    """A draft under suspicion: runs set-ups, each compared with what a pristine copy makes of the same inputs.

    Raises InputError for a draft in a dtype without known rounding, and for a script with tokens that the target has
    not.
    """

    def __init__(self, draft: Module, target: Module | None = None, *, script: Script) -> None:
        self.draft, self.target, self.script = draft, target, script
        self.dtype = dtype_name(next(draft.parameters()))
        if self.dtype not in ROUNDING:
            raise InputError(f"the draft computes in {self.dtype}: give it in {', '.join(ROUNDING)}")
        if target is not None and (size := vocabulary_size(target)) <= max(script.text):
            raise InputError(f"got token {max(script.text)}, and the target knows {size}: give tokens that both have")
        self.reference = copy_of(draft)
        self.meant = {name: digest_tensor(value) for name, value in list_parameters(self.reference).items()}
        """Digests of parameters and buffers, tied ones under each of their paths."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        parts = {kind: [path for path, _ in modules] for kind, modules in find(self.reference).items()}
        self._rotaries = parts["rotary"]
        sound = [_capture_run(self.reference, feeds) for feeds in (self.script, self.blocks)]
        self.sound_logits, self.sound = zip(*sound, strict=True)
        """The pristine copy's runs: fed as the script has it, and in blocks."""
        self.floor = noise_floors([local_errors(self.reference, sound_run) for sound_run in self.sound], self.dtype)
        routers = self.floor.index.isin(parts["router"], level="at")
        self.unsteady = self.floor[(self.floor * TIMES_FLOOR >= 1) & ~routers]
        """The floors of tensors of which nothing can be said: sound runs differ so much that zeros in place of one
        would pass. What rounds never does, but for routers, which may break ties differently; what depends on how many
        tokens are fed at once (angles of a long context) may."""

    def fitting(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these set-ups that can be run: without a target none beside it."""
        return tuple(name for name in names if self.target is not None or SETUPS[name].beside != "target")

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up; `deploy(draft, neighbour)` is the service under suspicion, without which the models just run
        in turn. InputError for logits of another vocabulary."""
        setup = SETUPS[name]
        script, neighbour = self._script_of(setup), self._neighbour(setup)
        known = {} if neighbour is None else {NEIGHBOUR: neighbour}
        service = deploy(self.draft, neighbour) if deploy else nullcontext()
        with service, capture(self.draft, known=known, states=True) as builder:
            logits = self._logits(script, setup, neighbour, builder)
        trace = relabel(builder.trace(), neighbour, self.meant)
        aligned = script.align(trace)
        errors = local_errors(self.reference, aligned)
        shifted = explain_offset(errors, aligned, self.sound[0], self._rotaries)
        errors.loc[shifted, "error"] = 0.0
        errors = judge_errors(errors, self.floor, script.last_feeds)
        rounded = self._rounded_to(locate(errors), logits, aligned, setup) if errors["wrong"].any() else ""
        if rounded:
            errors["wrong"] = False
        return Outcome(setup, script, errors, trace, aligned, logits, bool(shifted.any()), rounded)

    def bare(self, name: str, deploy: Deploy | None = None) -> Logits:
        """The logits of a set-up without hooks."""
        setup = SETUPS[name]
        neighbour = self._neighbour(setup)
        with deploy(self.draft, neighbour) if deploy else nullcontext():
            return self._logits(self._script_of(setup), setup, neighbour)

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """Return how far the logits of set-ups are from sound ones at most (relative L2), and those of sound runs
        from one another, at least what rounding to the draft's type may do."""
        far = (_logits_off(self.sound[outcome.setup.in_blocks], outcome.run) for outcome in outcomes)
        return max(far, default=0.0), max(_logits_off(*self.sound), ROUNDING[self.dtype])

    def first_nan(self) -> tuple[str, int] | None:
        """The module that gives NaN first in the pristine copy, and at which position; None where none does."""
        for key, (values, *_) in self.sound[0].whole.items():
            if key.role == "out" and len(bad := np.flatnonzero(np.isnan(values.reshape(len(values), -1)).any(1))):
                return key.module, int(bad[0])
        return None

    def _logits(
        self, script: Script, setup: SetUp, neighbour: Module | None, builder: TraceBuilder | None = None
    ) -> Logits:
        """Those of the draft in service, each feed after or before what its neighbour does, unseen by `builder`."""
        runs = neighbour is not None and setup.runs != "never"
        steps = {setup.runs: lambda feed: self._step(neighbour, builder)} if runs else {}
        return _comparable(feed_script(self.draft, script, **steps), self.sound_logits[0][0].shape[-1])

    def _neighbour(self, setup: SetUp) -> Module | None:
        if setup.beside == "target" and self.target is None:
            raise InputError(f"{setup.id} runs the draft beside the target: give one")
        match setup.beside:
            case "copy":
                return copy_of(self.reference)
            case "decoy" | "other decoy":
                return decoy_twin(self.reference, seed=1 if setup.beside == "decoy" else 2)
        return self.target if setup.beside == "target" else None

    def _script_of(self, setup: SetUp) -> Script:
        return self.blocks if setup.in_blocks else self.script

    @torch.no_grad()
    def _step(self, neighbour: Module, builder: TraceBuilder | None) -> None:
        """The neighbour reads the text, as a target that verifies does."""
        with nullcontext() if builder is None else builder.paused():
            neighbour(torch.tensor([self.script.text], device=next(neighbour.parameters()).device), use_cache=False)

    def _rounded_to(self, wrong: pd.DataFrame, logits: Logits, aligned: Alignment, setup: SetUp) -> str:
        """The type, coarser than the draft's, to which all that differs is rounded; "" where there is none."""
        types = [name for name in sorted(ROUNDING, key=ROUNDING.get) if ROUNDING[name] > ROUNDING[self.dtype]]
        known = next((name for name in types if self._gives_same_bits(name, logits, setup)), "")
        by_module = wrong.assign(along=(wrong["gain"] - 1).abs()).groupby("module")[["along", "error"]].median()
        directed = wrong["discrete"].any() or (by_module["along"] >= DIRECTED * by_module["error"]).any()
        if known or directed or not self._reads_as_meant(aligned.trace):
            return known
        worst, where = wrong["error"].max(), {*wrong["module"]}
        # only what the model gives at last, as services round logits; a head that rounds is a module like any other
        if {*wrong["at"]} == {""} and {*wrong["role"]} == {"out"}:
            return next((name for name in types if worst <= ROUNDING[name] and _held_by(logits, name)), "")
        kinds = aligned.trace.tensors.drop_duplicates("module").set_index("module")["kind"]
        if len(where) == 1 or {*kinds.index[kinds.isin({kinds.get(module) for module in where})]} != where:
            return ""  # rounding is everywhere that modules of a kind are
        possible = (name for name in types if worst <= TIMES_FLOOR * ROUNDING[name])
        return next((name for name in possible if self._rounds_as_much(name, wrong, aligned, setup)), "")

    def _gives_same_bits(self, dtype: str, logits: Logits, setup: SetUp) -> bool:
        """Tell whether the sound draft, run in this type, gives these very logits: under autocast, with parameters of
        the type (as loaded), or with buffers as well."""
        if not _held_by(logits, dtype):  # they were not made in it, and nothing needs to be run
            return False
        kind, loaded = getattr(torch, dtype), copy_of(self.reference)
        for parameter in loaded.parameters():
            parameter.data = parameter.data.to(kind)
        autocast = torch.autocast(next(loaded.parameters()).device.type, dtype=kind)
        whole = copy_of(loaded).to(kind)
        for model, under in (self.reference, autocast), (loaded, nullcontext()), (whole, nullcontext()):
            # not every operation is there for every type
            with suppress(RuntimeError), under:
                if same_logits(_comparable(feed_script(model, self._script_of(setup)), logits[0].shape[-1]), logits):
                    return True
        return False

    def _rounds_as_much(self, dtype: str, wrong: pd.DataFrame, aligned: Alignment, setup: SetUp) -> bool:
        """Tell whether a sound copy in this type is off by as much, each tensor and the logits."""
        _, copied = _capture_run(copy_of(self.reference).to(getattr(torch, dtype)), self._script_of(setup))
        errors = local_errors(self.reference, copied).groupby(list(TENSOR))["error"].max()
        usual = wrong.join(errors.rename("usual"), on=list(TENSOR))["usual"]
        sound = self.sound[setup.in_blocks]
        off, usual_off = (_logits_off(sound, item) for item in (aligned, copied))
        # a type in which the sound copy overflows says nothing
        no_more = (wrong["error"] <= TIMES_FLOOR * usual.where(np.isfinite(usual), 0.0)).all()
        return no_more and off <= TIMES_FLOOR * usual_off < math.inf

    def _reads_as_meant(self, trace: ModuleTrace) -> bool:
        """Tell whether all parameters that were read are the draft's own, with the content of the pristine copy's."""
        read = trace.params
        meant = [self.meant.get(path, digest) for path, digest in zip(read["owner_path"], read["digest"], strict=True)]
        return bool((read["owner"] == OWN).all() and (read["digest"] == meant).all())


def _capture_run(model: Module, script: Script) -> tuple[Logits, Alignment]:
    """The logits of each feed, and what every module was given and gave."""
    with capture(model, at_use=False, states=True) as builder:
        logits = feed_script(model, script)
    return tuple(row.cpu() for row in logits), script.align(builder.trace())


def vocabulary_size(model: Module) -> int:
    """Tokens that a model has an embedding of."""
    return model.get_input_embeddings().num_embeddings


# --- logits -----------------------------------------------------------------------------------------------------------


def _comparable(logits: Iterable[Tensor], vocab: int) -> Logits:
    """Logits in the CPU's memory. Raises InputError for those of another form, or of another vocabulary."""
    rows = tuple(row.cpu() for row in logits)
    for row in rows:
        if row.ndim != 2 or not len(row) or row.shape[-1] != vocab:
            shapes = f"the shape {tuple(row.shape)}, expected (tokens, {vocab}), of the last token at least"
            raise InputError(f"in service logits have {shapes}: give those of the draft's own vocabulary")
    return rows


def _held_by(logits: Logits, dtype: str) -> bool:
    """Tell whether all are numbers that a type of this name has, as they are once they were rounded to it."""
    return all(torch.equal(row, row.to(getattr(torch, dtype)).to(row.dtype)) for row in logits)


def _logits_off(sound: Alignment, run: Alignment) -> float:
    """The largest relative L2 error of the logits of a position that both have; infinite where one is no number."""
    if LOGITS not in sound.whole or LOGITS not in run.whole:
        return 0.0
    a, b = (item.whole[LOGITS] for item in (sound, run))
    both = np.setdiff1d(np.arange(len(a.values)), [*a.gaps, *b.gaps])
    return float(relative_l2(a.values[both], b.values[both]).max(initial=0.0))


def same_logits(logits: Logits, other: Logits) -> bool:
    """Tell whether the logits of each feed (of its last tokens where a service gives no others) are equal numbers."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(logits, other, strict=True))
    return all(np.array_equal(a.double(), b.double(), equal_nan=True) for a, b in last)


# --- what was looked at -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Modules that ran and, of these, those of which something was `compared`; `left_out` are "module:role:name".

    `with_holder`: own outputs could not be compared, but those of a module around them, where an error shows.
    `uncompared`: nothing tells of them. `left_out`: tensors without a token axis or of other shapes (masks).
    `seen_at_use`: parameters that an operation was seen to read.
    """

    modules: int
    uncompared: tuple[str, ...]
    with_holder: tuple[str, ...]
    never_called: tuple[str, ...]
    tensors: int
    left_out: tuple[str, ...]
    tokens: int
    parameters: int
    seen_at_use: int
    output: bool

    @classmethod
    def of(cls, outcome: Outcome, draft: Module) -> "Coverage":
        """Count what one set-up's run covers."""
        errors, trace = outcome.errors, outcome.trace
        seen = {*errors[list(TENSOR)].drop_duplicates().itertuples(index=False, name=None)}
        # along the text, but in another shape than the pristine copy has: attention weights over a window
        left_out = [*outcome.run.left_out, *(key for key in outcome.run.whole if tuple(key) not in seen)]
        ran = {*trace.tensors["module"]}
        compared = {*errors.loc[errors["role"] == "out", "at"]}
        # a wrapper that the pristine copy has not: what it gives is what a module inside gave
        gave = trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[module] for module in compared))
        compared |= {module for module in ran - compared if module in gave and gave[module] <= known}
        holders = tuple(f"{module}." for module in compared if module)
        with_holder = {module for module in ran - compared if module.startswith(holders)}
        read = {*trace.params.loc[trace.params["owner"] == OWN, "owner_path"]}
        parameters = [name for name, _ in draft.named_parameters()]
        return cls(
            modules=len(ran), tensors=len(seen), tokens=len(outcome.script.text), output="" in compared,
            uncompared=tuple(sorted(ran - compared - with_holder)), with_holder=tuple(sorted(with_holder)),
            never_called=tuple(trace.facts["modules"]["never_called"]),
            left_out=tuple(f"{key.module or 'model'}:{key.role}:{key.name}" for key in left_out),
            parameters=len(parameters), seen_at_use=sum(name in read for name in parameters),
        )  # fmt: skip

    @property
    def complete(self) -> bool:
        """Tell whether every module that ran was compared, or one that holds it, and so was what the model gave."""
        return self.output and not self.uncompared

    def __str__(self) -> str:
        not_seen = f", not {', '.join(self.uncompared[:3])}" if self.uncompared else ""
        compared = self.modules - len(self.uncompared) - len(self.with_holder)
        return (
            f"{compared} of {self.modules} modules{not_seen}; {self.tensors} tensors at "
            f"{self.tokens} tokens, {len(self.left_out)} left out (other shapes); {self.seen_at_use} of "
            f"{self.parameters} parameters seen at use"
        )
