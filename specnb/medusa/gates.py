"""Gates in front of every speed of heads: is what is about to be timed what was trained? And if not, which fault is it?

The loader's report is clean; without what training added the heads are the backbone; acceptance beats that of the
same heads with their weights shuffled; no other norm or label suits them better; what is served is what is right
offline; and the learning rate lived to the end of the training. A gate that fails gives diagnoses in place of a number.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.decode.generate import generate
from specnb.lm.base import LanguageModel
from specnb.measure.bench import Interval, interval
from specnb.measure.curve import Curve
from specnb.measure.experiment import Progress, silent
from specnb.medusa import accuracy
from specnb.medusa.accuracy import NO_LABEL, Compared, HiddenTrace, Scores, States, score, share_interval, trace
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.nets import Backbone, Heads, backbone_of
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
PROBE = 32
"""Tokens whose logits zero-block heads are held against the backbone's."""
EXACT = 1e-5
"""Largest relative difference of float32 logits that are the same but for the order of additions."""
HALF_UNEXPLAINED = 0.01
"""Share of rounds that may differ otherwise in 16-bit types, where a state may differ in many of its digits."""

NORM_ONCE = (
    "apply the final norm once: heads that are fed the state in front of it are pre_norm, those that are fed the state "
    "behind it (hidden_states[-1] in transformers) are post_norm"
)
REMEDIES = {
    "never loaded": "load the trained checkpoint (--heads-checkpoint PATH); if these weights are it, train longer",
    "double norm": NORM_ONCE,
    "missing norm": NORM_ONCE,
    "wrong norm": "use the heads with the backbone whose norm they were trained on",
    "label shift": "train again: from the state of token t head i has to say token t + 2 + i",
    "dead schedule": "train again with a schedule that ends above zero at the last step (eta_min)",
    "served otherwise than scored": "look at the state, the tokens and the position that the drafter hands to heads",
}
"""Every fault that is known by name, and what to do about it."""


class Diagnosis(NamedTuple):
    """A fault's name, what was seen of it, and what to do."""

    name: str
    evidence: str
    remedy: str


def _diagnosis(name: str, evidence: str) -> Diagnosis:
    return Diagnosis(name, evidence, REMEDIES[name])


class Gate(NamedTuple):
    """One gate: `says` in words what was measured; a failed one has the `diagnoses` that fit, with their remedies."""

    name: str
    passed: bool
    says: str
    measured: Mapping[str, Any] = MappingProxyType({})
    diagnoses: tuple[Diagnosis, ...] = ()


@dataclass(frozen=True)
class Checked:
    """The gates, and what was measured on the way: `accuracy_table`, `accuracy_by_head` and `served_alpha`.

    The first two are along the `plain` texts, whose states are the `traces`, the third of the `chains`.
    """

    gates: tuple[Gate, ...]
    accuracy: pd.DataFrame
    by_head: pd.DataFrame
    served: pd.DataFrame
    heads: Heads
    plain: tuple[Generation, ...]
    chains: tuple[Generation, ...]
    traces: tuple[HiddenTrace, ...] = ()

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """Those of the failed gates, each once."""
        return tuple(dict.fromkeys(d for gate in self.gates for d in gate.diagnoses))

    def table(self) -> pd.DataFrame:
        """Columns: gate, passed, says."""
        return pd.DataFrame([{"gate": g.name, "passed": g.passed, "says": g.says} for g in self.gates])


@dataclass(frozen=True)
class Evidence:
    """What the gates have measured: `scores` along `traces`, and the `probe` that zero-block heads were compared on.

    `curve` is that of the training, None where none came with the heads.
    """

    heads: Heads
    backbone: Backbone
    traces: Sequence[HiddenTrace]
    scores: Sequence[Scores]
    probe: States
    curve: Curve | None

    @property
    def tolerance(self) -> float:
        """In 16-bit types the spacing of the largest logit: both sides are rounded by half of it at most."""
        return max(EXACT, torch.finfo(self.heads.shared_lm_head.dtype).eps, self.backbone.rounding)

    @property
    def fed(self) -> Tensor:
        """What the blocks are fed in the states of the probe."""
        return self.heads.normed(self.probe.fed(self.heads.config.input))


