"""Turn records into tidy tables: each function takes records or frames and returns a DataFrame."""

from itertools import pairwise

import numpy as np
import pandas as pd

from specnb.measure.baseline import Baseline
from specnb.measure.bench import TERMS, interval, pays, rate, rate_ratio, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.records import RunRecord

ALL = "all"
BUSY = "the machine was busy"
"""The verdict on times that were measured while other processes used some of the cores."""
GLANCE = (1, 2, 4, 8, 12, 24)
"""Values of K in the short table of a sweep."""
NOTHING = "–"


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table for display: two digits, a dash for a missing value, intervals next to their values.

    The ends of an interval are the columns low and high, or live_low and live_high; they move into
    the cell of the column before them.
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
    """Return speed-ups with their intervals: one row per temperature and category, one column per K."""
    rows = compact(sweep[sweep["k"].isin(GLANCE)]).rename(columns={"k": "K"})
    rows = rows.sort_values(["temperature", "K"], kind="stable")
    index = ["temperature", "category"]
    return rows.pivot_table("speedup", index, "K", aggfunc="first", sort=False).fillna(NOTHING)


def k_sweep(record: RunRecord) -> pd.DataFrame:
    """Return the live runs of a sweep: one row per category, temperature and K.

    K = 0 is plain decoding; the category `all` pools the others. Columns:

    - category, temperature, k, tokens_per_s, drafted, accepted, acceptance_rate, tau, n_prompts
    - rate_needed: the acceptance rate from which this K pays
    - speedup, low, high: decoding speed over the record's `baseline`, without prefill and the first
      token; the interval is over prompts, NaN for fewer than `bench.FEWEST`
    - speedup_same_engine: the same over plain decoding in the same engine
    - wall_speedup: with the prefill of target and drafter, over plain decoding in the same engine
    - identical: number of greedy runs with the tokens of plain decoding; None when sampling
    - lossless, busy
    """
    return _table(live_rows(record), record)


