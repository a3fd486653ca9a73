"""What it costs to verify a tree of drafts on a recurrent layer: one masked solve against a run for every path."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import pandas as pd
import torch

from specnb.lm.tree import Tree
from specnb.ssm.delta_rule import recurrent, unit, verify

HEADS, KEY_HEADS, DIM = 32, 16, 128
"""One layer of Qwen3-Next-80B."""


def shapes(nodes: int) -> dict[str, Tree]:
    """A chain, a tree of four children each, and as many tokens side by side."""
    return {
        "chain": Tree.chain(nodes),
        "4-ary": Tree(tuple((i - 1) // 4 if i else -1 for i in range(nodes))),
        "star": Tree((-1,) * nodes),
    }


def compare(nodes: Sequence[int] = (4, 8, 16, 32), *, repeats: int = 5) -> pd.DataFrame:
    """Seconds (medians of `repeats`, interleaved) to verify trees on one layer of Qwen3-Next-80B's shapes, float32.

    Columns: tree, nodes, depth, solve_s (`delta_rule.verify`), paths_s (the serial rule along each path from the
    committed state), ratio, and max_error, the largest difference of the two outputs.
    """
    return pd.DataFrame([_row(kind, tree, repeats) for n in nodes for kind, tree in shapes(n).items()])


def _row(kind: str, tree: Tree, repeats: int) -> dict[str, object]:
    tokens, state = _inputs(len(tree))
    leaves = [i for i in range(len(tree)) if i not in tree.parents]
    outputs: dict[str, torch.Tensor] = {}

    def solve() -> None:
        outputs["solve"] = verify(*tokens, state, tree)

    def paths() -> None:
        out = torch.empty_like(outputs["solve"])
        for leaf in leaves:
            path = tree.path(leaf)
            out[:, path] = recurrent(*(x[:, path] for x in tokens), state)[0]
        outputs["paths"] = out

    solve_s, paths_s = _medians((solve, paths), repeats)
    error = (outputs["solve"] - outputs["paths"]).abs().max().item()
    depth = max(len(tree.path(leaf)) for leaf in leaves)
    return {
        "tree": kind, "nodes": len(tree), "depth": depth, "solve_s": solve_s, "paths_s": paths_s,
        "ratio": paths_s / solve_s, "max_error": error,
    }  # fmt: skip


def _medians(runs: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    took: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for run, times in zip(runs, took, strict=True):
                began = perf_counter()
                run()
                if repeat:  # the first is warm-up
                    times.append(perf_counter() - began)
    return [median(times) for times in took]


def _inputs(n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, g, beta of `n` tokens, as a layer makes them, and a state of some size."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    q, k = unit(normal(1, n, KEY_HEADS, DIM)) / DIM**0.5, unit(normal(1, n, KEY_HEADS, DIM))
    g, beta = -torch.rand(1, n, HEADS, generator=draw), torch.rand(1, n, HEADS, generator=draw)
    return [q, k, normal(1, n, HEADS, DIM), g, beta], 0.1 * normal(1, HEADS, DIM, DIM)
