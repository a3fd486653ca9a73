"""The setups: the same draft, fed the same tokens, next to different neighbors.

A contrast between two setups rules out a hypothesis. A draft that uses its neighbor's weights is
right next to a copy of itself, because the values are equal, but wrong next to a decoy twin (same
shapes, other weights). Each run is replayed on a pristine copy of the draft (`local_errors`).
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


SETUPS = {
    name: SetUp(name, **row) for name, row in read_toml(Path(__file__).with_suffix(".toml")).items()
}
FIRST = ("S0", "S0w", "S1", "S2", "S3")
ON_DEMAND = ("S4", "S5", "S6")
"""Setups that always run, and those that follow if the draft is wrong only next to a neighbor."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one setup: `errors` as from `errors.judge_errors`, and the draft's `run`.

    `logits` has one tensor per feed. `offset`: all positions are offset by a constant, to which
    RoPE is invariant. `coarser`: a less precise dtype that all logits have been rounded to, or "";
    with one, nothing is judged wrong.
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
        """The first divergence. The setup must be wrong."""
        return Node(*nodes(self.wrong).loc[0, [*Node._fields]])

    @property
    def foreign(self) -> pd.DataFrame:
        """Parameters of other models that operations of the draft's modules read."""
        return self.trace.params[~self.trace.params["owner"].isin((OWN, UNKNOWN))]


