"""Gates in front of every speed of heads: is what is about to be timed what was trained? And if not, which fault is it?

The loader's report is clean; without what training added the heads are the backbone; acceptance beats that of the
same heads with their weights shuffled; no other norm or label suits them better; what is served is what is right
offline; and the learning rate lived to the end of the training. A gate that fails gives diagnoses in place of a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.io import read_toml
from specnb.measure.bench import Interval, interval
from specnb.measure.experiment import Progress, silent
from specnb.medusa.accuracy import (
    NO_LABEL,
    Compared,
    HeadsEvidence,
    Reference,
    Scores,
    compare_rounds,
    feed_blocks,
    near_tie,
    score,
    served_counts,
    share_interval,
    trace,
)  # fmt: skip
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.nets import Heads

EXACT = 1e-5
"""Largest relative difference of float32 logits that are the same but for the order of additions."""
HALF_UNEXPLAINED = 0.01
"""Share of rounds that may differ otherwise in 16-bit types, where a state may differ in many of its digits."""
BY_CHANCE = 0.05

REMEDIES = read_toml(Path(__file__).with_name("remedies.toml"))
"""Every fault that is known by name, and what to do about it."""


class Diagnosis(NamedTuple):
    """A fault's name, what was seen of it, and what to do."""

    name: str
    evidence: str
    remedy: str


Suspicion = tuple[str, str] | None
"""The name of a fault and what was seen of it; None where it is not seen."""


# --- the schedule of a training ---

DEAD = 1e-3
"""Share of the highest rate below which a rate moves nothing that counts; the presets end at 1/30 and 1/100."""
DEAD_SHARE = 0.05
"""Share of the steps with a dead rate that is a fault. A cosine to exactly zero, which many use, has 2 % of them."""
FALL = 0.005
"""Relative fall of the loss from one quarter of the living steps to the next that is still worth training for."""


