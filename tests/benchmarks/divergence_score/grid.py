"""The grid: every planted fault, in every possible layer, for the lab and the other tools.

A seed draws the options and the text of a case. A fault that did not act is not a case: counting it
would distort the score of every tool. A row is one tool on one run. All tools get the same run: the
lab investigates it; the others compare the outputs of the draft's modules next to the target with a
sound run of the same text. That sound run is fed in the same shapes, where untouched modules are
bit-identical, or in blocks, where they differ by rounding as between any two engines.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from specnb.divergence import pair as small
from specnb.divergence.faults import RecordedFault
from specnb.divergence.faults.planting import PlantedFault
from specnb.divergence.investigate import Investigation, judge_service
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from specnb.divergence.trace import Alignment
from specnb.errors import InputError
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.benchmarks.divergence_score.rows import NOTHING
from tests.benchmarks.divergence_score.tools import LAB, RULES, differences, pointed

TEXTS = (26, 33)
PROMPTS = (14, 19)
ROUNDS = (2, 5)
"""Half-open ranges of the length of the text, the length of the prompt, and K."""
BESIDE = "S3"
"""The set-up whose run the other tools get: next to the target, where acceptance was lost."""
SHAPES = ("same shapes", "other shapes")
"""How the sound run of the other tools was fed."""


def script_of(seed: int, vocab_size: int) -> Script:
    """Return the script of a seed: tokens, length, prompt and K differ from seed to seed."""
    rng = np.random.default_rng([seed, 7])
    n_tokens, prompt, k = (int(rng.integers(*between)) for between in (TEXTS, PROMPTS, ROUNDS))
    text = rng.integers(0, vocab_size, n_tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=vocab_size, seed=seed)


@dataclass(frozen=True)
class GridCase:
    """One planted fault; `layer` None: the fault has no layer, or is in all of them."""

    fault: str
    layer: int | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return self.fault if self.layer is None else f"{self.fault} in layer {self.layer}"

    def service(self) -> RecordedFault:
        """Return the fault as a service."""
        layer = {} if self.layer is None else {"layer": self.layer}
        return RecordedFault(FAULTS[self.fault], **layer, **self.options)


def cases(script: Script, *, seed: int, layers: Sequence[int]) -> list[GridCase]:
    """Return all cases of a text."""
    return [
        # The options of a case do not depend on the other cases.
        GridCase(
            name,
            layer,
            _options(
                name, script, np.random.default_rng([seed, [*FAULTS].index(name), layer or 0])
            ),
        )
        for name in FAULTS
        for layer in _layers(name, layers)
    ]


def starts(fault: PlantedFault) -> int:
    """Return the first position that can be wrong; if the fault waits, where it first acted."""
    begin, end = fault.tokens[0]
    return max(begin, min(fault.struck, default=0)) if end is None else begin


def within(fault: PlantedFault, position: int) -> bool:
    """Tell whether the fault can make a position wrong."""
    return position >= starts(fault) and any(
        begin <= position and (end is None or position < end) for begin, end in fault.tokens
    )


@dataclass(frozen=True)
class Subject:
    """A pair of one dtype and seed, its text, and a lab for all cases."""

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
        """Return a row; missing columns get the values of a tool that names nothing."""
        shared = {"kind": kind, "name": name, "layer": -1 if layer is None else layer}
        empty = {
            "tool": LAB,
            "against": "",
            "verdict": "",
            "structural": False,
            "module": NOTHING,
            "expected": NOTHING,
            "position": -1,
            "token": False,
            "exact": False,
            "cause": NOTHING,
            "expected_cause": NOTHING,
            "rank": 0,
            "seconds": 0.0,
        }
        return shared | {"dtype": self.dtype, "seed": self.seed} | empty | more


def examined(subject: Subject, case: GridCase) -> list[dict[str, Any]]:
    """Return the rows of one case. Raises InputError for a fault that did not act."""
    service = case.service()
    started = time.perf_counter()
    found = judge_service(subject.lab, deploy=service)
    seconds = time.perf_counter() - started
    # The first entry: in later set-ups the target may never run.
    fault = next(fault for fault in service.entered if fault.target is subject.pair.target)
    if FAULTS[case.fault].waits and not fault.struck:
        raise InputError(
            f"{case.says} never acted: choose a script in which what it waits for happens"
        )
    outcome = found.outcomes[BESIDE]
    if all(
        one.equal(other)
        for one, other in zip(outcome.logits, subject.lab.sound_logits[0], strict=True)
    ):
        raise InputError(
            f"{case.says} changed no bit of the logits in {subject.dtype}, seed {subject.seed}"
        )
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
    named = (
        {}
        if first is None
        else {"module": first.module, "position": first.first_token, "cause": found.causes[0].name}
    )
    return {
        "tool": LAB,
        "verdict": found.verdict,
        "structural": found.verdict == "DIVERGENT",
    } | named


def others(run: Alignment, lab: Lab) -> Iterator[dict[str, Any]]:
    """Yield one row per tool and sound run: what the tool names in the lab's run."""
    for against, sound in zip(SHAPES, lab.sound, strict=True):
        table: pd.DataFrame = differences(run, sound, lab.dtype)
        for tool in RULES:
            named = pointed(tool, table)
            yield {"tool": tool, "against": against, "structural": bool(named)} | named


def _rank(found: Investigation, cause: str) -> int:
    """Return the rank of the right cause; 0 if it was not ranked."""
    names = [one.name for one in found.causes]
    return names.index(cause) + 1 if cause in names else 0


def _layers(fault: str, layers: Sequence[int]) -> tuple[int | None, ...]:
    """Return the layers of a fault; None: it has no layer, or is in all of them by default."""
    options = FAULTS[fault].options
    if "layer" not in options:
        return (None,)
    return (*((None,) if options["layer"] is None else ()), *layers)


def _options(fault: str, script: Script, rng: np.random.Generator) -> dict[str, Any]:
    """Draw where a fault acts. Both swapped slots are in the prompt: one pass must write them."""
    prompt = len(script.feeds[0].ids)
    n_tokens = len(script.text)
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
