"""Causes, ranked by one table of rules: what speaks for each, what against, where it happened before, what to try next.

A rule that applies says so in a sentence and gives its weight, a log-likelihood ratio by judgement: 1 a hint, 3 strong,
5 nearly proof. Priors are the frequencies of some 30 upstream cases, a convenience sample. All rules that applied come
with the ranking, so that nobody has to trust the sum.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.errors import LARGE, TENSOR, name_module, one_factor, relative_l2, rounding
from specnb.divergence.parts import find
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.trace import OWN, UNKNOWN, canonical
from specnb.io import read_toml

FED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "attention_mask")
"""Arguments of a model, as transformers name them."""


def gather(lab: Lab, outcomes: Mapping[str, Outcome], *, repeats: bool = True) -> tuple[set[str], dict[str, Any]]:
    """Gather the evidence of set-ups, at least one of them wrong, in the order they were run.

    Returns the facts about the first divergence that hold, and words for the sentences of rules. `repeats`: runs
    without hooks gave the same bits again.
    """
    bad = next(outcome for outcome in outcomes.values() if not outcome.clean)
    first = bad.first
    module, role, name, place, *_ = first
    _, rows = next(iter(bad.wrong.groupby(TENSOR, sort=False)))
    share = first.n_tokens / len(lab.script.text)
    factor = one_factor(rows["gain"].to_numpy(), rows["error"].to_numpy())
    kinds = {kind for kind, parts in find(lab.draft).items() if module in dict(parts)}
    reads, parameters = _reads(bad, lab.meant, module), _parameters(lab, bad, module)
    astray = reads["changed"] or reads["foreign"] or reads["strange"]
    turning = "rotary" in kinds
    # of the buffers of a rotary embedding one is read, the other is what it was made with
    read = reads["native"] | reads["copies"]
    whole = read and (parameters <= read or turning)

    attending = "attention" in kinds and role == "in"
    off = _cache_errors(lab, bad) if attending else {}
    exact = rounding([bad.trace.facts["dtype"]])
    # whether the cache held the rows of a sound run in the first wrong feed; without those that are near the right ones
    cached = {kind: error <= exact for kind, error in off.items() if error <= exact or error > LARGE}
    nearly = {kind: error for kind, error in off.items() if kind not in cached}
    values = cached.get("values")
    # a few channels of keys are large: a coarse type may put them further off than the values
    wrong = False in cached.values() and not values and not ("keys" in cached and "values" in nearly)

    alone = [outcome for outcome in outcomes.values() if outcome.setup.beside == "nobody"]
    right_alone, decoys_differ = all(outcome.clean for outcome in alone), False
    if repeats and {"S2", "S5"} <= outcomes.keys():
        a, b = (outcomes[setup].wrong["error"].to_numpy() for setup in ("S2", "S5"))
        decoys_differ = len(a) != len(b) or not np.allclose(a, b, rtol=1e-3)
    fed = (module, role) == ("", "in") and name in FED
    handed = role == "in" and place and "position" in name
    holds = {
        "wrong alone": not right_alone,
        "right alone": alone and right_alone,
        "decoys differ": decoys_differ,
        "wrong at once": alone and all((outcome.wrong["feed"] == 0).any() for outcome in alone),
        "one token": first.n_tokens == 1,
        "some tokens": share < 0.9,
        "one factor": factor is not None,
        "scaled": factor is not None and not turning,  # longer cosines and sines are of the angles that were meant
        "computed": (factor is None) != turning,  # other angles are POSITION's, longer ones are no scale of weights
        "foreign read": reads["foreign"],
        "changed read": reads["changed"],
        "strange read": reads["strange"],
        "wrong read": astray,
        "right read": whole and not astray,
        # a kernel that torch is not shown read the parameters
        "read unseen": parameters and not (
            parameters & reads["native"] or reads["copies"] or reads["foreign"] or reads["strange"]
        ),
        "parameters": parameters or any(reads.values()),
        "turning": turning,
        "attending": attending,
        "routing": "router" in kinds,
        "head": "head" in kinds,
        "fed": fed,
        "handed": handed,
        "given wrong": fed or handed,
        "slots right": cached and all(cached.values()),
        "slots wrong": wrong,
        "near": nearly,
        "values right": values,
        "values wrong": values is False,
    }  # fmt: skip
    facts = {f"{setup} {'right' if outcome.clean else 'wrong'}" for setup, outcome in outcomes.items()}
    facts |= {fact for fact, value in holds.items() if value}
    words = {
        "module": name_module(first), "at": place, "name": name, "position": first.first_token, "factor": factor,
        "share": share, "foreign_reads": _listed(reads["foreign"]), "changes": _listed(reads["changed"]),
        "copied": f"; of {_listed(reads['copies'])} it read copies" if reads["copies"] else "",
        "others_cached": " and ".join(kind for kind, same in cached.items() if not same),
        "nearly": " and ".join(nearly), "nearly_off": max(nearly.values(), default=0.0),
    }  # fmt: skip
    return facts, words


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


def _reads(bad: Outcome, meant: Mapping[str, str], module: str) -> dict[str, set[str]]:
    """The parameters that operations of a module read, by whose they are; `meant` are digests by path.

    "native": the draft's, by whatever path (a tied head is read as the embedding), "changed" those of them with other
    content than in the pristine copy; "foreign": other models', as owner:path. Of parameters that no known model has
    "copies" names those of the draft's whose content it is; "strange" are the others.
    """
    params, reads = bad.trace.params, defaultdict(set)
    for read in params[params["module"] == module].itertuples():
        path, same = read.owner_path, {name for name, content in meant.items() if content and content == read.digest}
        if read.owner == OWN:
            reads["native"].update({path, *same})
            if meant.get(path, read.digest) != read.digest:
                reads["changed"].add(path)
        elif read.owner != UNKNOWN:
            reads["foreign"].add(f"{read.owner}:{path}")
        elif same:
            reads["copies"].update(same)
        else:
            reads["strange"].add(path)
    return reads


def _cache_errors(lab: Lab, bad: Outcome) -> dict[str, float]:
    """The largest relative error of a cached row of keys and of values, in the first wrong feed; inf for another number
    of rows. Only what both caches show; keys that are all turned by one number of positions more are left out."""
    errors = {}
    for kind in ("values",) if bad.offset else ("keys", "values"):
        where = {"module": bad.first.module, "role": "state", "name": kind, "step": bad.wrong.loc[0, "feed"]}
        cached = []
        for trace in (lab.sound[bad.setup.in_blocks].trace, bad.trace):
            cached += [np.moveaxis(trace.arrays[digest], -2, 0) for digest in trace.rows(**where)["digest"][-1:]]
        if len(cached) == 2 and cached[0].shape[1:] == cached[1].shape[1:]:
            alike = len(cached[0]) == len(cached[1])
            errors[kind] = float(relative_l2(*cached).max(initial=0.0)) if alike else np.inf
    return errors


CLASSES = read_toml(Path(__file__).with_suffix(".toml"))
"""By name what `causes.toml` says of each class of causes; its head says what the fields mean."""


class Sign(NamedTuple):
    """A rule that applied, in words."""

    weight: float
    says: str


class Cause(NamedTuple):
    """One class of causes: `signs` are all that applied."""

    name: str
    score: float
    signs: Sequence[Sign]
    issues: Sequence[str]
    next_experiment: str


def rank(facts: set[str], words: Mapping[str, Any]) -> list[Cause]:
    """All classes, the likeliest first."""
    total, causes = sum(kind["cases"] for kind in CLASSES.values()), []
    for name, kind in CLASSES.items():
        signs = [
            Sign(weight, sentence.format_map(words))
            for weight, when, sentence in kind["rules"]
            if all((fact.removeprefix("not ") in facts) != fact.startswith("not ") for fact in when.split(", "))
        ]
        score = math.log(kind["cases"] / total) + sum(sign.weight for sign in signs)
        causes.append(Cause(name, score, signs, kind["issues"], kind["next_experiment"]))
    return sorted(causes, key=lambda cause: -cause.score)


def read_rules() -> pd.DataFrame:
    """The rules: cause, weight and sentence; in braces are words of `gather`."""
    rules = [(name, weight, sentence) for name, kind in CLASSES.items() for weight, _, sentence in kind["rules"]]
    return pd.DataFrame(rules, columns=["cause", "weight", "sentence"])