def run(
    target: LanguageModel, heads: Heads, report: LoadReport | None, prompts: Sequence[Prompt | Sequence[int]], *,
    curve: Curve | None, max_new_tokens: int, seed: int = 0, before: Checked | None = None, progress: Progress = silent,
) -> Checked:  # fmt: skip
    """Measure and judge all gates. `report` is the loader's, None when nothing was loaded; `curve` the training's.

    Each of the prompts (FEWEST or more, for intervals) is continued greedily, plainly and with a chain of all heads.
    `before` judged heads of this target on these prompts, or on more behind them: the plain texts and their states are
    taken from it, and of the same heads the chains.
    `seed` is that of the shuffled weights.
    """
    drafter, plain, chains, traces = HeadsDrafter(target, heads), [], [], []
    max_new_tokens = min(max_new_tokens, MAX_NEW_TOKENS)
    settings = {"k": heads.config.n_heads, "max_new_tokens": max_new_tokens}
    same_heads = before is not None and before.heads is heads
    with torch.inference_mode():
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts) + 1, f"gates: {getattr(prompt, 'id', '') or f'prompt {done + 1}'}")
            plain.append(before.plain[done] if before else generate(target, prompt, max_new_tokens=max_new_tokens))
            chains.append(before.chains[done] if same_heads else generate(target, prompt, drafter=drafter, **settings))
            traces.append(before.traces[done] if before else trace(target, plain[-1]))
        progress(len(prompts), len(prompts) + 1, "gates: heads are scored")
        # the last token may be no context
        longest = max(((*text.prompt_ids, *text.token_ids[:-1]) for text in plain), key=len)
        probe = accuracy.states(target, longest, min(PROBE, len(longest)))
        scores, backbone = [score(heads, along) for along in traces], backbone_of(target)
        evidence = Evidence(heads, backbone, traces, scores, probe, curve)
        aligned = [d for d in (trained_under_another_norm(evidence), label_shift(evidence)) if d is not None]
        gates = [
            _loader(report, evidence), _zero_blocks(evidence), _acceptance(evidence, seed), _alignment(aligned),
            _serving(target, evidence, plain, chains), _schedule(evidence),
        ]  # fmt: skip
        if failed := {gate.name for gate in gates if not gate.passed}:
            causes = tuple(diagnose(evidence, failed, aligned))
            gates = [gate if gate.passed else gate._replace(diagnoses=causes) for gate in gates]
    progress(len(prompts) + 1, len(prompts) + 1, "gates: judged")
    tables = accuracy.accuracy_table(scores), accuracy.accuracy_by_head(scores), accuracy.served_alpha(chains)
    return Checked(tuple(gates), *tables, heads, tuple(plain), tuple(chains), tuple(traces))


def _loader(report: LoadReport | None, e: Evidence) -> Gate:
    """The loader found nothing doubtful, and what it loaded are not blocks as they are made."""
    if report is None:
        return Gate("loader", False, "no checkpoint was loaded: these heads are as they were made")
    doubts = [*report.findings, *([fault.evidence] if (fault := never_loaded(e)) else [])]
    says = "; ".join(doubts) or "the loader's report is clean"
    return Gate("loader", not doubts, says, {"findings": list(report.findings)})


def _zero_blocks(e: Evidence) -> Gate:
    """New heads of the same config, and the loaded ones without their blocks, are the backbone's lm_head."""
    new = Heads(e.heads.config, e.backbone, e.heads.token_map)
    state = e.probe.fed(new.config.input)
    ids = torch.zeros(len(state), new.config.n_heads, dtype=torch.long, device=state.device)  # zero blocks: no matter
    base = torch.from_numpy(e.probe.logits)  # the backbone's own, over the draft vocabulary
    base = base if new.token_map is None else base[:, new.token_map.cpu()]
    error = max(relative_error(new.draft_logits(i, state, ids), base) for i in range(new.config.n_heads))
    loaded = relative_error(F.linear(e.fed, e.heads.shared_lm_head), base)
    measured = {"new_error": error, "loaded_error": loaded, "tolerance": e.tolerance}
    says = f"zero-block logits are {max(error, loaded):.2g} (relative) off the backbone's, {e.tolerance:.2g} is allowed"
    return Gate("zero blocks", max(error, loaded) <= e.tolerance, says, measured)