class Lab:
    """Runs a draft in setups, and compares each run with a pristine copy on the same inputs.

    Raises InputError for a draft in a dtype without known rounding, and for a script with tokens
    that the target does not have.
    """

    def __init__(self, draft: Module, target: Module | None = None, *, script: Script) -> None:
        self.draft, self.target, self.script = draft, target, script
        self.dtype = dtype_name(next(draft.parameters()))
        require_known("type of a draft", self.dtype, ROUNDING)
        if target is not None and (size := target.get_input_embeddings().num_embeddings) <= max(
            script.text
        ):
            raise InputError(
                f"got token {max(script.text)}, expected below {size}: "
                "give tokens that both models have"
            )
        self.reference = copy_of(draft)
        self.loaded = {
            name: digest_tensor(value) for name, value in list_parameters(self.reference).items()
        }
        """Digests of parameters and buffers by path; tied ones appear under each of their paths."""
        self.blocks = Script.blocks(script.text, width=BLOCK)
        sound = [_capture_run(self.reference, feeds) for feeds in (self.script, self.blocks)]
        self.sound_logits, self.sound = zip(*sound, strict=True)
        """Runs of the pristine copy: fed as in the script, and in blocks."""
        self.floor = noise_floors(
            [local_errors(self.reference, sound_run) for sound_run in self.sound], self.dtype
        )
        routers = self.floor.index.isin(
            [path for path, _ in find(self.reference)["router"]], level="at"
        )
        self.unsteady = self.floor[(self.floor * TIMES_FLOOR >= 1) & ~routers]
        """Floors of tensors that cannot be judged: sound runs differ so much that zeros would pass.

        Rounding alone does not cause this; a dependence on the number of tokens fed at once does
        (angles of a long context). Routers are excluded: rounding may break their ties differently.
        """

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one setup.

        `deploy(draft, neighbor)` is the suspected service; without it, the models run in turn.
        Raises InputError for a missing target, and for logits of another vocabulary size.
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
        # 2. Replay the run on the pristine copy; a constant offset of positions is no error.
        run = self._script(setup).align(trace)
        errors = local_errors(self.reference, run)
        sound = self.sound[0].whole
        pairs = {
            key: (sound[key].values, whole.values)
            for key, whole in run.whole.items()
            if key in sound
        }
        if offset := find_offset(pairs):
            errors.loc[errors.set_index(TENSOR).index.isin([*offset]), "error"] = 0.0
        # 3. Judge the errors, unless the service computes in lower precision.
        errors = judge_errors(errors, self.floor, run.last_step)
        coarser = _coarser_type(logits, self.dtype) if errors["wrong"].any() else ""
        if coarser:
            errors["wrong"] = False
        return Outcome(setup, errors, run, logits, bool(offset), coarser)

    def bare(self, name: str, deploy: Deploy | None = None) -> Logits:
        """Run one setup without hooks; return its logits."""
        setup = SETUPS[name]
        neighbor = self._neighbor(setup)
        with deploy(self.draft, neighbor) if deploy else nullcontext():
            return self._logits(setup, neighbor)

    def logits_off(self, outcomes: Iterable[Outcome]) -> tuple[float, float]:
        """Return the largest relative L2 error of the setups' logits, and that between sound runs.

        The latter is at least the rounding error of the draft's dtype.
        """
        far = (
            _logits_off(self.sound[outcome.setup.in_blocks], outcome.run) for outcome in outcomes
        )
        return max(far, default=0.0), max(_logits_off(*self.sound), ROUNDING[self.dtype])

    def _logits(
        self,
        setup: SetUp,
        neighbor: Module | None,
        unseen: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Logits:
        """Return the draft's logits; its neighbor reads the text before or after each feed."""

        def step(_feed: Feed) -> None:
            with torch.no_grad(), unseen():
                neighbor(
                    torch.tensor([self.script.text], device=next(neighbor.parameters()).device),
                    use_cache=False,
                )

        steps = {} if neighbor is None or setup.runs == "never" else {setup.runs: step}
        logits = feed_script(self.draft, self._script(setup), **steps)
        vocab = self.sound_logits[0][0].shape[-1]
        for row in logits:
            if row.ndim != 2 or not len(row) or row.shape[-1] != vocab:
                shapes = (
                    f"got logits {tuple(row.shape)} from the service, expected (tokens, {vocab})"
                )
                raise InputError(
                    f"{shapes}: return them over the draft's vocabulary, "
                    "at least for the last token"
                )
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
# The copy processes the whole text in one forward pass. Each of its modules gets the inputs of the
# same module in the suspected run. Its output is compared with the run's, which then replaces it.
# So errors do not propagate: a module that is wrong is wrong by itself. Inputs are compared, too: a
# difference there arose between modules, in the code of the containing module or by a write into a
# buffer, and is attributed to the containing module. (The idea of shadow modules is from PyTorch's
# numeric suite.)


@torch.no_grad()
def local_errors(reference: Module, run: Alignment) -> pd.DataFrame:
    """Replay a run on the pristine `reference`; return one row per tensor and token.

    `module` computed the tensor, which was captured at `at`; for an input, `module` contains `at`.
    `error` is relative L2, and `gain` is <a, b> / <a, a> for the sound tensor a and the run's b.
    For integers, `error` is 1 if any differs; for experts chosen by scores, it is the difference of
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
        self._calls = Counter()
        self._order = 0
        self._running, self.errors = [], []

    def enter(self, path: str, module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replace the inputs of a module with those of the run."""
        holder = self._running[-1] if self._running else path
        self._running.append(path)
        taken = self._compare("in", named_tensors(name_arguments(module, args, kwargs)), holder)
        return _exchanged(args, taken), _exchanged(kwargs, taken)

    def leave(self, path: str, _module: Module, _args: tuple, output: object) -> object:
        """Replace the outputs of a module with those of the run."""
        taken = self._compare("out", outputs_in(output), path)
        self._running.pop()
        self._calls[path] += 1
        return _exchanged(output, taken)

    def _compare(
        self, role: str, named: Iterable[tuple[str, Tensor]], maker: str
    ) -> dict[int, Tensor]:
        """Compare tensors of the running module with those of the run, and record the errors.

        Return the run's tensors, by the id of the tensor that each one replaces.
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
            # Copy it, because hooks and modules write into it.
            substitute = torch.from_numpy(np.moveaxis(recorded, 0, whole.axis).copy())
            replacements[id(replayed)] = substitute.to(replayed)
            chosen_by = (
                _scores_beside(replayed, [tensor for _, tensor in pairs]) if choice else None
            )
            if chosen_by is not None:
                scores, ordered = chosen_by
                scores = flat(np.moveaxis(to_numpy(scores), whole.axis, 0))
                error = margins(scores, flat(computed), flat(recorded), ordered=ordered)
            else:
                error = _error_of(computed, recorded)
            discrete = chosen_by is None and computed.dtype.kind in "iub"
            self._note(labels, discrete, whole.gaps, error, gains(computed, recorded))
        return replacements

    def _note(
        self, labels: tuple, discrete: bool, gaps: np.ndarray, error: np.ndarray, gain: np.ndarray
    ) -> None:
        """Record errors and gains at all positions except the gaps."""
        columns = np.arange(len(error)), error, gain
        self.errors.append((*labels, discrete, *(np.delete(column, gaps) for column in columns)))


def _comparable(computed: np.ndarray, recorded: np.ndarray) -> bool:
    """Return whether two tensors have the same shape and are both real or both complex."""
    return computed.shape == recorded.shape and np.iscomplexobj(computed) == np.iscomplexobj(
        recorded
    )


def _of_other_k(computed: np.ndarray, whole: Whole) -> bool:
    """Return whether the run chose another number of experts, which is wrong at every token."""
    recorded = whole.values
    integers = recorded.dtype.kind in "iu"
    return integers and computed.shape[:-1] == recorded.shape[:-1] and not len(whole.gaps)


def _align(computed: np.ndarray, whole: Whole) -> np.ndarray:
    """Return the run's tensor, with the copy's values where the run computed nothing."""
    recorded = whole.values.copy()
    recorded[whole.gaps] = computed[whole.gaps]
    return recorded


def _scores_beside(chosen: Tensor, outputs: list[Tensor]) -> tuple[Tensor, bool] | None:
    """Return the scores by which experts were chosen, and whether the order of the chosen matters.

    The scores are an output with more values per token. The order matters if the module also
    returns weights of the chosen experts. None if there are no scores.
    """
    floats = [
        item
        for item in outputs
        if item.is_floating_point() and item.shape[:-1] == chosen.shape[:-1]
    ]
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
    return tree_map_only(
        Tensor, lambda tensor: taken.get(id(tensor), tensor), value, is_leaf=is_cache
    )


# --- logits ---------------------------------------------------------------------------------------


def _coarser_type(logits: Logits, dtype: str) -> str:
    """Return the least precise dtype below `dtype` that represents all logits; "" for zeros."""
    if not any(row.any() for row in logits):
        return ""
    # Least precise first: most bfloat16 values are float16 values, too.
    for name, size in reversed(ROUNDING.items()):
        kind = getattr(torch, name)
        if size > ROUNDING[dtype] and all(
            torch.equal(row, row.to(kind).to(row.dtype)) for row in logits
        ):
            return name
    return ""


def _logits_off(sound: Alignment, run: Alignment) -> float:
    """Return the largest relative L2 error of logits at shared positions; inf for NaN."""
    if LOGITS not in sound.whole or LOGITS not in run.whole:
        return 0.0
    a, b = (item.whole[LOGITS] for item in (sound, run))
    both = np.setdiff1d(np.arange(len(a.values)), [*a.gaps, *b.gaps])
    return relative_l2(a.values[both], b.values[both]).max(initial=0.0)


def same_logits(logits: Logits, other: Logits) -> bool:
    """Return whether the logits of each feed are equal; a service may return only the last rows."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(logits, other, strict=True))
    return all(np.array_equal(a.double(), b.double(), equal_nan=True) for a, b in last)


# --- coverage -------------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """How much of a run was compared: modules, tensors, tokens, parameters.

    `with_holder`: modules whose outputs could not be compared, inside a module whose outputs were.
    `uncompared`: other modules without compared outputs. `left_out`: tensors without a token axis
    or of other shapes (masks), as "module:role:name". `seen_at_use`: parameters that an operation
    was seen to read. `output`: the model's output was compared.
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
        """Count the coverage of one setup."""
        errors, trace = outcome.errors, outcome.trace
        seen = {*errors.groupby(TENSOR).groups}
        # also tensors with another shape than in the copy, such as attention over a window
        left_out = [key for key in outcome.run.rows if key not in seen]
        ran = {*trace.tensors["module"]}
        compared = {*errors.loc[errors["role"] == "out", "at"]}
        # A wrapper that the copy lacks counts if a compared module returned its output.
        gave = trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[module] for module in compared))
        compared |= {
            module for module in ran - compared if module in gave and gave[module] <= known
        }
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
        """Return whether the output was compared, and every module or one that contains it."""
        return self.output and not self.uncompared

    def __str__(self) -> str:
        not_seen = f", not {', '.join(self.uncompared[:3])}" if self.uncompared else ""
        compared = self.modules - len(self.uncompared) - len(self.with_holder)
        return (
            f"{compared} of {self.modules} modules{not_seen}; {self.tensors} tensors at "
            f"{self.tokens} tokens, {len(self.left_out)} left out (other shapes); "
            f"{self.seen_at_use} of {self.parameters} parameters seen at use"
        )
