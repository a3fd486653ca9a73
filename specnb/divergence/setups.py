"""The matrix of set-ups: the same draft, fed the same tokens beside different neighbours. A contrast rules out a guess.

"Beside itself" cannot show that the draft is given another model's weights: they are its own values. The decoy twin
(the same shapes, other weights) can. What the draft did in a set-up is replayed on a pristine copy (`local_errors`).

Rounding to a coarser type than the draft's is no fault: another build, kernels in half precision, autocast. A fault
sits somewhere and has a direction. Rounding is everywhere that modules of a kind are, and has none: the gain stays at 1
while the error is that of the type. How large that is, a sound copy of the draft in that type shows.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from specnb.divergence.capture import capture, watch_modules
from specnb.divergence.capture.at_use import list_parameters, relabel
from specnb.divergence.capture.tensors import (
    digest_tensor,
    dtype_name,
    is_cache,
    name_arguments,
    named_tensors,
    outputs_in,
    to_numpy,
)
from specnb.divergence.errors import (
    DIRECTED,
    ROUNDING,
    TENSOR,
    TIMES_FLOOR,
    Node,
    flat,
    gains,
    judge_errors,
    locate,
    margins,
    nodes,
    noise_floors,
    relative_l2,
)
from specnb.divergence.faults.planting import Deploy
from specnb.divergence.pair import copy_of, decoy_twin
from specnb.divergence.parts import find
from specnb.divergence.script import Feed, Script, feed_script
from specnb.divergence.trace import NEIGHBOUR, OWN, UNKNOWN, Alignment, Key, ModuleTrace, find_turned
from specnb.errors import InputError, require_known
from specnb.io import read_toml

BLOCK = 5
"""Width of the feeds of S0w and of the second sound run."""
Logits = list[Tensor]
"""Of each feed `(tokens, vocab)`, in the CPU's memory."""
LOGITS = Key("", 0, "out", "out.logits")


class SetUp(NamedTuple):
    """One way to run the draft, as the head of `setups.toml` says."""

    id: str
    says: str
    beside: str
    rules_out: str
    runs: str = "before"
    in_blocks: bool = False


