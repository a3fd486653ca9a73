"""Records to tidy tables. Each function takes records or frames and returns a DataFrame; nothing is shown here."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from specnb.measure.bench import Interval, interval, rate, rate_ratio
from specnb.measure.cost import CostCurve
from specnb.measure.ksweep import baseline_of
from specnb.records import Generation, RunRecord

ALL = "all"
BUSY = "the machine was busy"
"""The verdict on times that were measured while other processes took part of the cores."""
GLANCE = (1, 2, 4, 8, 12, 24)
"""The K's of a sweep that one reads at a glance."""
NOTHING = "–"


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """A table to be read: two digits, a dash for nothing, an interval in the cell of the value before it."""
    shown = frame.convert_dtypes().round(2).astype(object).where(frame.notna(), NOTHING)
    if "low" not in frame:
        return shown
    name = frame.columns[frame.columns.get_loc("low") - 1]
    cells = [
        NOTHING if pd.isna(value) else f"{value:.2f}" + ("" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]")
        for value, low, high in frame[[name, "low", "high"]].itertuples(index=False)
    ]
    return shown.assign(**{name: cells}).drop(columns=["low", "high"])


def glance(sweep: pd.DataFrame) -> pd.DataFrame:
    """The speed-ups of a sweep with their intervals: a row for each temperature and category, a column for each K."""
    rows = compact(sweep[sweep["k"].isin(GLANCE)])
    order = rows[["temperature", "category"]].drop_duplicates().sort_values("temperature", kind="stable")
    wide = rows.pivot(index=["temperature", "category"], columns="k", values="speedup").fillna(NOTHING)
    return wide.reindex(pd.MultiIndex.from_frame(order)).rename_axis(columns="K")


def k_sweep(record: RunRecord) -> pd.DataFrame:
    """One row per category, temperature and K; K = 0 is the baseline, category `all` pools the categories.

    Columns: category, temperature, k, tokens_per_s, drafted, accepted, acceptance_rate, tau, speedup with low and
    high (decoding without prefill and its token, the first; an interval over prompts, paired with the baseline on the
    same prompt, none for fewer than `bench.FEWEST` prompts), wall_speedup (prefill included, the drafter's too),
    identical (greedy runs whose tokens equal the baseline's; None when sampling), lossless, n_prompts, busy.
    """
    rows = []
    for category in dict.fromkeys([*(g.category for g in record.generations), ALL]):
        of_category = [g for g in record.generations if category in (g.category, ALL)]
        for temperature, k in sorted({(g.temperature, g.k) for g in of_category}):
            group = [g for g in of_category if (g.temperature, g.k) == (temperature, k)]
            place = {"category": category, "temperature": temperature, "k": k}
            rows.append(place | _k_row(group, record.generations) | {"busy": busy(record)})
    return pd.DataFrame(rows)


def busy(record: RunRecord) -> bool | None:
    """Whether other processes disturbed the run or its cost curve; None where the record does not say."""
    seen = record.provenance.get("extra", {}).get("contention"), record.measurements.get("verify_curve")
    answers = {part.get("busy") for part in seen if part} - {None}
    return any(answers) if answers else None


def _k_row(group: list[Generation], generations: Sequence[Generation]) -> dict:
    pairs = [(g, baseline_of(generations, g)) for g in group]
    whole = [(len(g.token_ids), g.wall_s, len(b.token_ids), b.wall_s) for g, b in pairs]
    speedup = decode_speedup(group, generations)
    drafted, accepted = sum(g.total_draft_tokens for g in group), sum(g.accepted_tokens for g in group)
    return {
        "tokens_per_s": rate(np.array([(g.n_decoded, g.decode_s) for g in group])),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": sum(len(g.token_ids) for g in group) / sum(len(g.rounds) for g in group),
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "wall_speedup": rate_ratio(np.array(whole)),
        "identical": None if group[0].temperature else sum(g.token_ids == b.token_ids for g, b in pairs),
        "lossless": all(g.lossless for g in group),
        "n_prompts": len(group),
    }