def _acceptance(e: Evidence, seed: int) -> Gate:
    """Drafts a chain would have accepted at every position of the plain text, against the shuffled heads', paired.

    Passes where the gain's interval is above zero, or by the sign test over prompts: few prompts of unlike contents
    have a wide interval, and more accepted in each of five is still a chance of 1 in 32.
    """
    shuffled = _shuffled(e.heads, e.backbone, seed)
    controls = [score(shuffled, along) for along in e.traces]
    accepted = [
        [np.logical_and.accumulate(s.rank == 0, axis=1).sum() for s in scores] for scores in (e.scores, controls)
    ]
    rows = [*zip(*accepted, [len(s.rank) for s in e.scores], strict=True)]
    gain = interval(rows, lambda data: float((data[:, 0] - data[:, 1]).sum() / data[:, 2].sum()), log=False)
    better, decided = sum(a > b for a, b, _ in rows), sum(a != b for a, b, _ in rows)
    by_chance = sum(comb(decided, i) for i in range(better, decided + 1)) / 2**decided
    mine, chance, n = np.sum(rows, axis=0)
    measured = {"accepted_per_round": mine / n, "shuffled_per_round": chance / n, "gain": gain.value}
    measured |= {"low": gain.low, "high": gain.high}
    says = f"{mine / n:.3f} drafts of a chain accepted, {chance / n:.3f} with shuffled weights: gain {_shown(gain)}"
    return Gate("acceptance", gain.low > 0 or by_chance < 0.05, says, measured)


def _shuffled(heads: Heads, backbone: Backbone, seed: int) -> Heads:
    """The same heads with the weights of each block in another order: as large, and without what they learned."""
    copy = Heads(heads.config, backbone, heads.token_map)
    copy.load_state_dict(heads.state_dict())
    draw = torch.Generator().manual_seed(seed)
    for name, weight in copy.named_parameters():
        if ".blocks." in name:
            weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view_as(weight))
    return copy


def _alignment(causes: Sequence[Diagnosis]) -> Gate:
    """Nothing else that the heads might have been trained on suits them better than what they are served."""
    says = "the heads are right about the tokens and the norm that they are served, and about no others"
    return Gate("alignment", not causes, "; ".join(d.evidence for d in causes) or says)


def _serving(target: LanguageModel, e: Evidence, plain: Sequence[Generation], chains: Sequence[Generation]) -> Gate:
    """What greedy chains did is what the heads are right about offline, in the same rounds.

    Where rounding made a chain's text another than the plain one, the chain's own text is scored.
    """
    rows, ties = [], accuracy.near_tie(target, e.heads)
    same = [text.token_ids == chain.token_ids for text, chain in zip(plain, chains, strict=True)]
    for is_same, chain, scored in zip(same, chains, e.scores, strict=True):
        scored = scored if is_same else score(e.heads, trace(target, chain))
        rows.append(accuracy.compare_rounds(chain, scored, ties))
    total = Compared(*map(sum, zip(*rows, strict=True)))
    alpha = share_interval([counts[0] for drafted in chains if len(counts := accuracy.served_counts(drafted))])
    offline = share_interval([(row.right, row.rounds) for row in rows])
    measured = total._asdict() | {
        "served_alpha_1": alpha.value, "low": alpha.low, "high": alpha.high, "offline_alpha_1": offline.value,
        "identical": sum(same),
    }  # fmt: skip
    says = (
        f"served alpha_1 {_shown(alpha)}, offline {offline.value:.3f} in the same rounds; {total.apart} of "
        f"{total.rounds} rounds accept otherwise than scored, {total.near_ties} more at near-ties"
    )
    allowed = 0 if target.caps.lossless_dtype else HALF_UNEXPLAINED * total.rounds
    excluded = alpha.low > offline.value or alpha.high < offline.value  # of too few prompts (NaN) nothing is
    return Gate("serving", total.rounds > 0 and total.apart <= allowed and not excluded, says, measured)


