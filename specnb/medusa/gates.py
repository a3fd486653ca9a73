"""Gates before every speed of heads: are these the trained heads? If not, which fault is it?

The loader's report is clean. Without their blocks the heads give the backbone's logits. The
learning rate stayed above zero in the training. Chains accept more drafts than with shuffled
weights, and not fewer than under another norm. Chains accept the drafts that are right offline. If
a gate fails, a diagnosis takes the place of a speed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.io import read_toml
from specnb.measure.experiment import Progress, silent
from specnb.medusa.accuracy import (
    HeadsEvidence,
    Reference,
    Scores,
    States,
    block_input,
    compare_rounds,
    score,
    served_counts,
    share_interval,
    states_along,
)
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.nets import Backbone, Heads

EXACT = 1e-5
"""Largest relative difference of float32 logits that differ only in the order of additions."""
DEAD_LR = 1e-3
"""Learning rates below this share of the highest train nothing. The presets end at 1/30 and 1/100."""
DEAD_STEPS = 0.05
"""Share of steps with the LR decayed to zero that is a fault. A cosine to exactly zero has 2 %."""
STANDARD_ERRORS, LEAST_GAIN = 3.0, 0.2
"""A gain counts above 3 standard errors and 0.2 accepted drafts per round; the shipped Medusa heads gain 0.37."""
MOST_DIFFERENT = 0.05
"""Share of rounds that may accept other drafts than offline: rounding changes near-ties."""

REMEDIES = read_toml(Path(__file__).with_name("remedies.toml"))
"""Every fault that has a name, and its remedy."""
GENERAL = ("undertrained", "served differently than scored")
"""Faults that are diagnosed only if no other is."""


class Diagnosis(NamedTuple):
    """A fault's name, the evidence, and the remedy."""

    name: str
    evidence: str
    remedy: str


class Gate(NamedTuple):
    """A gate's verdict: `says` is the measurement in words.

    If the gate failed, `fault` is a name of REMEDIES.
    """

    name: str
    passed: bool
    says: str
    fault: str


class Checked(NamedTuple):
    """The gates, and the evidence for their verdicts."""

    gates: tuple[Gate, ...]
    evidence: HeadsEvidence

    @property
    def failed(self) -> list[str]:
        return [gate.name for gate in self.gates if not gate.passed]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The faults that the failed gates found."""
        failed = [gate for gate in self.gates if not gate.passed]
        causes = [gate for gate in failed if gate.fault not in GENERAL] or failed[:1]
        return [Diagnosis(gate.fault, gate.says, REMEDIES[gate.fault]) for gate in causes]

    def table(self) -> pd.DataFrame:
        """Columns: gate, passed, says."""
        return pd.DataFrame([gate[:3] for gate in self.gates], columns=["gate", "passed", "says"])


@torch.inference_mode()
def judge_gates(reference: Reference, heads: Heads, report: LoadReport | None, progress: Progress = silent) -> Checked:
    """Measure heads and judge all gates.

    `report` is the loader's report, or None if nothing was loaded.
    """
    evidence = HeadsEvidence(reference, heads, report, progress)
    return Checked(tuple(Gate(name, *judge(evidence)) for name, judge in GATES.items()), evidence)


Verdict = tuple[bool, str, str]
"""The fields of a `Gate` after its name."""


def judge_loading(e: HeadsEvidence) -> Verdict:
    """A checkpoint was loaded, and the loader found nothing suspicious."""
    if e.report is None:
        return (
            False,
            "no checkpoint was loaded: these heads have their initial weights",
            "never loaded",
        )
    findings = "; ".join(e.report.findings)
    return not findings, findings or "the loader's report is clean", "never loaded"


def judge_zero_blocks(e: HeadsEvidence) -> Verdict:
    """Without their blocks the heads give the backbone's own logits, from the state normed once."""
    states = e.reference.longest
    normed = block_input(e.heads, states)
    expected = torch.from_numpy(states.logits)
    if e.heads.token_map is not None:
        expected = expected[:, e.heads.token_map.cpu()]
    # Both sides are rounded in 16-bit types: allow the spacing at the largest logit. An int4 lm_head
    # rounds its weights and its products, each to bfloat16.
    allowed = max(EXACT, 2 * torch.finfo(e.heads.shared_lm_head.dtype).eps)
    error = relative_error(F.linear(normed, e.heads.shared_lm_head), expected)
    says = f"without blocks, logits differ from the backbone's by {error:.2g} (relative), {allowed:.2g} is allowed"
    others = other_norms(e.reference.backbone, states).items()
    fault = next((name for name, other in others if relative_error(normed, other) <= allowed), "wrong norm")
    return error <= allowed, says, fault


