"""Why heads draft badly: each fault by the test that tells it from the others.

A fault is looked for after a gate has failed: are the weights those of training at all (`never loaded`); would they be
right about another input (`double norm`, `missing norm`) or another token (`label shift`); is what they are multiplied
with the backbone's (`wrong lm_head`); did training still move them (`dead schedule`). Several may hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specnb.measure.curve import Curve
from specnb.medusa.accuracy import NO_LABEL, Scores, States, Trace, score
from specnb.medusa.nets import Heads

STANDARD_ERRORS = 3.0
LEAST_GAIN = 0.05
"""A gain in accuracy counts above 3 standard errors, and above 5 points: what a fault costs is many times that."""


class Accuracy(NamedTuple):
    """Share of positions whose token is each head's first choice, and how many positions, `(n_heads,)` each."""

    rate: np.ndarray
    n: np.ndarray

    def beats(self, other: "Accuracy") -> bool:
        """The mean over heads is higher by more than LEAST_GAIN and STANDARD_ERRORS."""
        spread = sqrt(sum(float((a.rate * (1 - a.rate) / a.n.clip(1)).sum()) for a in (self, other))) / len(self.n)
        return float(self.rate.mean() - other.rate.mean()) > max(LEAST_GAIN, STANDARD_ERRORS * spread)


def accuracy(scores: Sequence[Scores]) -> Accuracy:
    """First choices that are right, over all traces."""
    rank = np.concatenate([score.rank for score in scores])
    n = (rank != NO_LABEL).sum(0)
    return Accuracy((rank == 0).sum(0) / n.clip(1), n)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of what is expected."""
    expected = expected.float().cpu()
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def residual_share(heads: Heads, traces: Sequence[Trace]) -> np.ndarray:
    """What each head's blocks add to the state they are fed, as a share of that state's L2 norm, `(n_heads,)`."""
    n_heads, added, fed = heads.config.n_heads, np.zeros(heads.config.n_heads), 0.0
    for along in traces:
        n = max(0, len(along.ids) - n_heads + 1)  # rows behind which a Hydra is shown all tokens it looks at
        normed = heads.normed(along.fed(heads.config.input))[:n]
        since = torch.stack([along.ids[i : i + n] for i in range(n_heads)], dim=1)
        fed += float(normed.float().square().sum())
        added += [float((heads.features(i, normed, since) - normed).float().square().sum()) for i in range(n_heads)]
    return np.sqrt(added / max(fed, 1e-30))


class Diagnosis(NamedTuple):
    """A fault's name, what was seen of it, and what to do."""

    name: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """What the gates have measured: `scores` along `traces`, and the `probe` that zero-block heads were compared on.

    `curve` is that of the training, None where none came with the heads; `failed` names the gates that failed.
    """

    heads: Heads
    norm: nn.Module
    traces: Sequence[Trace]
    scores: Sequence[Scores]
    probe: States
    tolerance: float
    curve: Curve | None
    failed: frozenset[str] = frozenset()

    @cached_property
    def fed(self) -> Tensor:
        """What the blocks are fed in the states of the probe."""
        return self.heads.normed(self.probe.fed(self.heads.config.input))

    @cached_property
    def base_logits(self) -> Tensor:
        """The backbone's own logits over the draft vocabulary."""
        base = torch.from_numpy(self.probe.logits)
        return base if self.heads.token_map is None else base[:, self.heads.token_map.cpu()]

    def logits_error(self, state: Tensor) -> float:
        """How far the shared lm_head's logits of `state` are off the backbone's (relative)."""
        return relative_error(F.linear(state, self.heads.shared_lm_head), self.base_logits)


LIKE_NEW = 0.08
"""Relative distance from a new nn.Linear's spread that is still one: 1000 uniform draws stray 1.4 % (one sigma)."""
SMALL_STEP = 0.01
"""Heads whose blocks add less than 1 % to the state (L2) have hardly left the start, where they add nothing."""
COPIES = 0.9
"""Share of positions at which a head says the backbone's next token, from which on it is called a copy of it."""
ONCE = (
    "apply the final norm once: heads that are fed the state in front of it are pre_norm, those that are fed the state "
    "behind it (hidden_states[-1] in transformers) are post_norm"
)
FOREIGN = 0.5
"""Cosine between a private lm_head and the backbone's, which it starts as: training moves it by far less than this."""


