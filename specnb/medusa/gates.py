"""Gates before speed measurements of heads: do the heads work? If not, which fault?

* loader: the loader's report is clean;
* zero blocks: without their blocks, the heads return the backbone's logits;
* acceptance: chains accept more than with shuffled weights, and no less than with another norm;
* serving: chains accept the draft tokens that are correct offline;
* schedule: the learning rate stayed above zero in training.

If a gate fails, a diagnosis is reported instead of a speed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
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
from specnb.medusa.nets import Backbone, Heads, multiply

EXACT = 1e-5
"""Largest relative difference between float32 logits that differ only in summation order."""
DEAD_LR = 1e-3
"""LRs up to this share of the peak count as zero. The presets of heads end at 1/30 and 1/200."""
DEAD_STEPS = 0.05
"""Share of steps with the LR decayed to zero that is a fault; a cosine to exactly zero has 2 %."""
STANDARD_ERRORS, LEAST_GAIN = 3.0, 0.2
"""A gain counts above 3 standard errors and 0.2 tokens per round; shipped Medusa heads: 0.37."""
MOST_DIFFERENT = 0.05
"""Share of rounds that may accept other draft tokens than offline: rounding changes near-ties."""

REMEDIES = read_toml(Path(__file__).with_name("remedies.toml"))
"""Remedies by name of the fault."""
GENERAL = ("undertrained", "served differently than scored")
"""Faults that are diagnosed only if no other fault is."""


class Diagnosis(NamedTuple):
    """A fault, with the evidence and a remedy."""

    name: str
    evidence: str
    remedy: str


class Gate(NamedTuple):
    """A gate's verdict: `says` is the measurement; if it failed, `fault` is a key of REMEDIES."""

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
        """Return one row per gate: gate, passed, says."""
        return pd.DataFrame([gate[:3] for gate in self.gates], columns=["gate", "passed", "says"])


@torch.inference_mode()
def judge_gates(
    reference: Reference, heads: Heads, report: LoadReport | None, progress: Progress = silent
) -> Checked:
    """Measure heads and judge all gates; `report` is None if nothing was loaded."""
    evidence = HeadsEvidence(reference, heads, report, reference.chains(heads, progress))
    return Checked(tuple(Gate(name, *judge(evidence)) for name, judge in GATES.items()), evidence)


Verdict = tuple[bool, str, str]
"""The fields of a `Gate` after its name."""


def judge_loading(e: HeadsEvidence) -> Verdict:
    """Check that a checkpoint was loaded, and that the loader has no findings."""
    findings = "no checkpoint was loaded: these heads have their initial weights"
    if e.report:
        findings = "; ".join(e.report.findings)
    return not findings, findings or "the loader's report is clean", "never loaded"


def judge_zero_blocks(e: HeadsEvidence) -> Verdict:
    """Check that heads without blocks return the backbone's logits: the norm is applied once."""
    heads = e.heads
    states = max(e.reference.states, key=lambda states: len(states.logits))
    normed = block_input(heads, states)
    expected = torch.from_numpy(states.logits)
    if heads.token_map is not None:
        expected = expected[:, heads.token_map.cpu()]
    # Both sides are rounded in 16-bit types: allow the spacing at the largest logit. An int4
    # lm_head rounds its weights and its products to bfloat16.
    allowed = max(EXACT, 2 * torch.finfo(heads.shared_lm_head.dtype).eps)
    error = relative_error(multiply(normed, heads.shared_lm_head), expected)
    says = (
        f"without blocks, logits differ from the backbone's by {error:.2g} (relative), "
        f"{allowed:.2g} is allowed"
    )
    others = other_norms(e.reference.backbone, states).items()
    fault = next(
        (name for name, other in others if relative_error(normed, other) <= allowed), "wrong norm"
    )
    return error <= allowed, says, fault


def other_norms(backbone: Backbone, states: States) -> dict[str, Tensor]:
    """Return the blocks' inputs if the norm is applied twice or not at all, by fault."""
    return {"double norm": backbone.norm(states.post_norm), "missing norm": states.pre_norm}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value (both absolute)."""
    expected = expected.float().cpu()
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def judge_schedule(e: HeadsEvidence) -> Verdict:
    """Check that the learning rate stayed above zero until the end."""
    log = e.report.log if e.report else ()
    if not log:
        return True, "no training log came with the heads: nothing to judge", ""
    dead = dead_steps(log)
    says = (
        f"{dead:.0%} of {log[-1]['step']} steps at under {DEAD_LR:g} of the highest learning rate"
    )
    return dead < DEAD_STEPS, says, "dead schedule"


def dead_steps(log: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of steps with the LR decayed to at most DEAD_LR of its peak.

    `log` entries are in order of step; the lr of an entry counts for all steps since the previous.
    """
    step, lr = np.array([(line["step"], line["lr"]) for line in log], dtype=float).T
    top = lr.argmax()
    dead = lr[top:] <= DEAD_LR * lr[top]
    return float(np.diff(step, prepend=0)[top:][dead].sum() / step[-1])


def judge_acceptance(e: HeadsEvidence) -> Verdict:
    """Check that chains accept more than with shuffled weights, no less than with another norm."""
    texts = e.reference.states
    if judge_zero_blocks(e)[0]:  # with a wrong input, other norms show nothing about training
        for fault in ("double norm", "missing norm"):
            normed = [score(e.heads, s, other_norms(e.reference.backbone, s)[fault]) for s in texts]
            gain, is_better = chain_gain(normed, e.scores)
            if is_better:
                says = (
                    "another norm than that of the backbone gains "
                    f"{gain:.3f} accepted drafts per round"
                )
                return False, says, fault
    shuffled = shuffle(e)
    gain, is_better = chain_gain(e.scores, [score(shuffled, s) for s in texts])
    says = f"shuffling the weights costs {gain:.3f} accepted drafts per round"
    return is_better, says, "undertrained"


def shuffle(e: HeadsEvidence) -> Heads:
    """Return a copy of the heads with each weight tensor of the blocks randomly permuted."""
    shuffled = Heads(e.heads.config, e.reference.backbone, e.heads.token_map)
    shuffled.load_state_dict(e.heads.state_dict())
    generator = torch.Generator().manual_seed(0)
    for name, weight in shuffled.named_parameters():
        if ".blocks." in name:
            order = torch.randperm(weight.numel(), generator=generator)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return shuffled


def chain_gain(scores: Sequence[Scores], others: Sequence[Scores]) -> tuple[float, bool]:
    """Return the gain of `scores` in accepted draft tokens per round, and whether it counts.

    Every position of the plain texts is used as the start of a round.
    """
    accepted, of_others = (
        np.concatenate([(s.rank == 0).cumprod(1).sum(1) for s in of]) for of in (scores, others)
    )
    gains = accepted - of_others
    error = gains.std() / np.sqrt(len(gains))
    return float(gains.mean()), bool(gains.mean() > max(LEAST_GAIN, STANDARD_ERRORS * error))


def judge_serving(e: HeadsEvidence) -> Verdict:
    """Check that each round of greedy chains accepts the draft tokens that are correct offline.

    If a chain's text differs from the plain text due to rounding, the chain's own text is scored.
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
        f"{differ} of {rounds} rounds accept drafts other than those found right offline"
    )
    return rounds > 0 and differ <= MOST_DIFFERENT * rounds, says, "served differently than scored"


GATES = {
    "loader": judge_loading,
    "zero blocks": judge_zero_blocks,
    "acceptance": judge_acceptance,
    "serving": judge_serving,
    "schedule": judge_schedule,
}
"""Maps the name of a gate to its function."""
