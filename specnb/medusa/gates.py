"""Gates in front of every speed of heads: is what is about to be timed what was trained?

A benchmark once measured heads that no checkpoint had been loaded into, and nothing said so. So before a speed is
printed: the loader's report is clean; without what training added the heads are the backbone; acceptance beats that
of the same heads with their weights shuffled; no other norm or label suits them better; what is served is what is
right offline; and the learning rate lived to the end of the training. A gate that fails gives the diagnosis in place
of a number (`head_faults`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent
from specnb.measure.stats import FEWEST, Interval, bootstrap
from specnb.medusa.accuracy import Scores, States, Trace, accuracy_table, network, offline_alpha, score, states, trace
from specnb.medusa.backbone import Backbone
from specnb.medusa.checks import base_logits, relative_error, zero_block_error
from specnb.medusa.curve import Curve
from specnb.medusa.diagnoses import (
    Diagnosis,
    Evidence,
    dead_schedule,
    diagnose,
    label_shift,
    never_loaded,
    trained_under_another_norm,
)
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.heads import Heads
from specnb.medusa.serving import Served, allowed_apart, compare, served_alpha
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
PROBE = 32
"""Tokens whose logits zero-block heads are held against the backbone's."""
EXACT = 1e-5
"""Largest relative difference of float32 logits that are the same but for the order of additions."""


class Report(Protocol):
    """What a loader says of its checkpoint (`medusa.checkpoint.LoadReport`)."""

    clean: bool
    findings: Sequence[str]


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

    `accuracy` is `heads.accuracy_table` along the plain texts, `offline` and `served` are alpha by position;
    `plain` and `chains` the generations they come from.
    """

    gates: tuple[Gate, ...]
    accuracy: pd.DataFrame
    offline: pd.DataFrame
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
    report: Report | None,
    prompts: Sequence[Prompt | str | Sequence[int]],
    *,
    curve: Curve | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    seed: int = 0,
    progress: Progress = silent,
) -> Checked:
    """Measure and judge all gates. `report` is the loader's, None when nothing was loaded; `curve` the training's.

    Every prompt is continued greedily, plainly and with a chain of all heads. `seed` is that of the shuffled weights.
    Raises InputError for fewer than 5 prompts, for which there is no interval, and what `generate` raises.
    """
    if len(prompts) < FEWEST:
        raise InputError(f"gates need intervals over at least {FEWEST} prompts, got {len(prompts)}: give more")
    texts = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    with torch.inference_mode():
        plain, chains, traces = _measured(target, heads, prompts, texts, progress)
        scores = [score(heads, one) for one in traces]
        backbone = Backbone.of(network(target))
        evidence = Evidence(
            heads=heads, norm=backbone.norm, traces=traces, scores=scores, probe=_probe(target, plain),
            tolerance=_tolerance(heads), curve=curve,
        )  # fmt: skip
        control = _shuffled(heads, backbone, seed)
        shuffled = [score(control, one) for one in traces]
        gates = [
            _loader(report, evidence), _zero_blocks(evidence, backbone), _acceptance(scores, shuffled),
            _alignment(evidence), _serving(target, compare(target, heads, plain, chains, scores)), _schedule(evidence),
        ]  # fmt: skip
        failed = frozenset(gate.name for gate in gates if not gate.passed)
        if failed:
            found = tuple(diagnose(replace(evidence, failed=failed)))
            gates = [gate if gate.passed else replace(gate, diagnoses=found) for gate in gates]
    progress(len(prompts) + 1, len(prompts) + 1, "gates: judged")
    return Checked(
        tuple(gates), accuracy_table(scores), offline_alpha(scores), served_alpha(chains), tuple(plain), tuple(chains)
    )


def _measured(
    target: LanguageModel, heads: Heads, prompts: Sequence[Any], texts: Mapping[str, Any], progress: Progress
) -> tuple[list[Generation], list[Generation], list[Trace]]:
    drafter = HeadsDrafter(target, heads, None)
    plain, chains, traces = [], [], []
    for done, prompt in enumerate(prompts):
        progress(done, len(prompts) + 1, f"gates: {getattr(prompt, 'id', '') or f'prompt {done + 1}'}")
        plain.append(generate(target, prompt, **texts))
        chains.append(generate(target, prompt, drafter=drafter, k=heads.config.n_heads, **texts))
        traces.append(trace(target, plain[-1]))
    progress(len(prompts), len(prompts) + 1, "gates: heads are scored")
    return plain, chains, traces


def _loader(report: Report | None, e: Evidence) -> Gate:
    """The loader found nothing doubtful, and what it loaded are not blocks as they are made."""
    if report is None:
        return Gate("loader", False, "no checkpoint was loaded: these heads are as they were made")
    doubts = [*report.findings, *([found.evidence] if (found := never_loaded(e)) else [])]
    says = "; ".join(doubts) or "the loader's report is clean"
    return Gate("loader", report.clean and not doubts, says, {"findings": list(report.findings)})


def _zero_blocks(e: Evidence, backbone: Backbone) -> Gate:
    """New heads of the same config, and the loaded ones without their blocks, are the backbone's lm_head."""
    new = Heads(e.heads.config, backbone, e.heads.token_map)
    state, base = e.probe.fed(new.config.input), base_logits(new, e.probe)
    ids = torch.zeros(len(state), new.config.n_heads, dtype=torch.long, device=state.device)  # zero blocks: no matter
    error = max(relative_error(new.draft_logits(i, state, ids), base) for i in range(new.config.n_heads))
    loaded = zero_block_error(e.heads, e.probe)
    measured = {"new_error": error, "loaded_error": loaded, "tolerance": e.tolerance}
    says = (
        f"zero-block logits are {max(error, loaded):.2g} (relative) off the backbone's, {e.tolerance:.2g} is allowed; "
        f"the text follows the backbone in {np.mean([t.follows for t in e.traces]):.1%}"
    )
    return Gate("zero blocks", max(error, loaded) <= e.tolerance, says, measured)


