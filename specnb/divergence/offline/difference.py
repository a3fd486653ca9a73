"""Two traces side by side, the same module, call, tensor and logical position, and how far they are apart. No torch.

Steps may be cut otherwise (a prefill against steps of one token), and cache slots may lie elsewhere: that is not
compared. A step that starts at position p forgets all that was fed at p and behind, so what was fed last counts. Errors
are exact where both kept all values, and told from the sketches of the tokens elsewhere.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specnb.divergence import tolerances
from specnb.divergence.trace import TOKEN_K, Key, Trace, renamed
from specnb.errors import InputError

UNKNOWN = -1
"""The id of a token that was not written down."""


class Row(NamedTuple):
    """Where the values of one key in one step are: the key, that of its arrays, and what the table says of it."""

    module: str
    call: int
    role: str
    name: str
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
    """One tensor along the text: `sketch` (positions, 16), `size` its L2 norms, `row` which row each is from.

    `row` is -1 where nothing was kept; `full` (positions, features) only where all rows have it.
    """

    sketch: np.ndarray
    size: np.ndarray
    row: np.ndarray
    features: int
    dtype: str
    full: np.ndarray | None

    @property
    def discrete(self) -> bool:
        return not self.dtype.startswith(("float", "bfloat", "complex"))


class AlignedTrace:
    """A trace in the order of its text. Raises InputError for a batch, and for names that clash.

    `firsts`: where the steps start, by their number, in place of what the run itself thought. `positions` (n,) are
    those held at the end, `last_step` (n,) in which step each was fed, `tokens` (n,); `dtype` is the model's, "None"
    where it was not written down.
    """

    def __init__(
        self, trace: Trace, rename: Mapping[str, str] | None = None, firsts: Mapping[int, int] | None = None
    ) -> None:
        self.trace, self.rename = trace, dict(rename or {})
        self.dtype = str(trace.facts.get("dtype"))
        self.names = renamed(trace.tensors["module"].unique(), rename)
        self.steps = {step["step"]: step for step in trace.facts["steps"]}
        if (most := max((step["batch"] for step in self.steps.values() if step["length"]), default=1)) > 1:
            raise InputError(f"the trace is of a batch of {most}: capture one request alone")
        self._late = {number: at - self.steps[number]["first_position"] for number, at in (firsts or {}).items()}
        for number, first in (firsts or {}).items():
            self.steps[number] = self.steps[number] | {"first_position": first}
        held = sorted(_held(self.steps).items())
        self.positions = np.array([at for at, _ in held], np.int64)
        self.last_step = np.array([step for _, (step, _) in held], np.int64)
        self.tokens = np.array([token for _, (_, token) in held], np.int64)
        self._placed: tuple[np.ndarray, dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]]] = (np.empty(0), {})

    @cached_property
    def rows(self) -> dict[Key, list[Row]]:
        """The rows of each key, in the order of the run."""
        by_key: dict[Key, list[Row]] = defaultdict(list)
        tensors = self.trace.tensors.sort_values(["step", "order"], kind="stable")
        tensors = tensors.assign(
            module=tensors["module"].map(self.names), axis=tensors["token_axis"],
            odd=tensors["n_nan"] + tensors["n_inf"],
            first=tensors["first_position"] + tensors["step"].map(lambda step: self._late.get(step, 0)),
        )  # fmt: skip
        for row in map(Row._make, tensors[list(Row._fields)].itertuples(index=False, name=None)):
            by_key[Key(*row[:4])].append(row)
        return dict(by_key)

    @cached_property
    def row_of(self) -> dict[int, Row]:
        return {row.row: row for rows in self.rows.values() for row in rows}

    def values(self, key: Key, positions: np.ndarray) -> Values | None:
        """The tensor at these (held, sorted) positions; None where it has no tokens, or changes its shape (masks)."""
        n = len(positions)
        sketch, size, source = np.zeros((n, TOKEN_K), np.float32), np.zeros(n, np.float32), np.full(n, -1, np.int64)
        parts: list[tuple[np.ndarray, np.ndarray | None]] = []
        kinds = set()
        # of as many tokens as heads one may have been taken for the other: other steps have another axis then
        if len({row.axis for row in self.rows[key] if len(row.shape) == 4 and row.shape[1:3] != (1, 1)}) > 1:
            return None
        for row in self.rows[key]:
            tokens, norms = (self.trace.array(row.row, part) for part in ("tokens", "token_l2"))
            # the last layer may go on with a step's last tokens only
            if tokens is None or not 0 < len(norms) == row.shape[row.axis] <= self.steps[row.step]["length"]:
                return None
            kinds.add((math.prod(row.shape) // len(norms), row.dtype))
            at, to = self._places(row, len(norms), positions)
            sketch[to], size[to], source[to] = tokens[at], norms[at], row.row
            if len(to):
                full = self._full(row, len(norms))
                parts.append((to, None if full is None else full[at]))
        if len(kinds) != 1:
            return None
        [(features, dtype)] = kinds
        whole = None
        if parts and all(part is not None for _, part in parts):
            whole = np.zeros((n, features), parts[0][1].dtype)
            for to, part in parts:
                whole[to] = part
        return Values(sketch, size, source, features, dtype, whole)

    def _places(self, row: Row, length: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of a row were fed last in its step, and where in `positions` they belong.

        Remembered while the positions are the same array: all modules of a step ask the same.
        """
        if self._placed[0] is not positions:
            self._placed = (positions, {})
        known, asked = self._placed[1], (row.first, row.step, length)
        if asked not in known:
            fed, to = (_index(held, row.first + np.arange(length)) for held in (self.positions, positions))
            kept = (fed >= 0) & (to >= 0)
            kept[kept] = self.last_step[fed[kept]] == row.step
            known[asked] = np.flatnonzero(kept), to[kept]
        return known[asked]

    def _full(self, row: Row, n: int) -> np.ndarray | None:
        full = self.trace.array(row.row, "full")
        return None if full is None or full.dtype.kind == "c" else np.moveaxis(full, row.axis, 0).reshape(n, -1)


