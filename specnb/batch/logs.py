"""Logs of other engines: find the best K from logged counts of accepted draft tokens.

A round that accepts a of d draft tokens shows that the first a were right and the next one was
wrong. Only the token that the target adds to a fully accepted round was never drafted. The next
token of a draft model depends only on the text, so it would be the same in rounds of any other K:
a log is a recording (`measure.recording`) with gaps. The gaps are filled once with accepted and
once with rejected draft tokens, which bounds every K; at the log's own K, both bounds agree. The
draft tokens of prompt lookup, Medusa and EAGLE also depend on where the round starts; for these,
other values of K are estimates. If the engine ends drafts early (p_min), the acceptance at later
positions is a lower bound for other settings.

Counters and the log lines of llama.cpp (#24536) and vLLM give the number of rounds that accepted at
least 1, 2, … draft tokens. Log lines give it as rounded rates, from which `_recover` derives
counts.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, BeforeValidator, FailFast, Field

from specnb.errors import InputError
from specnb.io import JsonObject, read_text, reading, validated
from specnb.measure.cost import Cost
from specnb.measure.intervals import Interval, interval, pays, rate_ratio
from specnb.measure.recording import Recording
from specnb.measure.replay import Counts, every_k
from specnb.measure.triage import REMEDIES, Share, signs_by_position

MAX_ROUNDS = 10**6
MAX_K = 512
"""Maximum rounds in a request, and draft tokens in a round."""
MAX_CELLS = 5 * 10**7
"""Maximum tokens of a file times its largest K: `Request.recording` has two entries for each."""


class Request(NamedTuple):
    """The rounds of one request, in order if the log states the order."""

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that the rounds committed."""
        return sum(self.accepted) + len(self.accepted)

    def right(self) -> np.ndarray:
        """Return for each token whether its draft was right: 1, 0, or NaN if there was none."""
        rounds = zip(self.accepted, self.drafted, strict=True)
        return np.concatenate([[1.0] * a + [0.0 if a < d else np.nan] for a, d in rounds])

    def recording(self, k_max: int, gaps: float) -> Recording:
        """Return a recording for `measure.replay`, with `gaps` as the acceptance rate in gaps.

        Where the drafter proposed fewer tokens than the log's K, it is assumed to propose the same
        number, at most, with any K.
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
    """Counts of each round: vLLM 0.29 with `detailed`, AIPerf 0.13."""

    per_step_accepted: EachRound
    per_step_drafted: EachRound

    def request(self, k: int | None) -> Request:
        return Request(tuple(self.per_step_accepted), tuple(self.per_step_drafted))


def _by_accepted(value: Any) -> Any:
    """Return a list histogram as a mapping: number of rounds by accepted draft tokens."""
    return dict(enumerate(value[: MAX_K + 2])) if isinstance(value, list) else value


class Histogram(BaseModel):
    """Number of rounds by accepted draft tokens, in unknown order: vLLM, SGLang, AIPerf."""

    acceptance_histogram: Annotated[dict[Accepted, Count], BeforeValidator(_by_accepted)]
    num_spec_tokens: Drafts = 0
    num_draft_tokens: Count | None = None
    draft_n: Count | None = None  # from counters: some drafts were shorter than K

    def request(self, k: int | None) -> Request:
        if (n := sum(self.acceptance_histogram.values())) > MAX_ROUNDS:
            raise ValueError(f"got {n} rounds, expected at most {MAX_ROUNDS}")
        accepted = np.repeat(*np.array([*self.acceptance_histogram.items()], int).reshape(-1, 2).T)
        k = self.num_spec_tokens or k or max(self.acceptance_histogram, default=0)
        if self.num_draft_tokens == 0:
            k = 0
        drafted = np.full(n, k)
        if self.draft_n is not None:
            # shorten drafts where the fewest tokens were accepted: this hides the least
            drafted -= _fill(k - np.maximum(accepted, 1), k * n - self.draft_n)
        order = np.random.default_rng(0).permutation(n)
        return Request(tuple(accepted[order].tolist()), tuple(drafted[order].tolist()))


def _fill(rooms: np.ndarray, n: int) -> np.ndarray:
    """Distribute `n` over rooms with these capacities, filling the first rooms first."""
    return np.clip(n - rooms.cumsum() + rooms, 0, rooms).astype(int)


class Lengths(BaseModel):
    """Tokens that each round committed: Spec-Bench, which does not log K."""

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
"""Formats of counts by the field name that identifies them, the most detailed first."""
SGLANG = {
    "spec_correct_drafts_histogram": "acceptance_histogram",
    "spec_accept_histogram": "acceptance_histogram",
    "spec_verify_ct": "num_spec_steps",
    "spec_num_correct_drafts": "num_accepted_draft_tokens",
    "spec_accept_token_num": "num_accepted_draft_tokens",
    "spec_num_proposed_drafts": "num_draft_tokens",
}
"""SGLang's names of counts, mapped to vLLM's."""


MARKS = {
    "draft acceptance = ": re.compile(
        r"\S+ \( *(?P<accepted>\d+) accepted / *(?P<drafted>\d+) generated\), "
        r"mean (?:acceptance length|len) = *(?P<length>\d+\.\d+)"
        r"(?:, acceptance rate per position|\s*\n.*\bacc per pos) = \((?P<rates>[\d., ]+)\)"
    ),
    "SpecDecoding metrics: ": re.compile(
        r".*?Mean acceptance length: (?P<length>\d+\.\d+), .*?"
        r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
        r"Per-position acceptance rate: (?P<rates>\d[\d., ]*\d)"
    ),
}
"""Patterns of log lines of llama.cpp and vLLM, by the text before them."""
COUNTERS = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens_per_pos)(?:_total)?"
    r'(?:\{(?:.*\bposition="(\d+)")?.*\})? (\S+)',
    re.MULTILINE,
)
"""Prometheus counters of vLLM, and of llama.cpp since #26389."""


