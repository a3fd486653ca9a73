"""Numbers that tell faults of heads apart: how right they are, how far off the backbone, how far from their start."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.medusa.accuracy import NO_LABEL, Scores, States, Trace
from specnb.medusa.heads import Heads

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

    def behind_first(self) -> "Accuracy":
        """Of all heads but the first."""
        return Accuracy(self.rate[1:], self.n[1:])


def accuracy(scores: Sequence[Scores]) -> Accuracy:
    """First choices that are right, over all traces."""
    rank = np.concatenate([one.rank for one in scores])
    n = (rank != NO_LABEL).sum(0)
    return Accuracy((rank == 0).sum(0) / n.clip(1), n)


def zero_block_error(heads: Heads, probe: States) -> float:
    """How far the heads' logits without what their blocks add are off the backbone's (relative)."""
    return _logits_error(heads, heads.normed(probe.fed(heads.config.input)), probe)


def input_error(heads: Heads, probe: States) -> float:
    """How far what the blocks are fed is off the state behind the backbone's final norm (relative)."""
    return relative_error(heads.normed(probe.fed(heads.config.input)), probe.post_norm)


def lm_head_error(heads: Heads, probe: States) -> float:
    """How far the shared lm_head's logits of the right state are off the backbone's (relative)."""
    return _logits_error(heads, probe.post_norm, probe)


def _logits_error(heads: Heads, state: Tensor, probe: States) -> float:
    return relative_error(F.linear(state, heads.shared_lm_head), base_logits(heads, probe))


def base_logits(heads: Heads, probe: States) -> Tensor:
    """The backbone's own logits over the draft vocabulary."""
    base = torch.from_numpy(probe.logits)
    return base if heads.token_map is None else base[:, heads.token_map.cpu()]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of what is expected."""
    expected = expected.float().cpu()
    return float((found.float().cpu() - expected).abs().max() / expected.abs().max())


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
