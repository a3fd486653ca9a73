"""Causes, ranked by one table of rules: what speaks for each, what against, where it happened before, what to try next.

A rule that applies says so in a sentence and gives its weight, a log-likelihood ratio by judgement: 1 a hint, 3 strong,
5 nearly proof. Priors are the frequencies of some 30 upstream cases, a convenience sample. All rules that applied come
with the ranking, so that nobody has to trust the sum.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.capture import capture
from specnb.divergence.capture.at_use import UNKNOWN
from specnb.divergence.errors import TENSOR, named
from specnb.divergence.parts import Parts, find, output_head
from specnb.divergence.script import Script, run
from specnb.divergence.setups import OWN, Lab, Outcome
from specnb.divergence.tolerances import LARGE, ONE_FACTOR, one_factor, rounding
from specnb.divergence.trace import Trace, canonical
from specnb.errors import InputError

FED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "attention_mask")
"""What a model is fed, as transformers name it."""


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
        head = ""  # of a drafter that has none of its own
        with contextlib.suppress(InputError):
            head, _ = output_head(lab.draft)
        case = cls(dict(outcomes), lab.meant, holders, find(lab.draft), head, len(lab.script.text))
        return replace(case, sound=_sound(lab, case)) if case.bad is not None and case.attending else case

    @cached_property
    def bad(self) -> Outcome | None:
        """The first set-up that is wrong; None where all are clean."""
        return next((outcome for outcome in self.outcomes.values() if not outcome.clean), None)

    def wrong(self, name: str) -> bool | None:
        """Whether this set-up is wrong; None where it was not run."""
        return not self.outcomes[name].clean if name in self.outcomes else None

    by_itself = cached_property(lambda c: [item for item in c.outcomes.values() if item.setup.beside == "nobody"])
    """The outcomes of the set-ups without a neighbour."""
    alone = cached_property(lambda c: any(not item.clean for item in c.by_itself) if c.by_itself else None)
    """Whether it is wrong without a neighbour; None where that was not run."""
    first = cached_property(lambda c: c.bad.wrong.iloc[0])
    """The row that is wrong first in time: its `module` is the first divergence."""

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All wrong rows of that tensor."""
        wrong, which = self.bad.wrong, list(TENSOR)
        return wrong[(wrong[which] == self.first[which]).all(axis=1)]

    share = cached_property(lambda c: c.rows["position"].nunique() / c.n_tokens)
    """Share of the text's tokens at which the first tensor is wrong."""

    @cached_property
    def at_once(self) -> bool:
        """Whether all that is wrong alone begins in the first feed: before anything was cached, or taken back."""
        wrong_at_once = [not outcome.clean and outcome.wrong["feed"].iloc[0] == 0 for outcome in self.by_itself]
        return bool(wrong_at_once) and all(wrong_at_once)

    @cached_property
    def factor(self) -> float | None:
        """The one factor by which the first tensor is too large at all of its tokens; None where there is none."""
        return one_factor(self.rows["gain"].to_numpy(), self.rows["error"].to_numpy(), limit=ONE_FACTOR)

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
    def reads(self) -> Reads:
        """The parameters that operations of the first module read, by whose they are."""
        params, reads = self.bad.trace.params, Reads(set(), set(), set(), set(), set())
        read = params.loc[params["module"] == self.first["module"], ["owner", "owner_path", "digest"]]
        for owner, path, digest in read.drop_duplicates().itertuples(index=False):
            same = {name for name, known in self.meant.items() if known and known == digest}
            if owner == OWN:
                reads.native.update({path, *same})
                reads.changed.update({path} if self.meant.get(path, digest) != digest else ())
            elif owner != UNKNOWN:
                reads.foreign.add(f"{owner}:{path}")
            elif same:
                reads.copies.update(same)
            else:
                reads.strange.add(path)
        return reads

    @cached_property
    def unseen(self) -> bool:
        """Whether the first module has parameters and was seen to read none: a kernel that torch is not shown did."""
        reads = self.reads
        known = self.parameters & reads.native or reads.copies or reads.foreign or reads.strange
        return bool(self.parameters) and not known

    bare = cached_property(lambda c: not c.parameters and not any(c.reads))
    """Whether the first module has no parameters, and read none."""

    @cached_property
    def unchanged(self) -> bool:
        """Whether the first module read all its parameters, and nothing that is not as in the pristine copy.

        Of the buffers of a rotary embedding one is read, the other is what it was made with.
        """
        reads = self.reads
        read = reads.native | reads.copies
        whole = bool(read) and (self.parameters <= read or self.turning)
        return whole and not (reads.changed or reads.foreign or reads.strange)

    turning = cached_property(lambda c: c.first["module"] in dict(c.parts.rotaries))
    """Whether a rotary embedding is wrong."""
    scaled = cached_property(lambda c: c.factor is not None and not c.turning)
    """Whether the output is one factor too large; longer cosines and sines are of the angles that were meant."""
    attending = cached_property(lambda c: c.first["module"] in dict(c.parts.attentions) and c.first["role"] == "in")
    """Whether attention is wrong between its projections."""
    routing = cached_property(lambda c: c.first["module"] in dict(c.parts.routers))
    """Whether a router is wrong."""
    at_head = cached_property(lambda c: c.first["module"] == c.head)
    """Whether the output head is wrong."""
    fed = cached_property(lambda c: (c.first["module"], c.first["role"]) == ("", "in") and c.first["name"] in FED)
    """Whether what the model was given by its caller is what is wrong first."""
    handed = cached_property(lambda c: c.first["role"] == "in" and c.first["at"] and "position" in c.first["name"])
    """Whether positions, handed on inside the model, are what is wrong first."""
    misfed = cached_property(lambda c: c.fed or c.handed)
    """Whether what the first module was given is wrong, not what it made of it."""

    @cached_property
    def cached(self) -> dict[str, bool]:
        """Of "keys" and "values" whether the cache held the rows of a sound run in the first wrong feed.

        Only what both runs' caches show: empty where attention is not what is wrong first. Keys that are all turned by
        one number of positions more are no others. Rows that are near the right ones (`nearly_cached`) are neither.
        """
        exact = rounding([str(self.bad.trace.facts.get("dtype"))])
        return {name: off <= exact for name, off in self._cache_errors.items() if off <= exact or off > LARGE}

    @cached_property
    def nearly_cached(self) -> dict[str, float]:
        """The largest relative error of those whose rows are the right ones, but for more than rounding to the draft's
        type: of a quantised cache, or after a sound kernel of another order."""
        return {name: off for name, off in self._cache_errors.items() if name not in self.cached}

    @cached_property
    def slots(self) -> str:
        """What attention had in its cache: "right", "values right", "wrong" or "nearly right"; "" where not seen."""
        if self.cached and all(self.cached.values()):
            return "right"
        if self.cached.get("values"):
            return "values right"
        # a few channels of keys are large: a coarse type may put them further off than the values
        if False in self.cached.values() and not ("keys" in self.cached and "values" in self.nearly_cached):
            return "wrong"
        return "nearly right" if self.nearly_cached else ""

    @cached_property
    def words(self) -> dict[str, Any]:
        """What the sentences of rules name."""
        first, listed = self.first, lambda names: ", ".join(sorted(names)[:3])
        return {
            "module": named(first), "at": first["at"], "name": first["name"], "position": int(first["position"]),
            "factor": self.factor, "share": self.share, "foreign_reads": listed(self.reads.foreign),
            "changes": listed(self.reads.changed),
            "copied": f"; of {listed(self.reads.copies)} it read copies" if self.reads.copies else "",
            "others_cached": " and ".join(name for name, same in self.cached.items() if not same),
            "nearly": " and ".join(self.nearly_cached), "nearly_off": max(self.nearly_cached.values(), default=0.0),
        }  # fmt: skip

    @cached_property
    def _cache_errors(self) -> dict[str, float]:
        names = () if self.sound is None else ("values",) if self.bad.offset else ("keys", "values")
        return {name: error for name in names if (error := self._cache_error(name)) is not None}

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


