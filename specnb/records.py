"""Round, Generation, RunRecord: the only data schema. Every table and figure is a query over these.

The grain is one `Round`: one cycle draft -> verify -> commit. Names are the field's (see the glossary in
`specnb/__init__.py`); units sit in names (`_s` seconds).
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, model_validator

StopReason = Literal["eog", "length", "stop_string", "context"]

REPEAT, LOOPING = 8, 0.3
"""Tokens in a row that make a repeat, and the share of them from which on a text counts as looping."""
LOOP = 4 * REPEAT
"""Tokens in a row that stood in the text before: there it has begun to loop."""


class Round(NamedTuple):
    """One cycle draft -> verify -> commit. A plain decoding step is a round with k = 0.

    `n_accepted` of `k` drafted tokens were kept; `committed_ids` holds them and the correction or bonus token,
    cut where generation ended inside the block. `accept_prob[j]` is the probability with which the rule would
    accept draft j given that it was reached (greedy: 0 or 1). `width` is the number of tokens in the target call:
    k + 1, in the first round k, whose first row of logits the prefill has given.

    `parents` is empty where the drafts are a chain. Of a tree it holds the index in `draft_ids` of the draft that each
    follows, -1 for the newest committed token; `k` counts all nodes, `n_accepted` those of the one path that was
    kept, so that n_accepted / k is no acceptance by position. That is in the same places for chains and trees:
    `accept_prob[j]` is then the probability that one of the drafts at depth j + 1 below the path so far is kept, and
    `n_tested` the number of positions that were put to the test. `accepted_nodes` are the indices that were kept.

    `draft_s + verify_s + rewind_s + other_s` is the wall time of the round; `forward_s` is the part of it that
    was spent inside model forwards, the target's and the drafter's.
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
        """Indices in `draft_ids` of the drafts that were kept, in order; in a tree the path from the root."""
        if not self.parents:
            return tuple(range(self.n_accepted))
        # no two children of a node hold the same token, so the committed tokens are one path
        below = {pair: node for node, pair in enumerate(zip(self.parents, self.draft_ids, strict=True))}
        nodes = [-1]
        for token in self.committed_ids[: self.n_accepted]:
            nodes.append(below[nodes[-1], token])
        return tuple(nodes[1:])

    @property
    def n_tested(self) -> int:
        """Positions at which a draft was kept or rejected, each reached because those before it were kept.

        At the last of them drafts were rejected where this is more than `n_accepted`. A path that ran to its end, or
        a generation that ended within it, rejected none.
        """
        if len(self.committed_ids) <= self.n_accepted:
            return self.n_accepted
        end = self.accepted_nodes[-1] if self.n_accepted else -1
        rejected = end in self.parents if self.parents else self.n_accepted < len(self.draft_ids)
        return self.n_accepted + rejected


class Summary(BaseModel, frozen=True):
    """What one generation comes to. Ratios are None where their denominator is zero."""

    n_tokens: int  # the end-of-generation token included
    n_rounds: int
    total_draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None  # accepted_tokens / total_draft_tokens
    tau: float | None  # tokens per target call, the extra one included: the speed-up of free drafts
    tokens_per_s: float | None  # (n_tokens - 1) / (wall_s - prefill_s): prefill gives the first
    estimated_speedup: float | None  # tokens_per_s * T(1); None where no plain step was timed
    wall_s: float
    prefill_s: float
    draft_s: float
    verify_s: float
    rewind_s: float
    other_s: float
    repeated_share: float | None  # of the text's runs of 8 tokens those that stood in it before
    overhead_share: float | None  # of wall_s - prefill_s what is not a model forward
    stop_reason: StopReason
    fallback: str | None


