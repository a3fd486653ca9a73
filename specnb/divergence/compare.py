"""Two traces that were written anywhere, compared without torch: which module parts first, at which token, how.

    comparison = compare(Trace.load("alone"), Trace.load("beside-120b"))
    comparison.verdict, comparison.line, comparison.first

Both runs must have been fed the same tokens. Where they were not, only what comes before the first other token is
compared, for from there on the two compute different things; a draft that goes wrong picks other tokens, so the fault
is often found before them. One request at a time: what a flat engine packs into one step is not taken apart.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from specnb.divergence.align import Key, Laid
from specnb.divergence.ladder import LARGE, rounding_unknown
from specnb.divergence.offline import tables
from specnb.divergence.offline.errors import Apart, floors
from specnb.divergence.offline.excuses import Excuses, Precise
from specnb.divergence.offline.offset import turned
from specnb.divergence.offline.reads import reads
from specnb.divergence.offline.result import Comparison, Node, named
from specnb.divergence.offline.shape import fork_shape, shape
from specnb.divergence.offline.texts import Together, counted_alike
from specnb.divergence.offline.verdict import verdict as judged
from specnb.divergence.offline.walk import Plan, harmless, walk
from specnb.divergence.trace import Trace
from specnb.errors import InputError


def compare(
    reference: Trace,
    candidate: Trace,
    *,
    sound: Sequence[Trace | tuple[Trace, Trace]] = (),
    precise: Trace | None = None,
    rename: Mapping[str, str] | None = None,
) -> Comparison:
    """Where `candidate` parts from `reference`, traces of one draft fed the same tokens.

    `sound`: runs of the same text that are known to be right, each against the reference or as a pair: their largest
    errors are the floors; without any, rounding to the dtype is. `precise`: a float32 run of the same draft; an error
    against it no larger than three times the reference's own is rounding. `rename`: regular expressions and what
    replaces them in the module paths of all traces.

    Raises InputError for traces in which nothing can be compared: empty, without a module in common, or of two engines
    without `rename`; and for a sound run of another text, or one that ends before what is compared does.
    """
    ours, theirs = _laid(reference, "reference", rename), _laid(candidate, "candidate", rename)
    if not rename:
        _check_engines(ours, theirs)
    _check_common(ours, theirs)
    theirs, drift = counted_alike(ours, theirs)
    apart = Apart.of(ours, theirs)
    pairs = [_pair(one, ours, rename, apart.where) for one in sound]
    usual = floors(pairs, {key: apart.limit(key) for key in apart.errors})
    floor = usual.before
    exact = None if precise is None else _laid(precise, "precise", rename)
    third = None if exact is None else Precise(Apart.of(exact, ours), Apart.of(exact, theirs))
    plan, excuses = Plan.of(ours), Excuses(apart, pairs, third)
    offset = turned(apart, plan)
    found = walk(plan, apart.errors | {key: _rounded(apart, key) for key in offset}, floor, excuses)
    idle = harmless(plan, found, floor) | {key.module for key in offset if key.role == "out"}
    own = {key: part for key, part in found.items() if part.own.any() and part.event.maker not in idle}
    minimal = tables.minimal(apart, own, floor)
    doubt = "" if pairs else _uncalibrated(minimal, ours, theirs)
    minimal = [] if doubt else minimal
    ratios = tables.ratios(apart, plan, found, floor)
    table = reads(ours, theirs)
    if doubt:
        verdict, reason = "INCONCLUSIVE", doubt
    elif minimal:
        verdict, reason = "DIVERGENT", ""
    else:
        verdict, reason = judged(apart, plan, found, usual, excuses, idle, calibrated=bool(pairs))
    foreign = table.loc[table["says"] == "foreign", ["module", "read"]].to_numpy().tolist()
    if foreign and not minimal:
        reason += f"; yet {foreign[0][0]} read {foreign[0][1]}, which is not the draft's own"
    return Comparison(
        verdict=verdict,
        reason=reason,
        minimal=tuple(node for node, _ in minimal),
        likely=shape(apart, minimal[0][1], own[minimal[0][1]]) if minimal else fork_shape(apart.where.fork),
        nodes=tables.nodes(apart, found, own, floor),
        reads=table,
        coverage=tables.overlap(apart),
        fork=apart.where.fork,
        drift=drift,
        doubts=tuple(excuses.doubts),
        ratios=ratios,
        paths={module: _paths(module, ours, theirs) for module in plan.modules},
    )


def _laid(trace: Trace, role: str, rename: Mapping[str, str] | None) -> Laid:
    if trace.tensors.empty:
        raise InputError(f"the {role} trace shows no tensor: was the model run inside the `capture` block?")
    return Laid(trace, rename)


def _uncalibrated(minimal: Sequence[tuple[Node, Key]], *traces: Laid) -> str:
    """Why what was found may be rounding all the same; "" where it may not."""
    types = {one.dtype for one in traces}
    if not minimal or minimal[0][0].error > LARGE or not any(map(rounding_unknown, types)):
        return ""
    node = minimal[0][0]
    return (
        f"{named(node)} is off by {node.error:.2g}, and nothing is known of the rounding of "
        f"{' and '.join(sorted(types))}: capture the reference's text in blocks (`specnb divergence capture … --width "
        "5`) and give it as `sound`"
    )


def _check_engines(ours: Laid, theirs: Laid) -> None:
    """Nodes of llama.cpp's graph and modules of torch are other things, also where two share a name."""
    one, other = (laid.trace.engine for laid in (ours, theirs))
    if one != other:
        raise InputError(
            f"one trace is of {one}, the other of {other}: what they name is not the same; compare runs of one engine, "
            "or say with `rename` (`--rename OLD=NEW`) what is"
        )


def _check_common(ours: Laid, theirs: Laid) -> None:
    a, b = set(ours.names.values()), set(theirs.names.values())
    if not a & b:
        raise InputError(
            f"the traces have no module in common: the reference has e.g. {max(a)!r}, the candidate {max(b)!r}; "
            "give `rename` (`--rename OLD=NEW`), regular expressions that make the paths alike"
        )


def _pair(one: Trace | tuple[Trace, Trace], ours: Laid, rename: Mapping[str, str] | None, judged: Together) -> Apart:
    """A sound run beside another; it must show the rounding of all sequences and positions that are `judged`."""
    first, second = (ours, one) if isinstance(one, Trace) else one
    laid = [each if isinstance(each, Laid) else _laid(each, "sound", rename) for each in (first, second)]
    apart = Apart.of(*laid)
    if not apart.errors or not len(apart.where.positions):
        raise InputError("a sound trace has nothing in common with the reference: give runs of the same text")
    whole = {*judged.ours} <= {*apart.where.ours} if isinstance(one, Trace) else not apart.where.strangers
    if not whole or len(missing := np.setdiff1d(judged.positions, apart.where.positions)):
        what = f"no position {missing[0]}" if whole else "not all sequences"
        raise InputError(
            f"a sound trace has {what} of the text that is compared: its rounding would stand in for that of tokens it "
            "never saw; give runs of the same text"
        )
    return apart


def _rounded(apart: Apart, key: Key) -> np.ndarray:
    """What is left of a tensor that differs by an offset only: it was rounded elsewhere."""
    return np.where(np.isnan(apart.errors[key]), np.nan, apart.limit(key))


def _paths(module: str, *traces: Laid) -> tuple[str, ...]:
    """What a capture calls the module in either run."""
    return tuple(sorted({raw for one in traces for raw, name in one.names.items() if name == module}))
