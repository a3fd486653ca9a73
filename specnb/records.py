"""Round, Generation, RunRecord: the only data schema. Every table and figure is a query over these.

A record consists of rounds, cycles draft -> verify -> commit. The glossary in `specnb/__init__.py`
defines the terms; names end in their unit (`_s`: seconds).
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, model_validator

StopReason = Literal["eog", "length", "stop_string", "context"]

REPEAT = 8
"""Length of the token sequences whose repetition is counted."""
LOOPING = 0.3
"""A text loops if at least this share of its sequences occurred before."""
LOOP = 4 * REPEAT
"""A loop starts with this many consecutive tokens that occurred before."""


class Round(NamedTuple):
    """One cycle draft -> verify -> commit. A plain decoding step is a round with k = 0.

    `n_accepted` of `k` draft tokens were accepted. `committed_ids` contains these and the
    correction or bonus token, truncated where the generation ended. `accept_prob[j]` is the
    probability that the rule accepts draft token j, given that it is tested (greedy: 0 or 1).
    `width` is the number of tokens in the target's forward pass: k + 1, or k in the first round,
    where the prefill computed the first row of logits.

    `parents` is empty for a chain. For a tree, it contains for each draft token the index in
    `draft_ids` of its parent, -1 for the newest committed token. `k` then counts all nodes and
    `n_accepted` those of the accepted path, so n_accepted / k is not an acceptance rate by
    position. Use `accept_prob[j]`, the probability that a node at depth j + 1 below the path so far
    is accepted, and `n_tested`, the number of tested depths.

    `draft_s + verify_s + rewind_s + other_s` is the wall time of the round; `forward_s` is the part
    of it spent in forward passes of target and drafter.
    """

    index: int
    k: int
    n_accepted: int
    draft_ids: tuple[int, ...]
    committed_ids: tuple[int, ...]
    accept_prob: tuple[float, ...]
    draft_s: float
    verify_s: float
    rewind_s: float
    other_s: float
    forward_s: float
    width: int
    parents: tuple[int, ...] = ()

    @property
    def accepted_nodes(self) -> tuple[int, ...]:
        """Indices in `draft_ids` of the accepted draft tokens, in order (tree: from the root)."""
        if not self.parents:
            return tuple(range(self.n_accepted))
        # The children of a node are distinct tokens, so the committed tokens identify one path.
        edges = zip(self.parents, self.draft_ids, strict=True)
        node_of = {edge: node for node, edge in enumerate(edges)}
        nodes = [-1]
        for token in self.committed_ids[: self.n_accepted]:
            nodes.append(node_of[nodes[-1], token])
        return tuple(nodes[1:])

    @property
    def n_tested(self) -> int:
        """Number of positions (tree: depths) at which a draft token was accepted or rejected.

        It exceeds `n_accepted` by 1 if a draft token was rejected, but not if all were accepted or
        the generation ended first.
        """
        if len(self.committed_ids) <= self.n_accepted:
            return self.n_accepted
        end = self.accepted_nodes[-1] if self.n_accepted else -1
        rejected = end in self.parents if self.parents else self.n_accepted < len(self.draft_ids)
        return self.n_accepted + rejected


class Summary(BaseModel, frozen=True):
    """Totals and ratios of one generation. A ratio is None if its denominator is zero."""

    n_tokens: int  # including the end-of-generation token
    n_rounds: int
    total_draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None  # accepted_tokens / total_draft_tokens
    tau: float | None  # committed tokens per target forward pass: the speedup if drafting is free
    tokens_per_s: float | None  # (n_tokens - 1) / (wall_s - prefill_s): prefill computes the first
    estimated_speedup: float | None  # tokens_per_s * T(1); None if no plain step was timed
    wall_s: float
    prefill_s: float
    draft_s: float
    verify_s: float
    rewind_s: float
    other_s: float
    repeated_share: float | None  # share of the text's 8-token sequences that occurred before
    overhead_share: float | None  # share of wall_s - prefill_s outside of forward passes
    stop_reason: StopReason
    fallback: str | None


class Generation(BaseModel, frozen=True, extra="forbid"):
    """One prompt, the generated tokens, and the rounds that produced them.

    `token_ids` excludes the prompt. `wall_s` lasts from the first prefill token to the last commit.
    It includes `prefill_s`, which ends with the logits of the first generated token. `lossless` is
    False if a lossy rule (typical acceptance) was used. `fallback` is the reason why drafting was
    off or ended early. `k` is the draft length, or the maximum if a `controller` chose K in each
    round. `translation` describes how a draft model's vocabulary was mapped to the target's, and
    how much they share. `max_new_tokens` is None in older records.

    >>> step = Round(0, 2, 1, (5, 6), (5, 9), (1.0, 0.0), 0.1, 0.2, 0.0, 0.0, 0.3, 3)
    >>> done = Generation(
    ...     prompt_ids=(1,), token_ids=(5, 9), rounds=(step,), wall_s=0.3, stop_reason="length"
    ... )
    >>> done.tau, done.acceptance_rate
    (2.0, 0.5)
    """

    prompt_id: str = ""
    category: str = ""
    target: str = ""
    drafter: str = ""
    rule: str = ""
    k: int = 0
    controller: str = ""
    translation: str = ""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    seed: int = 0
    lossless: bool = True
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str = ""
    rounds: tuple[Round, ...]
    wall_s: float
    prefill_s: float = 0.0
    stop_reason: StopReason
    fallback: str | None = None

    @model_validator(mode="after")
    def _rounds_make_the_tokens(self) -> "Generation":
        committed = tuple(token for r in self.rounds for token in r.committed_ids)
        if committed != self.token_ids:
            n = len(self.token_ids)
            raise ValueError(
                f"rounds commit {len(committed)} tokens, which differ from {n} token_ids"
            )
        return self

    @property
    def total_draft_tokens(self) -> int:
        return sum(r.k for r in self.rounds)

    @property
    def accepted_tokens(self) -> int:
        return sum(r.n_accepted for r in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        return pool_rounds([self])["acceptance_rate"]

    @property
    def tau(self) -> float | None:
        return pool_rounds([self])["tau"]

    @property
    def repeated_share(self) -> float | None:
        """Share of sequences of REPEAT tokens that occurred before; None for shorter texts.

        Prompt lookup is unusually fast on texts that loop.
        """
        starts = range(len(self.token_ids) - REPEAT + 1)
        runs = [self.token_ids[i : i + REPEAT] for i in starts]
        return 1 - len(set(runs)) / len(runs) if runs else None

    @property
    def loops(self) -> bool:
        return (self.repeated_share or 0.0) >= LOOPING

    @property
    def loop_start(self) -> int:
        """Index of the first of LOOP consecutive tokens that occurred before; the length if none.

        >>> step = Round(0, 0, 0, (), (*range(50), *range(50)), (), 0, 1, 0, 0, 1, 1)
        >>> looping = Generation(
        ...     prompt_ids=(0,), token_ids=step[4], rounds=(step,), wall_s=1, stop_reason="length"
        ... )
        >>> looping.loop_start
        50
        """
        earlier = set()
        repeated = 0
        for start in range(len(self.token_ids) - REPEAT + 1):
            run = self.token_ids[start : start + REPEAT]
            repeated = repeated + 1 if run in earlier else 0
            earlier.add(run)
            if repeated > LOOP - REPEAT:
                return start - repeated + 1
        return len(self.token_ids)

    def before_loop(self) -> tuple[int, float]:
        """Return the number of tokens after prefill and before `loop_start`, and their seconds.

        Counts whole rounds.
        """
        n_tokens = 0
        seconds = 0.0
        for r in self.rounds:
            if n_tokens and n_tokens + len(r.committed_ids) > self.loop_start:
                break
            n_tokens += len(r.committed_ids)
            seconds += r.draft_s + r.verify_s + r.rewind_s + r.other_s
        return n_tokens - 1, seconds

    @property
    def decode_s(self) -> float:
        """Seconds after prefill."""
        return self.wall_s - self.prefill_s

    @property
    def n_decoded(self) -> int:
        """Tokens generated after prefill: all but the first, whose logits the prefill computes."""
        return max(0, len(self.token_ids) - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed without prefill; None for fewer than two tokens."""
        return self.n_decoded / self.decode_s if self.n_decoded and self.decode_s > 0 else None

    def summary(self, step_s: float | None = None) -> Summary:
        """Return counts, ratios and times.

        `step_s` is T(1), the seconds of one plain decoding step of the same target, from which
        `estimated_speedup` is computed. Unlike tau, it includes the costs of drafting and of wider
        verification.
        """
        times = ("draft_s", "verify_s", "rewind_s", "other_s", "forward_s")
        seconds = {name: sum(getattr(r, name) for r in self.rounds) for name in times}
        forward_s = seconds.pop("forward_s")  # a part of draft_s and verify_s
        shared = {name: getattr(self, name) for name in Summary.model_fields if hasattr(self, name)}
        speed = self.tokens_per_s
        return Summary(
            **shared,
            **seconds,
            n_tokens=len(self.token_ids),
            n_rounds=len(self.rounds),
            overhead_share=1 - forward_s / self.decode_s if speed else None,
            estimated_speedup=speed * step_s if speed and step_s else None,
        )