def never_loaded(e: Evidence) -> Diagnosis | None:
    """Blocks as they are made, not as they are trained: all zero, or drawn as torch draws a new layer."""
    zero = [i for i in range(len(e.heads.heads)) if not any(bool(w.any()) for w in _block_weights(e.heads, i))]
    new = [i for i in range(len(e.heads.heads)) if all(_like_new(w) for w in _block_weights(e.heads, i))]
    shared = e.heads.shared_lm_head
    if e.heads.config.lm_head == "private" and any(not torch.equal(h.lm_head.weight, shared) for h in e.heads.heads):
        zero = []  # a trained lm_head without blocks is a poor head, but a loaded one
    if not (zero or new):
        return None
    evidence = f"the blocks of heads {zero} are all zero" if zero else (
        f"the blocks of heads {new} are drawn as a new layer's are: uniform, within 1/sqrt(inputs)")  # fmt: skip
    return Diagnosis(
        "never loaded", f"{evidence}; {_copying(e)}", "load the trained checkpoint (--heads-checkpoint PATH)"
    )


def wrong_norm(e: Evidence) -> Diagnosis | None:
    """What the blocks are fed is not the state behind the backbone's final norm, applied once."""
    if (error := relative_error(e.fed, e.probe.post_norm)) <= e.tolerance:
        return None
    seen = f"what the blocks are fed is {error:.2g} (relative) off the state behind the backbone's final norm"
    if relative_error(e.fed, e.norm(e.probe.post_norm)) <= e.tolerance:
        return Diagnosis("double norm", f"{seen}: it is that state, normed once more", ONCE)
    if relative_error(e.fed, e.probe.pre_norm) <= e.tolerance:
        return Diagnosis("missing norm", f"{seen}: it is the state in front of it", ONCE)
    return Diagnosis("wrong norm", seen, "use the heads with the backbone whose norm they were trained on")


def trained_under_another_norm(e: Evidence) -> Diagnosis | None:
    """The heads are much better when the norm is applied twice, or not at all, than when it is applied once."""
    # Now it is not applied once; or there are no blocks, and another norm only turns lm_heads away from their start.
    if wrong_norm(e) or not residual_share(e.heads, e.traces).any():
        return None
    now = accuracy(e.scores)
    inputs: dict[bool, Callable[[Trace], Tensor]] = {True: lambda t: e.norm(t.post_norm), False: lambda t: t.pre_norm}
    scores = {twice: accuracy([score(e.heads, t, normed=make(t)) for t in e.traces]) for twice, make in inputs.items()}
    twice = max(scores, key=lambda key: scores[key].rate.mean())
    if not scores[twice].beats(now):
        return None
    name, fed = ("double norm", "twice") if twice else ("missing norm", "not at all")
    return Diagnosis(
        name,
        f"the heads are right in {_percent(now.rate)} of their positions, but in {_percent(scores[twice].rate)} when "
        f"the final norm is applied {fed}: so they were trained",
        ONCE,
    )


def wrong_lm_head(e: Evidence) -> Diagnosis | None:
    """The lm_head that heads share is not the backbone's, or their own ones did not start from it."""
    remedy = "use the heads with the backbone they were trained on, and its lm_head"
    if (error := e.logits_error(e.probe.post_norm)) > e.tolerance:
        return Diagnosis(
            "wrong lm_head",
            f"the heads' shared lm_head gives logits {error:.2g} (relative) off the backbone's from the same state, "
            f"{e.tolerance:.2g} would be rounding",
            remedy,
        )
    if e.heads.config.lm_head == "private":
        shared, private = e.heads.shared_lm_head.float(), [head.lm_head.weight.float() for head in e.heads.heads]
        cosine = np.mean([F.cosine_similarity(weight.flatten(), shared.flatten(), 0).item() for weight in private])
        if cosine < FOREIGN:
            evidence = f"the heads' own lm_heads have a cosine of {cosine:.2f} to the backbone's"
            return Diagnosis("wrong lm_head", evidence, remedy)
    return None