def live_rows(record: RunRecord) -> pd.DataFrame:
    """Return one row per generation, with the (last) plain one of its prompt and temperature."""
    plain_of = {(g.prompt_id, g.temperature): g for g in record.generations if not g.k}
    same = ["prompt_id", "category", "drafter", "temperature", "k", "tau", "n_decoded", "wall_s", "lossless", "loops"]
    columns = [
        "rounds",
        "drafted",
        "accepted",
        "seconds",
        "plain_decoded",
        "plain_s",
        "live_plain_s",
        "n_tokens",
        "plain_tokens",
        "plain_wall_s",
        "identical",
    ]
    rows = [
        (
            *(getattr(g, name) for name in same),
            len(g.rounds),
            g.total_draft_tokens,
            g.accepted_tokens,
            g.decode_s,
            plain.n_decoded,
            plain.decode_s,
            plain.decode_s,
            len(g.token_ids),
            len(plain.token_ids),
            plain.wall_s,
            g.token_ids == plain.token_ids,
        )
        for g in record.generations
        for plain in [plain_of[g.prompt_id, g.temperature]]
    ]
    return pd.DataFrame(rows, columns=same + columns)


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows followed by a copy of each with the category `all`."""
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
    """Return the fastest plain decoding that was measured; in older records, that of the same engine."""
    return Baseline.model_validate(record.measurements.get("baseline", {}))


def summarise_rows(rows: pd.DataFrame) -> dict:
    """Return the totals of rows with one K, and their speed-up with its interval over prompts."""
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
    """Return the speed-up of rows with one K, without prompts whose plain answer loops; NaN if all do."""
    loops = {(g.prompt_id, g.temperature) for g in record.generations if not g.k and g.loops}
    straight = rows[[key not in loops for key in zip(rows["prompt_id"], rows["temperature"], strict=True)]]
    return summarise_rows(straight)["speedup"] if len(straight) else np.nan


def busy(record: RunRecord) -> bool | None:
    """Return whether other processes disturbed the run or its cost curve; None if it was not recorded."""
    parts = record.provenance.get("extra", {}).get("contention"), record.measurements.get("verify_curve")
    return max((part["busy"] for part in parts if part and part["busy"] is not None), default=None)


def replay_rows(record: RunRecord, *, live: bool = False) -> pd.DataFrame:
    """Return one row per drafter, prompt, temperature and K of the replay.

    With `live`, only rows of the drafter that also ran live.
    """
    rows = pd.DataFrame(record.measurements["replay"]["rows"])
    rows["plain_decoded"] = rows["n_decoded"]
    return rows[rows["drafter"] == rows["drafter"][0]] if live else rows


def replayed(record: RunRecord, *, ran_live: bool = False) -> pd.DataFrame:
    """Return the replay of the drafter that also ran live, in the columns of `k_sweep`.

    With `ran_live`, only the prompts and K that ran live, too. Counts are expected values; intervals
    are over prompts. The speed-up is predicted from the measured costs; tokens_per_s is the live rate
    of plain decoding times the speed-up, because a step in a run takes longer than one that is timed
    in a loop. A run with a rule other than `token` has no replay: the live sweep is returned.
    """
    if "replay" not in record.measurements:
        return k_sweep(record)
    rows = replay_rows(record, live=True)
    if ran_live:
        rows = rows.merge(live_rows(record).query("k > 0")[["prompt_id", "temperature", "k"]])
    return _table(rows, record)


def replay_check(record: RunRecord) -> pd.DataFrame:
    """Compare live runs with their replay: tau and decoding speed by temperature and K, all prompts."""
    tables = k_sweep(record), replayed(record, ran_live=True)
    pooled = [table.query("category == @ALL and k > 0") for table in tables]
    both = pd.merge(*pooled, on=["temperature", "k"], suffixes=("", "_replayed"))
    both["tau_ratio"] = both["tau_replayed"] / both["tau"]
    both["speed_ratio"] = both["tokens_per_s_replayed"] / both["tokens_per_s"]
    return both[
        ["temperature", "k", "tau", "tau_replayed", "tau_ratio", "tokens_per_s", "tokens_per_s_replayed", "speed_ratio"]
    ]


def sweep_time(record: RunRecord) -> pd.DataFrame:
    """Return the seconds of the replayed sweep and of the same grid live, and their ratio."""
    times = pd.DataFrame([record.measurements["replay"]], columns=["replay_s", "live_s"])
    return times.assign(times_less=times["live_s"] / times["replay_s"])


def turns(record: RunRecord) -> pd.DataFrame:
    """Return acceptance rate and tau by turn of a conversation (greedy, the largest live K).

    The interval is over conversations.
    """
    rows = []
    for turn, group in pd.DataFrame(record.measurements["turns"]).groupby("turn"):
        sums = group.sum(numeric_only=True)
        counts = group[["accepted", "drafted"]]
        share = interval(counts, rate, log=False) if counts["drafted"].all() else (rate(counts), np.nan, np.nan)
        tau = (sums["n_decoded"] + len(group)) / sums["rounds"]
        tokens = group["prompt_tokens"].mean()
        rows.append((turn, len(group), tokens, sums["drafted"], sums["accepted"], *np.clip(share, 0, 1), tau))
    columns = ["turn", "conversations", "prompt_tokens", "drafted", "accepted", "acceptance_rate", "low", "high", "tau"]
    return pd.DataFrame(rows, columns=columns)


def rates(record: RunRecord) -> pd.DataFrame:
    """Return tokens per second of prefill and plain decoding: mean and standard deviation, as llama-bench."""
    return pd.DataFrame(record.measurements["plain_rates"]).drop(columns="samples")


def best_range(record: RunRecord) -> pd.DataFrame:
    """Return the best K per drafter, content and temperature, and the range of K that is not slower.

    K = 0, the fastest plain decoding, is one of the choices. A K is slower if the interval (over
    prompts) of its time relative to the best K lies above 1. Columns include:

    - longest: the longest draft that the drafter ever offered; a larger K changes nothing
    - verdict: `pays` if the speed-up's interval, widened for the choice among many K, lies above 1;
      `does not pay` if K = 0 is the best and every other K is slower; BUSY if other processes
      disturbed the run; otherwise `undecided`
    - without_loops: the speed-up over prompts whose answer does not loop
    """
    if "replay" not in record.measurements:  # another rule than token: only the live K
        return best_k(k_sweep(record)).assign(drafter=record.params["drafter"], range=NOTHING)
    rows = _pooled(replay_rows(record)).query("n_decoded > 0")
    fastest = baseline(record)
    table = []
    by = ["drafter", "category", "temperature"]
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
        table.append(
            dict(zip(by, key, strict=True))
            | {
                "k": best,
                "range": str(first) if first == last else f"{first}-{last}",
                "longest": longest,
                **{name: summary[name] for name in ("speedup", "low", "high", "tau", "n_prompts")},
                "without_loops": speed_without_loops(chosen, record) * fastest.share,
                "verdict": "does not pay" if best == 0 and len(apart) == len(ks) else "undecided",
            }
        )
    frame = fastest.over(widen(pd.DataFrame(table), max(TERMS)))
    frame.loc[(frame["k"] > 0) & (frame["low"] > 1), "verdict"] = "pays"
    return frame.assign(verdict=BUSY) if busy(record) else frame


def best_k(sweep: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest K > 0 per category and temperature (machine, drafter), and a verdict.

    verdict: `pays` if the whole interval is above 1, `does not pay` if it is below, BUSY where the
    sweep is marked so, otherwise `undecided`. K is selected on these prompts. The interval accounts
    for that; the point estimate is optimistic: confirm it on held-out prompts.
    """
    drafting = sweep.query("k > 0")
    by = [name for name in ("machine", "drafter", "category", "temperature") if name in sweep]
    at = drafting.groupby(by, sort=False)["speedup"].idxmax()
    best = widen(drafting.loc[at].reset_index(drop=True), max(TERMS))
    verdict = np.where(best["busy"].eq(True), BUSY, [*map(pays, best["low"], best["high"])])
    return best[[*by, "k", "speedup", "low", "high", "tau"]].assign(verdict=verdict)