def read_log(path: Path, k: int | None = None) -> list[Request]:
    """Return the requests of a log: JSON or JSONL, log lines, or Prometheus counters.

    Reads vLLM's `metrics.speculative_decoding` (and AIPerf's records of it), SGLang's `meta_info`,
    the answers of Spec-Bench, which lack `k`, and MARKS and COUNTERS. Raises InputError that names
    the file and the value if there are no counts, if counts are invalid, contradictory or too large
    to replay, if a line is incomplete, if nothing was drafted, and if rounds cannot be separated,
    as in llama-server's timings or a histogram of rounds with different K.
    """
    text = read_text(path)
    requests = []
    n_tokens = largest_k = 0
    with reading(path):
        is_json = re.match(r"[\s\ufeff]*[\[{]", text)
        logged = counts_in([*_documents(text)]) if is_json else _counts_in_lines(text)
        for n, counts in enumerate(logged, 1):
            request = read_counts(counts, k, f"{path}: request {n}")
            if request.accepted:
                requests.append(request)
                n_tokens += request.n_tokens
                largest_k = max(largest_k, *request.drafted)
            if (cells := n_tokens * (largest_k or 1)) > MAX_CELLS:
                raise InputError(
                    f"{path} has {cells} tokens times K, expected at most {MAX_CELLS}: split it"
                )
    if not requests:
        raise InputError(f"{path} has no counts of rounds: expected one of {', '.join(SHAPES)}")
    if not largest_k:
        raise InputError(
            f"{path}: nothing was drafted in {len(requests)} requests: "
            "give a log with drafts, or --k"
        )
    return requests


def _documents(text: str) -> Iterator[Any]:
    """Yield the JSON values in a text; a value may span several lines."""
    decoder = json.JSONDecoder()
    end = 0
    while start := re.compile(r"[^\s\ufeff]").search(text, end):  # \ufeff: a byte order mark
        document, end = decoder.raw_decode(text, start.start())
        yield document


def _counts_in_lines(text: str) -> Iterator[JsonObject]:
    """Yield the counts of each line that matches MARKS, and the totals of COUNTERS."""
    for mark, pattern in MARKS.items():
        for begun in re.finditer(mark, text):
            if not (line := pattern.match(text, begun.end())):
                remedy = "llama-server logs the rates of each position with `-lv 5`"
                raise ValueError(f"{text[begun.start() :][:150]!r} is incomplete; {remedy}")
            yield _recover(**line.groupdict())
    if COUNTERS.search(text):
        yield read_counters(text)


