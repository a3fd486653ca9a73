"""Rank the cause classes of a divergence with a table of rules.

A rule that applies contributes a sentence and a weight, a log-likelihood ratio set by judgment: 1
is a hint, 3 is strong, 5 is nearly proof. Priors are the frequencies in about 30 upstream cases, a
convenience sample. The ranking lists all rules that applied, so nobody has to trust the sum.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specnb.divergence.errors import LARGE, TENSOR, name_module, one_factor, relative_l2, rounding
from specnb.divergence.parts import find
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.trace import OWN, UNKNOWN, canonical
from specnb.io import read_toml

FED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "attention_mask")
"""Names of input arguments of a Transformers model."""
Evidence = dict[str, Any]
"""Facts, which hold if their value is truthy, and values for the sentences of rules."""


# --- the evidence, one function per group ---------------------------------------------------------


def gather(lab: Lab, outcomes: Mapping[str, Outcome], *, repeats: bool = True) -> Evidence:
    """Return the evidence about the first divergence.

    `outcomes` are in run order; at least one must be wrong. `repeats`: repeated runs without hooks
    were bit-identical.
    """
    bad = next(outcome for outcome in outcomes.values() if not outcome.clean)
    kinds = {kind for kind, parts in find(lab.draft).items() if bad.first.module in dict(parts)}
    turning = "rotary" in kinds
    evidence = _setup_evidence(outcomes, repeats) | _module_evidence(bad, kinds)
    evidence |= _error_evidence(lab, bad, turning) | _read_evidence(lab, bad, turning)
    if "attention" in kinds and bad.first.role == "in":
        evidence |= _cache_evidence(lab, bad)
    return evidence


def _setup_evidence(outcomes: Mapping[str, Outcome], repeats: bool) -> Evidence:
    """Return which setups are right, and what contrasts between them show."""
    alone = [outcome for outcome in outcomes.values() if outcome.setup.beside == "nobody"]
    right_alone = all(outcome.clean for outcome in alone)
    return {
        "wrong alone": not right_alone,
        "right alone": alone and right_alone,
        "decoys differ": repeats and _decoys_differ(outcomes),
        "wrong at once": alone and all((outcome.wrong["feed"] == 0).any() for outcome in alone),
        **{f"{name} right": outcome.clean for name, outcome in outcomes.items()},
        **{f"{name} wrong": not outcome.clean for name, outcome in outcomes.items()},
    }


def _decoys_differ(outcomes: Mapping[str, Outcome]) -> bool:
    """Return whether two decoys cause different errors."""
    if not {"S2", "S5"} <= outcomes.keys():
        return False
    a, b = (outcomes[setup].wrong["error"].to_numpy() for setup in ("S2", "S5"))
    return len(a) != len(b) or not np.allclose(a, b, rtol=1e-3)


def _module_evidence(bad: Outcome, kinds: set[str]) -> Evidence:
    """Return the kind of the first wrong module, and whether its input or its output is wrong."""
    first = bad.first
    fed = (first.module, first.role) == ("", "in") and first.name in FED
    handed = first.role == "in" and first.at and "position" in first.name
    return {
        "turning": "rotary" in kinds,
        "attending": "attention" in kinds and first.role == "in",
        "routing": "router" in kinds,
        "head": "head" in kinds,
        "fed": fed,
        "handed": handed,
        "given wrong": fed or handed,
        "module": name_module(first),
        "at": first.at,
        "name": first.name,
    }


def _error_evidence(lab: Lab, bad: Outcome, turning: bool) -> Evidence:
    """Return which tokens of the first wrong tensor are wrong, and whether by one factor.

    `turning`: the module is a rotary embedding. Wrong angles belong to POSITION, and scaled cosines
    and sines are not a sign of scaled weights.
    """
    first = bad.first
    _, rows = next(iter(bad.wrong.groupby(TENSOR, sort=False)))
    share = first.n_tokens / len(lab.script.text)
    factor = one_factor(rows["gain"].to_numpy(), rows["error"].to_numpy())
    return {
        "one token": first.n_tokens == 1,
        "some tokens": share < 0.9,
        "one factor": factor is not None,
        "scaled": factor is not None and not turning,
        "computed": (factor is None) != turning,
        "position": first.first_token,
        "factor": factor,
        "share": share,
    }


def _read_evidence(lab: Lab, bad: Outcome, turning: bool) -> Evidence:
    """Return whose parameters the operations of the first wrong module read."""
    module = bad.first.module
    reads = _reads(bad, lab.loaded, module)
    parameters = _parameters(lab, bad, module)
    intended = reads["native"] | reads["copies"]
    # A rotary embedding reads one of its two buffers; the other has the original frequencies.
    complete = intended and (parameters <= intended or turning)
    astray = reads["changed"] or reads["foreign"] or reads["strange"]
    of_others = reads["copies"] or reads["foreign"] or reads["strange"]
    return {
        "foreign read": reads["foreign"],
        "changed read": reads["changed"],
        "strange read": reads["strange"],
        "wrong read": astray,
        "right read": complete and not astray,
        # The parameters were read by a kernel that torch does not see.
        "read unseen": parameters and not (parameters & reads["native"] or of_others),
        "parameters": parameters or any(reads.values()),
        "foreign_reads": _listed(reads["foreign"]),
        "changes": _listed(reads["changed"]),
        "copied": f"; it read copies of {_listed(reads['copies'])}" if reads["copies"] else "",
    }


def _cache_evidence(lab: Lab, bad: Outcome) -> Evidence:
    """Return whether the first wrong attention had the keys and values of a sound run cached."""
    off = _cache_errors(lab, bad)
    exact = rounding([bad.trace.facts["dtype"]])
    # Errors between rounding and LARGE are undecided.
    same = {kind: error <= exact for kind, error in off.items() if error <= exact or error > LARGE}
    nearly = {kind: error for kind, error in off.items() if kind not in same}
    values = same.get("values")
    # A few key channels are large, so low precision may put keys further off than values.
    coarse = "keys" in same and "values" in nearly
    return {
        "slots right": same and all(same.values()),
        "slots wrong": False in same.values() and not values and not coarse,
        "near": nearly,
        "values right": values,
        "values wrong": values is False,
        "others_cached": " and ".join(kind for kind, alike in same.items() if not alike),
        "nearly": " and ".join(nearly),
        "nearly_off": max(nearly.values(), default=0.0),
    }


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3])


# --- what a module read, and what was cached ------------------------------------------------------


def _parameters(lab: Lab, bad: Outcome, module: str) -> set[str]:
    """Return the paths of the parameters of a module and of uncompared modules inside it.

    The model itself ("") contains all modules; only those that ran count.
    """
    names = canonical(path for path, _ in lab.reference.named_modules())
    holders = {path: names[path.rpartition(".")[0]] for path in lab.loaded}
    ran = {*holders.values()} if module else {*bad.trace.tensors["module"]}
    hidden = {
        item for item in ran - {*bad.errors["at"]} if item.startswith(module and f"{module}.")
    }
    return {path for path, holder in holders.items() if holder == module or holder in hidden}


def _reads(bad: Outcome, loaded: Mapping[str, str], module: str) -> dict[str, set[str]]:
    """Return the parameters that operations of a module read, by owner; `loaded`: digests by path.

    "native": the draft's, under all paths with the same content (a tied head is read as the
    embedding). "changed": native ones whose content differs from the pristine copy. "foreign":
    other models', as owner:path. Of parameters of no known model, "copies" names the draft's
    with the same content, and "strange" has the rest.
    """
    params = bad.trace.params
    reads = defaultdict(set)
    for read in params[params["module"] == module].itertuples():
        path = read.owner_path
        same = {name for name, content in loaded.items() if content and content == read.digest}
        if read.owner == OWN:
            reads["native"].update({path, *same})
            if loaded.get(path, read.digest) != read.digest:
                reads["changed"].add(path)
        elif read.owner != UNKNOWN:
            reads["foreign"].add(f"{read.owner}:{path}")
        elif same:
            reads["copies"].update(same)
        else:
            reads["strange"].add(path)
    return reads


def _cache_errors(lab: Lab, bad: Outcome) -> dict[str, float]:
    """Return the largest relative error of cached keys and values in the first wrong feed.

    It is inf if the numbers of rows differ. Only what both caches contain is compared. Keys are
    skipped if all positions are offset.
    """
    errors = {}
    for kind in ("values",) if bad.offset else ("keys", "values"):
        feed = bad.wrong.loc[0, "feed"]
        cached = []
        for trace in (lab.sound[bad.setup.in_blocks].trace, bad.trace):
            rows = trace.rows(module=bad.first.module, role="state", name=kind, step=feed)
            cached += [np.moveaxis(trace.arrays[digest], -2, 0) for digest in rows["digest"][-1:]]
        if len(cached) == 2 and cached[0].shape[1:] == cached[1].shape[1:]:
            alike = len(cached[0]) == len(cached[1])
            errors[kind] = float(relative_l2(*cached).max(initial=0.0)) if alike else np.inf
    return errors


CLASSES = read_toml(Path(__file__).with_suffix(".toml"))
"""The cause classes by name; the head of `causes.toml` describes the fields."""


# --- the ranking ----------------------------------------------------------------------------------


class Sign(NamedTuple):
    """A rule that applied: its weight and its sentence."""

    weight: float
    says: str


class Cause(NamedTuple):
    """A cause class with all rules that applied (`signs`)."""

    name: str
    score: float
    signs: Sequence[Sign]
    issues: Sequence[str]
    next_experiment: str


def rank(evidence: Evidence) -> list[Cause]:
    """Return all cause classes, likeliest first."""
    total = sum(kind["cases"] for kind in CLASSES.values())
    causes = []
    for name, kind in CLASSES.items():
        signs = [
            Sign(weight, sentence.format_map(evidence))
            for weight, when, sentence in kind["rules"]
            if all(_holds(fact, evidence) for fact in when.split(", "))
        ]
        score = math.log(kind["cases"] / total) + sum(sign.weight for sign in signs)
        causes.append(Cause(name, score, signs, kind["issues"], kind["next_experiment"]))
    return sorted(causes, key=lambda cause: -cause.score)


def _holds(fact: str, evidence: Evidence) -> bool:
    """Return whether a fact holds; a fact with the prefix "not " must not hold."""
    return bool(evidence.get(fact.removeprefix("not "))) != fact.startswith("not ")