def _schedule(e: Evidence) -> Gate:
    if e.curve is None:
        return Gate("schedule", True, "no training curve came with the heads: nothing to judge")
    measured = {"dead_share": e.curve.dead_share, "falling": e.curve.falling, "last_lr": float(e.curve.lr[-1])}
    return Gate("schedule", dead_schedule(e) is None, str(e.curve), measured)


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


# --- faults, from what the weights alone tell to what only accuracies tell ---

LIKE_NEW = 0.08
"""Relative distance from a new nn.Linear's spread that is still one: 1000 uniform draws stray 1.4 % (one sigma)."""
SMALL_STEP = 0.01
"""Heads whose blocks add less than 1 % to the state (L2) have hardly left the start, where they add nothing."""
STANDARD_ERRORS, LEAST_GAIN = 3.0, 0.05
"""A gain in accuracy counts above 3 standard errors, and above 5 points: what a fault costs is many times that."""


def never_loaded(e: Evidence) -> Diagnosis | None:
    """Blocks as they are made, not as they are trained: all zero, or drawn as torch draws a new layer."""
    weights = [list(head.blocks.parameters()) for head in e.heads.heads]
    zero = [i for i, of_head in enumerate(weights) if not any(bool(w.any()) for w in of_head)]
    new = [i for i, of_head in enumerate(weights) if all(_like_new(w) for w in of_head if w.dim() > 1)]
    if not zero and not new:
        return None
    how = "all zero" if zero else "drawn as a new layer's are: uniform, within 1/sqrt(inputs)"
    return _diagnosis("never loaded", f"the blocks of heads {zero or new} are {how}; {_copying(e)}")


def wrong_norm(e: Evidence) -> Diagnosis | None:
    """What the blocks are fed is not the state behind the backbone's final norm, applied once."""
    if (error := relative_error(e.fed, e.probe.post_norm)) <= e.tolerance:
        return None
    seen = f"what the blocks are fed is {error:.2g} (relative) off the state behind the backbone's final norm"
    if relative_error(e.fed, e.backbone.norm(e.probe.post_norm)) <= e.tolerance:
        return _diagnosis("double norm", f"{seen}: it is that state, normed once more")
    if relative_error(e.fed, e.probe.pre_norm) <= e.tolerance:
        return _diagnosis("missing norm", f"{seen}: it is the state in front of it")
    return _diagnosis("wrong norm", seen)


def trained_under_another_norm(e: Evidence) -> Diagnosis | None:
    """The heads are much better when the norm is applied twice, or not at all, than when it is applied once."""
    # Now it is not applied once; or there are no blocks, and another norm only turns lm_heads away from their start.
    if wrong_norm(e) or not residual_share(e).any():
        return None
    inputs = {
        "double norm": [e.backbone.norm(along.post_norm) for along in e.traces],
        "missing norm": [along.pre_norm for along in e.traces],
    }
    scores = {name: [score(e.heads, *of) for of in zip(e.traces, fed, strict=True)] for name, fed in inputs.items()}
    name = max(scores, key=lambda name: rates(scores[name])[0].mean())
    if not _better(scores[name], e.scores):
        return None
    fed, now, then = "twice" if name == "double norm" else "not at all", rates(e.scores)[0], rates(scores[name])[0]
    seen = f"the heads are right in {_percent(now)} of their positions, but in {_percent(then)} when the final norm"
    return _diagnosis(name, f"{seen} is applied {fed}: so they were trained")


def label_shift(e: Evidence) -> Diagnosis | None:
    """Head i is much more often right about the token before or behind the one that it has to say.

    Heads that learned little say the backbone's next token, and the first then looks shifted by -1. So those behind it
    must show it too, and a single head is asked about the token behind only.
    """
    if never_loaded(e):
        return None
    alone = e.heads.config.n_heads == 1
    for shift in (1,) if alone else (-1, 1):
        scores = [score(e.heads, along, shift=shift) for along in e.traces]
        if _better(scores, e.scores) and (alone or _better(scores, e.scores, first=1)):
            then, now = _percent(rates(scores)[0]), _percent(rates(e.scores)[0])
            seen = f"head i is right about token t + {2 + shift} + i in {then}, about its own, t + 2 + i, in {now}"
            return _diagnosis("label shift", seen)
    return None


