"""Tables and the figure of notebook 08, from its record."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book.claims import Estimate
from specnb.book.style import dots, dress
from specnb.decode.generate import generate
from specnb.draft.base import Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import NAMED, Cost
from specnb.records import RunRecord

SUMS = {"z_acc": "drafts kept", "z_draft": "chance of drafts", "z_surp": "chance of committed tokens",
        "z_dir": "lean to draft or target", "z_order": "order of ids"}  # fmt: skip
"""Columns of the five sums, and what each looks at."""
CHANCE = 4.0
"""Standard deviations that a sum of a sound run does not reach."""


def greedy(record: RunRecord) -> pd.DataFrame:
    """A row a prompt: equal to plain decoding, or where it parts and whether the two tokens were nearly tied."""
    return pd.DataFrame(record.measurements["greedy"])


def panel(record: RunRecord) -> pd.DataFrame:
    """The five sums of the audited pair: `z` in standard deviations, `detectable` as a share of probability."""
    return pd.DataFrame(record.measurements["audit"]["panel"])[["name", "n", "z", "p_value", "far", "detectable"]]


def planted(record: RunRecord) -> pd.DataFrame:
    """The audit on a toy pair: a row a planted fault, with its verdict, its causes and the five sums."""
    return pd.DataFrame(record.measurements["planted"])


def planted_figure(record: RunRecord) -> go.Figure:
    """The five sums of each planted fault: between the lines is chance."""
    sums = {name: f"{name}: {says}" for name, says in SUMS.items()}
    rows = planted(record).rename(columns=sums).melt("planted", [*sums.values()], var_name="sum", value_name="z")
    figure = dots(rows, x="z", y="planted", by="sum", title="Planted faults of sampling: which sum sees which")
    for limit in (-CHANCE, CHANCE):
        figure.add_vline(x=limit, line={"color": "#222", "width": 1, "dash": "dot"})
    return dress(figure, "planted")


class SameInputDrafter(ModelDrafter):
    """The cure of the note on exo: every draft of a round is made from the same input."""

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        ids = []
        for _ in range(k):
            self.model.reset()
            ids.append(picker.pick(self.model.forward(tokens[:], n_logits=1)[0])[0])
        return Proposal(tuple(ids))

    def commit(self, tokens: Sequence[int]) -> None:
        self.model.reset()


def claim_values(record: RunRecord) -> dict[str, object]:
    """Return the named values that notebook 08's claims are judged by: of a toy pair, of machines, of the record."""
    prompt, k = [0, 1], 4
    cured, sound = (
        generate(toy.cyclic(7), prompt, drafter=kind(toy.cyclic(7)), k=k, max_new_tokens=20).rounds[0].n_accepted
        for kind in (SameInputDrafter, ModelDrafter)
    )
    costs = [Cost.straight(name, at8).curve.ratio(3) + 2 * c for name, (at8, c) in NAMED.items()]
    same = greedy(record)["identical"]
    return {
        "cured": cured, "sound": sound, "k": k, "cured_share": cured / sound,
        "unchanged_tells": not (prompt == [0, 1] and cured < sound), "n_same": int(same.sum()), "n": len(same),
        "two_of_two": Estimate(3 / np.median(costs), 3 / max(costs), 3 / min(costs), len(costs)),
    }  # fmt: skip
