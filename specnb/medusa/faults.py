"""The faults of the Medusa note, planted on trained heads: what each looks like in numbers, and what the gates say.

Its benchmark measured heads that no checkpoint had been loaded into, its heads were fed a state with the wrong norm,
and its learning rate had decayed to zero.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

from specnb.lm.base import LanguageModel
from specnb.measure import curve as training_curve
from specnb.measure.curve import Curve
from specnb.measure.experiment import Progress, silent
from specnb.medusa import gates
from specnb.medusa.accuracy import HiddenTrace, score, states
from specnb.medusa.checkpoint import OWN, LoadReport
from specnb.medusa.nets import Backbone, Heads, ResidualBlock, new_heads
from specnb.medusa.study import practise
from specnb.medusa.train import Examples, Recipe
from specnb.prompts import Prompt

STEPS, ALIVE, EVERY = 18, 12, 3
"""Of the schedule that dies: all steps, those that have a rate, and those from line to line of its log."""
SHARES = ("right", "right_normed_once", "copies", "repeats")
"""Columns of `fingerprint`."""


class DyingRecipe(Recipe):
    """A recipe whose rate is zero after ALIVE steps, as that of a run which goes on behind the end of a schedule."""

    def lr(self, step: int) -> float:
        return super().lr(step) if step < ALIVE else 0.0


class Planted(NamedTuple):
    """Heads with one fault, and what its loader and log say of them; `named` is what the gates call it, or ""."""

    fault: str
    named: str
    heads: Heads
    report: LoadReport | None
    curve: Curve | None = None


def never_loaded(heads: Heads, backbone: Backbone, seed: int) -> Planted:
    """New heads with blocks as torch draws a layer, which is what a benchmark measures that loads no checkpoint."""
    untrained = new_heads(heads.config, backbone, heads.token_map, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in untrained.modules():
            if isinstance(module, ResidualBlock):
                module.linear.reset_parameters()
    return Planted("never loaded", "never loaded", untrained.eval(), None)


def none(heads: Heads, report: LoadReport) -> Planted:
    """The heads as they are."""
    return Planted("none", "", heads, report, training_curve.read(report.path))


def other_norm(heads: Heads, backbone: Backbone, report: LoadReport, *, twice: bool) -> Planted:
    """Trained heads that are fed the state normed `twice`, or not at all."""
    config = heads.config.model_copy(update={"input": "pre_norm"})
    # the heads' norm is a copy: whoever listens to the backbone's must not hear it
    norm = nn.Sequential(heads.norm, heads.norm) if twice else nn.Identity()
    changed = Heads(config, replace(backbone, norm=norm), heads.token_map)
    changed.load_state_dict(heads.state_dict())
    fault, name = ("norm applied twice", "double norm") if twice else ("norm left out", "missing norm")
    return Planted(fault, name, changed.eval(), report)


def rate_died(heads: Heads, backbone: Backbone, text: Path, *, peak_lr: float, seed: int) -> Planted:
    """New heads, trained on the folder `text` with a schedule that dies."""
    fresh = new_heads(heads.config, backbone, heads.token_map, seed)
    # all examples in every batch: the loss of so few steps then falls without noise, as that of thousands does
    n = len(Examples.of(text, "train", fresh))
    dying = DyingRecipe(STEPS, batch_size=n, peak_lr=peak_lr, warmup=1, seed=seed)
    log = practise("rate died", fresh, dying, text, save_every=EVERY).log
    report = LoadReport(text, OWN, fresh.config, converted=(), findings=())
    return Planted("learning rate died", "dead schedule", fresh.eval(), report, Curve.of(log))


def judge(
    target: LanguageModel, planted: Sequence[Planted], prompts: Sequence[Prompt], *, max_new_tokens: int = 24,
    seed: int = 0, before: gates.Checked | None = None, progress: Progress = silent,
) -> pd.DataFrame:  # fmt: skip
    """The gates on each of `planted`. A row: fault, its fingerprint, `failed` gates, `diagnoses`, `named` (rightly).

    `before` is that of `gates.run`, with the same length.
    Columns of the fingerprint are those of `fingerprint`, alpha_1 with kept and tested drafts, and `tau` of a chain.
    """
    rows = []
    for fault in planted:
        checked = gates.run(
            target, fault.heads, fault.report, prompts, curve=fault.curve, max_new_tokens=max_new_tokens, seed=seed,
            before=before,
            progress=lambda done, total, step, fault=fault.fault: progress(done, total, f"{fault}: {step}"),
        )  # fmt: skip
        before, names = before or checked, [d.name for d in checked.diagnoses]
        first = checked.served.iloc[0] if len(checked.served) else {"alpha": None, "kept": 0, "tested": 0}
        rows.append({
            "fault": fault.fault,
            "alpha_1": first["alpha"], "kept": int(first["kept"]), "tested": int(first["tested"]),
            "tau": sum(len(g.token_ids) for g in checked.chains) / sum(len(g.rounds) for g in checked.chains),
            **fingerprint(fault.heads, checked.traces),
            "failed": ", ".join(gate.name for gate in checked.gates if not gate.passed),
            "diagnoses": "; ".join(f"{d.name}: {d.evidence}" for d in checked.diagnoses),
            "named": fault.named in names if fault.named else checked.passed,
        })  # fmt: skip
    return pd.DataFrame(rows)


@torch.inference_mode()
def fingerprint(heads: Heads, traces: Sequence[HiddenTrace]) -> dict[str, float]:
    """What tells faults apart, along the backbone's own text.

    `right` is how often the first head is right as it is fed, `right_normed_once` how often it is when it is fed the
    state behind the final norm, `copies` how often the first choice of all heads is the backbone's next token, and
    `repeats` how often the text has the same token twice in a row: what heads that copy are accepted for.
    """
    served = [score(heads, along) for along in traces]
    once = [score(heads, along, normed=along.post_norm) for along in traces]
    ids = [along.ids.cpu().numpy() for along in traces]
    right, right_once = (float(gates.rates(scores)[0][0]) for scores in (served, once))
    return {
        "right": right, "right_normed_once": right_once,
        "copies": float(gates.copies(served, traces).mean()),
        "repeats": float(np.concatenate([text[1:] == text[:-1] for text in ids]).mean()),
    }  # fmt: skip


def last_hidden_state(target: LanguageModel, ids: Sequence[int]) -> pd.DataFrame:
    """Which state transformers gives as `hidden_states[-1]`: largest distance from those before and behind the norm.

    The Medusa note takes it for the one before. Leaves the target empty.
    """
    seen = states(target, ids, len(ids))
    net = target.network
    with torch.inference_mode():
        fed = torch.tensor([list(ids)], device=net.device)
        given = net(input_ids=fed, output_hidden_states=True, use_cache=False).hidden_states[-1][0].float()
    sides = {"before the final norm": seen.pre_norm, "behind it": seen.post_norm}
    scale = float(given.abs().max())
    return pd.DataFrame([
        {"state": name, "largest_difference": float((state.float() - given).abs().max()) / scale}
        for name, state in sides.items()
    ])  # fmt: skip
