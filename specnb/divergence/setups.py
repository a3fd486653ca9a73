"""The matrix of set-ups: the same draft, fed the same tokens next to different neighbors.

A contrast between two set-ups rules out a hypothesis. "Beside itself" cannot show that the draft
gets another model's weights, because they have the same values; a decoy twin (same shapes, other
weights) can. The run of each set-up is replayed on a pristine copy of the draft (`local_errors`).

A service that computes in a coarser type than the draft is not judged: load the draft in that type.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    ROUNDING,
    TENSOR,
    TIMES_FLOOR,
    Node,
    expand_tokens,
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
from specnb.divergence.trace import (
    NEIGHBOR,
    OWN,
    UNKNOWN,
    Alignment,
    Key,
    ModuleTrace,
    Whole,
    find_offset,
)
from specnb.errors import InputError, require_known
from specnb.io import read_toml

BLOCK = 5
"""Tokens per feed in S0w and in the second sound run."""
Logits = list[Tensor]
"""One tensor `(tokens, vocab)` per feed, on the CPU."""
LOGITS = Key("", 0, "out", "out.logits")


class SetUp(NamedTuple):
    """One way to run the draft; the head of `setups.toml` describes the fields."""

    id: str
    says: str
    beside: str
    rules_out: str
    runs: str = "before"
    in_blocks: bool = False


SETUPS = {name: SetUp(name, **row) for name, row in read_toml(Path(__file__).with_suffix(".toml")).items()}
FIRST, ON_DEMAND = ("S0", "S0w", "S1", "S2", "S3"), ("S4", "S5", "S6")
"""Set-ups that always run, and those that follow if the draft is wrong only next to a neighbor."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one set-up: `errors` as from `errors.judge_errors`, and the draft's `run`.

    `logits` has one tensor per feed. `offset`: all positions are offset by one number, which RoPE
    does not see. `coarser`: a coarser type than the draft's that all logits are rounded to, "" if
    none; with one, nothing is judged wrong.
    """

    setup: SetUp
    errors: pd.DataFrame
    run: Alignment
    logits: Logits
    offset: bool
    coarser: str = ""

    @property
    def trace(self) -> ModuleTrace:
        return self.run.trace

    @cached_property
    def wrong(self) -> pd.DataFrame:
        """The rows that are wrong by themselves, earliest first."""
        return locate(self.errors)

    @property
    def clean(self) -> bool:
        return self.wrong.empty

    @property
    def first(self) -> Node:
        """The first divergence. The set-up must be wrong."""
        return Node(*nodes(self.wrong).loc[0, [*Node._fields]])

    @property
    def foreign(self) -> pd.DataFrame:
        """Parameters of other models that operations of the draft's modules read."""
        return self.trace.params[~self.trace.params["owner"].isin((OWN, UNKNOWN))]


