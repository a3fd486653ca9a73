"""Causes, ranked: what speaks for each of them, what against, where it happened before, what to try next.

Each cause has rules, and each rule that applies says so in a sentence and gives its weight, a log-likelihood ratio by
judgement: 1 a hint, 3 strong, 5 nearly proof. Priors are the frequencies of some 30 upstream cases, a convenience
sample. The table of all that applied comes with the ranking, so that nobody has to trust the sum.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from specnb.divergence.case import Case
from specnb.divergence.offline.result import named

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
    total = sum(one.cases for one in CLASSES.values())
    found = []
    for name, one in CLASSES.items():
        signs = tuple(one.rules(case))
        score = math.log(one.cases / total) + sum(sign.weight for sign in signs)
        found.append(Cause(name, score, signs, one.issues, one.next_experiment))
    return sorted(found, key=lambda cause: -cause.score)