def _held(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Of each position in the state at the end: the step in which it was fed last, and its token."""
    held: dict[int, tuple[int, int]] = {}  # in the order of positions: only the last ones are taken back
    for number, step in sorted(steps.items()):
        first, ids = step["first_position"], step["token_ids"]
        fed = step["length"]
        while fed and held and next(reversed(held)) >= first:
            held.popitem()
        for i in range(fed):  # of a long step only the first ids are kept
            held[first + i] = (number, ids[i] if i < len(ids) else UNKNOWN)
    return held


def _index(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each wanted value is in a sorted array; -1 where it is not."""
    at = np.searchsorted(known, wanted)
    return np.where(np.append(known, -1)[at] == wanted, at, -1)


class Fork(NamedTuple):
    """The first position at which two runs were fed other tokens, the `last`, and how many are `differing`.

    `repeated`: the candidate was fed one and the same token from there on.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that, by the reference's count, starts at another position than it was run with."""

    step: int
    position: int
    counted: int


def compared_positions(reference: AlignedTrace, candidate: AlignedTrace) -> tuple[np.ndarray, Fork | None]:
    """The positions that both traces hold, up to the first at which they were fed other tokens."""
    shared = np.intersect1d(reference.positions, candidate.positions)
    a, b = (trace.tokens[np.isin(trace.positions, shared)] for trace in (reference, candidate))
    differs = np.flatnonzero((a != b) & (a != UNKNOWN) & (b != UNKNOWN))
    if not len(differs):
        return shared, None
    at, last = differs[[0, -1]].tolist()
    repeated = len(b) > at + 2 and bool((b[at:] == b[at]).all())
    return shared[:at], Fork(int(shared[at]), int(a[at]), int(b[at]), len(differs), int(shared[last]), repeated)


def counted_alike(reference: AlignedTrace, candidate: AlignedTrace) -> tuple[AlignedTrace, Drift | None]:
    """The candidate with the reference's count of positions, where both were fed the same steps; else as it is.

    A run that forgot too much or too little of its state goes on at other positions than it was meant to: these are
    what is wrong, not where its tokens belong.
    """
    a, b = ([trace.steps[number] for number in sorted(trace.steps)] for trace in (reference, candidate))
    known = all(len(step["token_ids"]) == step["length"] for step in a)
    if not known or [x["token_ids"] for x in a] != [y["token_ids"] for y in b]:
        return candidate, None
    firsts = [Drift(y["step"], x["first_position"], y["first_position"]) for x, y in zip(a, b, strict=True)]
    drift = next((step for step in firsts if step.position != step.counted), None)
    if drift is None:
        return candidate, None
    return AlignedTrace(candidate.trace, candidate.rename, {step.step: step.position for step in firsts}), drift


# --- how far they are apart -------------------------------------------------------------------------------------------


def relative_l2(a: np.ndarray, b: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """||b - a|| / ||a|| of the tensors behind the sketches `(..., k)`, with the exact `norm` ||a||; 0 of two zeros.

    The standard error is the value / sqrt(2 k). Values below 3e-7 are rounding of the sketches: whether two tensors are
    equal is told by their digests.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.linalg.norm(b.astype(np.float64) - a, axis=-1)
        return np.where(top == 0, 0.0, top / norm)


def gain(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """<a, b> / <a, a> of the tensors behind the sketches `(..., k)`: 1.02 where b = 1.02 a; NaN where a is zero.

    And its standard error, ||b - gain a|| / ||a|| / sqrt(k): 0 of a pure scale.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (a * a).sum(-1)
        value = (a * b).sum(-1) / square
        rest = np.linalg.norm(b - value[..., None] * a, axis=-1)
        return value, rest / np.sqrt(square * a.shape[-1])


class Difference:
    """`errors[key]` (positions,): relative L2, or 1 where an integer differs; NaN where not compared.

    Of all tensors that both traces have, except states, whose rows may be in any slot. `equal` are keys whose every
    compared token is from rows of equal digests; `left_out` and `reshaped` those that could not be compared (no token
    axis or a shape that changes; another shape in each trace).
    """

    def __init__(self, reference: AlignedTrace, candidate: AlignedTrace) -> None:
        self.reference, self.candidate = reference, candidate
        self.positions, self.fork = compared_positions(reference, candidate)
        self.errors: dict[Key, np.ndarray] = {}
        self.dtypes: dict[Key, tuple[str, str]] = {}
        self.features: dict[Key, int] = {}
        self.discrete: set[Key] = set()
        self.equal: set[Key] = set()
        self.left_out: list[Key] = []
        self.reshaped: list[Key] = []
        for key in reference.rows:
            if key.role != "state" and key in candidate.rows:
                self._compare(key)

    def pair(self, key: Key) -> tuple[Values, Values] | None:
        """The two tensors at the shared positions."""
        a, b = (trace.values(key, self.positions) for trace in (self.reference, self.candidate))
        return None if a is None or b is None else (a, b)

    def limit(self, key: Key) -> float:
        """What rounding does to this tensor; a wide one may have been made of narrow ones."""
        return tolerances.rounding([*self.dtypes[key], self.reference.dtype, self.candidate.dtype])

    @cached_property
    def flipped(self) -> dict[Key, np.ndarray]:
        """(positions,) of each tensor, in the order of the run: where integers that were made before it, the chosen
        experts say, differ at the position or before it. A sound run is as far off there as a wrong one."""
        shares, flips = {}, None
        for key, error in self.errors.items():
            flips = np.zeros(error.shape, bool) if flips is None else flips
            shares[key] = flips
            if key in self.discrete:
                flips = flips | np.logical_or.accumulate(error > 0)
        return shares

    def unflipped(self, key: Key) -> np.ndarray:
        """The errors of a tensor, NaN behind flips."""
        return np.where(self.flipped[key], np.nan, self.errors[key])

    def gains(self, key: Key, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens in `cells` (positions,) gain and its standard error; integers have none."""
        a, b = self.pair(key)
        if a.discrete:
            none = np.full(int(cells.sum()), np.nan)
            return none, none
        if a.full is None or b.full is None:
            return gain(a.sketch[cells], b.sketch[cells])
        value, _ = gain(a.full[cells], b.full[cells])
        return value, np.zeros(len(value))

    def _compare(self, key: Key) -> None:
        pair = self.pair(key)
        if pair is None:
            self.left_out.append(key)
            return
        a, b = pair
        if a.features != b.features or a.discrete != b.discrete:
            self.reshaped.append(key)
            return
        self.dtypes[key], self.features[key] = (a.dtype, b.dtype), a.features
        if a.discrete:
            self.discrete.add(key)
        same = self._same_bits(a, b)
        absent = (a.row < 0) | (b.row < 0)
        if same.any() and (same | absent).all():
            self.equal.add(key)
        error = np.where(same, 0.0, _error(a, b))
        if a.full is None or b.full is None:
            error[self._not_finite(a, b, error, key)] = np.inf
        error[absent] = np.nan
        self.errors[key] = error

    def _same_bits(self, a: Values, b: Values) -> np.ndarray:
        """(positions,): both are from rows of one digest that begin at the same position."""
        reference, candidate = self.reference.row_of, self.candidate.row_of
        pairs = list(zip(a.row.tolist(), b.row.tolist(), strict=True))
        known = {
            (i, j): i >= 0 <= j
            and (reference[i].digest, reference[i].first) == (candidate[j].digest, candidate[j].first)
            for i, j in {*pairs}
        }
        return np.array([known[pair] for pair in pairs], bool)

    def _not_finite(self, a: Values, b: Values, error: np.ndarray, key: Key) -> np.ndarray:
        """Tokens of which only one trace has NaN or infinities, which sketches count as 0.

        What is known is how many a row has. Those of its tokens that differ have them; where none does, those that are
        0 in both sketches; else all of them.
        """
        rows = (self.reference.row_of, a.row), (self.candidate.row_of, b.row)
        has, other_has = (np.array([i >= 0 and row_of[i].odd > 0 for i in row.tolist()], bool) for row_of, row in rows)
        suspects = (has != other_has) & (a.row >= 0) & (b.row >= 0)
        differ = suspects & (error > tolerances.TIMES_FLOOR * self.limit(key))
        blank = suspects & (a.size == 0) & (b.size == 0)
        return next((tokens for tokens in (differ, blank) if tokens.any()), suspects)


def _error(a: Values, b: Values) -> np.ndarray:
    exact = a.full is not None and b.full is not None
    if a.discrete:  # sums of integers are exact in a sketch, so another sum is another tensor
        x, y = (a.full, b.full) if exact else (a.sketch, b.sketch)
        return (x != y).any(-1).astype(float)
    if not exact:
        return relative_l2(a.sketch, b.sketch, a.size)
    x, y = (values.full.astype(np.float64) for values in (a, b))
    # NaN against NaN is 0, and an infinity against itself; any other pair with one of them is another value
    same = ~np.isfinite(x) & ((x == y) | (np.isnan(x) & np.isnan(y)))
    x, y = np.where(same, 0.0, x), np.where(same, 0.0, y)
    with np.errstate(invalid="ignore", over="ignore"):
        error = relative_l2(x, y, np.linalg.norm(x, axis=-1))
    return np.where(np.isnan(error), np.inf, error)
