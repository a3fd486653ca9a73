"""Records to tidy tables. Each function takes records or frames and returns a DataFrame; nothing is shown here."""

from itertools import pairwise

import numpy as np
import pandas as pd

from specnb.measure.baseline import Baseline
from specnb.measure.bench import TERMS, interval, pays, rate, rate_ratio, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.records import RunRecord

ALL = "all"
BUSY = "the machine was busy"
"""The verdict on times that were measured while other processes took part of the cores."""
GLANCE = (1, 2, 4, 8, 12, 24)
"""The K's of a sweep that one reads at a glance."""
NOTHING = "–"


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """A table to be read: two digits, a dash for nothing, an interval in the cell of the value before it.

    The ends of an interval are the columns low and high, or live_low and live_high.
    """
    shown = frame.convert_dtypes().round(2).astype(object).where(frame.notna(), NOTHING)
    for name, below in pairwise(frame.columns):
        if below == "low" or below.endswith("_low"):
            above = below.removesuffix("low") + "high"
            shown[name] = [
                NOTHING if pd.isna(value) else f"{value:.2f}" + ("" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]")
                for value, low, high in frame[[name, below, above]].itertuples(index=False)
            ]
            shown = shown.drop(columns=[below, above])
    return shown


def glance(sweep: pd.DataFrame) -> pd.DataFrame:
    """The speed-ups of a sweep with their intervals: a row for each temperature and category, a column for each K."""
    rows = compact(sweep[sweep["k"].isin(GLANCE)]).rename(columns={"k": "K"})
    rows = rows.sort_values(["temperature", "K"], kind="stable")
    index = ["temperature", "category"]
    return rows.pivot_table("speedup", index, "K", aggfunc="first", sort=False).fillna(NOTHING)


def k_sweep(record: RunRecord) -> pd.DataFrame:
    """One row per category, temperature and K; K = 0 is the baseline, category `all` pools the categories.

    Columns: category, temperature, k, tokens_per_s, drafted, accepted, acceptance_rate, rate_needed (for this K to
    pay), tau, speedup with low and high (decoding without prefill and its token, the first; over the record's
    `baseline`; an interval over prompts, none for fewer than `bench.FEWEST`), wall_speedup (prefill included, the
    drafter's too; over plain decoding in the same engine), identical (greedy runs whose tokens equal the plain ones;
    None when sampling), lossless, n_prompts, busy, speedup_same_engine.
    """
    return _table(live_rows(record), record)


def live_rows(record: RunRecord) -> pd.DataFrame:
    """Every generation as a row, beside the plain one of its prompt and temperature, of several the last."""
    plain_of = {(g.prompt_id, g.temperature): g for g in record.generations if not g.k}
    same = ["prompt_id", "category", "drafter", "temperature", "k", "tau", "n_decoded", "wall_s", "lossless", "loops"]
    columns = ["rounds", "drafted", "accepted", "seconds", "plain_decoded", "plain_s", "live_plain_s", "n_tokens",
               "plain_tokens", "plain_wall_s", "identical"]  # fmt: skip
    rows = [(
        *(getattr(g, name) for name in same), len(g.rounds), g.total_draft_tokens, g.accepted_tokens, g.decode_s,
        plain.n_decoded, plain.decode_s, plain.decode_s, len(g.token_ids), len(plain.token_ids), plain.wall_s,
        g.token_ids == plain.token_ids,
    ) for g in record.generations for plain in [plain_of[g.prompt_id, g.temperature]]]  # fmt: skip
    return pd.DataFrame(rows, columns=same + columns)


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, and every one once more with the category `all`, which comes last."""
    order = pd.CategoricalDtype([*rows["category"].unique(), ALL])
    return pd.concat([rows, rows.assign(category=ALL)]).astype({"category": order})


def _table(rows: pd.DataFrame, record: RunRecord) -> pd.DataFrame:
    by = ["category", "temperature", "k"]
    groups = _pooled(rows).groupby(by, observed=True)
    table = [dict(zip(by, key, strict=True)) | summarise_rows(group) for key, group in groups]
    frame = pd.DataFrame(table).assign(busy=busy(record))
    if curve := record.measurements.get("verify_curve"):
        cost = Cost(CostCurve.model_validate(curve), record.measurements["c"])
        needed = [cost.rate_needed(k, baseline(record).share) if k else None for k in frame["k"]]
        frame.insert(frame.columns.get_loc("acceptance_rate") + 1, "rate_needed", needed)
    return baseline(record).over(frame)


def baseline(record: RunRecord) -> Baseline:
    """The fastest plain decoding, which speed-ups of the record are over; for an older record the engine's own."""
    return Baseline.model_validate(record.measurements.get("baseline", {}))


