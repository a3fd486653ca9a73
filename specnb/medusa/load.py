"""From a checkpoint of heads to a drafter for an opened target, and the tree that it drafts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specnb.errors import InputError, LoadError
from specnb.lm.base import LanguageModel
from specnb.lm.bounded_json import Node, read_json
from specnb.medusa.tree import TreePlan, checked_accuracy, grow

if TYPE_CHECKING:
    from specnb.medusa.drafter import HeadsDrafter

CHAIN, AUTO = "chain", "auto"
TREE_HELP = f"{CHAIN}, {AUTO}, or a number of nodes"
MAX_CARD_BYTES, MAX_CARD_VALUES = 32 << 20, 2_000_000
"""Bounds of the JSON beside a checkpoint, of which the training's log is the most."""

PUBLISHED = np.diff(
    [
        [0.560, 0.672, 0.727, 0.760, 0.780],
        [0.316, 0.424, 0.485, 0.528, 0.563],
        [0.201, 0.288, 0.348, 0.383, 0.417],
        [0.147, 0.225, 0.274, 0.311, 0.340],
        [0.118, 0.187, 0.235, 0.272, 0.300],
    ],
    axis=1,
    prepend=0.0,
)
"""Marginal accuracies `(heads, ranks)` of Medusa on Vicuna 7B (assets/medusa_acc.csv of its repository, Apache-2.0)."""

Tree = str | int | TreePlan


def heads_drafter(
    target: LanguageModel, *, heads_checkpoint: str | Path | None = None, tree: Tree = CHAIN, translate: str = "auto"
) -> "HeadsDrafter":
    """Trained heads that draft for `target`; `heads_checkpoint` is a path, or the name of shipped ones.

    Without it the shipped heads are taken that were trained on this target. `tree` is "chain", a number of nodes, a
    `TreePlan`, or "auto", which measures what trees cost here and takes the one that pays (`best_tree`).
    `translate` is for draft models: heads draft the target's own tokens. Raises InputError,
    also for what the loader finds wrong.
    """
    from specnb.medusa.best_tree import with_best_tree
    from specnb.medusa.checkpoint import load_trained_heads
    from specnb.medusa.drafter import HeadsDrafter, require_hidden

    size = tree_size(tree)
    require_hidden(target)
    path = fitting_checkpoint(target) if heads_checkpoint is None else heads_checkpoint
    try:
        heads, report = load_trained_heads(path, target.network)
    except LoadError as error:  # wrong heads are a mistake; a fallback to plain decoding would hide it
        raise InputError(str(error)) from error
    accuracy = accuracy_of(report.path)
    plan, findings = _plan(size, heads.config.n_heads, accuracy)
    drafter = HeadsDrafter(target, heads, plan, accuracy=accuracy, findings=(*report.findings, *findings))
    return with_best_tree(drafter) if tree == AUTO else drafter


def tree_size(tree: Tree) -> int | TreePlan:
    """What a user wrote as `--tree`, checked: a plan, a number of nodes, 0 for a chain and for auto."""
    if isinstance(tree, TreePlan) or tree in (CHAIN, AUTO):
        return tree if isinstance(tree, TreePlan) else 0
    try:
        nodes = int(tree)
    except (TypeError, ValueError):
        nodes = 0
    if nodes < 1 or isinstance(tree, float):
        raise InputError(f"a tree is {TREE_HELP} (1 or more), got {str(tree)[:80]!r}")
    return nodes


def accuracy_of(checkpoint: Path) -> np.ndarray | None:
    """The marginal accuracies `(heads, ranks)` that training left beside the weights; None where it left none.

    They stand in training.json under `accuracy`, a list for each head. Raises InputError for what are none.
    """
    card = training_card(checkpoint)
    found = card and card.values.get("accuracy")
    if found is None:
        return None
    try:
        return checked_accuracy(found)
    except InputError as error:
        raise InputError(f"{card.path}: {error}; train again, or remove `accuracy`") from error


def training_card(checkpoint: Path) -> Node | None:
    """What training left beside the weights, training.json; `checkpoint` is the folder or a file in it.

    None where there is none. Raises InputError for what is no such JSON, or too large.
    """
    from specnb.medusa.checkpoint import TRAINING_FILE

    card = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / TRAINING_FILE
    return read_json(card, MAX_CARD_BYTES, MAX_CARD_VALUES) if card.exists() else None


def _plan(size: int | TreePlan, n_heads: int, accuracy: np.ndarray | None) -> tuple[TreePlan | None, tuple[str, ...]]:
    """The plan that `tree_size` found, None for a chain; and what a reader of the result should know of it."""
    if isinstance(size, TreePlan):
        return size, ()
    if not size:
        return None, ()
    if accuracy is not None:
        return grow(accuracy[:n_heads], size)[0], ()
    said = "these heads came without accuracies: their tree is grown from those published for Medusa on Vicuna 7B"
    return grow(PUBLISHED[:n_heads], size)[0], (said,)


def fitting_checkpoint(target: LanguageModel) -> Path:
    """The shipped heads that were trained on the target's very weights, Medusa's before others."""
    from specnb.medusa.backbone import digest
    from specnb.medusa.checkpoint import shipped

    known = shipped()
    wanted = digest(target.network)
    kinds = {name: kind for name, folder in known.items() if (kind := _kind_if_made_for(folder, wanted))}
    if not kinds:
        raise InputError(
            f"no shipped heads were trained on {target.name}: give --heads-checkpoint PATH, or a target of one of "
            f"{_listed(known)}"
        )
    return known[min(kinds, key=lambda name: (kinds[name] != "medusa", name))]


def _kind_if_made_for(folder: Path, backbone: str) -> str:
    config = read_json(folder / "config.json", MAX_CARD_BYTES, MAX_CARD_VALUES)
    return (config.text("kind") or "") if config.text("backbone") == backbone else ""


def _listed(known: Mapping[str, Path]) -> str:
    return ", ".join(sorted(known)) or "data/heads, which holds none"