def _recover(accepted: str, drafted: str, length: str, rates: str) -> JsonObject:
    """Return the counts of rounds, recovered from the rounded rates of a log line.

    For example, 167 of 259 accepted draft tokens, a mean length of 2.92 and the rates 0.805, 0.632,
    0.483 fit only 87 rounds, 70, 55 and 42 of which accepted at least 1, 2 and 3 draft tokens. If
    several numbers of rounds fit, the middle one is used.
    """
    n_accepted = int(accepted)
    n_drafted = int(drafted)
    shares = np.array(rates.split(","), float)
    rounds = np.arange(max(1, -(-n_drafted // len(shares))), n_drafted + 1)[:, None]
    rounds = rounds[abs(1 + n_accepted / rounds[:, 0] - float(length)) <= _rounding(length)]
    # bounds of the accepted counts by number of rounds and position: (rounds, positions)
    fewest = np.ceil(rounds * (shares - _rounding(rates))).clip(0)
    most = np.floor(rounds * (shares + _rounding(rates)))
    sums = (fewest.sum(1) <= n_accepted) & (n_accepted <= most.sum(1))
    fits = np.flatnonzero((fewest <= most).all(1) & sums)
    if not len(fits):
        raise ValueError(
            f"no number of rounds fits {accepted} of {drafted} accepted, {length} and {rates}"
        )
    middle = fits[len(fits) // 2]
    counts = fewest[middle] + _fill(
        most[middle] - fewest[middle], n_accepted - fewest[middle].sum()
    )
    return _histogram(counts.astype(int).tolist(), int(rounds[middle, 0]), n_drafted)


def _histogram(reached: list[int], rounds: int, drafted: int) -> JsonObject:
    """Return the counts of rounds, `reached[j]` of which accepted more than j draft tokens.

    Drafts may be shorter than K, as at the end of a text.
    """
    if not sum(reached) <= drafted <= rounds * len(reached):
        raise ValueError(
            f"{drafted} draft tokens do not fit {rounds} rounds that accepted {reached}"
        )
    histogram = [n - more for n, more in pairwise([rounds, *reached, 0])]
    return {"acceptance_histogram": histogram, "num_spec_tokens": len(reached), "draft_n": drafted}


def _rounding(number: str) -> float:
    """Return the largest rounding error of a number in a text, or of the last of several."""
    return 0.5 * 10.0 ** -len(number.rpartition(".")[2]) + 1e-9


def read_counters(text: str, before: str = "") -> JsonObject:
    """Return the counts of COUNTERS, summed over all labels, minus those in the text `before`."""
    totals = Counter()
    for sign, part in ((1, text), (-1, before)):
        for name, position, value in COUNTERS.findall(part):
            totals[position or name] += sign * int(float(value))
    reached = [totals[n] for n in sorted(filter(str.isdecimal, totals), key=int)]
    return _histogram(reached, totals["drafts"], totals["draft_tokens"])


def counts_in(value: Any) -> Iterator[dict[Any, Any]]:
    """Yield the nested objects that have counts, with vLLM's names."""
    if isinstance(value, Mapping):
        named = {SGLANG.get(name, name): n for name, n in value.items() if n is not None}
        if named.keys() & SHAPES:
            yield named
            return
        value = list(value.values())
    if isinstance(value, list):
        yield from chain.from_iterable(map(counts_in, value))


def read_counts(counts: JsonObject, k: int | None, place: str) -> Request:
    """Return the request with these counts. Raises InputError as `read_log` does."""
    shape = next(shape for name, shape in SHAPES.items() if name in counts)
    if not shape:
        raise InputError(
            f"{place}: got the totals draft_n_accepted {counts['draft_n_accepted']!r:.80} and "
            f"draft_n {counts.get('draft_n')!r:.80}, from which no other K can be known: "
            "give llama-server's /metrics, its log with `-lv 5`, or counts of each round "
            "(vLLM's `detailed`)"
        )
    with reading(place):
        request = validated(shape, counts, place).request(k)
        accepted, drafted = request
        if len(accepted) != len(drafted):
            raise ValueError(
                f"got {len(accepted)} accepted counts, but {len(drafted)} drafted ones"
            )
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
                    f"{place}: {name} is {counts[name]!r:.80}, but its rounds have {n}: "
                    "check the log, or log each round (vLLM's `detailed`)"
                )
    return request


# --- is the acceptance sound? ---


def by_position(requests: Sequence[Request]) -> pd.DataFrame:
    """Return one row per draft position.

    Of `tested` rounds, `accepted` accepted the draft token at this position; `alpha` is the ratio.
    `tau` would be the tokens per round if each of these rounds had ended its draft there.
    """
    accepted, drafted = (np.concatenate(counts) for counts in zip(*requests, strict=True))
    tested = np.minimum(accepted + 1, drafted)
    table = pd.DataFrame({"position": range(1, drafted.max() + 1)})
    for name, counts in {"accepted": accepted, "tested": tested}.items():
        table[name] = [(counts >= place).sum() for place in table["position"]]
    return table.assign(
        alpha=table["accepted"] / table["tested"],
        tau=1 + table["accepted"].cumsum() / len(accepted),
    )


def find_faults(requests: Sequence[Request], k: int | None = None) -> list[dict[str, str]]:
    """Return suspected faults, as opposed to poor drafts: check, evidence, remedy.

    `k` is the requested draft length, if known. See `measure.triage`; counts suffice here.
    """
    table = by_position(requests)
    alphas = [Share.of(*counts) for counts in zip(table["accepted"], table["tested"], strict=True)]
    signs = []
    if k not in (None, len(table)):
        signs.append(
            ("K ignored", f"rounds drafted up to {len(table)} tokens, K = {k} was requested")
        )
    signs += signs_by_position(alphas)
    return [describe_fault(name, evidence) for name, evidence in signs]


def describe_fault(name: str, evidence: str) -> dict[str, str]:
    """Return a row about a fault of `measure.triage.REMEDIES`."""
    return {"check": name, "evidence": evidence, "remedy": REMEDIES[name]}


# --- every K ---


def sweep_log(requests: Sequence[Request], costs: Sequence[Cost], k_max: int) -> pd.DataFrame:
    """Return tokens per round and the speed-up for each machine of `costs` and K up to `k_max`.

    `tau` and `speedup` assume that draft tokens in gaps are accepted as often as elsewhere;
    `tau_low` and `tau_high` assume that none and all of them are. `low` and `high` assume the same
    and include the interval over requests; they are NaN for fewer than FEWEST. `own` marks the
    log's K.
    """
    ks = range(1, k_max + 1)
    logged = max(max(request.drafted) for request in requests)
    usual = float(np.nanmean(np.concatenate([request.right() for request in requests])))
    filled = []  # the counts of all requests, for each way to fill the gaps and each K
    for gaps in (usual, 0.0, 1.0):
        of_requests = [every_k(request.recording(k_max, gaps), ks) for request in requests]
        filled.append(zip(*of_requests, strict=True))
    rows = []
    for cost, (k, *counts) in product(costs, zip(ks, *filled, strict=True)):
        taus = [
            sum(c.n_tokens for c in of_gaps) / sum(c.rounds for c in of_gaps) for of_gaps in counts
        ]
        middle, never, always = (_speedup(of_gaps, cost) for of_gaps in counts)
        ends = np.minimum(never.low, never.value), np.maximum(always.high, always.value)
        rows.append((cost.name, k, *taus, middle.value, *ends, k == logged))
    columns = ["machine", "k", "tau", "tau_low", "tau_high", "speedup", "low", "high", "own"]
    return pd.DataFrame(rows, columns=columns)


def advise(table: pd.DataFrame) -> JsonObject:
    """Return the fastest K up to the log's own, from the rows of `sweep_log` for one machine.

    `beyond` is the fastest of the larger K that may be faster, or 0. Fewer than FEWEST requests
    have no interval: the verdict is `undecided`, and every larger K may be faster.
    """
    answered = table["k"] <= table.loc[table["own"], "k"].max()
    best = table.loc[[table.loc[answered, "speedup"].idxmax()]].to_dict("records")[0]
    faster = table[~answered & ~(table["high"] <= best["high"])]
    return {name: best[name] for name in ("machine", "k", "speedup", "low", "high")} | {
        "verdict": pays(best["low"], best["high"]),
        "beyond": 0 if faster.empty else int(faster.loc[faster["speedup"].idxmax(), "k"]),
    }


def _speedup(counts: Sequence[Counts], cost: Cost) -> Interval:
    """Return the speed-up over plain decoding, with its interval over requests."""
    times = [(c.n_tokens, c.seconds(cost), c.n_tokens, c.n_tokens * cost.step_s) for c in counts]
    return interval(times, rate_ratio)