def summarise_rows(rows: pd.DataFrame) -> dict:
    """What rows of one K come to, with the interval over prompts of their speed-up."""
    decoding = rows[rows["n_decoded"] > 0]  # an answer of one token is all prefill
    value, low, high = interval(decoding[["n_decoded", "seconds", "plain_decoded", "plain_s"]], rate_ratio)
    sums = rows[["drafted", "accepted"]].sum()
    summary = {
        "tokens_per_s": value * decoding["plain_decoded"].sum() / decoding["live_plain_s"].sum(),
        **sums,
        "acceptance_rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
        "tau": (rows["tau"] * rows["rounds"]).sum() / rows["rounds"].sum(),
        "speedup": value,
        "low": low,
        "high": high,
    }
    if "wall_s" in rows:
        summary |= {
            "wall_speedup": rate_ratio(rows[["n_tokens", "wall_s", "plain_tokens", "plain_wall_s"]]),
            "identical": None if rows["temperature"].any() else rows["identical"].sum(),
            "lossless": rows["lossless"].all(),
        }
    return summary | {"n_prompts": len(rows)}


def speed_without_loops(rows: pd.DataFrame, record: RunRecord) -> float:
    """The speed-up of rows of one K over the prompts whose plain answer does not repeat itself; NaN where all do."""
    loops = {(g.prompt_id, g.temperature) for g in record.generations if not g.k and g.loops}
    straight = rows[[key not in loops for key in zip(rows["prompt_id"], rows["temperature"], strict=True)]]
    return summarise_rows(straight)["speedup"] if len(straight) else np.nan


def busy(record: RunRecord) -> bool | None:
    """Whether other processes disturbed the run or its cost curve; None where the record does not say."""
    parts = record.provenance.get("extra", {}).get("contention"), record.measurements.get("verify_curve")
    return max((part["busy"] for part in parts if part and part["busy"] is not None), default=None)


def replay_rows(record: RunRecord, *, live: bool = False) -> pd.DataFrame:
    """The replay: a row a drafter, prompt, temperature and K; with `live` those of the drafter that also ran live."""
    rows = pd.DataFrame(record.measurements["replay"]["rows"])
    rows["plain_decoded"] = rows["n_decoded"]
    return rows[rows["drafter"] == rows["drafter"][0]] if live else rows


def replayed(record: RunRecord, *, ran_live: bool = False) -> pd.DataFrame:
    """One row per category, temperature and K of the replay, in the columns of `k_sweep`; `all` pools the contents.

    Of several drafters the one that also ran live; with `ran_live` of the prompts and K's that did, too.

    Counts are expected values; intervals are over prompts. The speed-up is predicted from the measured costs, and
    tokens_per_s from it and the live rate of plain decoding: a step takes longer in a run than one measured hot. A
    run with another rule than `token` holds no replay: then the live sweep.
    """
    if "replay" not in record.measurements:
        return k_sweep(record)
    rows = replay_rows(record, live=True)
    if ran_live:
        rows = rows.merge(live_rows(record).query("k > 0")[["prompt_id", "temperature", "k"]])
    return _table(rows, record)


def replay_check(record: RunRecord) -> pd.DataFrame:
    """Live against replayed, for each K that ran live: tau and decoding speed, by temperature, over all prompts."""
    tables = k_sweep(record), replayed(record, ran_live=True)
    pooled = [table.query("category == @ALL and k > 0") for table in tables]
    both = pd.merge(*pooled, on=["temperature", "k"], suffixes=("", "_replayed"))
    both["tau_ratio"] = both["tau_replayed"] / both["tau"]
    both["speed_ratio"] = both["tokens_per_s_replayed"] / both["tokens_per_s"]
    return both[[
        "temperature", "k", "tau", "tau_replayed", "tau_ratio", "tokens_per_s", "tokens_per_s_replayed", "speed_ratio"
    ]]  # fmt: skip