class Lab:
    """Runs a draft in set-ups, and compares each run with a pristine copy on the same inputs.

    Raises InputError for a draft in a dtype without known rounding, and for a script with tokens
    that the target does not have.
    """

    def __init__(self, draft: Module, target: Module | None = None, *, script: Script) -> None:
        self.draft, self.target, self.script = draft, target, script
        self.dtype = dtype_name(next(draft.parameters()))
        require_known("type of a draft", self.dtype, ROUNDING)
        if target is not None and (size := target.get_input_embeddings().num_embeddings) <= max(script.text):
            raise InputError(f"got token {max(script.text)}, expected below {size}: give tokens that both models have")
        self.reference = copy_of(draft)
        self.loaded = {name: digest_tensor(value) for name, value in list_parameters(self.reference).items()}
        """Digests of parameters and buffers by path; tied ones appear under each of their paths."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        sound = [_capture_run(self.reference, feeds) for feeds in (self.script, self.blocks)]
        self.sound_logits, self.sound = zip(*sound, strict=True)
        """The pristine copy's runs: fed as in the script, and in blocks."""
        self.floor = noise_floors([local_errors(self.reference, sound_run) for sound_run in self.sound], self.dtype)
        routers = self.floor.index.isin([path for path, _ in find(self.reference)["router"]], level="at")
        self.unsteady = self.floor[(self.floor * TIMES_FLOOR >= 1) & ~routers]
        """Floors of tensors that cannot be judged: sound runs differ so much that zeros would pass.

        Rounding alone does not cause this, except in routers, which may break ties differently.
        Tensors that depend on the number of tokens fed at once do (angles of a long context).
        """

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up.

        `deploy(draft, neighbor)` is the service under suspicion; without it the models run in
        turn. Raises InputError for logits of another vocabulary.
        """
        setup = SETUPS[name]
        neighbor = self._neighbor(setup)
        known = {} if neighbor is None else {NEIGHBOR: neighbor}
        # 1. Run the draft in service.
        service = deploy(self.draft, neighbor) if deploy else nullcontext()
        with service, capture(self.draft, known=known, states=True) as builder:
            logits = self._logits(setup, neighbor, builder.paused)
        trace = builder.trace()
        relabel(trace, neighbor, self.loaded)
        # 2. Replay the run on the pristine copy; one offset of all positions is no error.
        run = self._script(setup).align(trace)
        errors = local_errors(self.reference, run)
        sound = self.sound[0].whole
        pairs = {key: (sound[key].values, whole.values) for key, whole in run.whole.items() if key in sound}
        if offset := find_offset(pairs):
            errors.loc[errors.set_index(TENSOR).index.isin([*offset]), "error"] = 0.0
        # 3. Judge the errors, unless the service computes in a coarser type.
        errors = judge_errors(errors, self.floor, run.last_step)
        coarser = _coarser_type(logits, self.dtype) if errors["wrong"].any() else ""
        if coarser:
            errors["wrong"] = False
        return Outcome(setup, errors, run, logits, bool(offset), coarser)

    def bare(self, name: str, deploy: Deploy | None = None) -> Logits:
        """Return the logits of a set-up without hooks."""
        setup = SETUPS[name]
        neighbor = self._neighbor(setup)
        with deploy(self.draft, neighbor) if deploy else nullcontext():
            return self._logits(setup, neighbor)

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """Return the largest relative L2 error of the set-ups' logits, and that between sound runs.

        The latter is at least the rounding of the draft's type.
        """
        far = (_logits_off(self.sound[outcome.setup.in_blocks], outcome.run) for outcome in outcomes)
        return max(far, default=0.0), max(_logits_off(*self.sound), ROUNDING[self.dtype])

    def _logits(
        self, setup: SetUp, neighbor: Module | None, unseen: Callable[[], AbstractContextManager] = nullcontext
    ) -> Logits:
        """Return the logits of the draft in service; its neighbor reads the text around feeds."""

        def step(_feed: Feed) -> None:
            with torch.no_grad(), unseen():
                neighbor(torch.tensor([self.script.text], device=next(neighbor.parameters()).device), use_cache=False)

        steps = {} if neighbor is None or setup.runs == "never" else {setup.runs: step}
        logits = feed_script(self.draft, self._script(setup), **steps)
        vocab = self.sound_logits[0][0].shape[-1]
        for row in logits:
            if row.ndim != 2 or not len(row) or row.shape[-1] != vocab:
                shapes = f"got logits {tuple(row.shape)} from the service, expected (tokens, {vocab})"
                raise InputError(f"{shapes}: return those of the draft's vocabulary, of the last token at least")
        return logits

    def _script(self, setup: SetUp) -> Script:
        return self.blocks if setup.in_blocks else self.script

    def _neighbor(self, setup: SetUp) -> Module | None:
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
            raise InputError(f"{setup.id} runs the draft next to a target: give one")
        return self.target


def _capture_run(model: Module, script: Script) -> tuple[Logits, Alignment]:
    """Return the logits of each feed, and the inputs and outputs of every module."""
    with capture(model, at_use=False, states=True) as builder:
        logits = feed_script(model, script)
    return logits, script.align(builder.trace())


# --- shadow replay: each module of the pristine copy, recomputed on its recorded inputs -----------
# The copy reads the whole text in one forward pass. Every module in it gets the inputs of the same
# module in the run under suspicion. Its output is compared with the run's, which then replaces it.
# So no error travels: a module that is wrong is wrong by itself. Inputs are compared, too: a
# difference there arose between modules, in the code of the module that contains them or by a write
# into a buffer meanwhile, and is attributed to the containing module. (Shadow modules are an idea
# of torch's numeric suite.)


@torch.no_grad()
def local_errors(reference: Module, run: Alignment) -> pd.DataFrame:
    """Replay a run on the pristine `reference`; return one row per tensor and token.

    `module` computed the tensor; for an input it is the module that contains `at`, where the tensor
    was captured.
    `error` is relative L2, `gain` is <a, b> / <a, a> of the sound tensor a and the run's b. For
    integers, `error` is 1 if any differs; for experts chosen by scores, it is the difference of
    their scores, relative to all scores.
    """
    replay = _Replay(run)
    with watch_modules(reference, replay.enter, replay.leave):
        ids = torch.tensor(run.tokens[None], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    return expand_tokens(replay.errors)


class _Replay:
    """The hooks of the pristine copy.

    `errors` has, for each tensor, its labels and the arrays of positions, errors and gains.
    """

    def __init__(self, run: Alignment) -> None:
        self._run = run
        self._calls, self._order = Counter(), 0
        self._running, self.errors = [], []

    def enter(self, path: str, module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replace the inputs of a module by those in the run."""
        holder = self._running[-1] if self._running else path
        self._running.append(path)
        taken = self._compare("in", named_tensors(name_arguments(module, args, kwargs)), holder)
        return _exchanged(args, taken), _exchanged(kwargs, taken)

    def leave(self, path: str, _module: Module, _args: tuple, output: object) -> object:
        """Replace the outputs of a module by those in the run."""
        taken = self._compare("out", outputs_in(output), path)
        self._running.pop()
        self._calls[path] += 1
        return _exchanged(output, taken)

    def _compare(self, role: str, named: Iterable[tuple[str, Tensor]], maker: str) -> dict[int, Tensor]:
        """Record the errors of the running module's tensors, which the copy computed.

        Return what the run had in their place, by the id of each tensor.
        """
        self._order += 1
        path = self._running[-1]
        pairs = list(named)
        replacements = {}
        for name, replayed in pairs:
            key = Key(path, self._calls[path], role, name)
            whole = self._run.whole.get(key)
            if whole is None or whole.values.ndim != replayed.ndim:
                continue
            labels = self._order, maker, *key
            computed = np.moveaxis(to_numpy(replayed), whole.axis, 0)
            choice = role == "out" and computed.dtype.kind in "iu" and computed.ndim > 1
            if not _comparable(computed, whole.values):
                if choice and _of_other_k(computed, whole):
                    every = np.ones(len(computed))
                    self._note(labels, True, whole.gaps, every, every)
                continue
            recorded = _align(computed, whole)
            # A copy: hooks and modules write into it.
            substitute = torch.from_numpy(np.moveaxis(recorded, 0, whole.axis).copy())
            replacements[id(replayed)] = substitute.to(replayed)
            chosen_by = _scores_beside(replayed, [tensor for _, tensor in pairs]) if choice else None
            if chosen_by is not None:
                scores, ordered = chosen_by
                scores = flat(np.moveaxis(to_numpy(scores), whole.axis, 0))
                error = margins(scores, flat(computed), flat(recorded), ordered=ordered)
            else:
                error = _error_of(computed, recorded)
            discrete = chosen_by is None and computed.dtype.kind in "iub"
            self._note(labels, discrete, whole.gaps, error, gains(computed, recorded))
        return replacements

    def _note(self, labels: tuple, discrete: bool, gaps: np.ndarray, error: np.ndarray, gain: np.ndarray) -> None:
        """Record errors and gains of all positions but the gaps."""
        columns = np.arange(len(error)), error, gain
        self.errors.append((*labels, discrete, *(np.delete(column, gaps) for column in columns)))