def pool_rounds(generations: Iterable[Generation]) -> dict[str, Any]:
    """Return counts and ratios over all rounds of `generations`; None for a zero denominator.

    >>> pool_rounds([])
    {'drafted': 0, 'accepted': 0, 'acceptance_rate': None, 'tau': None}
    """
    rounds = [r for g in generations for r in g.rounds]
    drafted = sum(r.k for r in rounds)
    accepted = sum(r.n_accepted for r in rounds)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": sum(len(r.committed_ids) for r in rounds) / len(rounds) if rounds else None,
    }


class RunRecord(BaseModel, frozen=True, extra="forbid"):
    """One run of an experiment: its parameters, its provenance, and all generations.

    >>> now = datetime(2026, 1, 1)
    >>> run = RunRecord(
    ...     run_id="r", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now
    ... )
    >>> RunRecord.model_validate_json(run.model_dump_json()) == run
    True
    """

    schema_version: Literal[1] = 1
    run_id: str
    experiment: str
    params: dict[str, Any]
    provenance: dict[str, Any]
    started: datetime
    ended: datetime
    generations: tuple[Generation, ...] = ()
    measurements: dict[str, Any] = {}  # other results, such as cost curves and c
    status: Literal["completed", "failed"] = "completed"
    error: str | None = None