class Generation(BaseModel, frozen=True, extra="forbid"):
    """One prompt, its generated tokens and every round that made them.

    `token_ids` are the generated ids only. `wall_s` runs from the first prefill token to the last commit and
    contains `prefill_s`, which ends with the logits of the first generated token. `lossless` is False when a lossy
    rule (typical acceptance) was used. `fallback` says why a drafter was not used, or not to the end. `k` is the
    draft length, or the most that `controller` may choose where one chose it round by round. `translation` says how a
    draft model of another vocabulary got to the target's, and how much the two share. `max_new_tokens` is None in
    records from before it was kept.

    >>> step = Round(0, 2, 1, (5, 6), (5, 9), (1.0, 0.0), 0.1, 0.2, 0.0, 0.0, 0.3, 3)
    >>> done = Generation(prompt_ids=(1,), token_ids=(5, 9), rounds=(step,), wall_s=0.3, stop_reason="length")
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
            raise ValueError(f"rounds commit {len(committed)} tokens, token_ids holds {len(self.token_ids)} others")
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
        """Share of the runs of REPEAT tokens that stood before; None for a shorter text. Copiers win on loops."""
        runs = [self.token_ids[i : i + REPEAT] for i in range(len(self.token_ids) - REPEAT + 1)]
        return 1 - len(set(runs)) / len(runs) if runs else None

    @property
    def loops(self) -> bool:
        return (self.repeated_share or 0.0) >= LOOPING

    @property
    def loop_start(self) -> int:
        """Index of the first token of the first LOOP tokens in a row that repeat earlier ones; the length if none do.

        >>> step = Round(0, 0, 0, (), (*range(50), *range(50)), (), 0, 1, 0, 0, 1, 1)
        >>> Generation(prompt_ids=(0,), token_ids=step[4], rounds=(step,), wall_s=1, stop_reason="length").loop_start
        50
        """
        earlier, repeated = set(), 0
        for start in range(len(self.token_ids) - REPEAT + 1):
            run = self.token_ids[start : start + REPEAT]
            repeated = repeated + 1 if run in earlier else 0
            earlier.add(run)
            if repeated > LOOP - REPEAT:
                return start - repeated + 1
        return len(self.token_ids)

    def before_loop(self) -> tuple[int, float]:
        """Return the tokens decoded after prefill up to `loop_start`, in whole rounds, and their seconds."""
        n_tokens, seconds = 0, 0.0
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
        """Tokens made after prefill: all but the first, whose logits are the prefill's."""
        return max(0, len(self.token_ids) - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed; None for fewer than two tokens."""
        return self.n_decoded / self.decode_s if self.n_decoded and self.decode_s > 0 else None

    def summary(self, step_s: float | None = None) -> Summary:
        """Counts, ratios and the time split.

        `step_s` is T(1), seconds of one plain decoding step of the same target: `estimated_speedup` needs it. It counts
        what drafting and wider verification cost, which tau does not.
        """
        speed, times = self.tokens_per_s, ("draft_s", "verify_s", "rewind_s", "other_s", "forward_s")
        seconds = {name: sum(getattr(r, name) for r in self.rounds) for name in times}
        overhead_share = 1 - seconds["forward_s"] / self.decode_s if speed else None
        estimated_speedup = speed * step_s if speed and step_s else None
        return Summary(
            **{name: getattr(self, name) for name in Summary.model_fields if hasattr(self, name)},  # of one name here
            **seconds,  # forward_s is left out: it is in draft_s and verify_s
            n_tokens=len(self.token_ids), n_rounds=len(self.rounds), overhead_share=overhead_share,
            estimated_speedup=estimated_speedup,
        )  # fmt: skip


def pool_rounds(generations: Iterable[Generation]) -> dict[str, Any]:
    """Return counts and ratios over all rounds of generations. A ratio is None where there is no draft or no round.

    >>> pool_rounds([])
    {'drafted': 0, 'accepted': 0, 'acceptance_rate': None, 'tau': None}
    """
    rounds = [r for g in generations for r in g.rounds]
    drafted, accepted = sum(r.k for r in rounds), sum(r.n_accepted for r in rounds)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": sum(len(r.committed_ids) for r in rounds) / len(rounds) if rounds else None,
    }


class RunRecord(BaseModel, frozen=True, extra="forbid"):
    """One run of one experiment: what was asked, where, and everything that was generated.

    >>> now = datetime(2026, 1, 1)
    >>> run = RunRecord(run_id="r", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now)
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
    measurements: dict[str, Any] = {}  # what is not a generation: cost curves, c
    status: Literal["completed", "failed"] = "completed"
    error: str | None = None
