"""Logs of other engines: how many drafts each round kept, and by them which K would have been best.

A round that kept a of d drafts tells of a + 1 tokens: the first a were drafted right, the next one wrong. Only the
token that the target adds to a round kept whole was never drafted. What a draft model says next depends on the text
alone, and so it would have said the same in rounds of any other K: a log is a recording (`measure.recording`) with
gaps. Filled once with drafts that are kept and once with such that are not, it bounds every K; at the log's own K both
agree. What a copier, Medusa or EAGLE drafts depends on where the round starts, too: of them other K's are estimates.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.errors import InputError
from specnb.io import read_text, reading
from specnb.measure.bench import FEWEST, Interval, interval, pays, rate_ratio
from specnb.measure.cost import Cost
from specnb.measure.recording import Recording
from specnb.measure.replay import Counts, every_k


class Request(NamedTuple):
    """One request's rounds: drafts `accepted` of those `drafted`, in their order, if the log says it."""

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that the rounds committed."""
        return sum(self.accepted) + len(self.accepted)

    def right(self) -> np.ndarray:
        """Whether the draft for each token was right, `(n_tokens,)`: 1, 0, or NaN where nothing was drafted."""
        rounds = zip(self.accepted, self.drafted, strict=True)
        return np.concatenate([[1.0] * a + [0.0 if a < d else np.nan] for a, d in rounds])

    def recording(self, k_max: int, gaps: float) -> Recording:
        """What `measure.replay` reads, with `gaps` as the chance that a draft in a gap is kept.

        A drafter that proposed fewer than the log's K proposes as many from there at any K.
        """
        n, right, start = self.n_tokens, np.nan_to_num(self.right(), nan=gaps).tolist(), 0
        offered = [min(k_max, left) for left in reversed(range(n))]
        for accepted, drafted in zip(self.accepted, self.drafted, strict=True):
            if drafted < max(self.drafted):
                offered[start] = min(offered[start], drafted)
            start += accepted + 1
        keep = tuple(tuple(right[i : i + most]) for i, most in enumerate(offered))
        ids, pieces = tuple(range(n)), (b"",) * n
        return Recording("", "", "", "", 0.0, 0, k_max, n, b"", ids, pieces, keep, tuple(offered))


# --- the formats ---


def read_log(path: Path, k: int | None = None) -> list[Request]:
    """Return the requests of a JSON or JSONL file, wherever in it their counts stand.

    vLLM's `metrics.speculative_decoding` (and AIPerf's records of it), SGLang's `meta_info`, Spec-Bench's answers,
    which do not say their `k`. Raises InputError for a file without any, and for what does not tell rounds apart:
    llama.cpp's timings, and a histogram of rounds that drafted more or less.
    """
    text = read_text(path)
    with reading(f"{path}: JSON, or a document a line,"):
        try:
            documents = [json.loads(text)]
        except ValueError:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    requests = [request for counts in _counts_in(documents) if (request := _read(counts, k)).accepted]
    if not requests:
        raise InputError(f"{path} holds no counts of rounds: expected one of {', '.join(KEYS)} in its JSON")
    return requests


KEYS = {
    "per_step_accepted": "steps",
    "acceptance_histogram": "histogram",
    "spec_correct_drafts_histogram": "histogram",
    "spec_accept_histogram": "histogram",
    "accept_lengths": "lengths",
    "draft_n_accepted": "totals",
}
"""Kinds of counts by name, the most telling first: of vLLM 0.29 and AIPerf 0.13; SGLang; Spec-Bench; llama.cpp."""


def _counts_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Find the objects that hold counts."""
    if isinstance(value, Mapping) and any(value.get(key) is not None for key in KEYS):
        yield value
    elif isinstance(value, Mapping | list):
        yield from chain.from_iterable(map(_counts_in, value.values() if isinstance(value, Mapping) else value))