def label_shift(e: Evidence) -> Diagnosis | None:
    """Head i is much more often right about the token before or behind the one that it has to say.

    Heads that learned little say the backbone's next token, and the first then looks shifted by -1. So those behind it
    must show it too, and a single head is asked about the token behind only.
    """
    now = accuracy(e.scores)
    alone = len(now.n) == 1
    shifts = (1,) if alone else (-1, 1)
    scores = {shift: accuracy([score(e.heads, t, shift=shift) for t in e.traces]) for shift in shifts}
    shift = max(scores, key=lambda key: scores[key].rate.mean())
    deeper = alone or Accuracy(*(x[1:] for x in scores[shift])).beats(Accuracy(*(x[1:] for x in now)))
    if never_loaded(e) or not deeper or not scores[shift].beats(now):
        return None
    return Diagnosis(
        "label shift",
        f"head i is right about token t + {2 + shift} + i in {_percent(scores[shift].rate)}, about its own, token "
        f"t + 2 + i, in {_percent(now.rate)} (heads 0..{len(now.rate) - 1})",
        "train again: from the state of token t head i has to say token t + 2 + i",
    )


def dead_schedule(e: Evidence) -> Diagnosis | None:
    """Training went on with no learning rate to speak of, or never moved the blocks."""
    moved = residual_share(e.heads, e.traces)
    small, added = float(moved.max()) < SMALL_STEP, f"the blocks add {_percent(moved)} to the state"
    if e.curve is not None and e.curve.dead and (e.curve.falling or small):
        seen = f"{e.curve}; {added}"
    elif e.curve is None and small and moved.any():
        seen = f"{added}, and no training curve came with them; {_copying(e)}"
    else:
        return None
    return Diagnosis(
        "dead schedule", seen, "train again with a schedule that ends above zero at the last step (eta_min)"
    )


TESTS: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    never_loaded, wrong_norm, wrong_lm_head, trained_under_another_norm, label_shift, dead_schedule,
)  # fmt: skip
"""From what the weights alone tell to what only accuracies tell."""


def diagnose(e: Evidence) -> list[Diagnosis]:
    """All faults that fit, the most specific first; where none does, what the failed gates themselves say."""
    if diagnoses := [diagnosis for test in TESTS if (diagnosis := test(e)) is not None]:
        return diagnoses
    if "acceptance" in e.failed:
        return [Diagnosis(
            "never loaded",
            "acceptance is no better than that of the same heads with their weights shuffled; neither norm, labels, "
            "lm_head, nor the training's schedule explain it",
            "check that these weights are the trained ones; if they are, train longer",
        )]  # fmt: skip
    if "serving" in e.failed:
        return [Diagnosis(
            "served otherwise than scored",
            "the heads are right along the plain text, but not in the rounds that were served",
            "look at the state, the tokens and the position that the drafter hands to the heads",
        )]  # fmt: skip
    return []


def _block_weights(heads: Heads, head: int) -> list[Tensor]:
    return [w for name, w in heads.heads[head].named_parameters() if name.startswith("blocks.")]


def _like_new(weight: Tensor) -> bool:
    """Uniform on ±1/sqrt(inputs), as nn.Linear draws a weight (He et al. 1502.01852 with a = sqrt(5)).

    Biases are too few to tell, and say nothing against it.
    """
    if weight.dim() < 2:
        return True
    bound = 1 / sqrt(weight.shape[1])
    largest, spread = float(weight.abs().max()), float(weight.float().std())
    return abs(largest / bound - 1) < LIKE_NEW and abs(spread * sqrt(3) / bound - 1) < LIKE_NEW


def _copying(e: Evidence) -> str:
    """What untrained heads are known by: each says what the backbone says next."""
    same = [np.mean(s.best == t.best.cpu().numpy()[:, None], axis=0) for s, t in zip(e.scores, e.traces, strict=True)]
    shares = np.mean(same, axis=0)
    copies = " (untrained heads do)" if float(shares.min()) > COPIES else ""
    return f"the heads say the backbone's next token in {_percent(shares)}{copies}"


def _percent(shares: np.ndarray) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)
