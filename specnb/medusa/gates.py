"""Gates in front of every speed of heads: is what is about to be timed what was trained?

The loader's report is clean; without what training added the heads are the backbone; acceptance beats that of the
same heads with their weights shuffled; no other norm or label suits them better; what is served is what is right
offline; and the learning rate lived to the end of the training. A gate that fails gives a diagnosis in place of a
number (`diagnoses`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from specnb.decode.generate import generate
from specnb.lm.base import LanguageModel
from specnb.measure.bench import Interval, bootstrap
from specnb.measure.curve import Curve
from specnb.measure.experiment import Progress, silent
from specnb.medusa import accuracy, diagnoses
from specnb.medusa.accuracy import Scores, score, share_interval, trace
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.diagnoses import Diagnosis, Evidence, relative_error
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.nets import Backbone, Heads, network
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
PROBE = 32
"""Tokens whose logits zero-block heads are held against the backbone's."""
EXACT = 1e-5
"""Largest relative difference of float32 logits that are the same but for the order of additions."""
NEAR_TIE = 1e-4
"""A first choice that leads by less than this share of its logit may differ between two float32 forwards."""
HALF_TIES = 4
"""The same in units of a 16-bit type's spacing: state and logit are each rounded once, on both sides."""
HALF_UNEXPLAINED = 0.01
"""Share of rounds that may differ otherwise in 16-bit types, where a state may differ in many of its digits."""


@dataclass(frozen=True)
class Gate:
    """One gate: `says` in words what was measured; a failed one has the `diagnoses` that fit, with their remedies."""

    name: str
    passed: bool
    says: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    diagnoses: tuple[Diagnosis, ...] = ()


@dataclass(frozen=True)
class Checked:
    """The gates, and what was measured on the way.

    `accuracy` is `accuracy_table` along the `plain` texts, `served` the alpha by position of the `chains`.
    """

    gates: tuple[Gate, ...]
    accuracy: pd.DataFrame
    served: pd.DataFrame
    plain: tuple[Generation, ...]
    chains: tuple[Generation, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @cached_property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """Of all failed gates, each once."""
        return tuple(dict.fromkeys(d for gate in self.gates for d in gate.diagnoses))


def run(
    target: LanguageModel,
    heads: Heads,
    report: LoadReport | None,
    prompts: Sequence[Prompt | Sequence[int]],
    *,
    curve: Curve | None,
    max_new_tokens: int,
    seed: int = 0,
    progress: Progress = silent,
) -> Checked:
    """Measure and judge all gates. `report` is the loader's, None when nothing was loaded; `curve` the training's.

    Each of the prompts (FEWEST or more, for intervals) is continued greedily, plainly and with a chain of all heads.
    `seed` is that of the shuffled weights. Raises what `generate` raises.
    """
    drafter, plain, chains, traces = HeadsDrafter(target, heads), [], [], []
    with torch.inference_mode():
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts) + 1, f"gates: {getattr(prompt, 'id', '') or f'prompt {done + 1}'}")
            plain.append(generate(target, prompt, max_new_tokens=max_new_tokens))
            chains.append(
                generate(target, prompt, drafter=drafter, k=heads.config.n_heads, max_new_tokens=max_new_tokens)
            )
            traces.append(trace(target, plain[-1]))
        progress(len(prompts), len(prompts) + 1, "gates: heads are scored")
        scores = [score(heads, along) for along in traces]
        backbone = Backbone.of(network(target))
        longest = max(
            ((*generation.prompt_ids, *generation.token_ids[:-1]) for generation in plain), key=len
        )  # the last may be no context
        evidence = Evidence(
            heads=heads, norm=backbone.norm, traces=traces, scores=scores, curve=curve,
            probe=accuracy.states(target, longest, min(PROBE, len(longest))),
            # in 16-bit types the spacing of the largest logit: both sides are rounded by half of it at most
            tolerance=max(EXACT, torch.finfo(heads.shared_lm_head.dtype).eps),
        )  # fmt: skip
        control = _shuffled(heads, backbone, seed)
        shuffled = [score(control, generation) for generation in traces]
        gates = [
            _loader(report, evidence), _zero_blocks(evidence, backbone), _acceptance(scores, shuffled),
            _alignment(evidence), _serving(target, heads, plain, chains, scores), _schedule(evidence),
        ]  # fmt: skip
        failed = frozenset(gate.name for gate in gates if not gate.passed)
        if failed:
            diagnosed = tuple(diagnoses.diagnose(replace(evidence, failed=failed)))
            gates = [gate if gate.passed else replace(gate, diagnoses=diagnosed) for gate in gates]
    progress(len(prompts) + 1, len(prompts) + 1, "gates: judged")
    return Checked(tuple(gates), accuracy.accuracy_table(scores), served_alpha(chains), tuple(plain), tuple(chains))


