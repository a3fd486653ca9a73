"""Compare two traces from any process, without torch: which module diverges first, and where?

    alone, beside = (ModuleTrace.load(Path(name)) for name in ("alone", "beside-120b"))
    comparison = compare_traces(alone, beside)
    comparison.verdict, comparison.line, comparison.first

Both runs must have been fed the same tokens. If they were not, only positions before the first
different token are compared, because later inputs differ. A wrong draft picks other tokens, so the
fault is often before them. A trace has one request: a batch that an engine packs into one step is
not split.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.errors import (
    GROWN,
    LARGE,
    ONE_FACTOR_OF_RUNS,
    TENSOR,
    UNRELATED,
    UNRELATED_GAIN,
    Node,
    give_verdict,
    locate,
    name_module,
    nodes,
    one_factor,
)
from specnb.divergence.offline import walk
from specnb.divergence.offline.walk import Difference, Drift, Fork, Plan, counted_alike
from specnb.divergence.trace import OWN, Alignment, ModuleTrace, canonical_name, rename_all
from specnb.errors import InputError
from specnb.io import plain


class Comparison(NamedTuple):
    """The result of `compare_traces`.

    `minimal`: every module that is wrong by itself, earliest first. A fault at tokens that an
    earlier fault has already changed shows only after that one is fixed. `reason` explains any
    verdict except DIVERGENT; `likely` describes the first error. `reads`: parameters that were read
    differently. `fork`: where the runs were fed different tokens. `drift`: where the candidate
    counts positions differently.
    """

    verdict: str
    reason: str
    minimal: tuple[Node, ...]
    likely: str
    reads: pd.DataFrame
    coverage: Mapping[str, Any]
    fork: Fork | None
    drift: Drift | None

    @property
    def first(self) -> Node | None:
        """The first wrong module, or the model if it was fed other tokens, or None."""
        if self.minimal:
            return self.minimal[0]
        if (fork := self.fork) is None:
            return None
        tokens = fork.position, fork.last, fork.differing
        return Node("", "in", "input_ids", "", *tokens, 1.0, 0.0, math.inf, math.nan)

    @property
    def line(self) -> str:
        """The verdict in one line; different input tokens come first."""
        parts, fork, drift = [], self.fork, self.drift
        if fork is not None:
            both = f"the reference has {fork.reference}, the candidate {fork.candidate}"
            parts.append(
                f"the runs were not fed the same tokens: at position {fork.position} {both}"
            )
        if drift is not None:
            counted = f"the candidate counts position {drift.position} as {drift.counted}"
            parts.append(f"from step {drift.step} on, {counted}")
        if self.minimal:
            parts += [self._where(), self.likely]
            if also := ", ".join(map(name_module, self.minimal[1:])):
                parts.append(f"also {also}")
        else:
            parts.append(self.reason)
        return f"{self.verdict}: {'; '.join(filter(None, parts))}"

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON document."""
        return plain(
            self._asdict()
            | {
                "schema": 1,
                "line": self.line,
                "first": self.first and self.first._asdict(),
                "minimal": [node._asdict() for node in self.minimal],
                "drift": self.drift and self.drift._asdict(),
                "fork": self.fork and self.fork._asdict(),
                "doubts": [],  # a field of schema 1, always empty now
                "reads": self.reads.to_dict("records"),
            },
            nan=None,
        )

    def _where(self) -> str:
        node = self.minimal[0]
        place = f"{node.at}'s {node.name}" if node.at else node.name
        read = (
            self.reads[self.reads["module"] == node.module]
            .drop_duplicates("says")
            .set_index("says")["read"]
        )
        why = ""
        if "foreign" in read:
            why = f"; its inputs agree, and it read {read['foreign']}, a parameter of another model"
        elif "changed" in read:
            why = f"; its inputs agree, and {read['changed']} as read has different values"
        return (
            f"first at {name_module(node)}, {node.n_tokens} tokens "
            f"from position {node.first_token} to {node.last_token}: "
            f"{place} differs by {node.error:.2g}, floor {node.floor:.1g}{why}"
        )