def _comparable(computed: np.ndarray, recorded: np.ndarray) -> bool:
    """Tell whether two tensors have the same shape and are both real or both complex."""
    return computed.shape == recorded.shape and np.iscomplexobj(computed) == np.iscomplexobj(recorded)


def _of_other_k(computed: np.ndarray, whole: Whole) -> bool:
    """Tell whether the run chose another number of experts: it is wrong at every token."""
    recorded = whole.values
    integers = recorded.dtype.kind in "iu"
    return integers and computed.shape[:-1] == recorded.shape[:-1] and not len(whole.gaps)


def _align(computed: np.ndarray, whole: Whole) -> np.ndarray:
    """Return the run's tensor; where the run computed nothing, it has the copy's own values."""
    recorded = whole.values.copy()
    recorded[whole.gaps] = computed[whole.gaps]
    return recorded


def _scores_beside(chosen: Tensor, outputs: list[Tensor]) -> tuple[Tensor, bool] | None:
    """Return the scores that experts were chosen by, and whether the order of the chosen counts.

    The scores are an output with more values per token. The order counts if the module also returns
    weights of the chosen experts. None if there are no scores: the integers are no choice.
    """
    floats = [item for item in outputs if item.is_floating_point() and item.shape[:-1] == chosen.shape[:-1]]
    scores = next((item for item in floats if item.shape[-1] > chosen.shape[-1]), None)
    if scores is None:
        return None
    return scores, any(item.shape == chosen.shape for item in floats)


