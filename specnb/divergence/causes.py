"""Causes, ranked: what speaks for each of them, what against, where it happened before, what to try next.

Each cause has rules, and each rule that applies says so in a sentence and gives its weight, a log-likelihood ratio by
judgement: 1 a hint, 3 strong, 5 nearly proof. Priors are the frequencies of some 30 upstream cases, a convenience
sample. The table of all that applied comes with the ranking, so that nobody has to trust the sum.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence import ladder
from specnb.divergence.at_use import UNKNOWN
from specnb.divergence.capture import capture
from specnb.divergence.ladder import named
from specnb.divergence.local import WHICH
from specnb.divergence.parts import Parts, find, output_head
from specnb.divergence.script import Script, run
from specnb.divergence.setups import OWN, Lab, Outcome
from specnb.divergence.trace import Trace, canonical
from specnb.errors import InputError

ONE_FACTOR = 0.2
"""How far off tokens of one factor may be (`ladder.one_factor`): in a replay gains are exact, and no error travels."""
CACHED = ("keys", "values")


@dataclass(frozen=True)
class Case:
    """Outcomes by set-up, in the order they were run; `meant` are digests of the draft's parameters by their path, and
    `holders` the modules that hold them, as traces call them.

    `sound` is the pristine copy's run up to the first wrong feed, with its cache, where attention is wrong first.
    `repeats`: what was run again without hooks gave the same bits.
    """

    outcomes: Mapping[str, Outcome]
    meant: Mapping[str, str]
    holders: Mapping[str, str]
    parts: Parts
    head: str
    n_tokens: int
    sound: Trace | None = None
    repeats: bool = True

    @classmethod
    def of(cls, lab: Lab, outcomes: Mapping[str, Outcome]) -> "Case":
        """The outcomes of a lab's set-ups."""
        names = canonical(path for path, _ in lab.reference.named_modules())
        holders = {path: names[path.rpartition(".")[0]] for path in lab.meant}
        case = cls(dict(outcomes), lab.meant, holders, find(lab.draft), _head_of(lab), len(lab.script.text))
        return replace(case, sound=_sound(lab, case)) if case.bad is not None and case.attending else case

    @cached_property
    def bad(self) -> Outcome | None:
        """The first set-up that is wrong; None where all are clean."""
        return next((outcome for outcome in self.outcomes.values() if not outcome.clean), None)

    def wrong(self, name: str) -> bool | None:
        """Whether this set-up is wrong; None where it was not run."""
        return not self.outcomes[name].clean if name in self.outcomes else None

    @cached_property
    def alone(self) -> bool | None:
        """Whether it is wrong without a neighbour; None where that was not run."""
        alone = [item for item in self.outcomes.values() if item.setup.beside == "nobody"]
        return any(not item.clean for item in alone) if alone else None

    @cached_property
    def first(self) -> pd.Series:
        """The row that is wrong first in time: its `module` is the first divergence."""
        return self.bad.wrong.iloc[0]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All wrong rows of that tensor."""
        wrong, which = self.bad.wrong, list(WHICH)
        return wrong[(wrong[which] == self.first[which]).all(axis=1)]

    @cached_property
    def others(self) -> list[str]:
        """Modules that are wrong by themselves besides the first, in order of time."""
        return [name for name in self.bad.wrong["module"].unique() if name != self.first["module"]]

    @cached_property
    def share(self) -> float:
        """Share of the text's tokens at which the first tensor is wrong."""
        return self.rows["position"].nunique() / self.n_tokens

    @cached_property
    def at_once(self) -> bool:
        """Whether all that is wrong alone begins in the first feed: before anything was cached, or taken back."""
        alone = [item for item in self.outcomes.values() if item.setup.beside == "nobody"]
        return bool(alone) and all(not item.clean and item.wrong["feed"].iloc[0] == 0 for item in alone)

    @cached_property
    def factor(self) -> float | None:
        """The one factor by which the first tensor is too large at all of its tokens; None where there is none."""
        return ladder.one_factor(self.rows["gain"].to_numpy(), self.rows["error"].to_numpy(), limit=ONE_FACTOR)

    @cached_property
    def parameters(self) -> set[str]:
        """Paths of the parameters that the first module holds, itself or in modules of which nothing was compared.

        The model itself holds all modules: of those inside it the ones that ran.
        """
        module, seen = self.first["module"], set(self.bad.errors["at"])
        inner = f"{module}." if module else ""
        known = {*self.holders.values()} if module else {*self.bad.trace.tensors["module"]}
        unseen = {item for item in known - seen if item.startswith(inner)}
        return {path for path, holder in self.holders.items() if holder == module or holder in unseen}

    @cached_property
    def reads(self) -> pd.DataFrame:
        """The parameters that operations of the first module read."""
        params = self.bad.trace.params
        return params[params["module"] == self.first["module"]].drop_duplicates(["owner", "owner_path", "digest"])

    @cached_property
    def foreign(self) -> list[str]:
        """Of these, the parameters of other models, as owner:path."""
        foreign_reads = self.reads[~self.reads["owner"].isin((OWN, UNKNOWN))]
        return sorted({f"{row.owner}:{row.owner_path}" for row in foreign_reads.itertuples()})

    @cached_property
    def changed(self) -> list[str]:
        """Of these, the draft's own whose content is not that of the pristine copy."""
        read = self.reads[self.reads["owner"] == OWN]
        pairs = zip(read["owner_path"], read["digest"], strict=True)
        return sorted({path for path, digest in pairs if self.meant.get(path, digest) != digest})

    @cached_property
    def copies(self) -> list[str]:
        """Of the draft's parameters, those whose content was read from parameters that no known model has."""
        return sorted(self._read_of(UNKNOWN))

    @cached_property
    def tied(self) -> set[str]:
        """Of the draft's parameters, those whose content was read of its own, by whatever path: a tied head is read as
        the embedding."""
        return self._read_of(OWN)

    @cached_property
    def strange(self) -> bool:
        """Whether parameters that no known model has were read, and are not seen to be copies of the draft's own."""
        return bool(self._digests(UNKNOWN) - {*self.meant.values()})

    def _digests(self, owner: str) -> set[str]:
        """Digests of the parameters of an owner that were read; "" of those that have none."""
        return {*self.reads.loc[self.reads["owner"] == owner, "digest"]}

    def _read_of(self, owner: str) -> set[str]:
        """Paths of the draft's parameters whose content was read from parameters of an owner."""
        read = self._digests(owner)
        return {path for path, digest in self.meant.items() if digest and digest in read}

    @cached_property
    def unseen(self) -> bool:
        """Whether the first module has parameters and was seen to read none: a kernel that torch is not shown did."""
        known = self.parameters.isdisjoint({*self.reads["owner_path"], *self.tied}) and not self.copies
        return bool(self.parameters) and known and not self.foreign and not self.strange

    @cached_property
    def bare(self) -> bool:
        """Whether the first module has no parameters, and read none."""
        return not self.parameters and self.reads.empty

    @cached_property
    def unchanged(self) -> bool:
        """Whether the first module read all its parameters, and nothing that is not as in the pristine copy.

        Of the buffers of a rotary embedding one is read, the other is what it was made with.
        """
        read = {*self.reads.loc[self.reads["owner"] == OWN, "owner_path"], *self.copies, *self.tied}
        return (
            bool(read)
            and (self.parameters <= read or self.turning)
            and not (self.changed or self.foreign or self.strange)
        )

    @cached_property
    def turning(self) -> bool:
        """Whether a rotary embedding is wrong."""
        return self.first["module"] in dict(self.parts.rotaries)

    @cached_property
    def attending(self) -> bool:
        """Whether attention is wrong between its projections."""
        return self.first["module"] in dict(self.parts.attentions) and self.first["role"] == "in"

    @cached_property
    def cached(self) -> dict[str, bool]:
        """Of "keys" and "values" whether the cache held the rows of a sound run in the first wrong feed.

        Only what both runs' caches show: empty where attention is not what is wrong first. Keys that are all turned by
        one number of positions more are no others. Rows that are near the right ones (`nearly_cached`) are neither.
        """
        exact = ladder.rounding([str(self.bad.trace.facts.get("dtype"))])
        return {name: off <= exact for name, off in self._cache_errors.items() if off <= exact or off > ladder.LARGE}

    @cached_property
    def nearly_cached(self) -> dict[str, float]:
        """The largest relative error of those whose rows are the right ones, but for more than rounding to the draft's
        type: of a quantised cache, or after a sound kernel of another order."""
        return {name: off for name, off in self._cache_errors.items() if name not in self.cached}

    @cached_property
    def _cache_errors(self) -> dict[str, float]:
        if self.sound is None:
            return {}
        names = CACHED[1:] if self.bad.offset else CACHED
        errors = {name: self._cache_error(name) for name in names}
        return {name: error for name, error in errors.items() if error is not None}

    def _cache_error(self, name: str) -> float | None:
        """The largest relative error of a cached row; inf for another number of rows, None where nothing was seen."""
        where = {"module": self.first["module"], "role": "state", "name": name, "step": int(self.first["feed"])}
        rows, sound = (_cached_rows(trace.rows(**where), trace) for trace in (self.bad.trace, self.sound))
        if rows is None or sound is None or rows.shape[1:] != sound.shape[1:]:
            return None
        if len(rows) != len(sound) or not np.isfinite(rows).all():
            return np.inf
        off, size = (np.linalg.norm(values, axis=1) for values in (rows - sound, sound))
        return float(np.max(np.divide(off, size, out=np.where(off > 0, np.inf, 0.0), where=size > 0), initial=0.0))

    def error_like(self, setup: str, other: str) -> bool | None:
        """Whether two set-ups are wrong by the same amounts; None where one was not run, or none repeats."""
        if not self.repeats or setup not in self.outcomes or other not in self.outcomes:
            return None
        a, b = (self.outcomes[name].wrong["error"].to_numpy() for name in (setup, other))
        return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-3))