SETUPS = {name: SetUp(name, **row) for name, row in read_toml(Path(__file__).with_suffix(".toml")).items()}
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
    coarser: str = ""

    @cached_property
    def wrong(self) -> pd.DataFrame:
        """The rows that are wrong by themselves, first in time first."""
        return locate(self.errors)

    @property
    def clean(self) -> bool:
        return self.wrong.empty

    @property
    def first(self) -> Node:
        """The first divergence of a set-up that is wrong."""
        return Node(*nodes(self.wrong).loc[0, [*Node._fields]])

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
        require_known("type of a draft", self.dtype, ROUNDING)
        if target is not None and (size := target.get_input_embeddings().num_embeddings) <= max(script.text):
            raise InputError(f"got token {max(script.text)}, and the target knows {size}: give tokens that both have")
        self.reference = copy_of(draft)
        self.meant = {name: digest_tensor(value) for name, value in list_parameters(self.reference).items()}
        """Digests of parameters and buffers, tied ones under each of their paths."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        parts = find(self.reference)
        self._rotaries = [*dict(parts["rotary"])]
        sound = [_capture_run(self.reference, feeds) for feeds in (self.script, self.blocks)]
        self.sound_logits, self.sound = zip(*sound, strict=True)
        """The pristine copy's runs: fed as the script has it, and in blocks."""
        self.floor = noise_floors([local_errors(self.reference, sound_run) for sound_run in self.sound], self.dtype)
        routers = self.floor.index.isin([*dict(parts["router"])], level="at")
        self.unsteady = self.floor[(self.floor * TIMES_FLOOR >= 1) & ~routers]
        """The floors of tensors of which nothing can be said: sound runs differ so much that zeros in place of one
        would pass. What rounds never does, but for routers, which may break ties differently; what depends on how many
        tokens are fed at once (angles of a long context) may."""

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up; `deploy(draft, neighbour)` is the service under suspicion, without which the models just run
        in turn. InputError for logits of another vocabulary."""
        setup = SETUPS[name]
        script, neighbour = self.blocks if setup.in_blocks else self.script, self._neighbour(setup)
        known = {} if neighbour is None else {NEIGHBOUR: neighbour}
        service = deploy(self.draft, neighbour) if deploy else nullcontext()
        with service, capture(self.draft, known=known, states=True) as builder:
            logits = self._logits(setup, neighbour, builder.paused)
        trace = builder.trace()
        relabel(trace, neighbour, self.meant)
        run = script.align(trace)
        errors = local_errors(self.reference, run)
        shifted = self._explain_offset(errors, run)
        errors.loc[shifted, "error"] = 0.0
        errors = judge_errors(errors, self.floor, script.last_feeds)
        outcome = Outcome(setup, script, errors, trace, run, logits, shifted.any())
        if not outcome.clean and (coarser := self._rounded_to(outcome)):
            return replace(outcome, errors=errors.assign(wrong=False), coarser=coarser)
        return outcome

    def bare(self, name: str, deploy: Deploy | None = None) -> Logits:
        """The logits of a set-up without hooks."""
        setup = SETUPS[name]
        neighbour = self._neighbour(setup)
        with deploy(self.draft, neighbour) if deploy else nullcontext():
            return self._logits(setup, neighbour)

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """Return how far the logits of set-ups are from sound ones at most (relative L2), and those of sound runs
        from one another, at least what rounding to the draft's type may do."""
        far = (_logits_off(self.sound[outcome.setup.in_blocks], outcome.run) for outcome in outcomes)
        return max(far, default=0.0), max(_logits_off(*self.sound), ROUNDING[self.dtype])

    def _logits(
        self, setup: SetUp, neighbour: Module | None, unseen: Callable[[], AbstractContextManager] = nullcontext
    ) -> Logits:
        """Those of the draft in service, each feed after or before its neighbour reads the text, as a verifier does."""

        def step(_feed: Feed) -> None:
            with torch.no_grad(), unseen():
                neighbour(torch.tensor([self.script.text], device=next(neighbour.parameters()).device), use_cache=False)

        steps = {} if neighbour is None or setup.runs == "never" else {setup.runs: step}
        logits = feed_script(self.draft, self.blocks if setup.in_blocks else self.script, **steps)
        vocab = self.sound_logits[0][0].shape[-1]
        for row in logits:
            if row.ndim != 2 or not len(row) or row.shape[-1] != vocab:
                shapes = f"the shape {tuple(row.shape)}, expected (tokens, {vocab}), of the last token at least"
                raise InputError(f"in service logits have {shapes}: give those of the draft's own vocabulary")
        return logits

    def _neighbour(self, setup: SetUp) -> Module | None:
        match setup.beside:
            case "nobody":
                return None
            case "copy":
                return copy_of(self.reference)
            case "decoy":
                return decoy_twin(self.reference)
            case "other decoy":
                return decoy_twin(self.reference, seed=2)
        if self.target is None:
            raise InputError(f"{setup.id} runs the draft beside the target: give one")
        return self.target

    def _explain_offset(self, errors: pd.DataFrame, run: Alignment) -> pd.Series:
        """Mark the rows that one offset of all positions explains; none where there is no such offset.

        A model without rotary modules has learned positions, where an offset is an error.
        """
        sound = self.sound[0].whole
        pairs = {key: (sound[key].values, whole.values) for key, whole in run.whole.items() if key in sound}
        turned = [find_turned(path, pairs) for path in self._rotaries]
        if not turned or not all(turned):
            return pd.Series(False, index=errors.index)
        return errors["module"].isin(self._rotaries) | (errors["discrete"] & errors["name"].str.contains("position"))

    def _rounded_to(self, outcome: Outcome) -> str:
        """The type, coarser than the draft's, to which all that differs is rounded; "" where there is none."""
        wrong, read = outcome.wrong, outcome.trace.params
        types = [name for name, size in ROUNDING.items() if size > ROUNDING[self.dtype]]
        known = next((name for name in types if self._gives_same_bits(name, outcome)), "")
        by_module = wrong.assign(along=(wrong["gain"] - 1).abs()).groupby("module")[["along", "error"]].median()
        directed = wrong["discrete"].any() or (by_module["along"] >= DIRECTED * by_module["error"]).any()
        # parameters of others, or with other content than the pristine copy's, are no rounding
        meant = read["owner_path"].map(self.meant).fillna(read["digest"])
        if known or directed or not ((read["owner"] == OWN) & (read["digest"] == meant)).all():
            return known
        worst, where = wrong["error"].max(), {*wrong["module"]}
        # only what the model gives at last, as services round logits; a head that rounds is a module like any other
        if {*wrong["at"]} == {""} and {*wrong["role"]} == {"out"}:
            return next((name for name in types if worst <= ROUNDING[name] and _held_by(outcome.logits, name)), "")
        kinds = outcome.trace.tensors.drop_duplicates("module").set_index("module")["kind"]
        if len(where) == 1 or {*kinds.index[kinds.isin({kinds.get(module) for module in where})]} != where:
            return ""  # rounding is everywhere that modules of a kind are
        possible = (name for name in types if worst <= TIMES_FLOOR * ROUNDING[name])
        return next((name for name in possible if self._rounds_as_much(name, outcome)), "")

    def _gives_same_bits(self, dtype: str, outcome: Outcome) -> bool:
        """Tell whether the sound draft, run in this type, gives these very logits: under autocast, with parameters of
        the type (as loaded), or with buffers as well."""
        if not _held_by(outcome.logits, dtype):  # they were not made in it, and nothing needs to be run
            return False
        kind, loaded = getattr(torch, dtype), copy_of(self.reference)
        for parameter in loaded.parameters():
            parameter.data = parameter.data.to(kind)
        autocast = torch.autocast(next(loaded.parameters()).device.type, dtype=kind)
        whole = copy_of(loaded).to(kind)
        for model, under in (self.reference, autocast), (loaded, nullcontext()), (whole, nullcontext()):
            # not every operation is there for every type
            with suppress(RuntimeError), under:
                if same_logits(feed_script(model, outcome.script), outcome.logits):
                    return True
        return False

    def _rounds_as_much(self, dtype: str, outcome: Outcome) -> bool:
        """Tell whether a sound copy in this type is off by as much, each tensor and the logits."""
        _, copied = _capture_run(copy_of(self.reference).to(getattr(torch, dtype)), outcome.script)
        errors = local_errors(self.reference, copied).groupby(TENSOR)["error"].max()
        usual = outcome.wrong.join(errors.rename("usual"), on=TENSOR)["usual"]
        off, usual_off = (_logits_off(self.sound[outcome.setup.in_blocks], run) for run in (outcome.run, copied))
        # a type in which the sound copy overflows says nothing
        no_more = (outcome.wrong["error"] <= TIMES_FLOOR * usual.where(np.isfinite(usual), 0.0)).all()
        return no_more and off <= TIMES_FLOOR * usual_off < math.inf


