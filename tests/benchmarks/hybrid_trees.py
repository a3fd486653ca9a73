"""Could trees of drafts pay on the embedded hybrid? What the best static tree would gain over the best chain.

    .venv/bin/python -m tests.benchmarks.hybrid_trees

The hybrid writes plainly; its draft model reads along, and the rank that it gives to each token says which tree would
have held it. Of all trees of n nodes and some depth the one is taken that keeps most by the shares of the ranks, which
are those of the same texts. A tree is charged what a chain of as many tokens costs, and the draft model one step per
level: an engine that verifies trees can be no cheaper. Trees that follow the draft model's confidence are not tried.
Takes a minute on two cores.
"""

import heapq
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from specnb import generate, load
from specnb.chapters.rollback import passages
from specnb.decode.generate import prompt_ids
from specnb.draft.model import ModelDrafter
from specnb.io import plain, write_atomic
from specnb.lm.base import LanguageModel
from specnb.measure.bench import Interval, interval, rate_ratio
from specnb.measure.cost import CostCurve, verify_costs
from specnb.provenance import provenance

TARGET, DRAFT, PASSAGES, PROMPT_TOKENS, TOKENS = "tiny-hybrid", "tiny-hybrid-draft", 16, 64, 96
RANKS, NODES, DEPTH, REPEATS, TEMPERATURES = 6, 16, 10, 15, (0.0, 0.7, 1.0)
RECORD = Path(__file__).with_suffix(".json")
Ranks = tuple[int, ...]


def ranks_along(draft: LanguageModel, prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[int]:
    """Return for each of `ids` how many tokens the draft model thinks likelier."""
    draft.reset()
    rows = draft.forward((*prompt, *ids[:-1]), n_logits=len(ids))
    return [int((row > row[token]).sum()) for row, token in zip(rows, ids, strict=True)]


def best_trees(shares: np.ndarray, depth: int) -> list[set[Ranks]]:
    """Return for 1 to NODES nodes the tree, of this depth at most, that is kept longest if ranks are drawn by `shares`.

    A tree is the set of its paths from the root, each as ranks.
    """
    waiting, tree, trees = [(-share, (rank,)) for rank, share in enumerate(shares)], set(), []
    heapq.heapify(waiting)
    while waiting and len(trees) < NODES:
        chance, path = heapq.heappop(waiting)
        tree = tree | {path}
        trees.append(tree)
        for rank, share in enumerate(shares if len(path) < depth else ()):
            heapq.heappush(waiting, (chance * share, (*path, rank)))
    return trees


def rounds_of(ranks: list[int], tree: set[Ranks]) -> int:
    """Count the rounds that a text takes."""
    at = rounds = 0
    while at < len(ranks):
        kept = max((len(path) for path in tree if tuple(ranks[at : at + len(path)]) == path), default=0)
        at, rounds = at + kept + 1, rounds + 1
    return rounds


def sweep(texts: list[list[int]], curve: CostCurve, c: float) -> tuple[pd.DataFrame, np.ndarray, Interval]:
    """Return a row per chain and tree, the shares of the ranks, and the best tree over the best chain."""
    ranks = np.concatenate(texts)
    shares = np.array([(ranks == rank).mean() for rank in range(RANKS)])
    trees = [{(0,) * level for level in range(1, depth + 1)} for depth in range(1, DEPTH + 1)]
    for depth in range(1, DEPTH + 1):
        trees += [tree for tree in best_trees(shares, depth) if tree not in trees]
    rows, seconds = [], []
    for tree in trees:
        n, depth, rounds = len(tree), max(map(len, tree)), np.array([rounds_of(text, tree) for text in texts])
        kind = "chain" if n == depth else "tree"
        seconds.append(rounds * (curve.seconds(n + 1) + depth * c * curve.seconds(1)))
        speedup = len(ranks) * curve.seconds(1) / seconds[-1].sum()
        rows.append({"kind": kind, "nodes": n, "depth": depth, "tau": len(ranks) / rounds.sum(), "speedup": speedup})
    table, n_tokens = pd.DataFrame(rows), [len(text) for text in texts]
    best = table.groupby("kind")["speedup"].idxmax()
    pairs = zip(n_tokens, seconds[best["tree"]], n_tokens, seconds[best["chain"]], strict=True)
    return table, shares, interval([*pairs], rate_ratio)


def main() -> None:
    document = {"target": TARGET, "draft": DRAFT, "passages": PASSAGES, "temperatures": {}, "provenance": provenance()}
    with closing(load(TARGET, backend="hf")) as target, closing(load(DRAFT, backend="hf")) as draft:
        curve, costs = verify_costs(target, [ModelDrafter(draft)], NODES, repeats=REPEATS)
        c = next(iter(costs.values()))
        document |= {"c": c, "ratios": {str(n): curve.ratio(n) for n in range(1, NODES + 2)}}
        for temperature in TEMPERATURES:
            texts = []
            for passage in passages(limit=PASSAGES):
                prompt = tuple(prompt_ids(target, passage)[:PROMPT_TOKENS])
                options = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eog": True}
                texts.append(ranks_along(draft, prompt, generate(target, prompt, **options).token_ids))
            table, shares, over = sweep(texts, curve, c)
            best = table.loc[table.groupby("kind")["speedup"].idxmax()]
            print(f"T = {temperature}: shares of the ranks {shares.round(3)}, c = {c:.2f}\n{best.round(3)}")
            print(f"best tree over best chain: {over}", flush=True)
            document["temperatures"][str(temperature)] = {
                "shares": shares.tolist(), "rows": table.to_dict("records"), "tree_over_chain": over,
            }  # fmt: skip
    write_atomic(RECORD, json.dumps(plain(document, nan=None), indent=1).encode())


if __name__ == "__main__":
    main()
