"""Records to tidy tables. Each function takes records or frames and returns a DataFrame; nothing is shown here."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specnb.measure.bench import Interval, bootstrap, rate, rate_ratio
from specnb.measure.cost import CostCurve
from specnb.measure.ksweep import baseline_of
from specnb.records import Generation, RunRecord

ALL = "all"


def k_sweep(record: RunRecord) -> pd.DataFrame:
    """One row per category, temperature and K; K = 0 is the baseline, category `all` pools the categories.

    Columns: category, temperature, k, tokens_per_s, drafted, accepted, acceptance_rate, tau, speedup with low and
    high (decoding without prefill and its token, the first; bootstrap over prompts, paired with the baseline on the
    same prompt, none for fewer than `bench.FEWEST` prompts), wall_speedup (prefill included, the drafter's too),
    identical (greedy runs whose tokens equal the baseline's; None when sampling), lossless, n_prompts.
    """
    groups: dict[tuple[str, float, int], list[Generation]] = {}
    for g in record.generations:
        for category in (g.category, ALL):
            groups.setdefault((category, g.temperature, g.k), []).append(g)
    order = list(dict.fromkeys([*(g.category for g in record.generations), ALL]))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1], key[2]))
    return pd.DataFrame([_k_row(key, groups[key], record.generations) for key in keys])


def _k_row(key: tuple[str, float, int], group: list[Generation], generations: Sequence[Generation]) -> dict:
    category, temperature, k = key
    bases = [baseline_of(generations, g) for g in group]
    speedup = decode_speedup(group, generations)
    whole = [(len(g.token_ids), g.wall_s, len(b.token_ids), b.wall_s) for g, b in zip(group, bases, strict=True)]
    drafted, accepted = (sum(getattr(g, n) for g in group) for n in ("total_draft_tokens", "accepted_tokens"))
    identical = sum(g.token_ids == b.token_ids for g, b in zip(group, bases, strict=True))
    return {
        "category": category,
        "temperature": temperature,
        "k": k,
        "tokens_per_s": rate(np.array([(g.n_decoded, g.decode_s) for g in group])),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": sum(len(g.token_ids) for g in group) / sum(len(g.rounds) for g in group),
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "wall_speedup": rate_ratio(np.asarray(whole, dtype=float)),
        "identical": None if temperature else identical,
        "lossless": all(g.lossless for g in group),
        "n_prompts": len(group),
    }


def decode_speedup(drafted: Sequence[Generation], generations: Sequence[Generation]) -> Interval:
    """Speed-up without prefill of `drafted` over their own baselines, which are among `generations`."""
    pairs = [(g, baseline_of(generations, g)) for g in drafted]
    return bootstrap([(g.n_decoded, g.decode_s, b.n_decoded, b.decode_s) for g, b in pairs], rate_ratio)


def replayed(record: RunRecord) -> pd.DataFrame:
    """One row per category, temperature and K of the replay, in the columns of `k_sweep`; `all` pools the contents.

    Counts are expected values; intervals are over prompts. The speed-up is predicted from the measured costs, and
    tokens_per_s from it and the live rate of plain decoding: a step takes longer in a run than one measured hot. A
    run with another rule than `token` holds no replay: then the live sweep.
    """
    if "replay" not in record.measurements:
        return k_sweep(record)
    rows = pd.DataFrame(record.measurements["replay"]["rows"])
    order = pd.CategoricalDtype([*rows["category"].unique(), ALL])
    rows = pd.concat([rows, rows.assign(category=ALL)]).astype({"category": order})
    groups = rows.groupby(["category", "temperature", "k"], observed=True)
    return pd.DataFrame([_replayed_row(key, group) for key, group in groups])


def _replayed_row(key: tuple[str, float, int], group: pd.DataFrame) -> dict:
    times = group[["n_decoded", "seconds", "n_decoded", "plain_s"]].to_numpy(dtype=float)
    times = times[times[:, 0] > 0]  # an answer of one token is all prefill
    speedup = bootstrap(times, rate_ratio, draws=500) if len(times) else Interval(*[float("nan")] * 3)
    drafted, accepted, rounds = (float(group[name].sum()) for name in ("drafted", "accepted", "rounds"))
    return {
        **dict(zip(("category", "temperature", "k"), key, strict=True)),
        "tokens_per_s": speedup.value * group["n_decoded"].sum() / group["live_plain_s"].sum(),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": (group["tau"] * group["rounds"]).sum() / rounds,
        "speedup": speedup.value,
        "low": speedup.low,
        "high": speedup.high,
        "n_prompts": len(group),
    }


def replay_check(record: RunRecord) -> pd.DataFrame:
    """Live against replayed, for each K that ran live: tau and decoding speed, by temperature, over all prompts."""
    live, replay = (
        table[(table["category"] == ALL) & (table["k"] > 0)] for table in (k_sweep(record), replayed(record))
    )
    both = live.merge(replay, on=["temperature", "k"], suffixes=("", "_replayed"))
    ratios = {"tau_ratio": ("tau_replayed", "tau"), "speed_ratio": ("tokens_per_s_replayed", "tokens_per_s")}
    both = both.assign(**{name: both[over] / both[under] for name, (over, under) in ratios.items()})
    columns = ["tau", "tau_replayed", "tau_ratio", "tokens_per_s", "tokens_per_s_replayed", "speed_ratio"]
    return both[["temperature", "k", *columns]]


def sweep_time(record: RunRecord) -> pd.DataFrame:
    """Seconds of the replayed sweep and of the same grid live, and how many times less the replay takes."""
    replay = record.measurements["replay"]
    times = replay["live_s"] / replay["replay_s"]
    return pd.DataFrame([{"replay_s": replay["replay_s"], "live_s": replay["live_s"], "times_less": times}])


def turns(record: RunRecord) -> pd.DataFrame:
    """Acceptance and tau by turn of the conversation (greedy, the largest live K)."""
    rows = pd.DataFrame(record.measurements["turns"])
    sums = rows.groupby("turn").agg(
        conversations=("prompt_id", "count"), prompt_tokens=("prompt_tokens", "mean"), drafted=("drafted", "sum"),
        accepted=("accepted", "sum"), rounds=("rounds", "sum"), decoded=("n_decoded", "sum"),
    ).reset_index()  # fmt: skip
    tokens = sums["decoded"] + sums["conversations"]
    sums = sums.assign(
        acceptance_rate=sums["accepted"] / sums["drafted"].where(sums["drafted"] > 0), tau=tokens / sums["rounds"]
    )
    return sums.drop(columns=["decoded", "rounds"])


def verdict(best: pd.DataFrame, cost: pd.DataFrame) -> str:
    """What `best_k` and the verify cost come to, in words: for each content, or why speculation does not pay."""
    greedy = best[best["temperature"] == best["temperature"].min()]
    paying = greedy[greedy["verdict"] == "pays"]
    if paying.empty:
        top = greedy.loc[greedy["speedup"].idxmax()]
        width = int(top["k"]) + 1
        ratio = float(np.interp(width, cost["width"], cost["ratio"]))
        return (
            f"speculation does not pay here, because a forward of {width} tokens costs {ratio:.2f} plain steps, and a "
            f"round commits {top['tau']:.2f} tokens at the best K ({top['category']}, K = {top['k']}, speed-up "
            f"{top['speedup']:.2f})"
        )
    lines = [f"{r.category}: K = {r.k}, {r.speedup:.2f} ({r.low:.2f} to {r.high:.2f})" for r in paying.itertuples()]
    return "speculation pays: " + "; ".join(lines)


def best_k(sweep: pd.DataFrame) -> pd.DataFrame:
    """The fastest K > 0 of each category and temperature (machine, drafter), and whether it beats plain decoding.

    verdict: `pays` when the whole interval is above 1, `does not pay` when it is below, else `undecided`. The K was
    chosen on the same prompts, so its speed-up flatters a little: confirm it on others.
    """
    drafting = sweep[sweep["k"] > 0]
    by = [name for name in ("machine", "drafter", "category", "temperature") if name in sweep]
    at = drafting.groupby(by, sort=False)["speedup"].idxmax()
    best = drafting.loc[at, [*by, "k", "speedup", "low", "high", "tau"]].reset_index(drop=True)
    verdict = np.select([best["low"] > 1, best["high"] < 1], ["pays", "does not pay"], "undecided")
    return best.assign(verdict=verdict)


def verify_cost(record: RunRecord) -> pd.DataFrame:
    """The measured verify cost curve: width, median_s, ratio to width 1."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return pd.DataFrame(
        {"width": curve.widths, "median_s": curve.median_s, "ratio": [curve.ratio(n) for n in curve.widths]}
    )


def time_split(record: RunRecord) -> pd.DataFrame:
    """Share of decoding time spent drafting, verifying, rewinding and otherwise, and outside forwards, by K."""
    rows = []
    for k in sorted({g.k for g in record.generations}):
        group = [g for g in record.generations if g.k == k]
        total = sum(g.decode_s for g in group)
        parts = {n: sum(getattr(r, f"{n}_s") for g in group for r in g.rounds) for n in ("draft", "verify", "rewind")}
        forward = sum(r.forward_s for g in group for r in g.rounds)
        shares = {n: s / total for n, s in parts.items()}
        rows.append({"k": k, **shares, "other": 1 - sum(shares.values()), "overhead": 1 - forward / total})
    return pd.DataFrame(rows)


def _replayed_rounds(record: RunRecord) -> tuple[int, int]:
    """Greedy live runs whose tokens are the plain ones, and those of them that a replay counts right."""
    replay = {(r["prompt_id"], r["k"]): r for r in record.measurements["replay"]["rows"] if not r["temperature"]}
    live = [g for g in record.generations if g.k and not g.temperature]
    same = [g for g in live if g.token_ids == baseline_of(record.generations, g).token_ids]
    counted = [
        (len(g.rounds), g.total_draft_tokens, g.accepted_tokens)
        == tuple(replay[g.prompt_id, g.k][name] for name in ("rounds", "drafted", "accepted"))
        for g in same
    ]
    return len(counted), sum(counted)


def checks(record: RunRecord) -> pd.DataFrame:
    """What must hold on every machine: greedy runs equal the baseline or fork at a near-tie; the counts add up."""
    generations = record.generations
    greedy, plain = [g for g in generations if g.k and not g.temperature], [g for g in generations if g.k == 0]
    forks = record.measurements["forks"]
    per_round = all(
        len(r.committed_ids) <= r.n_accepted + 1 and r.n_accepted <= r.k for g in generations for r in g.rounds
    )
    rows = [
        ("greedy runs equal to the baseline, or forked at a near-tie", len(greedy),
         sum(g.token_ids == baseline_of(generations, g).token_ids for g in greedy) + sum(f["near_tie"] for f in forks)),
        ("runs of which every round commits at most n_accepted + 1 tokens", len(generations),
         len(generations) if per_round else 0),
        ("baselines with tau = 1", len(plain), sum(g.tau == 1 for g in plain)),
    ]  # fmt: skip
    if "replay" in record.measurements:
        rows.append(("greedy replays that make the rounds of their live run", *_replayed_rounds(record)))
    frame = pd.DataFrame(rows, columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])
