"""Logs of other engines: the best K by the counts of accepted draft tokens that a server logged.

A round that accepts a of d draft tokens shows that the first a were right and the next one was
wrong. Only the token that the target adds to a fully accepted round was never drafted. The next
token of a draft model depends on the text alone, so it would be the same in rounds of any other K:
a log is a recording (`measure.recording`) with gaps. The gaps are filled once with accepted and
once with rejected draft tokens, which bounds every K; at the log's own K both bounds agree. The
draft tokens of prompt lookup, Medusa and EAGLE also depend on where the round starts: for these,
other values of K are estimates.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, BeforeValidator, FailFast, Field

from specnb.errors import InputError
from specnb.io import read_text, reading, validated
from specnb.measure.bench import FEWEST, Interval, interval, pays, rate_ratio
from specnb.measure.cost import Cost
from specnb.measure.recording import Recording
from specnb.measure.replay import Counts, every_k

MAX_ROUNDS = 10**6
MAX_K = 512
"""Rounds in a request, and draft tokens in a round, at most."""
MAX_CELLS = 5 * 10**7
"""Tokens of a file times its largest K at most: `Request.recording` has two entries for each."""


class Request(NamedTuple):
    """The rounds of one request, in their order where the log states it."""

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that the rounds committed."""
        return sum(self.accepted) + len(self.accepted)

    def right(self) -> np.ndarray:
        """Return for each token whether its draft was right: 1, 0, or NaN where there was none."""
        rounds = zip(self.accepted, self.drafted, strict=True)
        return np.concatenate([[1.0] * a + [0.0 if a < d else np.nan] for a, d in rounds])

    def recording(self, k_max: int, gaps: float) -> Recording:
        """Return a recording for `measure.replay`, with `gaps` as the acceptance rate in gaps.

        Where the drafter proposed fewer tokens than the log's K, or none, it proposes as many at
        any K.
        """
        n = self.n_tokens
        right = np.nan_to_num(self.right(), nan=gaps).tolist()
        start = 0
        offered = [min(k_max, left) for left in reversed(range(n))]
        logged_k = max(1, max(self.drafted))
        for accepted, drafted in zip(self.accepted, self.drafted, strict=True):
            if drafted < logged_k:
                offered[start] = min(offered[start], drafted)
            start += accepted + 1
        keep = tuple(tuple(right[i : i + most]) for i, most in enumerate(offered))
        ids = tuple(range(n))
        pieces = (b"",) * n
        return Recording("", "", "", "", 0.0, 0, k_max, n, b"", ids, pieces, keep, tuple(offered))


# --- the formats ---

Count = Annotated[int, Field(strict=True, ge=0)]
Drafts = Annotated[Count, Field(le=MAX_K)]
Accepted = Annotated[int, Field(ge=0, le=MAX_K)]  # also as the text of a JSON key
EachRound = Annotated[list[Drafts], FailFast(), Field(max_length=MAX_ROUNDS)]


class Steps(BaseModel):
    """Each round: vLLM 0.29 with `detailed`, AIPerf 0.13."""

    per_step_accepted: EachRound
    per_step_drafted: EachRound

    def request(self, k: int | None) -> Request:
        return Request(tuple(self.per_step_accepted), tuple(self.per_step_drafted))


def _by_accepted(value: Any) -> Any:
    """Return a listed histogram as a mapping: rounds by their accepted draft tokens."""
    return dict(enumerate(value[: MAX_K + 2])) if isinstance(value, list) else value


class Histogram(BaseModel):
    """Rounds by their accepted draft tokens, in unknown order: vLLM, SGLang, AIPerf."""

    acceptance_histogram: Annotated[dict[Accepted, Count], BeforeValidator(_by_accepted)]
    num_spec_tokens: Drafts = 0
    num_draft_tokens: Count | None = None

    def request(self, k: int | None) -> Request:
        if (n := sum(self.acceptance_histogram.values())) > MAX_ROUNDS:
            raise ValueError(f"got {n} rounds, expected at most {MAX_ROUNDS}")
        accepted = [n for n, rounds in self.acceptance_histogram.items() for _ in range(rounds)]
        np.random.default_rng(0).shuffle(accepted)
        k = k or self.num_spec_tokens or max(self.acceptance_histogram, default=0)
        if self.num_draft_tokens == 0:
            k = 0
        return Request(tuple(accepted), (k,) * n)


class Lengths(BaseModel):
    """Tokens that each round committed: Spec-Bench, which does not state K."""

    accept_lengths: EachRound

    def request(self, k: int | None) -> Request:
        accepted = tuple(length - 1 for length in self.accept_lengths)
        return Request(accepted, (k or max(accepted, default=0),) * len(accepted))


SHAPES = {
    "per_step_accepted": Steps,
    "acceptance_histogram": Histogram,
    "accept_lengths": Lengths,
    "draft_n_accepted": None,  # totals: llama.cpp
}
"""Shapes of counts by the name that only they have, the most detailed first."""
SGLANG = {
    "spec_correct_drafts_histogram": "acceptance_histogram",
    "spec_accept_histogram": "acceptance_histogram",
    "spec_verify_ct": "num_spec_steps",
    "spec_num_correct_drafts": "num_accepted_draft_tokens",
    "spec_accept_token_num": "num_accepted_draft_tokens",
    "spec_num_proposed_drafts": "num_draft_tokens",
}
"""vLLM's names of the counts that SGLang names otherwise."""