def other_norms(backbone: Backbone, states: States) -> dict[str, Tensor]:
    """Return the inputs of blocks under other norms (applied twice, not at all), by fault."""
    return {"double norm": backbone.norm(states.post_norm), "missing norm": states.pre_norm}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    expected = expected.float().cpu()
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def judge_schedule(e: HeadsEvidence) -> Verdict:
    """The learning rate stayed above zero until the end of the training."""
    if not e.log:
        return True, "no training log came with the heads: nothing to judge", ""
    dead = dead_steps(e.log)
    says = f"{dead:.0%} of {e.log[-1]['step']} steps at under {DEAD_LR:g} of the highest learning rate"
    return dead < DEAD_STEPS, says, "dead schedule"


def dead_steps(log: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of steps, after the highest rate, at under DEAD_LR of it.

    The lines of a `log` have step, ascending, and lr, which holds from the line before.
    """
    step, lr = np.array([(line["step"], line["lr"]) for line in log], dtype=float).T
    top = lr.argmax()
    dead = lr[top:] <= DEAD_LR * lr[top]
    return float(np.diff(step, prepend=0)[top:][dead].sum() / step[-1])


def judge_acceptance(e: HeadsEvidence) -> Verdict:
    """Chains accept more drafts than with shuffled weights, and not fewer than under another norm."""
    if judge_zero_blocks(e)[0]:  # with a wrong input, other norms tell nothing about the training
        for fault in ("double norm", "missing norm"):
            normed = e.score_all(normed=lambda s, fault=fault: other_norms(e.reference.backbone, s)[fault])
            gain, is_better = chain_gain(normed, e.scores)
            if is_better:
                says = f"another norm than that of the backbone gains {gain:.3f} accepted drafts per round"
                return False, says, fault
    gain, is_better = chain_gain(e.scores, e.score_all(shuffle(e)))
    says = f"shuffling the weights costs {gain:.3f} accepted drafts per round"
    return is_better, says, "undertrained"


def shuffle(e: HeadsEvidence) -> Heads:
    """Return the heads with the weights of each block in random order: of the same size, untrained."""
    shuffled = Heads(e.heads.config, e.reference.backbone, e.heads.token_map)
    shuffled.load_state_dict(e.heads.state_dict())
    generator = torch.Generator().manual_seed(0)
    for name, weight in shuffled.named_parameters():
        if ".blocks." in name:
            order = torch.randperm(weight.numel(), generator=generator)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return shuffled


def chain_gain(scores: Sequence[Scores], others: Sequence[Scores]) -> tuple[float, bool]:
    """Return the gain of `scores` in accepted drafts per round, and whether it counts.

    Every position of the plain texts counts as the start of a round.
    """
    accepted, of_others = (np.concatenate([(s.rank == 0).cumprod(1).sum(1) for s in of]) for of in (scores, others))
    gains = accepted - of_others
    error = gains.std() / np.sqrt(len(gains))
    return float(gains.mean()), bool(gains.mean() > max(LEAST_GAIN, STANDARD_ERRORS * error))


def judge_serving(e: HeadsEvidence) -> Verdict:
    """Greedy chains accept the drafts that are right offline, in the same rounds.

    If rounding made a chain's text differ from the plain text, the chain's own text is scored.
    """
    target = e.reference.target
    rounds = differ = 0
    for text, chain, scores in zip(e.reference.plain, e.chains, e.scores, strict=True):
        if text.token_ids != chain.token_ids:
            scores = score(e.heads, states_along(target, chain))
        drafted, otherwise = compare_rounds(chain, scores)
        rounds += drafted
        differ += otherwise
    alpha = share_interval([served_counts(chain)[0] for chain in e.chains])
    says = (
        f"alpha_1 of the chains is {alpha.value:.3f} [{alpha.low:.3f}, {alpha.high:.3f}]; "
        f"{differ} of {rounds} rounds accept other drafts than those that are right offline"
    )
    return rounds > 0 and differ <= MOST_DIFFERENT * rounds, says, "served differently than scored"


GATES = {
    "loader": judge_loading,
    "zero blocks": judge_zero_blocks,
    "acceptance": judge_acceptance,
    "serving": judge_serving,
    "schedule": judge_schedule,
}
"""Judges by the name of the gate."""