def _loader(report: LoadReport | None, e: Evidence) -> Gate:
    """The loader found nothing doubtful, and what it loaded are not blocks as they are made."""
    if report is None:
        return Gate("loader", False, "no checkpoint was loaded: these heads are as they were made")
    doubts = [*report.findings, *([diagnosis.evidence] if (diagnosis := diagnoses.never_loaded(e)) else [])]
    says = "; ".join(doubts) or "the loader's report is clean"
    return Gate("loader", report.clean and not doubts, says, {"findings": list(report.findings)})


def _zero_blocks(e: Evidence, backbone: Backbone) -> Gate:
    """New heads of the same config, and the loaded ones without their blocks, are the backbone's lm_head."""
    new = Heads(e.heads.config, backbone, e.heads.token_map)
    state = e.probe.fed(new.config.input)
    ids = torch.zeros(len(state), new.config.n_heads, dtype=torch.long, device=state.device)  # zero blocks: no matter
    error = max(relative_error(new.draft_logits(i, state, ids), e.base_logits) for i in range(new.config.n_heads))
    loaded = e.logits_error(e.fed)
    measured = {"new_error": error, "loaded_error": loaded, "tolerance": e.tolerance}
    says = (
        f"zero-block logits are {max(error, loaded):.2g} (relative) off the backbone's, {e.tolerance:.2g} is allowed; "
        f"the text follows the backbone in {np.mean([t.follows for t in e.traces]):.1%}"
    )
    return Gate("zero blocks", max(error, loaded) <= e.tolerance, says, measured)


def _acceptance(scores: Sequence[Scores], shuffled: Sequence[Scores]) -> Gate:
    """Drafts a chain would have accepted at every position of the plain text, against the shuffled heads', paired."""
    rows = [(_accepted(a), _accepted(b), len(a.rank)) for a, b in zip(scores, shuffled, strict=True)]
    interval = bootstrap(rows, lambda data: float((data[:, 0] - data[:, 1]).sum() / data[:, 2].sum()))
    mine, chance, n = np.sum(rows, axis=0)
    measured = {
        "accepted_per_round": mine / n, "shuffled_per_round": chance / n, "gain": interval.value, "low": interval.low,
        "high": interval.high,
    }  # fmt: skip
    says = f"{mine / n:.3f} drafts of a chain accepted, {chance / n:.3f} with shuffled weights: gain {_shown(interval)}"
    return Gate("acceptance", interval.low > 0, says, measured)


def _accepted(scores: Scores) -> float:
    return float(np.logical_and.accumulate(scores.rank == 0, axis=1).sum())


def _shuffled(heads: Heads, backbone: Backbone, seed: int) -> Heads:
    """The same heads with the weights of each block in another order: as large, and without what they learned."""
    copy = Heads(heads.config, backbone, heads.token_map)
    copy.load_state_dict(heads.state_dict())
    draw = torch.Generator().manual_seed(seed)
    for head in copy.heads:
        for block in head.blocks:
            for weight in block.parameters():
                weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view_as(weight))
    return copy