def sweep_time(record: RunRecord) -> pd.DataFrame:
    """Seconds of the replayed sweep and of the same grid live, and how many times less the replay takes."""
    times = pd.DataFrame([record.measurements["replay"]], columns=["replay_s", "live_s"])
    return times.assign(times_less=times["live_s"] / times["replay_s"])


def turns(record: RunRecord) -> pd.DataFrame:
    """Acceptance, with its interval over conversations, and tau by turn (greedy, the largest live K)."""
    rows = []
    for turn, group in pd.DataFrame(record.measurements["turns"]).groupby("turn"):
        sums, counts = group.sum(numeric_only=True), group[["accepted", "drafted"]]
        share = interval(counts, rate, log=False) if counts["drafted"].all() else (rate(counts), np.nan, np.nan)
        tau = (sums["n_decoded"] + len(group)) / sums["rounds"]
        tokens = group["prompt_tokens"].mean()
        rows.append((turn, len(group), tokens, sums["drafted"], sums["accepted"], *np.clip(share, 0, 1), tau))
    columns = ["turn", "conversations", "prompt_tokens", "drafted", "accepted", "acceptance_rate", "low", "high", "tau"]
    return pd.DataFrame(rows, columns=columns)


def rates(record: RunRecord) -> pd.DataFrame:
    """Tokens a second of prefill and of plain decoding, mean and standard deviation over repeats, as llama-bench's."""
    return pd.DataFrame(record.measurements["plain_rates"]).drop(columns="samples")


def best_range(record: RunRecord) -> pd.DataFrame:
    """The best K of each drafter, content and temperature, and the range around it that cannot be told apart.

    K = 0, the fastest plain decoding, is among the choices. A K is told apart where the interval over prompts of its
    time over the best one's lies above 1. `longest` is the longest draft that was ever on offer: a larger K changes
    nothing. verdict: `pays` when the interval, as wide as choosing among many K's asks, lies above 1, `does not pay`
    when K = 0 is the best and every other is told apart, else `undecided`; without_loops: the speed-up over prompts
    whose answer does not repeat itself; BUSY for a record that was made beside busy
    processes.
    """
    if "replay" not in record.measurements:  # another rule than token: the K's that ran live are all there is
        return best_k(k_sweep(record)).assign(drafter=record.params["drafter"], range=NOTHING)
    rows, fastest = _pooled(replay_rows(record)).query("n_decoded > 0"), baseline(record)
    table, by = [], ["drafter", "category", "temperature"]
    for key, group in rows.groupby(by, sort=False, observed=True):
        plain = group.drop_duplicates("prompt_id")
        plain = plain.assign(k=0, seconds=plain["plain_s"] * fastest.share, drafted=0, tau=1.0)
        choices = pd.concat([plain, group])
        seconds = choices.pivot(index="prompt_id", columns="k", values="seconds")
        ks = list(seconds)[1:]
        longest = max((k for before, k in pairwise(ks) if (seconds[k] != seconds[before]).any()), default=ks[0])
        best = seconds.sum().idxmin()
        apart = [k for k in seconds if k != best and interval(seconds[[k, best]], rate).low > 1]
        first = max((k + 1 for k in apart if k < best), default=0)
        last = min([longest, *(k - 1 for k in apart if k > best)])
        chosen = choices.query("k == @best")
        summary = summarise_rows(chosen)
        table.append(dict(zip(by, key, strict=True)) | {
            "k": best, "range": str(first) if first == last else f"{first}-{last}", "longest": longest,
            **{name: summary[name] for name in ("speedup", "low", "high", "tau", "n_prompts")},
            "without_loops": speed_without_loops(chosen, record) * fastest.share,
            "verdict": "does not pay" if best == 0 and len(apart) == len(ks) else "undecided",
        })  # fmt: skip
    frame = fastest.over(widen(pd.DataFrame(table), max(TERMS)))
    frame.loc[(frame["k"] > 0) & (frame["low"] > 1), "verdict"] = "pays"
    return frame.assign(verdict=BUSY) if busy(record) else frame


