"""Causes, ranked by one table of rules: what speaks for each, what against, where it happened before, what to try next.

A rule that applies says so in a sentence and gives its weight, a log-likelihood ratio by judgement: 1 a hint, 3 strong,
5 nearly proof. Priors are the frequencies of some 30 upstream cases, a convenience sample. All rules that applied come
with the ranking, so that nobody has to trust the sum.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.errors import TENSOR, name_module
from specnb.divergence.parts import find, output_head
from specnb.divergence.setups import SETUPS, Lab, Outcome
from specnb.divergence.tolerances import LARGE, one_factor, rounding
from specnb.divergence.trace import OWN, UNKNOWN, ModuleTrace, canonical
from specnb.errors import InputError
from specnb.io import read_toml

FED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "attention_mask")
"""Arguments of a model, as transformers name them."""


class Reads(NamedTuple):
    """Parameters that operations read. `native`: the draft's, by whatever path (a tied head is read as the embedding),
    `changed` those of them with other content than in the pristine copy; `foreign`: other models', as owner:path.

    Of parameters that no known model has `copies` names those of the draft's whose content it is; `strange` are the
    others.
    """

    native: set[str]
    changed: set[str]
    foreign: set[str]
    copies: set[str]
    strange: set[str]


@dataclass(frozen=True)
class CaseEvidence:
    """Findings about the first divergence: `facts` that hold or not, and `words` for the sentences of rules.

    `cached`: by "keys" and "values" whether the cache held the rows of a sound run in the first wrong feed. It lacks
    what either run does not show, and rows that are near the right ones, but for more than rounding.
    """

    facts: Mapping[str, bool]
    words: Mapping[str, Any]
    reads: Reads
    cached: Mapping[str, bool]


def gather(lab: Lab, outcomes: Mapping[str, Outcome], *, repeats: bool = True) -> CaseEvidence:
    """Gather the evidence of set-ups, at least one of them wrong, in the order they were run.

    `repeats`: runs without hooks gave the same bits again.
    """
    bad = next(outcome for outcome in outcomes.values() if not outcome.clean)
    first = bad.wrong.iloc[0]
    module, role, name, at = (first[column] for column in ("module", "role", "name", "at"))
    rows = bad.wrong[(bad.wrong[list(TENSOR)] == first[list(TENSOR)]).all(axis=1)]
    n_wrong = rows["position"].nunique()
    share = n_wrong / len(lab.script.text)
    factor = one_factor(rows["gain"].to_numpy(), rows["error"].to_numpy())
    parts, head = find(lab.draft), ""
    with contextlib.suppress(InputError):  # a drafter may have no head of its own
        head, _ = output_head(lab.draft)

    reads, parameters = _reads(bad, lab.meant, module), _parameters(lab, bad, module)
    astray = bool(reads.changed or reads.foreign or reads.strange)
    turning = module in dict(parts["rotary"])
    # of the buffers of a rotary embedding one is read, the other is what it was made with
    read = reads.native | reads.copies
    whole = bool(read) and (parameters <= read or turning)

    attending = module in dict(parts["attention"]) and role == "in"
    off = _cache_errors(lab, bad) if attending else {}
    exact = rounding([str(bad.trace.facts.get("dtype"))])
    cached = {kind: error <= exact for kind, error in off.items() if error <= exact or error > LARGE}
    nearly = {kind: error for kind, error in off.items() if kind not in cached}
    right, values = bool(cached) and all(cached.values()), cached.get("values")
    # a few channels of keys are large: a coarse type may put them further off than the values
    wrong = False in cached.values() and not values and not ("keys" in cached and "values" in nearly)

    alone = [outcome for outcome in outcomes.values() if outcome.setup.beside == "nobody"]
    fails_alone = any(not outcome.clean for outcome in alone)
    decoys = [outcomes[setup].wrong["error"].to_numpy() for setup in ("S2", "S5") if setup in outcomes]
    alike = len({len(errors) for errors in decoys}) == 1 and np.allclose(*decoys, rtol=1e-3) if decoys[1:] else True
    fed = (module, role) == ("", "in") and name in FED
    handed = role == "in" and bool(at) and "position" in name
    ran = ((f"{setup} {word}", setup in outcomes and outcomes[setup].clean == (word == "right"))
           for setup in SETUPS for word in ("right", "wrong"))  # fmt: skip
    facts = dict(ran) | {
        "wrong alone": fails_alone,
        "right alone": bool(alone) and not fails_alone,
        "decoys differ": repeats and not alike,
        "wrong at once": fails_alone and all(not o.clean and o.wrong["feed"].iloc[0] == 0 for o in alone),
        "one token": n_wrong == 1,
        "some tokens": share < 0.9,
        "one factor": factor is not None,
        "scaled": factor is not None and not turning,  # longer cosines and sines are of the angles that were meant
        "computed": (factor is None) != turning,  # other angles are POSITION's, longer ones are no scale of weights
        "foreign read": bool(reads.foreign),
        "changed read": bool(reads.changed),
        "strange read": bool(reads.strange),
        "wrong read": astray,
        "right read": whole and not astray,
        # a kernel that torch is not shown read the parameters
        "read unseen": bool(parameters) and not (
            parameters & reads.native or reads.copies or reads.foreign or reads.strange
        ),
        "parameters": bool(parameters) or any(reads),
        "turning": turning,
        "attending": attending,
        "routing": module in dict(parts["router"]),
        "head": module == head,
        "fed": fed,
        "handed": handed,
        "given wrong": fed or handed,
        "slots right": right,
        "slots values": bool(values) and not right,
        "slots wrong": wrong,
        "slots near": bool(nearly) and not (right or values or wrong),
        "near": bool(nearly),
        "values right": bool(values),
        "values wrong": values is False,
    }  # fmt: skip
    words = {
        "module": name_module(first), "at": at, "name": name, "position": int(first["position"]), "factor": factor,
        "share": share, "foreign_reads": _listed(reads.foreign),
        "changes": _listed(reads.changed),
        "copied": f"; of {_listed(reads.copies)} it read copies" if reads.copies else "",
        "others_cached": " and ".join(kind for kind, same in cached.items() if not same),
        "nearly": " and ".join(nearly), "nearly_off": max(nearly.values(), default=0.0),
    }  # fmt: skip
    return CaseEvidence(facts, words, reads, cached)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3])


def _parameters(lab: Lab, bad: Outcome, module: str) -> set[str]:
    """Paths of the parameters that a module holds, itself or in modules of which nothing was compared.

    The model itself holds all modules: of those inside it the ones that ran.
    """
    names = canonical(path for path, _ in lab.reference.named_modules())
    holders = {path: names[path.rpartition(".")[0]] for path in lab.meant}
    ran = {*holders.values()} if module else {*bad.trace.tensors["module"]}
    hidden = {item for item in ran - {*bad.errors["at"]} if item.startswith(module and f"{module}.")}
    return {path for path, holder in holders.items() if holder == module or holder in hidden}


def _reads(bad: Outcome, meant: Mapping[str, str], module: str) -> Reads:
    """The parameters that operations of a module read, by whose they are; `meant` are digests by path."""
    params, reads = bad.trace.params, Reads(set(), set(), set(), set(), set())
    read = params.loc[params["module"] == module, ["owner", "owner_path", "digest"]]
    for owner, path, digest in read.drop_duplicates().itertuples(index=False):
        same = {name for name, content in meant.items() if content and content == digest}
        if owner == OWN:
            reads.native.update({path, *same})
            reads.changed.update({path} if meant.get(path, digest) != digest else ())
        elif owner != UNKNOWN:
            reads.foreign.add(f"{owner}:{path}")
        elif same:
            reads.copies.update(same)
        else:
            reads.strange.add(path)
    return reads


def _cache_errors(lab: Lab, bad: Outcome) -> dict[str, float]:
    """The largest relative error of a cached row of keys and of values, in the first wrong feed; inf for another number
    of rows. Only what both caches show; keys that are all turned by one number of positions more are left out."""
    first = bad.wrong.iloc[0]
    feed, module = int(first["feed"]), first["module"]
    sound, errors = lab.sound[bad.setup.in_blocks].trace, {}
    for kind in ("values",) if bad.offset else ("keys", "values"):
        where = {"module": module, "role": "state", "name": kind, "step": feed}
        rows, right = (_cached_rows(trace, trace.rows(**where)["digest"]) for trace in (bad.trace, sound))
        if rows is None or right is None or rows.shape[1:] != right.shape[1:]:
            continue
        if len(rows) != len(right) or not np.isfinite(rows).all():
            errors[kind] = np.inf
            continue
        off, size = (np.linalg.norm(values, axis=1) for values in (rows - right, right))
        share = np.divide(off, size, out=np.where(off > 0, np.inf, 0.0), where=size > 0)
        errors[kind] = float(np.max(share, initial=0.0))
    return errors


def _cached_rows(trace: ModuleTrace, digests: pd.Series) -> np.ndarray | None:
    """A cache's content `(tokens, features)`, from the last of its rows in the trace; None where that was not seen."""
    cached = trace.arrays[digests.iloc[-1]] if len(digests) else None
    return None if cached is None else np.moveaxis(cached, -2, 0).reshape(cached.shape[-2], -1)


