"""The grid: every planted fault, at every layer that can have it, through the lab and the tools beside it.

Options and text of a case are drawn by seed. A fault that did not act is no case: counting it would make any tool look
better or worse than it is. A row is one tool on one run. The tools get the same run: the lab's investigation, the
others what the draft's modules gave beside the target, against a sound run of the same text. That sound run is fed in
the same shapes, where untouched modules have the same bits, or in blocks, where they are off by rounding as they are
between any two engines.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from specnb.divergence import pair as small
from specnb.divergence.faults import FAULTS, RecordedFault
from specnb.divergence.faults.planting import PlantedFault
from specnb.divergence.investigate import Investigation, judge_service
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from specnb.divergence.trace import Alignment
from specnb.errors import InputError
from tests.benchmarks.divergence_score.rows import NOTHING
from tests.benchmarks.divergence_score.tools import LAB, RULES, differences, pointed

TEXTS, PROMPTS, ROUNDS = (26, 33), (14, 19), (2, 5)
"""Half-open ranges that a seed draws the length of the text, of the prompt and K from."""
BESIDE = "S3"
"""The set-up whose run the other tools get: beside the target, where acceptance was lost."""
SHAPES = ("same shapes", "other shapes")
"""How the sound run that the other tools compare with was fed."""


def script_of(seed: int, vocab_size: int) -> Script:
    """The text of a seed: its tokens, its length, where its prompt ends, and K differ from seed to seed."""
    rng = np.random.default_rng([seed, 7])
    n_tokens, prompt, k = (int(rng.integers(*between)) for between in (TEXTS, PROMPTS, ROUNDS))
    text = rng.integers(0, vocab_size, n_tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=vocab_size, seed=seed)


@dataclass(frozen=True)
class GridCase:
    """One fault as it is planted; `layer` None where the fault has no layer, or is in all of them."""

    fault: str
    layer: int | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return self.fault if self.layer is None else f"{self.fault} in layer {self.layer}"

    def service(self) -> RecordedFault:
        """The fault as a service."""
        return RecordedFault(self.fault, **({} if self.layer is None else {"layer": self.layer}), **self.options)


def cases(script: Script, *, seed: int, faults: Sequence[str], layers: Sequence[int]) -> list[GridCase]:
    """All cases of these faults and a text."""
    return [
        # the same options for a case whichever other cases are run
        GridCase(name, layer, _options(name, script, np.random.default_rng([seed, [*FAULTS].index(name), layer or 0])))
        for name in faults
        for layer in _layers(name, layers)
    ]


def starts(fault: PlantedFault) -> int:
    """The first position that can be wrong. A fault that waits begins when it first acted, unless it says when."""
    begin, end = fault.tokens[0]
    return max(begin, min(fault.struck, default=0)) if end is None else begin


def within(fault: PlantedFault, position: int) -> bool:
    """Tell whether a position is one that the fault can make wrong."""
    return position >= starts(fault) and any(
        begin <= position and (end is None or position < end) for begin, end in fault.tokens
    )


@dataclass(frozen=True)
class Subject:
    """A pair of one dtype and seed, its text, and a lab that serves all cases."""

    dtype: str
    seed: int

    @cached_property
    def pair(self) -> small.SmallPair:
        return small.pair(seed=self.seed, dtype=self.dtype)

    @cached_property
    def lab(self) -> Lab:
        size = self.pair.draft.config.vocab_size
        return Lab(self.pair.draft, self.pair.target, script=script_of(self.seed, size))

    def row(self, kind: str, name: str, layer: int | None = None, **more: Any) -> dict[str, Any]:
        """A row with what all rows have; what is not given is what it is for a tool that names nothing."""
        shared = {"kind": kind, "name": name, "layer": -1 if layer is None else layer}
        empty = {"tool": LAB, "against": "", "verdict": "", "structural": False, "module": NOTHING,
                 "expected": NOTHING, "position": -1, "token": False, "exact": False, "cause": NOTHING,
                 "expected_cause": NOTHING, "rank": 0, "seconds": 0.0}  # fmt: skip
        return shared | {"dtype": self.dtype, "seed": self.seed} | empty | more


def examined(subject: Subject, case: GridCase) -> list[dict[str, Any]]:
    """The rows of one case. Raises InputError for a fault that did not act: it would be no case."""
    service, started = case.service(), time.perf_counter()
    found = judge_service(subject.lab, deploy=service)
    seconds = time.perf_counter() - started
    # the first: later set-ups beside the same model may be those in which it never runs
    fault = next(fault for fault in service.entered if fault.target is subject.pair.target)
    if FAULTS[case.fault].waits and not fault.struck:
        raise InputError(f"{case.says} never acted: choose a script in which what it waits for happens")
    outcome = found.outcomes[BESIDE]
    if all(one.equal(other) for one, other in zip(outcome.logits, subject.lab.sound_logits[0], strict=True)):
        raise InputError(f"{case.says} changed no bit of the logits in {subject.dtype}, seed {subject.seed}")
    is_fault = fault.first is not None
    kind = "fault" if is_fault else "control"
    tools = [lab_row(found) | {"seconds": seconds, "rank": _rank(found, fault.cause)}]
    tools += others(outcome.run, subject.lab)
    expected = {"expected": fault.first if is_fault else NOTHING, "expected_cause": fault.cause}
    rows = [subject.row(kind, case.fault, case.layer, **expected, **one) for one in tools]
    for row in rows:
        at = row["position"] if is_fault else -1
        row |= {"token": at >= 0 and within(fault, at), "exact": at >= 0 and at == starts(fault)}
    return rows


def lab_row(found: Investigation) -> dict[str, Any]:
    """Return what an investigation named."""
    first = found.first
    named = {} if first is None else {
        "module": first.module, "position": first.first_token, "cause": found.causes[0].name
    }  # fmt: skip
    return {"tool": LAB, "verdict": found.verdict, "structural": found.verdict == "DIVERGENT"} | named


def others(run: Alignment, lab: Lab) -> Iterator[dict[str, Any]]:
    """A row for each of RULES and SHAPES: what the other tools name in a run of the lab's script."""
    for against, sound in zip(SHAPES, lab.sound, strict=True):
        table: pd.DataFrame = differences(run, sound, lab.script.last_feeds, lab.dtype)
        for tool in RULES:
            named = pointed(tool, table)
            yield {"tool": tool, "against": against, "structural": bool(named)} | named