def compare_traces(
    reference: ModuleTrace,
    candidate: ModuleTrace,
    *,
    sound: Iterable[ModuleTrace] = (),
    rename: Mapping[str, str] | None = None,
) -> Comparison:
    """Find where `candidate` diverges from `reference`: traces of one draft, fed the same tokens.

    `sound`: correct runs of the same text, whose largest errors are the floors; without any, the
    floor is rounding to the dtype. `rename`: regular expressions and their replacements, for the
    module paths of all traces.

    Raises InputError for traces that cannot be compared (empty, or without a shared module), and
    for a sound run of another text or of fewer positions.
    """
    # 1. Align both traces along their text.
    a = _aligned(reference, "reference", rename)
    b = _aligned(candidate, "candidate", rename)
    names = {*a.names.values()}
    others = {*b.names.values()}
    if not names & others:
        seen = f"the reference has e.g. {max(names)!r}, the candidate {max(others)!r}"
        raise InputError(f"the traces share no module: {seen}; align the paths (--rename OLD=NEW)")
    b, drift = counted_alike(a, b)
    # 2. Compare all tensors; sound runs show the rounding of all judged positions.
    difference = Difference(a, b)
    runs = [Difference(a, _aligned(trace, "sound", rename)) for trace in sound]
    for run in runs:
        if len(missing := np.setdiff1d(difference.positions, run.positions)):
            raise InputError(
                f"a sound trace has no position {missing[0]}: give runs of the compared text"
            )
    # 3. Which tensors are wrong by themselves? If none is, how far do errors grow?
    plan = Plan.of(a)
    floor = walk.floors(difference, runs)
    offset = walk.excuse_offset(difference, plan)
    beyond = walk.walk_traces(plan, difference, floor)
    wrong = locate(beyond)
    grown = beyond[~beyond["discrete"]] if wrong.empty else wrong[:0]
    # 4. Give the verdict, and describe the first error.
    harmless = {
        "all positions are offset by one number, which RoPE does not see": offset,
        "errors grow from module to module, and no module is wrong by itself": len(grown),
    }
    alike = "all compared tensors are bit-identical"
    within = "no error exceeds those of the sound runs" if runs else ""
    verdict, reason = give_verdict(
        not wrong.empty,
        doubts=_doubts(difference, plan, grown, bool(runs)),
        excuses=[says for says, holds in harmless.items() if holds],
        sound=alike if len(difference.equal) == len(difference.errors) else within,
        rest="no error exceeds rounding",
    )
    read = reads(a, b)
    foreign = read[read["says"] == "foreign"]
    if len(foreign) and wrong.empty:
        reason += "; but {module} read {read}, a parameter of another model".format(
            **foreign.iloc[0]
        )
    likely, fork = "", difference.fork
    if len(wrong):
        likely = _shape(next(iter(wrong.groupby(TENSOR, sort=False)))[1])
    elif fork is not None and fork.repeated:
        likely = (
            f"from position {fork.position} on, the candidate is fed token {fork.candidate} only"
        )
    minimal = nodes(wrong).drop_duplicates("module")[[*Node._fields]]
    by_module = tuple(Node(*node) for node in minimal.itertuples(index=False))
    return Comparison(verdict, reason, by_module, likely, read, _coverage(difference), fork, drift)


def _coverage(difference: Difference) -> dict[str, Any]:
    """Count what was compared, and list what was not: tensors as "module:role:name"."""
    runs = difference.reference, difference.candidate
    reference, candidate = (run.rows.keys() for run in runs)
    counts = {
        "modules": len({key.module for key in reference | candidate}),
        "compared": len({key.module for key in difference.errors}),
        "tensors": len(difference.errors),
        "equal": len(difference.equal),
        "tokens": len(difference.positions),
        "sequences": 1,
        "parameters": not any(run.trace.params.empty for run in runs),
    }
    lists = {
        "only_reference": reference - candidate,
        "only_candidate": candidate - reference,
        "left_out": difference.left_out,
        "reshaped": difference.reshaped,
    }
    says = (
        "{compared} of {modules} modules, {tensors} tensors ({equal} bit-identical) "
        "at {tokens} tokens; "
        f"{len(reference ^ candidate)} tensors in one trace only, "
        f"{len(difference.left_out)} without a token axis, "
        f"{len(difference.reshaped)} of other shapes"
    ).format(**counts)
    if not counts["parameters"]:
        says += "; parameters not compared (captured without at_use)"
    return counts | {name: sorted(map(str, keys)) for name, keys in lists.items()} | {"says": says}


