"""The tables of a comparison: nodes, heat, and what was and was not compared."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from specnb.divergence.align import Key
from specnb.divergence.offline.errors import Apart, gains
from specnb.divergence.offline.result import Node, Overlap
from specnb.divergence.offline.walk import Finding, Plan

COLUMNS = (
    "module", "at", "call", "role", "name", "first_token", "last_token", "n_tokens", "in_error", "out_error", "floor",
    "ratio", "gain", "gain_error", "own",
)  # fmt: skip

Floor = Mapping[Key, float]
Found = Mapping[Key, Finding]


def minimal(apart: Apart, own: Found, floor: Floor) -> list[tuple[Node, Key]]:
    """Of each module that is wrong by itself the first such tensor; first in the candidate's time first."""
    chosen: dict[str, Key] = {}
    for key, part in own.items():
        chosen.setdefault(part.event.maker, key)
    made = [(_node(apart, key, own[key], floor[key]), key) for key in chosen.values()]
    steps = dict(zip(apart.theirs.positions.tolist(), apart.theirs.last_step.tolist(), strict=True))
    return sorted(made, key=lambda one: (steps[one[0].first_token], own[one[1]].event.order))


def nodes(apart: Apart, found: Found, own: Found, floor: Floor) -> pd.DataFrame:
    """One row for each tensor above its floor, in the order of the run; `own` are those wrong by themselves.

    Errors and ratio are the largest ones, gains the median over tokens.
    """
    rows = []
    for key, part in found.items():
        cells = part.own if key in own else part.beyond
        if not part.beyond.any():
            continue
        first, last, count = _tokens(apart, cells)
        gain = _gains(apart, key, cells)
        worst, given = float(part.error[cells].max()), float(part.given[cells].max())
        rows.append((
            part.event.maker, key.module, key.call, key.role, key.name, first, last, count, given, worst, floor[key],
            worst / floor[key], *(float(np.median(each)) for each in gain), key in own,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def ratios(apart: Apart, plan: Plan, found: Found, floor: Floor) -> pd.DataFrame:
    """Largest error / floor of what each module made, index module in order of time, columns position."""
    shown = {module: np.full(len(apart.where.positions), np.nan) for module in plan.modules}
    for key, part in found.items():
        if part.event.given and key in plan.same_as:
            continue  # made, and shown, elsewhere
        with np.errstate(invalid="ignore"):
            worst = np.fmax.reduce(apart.errors[key], axis=0, initial=np.nan) / floor[key]
        shown[part.event.maker] = np.fmax(shown[part.event.maker], worst)
    columns = pd.Index(apart.where.positions, name="position")
    return pd.DataFrame.from_dict(shown, orient="index", columns=columns).rename_axis("module")


def overlap(apart: Apart) -> Overlap:
    """What was compared, and what was not."""
    ours, theirs = ({key for key in one.rows if key.role != "state"} for one in (apart.ours, apart.theirs))
    modules = {key.module for key in ours | theirs}
    return Overlap(
        modules=len(modules),
        compared=len({key.module for key in apart.errors}),
        tensors=len(apart.errors),
        equal=len(apart.equal),
        tokens=len(apart.where.positions),
        sequences=len(apart.where.ours),
        only_reference=_said(ours - theirs),
        only_candidate=_said(theirs - ours),
        left_out=_said(apart.left_out),
        reshaped=_said(apart.reshaped),
        parameters=not (apart.ours.trace.params.empty or apart.theirs.trace.params.empty),
    )


def _node(apart: Apart, key: Key, part: Finding, floor: float) -> Node:
    worst = int(part.error[part.own].argmax())
    error, gain = float(part.error[part.own][worst]), float(_gains(apart, key, part.own)[0][worst])
    where = (part.event.maker, key.role, key.name, key.module, *_tokens(apart, part.own))
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