CLASSES: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_suffix(".toml"))
"""By name what `causes.toml` says of each class of causes; its head says what the fields mean."""


class Sign(NamedTuple):
    """A rule that applied, in words."""

    weight: float
    says: str

    def __str__(self) -> str:
        return f"{self.says} ({self.weight:+g})"


@dataclass(frozen=True)
class Cause:
    """One class of causes: `signs` are all that applied."""

    name: str
    score: float
    signs: Sequence[Sign]
    issues: Sequence[str]
    next_experiment: str

    @property
    def for_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight > 0]

    @property
    def against_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight < 0]


def rank(evidence: CaseEvidence) -> list[Cause]:
    """All classes, the likeliest first."""
    total, causes = sum(kind["cases"] for kind in CLASSES.values()), []
    for name, kind in CLASSES.items():
        signs = [
            Sign(weight, sentence.format_map(evidence.words))
            for weight, when, sentence in kind["rules"]
            if all(evidence.facts[fact.removeprefix("not ")] != fact.startswith("not ") for fact in when.split(", "))
        ]
        score = math.log(kind["cases"] / total) + sum(sign.weight for sign in signs)
        causes.append(Cause(name, score, signs, kind["issues"], kind["next_experiment"]))
    return sorted(causes, key=lambda cause: -cause.score)


def read_rules() -> pd.DataFrame:
    """The rules: cause, weight and sentence; in braces are `CaseEvidence.words`."""
    rules = [(name, weight, sentence) for name, kind in CLASSES.items() for weight, _, sentence in kind["rules"]]
    return pd.DataFrame(rules, columns=["cause", "weight", "sentence"])