@dataclass(frozen=True)
class Curve:
    """`step`, `lr` and mean unweighted `loss` of each line of a training log, in order of the steps."""

    step: np.ndarray
    lr: np.ndarray
    loss: np.ndarray

    @classmethod
    def of(cls, log: Sequence[Mapping[str, Any]]) -> "Curve":
        """From lines with rising step, lr and loss (a number, or one a head)."""
        return cls(*np.array([(line["step"], line["lr"], np.mean(line["loss"])) for line in log], dtype=float).T)

    @property
    def dead_share(self) -> float:
        """Share of all steps at a rate below DEAD of the highest, behind that one: a warm-up may begin at 0."""
        widths, top = np.diff(self.step, prepend=0.0), int(self.lr.argmax())
        return float(widths[top:][self.lr[top:] <= DEAD * self.lr[top]].sum() / self.step[-1])

    @property
    def dead(self) -> bool:
        """True where the rate died after its highest: for DEAD_SHARE of all steps, or zero before the last line."""
        return self.dead_share >= DEAD_SHARE or bool((self.lr[self.lr.argmax() : -1] == 0).any())

    @property
    def falling(self) -> bool:
        """True where the loss still fell in the last quarter of the steps whose rate was alive."""
        alive = self.loss[: int(np.flatnonzero(self.lr > DEAD * self.lr.max())[-1]) + 1]
        quarter = max(1, len(alive) // 4)
        last, before = alive[-quarter:], alive[-2 * quarter : -quarter]
        return len(before) > 0 and bool(last.mean() < (1 - FALL) * before.mean())

    def __str__(self) -> str:
        highest, steps = f"{self.lr.max():.2g}", f"{self.step[-1]:.0f} steps"
        if not self.dead:
            return f"the learning rate, {highest} at its highest, was alive in all {steps}"
        loss = "still falling" if self.falling else "no longer falling"
        return f"{self.dead_share:.0%} of {steps} at under {DEAD:g} of the highest rate ({highest}), the loss {loss}"


# --- faults, from what the weights alone tell to what only accuracies tell ---

LIKE_NEW = 0.08
"""Relative distance from a new nn.Linear's spread that is still one: 1000 uniform draws stray 1.4 % (one sigma)."""
SMALL_STEP = 0.01
"""Heads whose blocks add less than 1 % to the state (L2) have hardly left the start, where they add nothing."""
STANDARD_ERRORS, LEAST_GAIN = 3.0, 0.05
"""A gain in accuracy counts above 3 standard errors, and above 5 points: what a fault costs is many times that."""


class Suspicions(NamedTuple):
    """What the evidence shows of each fault, the most specific first."""

    unloaded: Suspicion
    fed: Suspicion
    norm: Suspicion
    shift: Suspicion
    schedule: Suspicion


def is_untrained(e: HeadsEvidence) -> Suspicion:
    """Blocks as they are made, not as they are trained: all zero, or drawn as torch draws a new layer."""
    weights = [list(head.blocks.parameters()) for head in e.heads.heads]
    zero = [i for i, of_head in enumerate(weights) if not any(w.any() for w in of_head)]
    new = [i for i, of_head in enumerate(weights) if all(_like_new(w) for w in of_head if w.dim() > 1)]
    if not zero + new:
        return None
    how = "all zero" if zero else "drawn as a new layer's are: uniform, within 1/sqrt(inputs)"
    return "never loaded", f"the blocks of heads {zero or new} are {how}; {_copying(e)}"


def wrong_norm(e: HeadsEvidence) -> Suspicion:
    """The blocks are not fed the state behind the backbone's final norm, applied once."""
    probe, tolerance = e.reference.probe, tolerance_of(e)
    fed = feed_blocks(e.heads, probe)
    if (error := relative_error(fed, probe.post_norm)) <= tolerance:
        return None
    fact = f"what the blocks are fed is {error:.2g} (relative) off the state behind the backbone's final norm"
    if relative_error(fed, e.reference.backbone.norm(probe.post_norm)) <= tolerance:
        return "double norm", f"{fact}: it is that state, normed once more"
    if relative_error(fed, probe.pre_norm) <= tolerance:
        return "missing norm", f"{fact}: it is the state in front of it"
    return "wrong norm", fact


def trained_under_another_norm(e: HeadsEvidence) -> Suspicion:
    """The heads are much better when the norm is applied twice, or not at all, than when it is applied once."""
    scores = {
        "double norm": e.score_all(fed=lambda hidden: e.reference.backbone.norm(hidden.post_norm)),
        "missing norm": e.score_all(fed=lambda hidden: hidden.pre_norm),
    }
    name = max(scores, key=lambda name: first_choice_rates(scores[name])[0].mean())
    if not _better(scores[name], e.scores):
        return None
    times, now, then = "twice" if name == "double norm" else "not at all", _right(e.scores), _right(scores[name])
    fact = f"the heads are right in {now} of their positions, but in {then} when the final norm is applied {times}"
    return name, f"{fact}: so they were trained"


def label_shift(e: HeadsEvidence) -> Suspicion:
    """Head i is much more often right about the token before or behind the one that it has to say.

    Heads that learned little say the backbone's next token, and the first then looks shifted by -1. So those behind it
    must show it too, and a single head is asked about the token behind only.
    """
    alone = e.heads.config.n_heads == 1
    for shift in (1,) if alone else (-1, 1):
        scores = e.score_all(shift=shift)
        if _better(scores, e.scores) and (alone or _better(scores, e.scores, first=1)):
            then, now = f"t + {2 + shift} + i in {_right(scores)}", f"t + 2 + i, in {_right(e.scores)}"
            return "label shift", f"head i is right about token {then}, about its own, {now}"
    return None


def dead_schedule(e: HeadsEvidence, moved: np.ndarray) -> Suspicion:
    """Training went on with no learning rate to speak of, or never `moved` the blocks."""
    curve, small = Curve.of(e.log) if e.log else None, float(moved.max()) < SMALL_STEP
    added = f"the blocks add {_percent(moved)} to the state"
    if curve and curve.dead and (curve.falling or small):
        return "dead schedule", f"{curve}; {added}"
    if curve is None and small and moved.any():
        return "dead schedule", f"{added}, and no training curve came with them; {_copying(e)}"
    return None


def first_choice_rates(scores: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """Return how often the token is each head's first choice, and of how many positions, `(n_heads,)` each."""
    rank = np.concatenate([score.rank for score in scores])
    n = (rank != NO_LABEL).sum(0).clip(1)
    return (rank == 0).sum(0) / n, n


def _better(scores: Sequence[Scores], others: Sequence[Scores], first: int = 0) -> bool:
    """Say whether the mean over heads from `first` on is higher by more than LEAST_GAIN and STANDARD_ERRORS."""
    (rate, n), (other, m) = first_choice_rates(scores), first_choice_rates(others)
    variance = (rate * (1 - rate) / n + other * (1 - other) / m)[first:].mean() / len(rate[first:])
    return float((rate - other)[first:].mean()) > max(LEAST_GAIN, STANDARD_ERRORS * sqrt(variance))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest of what is expected."""
    expected = expected.float().cpu()
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def residual_share(e: HeadsEvidence) -> np.ndarray:
    """Return what each head's blocks add to the state they are fed, as a share of its L2 norm, `(n_heads,)`."""
    heads, n_heads = e.heads, e.heads.config.n_heads
    added, fed = np.zeros(n_heads), 0.0
    for hidden in e.reference.traces:
        if len(hidden.ids) < n_heads:
            continue
        since = hidden.ids.unfold(0, n_heads, 1)  # of rows behind which a Hydra is shown all tokens it looks at
        normed = feed_blocks(heads, hidden)[: len(since)]
        fed += float(normed.float().square().sum())
        added += [float((heads.features(i, normed, since) - normed).float().square().sum()) for i in range(n_heads)]
    return np.sqrt(added / max(fed, 1e-30))


def _like_new(weight: Tensor) -> bool:
    """Uniform on ±1/sqrt(inputs), as nn.Linear draws a weight (He et al. 1502.01852 with a = sqrt(5))."""
    bound = 1 / sqrt(weight.shape[1])
    largest, spread = float(weight.abs().max()), float(weight.float().std())
    return abs(largest / bound - 1) < LIKE_NEW and abs(spread * sqrt(3) / bound - 1) < LIKE_NEW


def _copying(e: HeadsEvidence) -> str:
    """Say how often heads repeat the backbone's next token, as untrained ones do."""
    return f"the heads say the backbone's next token in {_percent(e.copies())} (untrained: always)"


def _percent(shares: np.ndarray) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def _right(scores: Sequence[Scores]) -> str:
    return _percent(first_choice_rates(scores)[0])


def tolerance_of(e: HeadsEvidence) -> float:
    """Return the tolerance of logits: in 16-bit types the spacing of the largest one, for both sides are rounded."""
    return max(EXACT, torch.finfo(e.heads.shared_lm_head.dtype).eps)


# --- gates ---


class Gate(NamedTuple):
    """One gate: `says` in words what was measured; a failed one has the `diagnoses` that fit, with their remedies."""

    name: str
    passed: bool
    says: str
    measured: Mapping[str, Any]
    diagnoses: tuple[Diagnosis, ...] = ()


class Checked(NamedTuple):
    """The gates, and the evidence that they judged."""

    gates: tuple[Gate, ...]
    evidence: HeadsEvidence

    @property
    def failed(self) -> list[str]:
        return [gate.name for gate in self.gates if not gate.passed]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """Diagnoses of the failed gates, each once."""
        return tuple(dict.fromkeys(d for gate in self.gates for d in gate.diagnoses))

    def table(self) -> pd.DataFrame:
        """Columns: gate, passed, says."""
        return pd.DataFrame([gate[:3] for gate in self.gates], columns=["gate", "passed", "says"])


def judge_gates(
    reference: Reference, heads: Heads, report: LoadReport | None, *, seed: int = 0, progress: Progress = silent
) -> Checked:
    """Measure and judge all gates. `report` is the loader's, None where nothing was loaded; see `HeadsEvidence`."""
    evidence = HeadsEvidence(reference, heads, report, seed, progress)
    with torch.inference_mode():
        unloaded, fed, moved = is_untrained(evidence), wrong_norm(evidence), residual_share(evidence)
        # without blocks another norm only turns lm_heads away from their start
        norm = trained_under_another_norm(evidence) if moved.any() and not fed else None
        # blocks that were never loaded tell nothing of how they were trained
        shift = None if unloaded else label_shift(evidence)
        suspicions = Suspicions(unloaded, fed, norm, shift, dead_schedule(evidence, moved))
        gates = tuple(Gate(name, *gate(evidence, suspicions)) for name, gate in GATES.items())
    causes, failed = [*filter(None, suspicions)], Checked(gates, evidence).failed
    if not causes and "acceptance" in failed:
        fact = "acceptance is no better than that of the same heads with shuffled weights; norm, labels and schedule"
        causes = [("never loaded" if "loader" in failed else "undertrained", f"{fact} do not explain it")]
    elif not causes and "serving" in failed:
        fact = "the heads are right along the plain text, but not in the rounds that were served"
        causes = [("served otherwise than scored", fact)]
    diagnoses = tuple(Diagnosis(*cause, REMEDIES[cause[0]]) for cause in causes)
    return Checked(tuple(gate if gate.passed else gate._replace(diagnoses=diagnoses) for gate in gates), evidence)


Verdict = tuple[bool, str, Mapping[str, Any]]
"""Passed, says and measured of a gate."""


def _loader(e: HeadsEvidence, suspicions: Suspicions) -> Verdict:
    """The loader found nothing doubtful, and what it loaded are not blocks as they are made."""
    if e.report is None:
        return False, "no checkpoint was loaded: these heads are as they were made", {}
    doubts = [*e.report.findings, *([suspicions.unloaded[1]] if suspicions.unloaded else [])]
    return not doubts, "; ".join(doubts) or "the loader's report is clean", {"findings": list(e.report.findings)}


def _zero_blocks(e: HeadsEvidence, _: Suspicions) -> Verdict:
    """New heads of the same config, and the loaded ones without their blocks, are the backbone's lm_head."""
    probe, token_map, tolerance = e.reference.probe, e.heads.token_map, tolerance_of(e)
    new = Heads(e.heads.config, e.reference.backbone, token_map)
    fed = feed_blocks(new, probe)
    ids = torch.zeros(len(fed), new.config.n_heads, dtype=torch.long, device=fed.device)  # zero blocks: no matter
    base = torch.from_numpy(probe.logits)  # the backbone's own, over the draft vocabulary
    base = base if token_map is None else base[:, token_map.cpu()]
    logits = [new.logits(i, new.features(i, fed, ids)) for i in range(new.config.n_heads)]
    error = max(relative_error(of_head, base) for of_head in logits)
    loaded = relative_error(F.linear(feed_blocks(e.heads, probe), e.heads.shared_lm_head), base)
    says = f"zero-block logits are {max(error, loaded):.2g} (relative) off the backbone's, {tolerance:.2g} is allowed"
    return max(error, loaded) <= tolerance, says, {"new_error": error, "loaded_error": loaded, "tolerance": tolerance}


def _acceptance(e: HeadsEvidence, _: Suspicions) -> Verdict:
    """Drafts a chain would have accepted at every position of the plain text, against the shuffled heads', paired.

    Passes where the gain's interval is above zero, or by the sign test over prompts: few prompts of unlike contents
    have a wide interval, and more accepted in each of five is still a chance of 1 in 32.
    """
    # the weights of each block in another order: as large, and without what they learned
    shuffled = Heads(e.heads.config, e.reference.backbone, e.heads.token_map)
    shuffled.load_state_dict(e.heads.state_dict())
    draw = torch.Generator().manual_seed(e.seed)
    for name, weight in shuffled.named_parameters():
        if ".blocks." in name:
            weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view_as(weight))
    controls = e.score_all(shuffled)
    accepted = [[(s.rank == 0).cumprod(1).sum() for s in of] for of in (e.scores, controls)]
    rows = [*zip(*accepted, [len(s.rank) for s in e.scores], strict=True)]
    gain = interval(rows, lambda data: (data[:, 0] - data[:, 1]).sum() / data[:, 2].sum(), log=False)
    better, decided = sum(a > b for a, b, _ in rows), sum(a != b for a, b, _ in rows)
    by_chance = sum(comb(decided, i) for i in range(better, decided + 1)) / 2**decided
    *accepted, n = np.sum(rows, axis=0)
    served, control = accepted / n
    says = f"{served:.3f} drafts of a chain accepted, {control:.3f} with shuffled weights: gain {_shown(gain)}"
    measured = {"accepted_per_round": served, "shuffled_per_round": control, "gain": gain.value}
    return gain.low > 0 or by_chance < BY_CHANCE, says, measured | {"low": gain.low, "high": gain.high}


def _alignment(_: HeadsEvidence, suspicions: Suspicions) -> Verdict:
    """No other norm or label suits the heads better than those that they are served."""
    says = "; ".join(evidence for _, evidence in filter(None, (suspicions.norm, suspicions.shift)))
    right = "the heads are right about the tokens and the norm that they are served, and about no others"
    return not says, says or right, {}


def _serving(e: HeadsEvidence, _: Suspicions) -> Verdict:
    """Greedy chains accept what the heads are right about offline, in the same rounds.

    Where rounding made a chain's text another than the plain one, the chain's own text is scored.
    """
    target, identical, rows = e.reference.target, 0, []
    ties = near_tie(target, e.heads)
    for text, chain, scores in zip(e.reference.plain, e.chains, e.scores, strict=True):
        if text.token_ids == chain.token_ids:
            identical += 1
        else:
            scores = score(e.heads, trace(target, chain))
        rows.append(compare_rounds(chain, scores, ties))
    total = Compared(*map(sum, zip(*rows, strict=True)))
    alpha = share_interval([served_counts(chain)[0] for chain in e.chains])
    offline = share_interval([(row.right, row.rounds) for row in rows]).value
    says = (
        f"served alpha_1 {_shown(alpha)}, offline {offline:.3f} in the same rounds; {total.apart} of "
        f"{total.rounds} rounds accept otherwise than scored, {total.near_ties} more at near-ties"
    )
    allowed = 0 if target.caps.lossless_dtype else HALF_UNEXPLAINED * total.rounds
    excluded = alpha.low > offline or alpha.high < offline  # of too few prompts (NaN) nothing is
    measured = total._asdict() | {
        "served_alpha_1": alpha.value, "low": alpha.low, "high": alpha.high, "offline_alpha_1": offline,
        "identical": identical,
    }  # fmt: skip
    return total.rounds > 0 and total.apart <= allowed and not excluded, says, measured


def _schedule(e: HeadsEvidence, suspicions: Suspicions) -> Verdict:
    """The learning rate lived to the end of the training."""
    if not e.log:
        return True, "no training curve came with the heads: nothing to judge", {}
    curve = Curve.of(e.log)
    measured = {"dead_share": curve.dead_share, "falling": curve.falling, "last_lr": float(curve.lr[-1])}
    return suspicions.schedule is None, str(curve), measured


GATES = {
    "loader": _loader,
    "zero blocks": _zero_blocks,
    "acceptance": _acceptance,
    "alignment": _alignment,
    "serving": _serving,
    "schedule": _schedule,
}
"""Judges of the evidence and the suspicions, by the name of the gate."""


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