def _aligned(trace: ModuleTrace, role: str, rename: Mapping[str, str] | None) -> Alignment:
    if trace.tensors.empty:
        raise InputError(
            f"the {role} trace has no tensor: run the model inside the `capture` block"
        )
    if (
        most := max((step["batch"] for step in trace.facts["steps"] if step["length"]), default=1)
    ) > 1:
        raise InputError(f"got a trace of a batch of {most}, expected 1: capture one request alone")
    return Alignment(trace, rename)


# --- the verdict ----------------------------------------------------------------------------------


def _doubts(
    difference: Difference, plan: Plan, grown: pd.DataFrame, calibrated: bool
) -> Iterator[str]:
    """Yield reasons why too little was compared, or why unattributed errors may be a fault.

    `grown`: errors beyond their floors, if no tensor is wrong. `calibrated`: the floors are from
    sound runs.
    """
    if difference.fork is not None:
        before = (
            "nothing before it is wrong" if len(difference.positions) else "nothing comes before it"
        )
        yield f"{before}: feed both runs the same tokens (teacher forcing) and capture again"
    if not len(difference.positions) or not difference.errors:
        yield "the traces share no position or no tensor with tokens: capture the same text in both"
    final = {*plan.events[-1].keys}
    seen = [
        key
        for key in final
        if key in difference.errors and not np.isnan(difference.errors[key]).all()
    ]
    if not seen or not final.isdisjoint(difference.reshaped):
        yield (
            "the output of the model was not compared, or has another shape: "
            "capture the same complete model"
        )
    flipped = difference.positions[difference.n_alike :]
    if grown["position"].isin(flipped).any():
        yield (
            f"from position {flipped[0]} on, another expert was chosen at a tie: "
            "later positions cannot be judged"
        )
    error = grown["error"].max()
    ratio = grown["ratio"].max()
    if ratio > GROWN or error >= LARGE:
        usual = "those of the sound runs" if calibrated else "rounding"
        yield (
            f"errors grow to {error:.2g}, {ratio:.2g} times {usual}, "
            "and no module is wrong by itself: "
            "give (more) `sound` traces (`… capture … --width 5`)"
        )


# --- what the first error looks like --------------------------------------------------------------


def _shape(rows: pd.DataFrame) -> str:
    """Describe the errors in the wrong rows of a tensor; "" if they match no known pattern."""
    error = rows["error"].to_numpy()
    gain = rows["gain"].to_numpy()
    if np.isinf(error).any():
        return "NaN, infinities or zeros where the other run has none"
    if rows["discrete"].any():
        return "different integers"
    factor = one_factor(gain, error, ONE_FACTOR_OF_RUNS)
    if factor is not None:
        return f"{factor:.4g} times the expected value at every such token: a scale"
    unrelated = np.median(error) > UNRELATED and abs(np.nanmedian(gain)) < UNRELATED_GAIN
    return "unrelated to the expected value: other operands" if unrelated else ""


def reads(reference: Alignment, candidate: Alignment) -> pd.DataFrame:
    """Return one row per module and parameter that the candidate read differently.

    `says`: "foreign" (another model's, not read in the reference), "changed" (other values), "cast"
    (another dtype), "extra" (the draft's, not read in the reference). `same_values`: the same
    module of the reference read these values, under any name. Empty if one of the traces was
    captured without `at_use`.
    """
    before = _params(reference)
    rows = []
    for item in _params(candidate).itertuples():
        of_reference = before[before["module"] == item.module]
        if of_reference.empty:
            continue
        alike = of_reference[
            (of_reference["path"] == item.path) & (of_reference["owner"] == item.owner)
        ]
        if item.digest in {*alike["digest"]}:
            continue
        parameter = item.path if item.owner == OWN else ""
        if alike.empty:
            says = "extra" if parameter else "foreign"
        else:
            says = "changed" if item.dtype in {*alike["dtype"]} else "cast"
        same_values = bool(item.digest) and item.digest in {*of_reference["digest"]}
        rows.append((item.module, parameter, f"{item.owner}:{item.owner_path}", says, same_values))
    return pd.DataFrame(rows, columns=["module", "parameter", "read", "says", "same_values"])


def _params(aligned: Alignment) -> pd.DataFrame:
    params = aligned.trace.params.drop_duplicates(
        ["module", "owner", "owner_path", "digest", "dtype"]
    )
    paths = rename_all(params["module"].unique(), aligned.rename)
    owned = params["owner_path"].map(canonical_name)
    paths |= rename_all(owned.unique(), aligned.rename)
    return params.assign(module=params["module"].map(paths), path=owned.map(paths))
