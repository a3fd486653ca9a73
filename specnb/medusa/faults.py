"""The faults of the Medusa note, planted on trained heads: their metrics, and the gates' diagnoses.

The note's benchmark did not load a checkpoint, its heads took a state with the wrong norm, and the
learning rate had decayed to zero in training.
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
from specnb.measure.experiment import Progress
from specnb.medusa import gates
from specnb.medusa.accuracy import Reference, count_ranks, marginal, score, states_of
from specnb.medusa.checkpoint import OWN, LoadReport
from specnb.medusa.examples import Examples
from specnb.medusa.nets import Backbone, Heads, ResidualBlock, new_heads, seeded
from specnb.medusa.recipe import Recipe
from specnb.medusa.train import train
from specnb.records import pool_rounds

STEPS, ALIVE, EVERY, PEAK_LR = 18, 12, 3, 2e-3
"""The short training: steps, steps with nonzero LR, steps per log entry, peak LR."""
LR_ZERO = f"LR of zero after step {ALIVE}"
ALIVE_ALL = f"{STEPS} steps with nonzero LR"
TWO_NORMS = f"{STEPS} steps with two norms"
"""The short trainings. Controls: all steps with nonzero LR, and the final norm applied twice."""
NONE = "none"
"""The diagnosis of sound heads."""


class DyingRecipe(Recipe):
    """A recipe with an LR of zero after ALIVE steps, as if a run continued past its schedule."""

    def lr(self, step: int) -> float:
        return super().lr(step) if step < ALIVE else 0.0


class Sound(NamedTuple):
    """Trained heads without faults, their loader's report, and a folder of training text."""

    heads: Heads
    report: LoadReport
    backbone: Backbone
    text: Path
    seed: int = 0


Planted = tuple[Heads, LoadReport | None]
"""Heads with a fault, and their loader's report, or None."""


def draw_new_heads(sound: Sound) -> Planted:
    """Return heads whose blocks have torch's initialization, as if no checkpoint was loaded."""
    untrained = vary_heads(sound)
    with seeded(sound.seed):
        for module in untrained.modules():
            if isinstance(module, ResidualBlock):
                module.linear.reset_parameters()
    return untrained, None


def vary_heads(sound: Sound, *, norms: int = 1, all_tokens: bool = False, **changes: Any) -> Heads:
    """Return new heads with `changes` to the config, which apply the final norm `norms` times.

    With `all_tokens`, they draft from the entire vocabulary.
    """
    # Use the heads' norm, a copy without the hooks of the backbone's norm.
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
    """Return new heads trained for STEPS steps, with the final norm applied `norms` times."""
    fresh = vary_heads(sound, norms=norms)
    # Each batch has all examples, so the loss falls without noise, as over thousands of steps.
    n = Examples(sound.text, "train", fresh).n_items
    brief = recipe(STEPS, batch_size=n, peak_lr=PEAK_LR, warmup=1, seed=sound.seed)
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        log = train(fresh, brief, sound.text, Path(folder), save_every=EVERY)
    return fresh, LoadReport(sound.text, OWN, fresh.config, training={"log": log})


FAULTS = {
    "none": ("", lambda sound: (sound.heads, sound.report)),
    "never loaded": ("never loaded", draw_new_heads),
    "norm left out": ("missing norm", partial(change_norm, norms=0)),
    "norm applied twice": ("double norm", partial(change_norm, norms=2)),
    LR_ZERO: ("dead schedule", partial(train_briefly, recipe=DyingRecipe)),
    ALIVE_ALL: ("undertrained", train_briefly),
    TWO_NORMS: ("double norm", partial(train_briefly, norms=2)),
}
"""Maps a fault to the diagnosis expected of the gates ("" for sound heads) and its function.

After STEPS steps, heads are no better than with shuffled weights, so the expected diagnosis of the
control is "undertrained".
"""


def plant(fault: str, sound: Sound) -> Planted:
    """Return heads with a fault of FAULTS. Does not change the sound heads."""
    heads, report = FAULTS[fault][1](sound)
    return heads.eval(), report


def recognise(
    reference: Reference, planted: Mapping[str, Planted], *, progress: Progress
) -> pd.DataFrame:
    """Judge the planted heads and return one row per fault.

    Columns: planted (the fault); of greedy chains, alpha_1, accepted and tested draft tokens at
    position 1, and tau; along the backbone's own text, how often the first head is `right`, and
    `right_normed_once` if the norm is applied once, and the share of most likely tokens that are
    `copies` of the backbone's next one; `failed` gates, `diagnoses` with evidence; the `expected`
    diagnosis and the one `named` (NONE for sound heads), and whether they `agree`.
    """
    rows = []
    for done, (fault, (heads, report)) in enumerate(planted.items()):
        progress(done, len(planted), f"gates of the fault: {fault}")
        checked = gates.judge_gates(reference, heads, report)
        evidence = checked.evidence
        first = next(evidence.served.itertuples())
        once = [score(heads, states, states.post_norm) for states in reference.states]
        expected = FAULTS[fault][0] or NONE
        named = "; ".join(d.name for d in checked.diagnoses) or NONE
        row = {
            "planted": fault,
            "alpha_1": first.alpha,
            "accepted": first.accepted,
            "tested": first.tested,
            "tau": pool_rounds(evidence.chains)["tau"],
            "right": marginal(count_ranks(evidence.scores))[0, 0],
            "right_normed_once": marginal(count_ranks(once))[0, 0],
            "copies": evidence.copies().mean(),
            "failed": ", ".join(checked.failed),
            "diagnoses": "; ".join(f"{d.name}: {d.evidence}" for d in checked.diagnoses),
            "expected": expected,
            "named": named,
            "agree": named == expected,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def last_hidden_state(target: LanguageModel, ids: Sequence[int]) -> pd.DataFrame:
    """Compare transformers' `hidden_states[-1]` with the states before and after the final norm.

    The Medusa note assumes that it is the state before. Columns: state, largest_difference
    (relative). Resets the target.
    """
    states = states_of(target, ids, len(ids))
    net = target.network
    with torch.inference_mode():
        tokens = torch.tensor([list(ids)], device=net.device)
        last = net(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states[-1][
            0
        ]
    sides = {"before the final norm": states.pre_norm, "after it": states.post_norm}
    rows = [(side, gates.relative_error(state, last)) for side, state in sides.items()]
    return pd.DataFrame(rows, columns=["state", "largest_difference"])
