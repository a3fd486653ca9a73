"""Tables and figures of notebook 07: the drafters by content, live beside replayed, and where a cheaper copy pays."""

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.claims import MISSING, Estimate, fixed_values
from specnb.book.style import dots, dress, looks, readable, template
from specnb.book.tables import baseline, compact
from specnb.io import read_json
from specnb.measure.bench import interval, rate, rate_ratio, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.probe import machines
from specnb.medusa.checkpoint import LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.records import Generation, RunRecord

SHOWN = (1, 2, 4)
"""Positions of which a table shows the acceptance."""
REPEAT, LOOPING = 8, 0.3
"""Tokens in a row that make a repeat, and the share of them from which on an answer counts as looping."""
CHOICES = 6
"""Things that choosing among K's in a row is counted as, in an interval's width."""
JUDGED = ("jump", "self", "exit", "skip")
"""Drafters that claims are about."""


def rank_drafters(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """One row a drafter, the fastest first: all contents, or one.

    Columns: c; alpha_1, alpha_2, alpha_4 (the share kept of drafts that were tested there) and `tested`, drafts tested
    at the first; best_k and its range; tau; predicted, the speed-up at that K over plain decoding in the same engine,
    with low and high over prompts; without_loops, the same of answers that do not loop; live with live_low and
    live_high, `prompts` behind it and texts `identical` to plain decoding's; and over_fastest, live over the record's
    baseline.
    """
    rows = _replayed(record, temperature, category)
    looping = {g.prompt_id for g in _plain(record, temperature).values() if is_looping(g)}
    live, share = live_speeds(record, temperature, category), baseline(record).share
    kept, table = _kept(record, temperature, category), []
    for drafter, group in rows.groupby("drafter", sort=False):
        seconds = group.pivot(index="prompt_id", columns="k", values="seconds")
        best = seconds.sum().idxmin()
        near = [k for k in seconds if k == best or not interval(seconds[[k, best]], rate).low > 1]
        chosen = group[group["k"] == best]
        straight = chosen[~chosen["prompt_id"].isin(looping)]
        value, low, high = _over_plain(chosen)
        table.append({
            "drafter": drafter, "c": record.measurements["cs"][drafter],
            **{f"alpha_{n}": kept[drafter][n - 1] for n in SHOWN}, "tested": kept[drafter].tested,
            "best_k": best, "range": f"{min(near)}-{max(near)}", "tau": _tau(chosen),
            "predicted": value, "low": low, "high": high, "n_prompts": len(chosen), "speedup": value,
            "without_loops": _over_plain(straight)[0] if len(straight) else None,
        })  # fmt: skip
    frame = widen(pd.DataFrame(table), CHOICES).drop(columns=["n_prompts", "speedup"]).set_index("drafter")
    frame = frame.join(live, how="outer").assign(over_fastest=lambda rows: rows["live"] * share)
    return frame.rename(index=record.measurements["names"]).sort_values("predicted", ascending=False)


def show_ranks(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return `rank_drafters` to be read: intervals in the cells of their values; a `*` marks a c across engines."""
    frame = rank_drafters(record, temperature)
    across = {record.measurements["names"][name] for name in record.measurements["c_across_engines"]}
    live = frame.loc[:, "live":].rename(columns={"live_low": "low", "live_high": "high"})
    ranks = compact(frame.loc[:, :"without_loops"]).join(compact(live))
    return ranks.rename(index={name: f"{name}*" for name in across})


def live_speeds(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Live decoding speed over plain decoding beside it, with its interval over prompts, a row a drafter.

    Columns live, live_low, live_high, prompts, and identical: greedy texts equal to the plain one.
    """
    plain, pairs = _plain(record, temperature), {}
    for g in record.generations:
        if g.k and g.temperature == temperature and category in ("", g.category) and g.n_decoded:
            pairs.setdefault(g.drafter, []).append((g, plain[g.prompt_id]))
    rows = {
        drafter: (
            *interval([(g.n_decoded, g.decode_s, p.n_decoded, p.decode_s) for g, p in of], rate_ratio), len(of),
            None if temperature else sum(g.token_ids == p.token_ids for g, p in of),
        )
        for drafter, of in pairs.items()
    }  # fmt: skip
    columns = ["live", "live_low", "live_high", "prompts", "identical"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def is_looping(generation: Generation) -> bool:
    """Say whether an answer repeats itself: LOOPING of its runs of REPEAT tokens stood in it before."""
    ids = generation.token_ids
    runs = [ids[i : i + REPEAT] for i in range(len(ids) - REPEAT + 1)]
    return len(runs) > 0 and 1 - len(set(runs)) / len(runs) >= LOOPING


def count_loops(record: RunRecord) -> pd.DataFrame:
    """Answers by content and temperature, and how many of them loop."""
    rows = [
        {"category": g.category, "temperature": t, "answers": 1, "looping": is_looping(g)}
        for t in record.params["temperatures"] for g in _plain(record, t).values()
    ]  # fmt: skip
    return pd.DataFrame(rows).groupby(["category", "temperature"], sort=False).sum().reset_index()


def compare_contents(record: RunRecord, temperature: float) -> pd.DataFrame:
    """The predicted speed-up of every drafter on every content, at the K that is best for it there."""
    names = dict.fromkeys(row["category"] for row in record.measurements["replay"]["rows"])
    tables = {name: rank_drafters(record, temperature, name).reset_index() for name in names}
    frame = pd.concat(tables, names=["content"]).reset_index(level="content").reset_index(drop=True)
    return frame[["drafter", "content", "best_k", "predicted", "low", "high", "live", "prompts"]]


def list_trained() -> pd.DataFrame:
    """The shipped drafters: kind, megabytes, parameters, tokens of text and of training steps."""
    rows = []
    for name, folder in shipped().items():
        facts = read_json(folder / TRAINING_FILE)
        recipe, text = facts["recipe"], facts["text"]["tokens"]
        rows.append({
            "name": name, "kind": facts["heads"]["kind"], "mb": (folder / LAYOUTS[OWN].file).stat().st_size / 1e6,
            "parameters": facts["parameters"], "text_tokens": text["train"],
            "examples": recipe["steps"] * recipe["batch_size"],
        })  # fmt: skip
    return pd.DataFrame(rows)


# --- where a copy of the target pays as its drafter ---


def draw_region(record: RunRecord) -> go.Figure:
    """Acceptance from which on drafting pays, over what a draft costs, on each machine; marks are the drafters here."""
    here = Cost(CostCurve.model_validate(record.measurements["verify_curve"]))
    lines = pd.DataFrame(
        {"machine": cost.name, "c": c, "alpha": cost._replace(c=c).break_even()}
        for cost in machines(here).values()
        for c in np.linspace(0, 1, 51)
    )
    figure = px.line(
        lines, x="c", y="alpha", template=template(), title="From which acceptance on does a drafter pay?",
        **{name: value for name, value in looks("machine", lines["machine"].unique().tolist()).items()
           if not name.startswith("symbol")},
    )  # fmt: skip
    points = rank_drafters(record, min(record.params["temperatures"]))
    points = points.dropna(subset="c").assign(name=lambda rows: rows.index.map(readable)).round(2)
    marks = points.groupby(["c", "alpha_1"])["name"].agg(", ".join).reset_index()
    figure.add_scatter(x=marks["c"], y=marks["alpha_1"], mode="markers+text", text="  " + marks["name"],
                       textposition="middle right", name="drafters here",
                       marker={"color": "#222", "symbol": "x", "size": 9})  # fmt: skip
    return dress(figure, "break_even")


def draw_contents(frame: pd.DataFrame) -> go.Figure:
    """Predicted speed-up of each drafter by content (`compare_contents`); plain decoding in the same engine is 1."""
    named = frame.assign(drafter=frame["drafter"].map(readable))
    figure = dots(named, x="predicted", y="drafter", by="content", title="Speed-up by drafter and content, greedy")
    figure.add_vline(x=1.0, line={"color": "#222", "width": 1})
    return dress(figure, "drafters")


def league_values(record: RunRecord) -> dict[str, object]:
    """Return the named values that the claims of notebook 07 are judged by.

    Of JUDGED the predicted greedy speed-up over plain decoding in the same engine; of the copy also that over the
    baseline, c and alpha.
    """
    table = rank_drafters(record, min(record.params["temperatures"]))
    n, copy = len({row["prompt_id"] for row in record.measurements["replay"]["rows"]}), table.reindex(["self"]).iloc[0]
    judged = table.reindex(JUDGED).itertuples()
    values = {row.Index: Estimate(row.predicted, row.low, row.high, n) if row.c == row.c else MISSING for row in judged}
    share = baseline(record).share
    over_fastest = values["self"]._replace(
        **{end: share * getattr(values["self"], end) for end in ("value", "low", "high")}
    )
    return fixed_values() | values | {"copy_over_fastest": over_fastest, "c_copy": copy.c, "alpha_copy": copy.alpha_1}


# --- what the tables are made of ---


class _Kept(list[float]):
    """Shares kept by position, and `tested`, drafts at the first."""

    tested = 0


def _replayed(record: RunRecord, temperature: float, category: str) -> pd.DataFrame:
    rows = pd.DataFrame(record.measurements["replay"]["rows"]).query("temperature == @temperature and n_decoded > 0")
    return rows[rows["category"] == category] if category else rows


def _plain(record: RunRecord, temperature: float) -> dict[str, Generation]:
    """The plain generation of each prompt; of those that ran live the one beside the drafters'."""
    return {g.prompt_id: g for g in record.generations if not g.k and g.temperature == temperature}


def _over_plain(rows: pd.DataFrame) -> tuple[float, float, float]:
    return interval(rows[["n_decoded", "seconds", "n_decoded", "plain_s"]].to_numpy(), rate_ratio)


def _tau(rows: pd.DataFrame) -> float:
    return float((rows["tau"] * rows["rounds"]).sum() / rows["rounds"].sum())


def _kept(record: RunRecord, temperature: float, category: str) -> dict[str, _Kept]:
    frame = pd.DataFrame(record.measurements["alphas"]).query("temperature == @temperature")
    frame = frame[frame["category"] == category] if category else frame
    shares = {}
    for drafter, of in frame.groupby("drafter"):
        tested, kept = (np.sum(of[name].tolist(), axis=0) for name in ("tested", "kept"))
        shares[drafter] = _Kept(np.divide(kept, tested, out=np.full(len(kept), np.nan), where=tested > 0).tolist())
        shares[drafter].tested = int(tested[0])
    return shares