def _head_of(lab: Lab) -> str:
    try:
        return output_head(lab.draft)[0]
    except InputError:  # a drafter that has no head of its own
        return ""


def _sound(lab: Lab, case: Case) -> Trace:
    """The pristine copy, fed as the first wrong set-up was up to the feed that is wrong."""
    feeds = case.bad.script.feeds[: int(case.first["feed"]) + 1]
    only = f"^{re.escape(case.first['module'])}$"
    with capture(lab.reference, tag=OWN, modules=only, full="", at_use=False) as builder:
        run(lab.reference, Script(feeds))
    return builder.trace()


def _cached_rows(held: pd.DataFrame, trace: Trace) -> np.ndarray | None:
    """What a cache held, `(tokens, features)`, by its rows in the trace; None where that was not seen."""
    full = None if held.empty else trace.array(held["row"].iloc[-1], "full")
    if full is None or held["token_axis"].iloc[-1] < 0:
        return None
    rows = np.moveaxis(full, held["token_axis"].iloc[-1], 0)
    return rows.reshape(len(rows), -1)


FED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "attention_mask")
"""What a model is fed, as transformers name it."""


class Sign(NamedTuple):
    """A sentence that speaks for a cause by `weight`, or against it below 0."""

    weight: float
    says: str

    def __str__(self) -> str:
        return f"{self.says} ({self.weight:+g})"