def verify_cost(record: RunRecord) -> pd.DataFrame:
    """Return the measured verify cost curve: width, median_s, ratio T(n)/T(1), busy."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return pd.DataFrame(
        {
            "width": curve.widths,
            "median_s": curve.median_s,
            "ratio": [*map(curve.ratio, curve.widths)],
            "busy": curve.busy,
        }
    )


def side_by_side(record: RunRecord) -> pd.DataFrame:
    """Return the cost of verifying four drafts, by context length and number of sequences in a pass.

    Columns: context, sequences, plain_ms (one token per sequence), ratio (five tokens per sequence
    over one), rate_needed (the acceptance rate from which four drafts that cost nothing pay; above 1:
    never). The sequences are simulated by more tokens of one sequence: the same weights and products,
    but one KV cache.
    """
    rows = []
    for curve in map(CostCurve.model_validate, record.measurements["contexts"]):
        for n in curve.widths:
            if 5 * n in curve.widths:
                ratio = curve.seconds(5 * n) / curve.seconds(n)
                rows.append((curve.context, n, 1e3 * curve.seconds(n), ratio, (ratio - 1) / 4))
    return pd.DataFrame(rows, columns=["context", "sequences", "plain_ms", "ratio", "rate_needed"])


def time_split(record: RunRecord) -> pd.DataFrame:
    """Return the shares of decoding time by K: draft, verify, rewind, other; overhead is outside passes."""
    parts = ["draft", "verify", "rewind", "forward"]
    rows = [
        (g.k, g.decode_s, *(sum(getattr(r, f"{p}_s") for r in g.rounds) for p in parts)) for g in record.generations
    ]
    sums = pd.DataFrame(rows, columns=["k", "decode_s", *parts]).groupby("k").sum()
    shares = sums[parts].div(sums["decode_s"], axis=0)
    overhead = 1 - shares.pop("forward")
    return shares.assign(other=1 - shares.sum(axis=1), overhead=overhead).reset_index()


def checks(record: RunRecord) -> pd.DataFrame:
    """Check what holds on every machine: greedy runs match plain decoding, and the counts add up."""
    live = live_rows(record)
    greedy = live.query("k > 0 and temperature == 0")
    plain = live.query("k == 0")
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
    """Return the table of checks: check, of (number of cases), hold (number that pass), ok."""
    frame = pd.DataFrame(rows, columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])
