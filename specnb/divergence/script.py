"""What a draft is fed, the same tokens in every set-up: a prompt, then rounds of which some tokens are taken back.

Set-ups can be compared token by token only if none of them chooses its own: the tokens are given, and the last feed of
every position is the text. `Along` is a trace in the order of its text: steps of one token and blocks come out alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from specnb.divergence.trace import Key, Trace
from specnb.errors import InputError


@dataclass(frozen=True)
class Feed:
    """One forward over `ids`, after which the last `forget` tokens of the state are taken back."""

    ids: tuple[int, ...]
    forget: int = 0


@dataclass(frozen=True)
class Script:
    """Feeds in their order. InputError for an empty one, and where more is taken back than is there."""

    feeds: tuple[Feed, ...]

    def __post_init__(self) -> None:
        held = 0
        for number, feed in enumerate(self.feeds):
            held += len(feed.ids) - feed.forget
            if not feed.ids or feed.forget < 0 or held < 1:
                raise InputError(f"feed {number} of {len(feed.ids)} tokens, {feed.forget} taken back, leaves {held}")
        if not self.feeds:
            raise InputError("a script needs at least one feed: the prompt")

    @classmethod
    def drafting(cls, text: Sequence[int], *, prompt: int, k: int, vocab_size: int, seed: int = 0) -> "Script":
        """`text` as drafted: a prompt, then rounds of `k` steps, in every other one all but the first wrong."""
        if not 0 < prompt < len(text) or k < 1:
            raise InputError(f"a prompt of {prompt} tokens and rounds of {k} do not fit a text of {len(text)}")
        rng = np.random.default_rng(seed)
        feeds, at, wrong = [Feed(tuple(text[:prompt]))], prompt, False
        while at < len(text):
            right = 1 if wrong else min(k, len(text) - at)
            drafts = [*text[at : at + right], *rng.integers(0, vocab_size, k - right if wrong else 0).tolist()]
            steps = [Feed((int(token),)) for token in drafts]
            steps[-1] = Feed(steps[-1].ids, len(drafts) - right)
            feeds += steps
            at, wrong = at + right, not wrong
        return cls(tuple(feeds))

    @classmethod
    def blocks(cls, text: Sequence[int], *, width: int) -> "Script":
        """`text` in blocks of `width`: the same tokens in other shapes."""
        return cls(tuple(Feed(tuple(text[at : at + width])) for at in range(0, len(text), width)))

    @cached_property
    def _held(self) -> list[tuple[int, int]]:
        """Of each token that is in the state at the end: the feed in which it came last, and its id."""
        held: list[tuple[int, int]] = []
        for number, feed in enumerate(self.feeds):
            held += [(number, token) for token in feed.ids]
            del held[len(held) - feed.forget :]
        return held

    last_feeds = cached_property(lambda script: np.asarray([number for number, _ in script._held]))
    """The feed in which each position of the text came last, `(tokens,)`; positions are counted, not asked for."""
    text = cached_property(lambda script: tuple(token for _, token in script._held))
    """The tokens that are in the state at the end."""

    @cached_property
    def starts(self) -> list[int]:
        """The position of the first token of each feed."""
        return list(accumulate((len(feed.ids) - feed.forget for feed in self.feeds), initial=0))[:-1]


@torch.no_grad()
def run(
    model: Module, script: Script, *, before: Callable[[Feed], None] = lambda feed: None,
    after: Callable[[Feed], None] = lambda feed: None,
) -> list[Tensor]:  # fmt: skip
    """Feed a transformers model with a croppable cache; the logits of each feed, `(tokens, vocab)`."""
    cache, logits, device = None, [], next(model.parameters()).device
    for feed in script.feeds:
        before(feed)
        ids = torch.tensor([feed.ids], device=device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        if cache is None:
            cache = getattr(out, "past_key_values", None)
            if not hasattr(cache, "crop") or not hasattr(cache, "layers"):
                lack = f"{type(model).__name__} gives no `past_key_values` that can be cropped"
                raise InputError(f"{lack}: write traces of it (specnb divergence capture) and compare those")
            for layer in cache.layers:  # layers of a window forget at once what a crop would need
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        logits.append(out.logits[0])
        if feed.forget:
            cache.crop(-feed.forget)
        after(feed)
    return logits


@dataclass(frozen=True)
class Along:
    """`values[key]`: `(tokens, …)`, the token axis first, and `axes[key]` where it was.

    `left_out` are keys without a token axis, of modules that some step did not run, or of shapes that differ between
    steps (masks). `gaps[key]`: positions of which nothing was made, with zeros in `values`.
    """

    text: tuple[int, ...]
    values: dict[Key, np.ndarray]
    axes: dict[Key, int]
    left_out: list[Key]
    gaps: dict[Key, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, script: Script) -> "Along":
        """From a trace, with full tensors, of a run of `script`: its step i is feed i, whatever position it thought."""
        seen = [step["length"] for step in trace.facts["steps"]]
        if seen != [len(feed.ids) for feed in script.feeds]:  # a service may feed otherwise than it is told
            raise InputError(f"the trace has {len(seen)} steps of {sum(seen)} tokens, the script other ones")
        along = cls(script.text, {}, {}, [], {})
        for key, rows in _tensors(trace).items():
            if (merged := _merged(rows, script)) is None:
                along.left_out.append(key)
                continue
            along.values[key], along.axes[key], missing = merged
            if len(missing):
                along.gaps[key] = missing
        return along


class _Row(NamedTuple):
    """A tensor of a step, kept in full or not, and its token axis."""

    step: int
    axis: int
    full: np.ndarray | None


def _tensors(trace: Trace) -> dict[Key, list[_Row]]:
    """The rows of each tensor, in the order they were written."""
    tensors: dict[Key, list[_Row]] = {}
    columns = ("module", "call", "role", "name", "row", "step", "token_axis")
    for *key, row, step, axis in zip(*(trace.tensors[column].tolist() for column in columns), strict=True):
        if (key := Key(*key)).role != "state":
            tensors.setdefault(key, []).append(_Row(step, axis, trace.array(row, "full")))
    return tensors


def _merged(rows: list[_Row], script: Script) -> tuple[np.ndarray, int, np.ndarray] | None:
    """The values of each position in the step that fed it last, their axis, and the positions without; None where they
    do not fit. Fewer tokens than a step was fed are its last ones."""
    last, parts, at = script.last_feeds, [], []
    if not {row.step for row in rows}.issuperset(last.tolist()) or any(row.full is None for row in rows):
        return None
    if len({row.axis for row in rows}) > 1 and {row.full.ndim for row in rows} == {4}:
        # of as many tokens as heads one may have been taken for the other: the other steps tell
        axes = {row.axis for row in rows if row.full.shape[1] != row.full.shape[2]}
        rows = [row._replace(axis=min(axes) if len(axes) == 1 else -1) for row in rows]
    if any(row.axis < 0 for row in rows):
        return None
    for row in rows:
        whole = np.moveaxis(row.full, row.axis, 0)
        earlier = max(len(script.feeds[row.step].ids) - len(whole), 0)
        positions = script.starts[row.step] + earlier + np.arange(len(whole))
        kept = positions < len(last)
        kept[kept] = last[positions[kept]] == row.step
        parts.append(whole[kept])
        at.append(positions[kept])
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    values, places = np.concatenate(parts), np.concatenate(at)
    merged = np.zeros((len(last), *values.shape[1:]), values.dtype)
    merged[places] = values
    missing = np.setdiff1d(np.arange(len(last)), places)
    once = len(places) + len(missing) == len(last)
    return (merged, rows[0].axis, missing) if once and len(places) else None
