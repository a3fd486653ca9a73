"""Tables over the explorer's settings, for readers without sliders: what holds, what is best where."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from specnb.book.explore import ALL, CUSTOM, FIXED, Machine, Setting, Tables
from specnb.measure.cost import NAMED, CostCurve


def checks(tables: Tables) -> pd.DataFrame:
    """What must hold on every machine and for every model: check, of, hold, ok."""
    greedy = [i for i, r in enumerate(tables.recordings) if not r.temperature]
    rounds, drafted, accepted, _ = np.moveaxis(tables.exact.totals, -1, 0)
    over = rounds + accepted - tables.n_tokens[:, None]  # the last round has no token after its drafts, or one
    cheap, dear = (
        tables.exact.seconds(Machine.straight(CUSTOM, at8, c, tables.k_max)) for at8, c in ((1.1, 0.1), (4.0, 0.5))
    )
    whole = np.isclose(tables.exact.totals[greedy], np.round(tables.exact.totals[greedy]))
    rows = [
        ("greedy counts are whole numbers, for every K", whole),
        ("rounds and accepted drafts make up the tokens, for every K", (over > -1e-9) & (over < 1 + 1e-9)),
        ("no more drafts are accepted than drafted, for every K", accepted <= drafted + 1e-9),
        ("without drafts every round commits one token", rounds[:, 0] == tables.n_tokens),
        ("dearer forwards never make a prediction faster", dear >= cheap - 1e-9),
    ]
    frame = pd.DataFrame([(name, held.size, int(held.sum())) for name, held in rows], columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])


def machines(tables: Tables, drafter: str, curve: CostCurve, c: float) -> list[Machine]:
    """This machine, and the named ones, for one drafter; only a draft model costs what they say it does."""
    model = tables.is_model(drafter)
    named = [Machine.straight(n, at8, own * model, tables.k_max) for n, (at8, own) in NAMED.items()]
    return [Machine.measured(curve, c, tables.k_max), *named]


def best(tables: Tables, curve: CostCurve, c: dict[str, float], temperature: float = 0.0) -> pd.DataFrame:
    """The best fixed K for each machine, drafter and content, with its predicted speed-up; K = 0 is plain decoding.

    It is chosen on the prompts that it is judged by, so it flatters a little.
    """
    rows = []
    for at, drafter in product(range(1 + len(NAMED)), tables.drafters):
        machine = machines(tables, drafter, curve, c[drafter])[at]
        for content in (*tables.contents, ALL):
            speed = tables.sweep(Setting(drafter, temperature, content, FIXED, 1, machine))
            k = int(np.argmax(speed.value))
            told = {"speedup": speed.value[k], "low": speed.low[k], "high": speed.high[k]}
            rows.append({"machine": machine.name, "drafter": drafter, "content": content, "k": k, **told})
    return pd.DataFrame(rows)


def sweep(tables: Tables, drafter: str, machine: Machine, ks: Sequence[int], step_s: float) -> pd.DataFrame:
    """One drafter on one machine in the columns of `tables.k_sweep`; `step_s` is T(1) in seconds."""
    rows = []
    for temperature in tables.temperatures:
        for content in tables.contents:
            setting = Setting(drafter, temperature, content, FIXED, 1, machine)
            for k in (k for k in ks if k <= tables.k_max):
                p = tables.predict(setting._replace(k=k))
                told = {"speedup": p.speedup, "low": p.low, "high": p.high, "tokens_per_s": p.speedup / step_s}
                counts = {"accepted": round(p.accepted, 1), "drafted": round(p.drafted, 1), "tau": p.tau}
                rows.append({"category": content, "temperature": temperature, "k": k, **told, **counts})
    return pd.DataFrame(rows)