def _sound(lab: Lab, case: Case) -> Trace:
    """The pristine copy, fed as the first wrong set-up was up to the feed that is wrong."""
    feeds = case.bad.script.feeds[: int(case.first["feed"]) + 1]
    only = f"^{re.escape(case.first['module'])}$"
    with capture(lab.reference, tag=OWN, modules=only, full="", at_use=False, sketches=False) as builder:
        run(lab.reference, Script(feeds))
    return builder.trace()


def _cached_rows(held: pd.DataFrame, trace: Trace) -> np.ndarray | None:
    """What a cache held, `(tokens, features)`, by its rows in the trace; None where that was not seen."""
    full = None if held.empty else trace.array(held["row"].iloc[-1], "full")
    if full is None or held["token_axis"].iloc[-1] < 0:
        return None
    rows = np.moveaxis(full, held["token_axis"].iloc[-1], 0)
    return rows.reshape(len(rows), -1)


class Rule(NamedTuple):
    """A sentence that speaks for `cause` by `weight`, or against it below 0; in braces are `Case.words`."""

    cause: str
    weight: float
    applies: Callable[[Case], Any]
    sentence: str


RULES: tuple[Rule, ...] = (
    Rule("IDENTITY", 6, lambda c: c.reads.foreign, "operations of {module} read {foreign_reads}"),
    Rule("IDENTITY", 0.5, lambda c: c.reads.strange and not c.reads.foreign,
         "operations of {module} read parameters that no known model has: whose, is open"),
    Rule("IDENTITY", -3, lambda c: not c.reads.strange and not c.reads.foreign,
         "no operation of the first module was seen to read another model's parameters"),
    Rule("IDENTITY", 3, lambda c: c.wrong("S1") is False and c.wrong("S2"),
         "beside itself it is right, beside a decoy of the same shapes it is not: values of another model"),
    Rule("IDENTITY", 1, lambda c: c.error_like("S2", "S5") is False,
         "another decoy makes other errors: its values are what comes in"),
    Rule("IDENTITY", 1, lambda c: c.wrong("S4"), "a target that never runs is enough: it was made at loading"),
    Rule("IDENTITY", -3, lambda c: c.alone, "no other model is needed: it is wrong alone, too"),

    Rule("WEIGHTS", -4, lambda c: c.bare, "what is wrong has no parameters"),
    Rule("WEIGHTS", 5, lambda c: c.reads.changed and not c.turning,
         "{changes} as used is not what the pristine copy has"),
    # buffers of angles are made, and in no checkpoint
    Rule("WEIGHTS", 1, lambda c: c.reads.changed and c.turning, "{changes} as used is not what the pristine copy has"),
    Rule("WEIGHTS", 1, lambda c: c.reads.strange,
         "{module} read parameters that no known model has, and not the draft's content: repacked ones, or wrong "
         "ones{copied}"),
    Rule("WEIGHTS", 2, lambda c: c.alone and not c.bare, "it is wrong alone, too"),
    Rule("WEIGHTS", 3, lambda c: c.scaled and not c.bare,
         "the output is {factor:.4g} times what it should be, at every token alike: a scale"),
    Rule("WEIGHTS", -3, lambda c: c.unchanged and not c.scaled,
         "all parameters of {module} were read as the pristine copy has them{copied}"),
    Rule("WEIGHTS", -4, lambda c: c.alone is False and not c.reads.changed and not c.bare,
         "alone, with the same weights, it is right"),

    Rule("COMPUTATION", -4, lambda c: c.misfed, "what it was given is wrong, not what it made of it"),
    Rule("COMPUTATION", 2, lambda c: c.alone and not c.misfed, "it is wrong alone, too"),
    Rule("COMPUTATION", -4, lambda c: c.alone is False and not c.misfed, "alone, by the same code, it is right"),
    Rule("COMPUTATION", 3, lambda c: c.bare and not c.misfed, "it has no parameters: wrong is what it does"),
    # other angles are POSITION's, and longer ones are no scale of weights
    Rule("COMPUTATION", 3, lambda c: c.unchanged and (c.factor is None) != c.turning and not c.misfed,
         "its parameters were read as they should be, its output is another"),
    # a scale of weights need not be a parameter
    Rule("COMPUTATION", 1, lambda c: c.unchanged and c.scaled and not c.misfed,
         "its parameters were read as they should be, its output is another"),
    Rule("COMPUTATION", 2, lambda c: c.attending and c.cached.get("values"),
         "attention had the right values in its cache: mask, scale, angles of keys, or the kernel"),
    Rule("COMPUTATION", -3, lambda c: c.attending and c.cached.get("values") is False,
         "attention had other values in its cache"),

    Rule("HEAD", -4, lambda c: not c.at_head, "the first module is {module}, not the output head"),
    Rule("HEAD", 9, lambda c: c.at_head, "{module} is the output head, and all before it is right"),
    Rule("HEAD", -8, lambda c: c.at_head and c.alone is False, "alone, with the same head, it is right"),
    Rule("HEAD", -8, lambda c: c.at_head and c.alone is not False and c.reads.foreign,
         "the head that ran is another model's"),
    Rule("HEAD", -6, lambda c: c.at_head and c.alone is not False and c.unchanged and c.factor is None,
         "the head was read as the pristine copy has it"),

    Rule("ROUTING", -2, lambda c: c.routing and (c.reads.changed or c.reads.foreign or c.reads.strange),
         "the weights that {module} chose by are not its own"),
    Rule("ROUTING", 10, lambda c: c.routing and not (c.reads.changed or c.reads.foreign or c.reads.strange),
         "{module} routes otherwise than its weights do for the same states"),

    Rule("KV_SLOT", 3, lambda c: c.attending,
         "attention is wrong between its projections, which are right: keys or values, mask or scale"),
    Rule("KV_SLOT", -5, lambda c: c.slots == "right",
         "the keys and values in its cache are those of a sound run, position by position"),
    Rule("KV_SLOT", -3, lambda c: c.slots == "values right",
         "the values in its cache are those of a sound run: only keys are others"),
    Rule("KV_SLOT", 4, lambda c: c.slots == "wrong", "the {others_cached} in its cache are not those of a sound run"),
    Rule("KV_SLOT", 2, lambda c: c.slots == "nearly right",
         "the {nearly} in its cache are up to {nearly_off:.1g} off those of a sound run: a quantised cache, or "
         "rounding on the way"),
    Rule("KV_SLOT", 1, lambda c: c.attending and c.share < 0.9, "only {share:.0%} of the tokens are"),
    Rule("KV_SLOT", 2, lambda c: c.attending and c.wrong("S0") and c.wrong("S0w") is False,
         "fed in blocks, with nothing taken back, it is right: what is left of rejected tokens"),
    Rule("KV_SLOT", -2, lambda c: c.attending and c.at_once and not c.nearly_cached,
         "it is wrong in the first prefill, with nothing cached or taken back yet"),

    Rule("STATE", 3, lambda c: c.alone is False and c.wrong("S1"),
         "any neighbour makes it wrong, a copy with the same weights, too: shared buffers or memory"),
    Rule("STATE", 2,
         lambda c: c.alone is False and not (c.reads.foreign or c.reads.strange or c.unseen or c.reads.changed),
         "no foreign parameter was read as an operand"),
    Rule("STATE", 1, lambda c: c.wrong("S4") is False and c.wrong("S3"),
         "a target that never runs does no harm: made when it runs"),
    Rule("STATE", 1, lambda c: c.wrong("S6") is False and c.wrong("S3"),
         "where the neighbour first runs behind the prompt it is right: what it left before is read"),
    Rule("STATE", 1, lambda c: c.error_like("S2", "S5") is False,
         "another decoy makes other errors: what is read comes from the neighbour"),
    Rule("STATE", 1, lambda c: c.rows["position"].nunique() == 1,
         "one token only, at position {position}: a row that was not written"),

    Rule("POSITION", 6, lambda c: c.handed, "{at} is handed other {name} than it should be"),
    Rule("POSITION", 6, lambda c: c.turning and c.factor is None,
         "{module} turns from position {position} on by other angles"),

    Rule("INPUT", 6, lambda c: c.fed, "the model was given other {name} than it should, from position {position} on"),
)  # fmt: skip