def read_log(path: Path, k: int | None = None) -> list[Request]:
    """Return the requests of a JSON or JSONL file, wherever in it their counts are.

    Reads vLLM's `metrics.speculative_decoding` (and AIPerf's records of it), SGLang's `meta_info`,
    and the answers of Spec-Bench, which do not state their `k`. Raises InputError with the file and
    the value for a file without counts, for counts that are not sound, contradict each other or are
    too large to replay, for a log in which nothing was drafted, and for what does not tell rounds
    apart: llama.cpp's timings, and a histogram of rounds with different K.
    """
    text = read_text(path)
    documents = []
    requests = []
    end = 0
    with reading(path):
        # a document may have several lines, and a file may begin with a byte order mark
        decoder = json.JSONDecoder()
        while start := re.compile(r"[^\s\ufeff]").search(text, end):
            document, end = decoder.raw_decode(text, start.start())
            documents.append(document)
        for n, counts in enumerate(_counts_in(documents), 1):
            request = _read(counts, k, f"{path}: request {n}")
            if request.accepted:
                requests.append(request)
    if not requests:
        raise InputError(f"{path} has no counts of rounds: expected one of {', '.join(SHAPES)}")
    largest_k = max(max(request.drafted) for request in requests)
    if not largest_k:
        raise InputError(f"{path}: nothing was drafted in {len(requests)} requests: give a log with drafts, or --k")
    if (cells := largest_k * sum(request.n_tokens for request in requests)) > MAX_CELLS:
        raise InputError(f"{path} has {cells} tokens times K, expected at most {MAX_CELLS}: split it")
    return requests


def _counts_in(value: Any) -> Iterator[Mapping[Any, Any]]:
    """Find the objects that have counts, under vLLM's names."""
    if isinstance(value, Mapping):
        named = {SGLANG.get(name, name): n for name, n in value.items() if n is not None}
        if named.keys() & SHAPES:
            yield named
            return
        value = list(value.values())
    if isinstance(value, list):
        yield from chain.from_iterable(map(_counts_in, value))


def _read(counts: Mapping[str, Any], k: int | None, place: str) -> Request:
    """Return the request of these counts. Raises InputError as `read_log`."""
    shape = next(shape for name, shape in SHAPES.items() if name in counts)
    if not shape:
        raise InputError(
            f"{place}: got the totals draft_n_accepted {counts['draft_n_accepted']!r:.80} and draft_n "
            f"{counts.get('draft_n')!r:.80}, expected counts of each round: log them (vLLM's `detailed`)"
        )
    with reading(place):
        request = validated(shape, counts, place).request(k)
        accepted, drafted = request
        if len(accepted) != len(drafted):
            raise ValueError(f"got {len(accepted)} accepted counts, but {len(drafted)} drafted ones")
        for a, d in zip(accepted, drafted, strict=True):
            if not 0 <= a <= d:
                raise ValueError(f"got a round with {a} of {d} draft tokens accepted")
        sums = {
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
        }
        for name, n in sums.items():
            if counts.get(name, n) != n:
                raise InputError(
                    f"{place}: {name} is {counts[name]!r:.80}, but its rounds have {n}: check the log, "
                    "or log each round (vLLM's `detailed`)"
                )
    return request


# --- every K ---


def sweep_log(requests: Sequence[Request], costs: Sequence[Cost], k_max: int) -> pd.DataFrame:
    """Return tokens per round and the speed-up for each machine of `costs` and K up to `k_max`.

    `tau` and `speedup` assume that draft tokens in gaps are accepted as often as elsewhere;
    `tau_low` and `tau_high` that none and that all are, and so do `low` and `high`, with the
    interval over requests. `own` marks the log's K.
    """
    ks = range(1, k_max + 1)
    logged = max(max(request.drafted) for request in requests)
    usual = float(np.nanmean(np.concatenate([request.right() for request in requests])))
    filled = []  # for each way to fill the gaps and each K the counts of all requests
    for gaps in (usual, 0.0, 1.0):
        of_requests = [every_k(request.recording(k_max, gaps), ks) for request in requests]
        filled.append(zip(*of_requests, strict=True))
    rows = []
    n = len(requests)
    for cost, (k, *counts) in product(costs, zip(ks, *filled, strict=True)):
        taus = [sum(c.n_tokens for c in of_gaps) / sum(c.rounds for c in of_gaps) for of_gaps in counts]
        middle, never, always = (_speedup(of_gaps, cost) for of_gaps in counts)
        ends = np.fmin(never.low, never.value), np.fmax(always.high, always.value)
        rows.append((cost.name, k, *taus, middle.value, *ends, k == logged, n))
    columns = ["machine", "k", "tau", "tau_low", "tau_high", "speedup", "low", "high", "own", "n_requests"]
    return pd.DataFrame(rows, columns=columns)


def advise(table: pd.DataFrame) -> dict[str, Any]:
    """Return the fastest K up to the log's own, by the rows of `sweep_log` for one machine.

    `beyond` is a larger K that may be faster, or 0. With fewer than FEWEST requests the verdict is
    `undecided`.
    """
    answered = table["k"] <= table.loc[table["own"], "k"].max()
    best = table.loc[[table.loc[answered, "speedup"].idxmax()]].to_dict("records")[0]
    faster = table[~answered & (table["high"] > best["high"])]
    return {name: best[name] for name in ("machine", "k", "speedup", "low", "high")} | {
        "verdict": pays(best["low"], best["high"]) if best["n_requests"] >= FEWEST else "undecided",
        "beyond": 0 if faster.empty else int(faster.loc[faster["high"].idxmax(), "k"]),
    }


def _speedup(counts: Sequence[Counts], cost: Cost) -> Interval:
    """Return the speed-up over plain decoding, with its interval over requests."""
    times = [(c.n_tokens, c.seconds(cost), c.n_tokens, c.n_tokens * cost.step_s) for c in counts]
    return interval(times, rate_ratio)
