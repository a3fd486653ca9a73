"""One case of the grid through the lab, and through the tools that people use instead: who names the right module?

A row is one tool on one run. The tools get the same run: the lab's investigation, the others what the draft's modules
gave beside the target, against a sound run of the same text. That sound run is fed in the same shapes, where untouched
modules have the same bits, or in blocks, where they are off by rounding as they are between any two engines.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from specnb.divergence import pair as small
from specnb.divergence.along import Along
from specnb.divergence.grading.baselines import RULES, differences, pointed
from specnb.divergence.grading.cases import GridCase, Service, script_of, starts, within
from specnb.divergence.grading.rows import LAB, NOTHING
from specnb.divergence.investigate import judge
from specnb.divergence.investigation import Investigation
from specnb.divergence.setups import Lab
from specnb.errors import InputError

BESIDE = "S3"
"""The set-up whose run the other tools get: beside the target, where acceptance was lost."""
SHAPES = ("same shapes", "other shapes")
"""How the sound run that the other tools compare with was fed."""


@dataclass(frozen=True)
class Subject:
    """A pair of one dtype and seed, its text, and a lab that serves all cases."""

    dtype: str
    seed: int

    @cached_property
    def pair(self) -> small.Pair:
        return small.pair(seed=self.seed, dtype=self.dtype)

    @cached_property
    def lab(self) -> Lab:
        size = self.pair.draft.config.vocab_size
        return Lab(self.pair.draft, self.pair.target, script=script_of(self.seed, size))

    def row(self, kind: str, name: str, layer: int | None = None, **more: Any) -> dict[str, Any]:
        """A row with what all rows have; what is not given is what it is for a tool that names nothing."""
        shared = {"kind": kind, "name": name, "layer": -1 if layer is None else layer}
        empty = {"size": 0.0, "tool": LAB, "against": "", "verdict": "", "structural": False, "module": NOTHING,
                 "expected": NOTHING, "position": -1, "token": False, "exact": False, "cause": NOTHING,
                 "expected_cause": NOTHING, "rank": 0, "seconds": 0.0}  # fmt: skip
        return shared | {"dtype": self.dtype, "seed": self.seed} | empty | more


def examined(subject: Subject, case: GridCase) -> list[dict[str, Any]]:
    """The rows of one case. Raises InputError for a fault that did not act: it would be no case."""
    service, started = Service(case), time.perf_counter()
    found = judge(subject.lab, deploy=service)
    seconds = time.perf_counter() - started
    fault, outcome = service.beside(subject.pair.target), found.case.outcomes[BESIDE]
    if all(one.equal(other) for one, other in zip(outcome.logits, subject.lab.sound_logits[0], strict=True)):
        raise InputError(f"{case.says} changed no bit of the logits in {subject.dtype}, seed {subject.seed}")
    is_fault = fault.first is not None
    kind = "fault" if is_fault else "control"
    told = [lab_row(found) | {"seconds": seconds, "rank": _rank(found, fault.cause)}]
    told += others(outcome.along, subject.lab)
    expected = {"expected": fault.first if is_fault else NOTHING, "expected_cause": fault.cause}
    rows = [subject.row(kind, case.fault, case.layer, **expected, **one) for one in told]
    for row in rows:
        at = row["position"] if is_fault else -1
        row |= {"token": at >= 0 and within(fault, at), "exact": at >= 0 and at == starts(fault)}
    return rows


def lab_row(found: Investigation) -> dict[str, Any]:
    """What an investigation named."""
    first = found.first
    named = {} if first is None else {
        "module": first.module, "position": first.first_token, "cause": found.causes[0].name
    }  # fmt: skip
    return {"tool": LAB, "verdict": found.verdict, "structural": found.verdict == "DIVERGENT"} | named


def others(run: Along, lab: Lab) -> Iterator[dict[str, Any]]:
    """What the other tools name in a run of the lab's script."""
    for against, sound in zip(SHAPES, lab.sound, strict=True):
        yield from pointed_rows(differences(run, sound, lab.script.last_feeds, lab.dtype), against)


def pointed_rows(found: pd.DataFrame, against: str) -> Iterator[dict[str, Any]]:
    """A row for each tool of RULES."""
    for tool in RULES:
        at = pointed(tool, found)
        named = {} if at is None else {"module": at.module, "position": at.position}
        yield {"tool": tool, "against": against, "structural": at is not None} | named


def _rank(found: Investigation, cause: str) -> int:
    """Place of the right cause, 1 for the first; 0 where it was not ranked."""
    names = [one.name for one in found.causes]
    return names.index(cause) + 1 if cause in names else 0