def _rank(found: Investigation, cause: str) -> int:
    """Place of the right cause, 1 for the first; 0 where it was not ranked."""
    names = [one.name for one in found.causes]
    return names.index(cause) + 1 if cause in names else 0


def _layers(fault: str, layers: Sequence[int]) -> tuple[int | None, ...]:
    """None stands for a fault without a layer, and for one that by default is in all of them."""
    options = FAULTS[fault].options
    if "layer" not in options:
        return (None,)
    return (*((None,) if options["layer"] is None else ()), *layers)


def _options(fault: str, script: Script, rng: np.random.Generator) -> dict[str, Any]:
    """Draw where in the text a fault is. Two slots are swapped that one forward writes, so both lie in the prompt."""
    prompt, n_tokens = len(script.feeds[0].ids), len(script.text)
    a = int(rng.integers(1, prompt - 4))
    drawn = {
        "stale_row": {"token": int(rng.integers(2, n_tokens))},
        "kv_slot_swap": {"a": a, "b": int(rng.integers(a + 2, prompt))},
        "foreign_writer": {"position": prompt - int(rng.integers(2, 6)), "after": prompt},
        "rope_mismatch": {"start": int(rng.integers(4, n_tokens - 4))},
        "dummy_tokens": {"start": int(rng.integers(4, n_tokens - 4))},
        "experts_permuted": {"seed": int(rng.integers(1 << 16))},
        "random_head": {"seed": int(rng.integers(1 << 16))},
        "uniform_offset": {"offset": int(rng.integers(1, 200))},
    }
    return drawn.get(fault, {})