@dataclass(frozen=True)
class Cause:
    """One class of causes: `signs` are all that applied."""

    name: str
    score: float
    signs: tuple[Sign, ...]
    issues: tuple[str, ...]
    next_experiment: str

    @property
    def for_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight > 0]

    @property
    def against_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight < 0]


def _identity(case: Case) -> Iterator[Sign]:
    if case.foreign:
        yield Sign(6, f"operations of {case.first['module']} read {', '.join(case.foreign[:3])}")
    elif case.strange:
        yield Sign(0.5, f"operations of {case.first['module']} read parameters that no known model has: whose, is open")
    else:
        yield Sign(-3, "no operation of the first module was seen to read another model's parameters")
    if case.wrong("S1") is False and case.wrong("S2"):
        yield Sign(3, "beside itself it is right, beside a decoy of the same shapes it is not: values of another model")
    if case.error_like("S2", "S5") is False:
        yield Sign(1, "another decoy makes other errors: its values are what comes in")
    if case.wrong("S4"):
        yield Sign(1, "a target that never runs is enough: it was made at loading")
    if case.alone:
        yield Sign(-3, "no other model is needed: it is wrong alone, too")


def _weights(case: Case) -> Iterator[Sign]:
    if case.bare:
        yield Sign(-4, f"{case.first['module'] or 'the model'} has no parameters")
        return
    if case.changed:  # buffers of angles are made, and in no checkpoint
        yield Sign(1 if case.turning else 5, f"{', '.join(case.changed[:3])} as used is not what the pristine copy has")
    if case.strange:
        yield Sign(1, f"{case.first['module']} read parameters that no known model has, and not the draft's content: "
                      f"repacked ones, or wrong ones{_copied(case)}")  # fmt: skip
    if case.alone:
        yield Sign(2, "it is wrong alone, too")
    if case.factor is not None and not case.turning:
        yield Sign(3, f"the output is {case.factor:.4g} times what it should be, at every token alike: a scale")
    elif case.unchanged:
        yield Sign(
            -3, f"all parameters of {case.first['module']} were read as the pristine copy has them{_copied(case)}"
        )
    if case.alone is False and not case.changed:
        yield Sign(-4, "alone, with the same weights, it is right")