def best_k(sweep: pd.DataFrame) -> pd.DataFrame:
    """The fastest K > 0 of each category and temperature (machine, drafter), and whether it beats plain decoding.

    verdict: `pays` when the whole interval is above 1, `does not pay` when it is below, else `undecided`; BUSY where
    the sweep is marked so. The K was chosen on the same prompts, which its interval allows for; the speed-up flatters
    a little, confirm it on others.
    """
    drafting = sweep.query("k > 0")
    by = [name for name in ("machine", "drafter", "category", "temperature") if name in sweep]
    at = drafting.groupby(by, sort=False)["speedup"].idxmax()
    best = widen(drafting.loc[at].reset_index(drop=True), max(TERMS))
    verdict = np.where(best["busy"].eq(True), BUSY, [*map(pays, best["low"], best["high"])])
    return best[[*by, "k", "speedup", "low", "high", "tau"]].assign(verdict=verdict)


def verify_cost(record: RunRecord) -> pd.DataFrame:
    """The measured verify cost curve: width, median_s, ratio to width 1, busy."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return pd.DataFrame({
        "width": curve.widths, "median_s": curve.median_s, "ratio": [*map(curve.ratio, curve.widths)],
        "busy": curve.busy,
    })  # fmt: skip


def side_by_side(record: RunRecord) -> pd.DataFrame:
    """Return the cost of four drafts after each context, and for several sequences in one forward: a row for each.

    Columns: context, sequences, plain_ms (one token of each), ratio (five of each over one), rate_needed (the accepted
    share from which on four drafts that cost nothing pay; above 1 for never). Sequences are columns of one: the same
    weights and products, but one past.
    """
    rows = []
    for curve in map(CostCurve.model_validate, record.measurements["contexts"]):
        for n in curve.widths:
            if 5 * n in curve.widths:
                ratio = curve.seconds(5 * n) / curve.seconds(n)
                rows.append((curve.context, n, 1e3 * curve.seconds(n), ratio, (ratio - 1) / 4))
    return pd.DataFrame(rows, columns=["context", "sequences", "plain_ms", "ratio", "rate_needed"])


def time_split(record: RunRecord) -> pd.DataFrame:
    """Share of decoding time spent drafting, verifying, rewinding and otherwise, and outside forwards, by K."""
    parts = ["draft", "verify", "rewind", "forward"]
    rows = [
        (g.k, g.decode_s, *(sum(getattr(r, f"{p}_s") for r in g.rounds) for p in parts)) for g in record.generations
    ]
    sums = pd.DataFrame(rows, columns=["k", "decode_s", *parts]).groupby("k").sum()
    shares = sums[parts].div(sums["decode_s"], axis=0)
    overhead = 1 - shares.pop("forward")
    return shares.assign(other=1 - shares.sum(axis=1), overhead=overhead).reset_index()


def checks(record: RunRecord) -> pd.DataFrame:
    """What must hold on every machine: greedy runs equal the baseline or fork at a near-tie; the counts add up."""
    live = live_rows(record)
    greedy, plain = live.query("k > 0 and temperature == 0"), live.query("k == 0")
    same = greedy.query("identical")
    forks = sum(fork["near_tie"] for fork in record.measurements["forks"])
    sound = all(len(r.committed_ids) - 1 <= r.n_accepted <= r.k for g in record.generations for r in g.rounds)
    rows = [
        ("greedy runs equal to the baseline, or forked at a near-tie", len(greedy), len(same) + forks),
        ("runs of which every round commits at most n_accepted + 1 tokens", len(live), len(live) * sound),
        ("baselines with tau = 1", len(plain), (plain["tau"] == 1).sum()),
    ]
    if "replay" in record.measurements:
        replay = replay_rows(record, live=True).query("temperature == 0")
        equal = same.merge(replay, on=["prompt_id", "k", "rounds", "drafted", "accepted"])
        rows.append(("greedy replays that make the rounds of their live run", len(same), len(equal)))
    return check_table(rows)


def check_table(rows: list[tuple[str, int, int]]) -> pd.DataFrame:
    """The table of checks: what is checked, of how many, and how many hold."""
    frame = pd.DataFrame(rows, columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])