def _serving(
    target: LanguageModel,
    heads: Heads,
    plain: Sequence[Generation],
    chains: Sequence[Generation],
    scores: Sequence[Scores],
) -> Gate:
    """What greedy chains did is what the heads are right about offline, in the same rounds.

    Where rounding made a chain's text another than the plain one, the chain's own text is scored.
    """
    rows = []
    for alone, chain, scored in zip(plain, chains, scores, strict=True):
        alone_scores = scored if chain.token_ids == alone.token_ids else score(heads, trace(target, chain))
        rows.append(compare_rounds(chain, alone_scores, near_tie(target, heads)))
    total = Compared(*map(sum, zip(*rows, strict=True)))
    alpha = share_interval([counts[0] for drafted in chains if len(counts := served_counts(drafted))])
    offline = share_interval([(row.right, row.rounds) for row in rows])
    measured = total._asdict() | {
        "served_alpha_1": alpha.value, "low": alpha.low, "high": alpha.high, "offline_alpha_1": offline.value,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain, chains, strict=True)),
    }  # fmt: skip
    says = (
        f"served alpha_1 {_shown(alpha)}, offline {offline.value:.3f} in the same rounds; {total.apart} of "
        f"{total.rounds} rounds accept otherwise than scored, {total.near_ties} more at near-ties"
    )
    allowed = 0 if target.caps.lossless_dtype else HALF_UNEXPLAINED * total.rounds
    # an interval of too few prompts (NaN) excludes nothing
    excluded = alpha.low > offline.value or alpha.high < offline.value
    return Gate("serving", total.rounds > 0 and total.apart <= allowed and not excluded, says, measured)


def _alignment(e: Evidence) -> Gate:
    """Nothing else that the heads might have been trained on suits them better than what they are served."""
    diagnosed = [d for d in (diagnoses.trained_under_another_norm(e), diagnoses.label_shift(e)) if d is not None]
    says = "; ".join(d.evidence for d in diagnosed) or (
        "the heads are right about the tokens and the norm that they are served, and about no others"
    )
    return Gate("alignment", not diagnosed, says)


def _schedule(e: Evidence) -> Gate:
    if e.curve is None:
        return Gate("schedule", True, "no training curve came with the heads: nothing to judge")
    measured = {"dead_share": e.curve.dead_share, "falling": e.curve.falling, "last_lr": float(e.curve.lr[-1])}
    return Gate("schedule", diagnoses.dead_schedule(e) is None, str(e.curve), measured)


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def served_counts(generation: Generation) -> np.ndarray:
    """Drafts kept and drafts tested by position (of a tree, by depth) in a greedy generation: `(positions, 2)`."""
    counts = np.zeros((max((r.n_tested for r in generation.rounds), default=0), 2))
    for r in generation.rounds:
        counts[: r.n_accepted, 0] += 1
        counts[: r.n_tested, 1] += 1
    return counts


def served_alpha(generations: Sequence[Generation]) -> pd.DataFrame:
    """Of greedy generations: position (1..), alpha, low, high (bootstrap over prompts), kept, tested."""
    counts, rows = [served_counts(counted) for counted in generations], []
    for k in range(max(map(len, counts), default=0)):
        of_prompts = [counted[k] if k < len(counted) else np.zeros(2) for counted in counts]
        kept, tested = np.sum(of_prompts, axis=0)
        interval = share_interval(of_prompts)
        rows.append({
            "position": k + 1, "alpha": interval.value, "low": interval.low, "high": interval.high,
            "kept": int(kept), "tested": int(tested),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=["position", "alpha", "low", "high", "kept", "tested"])


class Compared(NamedTuple):
    """Rounds that drafted; those that accept otherwise than scored, at near-ties and not; right first drafts."""

    rounds: int
    near_ties: int
    apart: int
    right: int


def near_tie(target: LanguageModel, heads: Heads) -> float:
    """The lead of a first choice, as a share of its logit, below which two forwards may choose differently."""
    return NEAR_TIE if target.caps.lossless_dtype else HALF_TIES * torch.finfo(heads.shared_lm_head.dtype).eps


def compare_rounds(chain: Generation, scored: Scores, ties: float) -> Compared:
    """Each round of a greedy chain, behind j + 1 tokens, must accept what row j of the scores is right about."""
    rounds = near = apart = right = done = 0
    for r in chain.rounds:
        row, done = done - 1, done + len(r.committed_ids)
        if not r.k:
            continue
        rank = scored.rank[row, : r.k]
        expected = int(np.logical_and.accumulate(rank == 0).sum())  # behind the end of the text no rank is 0
        rounds, right = rounds + 1, right + int(rank[0] == 0)
        if expected != r.n_accepted:
            tie = scored.margin[row, min(expected, r.n_accepted)] <= ties
            near, apart = near + int(tie), apart + int(not tie)
    return Compared(rounds, near, apart, right)