def decode_speedup(drafted: Sequence[Generation], generations: Sequence[Generation]) -> Interval:
    """Speed-up without prefill of `drafted` over their own baselines, which are among `generations`."""
    pairs = [(g, baseline_of(generations, g)) for g in drafted]
    return interval([(g.n_decoded, g.decode_s, b.n_decoded, b.decode_s) for g, b in pairs], rate_ratio)


def replay_rows(record: RunRecord) -> pd.DataFrame:
    """The replay: a row a drafter, prompt, temperature and K, category `all` for every prompt once more."""
    rows = pd.DataFrame(record.measurements["replay"]["rows"])
    if "drafter" not in rows:  # of a record from before several were replayed
        rows["drafter"] = record.params["drafter"]
    order = pd.CategoricalDtype([*rows["category"].unique(), ALL])
    return pd.concat([rows, rows.assign(category=ALL)]).astype({"category": order})


def replayed(record: RunRecord) -> pd.DataFrame:
    """One row per category, temperature and K of the replay, in the columns of `k_sweep`; `all` pools the contents.

    Of several drafters the one that also ran live.

    Counts are expected values; intervals are over prompts. The speed-up is predicted from the measured costs, and
    tokens_per_s from it and the live rate of plain decoding: a step takes longer in a run than one measured hot. A
    run with another rule than `token` holds no replay: then the live sweep.
    """
    if "replay" not in record.measurements:
        return k_sweep(record)
    rows = replay_rows(record)
    rows = rows[rows["drafter"] == rows["drafter"].iloc[0]]
    groups = rows.groupby(["category", "temperature", "k"], observed=True)
    return pd.DataFrame([_replayed_row(key, group) for key, group in groups]).assign(busy=busy(record))


def _replayed_row(key: tuple[str, float, int], group: pd.DataFrame) -> dict:
    decoding = group[group["n_decoded"] > 0]  # an answer of one token is all prefill
    times = decoding[["n_decoded", "seconds", "n_decoded", "plain_s"]].to_numpy(dtype=float)
    speedup, sums = interval(times, rate_ratio), group[["drafted", "accepted", "rounds"]].sum()
    return {
        **dict(zip(("category", "temperature", "k"), key, strict=True)),
        "tokens_per_s": speedup.value * group["n_decoded"].sum() / group["live_plain_s"].sum(),
        "drafted": float(sums["drafted"]),
        "accepted": float(sums["accepted"]),
        "acceptance_rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
        "tau": (group["tau"] * group["rounds"]).sum() / sums["rounds"],
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "n_prompts": len(group),
    }


def replay_check(record: RunRecord) -> pd.DataFrame:
    """Live against replayed, for each K that ran live: tau and decoding speed, by temperature, over all prompts."""
    ran = {(g.prompt_id, g.temperature) for g in record.generations if g.k}
    rows = [row for row in record.measurements["replay"]["rows"] if (row["prompt_id"], row["temperature"]) in ran]
    same = record.model_copy(update={"measurements": record.measurements | {"replay": {"rows": rows}}})
    live, replay = (table[(table["category"] == ALL) & (table["k"] > 0)] for table in (k_sweep(same), replayed(same)))
    both = live.merge(replay, on=["temperature", "k"], suffixes=("", "_replayed"))
    both = both.assign(
        tau_ratio=both["tau_replayed"] / both["tau"],
        speed_ratio=both["tokens_per_s_replayed"] / both["tokens_per_s"],
    )
    columns = ["tau", "tau_replayed", "tau_ratio", "tokens_per_s", "tokens_per_s_replayed", "speed_ratio"]
    return both[["temperature", "k", *columns]]


def sweep_time(record: RunRecord) -> pd.DataFrame:
    """Seconds of the replayed sweep and of the same grid live, and how many times less the replay takes."""
    times = pd.DataFrame([record.measurements["replay"]])[["replay_s", "live_s"]]
    return times.assign(times_less=times["live_s"] / times["replay_s"])


