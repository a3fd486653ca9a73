"""Make a drafter for a target in a given time, or say by which number none can pay here: `specnb draft make`.

A jump drafter is tried, the best of those in notebook 07. What is asked first costs seconds: what a step would take,
and from which acceptance on that pays against the fastest plain decoding. Half of the time is for text, half for steps.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.bench import compare
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.experiment import Progress, silent
from specnb.medusa import train as training
from specnb.medusa.checkpoint import save_heads
from specnb.medusa.drafter import AUTO, CHAIN
from specnb.medusa.jump import JumpDrafter, jump_drafter, new_jump
from specnb.medusa.rollouts import steps_in, train_jump
from specnb.prompts import prompts

REACHABLE = 0.6
"""The acceptance beyond which no drafter of this size came, with much more text than a small machine writes."""
TRIAL_STEPS, HOPE = 100, 0.15
"""Steps after which a training is judged, and by how much the acceptance may still rise: at most so far here."""
DRAFT_VOCAB, N_STEPS = 8192, 8
KS = (1, 2, 3, 4)
CONTENTS = ("code", "prose", "general")


class Outlook(NamedTuple):
    """The cost of a drafter, a step in plain steps, and the acceptance from which on it pays; NaN for never."""

    cost: Cost
    baseline: Baseline

    @property
    def needed(self) -> float:
        return self.cost.break_even(self.baseline.share)

    def __str__(self) -> str:
        at5, share = self.cost.curve.ratio(5), self.baseline.share
        facts = f"a draft step costs {self.cost.c:.2f} of a plain one, a forward of five tokens {at5:.2f}"
        slower = f", and plain decoding in this engine has {share:.2f} of the speed of {self.baseline.baseline_engine}"
        needs = "no acceptance pays" if self.needed != self.needed else f"drafts pay from {self.needed:.0%} kept on"
        return f"{facts}{slower * (share < 1)}: {needs}"


class NoDrafter(InputError):
    """No drafter pays here; the message has the number that forbids it."""


def examine_target(model: Any) -> Outlook:
    """Measure what an untrained jump drafter costs beside a target, a few seconds."""
    config = _config(model)
    drafter = JumpDrafter(model, new_jump(config, model, torch.arange(config.draft_vocab), seed=0).eval())
    curve, c = verify_costs(model, [drafter], N_STEPS, quick=True)
    drafter.close()
    return Outlook(Cost(curve, c[drafter.name], of_target=True), time_baseline(model, prompts("code", limit=3)))


def make_drafter(model: Any, work: Path, out: Path, budget_s: float, *, progress: Progress = silent) -> pd.DataFrame:
    """Train a jump drafter for a torch model in about `budget_s` seconds, save it in `out`, and time it.

    Returns the table of `bench.compare` over the shipped prompts of CONTENTS, plain decoding first. Raises NoDrafter
    where the outlook or the first steps say that none will pay; goes on with the text and the steps in `work`.
    """
    outlook = examine_target(model)
    if not outlook.needed <= REACHABLE:
        raise NoDrafter(f"no drafter for {model.name}: {outlook}, and {REACHABLE:.0%} is out of reach")
    began_s, n_batches = perf_counter(), 0
    while perf_counter() - began_s < budget_s / 2 or not n_batches:
        n_batches += 1
        rows = training.write_training_text(model, work / "text", n_batches, progress)
    net: Any = training.make_heads(model, _config(model), rows, seed=0)
    tops = []

    def judge(step: int, loss: float, figures: Mapping[str, Any]) -> None:
        progress(step, recipe.steps, f"loss {loss:.2f}")
        tops.append(figures["top1"][0])
        if step == TRIAL_STEPS and (top := sum(tops[-20:]) / 20) + HOPE < outlook.needed:
            raise NoDrafter(f"no drafter for {model.name}: {outlook}; after {TRIAL_STEPS} steps {top:.0%} are right")

    recipe = training.recipe("cpu", "jump")
    n_steps = max(TRIAL_STEPS, steps_in(budget_s / 2, net, recipe, work / "text"))
    recipe = training.recipe("cpu", "jump", steps=n_steps)
    log = train_jump(net, recipe, work / "text", work / "run", on_step=judge)
    facts = {"outlook": str(outlook)} | training.training_facts(net, recipe, log, work / "text")
    save_heads(net, out, facts=facts)
    plain = partial(generate, model, max_new_tokens=64)
    chain, tree = (jump_drafter(model, heads_checkpoint=out, tree=shape) for shape in (CHAIN, AUTO))
    methods = {"plain": plain} | {f"K = {k}": partial(plain, drafter=chain, k=k) for k in KS}
    if tree.tree_nodes:
        methods[f"tree of {tree.tree_nodes}"] = partial(plain, drafter=tree)
    table = compare(methods, [p for name in CONTENTS for p in prompts(name, limit=3)], baseline="plain")
    chain.close()
    tree.close()
    table = outlook.baseline.over(table)
    (out / "README.md").write_text(write_card(facts, table), encoding="utf-8")
    return table


def _config(model: Any) -> Any:
    draft_vocab = min(DRAFT_VOCAB, model.vocab.size)
    return training.config_for(model, kind="jump", n_heads=N_STEPS, draft_vocab=draft_vocab)


def write_card(facts: Mapping[str, Any], table: pd.DataFrame | None = None) -> str:
    """Return the card of a trained drafter in Markdown, from the facts of its training and, if any, its speeds."""
    config, text, recipe, last = facts["heads"], facts["text"], facts["recipe"], facts["log"][-1]
    columns = {"mass accepted at T = 1": "accepted", "best token right": "top1", "among the best five": "top5"}
    shares = pd.DataFrame({title: last[name] for title, name in columns.items() if name in last})
    tau = last.get("greedy_tau", 1 + np.cumprod(last["top1"]).sum())
    card = f"""# `{config["kind"]}`, a drafter for `{config["backbone_name"]}`

{facts["parameters"] / 1e6:.2f} M parameters of its own, bfloat16; it drafts from {config["draft_vocab"]:,} tokens.
{facts.get("outlook", "")}

## On held-out text that the target drew itself

```
{shares.set_index(shares.index + 1).round(3)}
```

A round of {len(shares)} drafts has {tau:.2f} tokens there, where the best token counts.

## How it was made

{text["tokens"]["train"]:,} tokens of text, {text["own"]["train"]:,} of them drawn by the target anew;
{recipe["steps"]:,} steps of {recipe["batch_size"]:,} positions, peak rate {recipe["peak_lr"]:g}.
The whole curve is in `training.json`.
"""
    if table is None:
        return card
    speeds = table[["method", "tau", "speedup", "speedup_same_engine", "identical", "n_prompts"]]
    return f"""{card}
## Live, greedy, on the shipped prompts

`speedup` is over the fastest plain decoding, `speedup_same_engine` over that in torch; texts as of plain decoding are
`identical`.

```
{speeds.round(2).to_string(index=False)}
```
"""
