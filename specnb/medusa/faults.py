"""The faults of the Medusa note, planted on trained heads: their numbers, and the gates' diagnoses.

The note's benchmark loaded no checkpoint into its heads, the heads took a state with the wrong
norm, and the learning rate had decayed to zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent
from specnb.medusa import gates
from specnb.medusa.accuracy import Reference, count_ranks, marginal, states_of
from specnb.medusa.checkpoint import OWN, LoadReport
from specnb.medusa.examples import Examples
from specnb.medusa.nets import Backbone, Heads, ResidualBlock, new_heads, seeded
from specnb.medusa.recipe import Recipe
from specnb.medusa.train import train
from specnb.records import pool_rounds

STEPS, ALIVE, EVERY, PEAK_LR = 18, 12, 3, 2e-3
"""The short training: all steps, those with a learning rate, those per line of the log, the rate."""
ALIVE_ALL, TWO_NORMS = f"{STEPS} living steps", f"{STEPS} steps with two norms"
"""The controls: as many steps with a nonzero rate, and these on the state normed twice."""
SHARES = ("right", "right_normed_once", "copies")
"""Shares that tell faults apart, along the backbone's own text.

They say how often the first head is right, how often it is right on the state normed once, and how
often the most likely token of any head is the backbone's next token.
"""


class DyingRecipe(Recipe):
    """A recipe whose rate is zero after ALIVE steps, as in a run that goes on after its schedule."""

    def lr(self, step: int) -> float:
        return super().lr(step) if step < ALIVE else 0.0


class Sound(NamedTuple):
    """Trained heads to plant faults on, their loader's report, and a folder of training text."""

    heads: Heads
    report: LoadReport
    backbone: Backbone
    text: Path
    seed: int = 0


Planted = tuple[Heads, LoadReport | None]
"""Heads with a fault, and their loader's report."""


def draw_new_heads(sound: Sound) -> Planted:
    """Return heads whose blocks torch initialized: those of a benchmark that loads no checkpoint."""
    untrained = vary_heads(sound)
    with seeded(sound.seed):
        for module in untrained.modules():
            if isinstance(module, ResidualBlock):
                module.linear.reset_parameters()
    return untrained, None


def vary_heads(sound: Sound, *, norms: int = 1, all_tokens: bool = False, **changes: Any) -> Heads:
    """Return new heads of the same config with `changes`, which apply the final norm `norms` times."""
    # The heads' norm is a copy without the hooks of the backbone's.
    backbone = replace(sound.backbone, norm=nn.Sequential(*[sound.heads.norm] * norms))
    token_map = None if all_tokens else sound.heads.token_map
    changes |= {"input": "pre_norm", "draft_vocab": 0 if token_map is None else len(token_map)}
    return new_heads(sound.heads.config.model_copy(update=changes), backbone, token_map, sound.seed)


def change_norm(sound: Sound, norms: int) -> Planted:
    """Return the trained heads with the final norm applied `norms` times."""
    changed = vary_heads(sound, norms=norms)
    changed.load_state_dict(sound.heads.state_dict())
    return changed, sound.report._replace(training={})


def train_briefly(sound: Sound, recipe: type[Recipe] = Recipe, norms: int = 1) -> Planted:
    """Return new heads, trained for STEPS steps with the final norm applied `norms` times."""
    fresh = vary_heads(sound, norms=norms)
    # Each batch holds all examples: the loss then falls without noise, as over thousands of steps.
    n = len(Examples(sound.text, "train", fresh))
    brief = recipe(STEPS, batch_size=n, peak_lr=PEAK_LR, warmup=1, seed=sound.seed)
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        log = train(fresh, brief, sound.text, Path(folder), save_every=EVERY)
    return fresh, LoadReport(sound.text, OWN, fresh.config, training={"log": log})


FAULTS = {
    "none": ("", lambda sound: (sound.heads, sound.report)),
    "never loaded": ("never loaded", draw_new_heads),
    "norm left out": ("missing norm", partial(change_norm, norms=0)),
    "norm applied twice": ("double norm", partial(change_norm, norms=2)),
    "learning rate died": ("dead schedule", partial(train_briefly, recipe=DyingRecipe)),
    ALIVE_ALL: ("undertrained", train_briefly),
    TWO_NORMS: ("double norm", partial(train_briefly, norms=2)),
}
"""The diagnosis that the gates must give ("" for sound heads), and what plants the fault.

After STEPS steps heads are no better than shuffled ones, so the control must be diagnosed as
undertrained.
"""


def plant(fault: str, sound: Sound) -> Planted:
    """Return heads with a fault of FAULTS. The sound heads do not change."""
    heads, report = FAULTS[fault][1](sound)
    return heads.eval(), report


def recognise(reference: Reference, planted: Mapping[str, Planted], *, progress: Progress = silent) -> pd.DataFrame:
    """Judge planted heads and return one row per fault.

    Columns: fault; alpha_1 with accepted (`kept`) and tested draft tokens, and tau, of chains;
    SHARES; `failed` gates, `diagnoses`, and whether the expected fault is `named` (for sound heads:
    no gate fails).
    """
    rows = []
    for done, (fault, (heads, report)) in enumerate(planted.items()):
        progress(done, len(planted), f"gates of the fault: {fault}")
        checked = gates.judge_gates(reference, heads, report)
        evidence = checked.evidence
        first = next(evidence.served.itertuples())
        once = evidence.score_all(normed=lambda states: states.post_norm)
        expected = FAULTS[fault][0]
        row = {"fault": fault, "alpha_1": first.alpha, "kept": first.kept, "tested": first.tested}
        row |= {
            "tau": pool_rounds(evidence.chains)["tau"],
            "right": marginal(count_ranks(evidence.scores))[0, 0],
            "right_normed_once": marginal(count_ranks(once))[0, 0],
            "copies": evidence.copies().mean(),
            "failed": ", ".join(checked.failed),
            "diagnoses": "; ".join(f"{d.name}: {d.evidence}" for d in checked.diagnoses),
            "named": [d.name for d in checked.diagnoses] == ([expected] if expected else []),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def last_hidden_state(target: LanguageModel, ids: Sequence[int]) -> pd.DataFrame:
    """Compare transformers' `hidden_states[-1]` with the states before and after the final norm.

    The Medusa note takes it for the state before. Columns: state, largest_difference (relative).
    The target is empty afterwards.
    """
    states = states_of(target, ids, len(ids))
    net = target.network
    with torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=net.device)
        last = net(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    sides = {"before the final norm": states.pre_norm, "after it": states.post_norm}
    rows = [(side, gates.relative_error(state, last)) for side, state in sides.items()]
    return pd.DataFrame(rows, columns=["state", "largest_difference"])