def _copied(case: Case) -> str:
    return f"; of {', '.join(case.copies[:3])} it read copies" if case.copies else ""


def _computation(case: Case) -> Iterator[Sign]:
    if _is_fed(case) or _is_handed(case):
        yield Sign(-4, "what it was given is wrong, not what it made of it")
        return
    if case.alone:
        yield Sign(2, "it is wrong alone, too")
    if case.alone is False:
        yield Sign(-4, "alone, by the same code, it is right")
    if case.bare:
        yield Sign(3, "it has no parameters: wrong is what it does")
    elif case.unchanged and (case.factor is not None or not case.turning):  # other angles are POSITION's
        # a scale of weights need not be a parameter; that of cosines and sines is none
        weight = 3 if case.factor is None or case.turning else 1
        yield Sign(weight, "its parameters were read as they should be, its output is another")
    if case.attending and case.cached.get("values"):
        yield Sign(2, "attention had the right values in its cache: mask, scale, angles of keys, or the kernel")
    if case.attending and case.cached.get("values") is False:
        yield Sign(-3, "attention had other values in its cache")


def _head(case: Case) -> Iterator[Sign]:
    if case.first["module"] != case.head:
        yield Sign(-4, f"the first module is {named(case.first)}, not the output head")
        return
    yield Sign(9, f"{case.head} is the output head, and all before it is right")
    if case.alone is False:
        yield Sign(-8, "alone, with the same head, it is right")
    elif case.foreign:
        yield Sign(-8, "the head that ran is another model's")
    elif case.unchanged and case.factor is None:
        yield Sign(-6, "the head was read as the pristine copy has it")


def _routing(case: Case) -> Iterator[Sign]:
    if case.first["module"] not in dict(case.parts.routers):
        return
    if case.changed or case.foreign or case.strange:
        yield Sign(-2, f"the weights that {case.first['module']} chose by are not its own")
    else:
        yield Sign(10, f"{case.first['module']} routes otherwise than its weights do for the same states")


def _kv_slot(case: Case) -> Iterator[Sign]:
    if not case.attending:
        return
    yield Sign(3, "attention is wrong between its projections, which are right: keys or values, mask or scale")
    if case.cached and all(case.cached.values()):
        yield Sign(-5, "the keys and values in its cache are those of a sound run, position by position")
    elif case.cached.get("values"):
        yield Sign(-3, "the values in its cache are those of a sound run: only keys are others")
    # a few channels of keys are large: a coarse type may put them further off than the values
    elif False in case.cached.values() and not ("keys" in case.cached and "values" in case.nearly_cached):
        other = " and ".join(name for name, same in case.cached.items() if not same)
        yield Sign(4, f"the {other} in its cache are not those of a sound run")
    elif case.nearly_cached:
        error = max(case.nearly_cached.values())
        yield Sign(2, f"the {' and '.join(case.nearly_cached)} in its cache are up to {error:.1g} off those of a sound "
                      "run: a quantised cache, or rounding on the way")  # fmt: skip
    if case.share < 0.9:
        yield Sign(1, f"only {case.share:.0%} of the tokens are")
    if case.wrong("S0") and case.wrong("S0w") is False:
        yield Sign(2, "fed in blocks, with nothing taken back, it is right: what is left of rejected tokens")
    if case.at_once and not case.nearly_cached:
        yield Sign(-2, "it is wrong in the first prefill, with nothing cached or taken back yet")


