"""The tables of a comparison: nodes, heat, and what was and was not compared."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specnb.divergence import ladder
from specnb.divergence.align import Fork, Laid
from specnb.divergence.ladder import Node
from specnb.divergence.offline.errors import Apart, gains
from specnb.divergence.offline.walk import Finding, Plan
from specnb.divergence.trace import Key, canonical_name, renamed

COLUMNS = (
    "module", "at", "call", "role", "name", "first_token", "last_token", "n_tokens", "in_error", "out_error", "floor",
    "ratio", "gain", "gain_error", "own",
)  # fmt: skip


@dataclass(frozen=True)
class Overlap:
    """What was compared, and what was not: tensors as "module:role:name"."""

    modules: int
    compared: int
    tensors: int
    equal: int
    tokens: int
    sequences: int
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]
    left_out: tuple[str, ...]
    reshaped: tuple[str, ...]
    parameters: bool

    def __str__(self) -> str:
        lost = len(self.only_reference) + len(self.only_candidate)
        params = "" if self.parameters else ", parameters not compared (captured without at_use)"
        return (
            f"{self.compared} of {self.modules} modules, {self.tensors} tensors ({self.equal} equal in every bit) at "
            f"{self.tokens} tokens; {lost} tensors in one trace only, {len(self.left_out)} without tokens, "
            f"{len(self.reshaped)} of other shapes{params}"
        )


Floor = Mapping[Key, float]
Found = Mapping[Key, Finding]


def minimal(apart: Apart, wrong: Found, floor: Floor) -> list[tuple[Node, Key]]:
    """Of each module that is wrong by itself the first such tensor; first in the candidate's time first."""
    chosen: dict[str, Key] = {}
    for key, part in wrong.items():
        chosen.setdefault(part.event.maker, key)
    result = [(_node(apart, key, wrong[key], floor[key]), key) for key in chosen.values()]
    steps = dict(zip(apart.candidate.positions.tolist(), apart.candidate.last_step.tolist(), strict=True))
    return sorted(result, key=lambda item: (steps[item[0].first_token], wrong[item[1]].event.order))