def _error_of(computed: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return the relative L2 error of each token, or 1 where any of its integers differs."""
    if computed.dtype.kind in "iub":
        return (flat(computed) != flat(recorded)).any(1).astype(float)
    return relative_l2(computed, recorded)


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """Return the same structure with some of its tensors replaced."""
    return tree_map_only(Tensor, lambda tensor: taken.get(id(tensor), tensor), value, is_leaf=is_cache)


# --- logits ---------------------------------------------------------------------------------------


def _coarser_type(logits: Logits, dtype: str) -> str:
    """Return the coarser type than `dtype` whose numbers all logits are; "" if none, or for zeros."""
    if not any(row.any() for row in logits):
        return ""
    # The coarsest first: numbers of bfloat16 are numbers of float16, too.
    for name, size in reversed(ROUNDING.items()):
        kind = getattr(torch, name)
        if size > ROUNDING[dtype] and all(torch.equal(row, row.to(kind).to(row.dtype)) for row in logits):
            return name
    return ""


def _logits_off(sound: Alignment, run: Alignment) -> float:
    """Return the largest relative L2 error of the logits of a shared position; inf for NaN."""
    if LOGITS not in sound.whole or LOGITS not in run.whole:
        return 0.0
    a, b = (item.whole[LOGITS] for item in (sound, run))
    both = np.setdiff1d(np.arange(len(a.values)), [*a.gaps, *b.gaps])
    return relative_l2(a.values[both], b.values[both]).max(initial=0.0)


def same_logits(logits: Logits, other: Logits) -> bool:
    """Tell whether the logits of each feed are equal; a service may return the last ones only."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(logits, other, strict=True))
    return all(np.array_equal(a.double(), b.double(), equal_nan=True) for a, b in last)


# --- what was looked at ---------------------------------------------------------------------------


class Coverage(NamedTuple):
    """How much of a run was compared: modules, tensors, tokens, parameters.

    `with_holder`: modules whose outputs could not be compared, inside a module whose outputs were.
    `uncompared`: modules without any comparison. `left_out`: tensors without a token axis or of
    other shapes (masks), as "module:role:name". `seen_at_use`: parameters that an operation was
    seen to read.
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
        """Count the coverage of one set-up."""
        errors, trace = outcome.errors, outcome.trace
        seen = {*errors.groupby(TENSOR).groups}
        # including tensors of another shape than the pristine copy's: attention weights over a
        # window
        left_out = [key for key in outcome.run.rows if key not in seen]
        ran = {*trace.tensors["module"]}
        compared = {*errors.loc[errors["role"] == "out", "at"]}
        # A wrapper that the pristine copy does not have returns what a module inside it returned.
        gave = trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[module] for module in compared))
        compared |= {module for module in ran - compared if module in gave and gave[module] <= known}
        holders = tuple(f"{module}." for module in compared if module)
        with_holder = {module for module in ran - compared if module.startswith(holders)}
        read = {*trace.params.loc[trace.params["owner"] == OWN, "owner_path"]}
        parameters = dict(draft.named_parameters()).keys()
        return cls(
            modules=len(ran),
            tensors=len(seen),
            tokens=len(outcome.run.tokens),
            output="" in compared,
            uncompared=sorted(ran - compared - with_holder),
            with_holder=sorted(with_holder),
            never_called=trace.facts["modules"]["never_called"],
            left_out=[f"{key.module or 'model'}:{key.role}:{key.name}" for key in left_out],
            parameters=len(parameters),
            seen_at_use=len(parameters & read),
        )

    @property
    def complete(self) -> bool:
        """Tell whether the output was compared, and every module or one that contains it."""
        return self.output and not self.uncompared

    def __str__(self) -> str:
        not_seen = f", not {', '.join(self.uncompared[:3])}" if self.uncompared else ""
        compared = self.modules - len(self.uncompared) - len(self.with_holder)
        return (
            f"{compared} of {self.modules} modules{not_seen}; {self.tensors} tensors at "
            f"{self.tokens} tokens, {len(self.left_out)} left out (other shapes); {self.seen_at_use} of "
            f"{self.parameters} parameters seen at use"
        )