def _state(case: Case) -> Iterator[Sign]:
    if case.alone is False and case.wrong("S1"):
        yield Sign(3, "any neighbour makes it wrong, a copy with the same weights, too: shared buffers or memory")
    if case.alone is False and not (case.foreign or case.strange or case.unseen or case.changed):
        yield Sign(2, "no foreign parameter was read as an operand")
    if case.wrong("S4") is False and case.wrong("S3"):
        yield Sign(1, "a target that never runs does no harm: made when it runs")
    if case.wrong("S6") is False and case.wrong("S3"):
        yield Sign(1, "where the neighbour first runs behind the prompt it is right: what it left before is read")
    if case.error_like("S2", "S5") is False:
        yield Sign(1, "another decoy makes other errors: what is read comes from the neighbour")
    if case.rows["position"].nunique() == 1:
        yield Sign(1, f"one token only, at position {int(case.first['position'])}: a row that was not written")


def _position(case: Case) -> Iterator[Sign]:
    if _is_handed(case):
        yield Sign(6, f"{case.first['at']} is handed other {case.first['name']} than it should be")
    elif case.turning and case.factor is None:  # longer cosines and sines are of the angles that were meant
        yield Sign(6, f"{case.first['module']} turns from position {int(case.first['position'])} on by other angles")


def _input(case: Case) -> Iterator[Sign]:
    if _is_fed(case):
        yield Sign(6, f"the model was given other {case.first['name']} than it should, from position "
                      f"{int(case.first['position'])} on")  # fmt: skip


def _is_fed(case: Case) -> bool:
    """Whether what the model was given by its caller is what is wrong first."""
    return case.first["module"] == "" and case.first["role"] == "in" and case.first["name"] in FED


def _is_handed(case: Case) -> bool:
    """Whether other positions than they should be are what is wrong first, handed on inside the model."""
    return case.first["role"] == "in" and "position" in case.first["name"] and case.first["at"] != ""


class _Class(NamedTuple):
    cases: int
    rules: Callable[[Case], Iterator[Sign]]
    issues: tuple[str, ...]
    next_experiment: str


CLASSES: Mapping[str, _Class] = MappingProxyType(
    {
        "IDENTITY": _Class(
            3, _identity, ("vLLM #33497", "vLLM #32805", "vLLM #33624", "vLLM #48622", "ik_llama.cpp #645"),
            "resolve modules by name instead of by order (vLLM: fast_moe_cold_start=False) and run S2 again",
        ),
        "WEIGHTS": _Class(
            5, _weights, ("SGLang #39087", "SGLang #22823", "speculators #1131", "NeMo Automodel #2447"),
            "compare the loaded parameters with the checkpoint's, scales included (preflight: load_report)",
        ),
        "COMPUTATION": _Class(
            4, _computation, ("llama.cpp #29168", "vLLM #32009", "vLLM #11672", "vllm-ascend #9983"),
            "compare this module's kernel and settings (activation, eps, scale, mask) with the reference code's, and "
            "run it by that code (eager)",
        ),
        "HEAD": _Class(
            3, _head, ("vLLM #46435", "SGLang #27829"),
            "compare the head with the checkpoint's, or with the embedding it is tied to",
        ),
        "ROUTING": _Class(
            2, _routing, ("vLLM #48622", "SGLang #26980"),
            "compare router logits and chosen experts with those of S0",
        ),
        "KV_SLOT": _Class(
            7, _kv_slot, ("vLLM #50169", "vLLM #26191", "mlx-lm #1914", "vLLM #9730"),
            "compare keys and values by position with a fresh prefill's, and the cache's length after each round",
        ),
        "STATE": _Class(
            6, _state, ("vLLM #56734", "triton #10772", "vLLM #47303"),
            "give the two models buffers of their own, poison free memory, and run S3 again",
        ),
        "POSITION": _Class(
            2, _position, ("vLLM #58080", "vLLM #57941"),
            "compare inv_freq and RoPE overrides of the two code paths",
        ),
        "INPUT": _Class(
            6, _input, ("vLLM #50170", "SGLang #32226", "vLLM #14647", "exo #1188"),
            "print what is fed, and the draft's maximal length",
        ),
    }
)  # fmt: skip
"""Classes of causes: how many of some 30 upstream cases were such (a few count twice), rules, threads, a next step."""


def rank(case: Case) -> list[Cause]:
    """All classes, the likeliest first; empty where no set-up is wrong."""
    if case.bad is None:
        return []
    total = sum(kind.cases for kind in CLASSES.values())
    causes = []
    for name, kind in CLASSES.items():
        signs = tuple(kind.rules(case))
        score = math.log(kind.cases / total) + sum(sign.weight for sign in signs)
        causes.append(Cause(name, score, signs, kind.issues, kind.next_experiment))
    return sorted(causes, key=lambda cause: -cause.score)
