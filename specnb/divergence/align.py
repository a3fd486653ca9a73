"""Two traces side by side: the same module, call, tensor and logical position. No torch here.

Steps may be cut otherwise (a prefill against steps of one token), sequences may stand in other rows of the batch, and
cache slots may lie elsewhere: none of that is compared. A step that starts at position p forgets all that was fed at p
and behind, so what counts is what was fed last.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specnb.divergence.sketch import TOKEN_K
from specnb.divergence.trace import Key, Trace, renamed
from specnb.errors import InputError

UNKNOWN = -1
"""The id of a token that was not written down."""
FLOATS = ("float", "bfloat", "complex")


class Row(NamedTuple):
    """Where the values of one key in one step are: the key of its arrays, and what the table says of it."""

    row: int
    step: int
    order: int
    shape: tuple[int, ...]
    dtype: str
    digest: str
    odd: int
    axis: int
    first: int


@dataclass(frozen=True)
class Values:
    """One tensor along the text: `sketch` (sequences, positions, 16), `size` its L2 norms, `row` which row it is from.

    `row` is -1 where nothing was kept; `full` (sequences, positions, features) only where all rows have it.
    """

    sketch: np.ndarray
    size: np.ndarray
    row: np.ndarray
    features: int
    dtype: str
    full: np.ndarray | None

    @property
    def discrete(self) -> bool:
        return not self.dtype.startswith(FLOATS)


class Laid:
    """A trace in the order of its text. Raises InputError for facts that no capture writes, and for names that clash.

    `firsts`: where the steps start, by their number, in place of what the run itself thought.

    `positions` (n,) are those held at the end, `last_step` (n,) in which step each was fed, `tokens` (sequences, n);
    `dtype` is the model's, "None" where it was not written down.
    """

    def __init__(
        self, trace: Trace, rename: Mapping[str, str] | None = None, firsts: Mapping[int, int] | None = None
    ) -> None:
        self.trace, self.rename = trace, dict(rename or {})
        self.dtype = str(trace.facts.get("dtype"))
        self.names = renamed(trace.tensors["module"].unique(), rename)
        self.steps, self.batch = _steps(trace.facts)
        self._late = {number: at - self.steps[number]["first_position"] for number, at in (firsts or {}).items()}
        for number, late in self._late.items():
            self.steps[number] = self.steps[number] | {"first_position": self.steps[number]["first_position"] + late}
        held = _held(self.steps, self.batch)
        self.positions = np.array(sorted(held), np.int64)
        self.last_step = np.array([held[at][0] for at in self.positions.tolist()], np.int64)
        self.tokens = np.array([held[at][1] for at in self.positions.tolist()], np.int64).reshape(-1, self.batch).T
        self._placed: tuple[np.ndarray, dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]]] = (np.empty(0), {})

    @cached_property
    def rows(self) -> dict[Key, list[Row]]:
        """The rows of each key, in the order of the run."""
        by_key: dict[Key, list[Row]] = defaultdict(list)
        for tensor in self.trace.tensors.sort_values(["step", "order"], kind="stable").itertuples():
            key = Key(self.names[tensor.module], tensor.call, tensor.role, tensor.name)
            odd, first = tensor.n_nan + tensor.n_inf, tensor.first_position + self._late.get(tensor.step, 0)
            row = Row(
                tensor.row,
                tensor.step,
                tensor.order,
                tensor.shape,
                tensor.dtype,
                tensor.digest,
                odd,
                tensor.token_axis,
                first,
            )
            by_key[key].append(row)
        return dict(by_key)

    @cached_property
    def row_of(self) -> dict[int, Row]:
        return {row.row: row for rows in self.rows.values() for row in rows}

    def values(self, key: Key, positions: np.ndarray) -> Values | None:
        """The tensor at these (held, sorted) positions; None where it has no tokens, or changes its shape (masks)."""
        sketch = np.zeros((self.batch, len(positions), TOKEN_K), np.float32)
        size, source = np.zeros(sketch.shape[:2], np.float32), np.full(len(positions), -1, np.int64)
        parts: list[tuple[np.ndarray, np.ndarray | None]] = []
        kinds = set()
        if _mistaken(self.rows[key]):
            return None
        for row in self.rows[key]:
            cut = self._cut(row, key.role)
            if cut is None:
                return None
            tokens, norms, features = cut
            kinds.add((features, row.dtype))
            at, to = self._places(row, norms.shape[1], positions)
            sketch[:, to], size[:, to], source[to] = tokens[:, at], norms[:, at], row.row
            if len(to):
                full = self._full(row, norms.shape)
                parts.append((to, None if full is None else full[:, at]))
        if len(kinds) != 1:
            return None
        [(features, dtype)] = kinds
        whole = None
        if parts and all(part is not None for _, part in parts):
            whole = np.zeros((*size.shape, features), parts[0][1].dtype)
            for to, part in parts:
                whole[:, to] = part
        return Values(sketch, size, source, features, dtype, whole)

    def _places(self, row: Row, length: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of a row were fed last in its step, and where in `positions` they belong.

        Remembered while the positions are the same array: all modules of a step ask the same.
        """
        if self._placed[0] is not positions:
            self._placed = (positions, {})
        known, asked = self._placed[1], (row.first, row.step, length)
        if asked not in known:
            known[asked] = self._located(row, length, positions)
        return known[asked]

    def _located(self, row: Row, length: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = row.first + np.arange(length)
        fed = _index(self.positions, at)
        kept = fed >= 0
        kept[kept] = self.last_step[fed[kept]] == row.step
        to = _index(positions, at)
        kept &= to >= 0
        return np.flatnonzero(kept), to[kept]

    def states(self, module: str, name: str, positions: np.ndarray) -> np.ndarray | None:
        """Sketches (positions, 16) of the first sequence's rows of a cache, as seen last; NaN where never; None where
        no cache was seen."""
        values = np.full((len(positions), TOKEN_K), np.nan)
        rows = [row for key, rows in self.rows.items() if key[:1] + key[2:] == (module, "state", name) for row in rows]
        for row in rows:
            cut = self._cut(row, "state")
            if cut is None:
                return None
            to = _index(positions, row.first + np.arange(cut[1].shape[1]))
            values[to[to >= 0]] = cut[0][0, to >= 0]
        return values if rows else None

    def _cut(self, row: Row, role: str) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Sketches and norms of a row, by sequence and token, and how many values a token has.

        None where there are no tokens, and where the table, the step and the arrays do not belong together.
        """
        tokens, norms = (self.trace.array(row.row, part) for part in ("tokens", "token_l2"))
        step = self.steps.get(row.step)
        if tokens is None or norms is None or step is None or not 0 <= row.axis < len(row.shape):
            return None
        n, along, total = len(norms), row.shape[row.axis], math.prod(row.shape)
        # the last layer may go on with a step's last tokens only
        last = along <= step["length"]
        length = along if role == "state" or last else step["length"]
        if not n or n not in (length, length * self.batch) or along not in (length, n) or tokens.shape != (n, TOKEN_K):
            return None
        if not total or total % n:
            return None
        cut = (n // length, length)
        tokens, norms = tokens.reshape(*cut, TOKEN_K), norms.reshape(cut)
        spread = (self.batch, length)
        if cut != spread:  # one row of positions may serve the whole batch
            tokens, norms = np.broadcast_to(tokens, (*spread, TOKEN_K)), np.broadcast_to(norms, spread)
        return tokens, norms, total // n

    def _full(self, row: Row, cut: tuple[int, int]) -> np.ndarray | None:
        full = self.trace.array(row.row, "full")
        if full is None or full.dtype.kind == "c" or full.shape != row.shape:
            return None
        n = len(self.trace.array(row.row, "token_l2"))
        whole = np.moveaxis(full, row.axis, min(row.axis, 1)).reshape(-1, cut[1], full.size // n)
        return np.broadcast_to(whole, (*cut, whole.shape[-1]))


def _steps(facts: Mapping[str, Any]) -> tuple[dict[int, dict[str, Any]], int]:
    """The steps by their numbers, and how many sequences each has."""
    steps = facts["steps"]
    batches = {step["batch"] for step in steps if step["length"]}
    if len(batches) > 1:
        raise InputError(f"the batch of the trace changes its size ({sorted(batches)}): capture one request alone")
    return {step["step"]: step for step in steps}, batches.pop() if batches else 1


def _held(steps: Mapping[int, Mapping[str, Any]], batch: int) -> dict[int, tuple[int, list[int]]]:
    """Of each position in the state at the end: the step in which it was fed last, and the tokens of all sequences."""
    held: dict[int, tuple[int, list[int]]] = {}  # in the order of positions: only the last ones are taken back
    for number, step in sorted(steps.items()):
        first, length, ids = step["first_position"], step["length"], step["token_ids"]
        fed = length - step.get("padding", 0)  # what only fills up a step is taken back at once
        if not fed:
            continue
        while held and next(reversed(held)) >= first:
            held.popitem()
        whole = len(ids) == batch * length  # of a long step only the first ids are kept
        for i in range(fed):
            known = whole or (batch == 1 and i < len(ids))
            held[first + i] = (number, [ids[row * length + i] if known else UNKNOWN for row in range(batch)])
    return held


def _mistaken(rows: Sequence[Row]) -> bool:
    """Whether of as many tokens as heads one was taken for the other: other steps have another axis."""
    several = [row for row in rows if len(row.shape) == 4 and row.shape[1:3] != (1, 1)]
    return len({row.axis for row in several}) > 1


def _index(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each wanted value is in a sorted array; -1 where it is not."""
    if not len(known):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, at, -1)


