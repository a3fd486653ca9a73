"""The faults of the Medusa note, planted on trained heads: what each looks like in numbers, and what the gates say.

Its benchmark measured heads that no checkpoint had been loaded into, its heads were fed a state with the wrong norm,
and its learning rate had decayed to zero.
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
from specnb.medusa.accuracy import Reference, states
from specnb.medusa.checkpoint import OWN, LoadReport
from specnb.medusa.nets import Backbone, Heads, ResidualBlock, new_heads
from specnb.medusa.train import Examples, Recipe, train
from specnb.records import pool_rounds

STEPS, ALIVE, EVERY, PEAK_LR = 18, 12, 3, 2e-3
"""The schedule that dies: all steps, those that have a rate, those from line to line of its log, and the rate."""
ALIVE_ALL, TWO_NORMS = f"{STEPS} living steps", f"{STEPS} steps with two norms"
"""The controls: the same number of steps, all with nonzero LR; and these on the state normed twice."""
SHARES = ("right", "right_normed_once", "copies")
"""Shares that tell faults apart, along the backbone's own text: how often the first head is right as it is fed, how
often it is when it is fed the state behind the final norm, and how often the first choice of all heads is the
backbone's next token."""


class DyingRecipe(Recipe):
    """A recipe whose rate is zero after ALIVE steps, as that of a run which goes on behind the end of a schedule."""

    def lr(self, step: int) -> float:
        return super().lr(step) if step < ALIVE else 0.0


class Sound(NamedTuple):
    """Trained heads to plant faults on, with their loader's report, and a folder of text to train on."""

    heads: Heads
    report: LoadReport
    backbone: Backbone
    text: Path
    seed: int = 0


Planted = tuple[Heads, LoadReport | None]
"""Heads with a fault, and what their loader says."""


def draw_new_heads(sound: Sound) -> Planted:
    """New heads with blocks as torch draws a layer, which is what a benchmark measures that loads no checkpoint."""
    untrained = vary_heads(sound)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sound.seed)
        for module in untrained.modules():
            if isinstance(module, ResidualBlock):
                module.linear.reset_parameters()
    return untrained, None


def vary_heads(sound: Sound, *, norms: int = 1, all_tokens: bool = False, **changes: Any) -> Heads:
    """New heads of the same config but for some `changes`, fed the state normed so many times."""
    # the heads' norm is a copy: whoever listens to the backbone's must not hear it
    backbone = replace(sound.backbone, norm=nn.Sequential(*[sound.heads.norm] * norms))
    token_map = None if all_tokens else sound.heads.token_map
    changes |= {"input": "pre_norm", "draft_vocab": 0 if token_map is None else len(token_map)}
    return new_heads(sound.heads.config.model_copy(update=changes), backbone, token_map, sound.seed)


def other_norm(sound: Sound, norms: int) -> Planted:
    """Trained heads that are fed the state normed twice, or not at all."""
    changed = vary_heads(sound, norms=norms)
    changed.load_state_dict(sound.heads.state_dict())
    return changed, sound.report._replace(training={})


def train_briefly(sound: Sound, recipe: type[Recipe] = Recipe, norms: int = 1) -> Planted:
    """New heads, trained for STEPS on the state normed so many times."""
    fresh = vary_heads(sound, norms=norms)
    # all examples in every batch: the loss of so few steps then falls without noise, as that of thousands does
    n = len(Examples(sound.text, "train", fresh))
    brief = recipe(STEPS, batch_size=n, peak_lr=PEAK_LR, warmup=1, seed=sound.seed)
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        log = train(fresh, brief, sound.text, Path(folder), save_every=EVERY)
    return fresh, LoadReport(sound.text, OWN, fresh.config, training={"log": log})


FAULTS = {
    "none": ("", lambda sound: (sound.heads, sound.report)),
    "never loaded": ("never loaded", draw_new_heads),
    "norm left out": ("missing norm", partial(other_norm, norms=0)),
    "norm applied twice": ("double norm", partial(other_norm, norms=2)),
    "learning rate died": ("dead schedule", partial(train_briefly, recipe=DyingRecipe)),
    ALIVE_ALL: ("undertrained", train_briefly),
    TWO_NORMS: ("double norm", partial(train_briefly, norms=2)),
}
"""The diagnosis that the gates must give for each fault, "" for sound heads, and the function that plants it.

Heads trained for STEPS steps are no better than shuffled ones, so the control must be diagnosed as undertrained.
"""


def plant(fault: str, sound: Sound) -> Planted:
    """Plant a fault of FAULTS on heads, which stay as they are."""
    heads, report = FAULTS[fault][1](sound)
    return heads.eval(), report


def recognise(
    reference: Reference, planted: Mapping[str, Planted], *, seed: int = 0, progress: Progress = silent
) -> pd.DataFrame:
    """Judge planted heads and return a row per fault: its fingerprint, `failed` gates, `diagnoses`, `named`.

    `named`: the gates give the expected diagnosis, or sound heads pass them all. The fingerprint is SHARES, alpha_1
    with accepted (`kept`) and tested draft tokens, and `tau` of a chain.
    """
    rows = []
    for done, (fault, (heads, report)) in enumerate(planted.items()):
        progress(done, len(planted), f"gates of the fault: {fault}")
        checked = gates.judge_gates(reference, heads, report, seed=seed)
        evidence, names, name = checked.evidence, [d.name for d in checked.diagnoses], FAULTS[fault][0]
        first, once = next(evidence.served.itertuples()), evidence.score_all(fed=lambda hidden: hidden.post_norm)
        right, normed_once = (gates.first_choice_rates(scores)[0][0] for scores in (evidence.scores, once))
        rows.append({
            "fault": fault, "alpha_1": first.alpha, "kept": first.kept, "tested": first.tested,
            "tau": pool_rounds(evidence.chains)["tau"],
            "right": right, "right_normed_once": normed_once, "copies": evidence.copies().mean(),
            "failed": ", ".join(checked.failed),
            "diagnoses": "; ".join(f"{d.name}: {d.evidence}" for d in checked.diagnoses),
            "named": name in names if name else checked.passed,
        })  # fmt: skip
    return pd.DataFrame(rows)


def last_hidden_state(target: LanguageModel, ids: Sequence[int]) -> pd.DataFrame:
    """Compare transformers' `hidden_states[-1]` with the states before and behind the norm: the largest distance.

    The Medusa note takes it for the one before. Leaves the target empty.
    """
    last_states = states(target, ids, len(ids))
    net = target.network
    with torch.inference_mode():
        fed = torch.tensor([list(ids)], device=net.device)
        last = net(input_ids=fed, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    sides = {"before the final norm": last_states.pre_norm, "behind it": last_states.post_norm}
    rows = [(side, gates.relative_error(state, last)) for side, state in sides.items()]
    return pd.DataFrame(rows, columns=["state", "largest_difference"])