def turns(record: RunRecord) -> pd.DataFrame:
    """Acceptance, with its interval over conversations, and tau by turn (greedy, the largest live K)."""
    by_turn = pd.DataFrame(record.measurements["turns"]).groupby("turn")
    sums = by_turn[["drafted", "accepted", "rounds", "n_decoded"]].sum()
    table = pd.DataFrame({"conversations": by_turn.size(), "prompt_tokens": by_turn["prompt_tokens"].mean()})
    table = table.join(sums[["drafted", "accepted"]])
    share = sums["accepted"] / sums["drafted"].where(sums["drafted"] > 0)
    tau = (sums["n_decoded"] + table["conversations"]) / sums["rounds"]
    ends = [
        interval(group[["accepted", "drafted"]], rate, log=False)[1:] if group["drafted"].all() else (np.nan, np.nan)
        for _, group in by_turn
    ]
    low, high = np.clip(np.transpose(ends), 0, 1)
    return table.assign(acceptance_rate=share, low=low, high=high, tau=tau).reset_index()


def rates(record: RunRecord) -> pd.DataFrame:
    """Tokens a second of prefill and of plain decoding, mean and standard deviation over repeats, as llama-bench's."""
    return pd.DataFrame(record.measurements["plain_rates"]).drop(columns="samples")


def best_range(record: RunRecord) -> pd.DataFrame:
    """The best K of each drafter, content and temperature, and the range around it that cannot be told apart.

    K = 0, plain decoding, is among the choices. A K is told apart where the interval over prompts of its time over the
    best one's lies above 1. `longest` is the longest draft that was ever on offer: a larger K changes nothing.
    verdict: `pays` when plain decoding is told apart, `does not pay` when it is the best and every other is, else
    `undecided`; BUSY for a record that was made beside busy processes.
    """
    if "replay" not in record.measurements:  # another rule than token: the K's that ran live are all there is
        return best_k(k_sweep(record)).assign(drafter=record.params["drafter"], range=NOTHING)
    rows = replay_rows(record).query("n_decoded > 0")
    table = []
    for key, group in rows.groupby(["drafter", "category", "temperature"], sort=False, observed=True):
        seconds = group.pivot(index="prompt_id", columns="k", values="seconds")
        ks = list(seconds)
        changed = [ks[0], *(k for before, k in pairwise(ks) if (seconds[k] != seconds[before]).any())]
        prompts = group.groupby("prompt_id").first()  # in the order of `seconds`
        seconds.insert(0, 0, prompts["plain_s"])
        best = seconds.sum().idxmin()
        apart = [k for k in seconds if k != best and interval(seconds[[k, best]], rate).low > 1]
        first = max((k + 1 for k in apart if k < best), default=0)
        last = min([changed[-1], *(k - 1 for k in apart if k > best)])
        tokens = prompts["n_decoded"]
        speedup = interval(np.column_stack([tokens, seconds[best], tokens, seconds[0]]), rate_ratio)
        rounds = group.loc[group["k"] == best, "rounds"].sum()
        row = dict(zip(("drafter", "category", "temperature"), key, strict=True)) | {
            "k": best, "range": str(first) if first == last else f"{first}-{last}", "longest": changed[-1],
            "speedup": speedup.value, "low": speedup.low, "high": speedup.high,
            "tau": (tokens.sum() + len(tokens)) / rounds if best else 1.0,
            "verdict": "pays" if 0 in apart else "does not pay" if best == 0 and len(apart) == len(ks) else "undecided",
        }  # fmt: skip
        table.append(row)
    frame = pd.DataFrame(table)
    return frame.assign(verdict=BUSY) if busy(record) else frame


def verdict(best: pd.DataFrame) -> str:
    """What `best_range` comes to for the lowest temperature, in words."""
    if (best["verdict"] == BUSY).any():
        return f"{BUSY} while this was measured, so there is no verdict: end the other processes and run it again"
    greedy = best[best["temperature"] == best["temperature"].min()]
    lines = [
        f"{r.drafter}, {r.category}: K = {r.k} (of {r.range}), {r.speedup:.2f} ({r.low:.2f} to {r.high:.2f})"
        for r in greedy[greedy["verdict"] == "pays"].itertuples()
    ]
    if lines:
        return "speculation pays: " + "; ".join(lines)
    if (greedy["verdict"] == "undecided").any():
        return "undecided: these prompts cannot tell whether speculation pays; give more of them"
    return "speculation does not pay here: plain decoding is fastest with every drafter, for every content"


