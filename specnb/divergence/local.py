"""Shadow replay: is what a module gave what its weights make of what it was given?

A pristine copy of the draft reads the whole text in one forward. Every module in it is handed what the same module was
really given in the run under suspicion, and its own output is compared with what was really given back, which then
goes on in its place. So no error travels: a module that is wrong is wrong by itself, however much came in wrong. What a
module is given is compared, too: a difference there was made between modules, by the code of the one that holds them
(attention between its projections) or by somebody who wrote into a buffer meanwhile, and is put down to the holder.
(The idea of shadow modules is that of torch's numeric suite; here the inputs come from another run, in other shapes.)

`Along` is a trace put in the order of its text: steps of one token, blocks and a prefill come out alike, so set-ups of
other shapes can be compared. What remains between sound runs is rounding, sums of other shapes in another order:
`floors` measures it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specnb.divergence.ladder import ROUNDING, TIMES_FLOOR
from specnb.divergence.script import Script
from specnb.divergence.tensors import Arguments, named_tensors, outputs_in
from specnb.divergence.trace import Key, Trace, canonical
from specnb.errors import InputError


@dataclass(frozen=True)
class Along:
    """`values[key]`: `(tokens, …)`, the token axis first, and `axes[key]` where it was.

    `left_out` are keys without a token axis, of modules that some step did not run, or of shapes that differ between
    steps (masks): they are not compared. `gaps[key]`: positions of which nothing was made, with zeros in `values`; no
    entry where there are none.
    """

    text: tuple[int, ...]
    values: dict[Key, np.ndarray]
    axes: dict[Key, int]
    left_out: tuple[Key, ...]
    gaps: Mapping[Key, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, script: Script) -> "Along":
        """From a trace, with full tensors, of a run of `script`: its step i is feed i, whatever position it thought."""
        seen = [step["length"] for step in trace.facts["steps"]]
        if seen != [len(feed.ids) for feed in script.feeds]:  # a service may feed otherwise than it is told
            raise InputError(f"the trace has {len(seen)} steps of {sum(seen)} tokens, the script other ones")
        values, axes, left_out, gaps = {}, {}, [], {}
        for key, rows in _tensors(trace).items():
            merged = _merged(trace, rows, script)
            if merged is None:
                left_out.append(key)
                continue
            values[key], axes[key], missing = merged
            if len(missing):
                gaps[key] = missing
        return cls(script.text, values, axes, tuple(left_out), gaps)


class _Row(NamedTuple):
    """Where a tensor stands in the trace: its row, the step, its token axis."""

    row: int
    step: int
    axis: int


def _tensors(trace: Trace) -> dict[Key, list[_Row]]:
    """The rows of each tensor, in the order they were written; as lists, for a frame costs more than a few rows."""
    tensors: dict[Key, list[_Row]] = {}
    columns = ("module", "call", "role", "name", "row", "step", "token_axis")
    for module, call, role, name, *where in zip(*(trace.tensors[column].tolist() for column in columns), strict=True):
        if role != "state":
            tensors.setdefault(Key(module, call, role, name), []).append(_Row(*where))
    return tensors


def _merged(trace: Trace, rows: list[_Row], script: Script) -> tuple[np.ndarray, int, np.ndarray] | None:
    """The rows of each step at the positions fed last in it, their axis, and the positions without; None where they do
    not fit.

    Fewer tokens than a step was fed are its last ones.
    """
    last, parts, at = script.last_feeds, [], []
    if not {row.step for row in rows}.issuperset(last.tolist()):
        return None
    arrays = [trace.array(row.row, "full") for row in rows]
    if any(full is None for full in arrays):
        return None
    rows = _settled(rows, [full.shape for full in arrays])
    for row, full in zip(rows, arrays, strict=True):
        if row.axis < 0:
            return None
        whole = np.moveaxis(full, row.axis, 0)
        earlier = max(len(script.feeds[row.step].ids) - len(whole), 0)
        positions = script.starts[row.step] + earlier + np.arange(len(whole))
        kept = positions < len(last)
        kept[kept] = last[positions[kept]] == row.step
        parts.append(whole[kept])
        at.append(positions[kept])
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    values, places = np.concatenate(parts), np.concatenate(at)
    merged = np.zeros((len(last), *values.shape[1:]), values.dtype)
    merged[places] = values
    missing = np.setdiff1d(np.arange(len(last)), places)
    once = len(places) + len(missing) == len(last)
    return (merged, rows[0].axis, missing) if once and len(places) else None


def _settled(rows: list[_Row], shapes: list[tuple[int, ...]]) -> list[_Row]:
    """In a step of as many tokens as heads one may have been taken for the other: the other steps tell."""
    if {len(shape) for shape in shapes} != {4} or len({row.axis for row in rows}) == 1:
        return rows
    axes = {row.axis for row, shape in zip(rows, shapes, strict=True) if shape[1] != shape[2]}
    axis = axes.pop() if len(axes) == 1 else -1
    return [row._replace(axis=axis) for row in rows]


COLUMNS = ("order", "module", "call", "role", "name", "at", "position", "error", "gain", "discrete")
WHICH = ("at", "call", "role", "name")
"""What tells one tensor from another."""


@torch.no_grad()
def local_errors(reference: nn.Module, along: Along) -> pd.DataFrame:
    """One row for each tensor that a module was given or gave, and position: `order`, relative L2 `error`, `gain`.

    `module` is who made it: of an output (`role` "out") the module itself, of an input the one that holds it; `at` is
    the module where it was seen. `gain` is <ours, theirs> / <ours, ours>, of the reference's and the run's; of integers
    `error` is 1 where any differs; of a choice by scores (experts) the difference of the scores, relative to all.
    """
    replay = _Replay(along)
    names = canonical(path for path, _ in reference.named_modules())
    hooks = []
    try:
        for path, module in reference.named_modules():
            hooks += replay.put_on(module, names[path])
        ids = torch.tensor([along.text], device=next(reference.parameters()).device)
        reference(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return _table(replay.errors)


def floors(sound: Sequence[pd.DataFrame], dtype: str) -> pd.Series:
    """The largest error of each tensor in sound runs, by WHICH, and at least what rounding to `dtype` may do."""
    together = pd.concat(sound, ignore_index=True)
    return together.groupby(list(WHICH))["error"].max().clip(lower=ROUNDING[dtype]).rename("floor")


def unsteady(sound: Sequence[pd.DataFrame], routers: Iterable[str]) -> pd.Series:
    """The floors of tensors of which nothing can be said: sound runs differ so much that zeros in place of one would
    pass. What rounds never does; what depends on how many tokens are fed at once (angles of a long context) may.

    `routers` choose, and where two experts are as good they choose otherwise: no wonder, and their experts are judged
    by what was chosen.
    """
    together = pd.concat(sound, ignore_index=True)
    judged = together[~together["discrete"].astype(bool) & ~together["at"].isin([*routers])]
    errors = judged.groupby(list(WHICH))["error"].max()
    return errors[errors * TIMES_FLOOR >= 1]


def over_floor(errors: pd.DataFrame, floor: pd.Series) -> pd.DataFrame:
    """Errors with the `floor` of their tensor, the least of all where sound runs had none, and `ratio` to it."""
    joined = errors.join(floor, on=list(WHICH))
    joined["floor"] = joined["floor"].fillna(floor.min())
    return joined.assign(ratio=joined["error"] / joined["floor"])


def beyond(errors: pd.DataFrame, floor: pd.Series, script: Script, times: float = TIMES_FLOOR) -> pd.DataFrame:
    """The rows whose error is more than `times` the floor of their tensor, the first in time first.

    With `floor`, `ratio`, and `feed`, the feed of the script in which the position was computed.
    """
    joined = over_floor(errors, floor)
    joined["feed"] = script.last_feeds[joined["position"]]
    # an infinite floor is that of a sound run with NaN, and says nothing
    rows = joined[(joined["ratio"] > times) | (~np.isfinite(joined["error"]) & np.isfinite(joined["floor"]))]
    return rows.sort_values(["feed", "order", "position"], kind="stable").reset_index(drop=True)


class _Replay:
    """The hooks of the pristine copy."""

    def __init__(self, along: Along) -> None:
        self._along = along
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._order = 0
        self.errors: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        """Of each tensor what it is, and its columns by position."""

    def put_on(self, module: nn.Module, path: str) -> Iterator[Any]:
        arguments = Arguments(module)

        def before(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            holder = self._running[-1] if self._running else path
            self._running.append(path)
            taken = self._compare("in", named_tensors(arguments(args, kwargs)), holder)
            return _exchanged(args, taken), _exchanged(kwargs, taken)

        def after(_module: nn.Module, args: tuple, output: object) -> object:
            taken = self._compare("out", outputs_in(output), path)
            self._running.pop()
            self._calls[path] += 1
            return _exchanged(output, taken)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _compare(self, role: str, named: Iterable[tuple[str, Tensor]], maker: str) -> dict[int, Tensor]:
        """Note how far the run's tensors of the running module are from these; what goes on in their place, by id.

        Only where the run has a tensor of this name and shape, at the positions of which it made something.
        """
        self._order += 1
        at, taken, pairs = self._running[-1], {}, list(named)
        for name, replayed in pairs:
            key = Key(at, self._calls[at], role, name)
            recorded = self._theirs(key, replayed)
            labels = {"order": self._order, "module": maker, "call": key.call, "role": role, "name": name, "at": at}
            if recorded is None:
                if (n := self._of_another_number(key, replayed)) is not None:
                    self.errors.append((labels, _all_wrong(n)))
                continue
            taken[id(replayed)] = recorded.to(replayed.device, replayed.dtype)
            apart = _apart(replayed, recorded, self._along.axes[key])
            margins = _margins(replayed, recorded, [item for _, item in pairs])
            if margins is not None and len(margins) == len(apart["error"]):
                apart |= {"error": margins, "discrete": np.zeros(len(margins), bool)}
            if key in self._along.gaps:
                apart = {name: np.delete(column, self._along.gaps[key]) for name, column in apart.items()}
            self.errors.append((labels, apart))
        return taken

    def _theirs(self, key: Key, replayed: Tensor) -> Tensor | None:
        """The run's in place of `replayed`; of types that numpy lacks, its values as float32; None for another shape.

        Where the run made nothing, `replayed` is right.
        """
        values = self._along.values.get(key)
        if values is None:
            return None
        axis = self._along.axes[key]
        recorded = torch.from_numpy(np.moveaxis(values, 0, axis).copy())  # hooks and modules write into it
        if recorded.shape != replayed.shape or recorded.is_complex() != replayed.is_complex():
            return None
        if key in self._along.gaps:
            where = torch.from_numpy(self._along.gaps[key])
            recorded.index_copy_(axis, where, replayed.cpu().index_select(axis, where).to(recorded.dtype))
        return recorded

    def _of_another_number(self, key: Key, replayed: Tensor) -> int | None:
        """Of how many tokens a module chose more or fewer columns than it should (`top_k` experts); None else."""
        values = self._along.values.get(key)
        if (
            values is None
            or key.role != "out"
            or not _discrete(replayed)
            or replayed.dtype is torch.bool
            or replayed.ndim != 2
        ):
            return None
        same_tokens = self._along.axes[key] == 0 and len(values) == len(replayed) and key not in self._along.gaps
        return len(replayed) if same_tokens and values.ndim == 2 and values.dtype.kind in "iu" else None


def _all_wrong(n: int) -> dict[str, np.ndarray]:
    """Columns of a choice that is wrong at each of n tokens."""
    return {"position": np.arange(n), "error": np.ones(n), "gain": np.ones(n), "discrete": np.full(n, True)}


def _table(errors: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]]) -> pd.DataFrame:
    """All tensors in one table, made at once: a frame for each of them costs more than its comparison."""
    lengths = [len(apart["error"]) for _, apart in errors]
    if not sum(lengths):
        return pd.DataFrame(columns=list(COLUMNS))
    columns = {name: np.repeat([labels[name] for labels, _ in errors], lengths) for name in errors[0][0]}
    columns |= {name: np.concatenate([apart[name] for _, apart in errors]) for name in errors[0][1]}
    return pd.DataFrame({name: columns[name] for name in COLUMNS})


def _apart(replayed: Tensor, recorded: Tensor, axis: int) -> dict[str, np.ndarray]:
    """Columns with a value for each token: position, error, gain, discrete."""
    a, b = (x.cpu().movedim(axis, 0) for x in (replayed, recorded))
    a, b = ((torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double() for x in (a, b))
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    # masks hold infinities, and the difference of two is no number
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
    dot, norm, discrete = (a * b).sum(1), (a * a).sum(1).clamp(min=1e-60), _discrete(replayed)
    error = (a != b).any(1).double() if discrete else _or_inf((a - b).norm(dim=1) / norm.sqrt())
    return {
        "position": np.arange(len(a)), "error": error.numpy(), "gain": (dot / norm).numpy(),
        "discrete": np.full(len(a), discrete),
    }  # fmt: skip


def _discrete(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex())


def _or_inf(error: Tensor) -> Tensor:
    """A difference that is no number, of an infinity or NaN on one side only, is as large as can be."""
    return torch.where(error.isnan(), torch.inf, error)


def _margins(replayed: Tensor, recorded: Tensor, beside: Sequence[Tensor]) -> np.ndarray | None:
    """By how much the scores of what was chosen differ, relative to all scores `(tokens,)`: a near-tie is rounding.

    None where `replayed` is no choice `(…, k)` among columns of a tensor beside it.
    """
    if not _discrete(replayed) or replayed.dtype is torch.bool or not replayed.numel() or replayed.ndim < 2:
        return None
    if min(int(replayed.min()), int(recorded.min())) < 0:  # how an expert that is not there is written
        return None
    top = max(int(replayed.max()), int(recorded.max()), replayed.shape[-1])
    floats = [item for item in beside if item.is_floating_point() and item.shape[:-1] == replayed.shape[:-1]]
    scores = next((item for item in floats if item.shape[-1] > top), None)
    if scores is None:
        return None
    a, b = (torch.gather(scores.double(), -1, item.long().to(scores.device)) for item in (replayed, recorded))
    if not any(item.shape == replayed.shape for item in floats):  # with weights beside them, the order counts
        a, b = a.sort(-1).values, b.sort(-1).values
    apart = _or_inf((a - b).norm(dim=-1) / scores.double().norm(dim=-1).clamp(min=1e-30))
    return torch.where((replayed.cpu() == recorded).all(-1).to(apart.device), 0.0, apart).cpu().numpy().ravel()


def _exchanged(value: Any, taken: Mapping[int, Tensor]) -> Any:
    """The same structure with some of its tensors replaced."""
    if isinstance(value, Tensor):
        return taken.get(id(value), value)
    if not taken or isinstance(value, str | bytes):
        return value
    if isinstance(value, dict):
        changed = {key: _exchanged(inner, taken) for key, inner in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        changed = [_exchanged(inner, taken) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value) if item.init)
        return dataclasses.replace(value, **{name: _exchanged(inner, taken) for name, inner in held})
    return value


TURNED_ALIKE = 3e-2
"""How far turns may be apart: bfloat16 rounds each of four cosines and sines by up to 2**-9."""


def explained(errors: pd.DataFrame, along: Along, sound: Along, rotaries: Sequence[str]) -> pd.Series:
    """Which rows of `local_errors` one offset of all positions explains; none where there is no such offset.

    `rotaries` are the rotary modules: cosines first, sines second in what they give, or both as complex numbers. A
    model without any has learned positions, where an offset is an error.
    """
    if not rotaries or not all(one_offset(along, sound, path) for path in rotaries):
        return pd.Series(False, index=errors.index)
    return errors["module"].isin(rotaries) | (errors["discrete"] & errors["name"].str.contains("position"))


def one_offset(along: Along, sound: Along, module: str) -> bool:
    """Whether the rows of a rotary module are turned, and by the same angles at every position."""
    turned = [_phases(item, module) for item in (along, sound)]
    if any(item is None for item in turned):
        return False
    recorded, replayed = turned
    if recorded.shape != replayed.shape:  # angles of more or fewer features
        return False
    turn = recorded * replayed.conj() / np.abs(replayed) ** 2
    # of length 1, too: longer cosines and sines would scale every product of a query and a key
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return bool(off < TURNED_ALIKE < np.abs(turn[:1] - 1).max())


def _phases(along: Along, module: str) -> np.ndarray | None:
    whole = along.values.get(Key(module, 0, "out", "out"))
    if whole is not None and np.iscomplexobj(whole):
        return whole
    cos, sin = (along.values.get(Key(module, 0, "out", name)) for name in ("out", "out.1"))
    return None if cos is None or sin is None or cos.shape != sin.shape else cos.astype(float) + 1j * sin