def nodes(apart: Apart, result: Found, wrong: Found, floor: Floor) -> pd.DataFrame:
    """One row for each tensor above its floor, in the order of the run; `own` are those wrong by themselves.

    Errors and ratio are the largest ones, gains the median over tokens.
    """
    rows = []
    for key, part in result.items():
        cells = part.wrong if key in wrong else part.beyond
        if not part.beyond.any():
            continue
        first, last, count = _tokens(apart, cells)
        gain = _gains(apart, key, cells)
        worst, given = float(part.error[cells].max()), float(part.given[cells].max())
        rows.append((
            part.event.maker, key.module, key.call, key.role, key.name, first, last, count, given, worst, floor[key],
            worst / floor[key], *(float(np.median(each)) for each in gain), key in wrong,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def ratios(apart: Apart, plan: Plan, result: Found, floor: Floor) -> pd.DataFrame:
    """Largest error / floor of what each module made, index module in order of time, columns position."""
    shown = {module: np.full(len(apart.where.positions), np.nan) for module in plan.modules}
    for key, part in result.items():
        if part.event.given and key in plan.same_as:
            continue  # made, and shown, elsewhere
        with np.errstate(invalid="ignore"):
            worst = np.fmax.reduce(apart.errors[key], axis=0, initial=np.nan) / floor[key]
        shown[part.event.maker] = np.fmax(shown[part.event.maker], worst)
    columns = pd.Index(apart.where.positions, name="position")
    return pd.DataFrame.from_dict(shown, orient="index", columns=columns).rename_axis("module")


def overlap(apart: Apart) -> Overlap:
    """What was compared, and what was not."""
    reference, candidate = (
        {key for key in item.rows if key.role != "state"} for item in (apart.reference, apart.candidate)
    )
    modules = {key.module for key in reference | candidate}
    return Overlap(
        modules=len(modules),
        compared=len({key.module for key in apart.errors}),
        tensors=len(apart.errors),
        equal=len(apart.equal),
        tokens=len(apart.where.positions),
        sequences=len(apart.where.reference),
        only_reference=_said(reference - candidate),
        only_candidate=_said(candidate - reference),
        left_out=_said(apart.left_out),
        reshaped=_said(apart.reshaped),
        parameters=not (apart.reference.trace.params.empty or apart.candidate.trace.params.empty),
    )


def _node(apart: Apart, key: Key, part: Finding, floor: float) -> Node:
    worst = int(part.error[part.wrong].argmax())
    error, gain = float(part.error[part.wrong][worst]), float(_gains(apart, key, part.wrong)[0][worst])
    where = (part.event.maker, key.role, key.name, key.module, *_tokens(apart, part.wrong))
    return Node(*where, error, floor, error / floor, gain)


def _tokens(apart: Apart, cells: np.ndarray) -> tuple[int, int, int]:
    positions = apart.where.positions[cells.any(0)]
    return int(positions[0]), int(positions[-1]), len(positions)


def _gains(apart: Apart, key: Key, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gain and its standard error at each token; integers have none."""
    if key in apart.discrete:
        none = np.full(int(cells.sum()), np.nan)
        return none, none
    return gains(*apart.pair(key), cells)


def _said(keys: object) -> tuple[str, ...]:
    return tuple(sorted(f"{key.module}:{key.role}:{key.name}" + (f"#{key.call}" if key.call else "") for key in keys))


ONE_FACTOR = 0.4
"""How far off tokens of one factor may be (`ladder.one_factor`): wide, for a gain told from 16 numbers is off by
itself, and errors of before are in it."""
UNRELATED = 0.9
"""Least median relative error of unrelated tensors, which is sqrt(2) where they are of one size."""
COSINE = 0.35
"""Up to which their median cosine is near 0, told from 16 numbers of each token."""
ROWS_NAMED = 4
ROWS_TRIED = 256
"""Moved rows of a cache of which is looked for where they come from."""


def shape(apart: Apart, key: Key, part: Finding) -> str:
    """One sentence about where `part.wrong` is and what the tensor is like there."""
    places = _where(apart, key, part.wrong)
    error = part.error[part.wrong]
    moved = _moved_rows(apart, part.event.maker)
    if np.isinf(error).any():
        return f"NaN, infinities or zeros where the other run has none, {places}"
    if moved:
        return f"{places}; {moved}"
    if key in apart.discrete:
        return f"other integers, {places}"
    factor, cosine = _alike(apart, key, part)
    if factor is not None:
        return f"{factor:.4g} times what it should be at every such token: a scale; {places}"
    if float(np.median(error)) > UNRELATED and abs(cosine) < COSINE:
        return f"it has nothing to do with what it should be (cosine {cosine:.2f}): other operands; {places}"
    return places


def _alike(apart: Apart, key: Key, part: Finding) -> tuple[float | None, float]:
    """The one factor by which the tensor is too large, None where there is none, and the median cosine."""
    a, b = apart.pair(key)
    gain = gains(a, b, part.wrong)
    # a sketch's gain is as far off as the rest lets it be
    rest = None if a.full is not None else gain.error * np.sqrt(a.sketch.shape[-1])
    factor = ladder.one_factor(gain.value, part.error[part.wrong], limit=ONE_FACTOR, spread=np.median, rest=rest)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = float(np.nanmedian(gain.value * a.size[part.wrong] / b.size[part.wrong]))
    return factor, cosine


def fork_shape(fork: Fork | None) -> str:
    """One sentence about runs that were fed other tokens; "" where there is nothing to say."""
    if fork is None or not fork.repeated:
        return ""
    return f"from position {fork.position} on the candidate is fed token {fork.candidate} only, as past a wrong length"


def _where(apart: Apart, key: Key, wrong: np.ndarray) -> str:
    """Which tokens, among those of this tensor that were compared."""
    compared = np.flatnonzero((~np.isnan(apart.errors[key])).any(0))
    hit = np.flatnonzero(wrong.any(0))
    positions = apart.where.positions
    first, last = int(positions[hit[0]]), int(positions[hit[-1]])
    if len(hit) == len(compared):
        return "at every token"
    if len(hit) == 1:
        return f"at one token, position {first}: a row that was not written, or by somebody else"
    if hit[0] == compared[0]:
        return f"at the first tokens, up to position {last}"
    kind = "from position {} on" if hit[-1] == compared[-1] else "between positions {} and {}"
    return f"at {len(hit)} tokens {kind.format(first, last)}"


def _moved_rows(apart: Apart, module: str) -> str:
    """Which rows of the module's cache hold what the reference has at another position."""
    positions = apart.where.positions
    reference, candidate = (item.states(module, "keys", positions) for item in (apart.reference, apart.candidate))
    if reference is None or candidate is None or apart.where.reference[:1] != [0] or apart.where.candidate[:1] != [0]:
        return ""
    size = np.linalg.norm(reference, axis=-1)
    tolerance = 10 * ladder.TIMES_FLOOR * ladder.rounding([apart.reference.dtype])

    def far(candidate: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.linalg.norm(candidate - reference, axis=-1) / size
        return np.where(np.isnan(away), np.inf, away)

    here = far(candidate)
    others = np.flatnonzero((here > tolerance) & np.isfinite(here))[:ROWS_TRIED]
    from_where = {int(i): far(candidate[i]) for i in others}
    moved = {i: int(away.argmin()) for i, away in from_where.items() if away.min() < tolerance}
    moves = [f"position {positions[i]} holds that of {positions[j]}" for i, j in moved.items()][:ROWS_NAMED]
    more = f" and {len(moved) - ROWS_NAMED} more" if len(moved) > ROWS_NAMED else ""
    return f"in its cache the row of {', that of '.join(moves)}{more}" if moves else ""


READ_COLUMNS = ("module", "parameter", "read", "says", "same_values", "reference_digest", "digest")


def reads(reference: Laid, candidate: Laid) -> pd.DataFrame:
    """One row for each parameter that a module of the candidate read otherwise than the reference's module did.

    `says`: "foreign" (not the draft's own, and the reference's module did not read it), "changed" (other values),
    "cast" (another dtype), "extra" (the draft's own, and the reference's module did not read it). `same_values`: the
    reference's module read these very values, whatever their name.
    Empty where one of the traces was captured without `at_use`.
    """
    known = dict(iter(_read(reference).groupby("module")))
    rows = []
    for item in _read(candidate).itertuples():
        of_reference = known.get(item.module)
        if of_reference is None:
            continue
        # each model calls itself as it likes, so only of others the owner's name counts
        whose = of_reference["own"] if item.own else ~of_reference["own"] & (of_reference["owner"] == item.owner)
        named = of_reference[(of_reference["path"] == item.path) & whose]
        if item.digest in set(named["digest"]):
            continue
        says = _says(item.own, named, item.dtype)
        parameter = item.path if item.own else ""
        same = bool(item.digest) and item.digest in set(of_reference["digest"])
        before = named["digest"].iloc[0] if len(named) else ""
        rows.append((item.module, parameter, f"{item.owner}:{item.owner_path}", says, same, before, item.digest))
    return pd.DataFrame(rows, columns=list(READ_COLUMNS))


def _read(item: Laid) -> pd.DataFrame:
    params = item.trace.params.drop_duplicates(["module", "owner", "owner_path", "digest", "dtype"])
    paths = renamed(params["module"].unique(), item.rename)
    owned = {path: canonical_name(path, item.rename) for path in params["owner_path"].unique()}
    return params.assign(
        module=params["module"].map(paths), path=params["owner_path"].map(owned),
        own=params["owner"] == item.trace.facts.get("tag"),
    )  # fmt: skip


def _says(is_own: bool, named: pd.DataFrame, dtype: str) -> str:
    if named.empty:
        return "extra" if is_own else "foreign"
    return "changed" if dtype in set(named["dtype"]) else "cast"