def dead_schedule(e: Evidence) -> Diagnosis | None:
    """Training went on with no learning rate to speak of, or never moved the blocks."""
    moved = residual_share(e)
    small, added = float(moved.max()) < SMALL_STEP, f"the blocks add {_percent(moved)} to the state"
    if e.curve is not None and e.curve.dead and (e.curve.falling or small):
        return _diagnosis("dead schedule", f"{e.curve}; {added}")
    if e.curve is None and small and moved.any():
        return _diagnosis("dead schedule", f"{added}, and no training curve came with them; {_copying(e)}")
    return None


def diagnose(e: Evidence, failed: Collection[str], aligned: Sequence[Diagnosis]) -> list[Diagnosis]:
    """All faults that fit, the most specific first; where none does, what the `failed` gates themselves say.

    `aligned` are those that the gate of that name saw.
    """
    if causes := [d for d in (never_loaded(e), wrong_norm(e), *aligned, dead_schedule(e)) if d is not None]:
        return causes
    if "acceptance" in failed:
        no_better = "acceptance is no better than that of the same heads with their weights shuffled"
        return [_diagnosis("never loaded", f"{no_better}; neither norm, labels, nor the schedule explain it")]
    seen = "the heads are right along the plain text, but not in the rounds that were served"
    return [_diagnosis("served otherwise than scored", seen)] if "serving" in failed else []


def rates(scores: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """Share of positions whose token is each head's first choice, and how many positions, `(n_heads,)` each."""
    rank = np.concatenate([score.rank for score in scores])
    n = (rank != NO_LABEL).sum(0).clip(1)
    return (rank == 0).sum(0) / n, n


def _better(scores: Sequence[Scores], others: Sequence[Scores], first: int = 0) -> bool:
    """The mean over heads from `first` on is higher by more than LEAST_GAIN and STANDARD_ERRORS."""
    (rate, n), (other, m) = rates(scores), rates(others)
    variance = (rate * (1 - rate) / n + other * (1 - other) / m)[first:].mean() / len(rate[first:])
    return float((rate - other)[first:].mean()) > max(LEAST_GAIN, STANDARD_ERRORS * sqrt(variance))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of what is expected."""
    expected = expected.float().cpu()
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def residual_share(e: Evidence) -> np.ndarray:
    """What each head's blocks add to the state they are fed, as a share of that state's L2 norm, `(n_heads,)`."""
    heads, n_heads = e.heads, e.heads.config.n_heads
    added, fed = np.zeros(n_heads), 0.0
    for along in e.traces:
        n = max(0, len(along.ids) - n_heads + 1)  # rows behind which a Hydra is shown all tokens it looks at
        normed = heads.normed(along.fed(heads.config.input))[:n]
        since = torch.stack([along.ids[i : i + n] for i in range(n_heads)], dim=1)
        fed += float(normed.float().square().sum())
        added += [float((heads.features(i, normed, since) - normed).float().square().sum()) for i in range(n_heads)]
    return np.sqrt(added / max(fed, 1e-30))


def _like_new(weight: Tensor) -> bool:
    """Uniform on ±1/sqrt(inputs), as nn.Linear draws a weight (He et al. 1502.01852 with a = sqrt(5))."""
    bound = 1 / sqrt(weight.shape[1])
    largest, spread = float(weight.abs().max()), float(weight.float().std())
    return abs(largest / bound - 1) < LIKE_NEW and abs(spread * sqrt(3) / bound - 1) < LIKE_NEW


def copies(scores: Sequence[Scores], traces: Sequence[HiddenTrace]) -> np.ndarray:
    """Share of the positions at which each head says the backbone's next token, `(n_heads,)`."""
    same = [s.best == t.best.cpu().numpy()[:, None] for s, t in zip(scores, traces, strict=True)]
    return np.concatenate(same).mean(0)


def _copying(e: Evidence) -> str:
    """What untrained heads are known by: each says what the backbone says next."""
    return f"the heads say the backbone's next token in {_percent(copies(e.scores, e.traces))} (untrained: always)"


def _percent(shares: np.ndarray) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)