NEAR = 8
"""By how many positions texts are shifted to see whether they are the same one."""


class Fork(NamedTuple):
    """The first position at which two runs were fed other tokens, the `last`, and how many are `differing`.

    `shift`: the candidate's text is the reference's from there on, that many positions later (None: it is not).
    `repeated`: the candidate was fed one and the same token from there on.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    shift: int | None
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that, by the reference's count, starts at another position than it was run with."""

    step: int
    position: int
    counted: int


@dataclass(frozen=True)
class Together:
    """Where two traces can be compared: `positions`, and pairs of sequences that were fed the same there.

    `strangers`: how many sequences that should have found their like, for the smaller batch has them, did not.
    """

    positions: np.ndarray
    reference: list[int]
    candidate: list[int]
    fork: Fork | None
    strangers: int = 0


def together(reference: Laid, candidate: Laid) -> Together:
    """Pair sequences by their tokens, and take the positions that both traces hold.

    Where no sequence has the same tokens all along, the two that agree longest are compared up to where they part.
    """
    shared = np.intersect1d(reference.positions, candidate.positions)
    of_reference, of_candidate = (
        aligned.tokens[:, np.isin(aligned.positions, shared)] for aligned in (reference, candidate)
    )
    pairs, free = [], list(range(len(of_candidate)))
    for i, text in enumerate(of_reference):
        alike = np.flatnonzero(~_differs(text, of_candidate[free]).any(1))
        if len(alike):
            pairs.append((i, free.pop(alike[0])))
    if pairs or not len(shared):
        strangers = min(len(of_reference), len(of_candidate)) - len(pairs)
        return Together(shared, [i for i, _ in pairs], [j for _, j in pairs], None, strangers)
    where = {
        (i, int(j)): int(at)
        for i, a in enumerate(of_reference)
        for j, at in enumerate(_differs(a, of_candidate).argmax(1))
    }
    i, j = max(where, key=lambda pair: (where[pair], pair[0] == pair[1]))
    differs = np.flatnonzero(_differs(of_reference[i], of_candidate[j]))
    at, rest = int(differs[0]), of_candidate[j, int(differs[0]) :]
    fork = Fork(
        position=int(shared[at]),
        reference=int(of_reference[i, at]),
        candidate=int(of_candidate[j, at]),
        differing=len(differs),
        last=int(shared[differs[-1]]),
        shift=_shift(of_reference[i], of_candidate[j], at),
        repeated=len(rest) > 2 and len(set(rest.tolist())) == 1,
    )
    return Together(shared[:at], [i], [j], fork)