class CauseClass(NamedTuple):
    """How many of some 30 upstream `cases` were such (a few count twice), threads, and a next step."""

    cases: int
    issues: tuple[str, ...]
    next_experiment: str


CLASSES: Mapping[str, CauseClass] = MappingProxyType({
    "IDENTITY": CauseClass(3, ("vLLM #33497", "vLLM #32805", "vLLM #33624", "vLLM #48622", "ik_llama.cpp #645"),
        "resolve modules by name instead of by order (vLLM: fast_moe_cold_start=False) and run S2 again"),
    "WEIGHTS": CauseClass(5, ("SGLang #39087", "SGLang #22823", "speculators #1131", "NeMo Automodel #2447"),
        "compare the loaded parameters with the checkpoint's, scales included (preflight: load_report)"),
    "COMPUTATION": CauseClass(4, ("llama.cpp #29168", "vLLM #32009", "vLLM #11672", "vllm-ascend #9983"),
        "compare this module's kernel and settings (activation, eps, scale, mask) with the reference code's, and "
        "run it by that code (eager)"),
    "HEAD": CauseClass(3, ("vLLM #46435", "SGLang #27829"),
        "compare the head with the checkpoint's, or with the embedding it is tied to"),
    "ROUTING": CauseClass(2, ("vLLM #48622", "SGLang #26980"),
        "compare router logits and chosen experts with those of S0"),
    "KV_SLOT": CauseClass(7, ("vLLM #50169", "vLLM #26191", "mlx-lm #1914", "vLLM #9730"),
        "compare keys and values by position with a fresh prefill's, and the cache's length after each round"),
    "STATE": CauseClass(6, ("vLLM #56734", "triton #10772", "vLLM #47303"),
        "give the two models buffers of their own, poison free memory, and run S3 again"),
    "POSITION": CauseClass(2, ("vLLM #58080", "vLLM #57941"),
        "compare inv_freq and RoPE overrides of the two code paths"),
    "INPUT": CauseClass(6, ("vLLM #50170", "SGLang #32226", "vLLM #14647", "exo #1188"),
        "print what is fed, and the draft's maximal length"),
})  # fmt: skip


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
    signs: tuple[Sign, ...]
    issues: tuple[str, ...]
    next_experiment: str

    @property
    def for_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight > 0]

    @property
    def against_it(self) -> list[str]:
        return [str(sign) for sign in self.signs if sign.weight < 0]


def rank(case: Case) -> list[Cause]:
    """All classes, the likeliest first; empty where no set-up is wrong."""
    if case.bad is None:
        return []
    signs: dict[str, list[Sign]] = {name: [] for name in CLASSES}
    for rule in RULES:
        if rule.applies(case):
            signs[rule.cause].append(Sign(rule.weight, rule.sentence.format_map(case.words)))
    total = sum(kind.cases for kind in CLASSES.values())
    causes = [
        Cause(name, math.log(kind.cases / total) + sum(sign.weight for sign in signs[name]), tuple(signs[name]),
              kind.issues, kind.next_experiment)
        for name, kind in CLASSES.items()
    ]  # fmt: skip
    return sorted(causes, key=lambda cause: -cause.score)


def table() -> pd.DataFrame:
    """The rules: cause, weight and sentence; in braces are the words of a case."""
    return pd.DataFrame(list(RULES)).drop(columns="applies")