def _capture_run(model: Module, script: Script) -> tuple[Logits, Alignment]:
    """The logits of each feed, and what every module was given and gave."""
    with capture(model, at_use=False, states=True) as builder:
        logits = feed_script(model, script)
    return logits, script.align(builder.trace())


# --- shadow replay: each module of the pristine copy, recomputed on its recorded inputs -------------------------------
# The copy reads the whole text in one forward. Every module in it is handed what the same module was given in the run
# under suspicion, and its own output is compared with the run's, which then goes on in its place. So no error travels:
# a module that is wrong is wrong by itself. What a module is given is compared, too: a difference there was made
# between modules, by the code of the one that holds them or by somebody who wrote into a buffer meanwhile, and is put
# down to the holder. (The idea of shadow modules is that of torch's numeric suite.)


@torch.no_grad()
def local_errors(reference: Module, run: Alignment) -> pd.DataFrame:
    """The error table of a run, replayed on the pristine `reference`, a row for each tensor and token.

    Columns: order, module, call, role, name, at, discrete, position, error, gain. `module` is who made the tensor, of
    an input the one that holds `at`, where it was seen; `error` is relative L2, `gain` <a, b> / <a, a> of the sound
    tensor a and the run's b. Of integers `error` is 1 where any differs; of experts chosen by scores the difference of
    the scores, relative to all.
    """
    replay = _Replay(run)
    with watch_modules(reference, replay.enter, replay.leave):
        ids = torch.tensor(run.tokens[None], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    columns = {"position": int, "error": float, "gain": float}
    labels = ["order", "module", "call", "role", "name", "at", "discrete"]
    tensors = pd.DataFrame(replay.errors, columns=[*labels, *columns])
    return tensors.explode([*columns], ignore_index=True).astype(columns)


class _Replay:
    """The hooks of the pristine copy; `errors`: of each tensor its labels, then positions, errors and gains, arrays."""

    def __init__(self, run: Alignment) -> None:
        self._run = run
        self._calls, self._order = Counter(), 0
        self._running, self.errors = [], []

    def enter(self, path: str, module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Exchange what a module is given for what it was given in the run."""
        holder = self._running[-1] if self._running else path
        self._running.append(path)
        taken = self._compare("in", named_tensors(name_arguments(module, args, kwargs)), holder)
        return _exchanged(args, taken), _exchanged(kwargs, taken)

    def leave(self, path: str, _module: Module, _args: tuple, output: object) -> object:
        """Exchange what a module gives for what it gave in the run."""
        taken = self._compare("out", outputs_in(output), path)
        self._running.pop()
        self._calls[path] += 1
        return _exchanged(output, taken)

    def _compare(self, role: str, named: Iterable[tuple[str, Tensor]], maker: str) -> dict[int, Tensor]:
        """Note how far the run's tensors of the running module are from these; what goes on in their place, by id."""
        self._order += 1
        at, taken, pairs = self._running[-1], {}, list(named)
        for name, replayed in pairs:
            key = Key(at, self._calls[at], role, name)
            whole = self._run.whole.get(key)
            if whole is None or whole.values.ndim != replayed.ndim:
                continue
            axis, labels = whole.axis, (self._order, maker, key.call, role, name, at)
            a, b = np.moveaxis(to_numpy(replayed), axis, 0), whole.values.copy()
            choice = role == "out" and a.dtype.kind in "iu" and a.ndim > 1
            positions, discrete = np.arange(len(a)), a.dtype.kind in "iub"
            if a.shape != b.shape or np.iscomplexobj(a) != np.iscomplexobj(b):
                if choice and b.dtype.kind in "iu" and a.shape[:-1] == b.shape[:-1] and not len(whole.gaps):
                    # not `top_k` experts: wrong at each token
                    self.errors.append((*labels, True, positions, np.ones(len(a)), np.ones(len(a))))
                continue
            b[whole.gaps] = a[whole.gaps]  # the copy's own goes on where the run made nothing
            recorded = torch.from_numpy(np.moveaxis(b, 0, axis).copy())  # hooks and modules write into it
            taken[id(replayed)] = recorded.to(replayed)
            beside = [item for _, item in pairs if item.is_floating_point() and item.shape[:-1] == replayed.shape[:-1]]
            scores = next((item for item in beside if item.shape[-1] > replayed.shape[-1]), None) if choice else None
            if scores is not None:  # with weights beside them, the order of the chosen counts
                ordered = any(item.shape == replayed.shape for item in beside)
                scores = flat(np.moveaxis(to_numpy(scores), axis, 0))
                error, discrete = margins(scores, flat(a), flat(b), ordered=ordered), False
            else:
                error = (flat(a) != flat(b)).any(1).astype(float) if discrete else relative_l2(a, b)
            columns = (np.delete(column, whole.gaps) for column in (positions, error, gains(a, b)))
            self.errors.append((*labels, discrete, *columns))
        return taken


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """The same structure with some of its tensors replaced."""
    return tree_map_only(Tensor, lambda tensor: taken.get(id(tensor), tensor), value, is_leaf=is_cache)


# --- logits -----------------------------------------------------------------------------------------------------------


def _held_by(logits: Logits, dtype: str) -> bool:
    """Tell whether all are numbers that a type of this name has, as they are once they were rounded to it."""
    return all(torch.equal(row, row.to(getattr(torch, dtype)).to(row.dtype)) for row in logits)


def _logits_off(sound: Alignment, run: Alignment) -> float:
    """The largest relative L2 error of the logits of a position that both have; infinite where one is no number."""
    if LOGITS not in sound.whole or LOGITS not in run.whole:
        return 0.0
    a, b = (item.whole[LOGITS] for item in (sound, run))
    both = np.setdiff1d(np.arange(len(a.values)), [*a.gaps, *b.gaps])
    return relative_l2(a.values[both], b.values[both]).max(initial=0.0)


def same_logits(logits: Logits, other: Logits) -> bool:
    """Tell whether the logits of each feed (of its last tokens where a service gives no others) are equal numbers."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(logits, other, strict=True))
    return all(np.array_equal(a.double(), b.double(), equal_nan=True) for a, b in last)


# --- what was looked at -----------------------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """Modules that ran and, of these, those of which something was `compared`; `left_out` are "module:role:name".

    `with_holder`: own outputs could not be compared, but those of a module around them, where an error shows.
    `uncompared`: nothing tells of them. `left_out`: tensors without a token axis or of other shapes (masks).
    `seen_at_use`: parameters that an operation was seen to read.
    """

    modules: int
    uncompared: list[str]
    with_holder: list[str]
    never_called: list[str]
    tensors: int
    left_out: list[str]
    tokens: int
    parameters: int
    seen_at_use: int
    output: bool

    @classmethod
    def of(cls, outcome: Outcome, draft: Module) -> "Coverage":
        """Count what one set-up's run covers."""
        errors, trace = outcome.errors, outcome.trace
        seen = {*errors.groupby(TENSOR).groups}
        # also what has another shape than the pristine copy's: attention weights over a window
        left_out = [key for key in outcome.run.rows if key not in seen]
        ran = {*trace.tensors["module"]}
        compared = {*errors.loc[errors["role"] == "out", "at"]}
        # a wrapper that the pristine copy has not: what it gives is what a module inside gave
        gave = trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[module] for module in compared))
        compared |= {module for module in ran - compared if module in gave and gave[module] <= known}
        holders = tuple(f"{module}." for module in compared if module)
        with_holder = {module for module in ran - compared if module.startswith(holders)}
        read = {*trace.params.loc[trace.params["owner"] == OWN, "owner_path"]}
        parameters = dict(draft.named_parameters()).keys()
        return cls(
            modules=len(ran), tensors=len(seen), tokens=len(outcome.script.text), output="" in compared,
            uncompared=sorted(ran - compared - with_holder), with_holder=sorted(with_holder),
            never_called=trace.facts["modules"]["never_called"],
            left_out=[f"{key.module or 'model'}:{key.role}:{key.name}" for key in left_out],
            parameters=len(parameters), seen_at_use=len(parameters & read),
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