def _read(counts: Mapping[str, Any], k: int | None) -> Request:
    kind, values = next((kind, counts[key]) for key, kind in KEYS.items() if counts.get(key) is not None)
    if kind == "steps":
        return Request(tuple(values), tuple(counts["per_step_drafted"]))
    if kind == "totals":
        totals = f"totals only: {values} of {counts['draft_n']} drafts kept"
        raise InputError(f"got {totals}, expected counts of each round: no other K can be judged by them")
    if kind == "lengths":
        accepted = [length - 1 for length in values]
    else:
        pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
        accepted = [int(n) for n, rounds in pairs for _ in range(rounds)]
        np.random.default_rng(0).shuffle(accepted)  # in what order is not known
        k = k or counts.get("num_spec_tokens") or len(values) - 1
    k = max(k or 0, *accepted, 1)
    expected = k * len(accepted)
    drafted = counts.get("num_draft_tokens") or counts.get("spec_num_proposed_drafts") or expected
    if drafted != expected:
        rounds = f"{drafted} drafts in {len(accepted)} rounds of up to {k}"
        raise InputError(f"got {rounds} in a histogram, expected {k} in each: log the steps (vLLM's `detailed`)")
    return Request(tuple(accepted), (k,) * len(accepted))


# --- every K ---


def sweep_log(requests: Sequence[Request], costs: Sequence[Cost], k_max: int) -> pd.DataFrame:
    """Return a row for each machine of `costs` and K from 1 to `k_max`: tokens a round, speed-up over plain decoding.

    `tau` and `speedup` take as many drafts in gaps as kept as elsewhere; `tau_low` and `tau_high` none and all, and so
    do `low` and `high`, with the interval over requests. `own` marks the log's K.
    """
    ks, logged = range(1, k_max + 1), max(max(request.drafted) for request in requests)
    usual = float(np.nanmean(np.concatenate([request.right() for request in requests])))
    filled = []  # for each way to fill the gaps and each K the counts of all requests
    for gaps in (usual, 0.0, 1.0):
        of_requests = [every_k(request.recording(k_max, gaps), ks) for request in requests]
        filled.append(zip(*of_requests, strict=True))
    rows, n = [], len(requests)
    for cost, (k, *counts) in product(costs, zip(ks, *filled, strict=True)):
        taus = [sum(c.n_tokens for c in of_gaps) / sum(c.rounds for c in of_gaps) for of_gaps in counts]
        middle, never, always = (_speedup(of_gaps, cost) for of_gaps in counts)
        ends = np.fmin(never.low, never.value), np.fmax(always.high, always.value)
        rows.append((cost.name, k, *taus, middle.value, *ends, k == logged, n))
    columns = ["machine", "k", "tau", "tau_low", "tau_high", "speedup", "low", "high", "own", "n_requests"]
    return pd.DataFrame(rows, columns=columns)


def advise(table: pd.DataFrame) -> dict[str, Any]:
    """Choose K by the rows that `sweep_log` gives for a machine: the fastest K that a log can answer for.

    `beyond` is a larger one that may be faster, or 0. Of fewer than FEWEST requests nothing is judged.
    """
    answered = table["k"] <= table.loc[table["own"], "k"].max()
    best = table.loc[[table.loc[answered, "speedup"].idxmax()]].to_dict("records")[0]
    faster = table[~answered & (table["high"] > best["high"])]
    return {name: best[name] for name in ("machine", "k", "speedup", "low", "high")} | {
        "verdict": pays(best["low"], best["high"]) if best["n_requests"] >= FEWEST else "undecided",
        "beyond": 0 if faster.empty else int(faster.loc[faster["high"].idxmax(), "k"]),
    }


def _speedup(counts: Sequence[Counts], cost: Cost) -> Interval:
    """Over plain decoding of the same tokens, with its interval over requests."""
    times = [(c.n_tokens, c.seconds(cost), c.n_tokens, c.n_tokens * cost.step_s) for c in counts]
    return interval(times, rate_ratio)