def _acceptance(scores: Sequence[Scores], shuffled: Sequence[Scores]) -> Gate:
    """Drafts a chain would have accepted at every position of the plain text, against the shuffled heads', paired."""
    rows = [(_accepted(a), _accepted(b), len(a.rank)) for a, b in zip(scores, shuffled, strict=True)]
    found = bootstrap(rows, lambda data: float((data[:, 0] - data[:, 1]).sum() / data[:, 2].sum()))
    mine, theirs, n = np.sum(rows, axis=0)
    measured = {
        "accepted_per_round": mine / n, "shuffled_per_round": theirs / n, "gain": found.value, "low": found.low,
        "high": found.high,
    }  # fmt: skip
    says = f"{mine / n:.3f} drafts of a chain accepted, {theirs / n:.3f} with shuffled weights: gain {_shown(found)}"
    return Gate("acceptance", found.low > 0, says, measured)


def _accepted(scores: Scores) -> float:
    return float(np.logical_and.accumulate(scores.rank == 0, axis=1).sum())


def _shuffled(heads: Heads, backbone: Backbone, seed: int) -> Heads:
    """The same heads with the weights of each block in another order: as large, and without what they learned."""
    made = Heads(heads.config, backbone, heads.token_map)
    made.load_state_dict(heads.state_dict())
    draw = torch.Generator().manual_seed(seed)
    for head in made.heads:
        for block in head.blocks:
            for weight in block.parameters():
                weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=draw)].view_as(weight))
    return made


def _serving(target: LanguageModel, served: Served) -> Gate:
    """What is served is what is offline right."""
    found, alpha, offline = served.compared, served.alpha_1, served.offline
    measured = found._asdict() | {
        "served_alpha_1": alpha.value,
        "low": alpha.low,
        "high": alpha.high,
        "offline_alpha_1": offline.value,
        "identical": served.identical,
    }
    says = (
        f"served alpha_1 {_shown(alpha)}, offline {offline.value:.3f} in the same rounds; {found.apart} of "
        f"{found.rounds} rounds accept otherwise than scored, {found.near_ties} more at near-ties"
    )
    passed = found.rounds > 0 and found.apart <= allowed_apart(target, found.rounds) and served.agree
    return Gate("serving", passed, says, measured)


def _alignment(e: Evidence) -> Gate:
    """Nothing else that the heads might have been trained on suits them better than what they are served.

    Half-wrong heads are better than shuffled ones, and what they are served is what they were scored on.
    """
    found = [d for d in (trained_under_another_norm(e), label_shift(e)) if d is not None]
    says = "; ".join(d.evidence for d in found) or (
        "the heads are right about the tokens and the norm that they are served, and about no others"
    )
    return Gate("alignment", not found, says)


def _schedule(e: Evidence) -> Gate:
    if e.curve is None:
        return Gate("schedule", True, "no training curve came with the heads: nothing to judge")
    measured = {"dead_share": e.curve.dead_share, "falling": e.curve.falling, "last_lr": float(e.curve.lr[-1])}
    return Gate("schedule", dead_schedule(e) is None, str(e.curve), measured)


def _probe(target: LanguageModel, plain: Sequence[Generation]) -> States:
    """States and logits of the last tokens of the longest text."""
    longest = max(plain, key=lambda one: len(one.prompt_ids) + len(one.token_ids))
    ids = (*longest.prompt_ids, *longest.token_ids[:-1])  # the last token may lie behind the context
    return states(target, ids, min(PROBE, len(ids)))


def _spacing(heads: Heads) -> float:
    return torch.finfo(heads.shared_lm_head.dtype).eps


def _tolerance(heads: Heads) -> float:
    """EXACT, or in 16-bit types the spacing of the largest logit: both sides are rounded by half of it at most."""
    return max(EXACT, _spacing(heads))


def _shown(found: Interval) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