def best_k(sweep: pd.DataFrame) -> pd.DataFrame:
    """The fastest K > 0 of each category and temperature (machine, drafter), and whether it beats plain decoding.

    verdict: `pays` when the whole interval is above 1, `does not pay` when it is below, else `undecided`; BUSY where
    the sweep is marked so. The K was chosen on the same prompts: its speed-up flatters a little, confirm it on others.
    """
    drafting = sweep[sweep["k"] > 0]
    by = [name for name in ("machine", "drafter", "category", "temperature") if name in sweep]
    at = drafting.groupby(by, sort=False)["speedup"].idxmax()
    best = drafting.loc[at].reset_index(drop=True)
    marked = best.get("busy", pd.Series(index=best.index)).eq(True)
    cases = {BUSY: marked, "pays": best["low"] > 1, "does not pay": best["high"] < 1}
    verdict = np.select(list(cases.values()), list(cases), "undecided")
    return best[[*by, "k", "speedup", "low", "high", "tau"]].assign(verdict=verdict)


def verify_cost(record: RunRecord) -> pd.DataFrame:
    """The measured verify cost curve: width, median_s, ratio to width 1, busy."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return pd.DataFrame(
        {"width": curve.widths, "median_s": curve.median_s, "ratio": [curve.ratio(n) for n in curve.widths]}
    ).assign(busy=curve.busy)


def time_split(record: RunRecord) -> pd.DataFrame:
    """Share of decoding time spent drafting, verifying, rewinding and otherwise, and outside forwards, by K."""
    names = ["draft_s", "verify_s", "rewind_s", "forward_s"]
    rows = [(g.k, g.decode_s, *(sum(getattr(r, n) for r in g.rounds) for n in names)) for g in record.generations]
    sums = pd.DataFrame(rows, columns=["k", "decode_s", *names]).groupby("k").sum()
    shares = sums[names].div(sums["decode_s"], axis=0).rename(columns=lambda name: name.removesuffix("_s"))
    other, overhead = 1 - shares[["draft", "verify", "rewind"]].sum(axis=1), 1 - shares.pop("forward")
    return shares.assign(other=other, overhead=overhead).reset_index()


def checks(record: RunRecord) -> pd.DataFrame:
    """What must hold on every machine: greedy runs equal the baseline or fork at a near-tie; the counts add up."""
    generations = record.generations
    greedy, plain = [g for g in generations if g.k and not g.temperature], [g for g in generations if g.k == 0]
    same = [g for g in greedy if g.token_ids == baseline_of(generations, g).token_ids]
    forks = sum(fork["near_tie"] for fork in record.measurements["forks"])
    sound = all(len(r.committed_ids) - 1 <= r.n_accepted <= r.k for g in generations for r in g.rounds)
    rows = [
        ("greedy runs equal to the baseline, or forked at a near-tie", len(greedy), len(same) + forks),
        ("runs of which every round commits at most n_accepted + 1 tokens", len(generations), len(generations) * sound),
        ("baselines with tau = 1", len(plain), sum(g.tau == 1 for g in plain)),
    ]
    if "replay" in record.measurements:
        swept = record.measurements["replay"]["rows"]
        first = [r for r in swept if not r["temperature"] and r.get("drafter") == swept[0].get("drafter")]
        replay = {(r["prompt_id"], r["k"]): r for r in first}
        counts = [(len(g.rounds), g.total_draft_tokens, g.accepted_tokens) for g in same]
        replays = [tuple(replay[g.prompt_id, g.k][n] for n in ("rounds", "drafted", "accepted")) for g in same]
        equal = sum(live == replayed for live, replayed in zip(counts, replays, strict=True))
        rows.append(("greedy replays that make the rounds of their live run", len(same), equal))
    frame = pd.DataFrame(rows, columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])