def counted_alike(reference: Laid, candidate: Laid) -> tuple[Laid, Drift | None]:
    """The candidate with the reference's count of positions, where both were fed the same steps; else as it is.

    A run that forgot too much or too little of its state goes on at other positions than it was meant to: these are
    what is wrong, not where its tokens belong.
    """
    of_reference, of_candidate = (
        [text.steps[number] for number in sorted(text.steps)] for text in (reference, candidate)
    )
    known = all(len(step["token_ids"]) == step["batch"] * step["length"] for step in of_reference)
    if not known or [_fed(step) for step in of_reference] != [_fed(step) for step in of_candidate]:
        return candidate, None
    pairs = [
        (of_candidate[i]["step"], of_reference[i]["first_position"], of_candidate[i]["first_position"])
        for i in range(len(of_reference))
    ]
    drift = next((Drift(*text) for text in pairs if text[1] != text[2]), None)
    if drift is None:
        return candidate, None
    return Laid(candidate.trace, candidate.rename, {number: first for number, first, _ in pairs}), drift


def _fed(step: Mapping[str, Any]) -> tuple[Any, ...]:
    return step["batch"], step["length"], tuple(step["token_ids"])


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != b) & (a != UNKNOWN) & (b != UNKNOWN)


def _shift(reference: np.ndarray, candidate: np.ndarray, at: int) -> int | None:
    """By how much the candidate's text is late from the fork on, where at least three tokens say so."""
    for by in (shift for size in range(1, NEAR + 1) for shift in (size, -size)):
        start, end = max(at, by), len(candidate) + min(by, 0)
        b, a = candidate[start:end], reference[start - by : end - by]
        if len(b) >= 3 and len(a) == len(b) and not _differs(a, b).any():
            return by
    return None
